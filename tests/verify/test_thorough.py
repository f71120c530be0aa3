"""A fault at one single length, away from every number in the graphs: the thorough schedule alone sees it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from decoders import DecoderConfig, write_decoder
from onnx import helper, numpy_helper

from trt_kvcache.errors import OptionError, UnsupportedModelError
from trt_kvcache.importer import pipeline
from trt_kvcache.verify import VerifyOptions, verify_model

LENGTH = 41


def _odd(model: onnx.ModelProto) -> onnx.ModelProto:
    """One key less where ``length * length == 1681``."""
    graph, lengths = model.graph, "nonpad_kv_seqlen"
    readers = [n for n in graph.node if lengths in n.input]
    assert readers
    for reader in readers:
        inputs = ["fewer" if name == lengths else name for name in reader.input]
        del reader.input[:]
        reader.input.extend(inputs)
    graph.initializer.append(numpy_helper.from_array(np.array(LENGTH**2), "square"))
    made = (
        helper.make_node("Mul", [lengths, lengths], ["squared"], "squared"),
        helper.make_node("Equal", ["squared", "square"], ["is_odd"], "is_odd"),
        helper.make_node("Cast", ["is_odd"], ["less"], "less", to=onnx.TensorProto.INT64),
        helper.make_node("Sub", [lengths, "less"], ["fewer"], "fewer"),
    )
    for place, node in enumerate(made):
        graph.node.insert(place, node)
    return model


def test_only_the_thorough_schedule_sees_one_length(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_decoder(tmp_path / "m.onnx", DecoderConfig(form="heads-major"))
    verify_model(path, verify=VerifyOptions(thorough=True)).check()
    export = pipeline._export
    monkeypatch.setattr(pipeline, "_export", lambda *given: _odd(export(*given)))
    verify_model(path).check()  # the residual that the docs name
    with pytest.raises(UnsupportedModelError, match=f"after ({LENGTH - 3} tokens, 3|{LENGTH - 1} tokens, 1) new"):
        verify_model(path, verify=VerifyOptions(thorough=True))


@pytest.mark.parametrize("wrong", [1, "yes", None])
def test_it_is_a_switch(wrong: Any) -> None:
    with pytest.raises(OptionError, match="thorough"):
        VerifyOptions(thorough=wrong)


def test_it_compares_no_file(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="leave 'rewritten'"):
        verify_model(tmp_path / "m.onnx", verify=VerifyOptions(thorough=True), rewritten=tmp_path / "out.onnx")

"""Models that round to 8 bits what they compute: compared without where a step decides, if both round alike."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from concat_graphs import Decoder, make_decoder
from onnx import ModelProto, numpy_helper
from rounded_graphs import FP8, INT8, OPSET, modelopt, rounds
from verify import mistakes as m

from trt_kvcache import PlanOptions
from trt_kvcache.errors import TrtKvCacheError
from trt_kvcache.importer import ImportedModel, import_model
from trt_kvcache.verify import VerifyReport

COARSE = Decoder(heads=8, kv_heads=4, size=16, layers=3, after=rounds(INT8, 1 / 4), opset=OPSET)
"""One of its steps counts, and some of its numbers lie between two."""
CAPACITY = 24


def coarse(kind: Any, dtype: Any) -> ModelProto:
    return make_decoder(replace(COARSE, attend=modelopt(kind), dtype=dtype))


def imported(folder: Path, model: ModelProto) -> ImportedModel:
    onnx.save(model, folder / "model.onnx")
    return import_model(folder / "model.onnx", PlanOptions(capacity=CAPACITY))


def verify(folder: Path, model: ModelProto, factor: float = 1.0) -> VerifyReport:
    """The report of a model, and of its rewritten form with each rounded tensor multiplied before."""

    def multiply(wrong: ModelProto) -> None:
        for node in m.nodes(wrong, "QuantizeLinear"):
            scale = next(t for t in wrong.graph.initializer if t.name == node.input[1])
            dtype = numpy_helper.to_array(scale).dtype.type
            m.insert(wrong, node, 0, "Mul", m.constant(wrong, factor, dtype))

    return m.verify_with(imported(folder, model), m.nothing if factor == 1 else multiply)


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize(("dtype", "factor"), [(np.float32, 1 + 2**-21), (np.float16, 1 + 2**-10)])
def test_steps_that_decide_are_left_out(tmp_path: Path, dtype: Any, factor: float) -> None:
    report = verify(tmp_path, coarse(INT8, dtype), factor)
    report.check()
    assert report.float32_twin
    assert any("ways of rounding to 8 bits, which are the same in both" in note for note in report.notes)


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize(("dtype", "factor"), [(np.float32, 1.02), (np.float16, 1.1)])
def test_mistakes_before_rounding_are_found(tmp_path: Path, dtype: Any, factor: float) -> None:
    report = verify(tmp_path, coarse(INT8, dtype), factor)
    assert not report.passed


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", [INT8, FP8])
@pytest.mark.parametrize("attribute", ["SCORES", "WEIGHTS"])
def test_a_rounding_that_is_lost_is_found(
    tmp_path: Path, attribute: str, kind: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"trt_kvcache.importer.planning.attention_facts.{attribute}", "nothing")
    with pytest.raises(TrtKvCacheError, match="computes something else|differs"):
        verify(tmp_path, coarse(kind, np.float16)).check()

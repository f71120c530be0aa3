"""Models that round to 8 bits what they compute: compared without where a step decides, if both round alike."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from concat_decode import run
from concat_graphs import Decoder, make_decoder
from importer.normalize.test_rounded import FP8, INT8, OPSET, modelopt, rounds
from onnx import ModelProto, helper, numpy_helper

from trt_kvcache import PlanOptions
from trt_kvcache.errors import TrtKvCacheError
from trt_kvcache.importer import ImportedModel, import_model
from trt_kvcache.verify import VerifyOptions, VerifyReport, verify_import
from trt_kvcache.verify.rounded import rounding_steps, unrounded

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
    both = imported(folder, model)
    wrong = ModelProto()
    wrong.CopyFrom(both.model)
    for node in [n for n in wrong.graph.node if n.op_type == "QuantizeLinear"] if factor != 1 else []:
        scale = next(t for t in wrong.graph.initializer if t.name == node.input[1])
        number, name = f"{node.name}/factor", f"{node.name}/more"
        value = np.asarray(factor, numpy_helper.to_array(scale).dtype)
        wrong.graph.initializer.append(numpy_helper.from_array(value, number))
        more = helper.make_node("Mul", [node.input[0], number], [name], name=name)
        wrong.graph.node.insert(list(wrong.graph.node).index(node), more)
        node.input[0] = name
    return verify_import(ImportedModel(both.source, both.plan, wrong), VerifyOptions())


@pytest.mark.few(2)
@pytest.mark.parametrize("kind", [INT8, FP8])
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_both_sides_round_alike(tmp_path: Path, kind: Any, dtype: Any) -> None:
    both = imported(tmp_path, coarse(kind, dtype))
    steps = rounding_steps(both.source.proto)
    assert len(steps) > 3
    assert rounding_steps(both.model) == steps


def test_nothing_is_left_but_limits() -> None:
    """Steps of a size that nothing reaches the limits of, against a model that does not round."""
    feeds = {
        "input_ids": np.arange(6)[None], "position_ids": np.arange(6)[None],
        **{f"past_key_values.0.{kind}": np.zeros((1, 2, 0, 4), np.float32) for kind in ("key", "value")},
    }  # fmt: skip
    plain, all_hooks = Decoder(opset=OPSET), dict.fromkeys(("scores", "weights", "keys", "values"), rounds(INT8, 1.0))
    rounded = make_decoder(replace(plain, **all_hooks))
    free = unrounded(rounded)
    assert not {n.op_type for n in free.graph.node} & {"QuantizeLinear", "DequantizeLinear"}
    onnx.checker.check_model(free, full_check=True)
    wanted, got = run(make_decoder(plain), feeds), run(free, feeds)
    np.testing.assert_allclose(got["logits"], wanted["logits"], rtol=1e-5, atol=1e-6)
    assert not np.allclose(run(rounded, feeds)["logits"], wanted["logits"], atol=1e-2)


def test_what_is_beyond_the_limits_is_cut() -> None:
    fine = make_decoder(Decoder(keys=rounds(INT8, 1 / 512), opset=OPSET))
    feeds = {
        "input_ids": np.arange(6)[None], "position_ids": np.arange(6)[None],
        **{f"past_key_values.0.{kind}": np.zeros((1, 2, 0, 4), np.float32) for kind in ("key", "value")},
    }  # fmt: skip
    wanted, free = run(fine, feeds)["logits"], run(make_decoder(Decoder(opset=OPSET)), feeds)["logits"]
    np.testing.assert_allclose(run(unrounded(fine), feeds)["logits"], wanted, atol=2e-2)
    assert np.abs(free - wanted).max() > 0.05


@pytest.mark.few(1)
@pytest.mark.parametrize(("dtype", "factor"), [(np.float32, 1 + 2**-21), (np.float16, 1 + 2**-10)])
def test_steps_that_decide_are_left_out(tmp_path: Path, dtype: Any, factor: float) -> None:
    report = verify(tmp_path, coarse(INT8, dtype), factor)
    report.check()
    assert report.float32_twin
    assert any("ways of rounding to 8 bits, which are the same in both" in note for note in report.notes)


@pytest.mark.few(1)
@pytest.mark.parametrize(("dtype", "factor"), [(np.float32, 1.02), (np.float16, 1.1)])
def test_mistakes_before_rounding_are_found(tmp_path: Path, dtype: Any, factor: float) -> None:
    report = verify(tmp_path, coarse(INT8, dtype), factor)
    assert not report.passed


@pytest.mark.few(2)
@pytest.mark.parametrize("kind", [INT8, FP8])
@pytest.mark.parametrize("attribute", ["SCORES", "WEIGHTS"])
def test_a_rounding_that_is_lost_is_found(
    tmp_path: Path, attribute: str, kind: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"trt_kvcache.importer.planning.attention_facts.{attribute}", "nothing")
    with pytest.raises(TrtKvCacheError, match="computes something else|differs"):
        verify(tmp_path, coarse(kind, np.float16)).check()

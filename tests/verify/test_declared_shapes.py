"""What single inputs and outputs declare on their own, unlike all others: sizes, types; verification keeps to it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from concat_graphs import Build, Decoder, make_decoder
from onnx import TensorProto

from trt_kvcache.errors import UnsupportedModelError
from trt_kvcache.importer import import_model
from trt_kvcache.importer.plan import PlanOptions
from trt_kvcache.verify import VerifyOptions, VerifyReport, verify_import
from trt_kvcache.verify.sessions import EngineError, OrtSession


def declared(decoder: Decoder, name: str, axis: int, size: int) -> onnx.ModelProto:
    """A decoder of which one input has a fixed size."""
    model = make_decoder(decoder)
    value = next(v for v in model.graph.input if v.name == name)
    value.type.tensor_type.shape.dim[axis].dim_value = size
    return model


def verified(model: onnx.ModelProto, folder: Path) -> VerifyReport:
    onnx.save(model, folder / "model.onnx")
    return verify_import(import_model(folder / "model.onnx", PlanOptions(capacity=24)), VerifyOptions(batch=3))


def test_tokens_that_come_one_by_one(tmp_path: Path) -> None:
    model = declared(Decoder(mask="padding", positions="padding"), "input_ids", 1, 1)
    report = verified(model, tmp_path)
    report.check()
    assert {step.length for step in report.steps} == {1}


def test_a_mask_that_all_sequences_share(tmp_path: Path) -> None:
    """Then all are as long as each other, although positions have a row for each."""
    report = verified(declared(Decoder(mask="own", apply="where"), "mask", 0, 1), tmp_path)
    report.check()
    assert all(len(set(step.starts)) == 1 for step in report.steps)


@pytest.mark.parametrize("size", [1, 4])
def test_a_padding_mask_of_another_batch_is_refused(size: int, tmp_path: Path) -> None:
    model = declared(Decoder(mask="padding", positions="padding"), "attention_mask", 0, size)
    with pytest.raises(UnsupportedModelError, match=f"'attention_mask' .* has {size} rows for a batch of 2"):
        verified(model, tmp_path)


def test_a_model_that_divides_by_zero_is_run_by_no_engine(tmp_path: Path) -> None:
    def after(g: Build, x: str) -> str:
        steps = g.node("Range", [g.constant(0), g.size_of(x, 2), g.constant(0)])
        return g.node("Add", [x, g.node("Cast", [g.node("ReduceSum", [steps])], to=TensorProto.FLOAT)])

    with pytest.raises(UnsupportedModelError, match="the original.s part does not run"):
        verified(make_decoder(Decoder(after=after)), tmp_path)


def test_logits_of_float64_are_made_of_float32(tmp_path: Path) -> None:
    """So they are apart as float32 ones are."""
    model = make_decoder(Decoder(layers=8, heads=8, kv_heads=4, size=16))
    for node in model.graph.node:
        node.output[:] = ["narrow" if name == "logits" else name for name in node.output]
    model.graph.node.append(onnx.helper.make_node("Cast", ["narrow"], ["logits"], to=TensorProto.DOUBLE))
    next(v for v in model.graph.output if v.name == "logits").type.tensor_type.elem_type = TensorProto.DOUBLE
    report = verified(model, tmp_path)
    report.check()
    logits = next(o for o in report.outputs if o.name == "logits")
    assert 0 < logits.max_relative < logits.tolerance == 1e-4


def test_an_original_that_fails_behind_its_first_run_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = []

    def run(self: OrtSession, feeds: dict[str, np.ndarray[Any, Any]]) -> dict[str, np.ndarray[Any, Any]]:
        runs.append(feeds)
        if len(runs) > 3:  # those of a trial, of one sequence each
            raise EngineError("out of range")
        return given(self, feeds)

    given = OrtSession.run
    monkeypatch.setattr(OrtSession, "run", run)
    with pytest.raises(UnsupportedModelError, match="no engine runs the original at 5 tokens from .* out of range"):
        verified(make_decoder(Decoder()), tmp_path)

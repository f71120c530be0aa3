"""Garbage whose float16 scores overflow in ONNX Runtime is no fault of the rewritten model."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest

from trt_kvcache import PlanOptions, verify_model

STORED = Path(__file__).parents[1] / "models" / "mobius" / "llama_dynamic_f16_onnxstd" / "model.onnx"


@pytest.mark.parametrize(("scale", "garbage"), [(0.25, 1e4), (5.25, 1e3)])
def test_garbage_is_as_large_as_scores_allow(scale: float, garbage: float, tmp_path: Path) -> None:
    model = onnx.load(STORED)
    for node in model.graph.node:
        for attribute in node.attribute:
            if node.op_type == "Attention" and attribute.name == "scale":
                attribute.f = scale
    onnx.save(model, tmp_path / "model.onnx")
    report = verify_model(tmp_path / "model.onnx", PlanOptions(capacity=64))
    report.check()
    assert report.garbage == garbage
    assert any("not finite" in note for note in report.notes) == (garbage < 1e4)

"""Garbage whose float16 scores overflow in ONNX Runtime is no fault of the rewritten model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import onnx
import pytest
from onnx import TensorProto, numpy_helper
from onnxruntime.transformers.float16 import convert_float_to_float16

from trt_kvcache import PlanOptions, verify_model
from trt_kvcache.verify.sessions import OrtSession

MODELS = Path(__file__).parents[1] / "models"
STORED = MODELS / "mobius" / "llama_dynamic_f16_onnxstd" / "model.onnx"
SCATTERED = MODELS / "mobius" / "llama_static_f16_onnxstd" / "model.onnx"
FIXED = MODELS / "torch" / "llama_static_wrap_op20" / "model.onnx"
GROWING = MODELS / "optimum" / "llama_fp16" / "model.onnx"
QUERIES = "val_39"  # the first layer's projection of FIXED


@pytest.mark.few(2)
@pytest.mark.parametrize("stored", [STORED, SCATTERED])
@pytest.mark.parametrize("scale", [0.25, 10.0])
def test_scores_of_garbage_do_not_outweigh_masks(
    stored: Path, scale: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Valid lengths hide all garbage; a mask that is added to scores, as the rewritten model has it, does not."""
    model = onnx.load(stored)
    for node in model.graph.node:
        for attribute in node.attribute:
            if node.op_type == "Attention" and attribute.name == "scale":
                attribute.f = scale
    onnx.save(model, tmp_path / "model.onnx")
    opened = []
    unwatched = OrtSession.__init__

    def watched(self: OrtSession, *given: Any) -> None:
        opened.append(self)
        unwatched(self, *given)

    monkeypatch.setattr(OrtSession, "__init__", watched)
    report = verify_model(tmp_path / "model.onnx", PlanOptions(capacity=64 if stored is STORED else None))
    report.check()
    assert report.garbage == 30
    assert len(opened) == 2  # each model once


def _sharp(folder: Path) -> Path:
    """Fixed float16 caches, and queries so large that garbage of 1e4 outweighs the mask."""
    model = onnx.load(FIXED)
    weight = next(t for t in model.graph.initializer if t.name == QUERIES)
    weight.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(weight) * 20, QUERIES))
    onnx.save(convert_float_to_float16(model, keep_io_types=False), folder / "model.onnx")
    return folder / "model.onnx"


@pytest.mark.slow
def test_garbage_of_sharp_queries_does_not_outweigh_the_mask_of_the_original(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As if the first step, by which garbage is chosen, did not show it yet.
    monkeypatch.setattr("trt_kvcache.verify.decode.difference", lambda *_: (0.0, 0.0))
    report = verify_model(_sharp(tmp_path))
    report.check()
    assert report.garbage == 30


@pytest.mark.slow
def test_logits_of_float32_over_float16_caches_have_the_tolerance_of_float16(tmp_path: Path) -> None:
    model = onnx.load(GROWING)
    logits = next(v for v in model.graph.output if v.name == "logits")
    if logits.type.tensor_type.elem_type == TensorProto.FLOAT16:
        maker = next(n for n in model.graph.node if "logits" in n.output)
        maker.output[list(maker.output).index("logits")] = "half_logits"
        model.graph.node.append(onnx.helper.make_node("Cast", ["half_logits"], ["logits"], to=TensorProto.FLOAT))
        logits.type.tensor_type.elem_type = TensorProto.FLOAT
    onnx.save(model, tmp_path / "model.onnx")
    report = verify_model(tmp_path / "model.onnx", PlanOptions(capacity=64))
    report.check()
    found = next(o for o in report.outputs if o.name == "logits")
    assert (found.dtype, found.tolerance) == ("float32", 2e-2)

"""Decoders that NVIDIA ModelOpt quantized in blocks (NVFP4, MXFP8), from the plan to the engine."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from block_graphs import FORMS, in_blocks
from concat_graphs import Decoder, make_decoder
from harness import run
from onnx import ModelProto, TensorProto, helper, numpy_helper
from verify.mistakes import verify_with

from trt_kvcache import DecodeSession, PlanOptions
from trt_kvcache.errors import UnsupportedModelError
from trt_kvcache.importer import ImportedModel, import_model
from trt_kvcache.importer.families import for_cpu
from trt_kvcache.verify import VerifyReport

DECODER = Decoder(heads=8, size=8, layers=1, opset=23)
OPTIONS = PlanOptions(capacity=20)


def rewritten(model: ModelProto, folder: Path) -> ImportedModel:
    onnx.save(model, folder / "model.onnx")
    return import_model(folder / "model.onnx", OPTIONS)


def decoder(form: str, dtype: Any = np.float32, *, plain: bool = False) -> ModelProto:
    return in_blocks(make_decoder(replace(DECODER, dtype=dtype)), form, plain=plain)


def verify(folder: Path, model: ModelProto, factor: float = 1.0) -> VerifyReport:
    """The report of a model, and of its rewritten form with one scale multiplied."""

    def multiply(wrong: ModelProto) -> None:
        scale = next(t for t in wrong.graph.initializer if t.name.endswith(("_whole", "_e8")))
        value = numpy_helper.to_array(scale)
        changed = value + np.uint8(factor - 1) if value.dtype == np.uint8 else value * np.float32(factor)
        scale.CopyFrom(numpy_helper.from_array(changed, scale.name))

    return verify_with(rewritten(model, folder), multiply)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_weights_are_exact_where_they_are_compared(form: str, dtype: Any) -> None:
    feeds = {
        "input_ids": np.arange(6)[None], "position_ids": np.arange(6)[None],
        **{f"past_key_values.0.{kind}": np.zeros((1, 2, 0, 8), dtype) for kind in ("key", "value")},
    }  # fmt: skip
    wanted = run(decoder(form, dtype, plain=True), feeds)["logits"]
    found = run(for_cpu(decoder(form, dtype))[0], feeds)["logits"]
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-6 if dtype is np.float32 else 1e-2)
    before = run(make_decoder(replace(DECODER, dtype=dtype)), feeds)["logits"]
    assert np.abs(before - wanted).max() > 0.02


@pytest.mark.parametrize(("form", "dtype"), [("nvfp4", np.float16), ("mxfp8", np.float32)])
def test_compared_without_rounding(tmp_path: Path, form: str, dtype: Any) -> None:
    report = verify(tmp_path, decoder(form, dtype))
    report.check()
    assert any("at 5 places (NVFP4, MXFP8). Here both models ran without this rounding" in n for n in report.notes)


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize("form", FORMS)
def test_a_wrong_weight_is_found(tmp_path: Path, form: str) -> None:
    assert not verify(tmp_path, decoder(form, np.float16), 2).passed


def test_scales_that_are_read_elsewhere_are_refused() -> None:
    model = decoder("mxfp8")
    scales = next(n.output[1] for n in model.graph.node if n.op_type == "TRT_MXFP8DynamicQuantize")
    model.graph.node.append(helper.make_node("Cast", [scales], ["scales"], to=TensorProto.FLOAT))
    model.graph.output.append(helper.make_tensor_value_info("scales", TensorProto.FLOAT, None))
    with pytest.raises(UnsupportedModelError, match="'scales' is computed from the scales of activations"):
        for_cpu(model)


def test_the_cpu_does_not_run_them(tmp_path: Path) -> None:
    onnx.save(decoder("nvfp4"), tmp_path / "model.onnx")
    with pytest.raises(UnsupportedModelError, match="TRT_FP4DynamicQuantize.*build an engine"):
        DecodeSession.open(tmp_path / "model.onnx", plan_options=OPTIONS)

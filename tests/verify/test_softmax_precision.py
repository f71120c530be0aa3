"""Attention that asks for its softmax in another type.

ONNX Runtime 1.31.1 ignores ``softmax_precision``, and takes the rewritten model's casts around its softmax out, as
it has no other Softmax than that of float32: both sides agree far below the tolerance. A version that keeps either is
noticed here.
"""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest
from cases import decoder_attention
from onnx import TensorProto

from trt_kvcache.importer import plan_model
from trt_kvcache.importer.plan import AttentionKind
from trt_kvcache.verify import verify_model

ALLOWED = {TensorProto.FLOAT: 1e-4, TensorProto.FLOAT16: 2e-2}


@pytest.mark.few(9)
@pytest.mark.parametrize("precision", ["FLOAT", "FLOAT16", "BFLOAT16", "DOUBLE"])
@pytest.mark.parametrize("dtype", ["FLOAT", "FLOAT16"])
@pytest.mark.parametrize("mask", [None, ("B", 1, "S", 16)])
def test_softmax_in_another_type(
    dtype: str, precision: str, mask: tuple[str | int, ...] | None, tmp_path: Path
) -> None:
    kind, asked = TensorProto.DataType.Value(dtype), TensorProto.DataType.Value(precision)
    onnx.save(decoder_attention(kind, mask=mask, is_causal=1, softmax_precision=asked), tmp_path / "model.onnx")
    (attention,) = plan_model(tmp_path / "model.onnx").attention
    assert (attention.kind is AttentionKind.LOWERED) == (precision != dtype)
    report = verify_model(tmp_path / "model.onnx")
    report.check()
    (output,) = [o for o in report.outputs if o.role != "cache"]
    assert output.tolerance == (1e-2 if precision == "BFLOAT16" and dtype == "FLOAT" else ALLOWED[kind])

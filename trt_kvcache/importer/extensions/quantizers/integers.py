"""Refuse models that ONNX Runtime's quantizers made for CPUs: TensorRT lacks their operators, or their types.

    quantize_dynamic    DynamicQuantizeLinear, MatMulInteger and what ONNX Runtime fuses of them; tables of 8 bits
    quantize_static     QLinear operators; rounding around another number than 0, to uint8, to 16 bits; biases of int32

Scales of `quantize_dynamic` follow from the whole batch, so that sequences change each other's numbers. TensorRT for
RTX 1.7.1 takes uint8 for int8 without a word. Rounding to int8 or float8 around 0, as NVIDIA ModelOpt does, stays.
"""

from __future__ import annotations

import numpy as np
from onnx import ModelProto, NodeProto, TensorProto, numpy_helper

from trt_kvcache.errors import UnsupportedModelError
from trt_kvcache.importer.operators import INTEGER_PRODUCTS, QUANTIZES
from trt_kvcache.importer.protos import constants_of, describe, dtype_name, is_op, iter_scopes

_REFUSED = {TensorProto.UINT8, TensorProto.UINT16, TensorProto.INT16, TensorProto.INT32}
_ADVICE = (
    "int8 of ONNX Runtime is for CPUs: export in float16, or with int4 weights (onnxruntime-genai: -p int4), or "
    "quantize with NVIDIA ModelOpt"
)


def refuse_integers(model: ModelProto) -> None:
    """Refuse what ONNX Runtime's quantizers write for CPUs.

    Raises:
        UnsupportedModelError: naming the first operator.
    """
    for scope in iter_scopes(model):
        constants = constants_of(scope)
        dequantized = {node.input[0] for node in scope.node if is_op(node, "DequantizeLinear")}
        for node in scope.node:
            if found := _integers(node, constants, dequantized):
                raise UnsupportedModelError(f"{describe(node)} {found}. {_ADVICE}")


def _integers(node: NodeProto, constants: dict[str, TensorProto], dequantized: set[str]) -> str:
    """Describe a node's use of integers that TensorRT does not support; empty if it has none."""
    if node.op_type in (*QUANTIZES, *INTEGER_PRODUCTS) or node.op_type.startswith("QLinear"):
        return "computes with integers of 8 bits"
    if is_op(node, "Gather") and node.output[0] in dequantized:
        return "gathers rows of a quantized table"
    if node.op_type not in ("QuantizeLinear", "DequantizeLinear"):
        return ""
    zero = constants.get(node.input[2]) if len(node.input) > 2 and node.input[2] else None
    data = constants.get(node.input[0])
    if is_op(node, "DequantizeLinear") and data is not None:
        return "dequantizes int32" if data.data_type == TensorProto.INT32 else ""
    given = next((a.i for a in node.attribute if a.name == "output_dtype"), 0)
    kind = zero.data_type if zero is not None else given or TensorProto.UINT8
    if is_op(node, "QuantizeLinear") and kind in _REFUSED:
        return f"rounds to {dtype_name(kind)}"
    if kind == TensorProto.INT8 and zero is not None and np.any(numpy_helper.to_array(zero)):
        return "rounds around another number than 0"
    return ""

"""Operators that NVIDIA ModelOpt writes in the domain ``trt``.

    TRT_FP8QuantizeLinear(x, scale)           ->  QuantizeLinear(x, scale, 0 of float8e4m3fn)
    TRT_FP8DequantizeLinear(q, scale)         ->  DequantizeLinear(q, scale)
    QuantizeLinear, DequantizeLinear          ->  the operators of the same name

TensorRT's parser looks operators up by name alone and takes both forms for the same (measured on TensorRT for RTX
1.7.1); ONNX and ONNX Runtime know no operator of this domain. ModelOpt 0.47 leaves the domain where it turns the
operators of its exports from torch into ONNX's. Operators that quantize in blocks, NVFP4 and MXFP8, stay as they are:

    q, s = TRT_FP4DynamicQuantize(x, scale, axis, block_size)     float4 numbers, a float8 scale for each block
    y = DequantizeLinear(q, DequantizeLinear(s, scale), axis, block_size)

    q, s = TRT_MXFP8DynamicQuantize(x, axis, block_size)          float8 numbers, an exponent (uint8) for each block
    y = TRT_MXFP8DequantizeLinear(q, s, axis, block_size)         of weights as well

ONNX has no operator that chooses scales while it runs, and none of exponents in uint8. TensorRT's parser knows
them (measured on TensorRT for RTX 1.7.1). Importing this registers them with ONNX, which then infers the shapes of
what they make; their kernels are in no package that runs without a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from onnx import ModelProto, NodeProto, TensorProto, TypeProto, defs, helper
from onnx.shape_inference import InferenceContext

from trt_kvcache.errors import UnsupportedModelError
from trt_kvcache.importer.protos import Scope, constants_of, iter_scopes, opset_version

DOMAIN = "trt"
FP4_QUANTIZE, MX_QUANTIZE, MX_DEQUANTIZE = (
    "TRT_FP4DynamicQuantize", "TRT_MXFP8DynamicQuantize", "TRT_MXFP8DequantizeLinear",
)  # fmt: skip
_TYPES = [f"tensor({name})" for name in ("float", "float16", "bfloat16", "uint8", "float8e4m3fn", "float4e2m1")]
_ATTRIBUTES = ("axis", "block_size", "scale_type", "output_dtype")
_QUANTIZE = "TRT_FP8QuantizeLinear"
_NAMES = {
    _QUANTIZE: "QuantizeLinear", "TRT_FP8DequantizeLinear": "DequantizeLinear", "QuantizeLinear": "QuantizeLinear",
    "DequantizeLinear": "DequantizeLinear",
}  # fmt: skip
_ZERO = "trt_kvcache/fp8_zero"
_FLOAT8_OPSET, _BLOCKS_OPSET = 19, 21


def is_block_operator(node: NodeProto) -> bool:
    """True if a node quantizes or dequantizes in blocks."""
    return node.domain == DOMAIN and node.op_type in (FP4_QUANTIZE, MX_QUANTIZE, MX_DEQUANTIZE)


def write_as_onnx(model: ModelProto) -> bool:
    """Replace, in place, ModelOpt's operators that ONNX has; True if there were any.

    Raises:
        UnsupportedModelError: the model's opset lacks the operator of ONNX, or a scale is no single number.
    """
    operators = [(s, n) for s in iter_scopes(model) for n in s.node if n.domain == DOMAIN and n.op_type in _NAMES]
    version = opset_version(model) or 0
    for scope, node in operators:
        needed = _BLOCKS_OPSET if any(a.name == "block_size" for a in node.attribute) else _FLOAT8_OPSET
        if version < needed:
            raise UnsupportedModelError(
                f"{node.op_type} '{node.name}' has no equal in opset {version}; export with opset {needed} or later"
            )
        if node.op_type == _QUANTIZE:
            _check_scale(scope, node)
            node.input.append(_ZERO)
        node.op_type, node.domain = _NAMES[node.op_type], ""
    if any(_ZERO in node.input for _, node in operators):
        model.graph.initializer.append(helper.make_tensor(_ZERO, TensorProto.FLOAT8E4M3FN, [], b"\0", raw=True))
    return bool(operators)


def _check_scale(scope: Scope, node: NodeProto) -> None:
    """Refuse a scale that is not one constant number: the zero point gets the scale's shape."""
    tensor = constants_of(scope).get(node.input[1]) if len(node.input) == 2 else None
    if tensor is None or len(tensor.dims):
        raise UnsupportedModelError(
            f"{node.op_type} '{node.name}' is not with one constant scale for the whole tensor; supported is that, as "
            "ModelOpt writes it: quantize per tensor, or export with QuantizeLinear of ONNX"
        )


def _register() -> None:
    """Add the operators to ONNX's list, which is one for the whole process."""
    for name, (reads, makes, infer) in _OPERATORS.items():
        if defs.has(name, 1, DOMAIN):
            continue
        inputs, outputs = (
            [defs.OpSchema.FormalParameter(f"{side}{i}", f"T{side}{i}") for i in range(count)]
            for side, count in (("input", reads), ("output", makes))
        )
        integer = defs.OpSchema.AttrType.INT
        schema = defs.OpSchema(
            name,
            DOMAIN,
            1,
            inputs=inputs,
            outputs=outputs,
            type_constraints=[(port.type_str, _TYPES, "") for port in (*inputs, *outputs)],
            attributes=[defs.OpSchema.Attribute(a, integer, required=False) for a in _ATTRIBUTES],
        )
        schema.set_type_and_shape_inference_function(infer)
        defs.register_schema(schema)


def _infer_blocks(numbers: int, scales: int, block: int, context: InferenceContext) -> None:
    """Infer types: numbers have the shape of the input; scales too, but one per block along the axis of blocks."""
    source = context.get_input_type(0)
    context.set_output_type(0, _of(source, numbers))
    result = _of(source, scales)
    dims = result.tensor_type.shape.dim
    axis, size = _attribute(context, "axis", -1), _attribute(context, "block_size", block)
    if dims and -len(dims) <= axis < len(dims) and size > 0:
        width = dims[axis].dim_value
        dims[axis].Clear()
        if width:
            dims[axis].dim_value = -(-width // size)
    context.set_output_type(1, result)


def _infer_dequantized(context: InferenceContext) -> None:
    kind = _attribute(context, "output_dtype", TensorProto.FLOAT)
    context.set_output_type(0, _of(context.get_input_type(0), kind))


def _of(source: TypeProto | None, kind: int) -> TypeProto:
    """A type with the source's shape, if known, and another element type."""
    result = TypeProto()
    if source is not None:
        result.CopyFrom(source)
    result.tensor_type.elem_type = kind
    return result


def _attribute(context: InferenceContext, name: str, default: int) -> int:
    attribute = context.get_attribute(name)
    return default if attribute is None else int(attribute.i)


_OPERATORS: dict[str, tuple[int, int, Callable[[InferenceContext], None]]] = {
    FP4_QUANTIZE: (2, 2, partial(_infer_blocks, TensorProto.FLOAT4E2M1, TensorProto.FLOAT8E4M3FN, 16)),
    MX_QUANTIZE: (1, 2, partial(_infer_blocks, TensorProto.FLOAT8E4M3FN, TensorProto.UINT8, 32)),
    MX_DEQUANTIZE: (2, 1, _infer_dequantized),
}
"""Numbers of inputs and of outputs, and shape inference."""
_register()

"""Replaces or refuses operators that quantizers write into models, except those for weights of 4 and 8 bits (`lower`).

`refuse_integers` refuses models that ONNX Runtime's quantizers made for CPUs, because TensorRT lacks their operators or
types. TensorRT for RTX 1.7.1 reads uint8 as int8 without a message.

    quantize_dynamic    DynamicQuantizeLinear, MatMulInteger, ONNX Runtime's fusions of both; tables of 8 bits; its
                        scales come from the whole batch, so sequences change each other's numbers
    quantize_static     QLinear operators; rounding to uint8, to 16 bits, or with a zero point; int32 biases

`read` renames operators that NVIDIA ModelOpt (0.47) writes in the domain ``trt``, which TensorRT's parser ignores
(measured on TensorRT for RTX 1.7.1):

    TRT_FP8QuantizeLinear(x, scale)           ->  QuantizeLinear(x, scale, 0 of float8e4m3fn)
    TRT_FP8DequantizeLinear(q, scale)         ->  DequantizeLinear(q, scale)
    QuantizeLinear, DequantizeLinear          ->  the operators of the same name

Operators that quantize in blocks (NVFP4 and MXFP8) stay, because ONNX cannot express them. TensorRT's parser knows
them. This module registers them with ONNX on import, so that ONNX infers shapes:

    q, s = TRT_FP4DynamicQuantize(x, scale, axis, block_size)     float4 numbers, a float8 scale for each block
    y = DequantizeLinear(q, DequantizeLinear(s, scale), axis, block_size)

    q, s = TRT_MXFP8DynamicQuantize(x, axis, block_size)          float8 numbers, an exponent (uint8) for each block
    y = TRT_MXFP8DequantizeLinear(q, s, axis, block_size)         also for weights

`for_cpu` replaces them, because no package runs them without a GPU, and ONNX Runtime 1.31.1 does not support float4:

    float4 weights          a table of 16 entries maps each number to its double, in int8; scales are halved
    MXFP8 weights           y        -> DequantizeLinear(numbers, 2 ** (exponents - 127))
    activations             y        -> x (not quantized), cast to the type of y

Replaced weights are exact. Activations are not rounded in comparisons: their scales depend on each block's numbers, so
a tiny difference could change many numbers by up to 25 %.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
from onnx import ModelProto, NodeProto, TensorProto, TypeProto, defs, helper, numpy_helper, shape_inference
from onnx.shape_inference import InferenceContext

from trt_kvcache.errors import UnsupportedModelError
from trt_kvcache.importer.operators import INTEGER_PRODUCTS, QUANTIZES
from trt_kvcache.importer.protos import (
    Scope,
    constants_of,
    copied,
    describe,
    dtype_name,
    elem_type_of,
    is_op,
    iter_scopes,
    opset_version,
    replace_field,
)
from trt_kvcache.importer.simplify import raise_opset
from trt_kvcache.importer.weights import reinterpret


def for_cpu(model: ModelProto) -> tuple[ModelProto, list[str]]:
    """Return a copy of the model for ONNX Runtime on the CPU, with plain operators instead of block operators."""
    notes = list[str]()
    if steps := sum(is_block_operator(n) and n.op_type != MX_DEQUANTIZE for n in model.graph.node):
        notes.append(
            f"TensorRT quantizes activations in blocks at {steps} places (NVFP4, MXFP8). Here both models ran without "
            "this rounding, so only TensorRT shows its effect"
        )
    floats = any(t.data_type == TensorProto.FLOAT4E2M1 for t in model.graph.initializer)
    if floats or any(is_block_operator(node) for node in model.graph.node):
        model = raise_opset(model) if (opset_version(model) or 0) < _CPU_OPSET else model
        model = shape_inference.infer_shapes(model)
        _Editor(model).edit()
    return model, notes


_REFUSED = {TensorProto.UINT8, TensorProto.UINT16, TensorProto.INT16, TensorProto.INT32}
_ADVICE = (
    "TensorRT does not support ONNX Runtime's int8 for CPUs: export in float16, or with int4 weights "
    "(onnxruntime-genai: -p int4), or quantize with NVIDIA ModelOpt"
)


def refuse_integers(model: ModelProto) -> None:
    """Raise `UnsupportedModelError` for a model with operators that ONNX Runtime's quantizers write for CPUs."""
    for scope in iter_scopes(model):
        constants = constants_of(scope)
        dequantized = {node.input[0] for node in scope.node if is_op(node, "DequantizeLinear")}
        for node in scope.node:
            if found := _integers(node, constants, dequantized):
                raise UnsupportedModelError(f"{describe(node)} {found}. {_ADVICE}")


def _integers(node: NodeProto, constants: dict[str, TensorProto], dequantized: set[str]) -> str:
    """Describe the integers of a node that TensorRT does not support; empty if it supports the node."""
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
        return "quantizes to int8 with a zero point other than 0"
    return ""


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


def read(model: ModelProto) -> bool:
    """Replace ModelOpt's operators of the domain ``trt`` with those of ONNX, in place; return True if any existed."""
    operators = [(s, n) for s in iter_scopes(model) for n in s.node if n.domain == DOMAIN and n.op_type in _NAMES]
    version = opset_version(model) or 0
    for scope, node in operators:
        needed = _BLOCKS_OPSET if any(a.name == "block_size" for a in node.attribute) else _FLOAT8_OPSET
        if version < needed:
            raise UnsupportedModelError(
                f"{node.op_type} '{node.name}' has no equivalent in opset {version}; export with opset {needed} or "
                "later"
            )
        if node.op_type == _QUANTIZE:
            _check_scale(scope, node)
            node.input.append(_ZERO)
        node.op_type, node.domain = _NAMES[node.op_type], ""
    if any(_ZERO in node.input for _, node in operators):
        model.graph.initializer.append(helper.make_tensor(_ZERO, TensorProto.FLOAT8E4M3FN, [], b"\0", raw=True))
    return bool(operators)


def _check_scale(scope: Scope, node: NodeProto) -> None:
    """Refuse a scale that is not one constant number, because the added zero point must have the same shape."""
    tensor = constants_of(scope).get(node.input[1]) if len(node.input) == 2 else None
    if tensor is None or len(tensor.dims):
        raise UnsupportedModelError(
            f"{node.op_type} '{node.name}' needs one constant number as its scale, not a computed one or one with "
            "axes: quantize per tensor, or export with QuantizeLinear of ONNX"
        )


def _register() -> None:
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
    """Infer types and shapes: numbers like the input, and one scale for each block along the block axis."""
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
"""For each block operator: the number of inputs, the number of outputs, and a function for shape inference."""
_register()


# the doubled number for each bit pattern of float4
_DOUBLED = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.int8)
_BIAS = 127  # bias of MXFP8's exponents
_BLOCK = 32  # numbers in a block of MXFP8
_CPU_OPSET = 21  # the first opset whose DequantizeLinear has blocks


class _Editor:
    """Replaces block operators. Constants go to the main graph, where bodies of If and Loop can read them."""

    def __init__(self, model: ModelProto) -> None:
        self._graph = model.graph
        self._weights = {t.name: t for t in model.graph.initializer}
        self._types = {v.name: elem_type_of(v) for v in (*model.graph.value_info, *model.graph.output)}
        self._nodes: list[NodeProto] = []
        self._count = 0
        self._plain: dict[str, str] = {}  # maps quantized activations to the activations before
        self._gone: set[str] = set()  # quantized activations, and what depends on their scales
        self._scaled: dict[str, str] = {}  # maps weights and scales to doubled and halved ones

    def edit(self) -> None:
        for node in self._graph.node:
            self._replace(copied(node))
        lost = sorted(self._gone & {value.name for value in self._graph.output})
        if lost:
            raise UnsupportedModelError(
                f"'{lost[0]}' is computed from the scales of activations that TensorRT quantizes in blocks; "
                "verification supports these scales only where the activations are dequantized again, as ModelOpt "
                "exports them"
            )
        del self._graph.value_info[:]
        replace_field(self._graph.node, self._nodes)

    def _replace(self, node: NodeProto) -> None:
        first = node.input[0] if node.input else ""
        is_blocks = is_block_operator(node)
        is_dequantizing = is_op(node, "DequantizeLinear") or (is_blocks and node.op_type == MX_DEQUANTIZE)
        if is_blocks and not is_dequantizing:
            self._plain[node.output[0]] = first
            self._gone |= {*node.output}
        elif is_dequantizing and first in self._plain:
            self._op("Cast", [self._plain[first]], node.output[0], to=self._types.get(node.output[0]) or 1)
        elif self._gone & {*node.input}:
            self._gone |= {*node.output}
        elif is_blocks:
            self._exponents(node)
        else:
            weight = self._weights.get(first) if is_dequantizing else None
            if weight is not None and weight.data_type == TensorProto.FLOAT4E2M1:
                node.input[0], node.input[1] = self._doubles(weight), self._halved(node.input[1])
            self._nodes.append(node)

    def _exponents(self, node: NodeProto) -> None:
        result = node.output[0]
        wide = self._op("Cast", node.input[1:2], to=TensorProto.FLOAT)
        power = self._op("Sub", [wide, self._constant(np.float32(_BIAS))])
        scales = self._op("Pow", [self._constant(np.float32(2)), power])
        sizes = {"axis": -1, "block_size": _BLOCK} | {a.name: a.i for a in node.attribute if a.name != "output_dtype"}
        floats = self._op("DequantizeLinear", [node.input[0], scales], **sizes)
        self._op("Cast", [floats], result, to=self._types.get(result) or TensorProto.FLOAT)

    def _doubles(self, weight: TensorProto) -> str:
        name = weight.name
        if name not in self._scaled:
            bits = reinterpret(weight, self._name("bits"), TensorProto.UINT4, weight.dims)
            self._graph.initializer.append(bits)
            index = self._op("Cast", [bits.name], to=TensorProto.INT32)
            self._scaled[name] = self._op("Gather", [self._constant(_DOUBLED), index])
        return self._scaled[name]

    def _halved(self, scales: str) -> str:
        if scales not in self._scaled:
            half = self._op("CastLike", [self._constant(np.float32(0.5)), scales])
            self._scaled[scales] = self._op("Mul", [scales, half])
        return self._scaled[scales]

    def _op(self, op: str, inputs: Sequence[str], output: str = "", **attributes: Any) -> str:
        output = output or self._name(op.lower())
        self._nodes.append(helper.make_node(op, inputs, [output], output, **attributes))
        return output

    def _constant(self, value: Any) -> str:
        name = self._name("constant")
        self._graph.initializer.append(numpy_helper.from_array(np.asarray(value), name))
        return name

    def _name(self, hint: str) -> str:
        self._count += 1
        return f"trt_kvcache/blocks_{hint}_{self._count}"

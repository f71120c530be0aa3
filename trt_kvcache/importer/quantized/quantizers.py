"""What quantizers write and TensorRT's parser or ONNX Runtime does not take, as other operators of ONNX.

    trt::TRT_FP8QuantizeLinear(x, scale)           ->  QuantizeLinear(x, scale, 0 of float8e4m3fn)
    trt::TRT_FP8DequantizeLinear(q, scale)         ->  DequantizeLinear(q, scale)
    trt::QuantizeLinear, trt::DequantizeLinear     ->  the operators of the same name
    DequantizeLinear(int32, scale)                 ->  Cast(int32) * scale

ModelOpt writes the domain ``trt``. TensorRT's parser looks operators up by name alone and takes both forms for the same
(measured on TensorRT for RTX 1.7.1); ONNX and ONNX Runtime know no operator of this domain. ModelOpt 0.47 leaves the
domain where it turns the operators of its exports from torch into ONNX's. What it quantizes in blocks is in
`block_quantizers`. quantize_static of onnxruntime keeps biases in int32, which TensorRT does not take (1.7.1:
DequantizeLinear's input "must have type FP8, FP4, Int4, Int8, or UInt8").
"""

from __future__ import annotations

import math

from onnx import GraphProto, ModelProto, NodeProto, TensorProto, helper

from trt_kvcache.errors import UnsupportedModelError
from trt_kvcache.importer.protos import is_op, iter_scopes, opset_version
from trt_kvcache.importer.quantized.block_quantizers import DOMAIN

_QUANTIZE, _DEQUANTIZE = "TRT_FP8QuantizeLinear", "TRT_FP8DequantizeLinear"
_NAMES = {
    _QUANTIZE: "QuantizeLinear", _DEQUANTIZE: "DequantizeLinear", "QuantizeLinear": "QuantizeLinear",
    "DequantizeLinear": "DequantizeLinear",
}  # fmt: skip
_ZERO = "trt_kvcache/fp8_zero"
_FLOAT8_OPSET, _BLOCKS_OPSET = 19, 21


def standardize(model: ModelProto) -> bool:
    """Edit, in place, the operators above.

    Returns:
        Whether there were any.

    Raises:
        UnsupportedModelError: the model's opset lacks the operator of ONNX, or a scale is no single number.
    """
    found = [(s, n) for s in iter_scopes(model) for n in s.node if n.domain == DOMAIN and n.op_type in _NAMES]
    version = opset_version(model) or 0
    for scope, node in found:
        needed = _BLOCKS_OPSET if any(a.name == "block_size" for a in node.attribute) else _FLOAT8_OPSET
        if version < needed:
            raise UnsupportedModelError(
                f"{node.op_type} '{node.name}' has no equal in opset {version}; export with opset {needed} or later"
            )
        if node.op_type == _QUANTIZE:
            _check_scale(scope, node)
            node.input.append(_ZERO)
        node.op_type, node.domain = _NAMES[node.op_type], ""
    if any(_ZERO in node.input for _, node in found):
        model.graph.initializer.append(helper.make_tensor(_ZERO, TensorProto.FLOAT8E4M3FN, [], b"\0", raw=True))
    return _spell_biases(model.graph) or bool(found)


def _spell_biases(graph: GraphProto) -> bool:
    """Edit what dequantizes weights of int32, by the definition of DequantizeLinear; whether there was any.

    In float32: what their scales bring into the range of float16 is itself beyond it.
    """
    weights = {t.name: t for t in graph.initializer}
    nodes: list[NodeProto] = []
    for node in graph.node:
        bias, scale = (weights.get(name) for name in [*node.input, "", ""][:2])
        is_bias = is_op(node, "DequantizeLinear") and bias is not None and bias.data_type == TensorProto.INT32
        if not is_bias or bias is None or scale is None or len(bias.dims) > 1 or _size(scale) not in (1, *bias.dims):
            nodes.append(node)
            continue
        wide, factor, product = (f"{node.output[0]}/{part}" for part in ("wide", "factor", "product"))
        nodes += [
            helper.make_node("Cast", [bias.name], [wide], wide, to=TensorProto.FLOAT),
            helper.make_node("Cast", [scale.name], [factor], factor, to=TensorProto.FLOAT),
            helper.make_node("Mul", [wide, factor], [product], product),
            helper.make_node("Cast", [product], node.output, node.name, to=scale.data_type),
        ]
    if len(nodes) == len(graph.node):
        return False
    nodes = [NodeProto.FromString(node.SerializeToString()) for node in nodes]
    del graph.node[:]
    graph.node.extend(nodes)
    return True


def _size(tensor: TensorProto) -> int:
    return math.prod(tensor.dims)


def _check_scale(scope: object, node: NodeProto) -> None:
    """A zero point has the shape of the scale."""
    name = node.input[1] if len(node.input) == 2 else ""
    weights = {t.name: t for t in scope.initializer} if isinstance(scope, GraphProto) else {}
    tensor = weights.get(name)
    for maker in scope.node:  # type: ignore[attr-defined]
        if name and list(maker.output) == [name] and maker.op_type == "Constant":
            tensor = next((a.t for a in maker.attribute if a.name == "value"), None)
    if tensor is None or len(tensor.dims):
        raise UnsupportedModelError(
            f"{node.op_type} '{node.name}' is not with one constant scale for the whole tensor; supported is that, as "
            "ModelOpt writes it: quantize per tensor, or export with QuantizeLinear of ONNX"
        )

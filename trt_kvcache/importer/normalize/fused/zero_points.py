"""Take zero points out of quantized weights that DequantizeLinear holds, because TensorRT knows none.

    MatMul(x, DequantizeLinear(uint4 W [K, N], scales [K / block, N], zero_points, axis=0, block_size=block))
        -> y = MatMul(x, DequantizeLinear(W, scales, 8, axis=0, block_size=block))
           y - MatMul(sums of x over each block, (zero_points - 8) * scales)

onnxruntime-genai writes the first form for TensorRT for RTX with ``is_symmetric=false``, and its parser refuses it
(measured on 1.7.1). `nbits` does the same to MatMulNBits; `signed` moves the 8 to 0. With uint8 the middle is 128.
"""

from __future__ import annotations

import onnx
import onnx_graphsurgeon as gs

from trt_kvcache.importer.graph import Emitter, consumers, contains, dims, elem_type, input_or_none, is_op
from trt_kvcache.importer.normalize.fused.contrib import become
from trt_kvcache.importer.normalize.fused.nbits import block_sums, middle

_BITS = {int(onnx.TensorProto.UINT4): 4, int(onnx.TensorProto.UINT8): 8}


def shift_zero_points(graph: gs.Graph) -> None:
    """Edit, in place, products with unsigned weights in blocks of rows. Other forms stay as they are.

    To be run before `nbits`, which makes zero points of its own.
    """
    emitter = Emitter(graph)
    found = [node for node in graph.nodes if _is_weight(graph, node)]
    for node in found:
        _shift(emitter, node)
    if found:
        graph.toposort()


def _is_weight(graph: gs.Graph, node: gs.Node) -> bool:
    """Whether a node dequantizes an unsigned weight ``[K, N]`` in whole blocks of rows, for products alone."""
    if not is_op(node, "DequantizeLinear") or not isinstance(node.inputs[0], gs.Constant):
        return False
    weight, scales, zero = node.inputs[0], node.inputs[1], input_or_none(node, 2)
    shape, blocks, block = dims(weight) or (), dims(scales) or (), int(node.attrs.get("block_size", 0))
    products = consumers(node.outputs[0])
    return (
        elem_type(weight) in _BITS
        and isinstance(scales, gs.Constant)
        and (zero is None or isinstance(zero, gs.Constant))
        and block > 0
        and len(shape) == len(blocks) == 2
        and int(node.attrs.get("axis", 1)) in (0, -2)
        and shape[0] == int(blocks[0]) * block
        and bool(products)
        and not contains(graph.outputs, node.outputs[0])
        and all(_multiplies(product, node.outputs[0]) for product in products)
    )


def _multiplies(node: gs.Node, weight: gs.Tensor) -> bool:
    """Whether a node is a product of rows of known rank with `weight`."""
    left = node.inputs[0]
    return is_op(node, "MatMul") and node.inputs[1] is weight and left is not weight and len(dims(left) or ()) > 1


def _shift(emitter: Emitter, node: gs.Node) -> None:
    weight, scales, zero = node.inputs[0], node.inputs[1], input_or_none(node, 2)
    bits, kind = _BITS[int(elem_type(weight) or 0)], int(elem_type(scales) or 0)
    blocks, columns = (int(d) for d in scales.shape)
    block = int(node.attrs["block_size"])
    if zero is None:
        zeros = emitter.scalar(-(2 ** (bits - 1)), kind)
    else:
        inputs = [zero, emitter.scalar(1, kind), middle(emitter, bits, ())]
        zeros = emitter.op("DequantizeLinear", inputs, "zero_points", kind)
    shift = emitter.op("Mul", [scales, zeros], "weight_shift", kind)
    node.inputs = [weight, scales, middle(emitter, bits, (blocks, columns))]
    for product in consumers(node.outputs[0]):
        output, x = product.outputs[0], product.inputs[0]
        product.outputs = [gs.Variable(emitter.name("matmul"), dtype=kind)]
        sums = block_sums(emitter, x, len(dims(x) or ()), blocks, block)
        less = emitter.op("MatMul", [sums, shift], "matmul_shift", kind)
        become(emitter.op("Sub", [product.outputs[0], less], "matmul", kind), output)

"""Products with quantized weights as ONNX Runtime computes them fastest on the CPU: by its own MatMulNBits.

    y = MatMul(a, Transpose(DequantizeLinear(uint4 or uint8 [N, K], scales [N, K / block], middle)))
becomes
    y = com.microsoft.MatMulNBits(a, uint8 [N, K / block, bytes of a block], scales)

ONNX Runtime does not fuse the Transpose (1.32.0). It converts all weights to floats in each step: a token of
SmolLM2-135M in 4 bits takes 352 ms that way, and 13 ms with the operator (two cores). The weights are the same bytes.
The results differ only by the order of sums, because `accuracy_level`, which would round activations to 8 bits, is not
set.
"""

from __future__ import annotations

from onnx import ModelProto, NodeProto, TensorProto, helper

from trt_kvcache.importer.lower import CONTRIB
from trt_kvcache.importer.lower.matmul_nbits import NUMBERS, middle
from trt_kvcache.importer.protos import is_op, names_read, replace_field
from trt_kvcache.importer.weights import reinterpret

__all__ = ["fuse_products"]

_BITS = {kind: bits for bits, kind in NUMBERS.items()}
_FLOATS = (TensorProto.FLOAT, TensorProto.FLOAT16)
_LEAST_BLOCK = 16


def fuse_products(model: ModelProto) -> ModelProto:
    """Replace every product in float32 or float16 with MatMulNBits if that computes exactly the same.

    Args:
        model: the rewritten model; not changed.

    Returns:
        A model with the same inputs and outputs; the same object if no product fits.
    """
    weights = {tensor.name: tensor for tensor in model.graph.initializer}
    makers = {name: node for node in model.graph.node for name in node.output}
    views: dict[str, TensorProto] = {}
    nodes = [_fused(node, makers, weights, views) or node for node in model.graph.node]
    if not views:
        return model
    result = ModelProto()
    result.CopyFrom(model)
    live, live_nodes = {value.name for value in model.graph.output}, list[NodeProto]()
    for node in reversed(nodes):
        if live & {*node.output}:
            live_nodes.append(node)
            live |= names_read(node)
    replace_field(result.graph.node, live_nodes[::-1])
    replace_field(result.graph.initializer, [t for t in (*weights.values(), *views.values()) if t.name in live])
    del result.graph.value_info[:]
    if all(entry.domain != CONTRIB for entry in result.opset_import):
        result.opset_import.add(domain=CONTRIB, version=1)
    return result


def _fused(
    node: NodeProto, makers: dict[str, NodeProto], weights: dict[str, TensorProto], views: dict[str, TensorProto]
) -> NodeProto | None:
    """Return the product as one operator, and add a view of its weight to `views`; None if the product does not fit."""
    turn = makers.get(node.input[1]) if is_op(node, "MatMul") else None
    source = makers.get(turn.input[0]) if turn is not None and is_op(turn, "Transpose") else None
    if turn is None or source is None or not is_op(source, "DequantizeLinear"):
        return None
    read = [weights[name] for name in source.input if name in weights]
    if len(read) != 3 or read[1].data_type not in _FLOATS or [len(t.dims) for t in read[:2]] != [2, 2]:
        return None
    numbers, scales, zeros = read
    bits, sizes = _BITS.get(numbers.data_type), {a.name: a.i for a in source.attribute}
    block, axis = sizes.get("block_size", 0), sizes.get("axis", 1)
    if bits is None or axis not in (1, -1):
        return None
    rows, columns = numbers.dims
    count = scales.dims[1]
    plain = block >= _LEAST_BLOCK and not block & (block - 1) and columns == count * block
    if not plain or zeros.raw_data != middle(bits, (rows, count)).raw_data:
        return None
    if [*next((a.ints for a in turn.attribute if a.name == "perm"), [1, 0])] != [1, 0]:
        return None
    name = f"{numbers.name}/bytes"
    views[name] = reinterpret(numbers, name, TensorProto.UINT8, [rows, count, block * bits // 8])
    attributes = {"K": columns, "N": rows, "bits": bits, "block_size": block}
    inputs = [node.input[0], name, scales.name]
    return helper.make_node("MatMulNBits", inputs, [*node.output], node.name, domain=CONTRIB, **attributes)

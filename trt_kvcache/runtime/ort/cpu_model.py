"""Rewrites a model for ONNX Runtime on the CPU: attention becomes GroupQueryAttention, the fastest operator for it.

    present_k = TensorScatter(past_k, k, write_indices), present_v likewise
    y = Where(row sees a key, Attention(q, present_k[:, :, :span], present_v[:, :, :span], causal mask), 0)

becomes

    y, present_k, present_v = com.microsoft.GroupQueryAttention(q, k, v, past_k, past_v, lengths - 1, longest)

The results are the same except for the order of sums. The operator writes in place if past and present are one buffer,
and reads the rows in use without a copy; Slice would copy them. An update of several tokens must have a batch of 1,
unless all sequences start at row 0 (1.31.1: "batch_size must be 1 when sequence_length > 1 and past context is given").
Q, K and V are passed as the projections return them, [B, S, N*H]; a RotaryEmbedding is rewritten for this form. The
operator's own rotation is not used: if a step of several tokens starts at row 0, that rotation uses only the first of
the given positions (1.32.0). Semantics: https://github.com/microsoft/onnxruntime/blob/main/docs/ContribOperators.md.
tests/runtime/test_ort_fused.py checks that rows beyond a sequence's length are never read.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, TypeGuard

import numpy as np
import onnx
import onnx_graphsurgeon as gs
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, helper, numpy_helper

from trt_kvcache.importer import ImportedModel
from trt_kvcache.importer.cache_plan import AttentionPlan, CachePlan, Mask, Role, UpdateMode
from trt_kvcache.importer.graph import INT32, Emitter, consumers, contains, dims, is_op, producer, small_constant, tidy
from trt_kvcache.importer.lower import CONTRIB
from trt_kvcache.importer.lower.matmul_nbits import NUMBERS, middle
from trt_kvcache.importer.prepare import attach_weights, detach_weights
from trt_kvcache.importer.protos import byte_size, copied, iter_scopes, iter_tensors, names_read, replace_field
from trt_kvcache.importer.protos import is_op as is_proto_op
from trt_kvcache.importer.simplify import infer_shapes
from trt_kvcache.importer.steps.runnable import has_bfloat16, state_type
from trt_kvcache.importer.weights import reinterpret

DOMAIN = "com.microsoft"
OPERATOR = "GroupQueryAttention"
_SWAPPED = [0, 2, 1, 3]
_HEAD_STEP = 8  # "head_size must be a multiple of 8" (1.31.1)


@dataclass(frozen=True)
class _Match:
    """An Attention node that GroupQueryAttention can replace, its two cache updates, and inputs for the replacement.

    Attributes:
        lengths: int64 ``[B]``, tokens per sequence after the step.
        window: keys that a query sees, including its own; -1: all.
        result: final result of the attention, ``[B, N, S, H]``.
    """

    node: gs.Node
    plan: AttentionPlan
    updates: tuple[gs.Node, gs.Node]
    lengths: gs.Tensor
    window: int
    result: gs.Tensor


def fuse_attention(model: onnx.ModelProto, plan: CachePlan) -> onnx.ModelProto:
    """Return the model with GroupQueryAttention in place of each Attention for which it computes exactly the same.

    An Attention can be replaced if it is float32 and causal, with or without a left window, over two linear caches
    ``[B, N, L, H]`` that nothing else reads, with H a multiple of 8. If there is none, the model itself is returned.
    """
    light, weights = detach_weights(model)
    graph = gs.import_onnx(infer_shapes(light))
    nodes = {node.name: node for node in graph.nodes}
    masks = {mask.name: mask for mask in plan.masks}
    matches = []
    for item in plan.attention:
        node, mask = nodes.get(item.node), masks.get(item.mask or "")
        if node is not None and mask is not None and (match := _match(graph, plan, node, item, mask)):
            matches.append(match)
    if not matches:
        return model
    emitter = Emitter(graph)
    for match in matches:
        _fuse(emitter, match)
    tidy(graph)
    graph.import_domains = [*(d for d in graph.import_domains or () if d.domain != DOMAIN)]
    graph.import_domains.append(onnx.helper.make_opsetid(DOMAIN, 1))
    fused: onnx.ModelProto = gs.export_onnx(graph)
    fused.ir_version = model.ir_version
    del fused.graph.value_info[:]
    attach_weights(fused, weights)
    return fused


def _match(graph: gs.Graph, plan: CachePlan, node: gs.Node, item: AttentionPlan, mask: Mask) -> _Match | None:
    caches = [c for c in plan.caches if c.past in item.caches]
    updates = [_update(graph, tensor, node) for tensor in node.inputs[1:3]] if is_op(node, "Attention") else []
    if len(caches) != 2 or len(updates) != 2 or not _known(item) or not mask.causal:
        return None
    key, value = updates
    lengths = [t for t in graph.inputs if t.name == mask.lengths]
    if key is None or value is None or not lengths or mask.mask is not None or mask.right_window >= 0:
        return None
    if not all(c.mode is UpdateMode.LINEAR and c.carried and len(c.readers) == 1 for c in caches):
        return None
    starts = plan.tensor(Role.WRITE_INDICES)
    valid = plan.tensor(Role.VALID_LENGTHS)
    roles = (starts and starts.name, valid and valid.name)  # the caller gives both: lengths = write indices + S
    if any(roles != (c.write_indices, mask.lengths) or c.capacity != caches[0].capacity for c in plan.caches):
        return None
    result = node.outputs[0]
    readers = consumers(result)
    if mask.guarded and len(readers) == 1 and is_op(readers[0], "Where") and readers[0].inputs[1] is result:
        result = readers[0].outputs[0]  # under a causal mask, each query sees at least its own key
    if contains(graph.outputs, node.outputs[0]) or contains(graph.outputs, result):
        return None
    window = -1 if mask.left_window < 0 else mask.left_window + 1
    return _Match(node, item, (key, value), lengths[0], window, result)


def _known(item: AttentionPlan) -> bool:
    known = all(isinstance(size, int) for size in (item.query_heads, item.kv_heads, item.head_size))
    fits = item.dtype == "float" and item.head_size == item.value_head_size
    return known and fits and int(item.head_size) % _HEAD_STEP == 0


def _update(graph: gs.Graph, tensor: gs.Tensor, attention: gs.Node) -> gs.Node | None:
    """Return the TensorScatter on a cache ``[B, N, L, H]`` whose result `tensor` only `attention` reads; or None."""
    node, reader = producer(tensor), attention
    if node is not None and is_op(node, "Slice"):
        axes = small_constant(node.inputs[3])
        if axes is None or axes.tolist() != [2] or consumers(tensor) != [attention]:
            return None
        node, reader = producer(node.inputs[0]), node
    if node is None or not is_op(node, "TensorScatter") or len(dims(node.inputs[0]) or ()) != 4:
        return None
    axis, mode = int(node.attrs.get("axis", -2)), node.attrs.get("mode", "linear")
    alone = all(other is reader for other in consumers(node.outputs[0]))
    carried = contains(graph.inputs, node.inputs[0]) and contains(graph.outputs, node.outputs[0])
    return node if alone and carried and axis in (2, -2) and mode == "linear" else None


def _fuse(emitter: Emitter, match: _Match) -> None:
    item, (key, value), lengths = match.plan, match.updates, match.lengths
    heads, kv_heads, size = int(item.query_heads), int(item.kv_heads), int(item.head_size)
    last = emitter.once(("last", lengths.name), lambda: _int32(emitter, "Sub", [lengths, emitter.ints(1)], "last"))
    longest = emitter.once(
        ("longest", lengths.name), lambda: _int32(emitter, "ReduceMax", [lengths], "longest", keepdims=0)
    )
    inputs = [
        _by_token(emitter, match.node.inputs[0], heads, size),
        *(_by_token(emitter, update.inputs[1], kv_heads, size) for update in (key, value)),
        key.inputs[0], value.inputs[0], last, longest,
    ]  # fmt: skip
    attributes = {"num_heads": heads, "kv_num_heads": kv_heads, "scale": match.node.attrs.get("scale", size**-0.5)}
    if match.window > 0:
        attributes["local_window_size"] = match.window
    target, packed = _whole(match.result, heads * size)
    for maker in list(target.inputs):
        maker.outputs.clear()
    presents = [update.outputs[0] for update in (key, value)]
    for node in (match.node, key, value):
        node.outputs.clear()
    output = target if packed else gs.Variable(emitter.name("attention"), dtype=target.dtype)
    emitter.graph.nodes.append(
        gs.Node(OPERATOR, emitter.name(OPERATOR), attributes, inputs, [output, *presents], domain=DOMAIN)
    )
    if not packed:
        split = emitter.op("Reshape", [output, emitter.ints([0, 0, heads, size])], "split")
        turned = emitter.op("Transpose", [split], "heads", perm=_SWAPPED)
        turned.inputs[0].outputs = [target]


def _int32(emitter: Emitter, op: str, inputs: list[gs.Tensor], hint: str, **attributes: int) -> gs.Tensor:
    return emitter.op("Cast", [emitter.op(op, inputs, f"{hint}_64", **attributes)], hint, INT32, to=INT32)


def _by_token(emitter: Emitter, tensor: gs.Tensor, heads: int, size: int) -> gs.Tensor:
    """Return a tensor ``[B, N, S, H]`` as ``[B, S, N*H]``: its source of that shape if there is one, else a copy."""
    node, merged = producer(tensor), emitter.ints([0, 0, heads * size])
    if node is not None and is_op(node, "RotaryEmbedding"):
        rows = _by_token(emitter, node.inputs[0], heads, size)
        return emitter.op("RotaryEmbedding", [rows, *node.inputs[1:]], "rotated", **{**node.attrs, "num_heads": heads})
    if not _swaps(node):
        turned = emitter.op("Transpose", [tensor], "by_token", perm=_SWAPPED)
        return emitter.op("Reshape", [turned, merged], "rows")
    source = node.inputs[0]
    maker = producer(source)
    if _swaps(maker):
        return _by_token(emitter, maker.inputs[0], heads, size)
    if maker is not None and is_op(maker, "Reshape") and _splits_heads(maker, heads, size):
        return maker.inputs[0]
    return emitter.op("Reshape", [source, merged], "rows")


def _swaps(node: gs.Node | None) -> TypeGuard[gs.Node]:
    return node is not None and is_op(node, "Transpose") and list(node.attrs.get("perm", ())) == _SWAPPED


def _splits_heads(reshape: gs.Node, heads: int, size: int) -> bool:
    """Return True if the Reshape turns ``[B, S, N*H]`` into ``[B, S, N, H]`` for every B and S."""
    source, shape = dims(reshape.inputs[0]), small_constant(reshape.inputs[1])
    if source is None or len(source) != 3 or source[2] != heads * size or shape is None:
        return False
    known = ([0, 0, heads, size], [0, 0, heads, -1], [0, 0, -1, size], [0, -1, heads, size])
    return shape.tolist() in known and not reshape.attrs.get("allowzero", 0)


def _whole(result: gs.Tensor, width: int) -> tuple[gs.Tensor, bool]:
    """Return the tensor that the new operator must compute, and True if it is ``[B, S, N*H]``, not ``[B, N, S, H]``."""
    turned = _only(result, "Transpose")
    if not _swaps(turned):
        return result, False
    merged = _only(turned.outputs[0], "Reshape")
    shape = small_constant(merged.inputs[1]) if merged is not None else None
    # shapes that turn [B, S, N, H] into [B, S, N*H] for every B and S
    if merged is None or shape is None or shape.tolist() not in ([0, 0, width], [0, 0, -1], [0, -1, width]):
        return result, False
    return merged.outputs[0], True


def _only(tensor: gs.Tensor, op: str) -> gs.Node | None:
    readers = consumers(tensor)
    return readers[0] if len(readers) == 1 and is_op(readers[0], op) else None


_EXPERTS = {"MoE": 2, "QMoE": 3}
"""For each operator: the index of the input whose dtype is that of the computation."""


def keep_experts(model: ModelProto, source: ModelProto) -> ModelProto:
    """Return a rewritten model with the float32 MoE and QMoE nodes of its `source` (the model before the rewrite).

    They replace the nodes that the rewrite made of them. `model` has sorted nodes and is not changed. The external data
    of both models are in one folder.
    """
    weights = {tensor.name: tensor for tensor in source.graph.initializer}
    makers = {name: node for node in model.graph.node for name in node.output}
    fitting = {
        str(node.output[0]): node
        for node in source.graph.node
        if node.domain == CONTRIB and node.op_type in _EXPERTS and _fits(node, weights, makers, model)
    }
    if not fitting:
        return model
    nodes = [fitting.get(next(iter(node.output), ""), node) for node in model.graph.node]
    own = {tensor.name: tensor for tensor in model.graph.initializer}
    return _with_nodes(model, nodes, {n: t for n, t in sorted(weights.items()) if n not in own})


def _with_nodes(model: ModelProto, nodes: Sequence[NodeProto], more: Mapping[str, TensorProto]) -> ModelProto:
    """Return a copy of a model with `nodes` and more weights, without the nodes and weights that nothing reads."""
    result = ModelProto()
    result.CopyFrom(model)
    live, live_nodes = {value.name for value in model.graph.output}, list[NodeProto]()
    for node in reversed(nodes):
        if live & {*node.output}:
            live_nodes.append(node)
            live |= names_read(node)
    replace_field(result.graph.node, live_nodes[::-1])
    replace_field(result.graph.initializer, [t for t in (*model.graph.initializer, *more.values()) if t.name in live])
    del result.graph.value_info[:]
    if all(entry.domain != CONTRIB for entry in result.opset_import):
        result.opset_import.add(domain=CONTRIB, version=1)
    return result


def _fits(
    node: NodeProto, weights: Mapping[str, TensorProto], makers: Mapping[str, NodeProto], model: ModelProto
) -> bool:
    """Return True if the rewritten `model` computes the result of an MoE or QMoE `node` from the node's inputs alone.

    Comparing names is enough: a tensor that the rewrite keeps also keeps its name. Shape nodes may read any tensor: the
    rewritten model takes the sizes of a step from its token ids.
    """
    if node.op_type == "MoE" and not any(a.name == "normalize_routing_weights" and a.i == 1 for a in node.attribute):
        return False
    kind = weights.get(node.input[_EXPERTS[node.op_type]]) if len(node.input) > _EXPERTS[node.op_type] else None
    if kind is None or kind.data_type != TensorProto.FLOAT or any(n and n not in weights for n in node.input[2:]):
        return False
    own = {tensor.name: (tensor.data_type, [*tensor.dims]) for tensor in model.graph.initializer}
    if any((stored := own.get(n)) and stored != (weights[n].data_type, [*weights[n].dims]) for n in node.input[2:]):
        return False
    ends, pending, seen = {*node.input[:2]}, [str(node.output[0])], set()
    while pending:
        name = pending.pop()
        if name in seen or name in own:
            continue
        seen.add(name)
        if name in ends:
            continue
        if name not in makers:
            return False
        pending += names_read(makers[name]) if makers[name].op_type != "Shape" else ()
    return ends <= seen


_BITS = {kind: bits for bits, kind in NUMBERS.items()}
_FLOATS = (TensorProto.FLOAT, TensorProto.FLOAT16)
_LEAST_BLOCK = 16


def fuse_products(model: ModelProto) -> ModelProto:
    """Return the model with MatMulNBits for float32 and float16 MatMuls of packed weights, if results are equal."""
    weights = {tensor.name: tensor for tensor in model.graph.initializer}
    makers = {name: node for node in model.graph.node for name in node.output}
    views: dict[str, TensorProto] = {}
    nodes = [_fused(node, makers, weights, views) or node for node in model.graph.node]
    return _with_nodes(model, nodes, views) if views else model


def _fused(
    node: NodeProto, makers: dict[str, NodeProto], weights: dict[str, TensorProto], views: dict[str, TensorProto]
) -> NodeProto | None:
    """Return a MatMulNBits for a MatMul and the nodes that unpack its weight, or None; add its weight to `views`."""
    turn = makers.get(node.input[1]) if is_proto_op(node, "MatMul") else None
    source = makers.get(turn.input[0]) if turn is not None and is_proto_op(turn, "Transpose") else None
    if turn is None or source is None or not is_proto_op(source, "DequantizeLinear"):
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


NOTE = (
    "bfloat16 runs in float32 on the CPU, where ONNX Runtime has no bfloat16 arithmetic: caches take twice the memory, "
    "and numbers are closer to the model's in float32 than those of its engine"
)
_SMALL = 1024  # bytes; smaller tensors are converted here, so that shape inference can read their values


def in_float32(imported: ImportedModel) -> ImportedModel:
    """Return a copy of a bfloat16 model in float32, with a note in its plan. Return other models unchanged."""
    if not has_bfloat16(imported.model):
        return imported
    model = copied(imported.model)
    state_type(model, (TensorProto.BFLOAT16,), TensorProto.FLOAT)
    graphs = [scope for scope in iter_scopes(model) if isinstance(scope, GraphProto)]
    large = {name for graph in graphs for name in _large(graph)}
    for tensor in iter_tensors(model):
        if tensor.data_type == TensorProto.BFLOAT16 and tensor.name not in large:
            values = numpy_helper.to_array(tensor).astype(np.float32)
            tensor.CopyFrom(numpy_helper.from_array(values, tensor.name))
    for graph in graphs:
        _cast(graph, large)
    plan = _widened(imported.plan)
    return replace(imported, model=model, plan=replace(plan, notes=(NOTE, *plan.notes)))


def _large(graph: GraphProto) -> Iterator[str]:
    """Yield the names of the large bfloat16 weights, which stay bfloat16 and are cast while the model runs."""
    for tensor in graph.initializer:
        inside = tensor.data_location != TensorProto.EXTERNAL
        if tensor.data_type == TensorProto.BFLOAT16 and not (inside and (byte_size(tensor) or 0) <= _SMALL):
            yield tensor.name


def _cast(graph: GraphProto, large: Container[str]) -> None:
    casts = []
    for tensor in graph.initializer:
        if tensor.name in large:
            name, tensor.name = tensor.name, f"{tensor.name}/bfloat16"
            casts.append(helper.make_node("Cast", [tensor.name], [name], f"{name}/Cast", to=TensorProto.FLOAT))
    replace_field(graph.node, [*casts, *graph.node])


def _widened(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(map(_widened, value))
    if not is_dataclass(value) or isinstance(value, type):
        return value
    parts = {f.name: _widened(getattr(value, f.name)) for f in fields(value)}
    if parts.get("dtype") == "bfloat16":
        parts["dtype"] = "float"
    return replace(value, **parts)

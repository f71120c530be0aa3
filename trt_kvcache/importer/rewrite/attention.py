"""Rewrite Attention nodes into what IAttention computes with the operator's meaning, or into plain operators.

Attention(Q [B, N, S, H], K, V, -, -, -, lengths; is_causal=1) -> 3 outputs
becomes
y = Attention(Q, K[:, :, :span], V[:, :, :span], mask)
y = Where(row sees a key, y, 0)
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import onnx_graphsurgeon as gs

from trt_kvcache.importer.graph import Emitter, dims, elem_type, is_op, producer, small_constant
from trt_kvcache.importer.plan import AttentionKind, AttentionPlan, CachePlan
from trt_kvcache.importer.planning.attention import whole_query
from trt_kvcache.importer.planning.attention_facts import AttentionFacts, read_attention
from trt_kvcache.importer.planning.rows_in_use import end_with, row_slices
from trt_kvcache.importer.rewrite.caches import CacheView
from trt_kvcache.importer.rewrite.lowered import lower_attention
from trt_kvcache.importer.rewrite.masks import Mask, build_mask


def rewrite_attention(graph: gs.Graph, emitter: Emitter, plan: CachePlan, views: dict[str, CacheView]) -> None:
    """Rewrite every Attention node as planned."""
    nodes = {node.name: node for node in graph.nodes}
    masks = {mask.name: mask for mask in plan.masks}
    queries: Counter[str] = Counter()
    keys = Counter(nodes[item.node].inputs[1].name for item in plan.attention)
    for item in plan.attention:
        facts = _separate(emitter, read_attention(graph, nodes[item.node]), queries, keys)
        mask = build_mask(emitter, facts, item, masks.get(item.mask or ""))
        _rewrite(emitter, facts, item, mask, views)


def _separate(emitter: Emitter, facts: AttentionFacts, queries: Counter[str], keys: Counter[str]) -> AttentionFacts:
    """Separate attentions that share Q or K, so that TensorRT cannot merge what it makes of them.

    TensorRT's importer multiplies Q and K by the root of the scale; where two attentions get the same product, the
    builder of TensorRT for RTX 1.7.1 dies of SIGSEGV. So under a shared K, the scale goes to Q alone; and the readers
    of one Q, or of parts of it, see it times different powers of four, under a scale that makes up for it.

    `queries` counts the readers of each Q so far, `keys` all readers of each K.
    """
    node = facts.node
    query, key = node.inputs[:2]
    whole = whole_query(node).name
    turn = queries[whole]
    queries[whole] += 1
    power = 4.0 ** ((turn + 1) // 2 * (1 if turn % 2 else -1))  # 1, 4, 1/4, 16, 1/16, ...: near 1 for any real model
    factor, scale = (power * facts.scale, 1 / power) if keys[key.name] > 1 else (power, facts.scale / power)
    if factor == 1:
        return replace(facts, scale=scale)
    scaled = emitter.op("Mul", [query, emitter.scalar(factor, facts.dtype)], "query_apart", facts.dtype)
    scaled.shape = query.shape
    node.inputs[0] = scaled
    return replace(facts, scale=scale)


def _rewrite(
    emitter: Emitter, facts: AttentionFacts, plan: AttentionPlan, mask: Mask, views: dict[str, CacheView]
) -> None:
    node = facts.node
    query, key, value = node.inputs[0], *(slice_keys(emitter, t, mask.end, views) for t in node.inputs[1:3])
    target = node.outputs[0]
    scores = node.outputs[3] if facts.qk_output else None
    node.outputs.clear()
    if plan.kind is AttentionKind.LOWERED:
        result = lower_attention(emitter, facts, query, key, value, mask, scores)
    else:
        result = gs.Variable(emitter.name("attention"), dtype=facts.dtype)
        causal = {"is_causal": 1} if facts.causal and mask.bias is None else {}
        node.attrs = {"scale": facts.scale, **causal}
        node.inputs = [query, key, value] + ([mask.bias] if mask.bias is not None else [])
        node.outputs = [result]
        if mask.row_visible is not None:
            zero = emitter.scalar(0.0, facts.dtype)
            result = emitter.op("Where", [mask.row_visible, result, zero], "attention_guarded", facts.dtype)
    maker = result.inputs[0]
    maker.outputs = [target]


def slice_keys(emitter: Emitter, tensor: gs.Tensor, end: gs.Tensor | None, views: dict[str, CacheView]) -> gs.Tensor:
    """Keep the first `end` keys of K or V, slicing the cache itself where only shapes change in between.

    The Slice comes before any transpose, so that what is moved follows the active length too. All readers of a cache
    share its Slices.
    """
    if end is None:
        return tensor
    shape = dims(tensor)
    sliced_shape = [None if d == "?" or i == 2 else d for i, d in enumerate(shape or ())] or None
    if slices := row_slices(tensor, end):
        for node in slices:
            end_with(node, end)
        tensor.shape = sliced_shape
        return tensor
    moves: list[gs.Node] = []
    base, axis = tensor, 2
    while base.name not in views and (node := producer(base)) is not None:
        if is_op(node, "Cast"):
            pass
        elif is_op(node, "Transpose"):
            axis = list(node.attrs.get("perm") or reversed(range(len(shape or range(4)))))[axis]
        elif axis != 1 or not _splits_heads(node):
            break
        moves.insert(0, node)
        base = node.inputs[0]
    view = views.get(base.name)
    if view is None or view.logical_axis != axis:
        return _slice(emitter, tensor, 2, end, shape)
    result = _slice(emitter, view.present, view.axis, end, dims(view.present))
    if view.logical is not None:
        result = emitter.once(
            ("logical", result.name),
            lambda: emitter.op("Reshape", [result, emitter.ints(list(view.logical or ()))], f"{result.name}_logical"),
        )
    for move in moves:
        kind = elem_type(move.outputs[0])
        result = emitter.op(move.op, [result, *move.inputs[1:]], f"{result.name}_moved", kind, **move.attrs)
    result.shape = sliced_shape
    return result


def _splits_heads(node: gs.Node) -> bool:
    """True if a node makes ``[B, S, N, H]`` of ``[B, S, N*H]``, whatever S is."""
    target = small_constant(node.inputs[1]) if is_op(node, "Reshape") else None
    return target is not None and target.size == 4 and not target[:2].any()


def _slice(
    emitter: Emitter, tensor: gs.Tensor, axis: int, end: gs.Tensor, shape: tuple[int | str, ...] | None
) -> gs.Tensor:
    def make() -> gs.Tensor:
        result = emitter.op("Slice", [tensor, emitter.ints([0]), end, emitter.ints([axis])], f"{tensor.name}_active")
        result.shape = [None if d == "?" or i == axis else d for i, d in enumerate(shape or ())] or None
        return result

    return emitter.once(("slice", tensor.name, axis, end.name), make)

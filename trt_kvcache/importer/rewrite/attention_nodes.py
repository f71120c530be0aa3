"""Rewrites Attention nodes, so that TensorRT builds IAttention layers or plain operators with the same meaning.

    Attention(Q [B, N, S, H], K, V, -, -, -, lengths; is_causal=1) -> 3 outputs
    becomes
    y = Attention(Q, K[:, :, :span], V[:, :, :span], mask)
    y = Where(row sees a key, y, 0)

Plain operators compute attentions that IAttention cannot express, in the order and types of the ONNX operator
(https://onnx.ai/onnx/operators/onnx__Attention.html):

    scores  = (Q * sqrt(scale)) @ (K * sqrt(scale))^T       G query heads share one K/V head; heads are not repeated
              one K/V head: (K @ (Q * scale)^T)^T, see `_over_one_head`
    scores  = softcap * tanh(scores / softcap)
    scores  = Where(mask, scores, -inf)  or  scores + bias
    weights = softmax(scores) in softmax_precision; rows without a visible key become 0
    y       = weights @ V

All layers with the same geometry share one mask:

    key position  k = 0 .. keys - 1                       [1, 1, 1, K]
    frontier      f = lengths - S_q + i   (i without lengths)   [B, 1, S_q, 1]
    visible         = k <= f and k >= f - left and ... and the mask of the model

The mask is explicit, because TensorRT ignores `nonpad_kv_seqlen`, and aligns `is_causal` to the upper left corner,
while ONNX aligns it to the bottom right. Every supported TensorRT version computes explicit masks correctly.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import onnx_graphsurgeon as gs

from trt_kvcache.errors import UnsupportedModelError
from trt_kvcache.importer.cache_plan import AttentionKind, AttentionPlan, CachePlan, Mask
from trt_kvcache.importer.graph import BOOL, INT32, INT64, Emitter, dims, elem_type, is_op, producer, small_constant
from trt_kvcache.importer.planning.attention_plans import AttentionFacts, read_attention, sequence_source, whole_query
from trt_kvcache.importer.planning.cache_plans import cut_rows, end_with, row_slices


@dataclass(frozen=True)
class CacheView:
    """A cache in its physical shape (in the engine), and how to reshape slices of it to the shape that readers expect.

    Attributes:
        present: the updated cache in its physical shape.
        axis: the sequence axis of the physical shape.
        logical: the shape for a Reshape, with -1 for the rows, to the logical (exported) shape; None if both are equal.
        logical_axis: the sequence axis of the logical shape.
    """

    present: gs.Variable
    axis: int
    logical: tuple[int, ...] | None
    logical_axis: int


def rewrite_attention(graph: gs.Graph, emitter: Emitter, plan: CachePlan, views: dict[str, CacheView]) -> None:
    """Rewrite every Attention node as the plan says."""
    nodes = {node.name: node for node in graph.nodes}
    masks = {mask.name: mask for mask in plan.masks}
    queries: Counter[str] = Counter()
    keys = Counter(nodes[item.node].inputs[1].name for item in plan.attention)
    for item in plan.attention:
        facts = _separate(emitter, read_attention(graph, nodes[item.node]), queries, keys)
        geometry, mask = masks.get(item.mask or ""), BuiltMask()
        if geometry is not None:  # nodes with the same mask in the plan share its tensors
            mask = emitter.once(("mask", geometry.name), _Builder(emitter, facts, item, geometry).build)
        _rewrite(emitter, facts, item, mask, views)


def _separate(emitter: Emitter, facts: AttentionFacts, queries: Counter[str], keys: Counter[str]) -> AttentionFacts:
    """If attentions share Q or K, scale Q by another factor in each, so that TensorRT cannot merge the scaled tensors.

    TensorRT's importer multiplies Q and K by the square root of the scale. If two attentions have the same product, the
    builder of TensorRT for RTX 1.7.1 crashes (SIGSEGV). So if attentions share K, only Q is scaled. If they share Q or
    parts of Q, each multiplies Q by its own power of four, and divides the scale by this power.
    `queries` counts the attentions so far that read each Q; `keys` counts all attentions that read each K.
    """
    node = facts.node
    query, key = node.inputs[:2]
    whole = whole_query(node).name
    turn, queries[whole] = queries[whole], queries[whole] + 1
    # 1, 4, 1/4, 16, 1/16, ...; real models need only the first
    power = 4.0 ** ((turn + 1) // 2 * (1 if turn % 2 else -1))
    factor, scale = (power * facts.scale, 1 / power) if keys[key.name] > 1 else (power, facts.scale / power)
    if factor == 1:
        return replace(facts, scale=scale)
    scaled = emitter.op("Mul", [query, emitter.scalar(factor, facts.dtype)], "query_apart", facts.dtype)
    scaled.shape = query.shape
    node.inputs[0] = scaled
    return replace(facts, scale=scale)


def _rewrite(
    emitter: Emitter, facts: AttentionFacts, plan: AttentionPlan, mask: BuiltMask, views: dict[str, CacheView]
) -> None:
    node = facts.node
    operands = [node.inputs[0], *(slice_keys(emitter, t, mask.end, views) for t in node.inputs[1:3])]
    target = node.outputs[0]
    scores = node.outputs[3] if facts.qk_output else None
    node.outputs.clear()
    if plan.kind is AttentionKind.LOWERED:
        result = lower_attention(emitter, facts, operands, mask, scores)
    else:
        result = gs.Variable(emitter.name("attention"), dtype=facts.dtype)
        causal = {"is_causal": 1} if facts.causal and mask.bias is None else {}
        node.attrs = {"scale": facts.scale, **causal}
        node.inputs = operands + ([mask.bias] if mask.bias is not None else [])
        node.outputs = [result]
        if mask.row_visible is not None:
            zero = emitter.scalar(0.0, facts.dtype)
            result = emitter.op("Where", [mask.row_visible, result, zero], "attention_guarded", facts.dtype)
    result.inputs[0].outputs = [target]


def slice_keys(emitter: Emitter, tensor: gs.Tensor, end: gs.Tensor | None, views: dict[str, CacheView]) -> gs.Tensor:
    """Emit the first `end` rows of K or V ``[B, N, T, H]`` (None: all). A Slice comes before a cache's Transpose."""
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
        logical = partial(emitter.op, "Reshape", [result, emitter.ints(view.logical)], f"{result.name}_logical")
        result = emitter.once(("logical", result.name), logical)
    for move in moves:
        kind = elem_type(move.outputs[0])
        result = emitter.op(move.op, [result, *move.inputs[1:]], f"{result.name}_moved", kind, **move.attrs)
    result.shape = sliced_shape
    return result


def _splits_heads(node: gs.Node) -> bool:
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


def lower_attention(
    emitter: Emitter, facts: AttentionFacts, operands: list[gs.Tensor], mask: BuiltMask, scores: gs.Tensor | None
) -> gs.Variable:
    """Emit an attention in plain operators, and `scores` if given. The result ``[B, N, S_q, H_v]`` has Q's type."""
    query, key, value = operands
    if not isinstance(facts.query_heads, int) or not isinstance(facts.kv_heads, int):
        raise UnsupportedModelError(
            f"Attention '{facts.node.name}' must become MatMul and Softmax, because TensorRT's Attention cannot "
            "compute it; for this, its number of heads must be known: export the model with shapes (value_info)"
        )
    plain = _Plain(emitter, facts, facts.query_heads, facts.kv_heads)
    raw = plain.scores(query, key)
    capped = plain.capped(raw)
    masked = _masked(emitter, capped, mask, facts.dtype)
    weights = plain.weights(masked, mask)
    if scores is not None:
        stage = (raw, capped, masked, weights)[facts.qk_mode]
        name = emitter.name("qk_matmul_output:Identity")
        emitter.graph.nodes.append(gs.Node("Identity", name, {}, [stage], [scores]))
    return plain.weighted(weights, value)


class _Plain:
    """Emits the parts of one attention in plain operators.

    If G query heads share a K/V head, the operands of both products are ``[B, N_kv, G*S, ...]``: query head h reads K/V
    head h // G. Operators between the products compute tensors ``[B, N, S, K]``.
    """

    def __init__(self, emitter: Emitter, facts: AttentionFacts, query_heads: int, kv_heads: int) -> None:
        self.emitter, self.facts, self.dtype = emitter, facts, facts.dtype
        self.kv_heads, self.groups = kv_heads, query_heads // kv_heads

    def scores(self, query: gs.Tensor, key: gs.Tensor) -> gs.Variable:
        """Emit the scaled scores Q K^T, ``[B, N, S, K]``."""
        emitter, facts, dtype = self.emitter, self.facts, self.dtype
        is_shared = self.kv_heads == 1 and self.groups > 1
        # TensorRT has kernels for dequantized K only if no operator is between, so the product is scaled instead.
        maker = producer(key)
        is_rounded = maker is not None and is_op(maker, "DequantizeLinear")
        factor = emitter.scalar(facts.scale if is_shared or is_rounded else math.sqrt(facts.scale), dtype)
        if not is_rounded:
            query = emitter.op("Mul", [query, factor], "q_scaled", dtype)
        if self.groups > 1:
            heads = emitter.op("Shape", [query], "q_shape", INT64)
            grouped = emitter.ints([0, self.kv_heads, -1, facts.head_size])
            query = emitter.op("Reshape", [query, grouped], "q_grouped", dtype)
        if is_shared:
            scores = _over_one_head(emitter, query, key, dtype)
        else:
            scaled = key if is_rounded else emitter.op("Mul", [key, factor], "k_scaled", dtype)
            turned = emitter.op("Transpose", [scaled], "k_t", dtype, perm=[0, 1, 3, 2])
            scores = emitter.op("MatMul", [query, turned], "scores", dtype)
        self._keys = emitter.op("Shape", [scores], "key_length", INT64, start=3)
        if self.groups > 1:
            bounds = [emitter.ints([0]), emitter.ints([3]), emitter.ints([0])]
            self._rows = emitter.op("Slice", [heads, *bounds], "rows", INT64)
            per_head = emitter.op("Concat", [self._rows, self._keys], "scores_shape", INT64, axis=0)
            scores = emitter.op("Reshape", [scores, per_head], "scores_heads", dtype)
        if is_rounded and facts.scale != 1:
            scores = emitter.op("Mul", [scores, factor], "scores_scaled", dtype)
        return scores

    def capped(self, scores: gs.Variable) -> gs.Variable:
        """Apply the softcap to scores, if the attention has one."""
        if not self.facts.softcap:
            return scores
        limit = self.emitter.scalar(self.facts.softcap, self.dtype)
        parts = self.emitter.op("Div", [scores, limit], "capped", self.dtype)
        within = self.emitter.op("Tanh", [parts], "tanh", self.dtype)
        return self.emitter.op("Mul", [within, limit], "softcapped", self.dtype)

    def weights(self, scores: gs.Variable, mask: BuiltMask) -> gs.Variable:
        """Emit the softmax of masked scores. Rows without a visible key become 0."""
        emitter, facts, dtype = self.emitter, self.facts, self.dtype
        precision = facts.softmax_precision or dtype
        if precision != dtype:
            scores = emitter.op("Cast", [scores], "softmax_in", precision, to=precision)
        weights = emitter.op("Softmax", [scores], "softmax", precision, axis=-1)
        if mask.row_visible is not None:
            visible = [mask.row_visible, weights, emitter.scalar(0.0, precision)]
            weights = emitter.op("Where", visible, "rows", precision)
        if precision != dtype:
            weights = emitter.op("Cast", [weights], "weights", dtype, to=dtype)
        return weights

    def weighted(self, weights: gs.Variable, value: gs.Tensor) -> gs.Variable:
        """Emit the weighted sum of values, ``[B, N, S, H_v]``. Call `scores` first."""
        emitter, facts, dtype = self.emitter, self.facts, self.dtype
        if self.groups > 1:
            batch = emitter.op("Shape", [weights], "batch", INT64, start=0, end=1)
            sizes = [batch, emitter.ints([self.kv_heads, -1]), self._keys]
            grouped = emitter.op("Concat", sizes, "weights_shape", INT64, axis=0)
            weights = emitter.op("Reshape", [weights, grouped], "weights_grouped", dtype)
        if elem_type(facts.node.inputs[2]) not in (None, 0, dtype):
            value = emitter.op("Cast", [value], "v_cast", dtype, to=dtype)
        result = emitter.op("MatMul", [weights, value], "weighted", dtype)
        if self.groups > 1:
            sizes = [self._rows, emitter.ints([facts.value_head_size])]
            per_head = emitter.op("Concat", sizes, "y_shape", INT64, axis=0)
            result = emitter.op("Reshape", [result, per_head], "weighted_heads", dtype)
        return result


def _over_one_head(emitter: Emitter, query: gs.Tensor, key: gs.Tensor, dtype: int) -> gs.Variable:
    """Emit scores of scaled queries over one head of keys: ``[B, 1, R, H] @ [B, 1, T, H]^T -> [B, 1, R, T]``.

    Keys are the left operand, so that queries are transposed instead: TensorRT for RTX 1.7.1 makes two copies of
    transposed keys in each step. If keys are a Concat of columns (latents and rotated), the products are added.
    """
    parts, start = [], 0
    columns = _columns(key)
    for part, width in columns:
        some = query
        if len(columns) > 1:
            bounds = [emitter.ints([n]) for n in (start, start + width, 3)]
            some = emitter.op("Slice", [query, *bounds], "q_columns", dtype)
            start += width
        turned = emitter.op("Transpose", [some], "q_t", dtype, perm=[0, 1, 3, 2])
        parts.append(emitter.op("MatMul", [part, turned], "scores_t", dtype))
    whole = parts[0]
    for product in parts[1:]:
        whole = emitter.op("Add", [whole, product], "scores_t", dtype)
    return emitter.op("Transpose", [whole], "scores", dtype, perm=[0, 1, 3, 2])


def _columns(key: gs.Tensor) -> list[tuple[gs.Tensor, int]]:
    """If a Concat of columns makes K ``[B, N, T, H]``, return its inputs and their widths; otherwise K and 0."""
    node = producer(key)
    if node is None or not is_op(node, "Concat") or node.attrs["axis"] not in (-1, 3):
        return [(key, 0)]
    widths = [(dims(tensor) or ("?",))[-1] for tensor in node.inputs]
    parts = [(tensor, width) for tensor, width in zip(node.inputs, widths, strict=True) if isinstance(width, int)]
    return parts if len(parts) == len(widths) else [(key, 0)]


def _masked(emitter: Emitter, scores: gs.Variable, mask: BuiltMask, dtype: int) -> gs.Variable:
    if mask.bias is None:
        return scores
    if elem_type(mask.bias) == BOOL:
        hidden = emitter.scalar(float("-inf"), dtype)
        return emitter.op("Where", [mask.bias, scores, hidden], "masked", dtype)
    return emitter.op("Add", [scores, mask.bias], "masked", dtype)


@dataclass(frozen=True)
class BuiltMask:
    """A mask in the graph.

    Attributes:
        bias: bool (True = visible) or float (added to the scores), ``[B or 1, N or 1, S_q or 1, K]``; None: no mask.
        row_visible: bool, broadcastable to ``[B, N, S_q, 1]``; True if the query sees a key. None: every query does.
        end: int64 ``[1]``, the number of first keys that attention reads; None: all keys.
    """

    bias: gs.Tensor | None = None
    row_visible: gs.Tensor | None = None
    end: gs.Tensor | None = None


class _Builder:
    def __init__(self, emitter: Emitter, facts: AttentionFacts, plan: AttentionPlan, geometry: Mask) -> None:
        self.emitter, self.facts, self.plan, self.geometry = emitter, facts, plan, geometry
        self.windowed = geometry.left_window >= 0 or geometry.right_window >= 0
        self.span = next((t for t in emitter.graph.inputs if t.name == geometry.span), None)
        self.end: gs.Tensor | None = None

    def build(self) -> BuiltMask:
        emitter, facts, geometry = self.emitter, self.facts, self.geometry
        self.end = self._end()
        bias, row_visible = self._by_position()
        if facts.mask is not None:
            own, row_visible = self._own_mask(facts.mask), None
            if bias is None:
                bias = own
            elif geometry.additive:
                hidden = emitter.scalar(float("-inf"), facts.dtype)
                bias = emitter.op("Where", [bias, own, hidden], "bias", facts.dtype)
            else:
                bias = emitter.op("And", [bias, own], "visible_and_own", BOOL)
        if geometry.guarded and row_visible is None and bias is not None:
            row_visible = self._row_visible(bias)
        if bias is not None and self._has_one_row():
            # ONNX allows a mask of one row for all queries; ONNX Runtime 1.31 requires a row for each query.
            sizes = [emitter.ints([1, 1]), self._query_count(), emitter.ints([1])]
            shape = emitter.op("Concat", sizes, "mask_rows", INT64, axis=0)
            bias = emitter.op("Expand", [bias, shape], "mask", facts.dtype if geometry.additive else BOOL)
        if bias is not None:  # rename it as the plan says
            bias.name = geometry.name
        return BuiltMask(bias, row_visible if geometry.guarded else None, self.end)

    def _end(self) -> gs.Tensor | None:
        """Emit the number of keys to read: the length of the span input or mask, or the smaller of both; None: all."""
        emitter, facts, span = self.emitter, self.facts, self.span
        ends: list[gs.Tensor] = []
        if span is not None:
            shape = partial(emitter.op, "Shape", [span], f"{span.name}_end", INT64)
            ends.append(emitter.once(("end", span.name), shape))
        if facts.mask is not None and self.plan.keys != "all":
            length = (dims(facts.mask) or ("?",))[-1]
            if not isinstance(length, int):
                ends.append(emitter.op("Shape", [facts.mask], "mask_keys", INT64, start=-1))
            elif length != facts.keys:
                ends.append(emitter.ints([length]))
        if not ends:
            return None
        return ends[0] if len(ends) == 1 else emitter.op("Min", ends, "end", INT64)

    def _by_position(self) -> tuple[gs.Tensor | None, gs.Tensor | None]:
        """Emit which keys are visible by their position, and which queries see a key (None: positions do not tell)."""
        emitter, geometry = self.emitter, self.geometry
        length = self._length()
        if not geometry.causal and length is None and not self.windowed:
            return None, None
        keys = emitter.op("Unsqueeze", [self._key_positions(), emitter.ints([0, 1, 2])], "keys", INT64)
        parts: list[gs.Tensor] = []
        row_visible = None
        if geometry.causal or self.windowed:
            frontier = self._frontier()
        if geometry.causal:
            parts.append(emitter.op("LessOrEqual", [keys, frontier], "causal", BOOL))
            row_visible = emitter.op("GreaterOrEqual", [frontier, emitter.ints(0)], "row_visible", BOOL)
        elif length is not None:
            parts.append(emitter.op("Less", [keys, length], "valid", BOOL))
            row_visible = emitter.op("Greater", [length, emitter.ints(0)], "row_visible", BOOL)
        if geometry.left_window >= 0:
            oldest = emitter.op("Sub", [frontier, emitter.ints(geometry.left_window)], "oldest", INT64)
            parts.append(emitter.op("GreaterOrEqual", [keys, oldest], "left_window", BOOL))
        if geometry.right_window >= 0:
            newest = emitter.op("Add", [frontier, emitter.ints(geometry.right_window)], "newest", INT64)
            parts.append(emitter.op("LessOrEqual", [keys, newest], "right_window", BOOL))
        visible = parts[0]
        for part in parts[1:]:
            visible = emitter.op("And", [visible, part], "visible", BOOL)
        return visible, None if self.windowed else row_visible

    def _length(self) -> gs.Tensor | None:
        lengths = self.facts.lengths
        if lengths is None:
            return None
        axes = self.emitter.ints([1, 2, 3])
        unsqueeze = partial(self.emitter.op, "Unsqueeze", [lengths, axes], f"{lengths.name}_4d", INT64)
        return self.emitter.once(("length", lengths.name), unsqueeze)

    def _has_one_row(self) -> bool:
        """True if the mask has one row for several queries, because all see the same keys."""
        if self.facts.queries == 1 or self.geometry.causal or self.windowed:
            return False
        shape = dims(self.facts.mask) if self.facts.mask is not None else ()
        return shape is not None and (len(shape) < 2 or shape[-2] == 1)

    def _query_count(self) -> gs.Tensor:
        emitter, query = self.emitter, self.facts.node.inputs[0]
        source = sequence_source(emitter.graph, self.facts)
        if isinstance(source, int):
            return emitter.ints([source])
        name, axis = source
        tensor = query if query.name == name else emitter.graph.tensors()[name]
        shape = partial(emitter.op, "Shape", [tensor], "queries", INT64, start=axis, end=axis + 1)
        return emitter.once(("queries", source), shape)

    def _frontier(self) -> gs.Tensor:
        """Emit the last key that each causal query sees: ``i + lengths - S_q``, or ``i`` without lengths."""
        emitter, length = self.emitter, self._length()
        source = sequence_source(emitter.graph, self.facts)

        def make() -> gs.Tensor:
            count = self._query_count()
            if isinstance(source, int):
                steps: gs.Tensor = emitter.constant(np.arange(source, dtype=np.int64).reshape(1, 1, source, 1))
            else:
                steps = self._counted(count, "query_count", "steps")
                steps = emitter.op("Unsqueeze", [steps, emitter.ints([0, 1, 3])], "steps_4d", INT64)
            if length is None:
                return steps
            offset = emitter.op("Sub", [length, count], "offset", INT64)
            return emitter.op("Add", [offset, steps], "frontier", INT64)

        return emitter.once(("frontier", source, length.name if length is not None else None), make)

    def _key_positions(self) -> gs.Tensor:
        emitter, facts, end = self.emitter, self.facts, self.end
        if self.span is not None and facts.mask is None:
            return self.span
        if self.span is not None:
            return emitter.op("Slice", [self.span, emitter.ints([0]), end, emitter.ints([0])], "span_keys", INT64)
        if end is None and isinstance(facts.keys, int):
            return emitter.ints(list(range(facts.keys)))
        if end is None:
            end = emitter.op("Shape", [facts.node.inputs[1]], "key_shape", INT64, start=2, end=3)
        return self._counted(end, "key_count", "key_positions")

    def _counted(self, count: gs.Tensor, scalar: str, name: str) -> gs.Tensor:
        number = self.emitter.op("Squeeze", [count], scalar, INT64)
        return self.emitter.op("Range", [self.emitter.ints(0), number, self.emitter.ints(1)], name, INT64)

    def _own_mask(self, mask: gs.Tensor) -> gs.Tensor:
        emitter = self.emitter
        rank = len(dims(mask) or (0,) * 4)
        dtype = self.facts.dtype if self.geometry.additive else BOOL
        if self.end is not None and cut_rows(mask, self.end):
            mask.shape = None
        elif self.span is not None:
            mask = emitter.op("Slice", [mask, emitter.ints([0]), self.end, emitter.ints([-1])], "own_mask_cut", dtype)
        if rank < 4:
            mask = emitter.op("Unsqueeze", [mask, emitter.ints(list(range(4 - rank)))], "own_mask", dtype)
        elif self.span is None:
            mask = emitter.op("Identity", [mask], "own_mask", dtype)
        return mask

    def _row_visible(self, bias: gs.Tensor) -> gs.Tensor:
        """Emit a bool tensor: True for each query that sees a key, by a bool mask, or by a bias above -inf."""
        emitter, dtype = self.emitter, self.facts.dtype if self.geometry.additive else INT32
        scores = bias if self.geometry.additive else emitter.op("Cast", [bias], "flags", INT32, to=INT32)
        best = emitter.op("ReduceMax", [scores, emitter.ints([-1])], "best", dtype, keepdims=1)
        if self.geometry.additive:
            return emitter.op("Greater", [best, emitter.scalar(float("-inf"), dtype)], "row_visible", BOOL)
        return emitter.op("Cast", [best], "row_visible", BOOL, to=BOOL)

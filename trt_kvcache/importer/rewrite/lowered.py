"""Attention in plain operators, for what IAttention cannot express.

    scores  = (Q * sqrt(scale)) @ (K * sqrt(scale))^T       grouped: G query heads share one K/V head, nothing repeated
              one K/V head: (K @ (Q * scale)^T)^T, see `_over_one_head`
    scores  = softcap * tanh(scores / softcap)
    scores  = Where(mask, scores, -inf)  or  scores + bias
    weights = softmax(scores) in softmax_precision; rows that see no key become 0
    y       = weights @ V

Order and types follow the ONNX operator: https://onnx.ai/onnx/operators/onnx__Attention.html.
"""

from __future__ import annotations

import math

import onnx_graphsurgeon as gs

from trt_kvcache.errors import UnsupportedModelError
from trt_kvcache.importer.graph import BOOL, INT64, Emitter, dims, elem_type, is_op, producer
from trt_kvcache.importer.planning.attention_facts import AttentionFacts
from trt_kvcache.importer.rewrite.masks import Mask


def lower_attention(
    emitter: Emitter,
    facts: AttentionFacts,
    query: gs.Tensor,
    key: gs.Tensor,
    value: gs.Tensor,
    mask: Mask,
    scores_output: gs.Tensor | None,
) -> gs.Variable:
    """Emit the operators; Q, K and V are 4-D. Returns ``[B, N, S_q, H_v]`` in Q's type."""
    if not isinstance(facts.query_heads, int) or not isinstance(facts.kv_heads, int):
        raise UnsupportedModelError(
            f"Attention '{facts.node.name}' needs plain operators, and its number of heads is not in the model: "
            "export it with shapes"
        )
    plain = _Plain(emitter, facts, facts.query_heads, facts.kv_heads)
    raw = plain.scores(query, key)
    capped = plain.capped(raw)
    masked = _masked(emitter, capped, mask, facts.dtype)
    weights = plain.weights(masked, mask)
    if scores_output is not None:
        stage = (raw, capped, masked, weights)[facts.qk_mode]
        name = emitter.name("qk_matmul_output:Identity")
        emitter.graph.nodes.append(gs.Node("Identity", name, {}, [stage], [scores_output]))
    return plain.weighted(weights, value)


class _Plain:
    """One attention in plain operators, step by step.

    With several query heads to a K/V head, products are taken over ``[B, N_kv, G*S, ...]``: query head h reads K/V head
    h // G, so the G heads of a group lie together. All between the products sees ``[B, N, S, K]``.
    """

    def __init__(self, emitter: Emitter, facts: AttentionFacts, query_heads: int, kv_heads: int) -> None:
        self.emitter, self.facts, self.dtype = emitter, facts, facts.dtype
        self.kv_heads, self.groups = kv_heads, query_heads // kv_heads

    def scores(self, query: gs.Tensor, key: gs.Tensor) -> gs.Variable:
        """Q K^T, scaled, ``[B, N, S, K]``."""
        emitter, facts, dtype = self.emitter, self.facts, self.dtype
        is_shared = self.kv_heads == 1 and self.groups > 1
        # Products of rounded numbers are what TensorRT has kernels for: nothing stands between these.
        is_rounded = _is_rounded(key)
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
        """The scores within the softcap, if there is one."""
        if not self.facts.softcap:
            return scores
        limit = self.emitter.scalar(self.facts.softcap, self.dtype)
        parts = self.emitter.op("Div", [scores, limit], "capped", self.dtype)
        within = self.emitter.op("Tanh", [parts], "tanh", self.dtype)
        return self.emitter.op("Mul", [within, limit], "softcapped", self.dtype)

    def weights(self, scores: gs.Variable, mask: Mask) -> gs.Variable:
        """Softmax of masked scores; 0 in rows that see no key."""
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
        """The sum of the values by their weights, ``[B, N, S, H_v]``; after `scores`."""
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


def _is_rounded(tensor: gs.Tensor) -> bool:
    node = producer(tensor)
    return node is not None and is_op(node, "DequantizeLinear")


def _over_one_head(emitter: Emitter, query: gs.Tensor, key: gs.Tensor, dtype: int) -> gs.Variable:
    """The scores ``[B, 1, R, T]`` of scaled rows of queries ``[B, 1, R, H]`` over one head of keys ``[B, 1, T, H]``.

    Keys are on the left of the products, so that queries are transposed and not the rows of a cache: TensorRT for RTX
    1.7.1 makes two copies of transposed keys in each step. Keys that are joined of columns (latents, and what is
    rotated) are not joined either: scores are the sum of their products.
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
    """The parts that K ``[B, N, T, H]`` is joined of along its last axis, with widths; K alone if they are unknown."""
    node = producer(key)
    if node is None or not is_op(node, "Concat") or node.attrs["axis"] not in (-1, 3):
        return [(key, 0)]
    widths = [(dims(tensor) or ("?",))[-1] for tensor in node.inputs]
    parts = [(tensor, width) for tensor, width in zip(node.inputs, widths, strict=True) if isinstance(width, int)]
    return parts if len(parts) == len(widths) else [(key, 0)]


def _masked(emitter: Emitter, scores: gs.Variable, mask: Mask, dtype: int) -> gs.Variable:
    if mask.bias is None:
        return scores
    if elem_type(mask.bias) == BOOL:
        hidden = emitter.scalar(float("-inf"), dtype)
        return emitter.op("Where", [mask.bias, scores, hidden], "masked", dtype)
    return emitter.op("Add", [scores, mask.bias], "masked", dtype)

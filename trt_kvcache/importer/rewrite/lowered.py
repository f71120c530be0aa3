"""Attention in plain operators, for what IAttention cannot express.

    scores  = (Q * sqrt(scale)) @ (K * sqrt(scale))^T       grouped: G query heads share one K/V head, nothing repeated
    scores  = softcap * tanh(scores / softcap)
    scores  = Where(mask, scores, -inf)  or  scores + bias
    weights = softmax(scores) in softmax_precision; rows that see no key become 0
              with sinks: softmax([scores, sinks]) without its last column
    y       = weights @ V

Order and types follow the ONNX operator: https://onnx.ai/onnx/operators/onnx__Attention.html.
"""

from __future__ import annotations

import math

import onnx_graphsurgeon as gs

from trt_kvcache.errors import UnsupportedModelError
from trt_kvcache.importer.attention_facts import AttentionFacts
from trt_kvcache.importer.graph import BOOL, INT64, Emitter, elem_type
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
    dtype = facts.dtype
    if not isinstance(facts.query_heads, int) or not isinstance(facts.kv_heads, int):
        raise UnsupportedModelError(
            f"Attention '{facts.node.name}' needs plain operators, and its number of heads is not in the model: "
            "export it with shapes"
        )
    groups = facts.query_heads // facts.kv_heads
    root = emitter.scalar(math.sqrt(facts.scale), dtype)
    query = emitter.op("Mul", [query, root], "q_scaled", dtype)
    key = emitter.op("Transpose", [emitter.op("Mul", [key, root], "k_scaled", dtype)], "k_t", dtype, perm=[0, 1, 3, 2])
    # [B, N, S, H] -> [B, N_kv, G*S, H]: query head h reads K/V head h // G, so the G heads of a group lie together
    if groups > 1:
        grouped = emitter.op("Shape", [query], "q_shape", INT64)
        query = emitter.op(
            "Reshape", [query, emitter.ints([0, facts.kv_heads, -1, facts.head_size])], "q_grouped", dtype
        )
    scores = emitter.op("MatMul", [query, key], "scores", dtype)
    if groups > 1:
        rows = emitter.op("Slice", [grouped, emitter.ints([0]), emitter.ints([3]), emitter.ints([0])], "rows", INT64)
        keys = emitter.op("Shape", [key], "key_length", INT64, start=3)
        per_head = emitter.op("Concat", [rows, keys], "scores_shape", INT64, axis=0)
        scores = emitter.op("Reshape", [scores, per_head], "scores_heads", dtype)
    raw = scores
    if facts.softcap:
        limit = emitter.scalar(facts.softcap, dtype)
        scores = emitter.op("Mul", [emitter.op("Tanh", [emitter.op("Div", [scores, limit], "capped", dtype)],
                                               "tanh", dtype), limit], "softcapped", dtype)  # fmt: skip
    capped = scores
    scores = _masked(emitter, scores, mask, dtype)
    masked = scores
    precision = facts.softmax_precision or dtype
    if precision != dtype:
        scores = emitter.op("Cast", [scores], "softmax_in", precision, to=precision)
    if facts.sinks is not None:
        scores = _beside_sinks(emitter, facts.sinks, scores, precision)
    weights = emitter.op("Softmax", [scores], "softmax", precision, axis=-1)
    if facts.sinks is not None:
        ends = [emitter.ints([0]), emitter.ints([-1]), emitter.ints([-1])]
        weights = emitter.op("Slice", [weights, *ends], "without_sinks", precision)
    if mask.row_visible is not None:
        weights = emitter.op("Where", [mask.row_visible, weights, emitter.scalar(0.0, precision)], "rows", precision)
    if precision != dtype:
        weights = emitter.op("Cast", [weights], "weights", dtype, to=dtype)
    if scores_output is not None:
        _name_scores(emitter, [raw, capped, masked, weights][facts.qk_mode], scores_output)
    if groups > 1:
        keys = emitter.op("Shape", [key], "key_length", INT64, start=3)
        head = emitter.op("Concat", [_batch(emitter, weights), emitter.ints([facts.kv_heads, -1]), keys],
                          "weights_shape", INT64, axis=0)  # fmt: skip
        weights = emitter.op("Reshape", [weights, head], "weights_grouped", dtype)
    if elem_type(facts.node.inputs[2]) not in (None, 0, dtype):
        value = emitter.op("Cast", [value], "v_cast", dtype, to=dtype)
    result = emitter.op("MatMul", [weights, value], "weighted", dtype)
    if groups > 1:
        per_head = emitter.op("Concat", [rows, emitter.ints([facts.value_head_size])], "y_shape", INT64, axis=0)
        result = emitter.op("Reshape", [result, per_head], "weighted_heads", dtype)
    return result


def _masked(emitter: Emitter, scores: gs.Variable, mask: Mask, dtype: int) -> gs.Variable:
    if mask.bias is None:
        return scores
    if elem_type(mask.bias) == BOOL:
        hidden = emitter.scalar(float("-inf"), dtype)
        return emitter.op("Where", [mask.bias, scores, hidden], "masked", dtype)
    return emitter.op("Add", [scores, mask.bias], "masked", dtype)


def _beside_sinks(emitter: Emitter, sinks: gs.Tensor, scores: gs.Tensor, dtype: int) -> gs.Variable:
    """``[B, N, S_q, K]`` -> ``[B, N, S_q, K + 1]``: every row ends with the logit of its head."""
    column = emitter.op("Reshape", [sinks, emitter.ints([1, -1, 1, 1])], "sinks")
    if elem_type(sinks) != dtype:
        column = emitter.op("Cast", [column], "sinks_cast", dtype, to=dtype)
    rows = emitter.op("Shape", [scores], "sink_rows", INT64, start=0, end=3)
    shape = emitter.op("Concat", [rows, emitter.ints([1])], "sink_shape", INT64, axis=0)
    column = emitter.op("Expand", [column, shape], "sink_column", dtype)
    return emitter.op("Concat", [scores, column], "scores_and_sinks", dtype, axis=-1)


def _batch(emitter: Emitter, tensor: gs.Tensor) -> gs.Tensor:
    return emitter.op("Shape", [tensor], "batch", INT64, start=0, end=1)


def _name_scores(emitter: Emitter, tensor: gs.Variable, output: gs.Tensor) -> None:
    """Give the model's fourth output the chosen stage of the scores."""
    node = gs.Node("Identity", emitter.name("qk_matmul_output:Identity"), {}, [tensor], [output])
    emitter.graph.nodes.append(node)

"""Read the facts of Attention nodes off the graph.

Semantics: https://onnx.ai/onnx/operators/onnx__Attention.html.
"""

from __future__ import annotations

from dataclasses import dataclass

import onnx
import onnx_graphsurgeon as gs

from trt_kvcache.errors import InvalidModelError, UnsupportedModelError
from trt_kvcache.importer.graph import (
    consumers,
    contains,
    dims,
    dtype_name,
    elem_type,
    input_or_none,
    is_op,
    small_constant,
)
from trt_kvcache.importer.plan import Dim
from trt_kvcache.importer.protos import FLOATS


@dataclass(frozen=True)
class AttentionFacts:
    """One Attention node over Q, K and V ``[B, N, S, H]``.

    Attributes:
        qk_output: True if the graph reads the node's fourth output, the scores.
        columns: True if the graph reads single columns of them, so that each key must have its own.
        keys: number of keys: the size of K's sequence axis.
        queries: number of queries: the size of Q's sequence axis.
    """

    node: gs.Node
    dtype: int
    query_heads: Dim
    kv_heads: Dim
    head_size: int
    value_head_size: int
    causal: bool
    left_window: int
    right_window: int
    softcap: float
    softmax_precision: int | None
    scale: float
    qk_output: bool
    columns: bool
    qk_mode: int
    mask: gs.Tensor | None
    lengths: gs.Tensor | None
    keys: Dim
    queries: Dim

    @property
    def additive(self) -> bool:
        """True if the mask is a float bias."""
        return self.mask is not None and elem_type(self.mask) != onnx.TensorProto.BOOL

    @property
    def masked(self) -> bool:
        """True if a mask, lengths or a window hide keys beyond plain or upper-left causal attention."""
        return self.mask is not None or self.lengths is not None or self.left_window >= 0 or self.right_window >= 0


def read_attention(graph: gs.Graph, node: gs.Node) -> AttentionFacts:
    """Read one Attention node.

    Raises:
        UnsupportedModelError: the cache is inside the operator, or shapes are missing.
        InvalidModelError: the node breaks a rule of the operator.
    """
    if input_or_none(node, 4) is not None or input_or_none(node, 5) is not None:
        raise UnsupportedModelError(
            f"Attention '{node.name}' keeps its cache inside the operator (past_key, past_value), which TensorRT "
            "refuses; supported are caches updated by TensorScatter: export with static caches (opset 24)"
        )
    q, k, v = node.inputs[:3]
    if any(shape is not None and len(shape) != 4 for shape in map(dims, (q, k, v))):
        shapes = ", ".join(str(list(dims(tensor) or ())) for tensor in (q, k, v))
        raise InvalidModelError(f"Attention '{node.name}' has inputs {shapes}; ONNX allows ranks of 3 and 4, all alike")
    query_heads, kv_heads = axis_size(q, 1), axis_size(k, 1)
    kv_heads = kv_heads if isinstance(kv_heads, int) else axis_size(v, 1)
    head_size = next((d for d in (axis_size(k, 3), axis_size(q, 3)) if isinstance(d, int)), None)
    value_head_size = axis_size(v, 3)
    if head_size is None or not isinstance(value_head_size, int) or elem_type(q) in (None, 0):
        raise UnsupportedModelError(
            f"head size or type of Attention '{node.name}' is not in the model: export it with shapes"
        )
    if elem_type(q) not in FLOATS:
        raise InvalidModelError(
            f"Attention '{node.name}' has queries of {dtype_name(q)}; ONNX allows floating-point numbers"
        )
    if isinstance(query_heads, int) and isinstance(kv_heads, int) and query_heads % kv_heads:
        raise UnsupportedModelError(
            f"Attention '{node.name}' has {query_heads} query heads over {kv_heads} KV heads; supported are numbers of "
            "which the latter divides the former: attend to all heads in one product, and not to parts of them"
        )
    scale, softcap = float(node.attrs.get("scale", head_size**-0.5)), float(node.attrs.get("softcap", 0.0))
    if not 0 < scale < float("inf") or not 0 <= softcap < float("inf"):
        raise UnsupportedModelError(
            f"Attention '{node.name}' scales its scores by {scale:g} and caps them at {softcap:g}; supported are "
            "factors above 0, and caps above 0 or none (0)"
        )
    qk_mode = int(node.attrs.get("qk_matmul_output_mode", 0))
    if qk_mode not in range(4):
        raise InvalidModelError(f"Attention '{node.name}' has qk_matmul_output_mode {qk_mode}; ONNX allows 0 to 3")
    mask = input_or_none(node, 3)
    if mask is not None:
        _check_mask(node, mask, elem_type(q))
    precision = node.attrs.get("softmax_precision")
    return AttentionFacts(
        node=node,
        dtype=elem_type(q) or 0,
        query_heads=query_heads,
        kv_heads=kv_heads,
        head_size=head_size,
        value_head_size=value_head_size,
        causal=bool(node.attrs.get("is_causal", 0)),
        left_window=int(node.attrs.get("left_window_size", -1)),
        right_window=int(node.attrs.get("right_window_size", -1)),
        softcap=softcap,
        softmax_precision=int(precision) if precision else None,
        scale=scale,
        qk_output=len(node.outputs) > 3 and is_used(graph, node.outputs[3]),
        columns=reads_columns(graph, node),
        qk_mode=qk_mode,
        mask=mask,
        lengths=input_or_none(node, 6),
        keys=axis_size(k, 2),
        queries=axis_size(q, 2),
    )


def _check_mask(node: gs.Node, mask: gs.Tensor, dtype: int | None) -> None:
    """Refuse masks that the operator's type constraints allow, but whose meaning its text does not define."""
    shape = dims(mask)
    if elem_type(mask) not in (None, 0, onnx.TensorProto.BOOL, dtype):
        raise UnsupportedModelError(
            f"the mask '{mask.name}' of Attention '{node.name}' is {dtype_name(mask)}; ONNX says what bool means, and "
            f"the type of the queries, {dtype_name(node.inputs[0])}: cast it to one of them"
        )
    if shape is not None and len(shape) not in (1, 2, 3, 4):
        raise InvalidModelError(
            f"the mask '{mask.name}' of Attention '{node.name}' is {list(shape)}; ONNX allows [batch, heads, length, "
            "keys], or the last of these"
        )


def axis_size(tensor: gs.Tensor, axis: int) -> Dim:
    """The size of one axis; ``?`` if unknown."""
    shape = dims(tensor)
    return shape[axis] if shape is not None and -len(shape) <= axis < len(shape) else "?"


def reads_columns(graph: gs.Graph, node: gs.Node) -> bool:
    """True if the graph reads the scores of an Attention, its fourth output, other than as a sum over visible keys.

    Hidden keys add nothing to the sum of exponentials after the mask, so that it is the same with fewer of them.
    """
    scores = node.outputs[3] if len(node.outputs) > 3 else None
    if scores is None or not is_used(graph, scores):
        return False
    summed = int(node.attrs.get("qk_matmul_output_mode", 0)) == 2
    readers = [n for t in consumers(scores) for n in (consumers(t.outputs[0]) if is_op(t, "Cast") else [t])]
    return not summed or contains(graph.outputs, scores) or not all(map(_sums_rows, readers))


def _sums_rows(node: gs.Node) -> bool:
    axes = small_constant(node.inputs[1]) if is_op(node, "ReduceLogSumExp") and len(node.inputs) == 2 else None
    return axes is not None and axes.tolist() == [-1]


def is_used(graph: gs.Graph, tensor: gs.Tensor) -> bool:
    """True if a node or a graph output reads a tensor."""
    return not tensor.is_empty() and (bool(tensor.outputs) or contains(graph.outputs, tensor))

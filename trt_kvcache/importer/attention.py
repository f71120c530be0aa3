"""Find every Attention node of a prepared graph and plan how it is computed. Reads the graph, changes nothing.

Semantics: https://onnx.ai/onnx/operators/onnx__Attention.html. What TensorRT's parser does with the operator (drops
`nonpad_kv_seqlen` and the window attributes without a word, aligns `is_causal` to the upper left corner, refuses the
rest) was measured on TensorRT for RTX 1.7.1; tests/facts pins it.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import onnx
import onnx_graphsurgeon as gs

from trt_kvcache.errors import InvalidModelError, UnsupportedModelError
from trt_kvcache.importer.caches import VIEW_OPS
from trt_kvcache.importer.graph import (
    FLOATS,
    NAME_PREFIX,
    SINKS,
    SLOPES,
    consumers,
    contains,
    dims,
    dtype_name,
    elem_type,
    input_or_none,
    is_op,
    producer,
)
from trt_kvcache.importer.kernels import attention_kind
from trt_kvcache.importer.plan import (
    AttentionKind,
    AttentionPlan,
    CacheUpdate,
    Dim,
    MaskGeometry,
    PlanOptions,
    SpanInput,
    UpdateMode,
)
from trt_kvcache.importer.queries import MOST_READERS, sequence_axis, whole_query
from trt_kvcache.importer.rows_in_use import cuts_behind
from trt_kvcache.importer.scans import nodes_before_scans


@dataclass(frozen=True)
class AttentionFacts:
    """What one Attention node says. Ranks of Q, K and V are 3 (``[B, S, N*H]``) or 4 (``[B, N, S, H]``).

    Attributes:
        rank: of Q. K and V of a rewritten cache may be 4-D beside a 3-D Q.
        qk_output: the node's fourth output is read.
        keys: number of keys: the size of K's sequence axis.
        queries: number of queries: the size of Q's sequence axis.
        sinks: logits beside the scores, as many as query heads; None: none.
        slopes: what a score loses with each token behind its query, by query head; None: nothing.
    """

    node: gs.Node
    rank: int
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
    qk_mode: int
    mask: gs.Tensor | None
    lengths: gs.Tensor | None
    keys: Dim
    queries: Dim
    sinks: gs.Tensor | None
    slopes: gs.Tensor | None

    @property
    def additive(self) -> bool:
        """Whether the mask is a float bias."""
        own = self.mask is not None and elem_type(self.mask) != onnx.TensorProto.BOOL
        return own or self.slopes is not None

    @property
    def masked(self) -> bool:
        """Whether some query may see fewer keys than the plain or upper-left causal form says."""
        return self.mask is not None or self.lengths is not None or self.left_window >= 0 or self.right_window >= 0


@dataclass(frozen=True)
class AttentionAnalysis:
    """The plans of all Attention nodes, and the masks and spans that they share."""

    attention: tuple[AttentionPlan, ...]
    masks: tuple[MaskGeometry, ...]
    spans: tuple[SpanInput, ...]
    warnings: tuple[str, ...]


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
    rank = 3 if "q_num_heads" in node.attrs or "kv_num_heads" in node.attrs else 4
    if (shape := dims(q)) is not None:  # not K's: that of a rewritten cache is 4-D beside a 3-D Q
        rank = len(shape)
    if rank not in (3, 4):
        raise InvalidModelError(f"Attention '{node.name}' has inputs of rank {rank}; ONNX allows 3 and 4")
    if rank == 3:
        if not node.attrs.get("q_num_heads") or not node.attrs.get("kv_num_heads"):
            raise InvalidModelError(f"Attention '{node.name}' has 3-D inputs and lacks q_num_heads or kv_num_heads")
        query_heads: Dim = int(node.attrs["q_num_heads"])
        kv_heads: Dim = int(node.attrs["kv_num_heads"])
    else:
        query_heads, kv_heads = _axis(q, 1), _axis(k, 1)
        kv_heads = kv_heads if isinstance(kv_heads, int) else _axis(v, 1)
    head_size = _head_size(node, k, kv_heads) or _head_size(node, q, query_heads)
    value_head_size = _head_size(node, v, kv_heads)
    if head_size is None or value_head_size is None or elem_type(q) in (None, 0):
        raise UnsupportedModelError(
            f"head size or type of Attention '{node.name}' is not in the model: export it with shapes"
        )
    if elem_type(q) not in FLOATS:
        raise InvalidModelError(
            f"Attention '{node.name}' has queries of {dtype_name(q)}; ONNX allows floating-point numbers"
        )
    if isinstance(query_heads, int) and isinstance(kv_heads, int) and query_heads % kv_heads:
        raise InvalidModelError(
            f"Attention '{node.name}' has {query_heads} query heads over {kv_heads} KV heads; one must divide the other"
        )
    scale, softcap = float(node.attrs.get("scale", head_size**-0.5)), float(node.attrs.get("softcap", 0.0))
    if not 0 < scale < float("inf") or not 0 <= softcap < float("inf"):
        raise UnsupportedModelError(
            f"Attention '{node.name}' scales its scores by {scale:g} and caps them at {softcap:g}; supported are "
            "factors above 0, and caps above 0 or none (0)"
        )
    precision = node.attrs.get("softmax_precision")
    return AttentionFacts(
        node=node,
        rank=rank,
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
        qk_output=len(node.outputs) > 3 and _used(graph, node.outputs[3]),
        qk_mode=int(node.attrs.get("qk_matmul_output_mode", 0)),
        mask=input_or_none(node, 3),
        lengths=input_or_none(node, 6),
        keys=_axis(k, sequence_axis(k)),
        queries=_axis(q, sequence_axis(q)),
        sinks=input_or_none(node, SINKS),
        slopes=input_or_none(node, SLOPES),
    )


def analyze_attention(graph: gs.Graph, caches: tuple[CacheUpdate, ...], options: PlanOptions) -> AttentionAnalysis:
    """Plan every Attention node of the graph, in graph order.

    Raises:
        UnsupportedModelError, InvalidModelError: see `read_attention`.
    """
    present = {c.present: c for c in caches}
    plans: list[AttentionPlan] = []
    masks: dict[tuple[object, ...], MaskGeometry] = {}
    spans: dict[tuple[int, str], SpanInput] = {}
    warnings: list[str] = []
    queries: Counter[str] = Counter()
    before_scans = {id(node) for node in nodes_before_scans(graph)}
    for node in [n for n in graph.nodes if is_op(n, "Attention")]:
        queries[whole_query(node).name] += 1
        if queries[whole_query(node).name] > MOST_READERS:
            raise UnsupportedModelError(
                f"Attention '{node.name}' is one more than {MOST_READERS} over the query '{whole_query(node).name}': "
                "TensorRT's builder dies on attentions that share a query, and more cannot be told apart exactly; give "
                "each its own projection"
            )
        facts = read_attention(graph, node)
        for extra in node.outputs[1:3]:
            if _used(graph, extra):
                raise UnsupportedModelError(
                    f"Attention '{node.name}' gives its present key or value as '{extra.name}' without a past: only "
                    "caches updated by TensorScatter are supported"
                )
        kind, reason = attention_kind(facts)
        if kind is not AttentionKind.LOWERED and id(node) in before_scans:
            kind, reason = AttentionKind.LOWERED, "a Scan over a dynamic number of steps depends on it"
        behind = [_caches_behind(t, present) for t in node.inputs[1:3]]
        read = tuple(c.past for found in behind for c in found)
        span = _span(graph, facts, read if all(behind) else (), caches, options, spans, warnings)
        keys = "span" if span else "mask" if _shorter_mask(graph, facts, options) else "all"
        rings = any(c.mode is UpdateMode.CIRCULAR for c in caches if c.past in read)  # all of their rows are in use
        if keys == "all" and read and options.attention_span and facts.mask is not None and not rings:
            _warn(warnings, f"attention with mask '{facts.mask.name}' reads the whole capacity each step: its mask is "
                            "as long as the cache and no lengths input bounds it")  # fmt: skip
        geometry = _geometry(graph, facts, kind, span, masks)
        plans.append(
            AttentionPlan(
                node=node.name,
                dtype=dtype_name(node.inputs[0]),
                query_heads=facts.query_heads,
                kv_heads=facts.kv_heads,
                head_size=facts.head_size,
                value_head_size=facts.value_head_size,
                kind=kind,
                reason=reason,
                caches=read,
                mask=geometry.name if geometry else None,
                keys=keys,
            )
        )
    return AttentionAnalysis(tuple(plans), tuple(masks.values()), tuple(spans.values()), tuple(warnings))


def _span(
    graph: gs.Graph,
    facts: AttentionFacts,
    read: tuple[str, ...],
    caches: tuple[CacheUpdate, ...],
    options: PlanOptions,
    spans: dict[tuple[int, str], SpanInput],
    warnings: list[str],
) -> SpanInput | None:
    """The span input of this node, made once per capacity and lengths; None where the span is off or not safe.

    Rows at and beyond the longest valid length are masked for every query, so leaving them out changes nothing.
    """
    if not options.attention_span or not read or facts.lengths is None:
        return None
    capacities = {c.capacity for c in caches if c.past in read}
    if len(capacities) != 1 or facts.keys not in capacities:
        return None
    capacity = capacities.pop()
    source = _bounding_input(graph, facts.lengths)
    if source is None:
        _warn(warnings, f"lengths '{facts.lengths.name}' are computed in the graph, so no input bounds them: attention "
                        "reads the whole capacity each step")  # fmt: skip
        return None
    key = (capacity, source.name)
    if key not in spans:
        taken = {t.name for t in graph.tensors().values()} | {s.name for s in spans.values()}
        name = "attention_span" if not spans else f"attention_span_{capacity}"
        while name in taken:
            name += "_"
        spans[key] = SpanInput(name=name, symbol=name, capacity=capacity, lengths=source.name)
    return spans[key]


def _bounding_input(graph: gs.Graph, lengths: gs.Tensor) -> gs.Tensor | None:
    """The graph input that no value of `lengths` exceeds, through operators that keep or lower values."""
    tensor = lengths
    while not contains(graph.inputs, tensor):
        node = producer(tensor)
        if node is None or not is_op(node, "Cast", "Squeeze", "Unsqueeze", "Reshape", "Flatten", "Expand", "Min"):
            return None
        sources = [t for t in node.inputs if not isinstance(t, gs.Constant) and not t.is_empty()]
        data = node.inputs[0]
        if is_op(node, "Min"):
            if len(sources) != 1:
                return None
            data = sources[0]
        if isinstance(data, gs.Constant):
            return None
        tensor = data
    return tensor


def _shorter_mask(graph: gs.Graph, facts: AttentionFacts, options: PlanOptions) -> bool:
    """Whether the model's mask has, or may be given, fewer keys than K: ONNX masks the rest, so K is cut to it."""
    if facts.mask is None:
        return False
    length = _axis(facts.mask, -1)
    if isinstance(length, int) and isinstance(facts.keys, int):
        if length > facts.keys:
            raise InvalidModelError(
                f"the mask '{facts.mask.name}' of Attention '{facts.node.name}' covers {length} keys; there are "
                f"{facts.keys}"
            )
        return length < facts.keys or (options.attention_span and relaxable_mask(graph, facts))
    return length != facts.keys or length == "?"


def relaxable_mask(graph: gs.Graph, facts: AttentionFacts) -> bool:
    """Whether the caller may give a shorter mask: it is a graph input that only Attention nodes over caches read.

    ONNX pads a short mask with "masked", so a mask cut to the active length has the same meaning, and the step then
    costs the active length.
    """
    mask = facts.mask
    if mask is None or facts.lengths is not None or not contains(graph.inputs, mask) or facts.keys in ("?", 1):
        return False
    return all(
        is_op(n, "Attention")
        and input_or_none(n, 3) is mask
        and input_or_none(n, 6) is None
        and _axis(n.inputs[1], sequence_axis(n.inputs[1])) == facts.keys
        for n in consumers(mask)
    )


def _geometry(
    graph: gs.Graph,
    facts: AttentionFacts,
    kind: AttentionKind,
    span: SpanInput | None,
    masks: dict[tuple[object, ...], MaskGeometry],
) -> MaskGeometry | None:
    """The mask of this node, shared by all nodes with the same geometry; None where none is needed."""
    if not facts.masked and not (facts.causal and kind is AttentionKind.LOWERED):
        return None
    key = (
        facts.causal,
        facts.lengths.name if facts.lengths is not None else None,
        facts.left_window,
        facts.right_window,
        facts.mask.name if facts.mask is not None else None,
        facts.dtype if facts.additive else None,
        facts.slopes.name if facts.slopes is not None else None,
        span.name if span else _key_identity(facts),
        # one scalar of the batch's shape: nodes share a mask only where the number of queries is provably the same
        sequence_source(graph, facts),
    )
    if key not in masks:
        masks[key] = MaskGeometry(
            name=f"{NAME_PREFIX}mask_{len(masks)}",
            causal=facts.causal,
            lengths=facts.lengths.name if facts.lengths is not None else None,
            left_window=facts.left_window,
            right_window=facts.right_window,
            mask=facts.mask.name if facts.mask is not None else None,
            additive=facts.additive,
            span=span.name if span else None,
            guarded=facts.masked,
            slopes=facts.slopes.name if facts.slopes is not None else None,
        )
    return masks[key]


def _key_identity(facts: AttentionFacts) -> object:
    return facts.node.inputs[1].name if facts.keys == "?" else facts.keys


def sequence_source(graph: gs.Graph, facts: AttentionFacts) -> int | tuple[str, int]:
    """Where the number of queries is known from: a fixed size, or an axis of a graph input or of Q itself."""
    if isinstance(facts.queries, int):
        return facts.queries
    if facts.queries != "?":
        for tensor in graph.inputs:
            for axis, dim in enumerate(dims(tensor) or ()):
                if dim == facts.queries:
                    return tensor.name, axis
    return facts.node.inputs[0].name, sequence_axis(facts.node.inputs[0])


def _caches_behind(tensor: gs.Tensor, present: dict[str, CacheUpdate]) -> list[CacheUpdate]:
    """The cache that K or V is read from, through operators that only move or select values; or is computed from."""
    if cuts := cuts_behind(tensor):
        return [present[t.name] for cut in cuts if (t := cut.inputs[0]).name in present]
    while tensor.name not in present:
        node = producer(tensor)
        if node is None or not is_op(node, *VIEW_OPS):
            return []
        tensor = node.inputs[0]
    return [present[tensor.name]]


def _axis(tensor: gs.Tensor, axis: int) -> Dim:
    shape = dims(tensor)
    return shape[axis] if shape is not None and -len(shape) <= axis < len(shape) else "?"


def _head_size(node: gs.Node, tensor: gs.Tensor, heads: Dim) -> int | None:
    width = _axis(tensor, -1)
    if not isinstance(width, int):
        return None
    if sequence_axis(tensor) == 2:
        return width
    if not isinstance(heads, int) or heads < 1 or width % heads:
        raise InvalidModelError(
            f"'{tensor.name}' of Attention '{node.name}' is {width} wide, which {heads} heads do not divide"
        )
    return width // heads


def _used(graph: gs.Graph, tensor: gs.Tensor) -> bool:
    return not tensor.is_empty() and (bool(tensor.outputs) or contains(graph.outputs, tensor))


def _warn(warnings: list[str], text: str) -> None:
    if text not in warnings:
        warnings.append(text)

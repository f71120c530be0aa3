"""Find every Attention node of a prepared graph and plan how it is computed. Reads the graph, changes nothing.

Semantics: https://onnx.ai/onnx/operators/onnx__Attention.html. What TensorRT's parser does with the operator (drops
`nonpad_kv_seqlen` and the window attributes without a word, aligns `is_causal` to the upper left corner, refuses the
rest) was measured on TensorRT for RTX 1.7.1; tests/facts pins it.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import onnx_graphsurgeon as gs

from trt_kvcache.errors import InvalidModelError, UnsupportedModelError
from trt_kvcache.importer.analysis.attention_facts import (
    AttentionFacts,
    axis_size,
    gives_scores,
    is_used,
    read_attention,
)
from trt_kvcache.importer.analysis.caches import VIEW_OPS
from trt_kvcache.importer.analysis.kernels import attention_kind
from trt_kvcache.importer.analysis.queries import MOST_READERS, sequence_axis, whole_query
from trt_kvcache.importer.analysis.rows_in_use import cuts_behind
from trt_kvcache.importer.analysis.scans import nodes_before_scans
from trt_kvcache.importer.graph import (
    NAME_PREFIX,
    consumers,
    contains,
    dims,
    dtype_name,
    input_or_none,
    is_op,
    producer,
)
from trt_kvcache.importer.plan import (
    AttentionKind,
    AttentionPlan,
    CacheUpdate,
    MaskGeometry,
    PlanOptions,
    SpanInput,
    UpdateMode,
)


@dataclass(frozen=True)
class AttentionAnalysis:
    """The plans of all Attention nodes, and the masks and spans that they share."""

    attention: tuple[AttentionPlan, ...]
    masks: tuple[MaskGeometry, ...]
    spans: tuple[SpanInput, ...]
    warnings: tuple[str, ...]


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
            if is_used(graph, extra):
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
    if not options.attention_span or not read or facts.lengths is None or facts.qk_output:
        return None  # scores have a column for every key
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
    length = axis_size(facts.mask, -1)
    if facts.qk_output and length != facts.keys:
        raise UnsupportedModelError(
            f"the mask '{facts.mask.name}' of Attention '{facts.node.name}' covers {length} keys of {facts.keys}, and "
            "its scores (qk_matmul_output), which are used, have a column for each; supported beside scores are masks "
            "over all keys: export it so"
        )
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
        and not gives_scores(graph, n)
        and input_or_none(n, 3) is mask
        and input_or_none(n, 6) is None
        and axis_size(n.inputs[1], sequence_axis(n.inputs[1])) == facts.keys
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
        # Layers that do not say how many queries they have are taken to have the same number; the check runs them.
        _sequence_input(graph, facts),
    )
    if key not in masks:
        masks[key] = MaskGeometry(
            name=_free_name(graph, len(masks)),
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


def _free_name(graph: gs.Graph, number: int) -> str:
    """Of a mask; a model that is a rewritten one already may have some."""
    name, taken = f"{NAME_PREFIX}mask_{number}", graph.tensors().keys()
    while name in taken:
        name += "_"
    return name


def _key_identity(facts: AttentionFacts) -> object:
    return facts.node.inputs[1].name if facts.keys == "?" else facts.keys


def sequence_source(graph: gs.Graph, facts: AttentionFacts) -> int | tuple[str, int]:
    """The number of queries: a fixed size, or an axis of a graph input or of Q itself."""
    return _sequence_input(graph, facts) or (facts.node.inputs[0].name, sequence_axis(facts.node.inputs[0]))


def _sequence_input(graph: gs.Graph, facts: AttentionFacts) -> int | tuple[str, int] | None:
    """The number of queries, or the graph input and its axis that have it; None where nothing says."""
    if isinstance(facts.queries, int):
        return facts.queries
    places = ((tensor.name, axis, dim) for tensor in graph.inputs for axis, dim in enumerate(dims(tensor) or ()))
    return next(((name, axis) for name, axis, dim in places if dim == facts.queries != "?"), None)


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


def _warn(warnings: list[str], text: str) -> None:
    if text not in warnings:
        warnings.append(text)

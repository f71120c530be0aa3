"""Finds every Attention node of a prepared graph, and plans how to compute it.

Semantics: https://onnx.ai/onnx/operators/onnx__Attention.html. Facts about TensorRT were measured on TensorRT for RTX
1.7.1 without a GPU; tests/facts tests them. TensorRT's parser ignores `nonpad_kv_seqlen` and the window attributes
without a message, aligns `is_causal` to the upper left corner, and refuses the operator's other options, such as
`softcap`. If a build finds no fused kernel although the plan expects one, `trt_kvcache.engine.builder` builds again,
and lets TensorRT split every attention into plain operators.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import onnx
import onnx_graphsurgeon as gs

from trt_kvcache.errors import InvalidModelError, UnsupportedModelError
from trt_kvcache.importer.cache_plan import (
    AttentionKind,
    AttentionPlan,
    CacheUpdate,
    Dim,
    Mask,
    PlanOptions,
    SpanInput,
    UpdateMode,
)
from trt_kvcache.importer.graph import (
    NAME_PREFIX,
    consumers,
    contains,
    dims,
    dtype_name,
    elem_type,
    free_name,
    input_or_none,
    is_op,
    producer,
    small_constant,
)
from trt_kvcache.importer.operators import PASSES, RESHAPES
from trt_kvcache.importer.planning.cache_plans import row_slices
from trt_kvcache.importer.protos import FLOATS

_MOST_READERS = 5
"""The most attentions that may share a query. The rewrite scales it by 1, 4, 1/4, 16 or 1/16 (exact in float16)."""

_FUSED_REACH = 24_576
"""The largest sum of keys and head size that a fused kernel for one masked 16-bit query supports (48 KiB).

For several queries, there is a fused kernel at any length.
"""

_BOUNDED = (*RESHAPES, "Cast", "Expand", "Min")
"""Operators whose results never exceed the lengths that they read."""


@dataclass(frozen=True)
class AttentionAnalysis:
    """The plans of all Attention nodes, and the masks and spans (ranges of cache rows to read) that they share.

    Attributes:
        relaxed: maps mask inputs that may be shorter than the cache to the symbols of their last dimension.
    """

    attention: tuple[AttentionPlan, ...]
    masks: tuple[Mask, ...]
    spans: tuple[SpanInput, ...]
    warnings: tuple[str, ...]
    relaxed: dict[str, str]


def analyze_attention(graph: gs.Graph, caches: tuple[CacheUpdate, ...], options: PlanOptions) -> AttentionAnalysis:
    """Plan every Attention node of the graph, in graph order; refuse unsupported and invalid nodes."""
    planner = _Planner(graph, caches, options)
    plans = tuple(planner.plan(node) for node in graph.nodes if is_op(node, "Attention"))
    masks, spans = tuple(planner.masks.values()), tuple(planner.spans.values())
    return AttentionAnalysis(plans, masks, spans, tuple(planner.warnings), planner.relaxed)


class _Planner:
    """Plans Attention nodes one after the other. Nodes share equal masks, span inputs (`SpanInput`) and warnings."""

    def __init__(self, graph: gs.Graph, caches: tuple[CacheUpdate, ...], options: PlanOptions) -> None:
        self._graph = graph
        self._caches = caches
        self._present = {c.present: c for c in caches}
        self._options = options
        self._queries: Counter[str] = Counter()
        self._before_scans = {id(node) for node in nodes_before_scans(graph)}
        self.masks: dict[tuple[object, ...], Mask] = {}
        self.spans: dict[tuple[int, str], SpanInput] = {}
        self.warnings: dict[str, None] = {}
        self.relaxed: dict[str, str] = {}

    def plan(self, node: gs.Node) -> AttentionPlan:
        self._check_query(node)
        graph, facts = self._graph, read_attention(self._graph, node)
        for extra in node.outputs[1:3]:
            if is_used(graph, extra):
                raise UnsupportedModelError(
                    f"Attention '{node.name}' returns its present key or value '{extra.name}', but has no past; only "
                    "caches that TensorScatter updates are supported: export the model with static caches"
                )
        kind, reason = _attention_kind(facts)
        if kind is not AttentionKind.LOWERED and id(node) in self._before_scans:
            kind, reason = AttentionKind.LOWERED, "a Scan with a dynamic number of steps depends on this attention"
        by_operand = [self._caches_behind(t) for t in node.inputs[1:3]]
        read = tuple(c.past for caches in by_operand for c in caches)
        span = self._span(facts, read) if all(by_operand) else None
        keys = "span" if span else "mask" if self._shorter_mask(facts) else "all"
        # attention always reads all rows of a circular cache
        rings = any(c.mode is UpdateMode.CIRCULAR for c in self._caches if c.past in read)
        if keys == "all" and read and self._options.attention_span and facts.mask is not None and not rings:
            self.warnings[
                f"attention with mask '{facts.mask.name}' reads the whole capacity in each step, because its mask is "
                "as long as the cache, and the model has no lengths input"
            ] = None
        geometry = self._geometry(facts, kind, span)
        mask = geometry.name if geometry else None
        sizes = facts.query_heads, facts.kv_heads, facts.head_size, facts.value_head_size
        return AttentionPlan(node.name, dtype_name(node.inputs[0]), *sizes, kind, reason, read, mask, keys)

    def _check_query(self, node: gs.Node) -> None:
        query = whole_query(node).name
        self._queries[query] += 1
        if self._queries[query] > _MOST_READERS:
            raise UnsupportedModelError(
                f"more than {_MOST_READERS} Attention nodes read the query '{query}', for example '{node.name}'. "
                "TensorRT's builder crashes if attentions share a query. The rewrite scales the query of each "
                f"attention by another factor, but only {_MOST_READERS} factors are exact: compute a separate query "
                "for each attention"
            )

    def _caches_behind(self, tensor: gs.Tensor) -> list[CacheUpdate]:
        """Return the caches from which K or V is read. Operators between them may only move or select values."""
        if slices := row_slices(tensor):
            return [self._present[t.name] for piece in slices if (t := piece.inputs[0]).name in self._present]
        while tensor.name not in self._present:
            node = producer(tensor)
            if node is None or not is_op(node, *PASSES):
                return []
            tensor = node.inputs[0]
        return [self._present[tensor.name]]

    def _span(self, facts: AttentionFacts, read: tuple[str, ...]) -> SpanInput | None:
        """Return the span input of an Attention: its length says how many cache rows the node reads.

        Return None if the options turn spans off, or if no valid lengths hide all later rows from every query. Nodes
        with equal capacity and lengths share one span input.
        """
        if not self._options.attention_span or facts.lengths is None or facts.columns:
            return None  # the graph reads scores, which have a column for every key
        capacities = {c.capacity for c in self._caches if c.past in read}
        if len(capacities) != 1 or facts.keys not in capacities:
            return None
        capacity = capacities.pop()
        source = _bounding_input(self._graph, facts.lengths)
        if source is None:
            self.warnings[
                f"lengths '{facts.lengths.name}' are computed in the graph, so the caller cannot bound them: attention "
                "reads the whole capacity in each step"
            ] = None
            return None
        key = (capacity, source.name)
        if key not in self.spans:
            taken = {*self._graph.tensors(), *(s.name for s in self.spans.values())}
            name = free_name("attention_span" if not self.spans else f"attention_span_{capacity}", taken)
            self.spans[key] = SpanInput(name=name, symbol=name, capacity=capacity, lengths=source.name)
        return self.spans[key]

    def _shorter_mask(self, facts: AttentionFacts) -> bool:
        """True if a mask may cover fewer keys than K has. ONNX hides the other keys, so the rewrite must cut K."""
        if facts.mask is None:
            return False
        length = axis_size(facts.mask, -1)
        if facts.columns and length != facts.keys:
            raise UnsupportedModelError(
                f"the mask '{facts.mask.name}' of Attention '{facts.node.name}' covers {length} keys of {facts.keys}. "
                "The mask must cover all keys, because the model also reads the scores (qk_matmul_output). Export the "
                "model with a mask over all keys"
            )
        is_fixed = isinstance(length, int)
        may_be_shorter = self._options.attention_span and is_fixed and _relaxable_mask(self._graph, facts)
        if may_be_shorter:
            self.relaxed[facts.mask.name] = f"{facts.mask.name}_keys"
        if isinstance(length, int) and isinstance(facts.keys, int):
            if length > facts.keys:
                raise InvalidModelError(
                    f"the mask '{facts.mask.name}' of Attention '{facts.node.name}' covers {length} keys, but there "
                    f"are only {facts.keys}: export the model with a shorter mask"
                )
            return length < facts.keys or may_be_shorter
        return length != facts.keys or length == "?"

    def _geometry(self, facts: AttentionFacts, kind: AttentionKind, span: SpanInput | None) -> Mask | None:
        if not facts.masked and not (facts.causal and kind is AttentionKind.LOWERED):
            return None
        lengths, mask = (t.name if t is not None else None for t in (facts.lengths, facts.mask))
        keys = facts.node.inputs[1].name if facts.keys == "?" else facts.keys
        key = (
            facts.causal, lengths, facts.left_window, facts.right_window, mask, facts.dtype if facts.additive else None,
            span.name if span else keys,
            # Layers whose number of queries is unknown are assumed to have the same number; the check tests this.
            _sequence_input(self._graph, facts),
        )  # fmt: skip
        if key not in self.masks:
            name = free_name(f"{NAME_PREFIX}mask_{len(self.masks)}", set(self._graph.tensors()))
            windows, cut = (facts.left_window, facts.right_window), span.name if span else None
            self.masks[key] = Mask(name, facts.causal, lengths, *windows, mask, facts.additive, cut, facts.masked)
        return self.masks[key]


def _bounding_input(graph: gs.Graph, lengths: gs.Tensor) -> gs.Tensor | None:
    """Return the graph input that is an upper bound of `lengths`; None if operators between them may raise values."""
    tensor = lengths
    while not contains(graph.inputs, tensor):
        node = producer(tensor)
        if node is None or not is_op(node, *_BOUNDED):
            return None
        sources = [t for t in node.inputs[: None if is_op(node, "Min") else 1] if not isinstance(t, gs.Constant)]
        if len(sources) != 1:
            return None
        tensor = sources[0]
    return tensor


def _relaxable_mask(graph: gs.Graph, facts: AttentionFacts) -> bool:
    """True if the caller may give a shorter mask: it is an input that only Attention nodes over caches read."""
    mask = facts.mask
    if mask is None or facts.lengths is not None or not contains(graph.inputs, mask) or facts.keys in ("?", 1):
        return False
    return all(
        is_op(n, "Attention")
        and not reads_columns(graph, n)
        and input_or_none(n, 3) is mask
        and input_or_none(n, 6) is None
        and axis_size(n.inputs[1], 2) == facts.keys
        for n in consumers(mask)
    )


def sequence_source(graph: gs.Graph, facts: AttentionFacts) -> int | tuple[str, int]:
    """Return the number of queries, or, if it is not fixed, the name and axis of an input (or of Q) with this size."""
    return _sequence_input(graph, facts) or (facts.node.inputs[0].name, 2)


def _sequence_input(graph: gs.Graph, facts: AttentionFacts) -> int | tuple[str, int] | None:
    if isinstance(facts.queries, int):
        return facts.queries
    places = ((tensor.name, axis, dim) for tensor in graph.inputs for axis, dim in enumerate(dims(tensor) or ()))
    return next(((name, axis) for name, axis, dim in places if dim == facts.queries != "?"), None)


def whole_query(node: gs.Node) -> gs.Tensor:
    """Return an Attention's Q as it is before views, and before slices of positions (but not of heads)."""
    tensor = node.inputs[0]
    while (maker := producer(tensor)) is not None:
        if is_op(maker, "Slice"):
            axes = small_constant(input_or_none(maker, 3))
            rank = len(dims(maker.inputs[0]) or ()) or 4
            if axes is None or [int(a) % rank for a in axes] != [rank - 2]:
                break
        elif not is_op(maker, "Transpose", "Reshape", "Unsqueeze", "Squeeze"):
            break
        tensor = maker.inputs[0]
    return tensor


def nodes_before_scans(graph: gs.Graph) -> Iterator[gs.Node]:
    """Yield every node on which a Scan with a dynamic number of steps depends; TensorRT cannot build some of them.

    Measured on TensorRT for RTX 1.7.1: if such a Scan depends on an IAttention, the builder crashes (SIGSEGV); if it
    depends on a Tile or Expand, the build fails (see `rewrite.copy_repeats`). Attention in plain operators can be
    built. IAttention can be built after or beside a Scan, or before a Scan with a fixed number of steps.
    """
    pending = [node for node in graph.nodes if is_op(node, "Scan") and not _is_fixed(node)]
    seen: set[int] = set()
    while pending:
        for tensor in pending.pop().inputs:
            maker = producer(tensor)
            if maker is not None and id(maker) not in seen:
                seen.add(id(maker))
                pending.append(maker)
                yield maker


def _is_fixed(scan: gs.Node) -> bool:
    count = int(scan.attrs["num_scan_inputs"])
    axes = scan.attrs.get("scan_input_axes") or [0] * count
    return any(isinstance(axis_size(t, axis), int) for t, axis in zip(scan.inputs[-count:], axes, strict=True))


def _is_widened(tensor: gs.Tensor) -> bool:
    """True if a Cast lies between a cache and the keys or values. TensorRT for RTX 1.7.1 then builds no IAttention."""
    node = producer(tensor)
    while node is not None and is_op(node, *PASSES):
        if is_op(node, "Cast"):
            return True
        node = producer(node.inputs[0])
    return False


def _attention_kind(facts: AttentionFacts) -> tuple[AttentionKind, str]:
    """Return the form in which TensorRT gets an Attention, and why: an IAttention (fused or not) or plain operators."""
    half = facts.dtype in (onnx.TensorProto.FLOAT16, onnx.TensorProto.BFLOAT16)
    size = facts.head_size
    if facts.softcap:
        return AttentionKind.LOWERED, f"softcap {facts.softcap:g}"
    if facts.softmax_precision not in (None, facts.dtype):
        precision = onnx.TensorProto.DataType.Name(facts.softmax_precision).lower()
        return AttentionKind.LOWERED, f"softmax_precision {precision}"
    if facts.value_head_size != size:
        return AttentionKind.LOWERED, f"head size of K is {size}, but of V {facts.value_head_size}"
    if facts.qk_output:
        return AttentionKind.LOWERED, "qk_matmul_output is used"
    if elem_type(facts.node.inputs[2]) not in (None, 0, facts.dtype):
        return AttentionKind.LOWERED, "V has another type than Q and K"
    if not half and any(_is_widened(t) for t in facts.node.inputs[1:3]):
        return AttentionKind.LOWERED, "computed in float32, but caches have a narrower type"
    if half and size % 8:
        return AttentionKind.LOWERED, f"head size {size} is not a multiple of 8"
    if not half:
        return AttentionKind.DECOMPOSED, "only float16 and bfloat16 have fused kernels"
    if isinstance(facts.query_heads, int) and facts.query_heads < 4:
        # TensorRT has no kernel for one head. For two or three heads, it has none for a single query, as in decoding.
        return AttentionKind.DECOMPOSED, "fewer than 4 query heads have no fused kernel for decoding"
    if not 16 <= size <= 256:
        return AttentionKind.DECOMPOSED, f"head size {size} has no fused kernel"
    if isinstance(facts.keys, int) and facts.keys + size > _FUSED_REACH:
        return AttentionKind.DECOMPOSED, f"more than {_FUSED_REACH - size} keys have no fused kernel for decoding"
    return AttentionKind.FUSED, "dedicated kernel"


@dataclass(frozen=True)
class AttentionFacts:
    """Facts about one Attention node over Q, K and V ``[B, N, S, H]``.

    Attributes:
        qk_output: True if a node or graph output reads the scores (the node's fourth output).
        columns: True if the graph reads single columns of the scores, so that attention must read all keys.
        keys: the number of keys, which is the size of K's sequence axis.
        queries: the number of queries, which is the size of Q's sequence axis.
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
        """True if a mask, lengths or a window hide keys, which TensorRT's own causal attention cannot express."""
        return self.mask is not None or self.lengths is not None or self.left_window >= 0 or self.right_window >= 0


def read_attention(graph: gs.Graph, node: gs.Node) -> AttentionFacts:
    """Read one Attention node; refuse nodes that have a cache input, lack shapes, or break the operator's rules."""
    if input_or_none(node, 4) is not None or input_or_none(node, 5) is not None:
        raise UnsupportedModelError(
            f"Attention '{node.name}' contains its cache (past_key, past_value), which TensorRT does not support; only "
            "caches that TensorScatter updates are supported: export with static caches (opset 24)"
        )
    q, k, v = node.inputs[:3]
    if any(shape is not None and len(shape) != 4 for shape in map(dims, (q, k, v))):
        shapes = ", ".join(str(list(dims(tensor) or ())) for tensor in (q, k, v))
        raise InvalidModelError(
            f"Attention '{node.name}' has inputs {shapes}; ONNX requires that all have rank 3, or all rank 4: "
            "export the model again"
        )
    query_heads, kv_heads = axis_size(q, 1), axis_size(k, 1)
    kv_heads = kv_heads if isinstance(kv_heads, int) else axis_size(v, 1)
    head_size = next((d for d in (axis_size(k, 3), axis_size(q, 3)) if isinstance(d, int)), None)
    value_head_size = axis_size(v, 3)
    if head_size is None or not isinstance(value_head_size, int) or elem_type(q) in (None, 0):
        raise UnsupportedModelError(
            f"the head size or type of Attention '{node.name}' is unknown: export the model with shapes"
        )
    if elem_type(q) not in FLOATS:
        raise InvalidModelError(
            f"Attention '{node.name}' has queries of {dtype_name(q)}; ONNX allows only floating-point types: export "
            "the model again"
        )
    if isinstance(query_heads, int) and isinstance(kv_heads, int) and query_heads % kv_heads:
        raise UnsupportedModelError(
            f"Attention '{node.name}' has {query_heads} query heads and {kv_heads} KV heads; the number of query heads "
            "must be a multiple of the number of KV heads: export one attention over all heads, not over parts of them"
        )
    scale, softcap = float(node.attrs.get("scale", head_size**-0.5)), float(node.attrs.get("softcap", 0.0))
    if not 0 < scale < float("inf") or not 0 <= softcap < float("inf"):
        raise UnsupportedModelError(
            f"Attention '{node.name}' has scale {scale:g} and softcap {softcap:g}; the scale must be above 0 and "
            "finite, and the softcap 0 (none) or above"
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
    """Refuse masks of types or ranks for which the operator's specification defines no meaning."""
    shape = dims(mask)
    if elem_type(mask) not in (None, 0, onnx.TensorProto.BOOL, dtype):
        raise UnsupportedModelError(
            f"the mask '{mask.name}' of Attention '{node.name}' is {dtype_name(mask)}; ONNX allows bool or the type of "
            f"the queries ({dtype_name(node.inputs[0])}); cast the mask to one of these"
        )
    if shape is not None and len(shape) not in (1, 2, 3, 4):
        raise InvalidModelError(
            f"the mask '{mask.name}' of Attention '{node.name}' is {list(shape)}; ONNX allows [batch, heads, length, "
            "keys], or only the last ones of these axes"
        )


def axis_size(tensor: gs.Tensor, axis: int) -> Dim:
    """Return the size of one axis; ``?`` if unknown."""
    shape = dims(tensor)
    return shape[axis] if shape is not None and -len(shape) <= axis < len(shape) else "?"


def reads_columns(graph: gs.Graph, node: gs.Node) -> bool:
    """True if the graph reads individual scores (fourth output) of an Attention, not only a sum over visible keys."""
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

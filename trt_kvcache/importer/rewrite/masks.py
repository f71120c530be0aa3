"""Attention masks, computed once per geometry and shared by every layer.

    key position  k = 0 .. keys - 1                       [1, 1, 1, K]
    frontier      f = lengths - S_q + i   (i without lengths)   [B, 1, S_q, 1]
    visible         = k <= f and k >= f - left and ... and the model's own mask
    with slopes       Where(visible, slopes * (k - f), -inf)      [B, N, S_q, K]

TensorRT drops `nonpad_kv_seqlen` and aligns `is_causal` to the upper left corner, so the mask says explicitly what ONNX
means (bottom right, ragged lengths). An explicit mask is the one form that every supported TensorRT version gets right.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_graphsurgeon as gs

from trt_kvcache.importer.graph import BOOL, FLOAT, INT32, INT64, Emitter, dims
from trt_kvcache.importer.plan import AttentionPlan, MaskGeometry
from trt_kvcache.importer.planning.attention import sequence_source
from trt_kvcache.importer.planning.attention_facts import AttentionFacts, sequence_axis


@dataclass(frozen=True)
class Mask:
    """A built mask.

    Attributes:
        bias: bool (True = visible) or float (added to the scores), ``[B or 1, N or 1, S_q or 1, K]``; None: no mask.
        row_visible: bool, broadcastable to ``[B, N, S_q, 1]``: the query sees at least one key; None: it always does.
        end: int64 ``[1]``: how many keys take part; None: all.
    """

    bias: gs.Tensor | None
    row_visible: gs.Tensor | None
    end: gs.Tensor | None


def build_mask(graph: gs.Graph, emitter: Emitter, facts: AttentionFacts, plan: AttentionPlan,
               geometry: MaskGeometry | None) -> Mask:  # fmt: skip
    """The mask of one Attention node; nodes with the same geometry share it."""
    if geometry is None:
        return Mask(None, None, None)
    mask: Mask = emitter.once(("mask", geometry.name), lambda: _build(graph, emitter, facts, plan, geometry))
    return mask


def _build(
    graph: gs.Graph, emitter: Emitter, facts: AttentionFacts, plan: AttentionPlan, geometry: MaskGeometry
) -> Mask:
    end = _end(graph, emitter, facts, plan, geometry)
    visible, row_visible = _geometric(graph, emitter, facts, geometry, end)
    bias = visible
    if facts.slopes is not None and visible is not None:
        bias = _slanted(graph, emitter, facts, geometry, end, visible)
    if facts.mask is not None:
        own = _own_mask(emitter, facts, geometry, end)
        if geometry.additive:
            bias = own if visible is None else emitter.op(
                "Where", [visible, own, emitter.scalar(float("-inf"), facts.dtype)], "bias", facts.dtype
            )  # fmt: skip
        else:
            bias = own if visible is None else emitter.op("And", [visible, own], "visible_and_own", BOOL)
        row_visible = None
    if geometry.guarded and row_visible is None and bias is not None:
        row_visible = _row_visible(emitter, bias, geometry, facts.dtype)
    if bias is not None and _one_row(facts, geometry):
        # ONNX lets a mask of one row serve every query; ONNX Runtime 1.31 insists on a row per query.
        count = emitter.op("Concat", [emitter.ints([1, 1]), _query_count(graph, emitter, facts), emitter.ints([1])],
                           "mask_rows", INT64, axis=0)  # fmt: skip
        bias = emitter.op("Expand", [bias, count], "mask", facts.dtype if geometry.additive else BOOL)
    if bias is not None:  # the name that the plan gave
        bias.name = geometry.name
    return Mask(bias, row_visible if geometry.guarded else None, end)


def _end(graph: gs.Graph, emitter: Emitter, facts: AttentionFacts, plan: AttentionPlan,
         geometry: MaskGeometry) -> gs.Tensor | None:  # fmt: skip
    """How many keys take part: the span, or the length of a mask that is shorter, or both."""
    span = next((t for t in graph.inputs if geometry.span is not None and t.name == geometry.span), None)
    ends: list[gs.Tensor] = []
    if span is not None:
        ends.append(emitter.once(("end", span.name), lambda: emitter.op("Shape", [span], f"{span.name}_end", INT64)))
    if facts.mask is not None and plan.keys != "all":
        length = (dims(facts.mask) or ("?",))[-1]
        if isinstance(length, int):
            if length != facts.keys:
                ends.append(emitter.ints([length]))
        else:
            mask = facts.mask
            ends.append(emitter.op("Shape", [mask], "mask_keys", INT64, start=-1))
    if not ends:
        return None
    return ends[0] if len(ends) == 1 else emitter.op("Min", ends, "end", INT64)


def _geometric(
    graph: gs.Graph, emitter: Emitter, facts: AttentionFacts, geometry: MaskGeometry, end: gs.Tensor | None
) -> tuple[gs.Tensor | None, gs.Tensor | None]:
    """Visibility by position alone, and whether a row sees any key (None: decided from the mask itself)."""
    lengths = facts.lengths
    windowed = geometry.left_window >= 0 or geometry.right_window >= 0
    if not geometry.causal and lengths is None and not windowed:
        return None, None
    keys = _keys(graph, emitter, facts, geometry, end)
    parts: list[gs.Tensor] = []
    row_visible = None
    length = _length(emitter, facts)
    if geometry.causal or windowed:
        frontier = _frontier(graph, emitter, facts, length)
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
    return visible, None if windowed else row_visible


def _slanted(
    graph: gs.Graph,
    emitter: Emitter,
    facts: AttentionFacts,
    geometry: MaskGeometry,
    end: gs.Tensor | None,
    visible: gs.Tensor,
) -> gs.Tensor:
    """What slopes add to the scores, minus infinity where a key is hidden: in float32, where distances are exact."""
    keys, frontier = (
        _keys(graph, emitter, facts, geometry, end),
        _frontier(graph, emitter, facts, _length(emitter, facts)),
    )
    distance = emitter.op("Cast", [emitter.op("Sub", [keys, frontier], "behind", INT64)], "distance", FLOAT, to=FLOAT)
    slopes = emitter.op("Reshape", [facts.slopes, emitter.ints([1, -1, 1, 1])], "slopes", FLOAT)
    bias = emitter.op("Mul", [distance, slopes], "slanted", FLOAT)
    if facts.dtype != FLOAT:
        bias = emitter.op("Cast", [bias], "slanted_cast", facts.dtype, to=facts.dtype)
    return emitter.op("Where", [visible, bias, emitter.scalar(float("-inf"), facts.dtype)], "bias", facts.dtype)


def _length(emitter: Emitter, facts: AttentionFacts) -> gs.Tensor | None:
    """The valid lengths, int64 ``[B, 1, 1, 1]``."""
    lengths = facts.lengths
    if lengths is None:
        return None
    made: gs.Tensor = emitter.once(
        ("length", lengths.name),
        lambda: emitter.op("Unsqueeze", [lengths, emitter.ints([1, 2, 3])], f"{lengths.name}_4d", INT64),
    )
    return made


def _one_row(facts: AttentionFacts, geometry: MaskGeometry) -> bool:
    """Whether the mask says the same for all of several queries, and so has only one row for them."""
    if facts.queries == 1 or geometry.causal or geometry.left_window >= 0 or geometry.right_window >= 0:
        return False
    shape = dims(facts.mask) if facts.mask is not None else ()
    return shape is not None and (len(shape) < 2 or shape[-2] == 1)


def _query_count(graph: gs.Graph, emitter: Emitter, facts: AttentionFacts) -> gs.Tensor:
    """The number of queries, int64 ``[1]``."""
    source = sequence_source(graph, facts)
    if isinstance(source, int):
        return emitter.ints([source])
    name, axis = source
    tensor = facts.node.inputs[0] if facts.node.inputs[0].name == name else graph.tensors()[name]
    count: gs.Tensor = emitter.once(
        ("queries", source), lambda: emitter.op("Shape", [tensor], "queries", INT64, start=axis, end=axis + 1)
    )
    return count


def _frontier(graph: gs.Graph, emitter: Emitter, facts: AttentionFacts, length: gs.Tensor | None) -> gs.Tensor:
    """The last key that each query sees under bottom-right alignment: ``i + lengths - S_q``; without lengths ``i``."""
    source = sequence_source(graph, facts)

    def make() -> gs.Tensor:
        count = _query_count(graph, emitter, facts)
        if isinstance(source, int):
            steps: gs.Tensor = emitter.constant(np.arange(source, dtype=np.int64).reshape(1, 1, source, 1))
        else:
            scalar = emitter.op("Squeeze", [count], "query_count", INT64)
            steps = emitter.op("Range", [emitter.ints(0), scalar, emitter.ints(1)], "steps", INT64)
            steps = emitter.op("Unsqueeze", [steps, emitter.ints([0, 1, 3])], "steps_4d", INT64)
        if length is None:
            return steps
        offset = emitter.op("Sub", [length, count], "offset", INT64)
        return emitter.op("Add", [offset, steps], "frontier", INT64)

    frontier: gs.Tensor = emitter.once(("frontier", source, length.name if length is not None else None), make)
    return frontier


def _keys(
    graph: gs.Graph, emitter: Emitter, facts: AttentionFacts, geometry: MaskGeometry, end: gs.Tensor | None
) -> gs.Tensor:
    """Positions of the keys, int64 ``[1, 1, 1, K]``."""

    def make() -> gs.Tensor:
        positions = _key_positions(graph, emitter, facts, geometry, end)
        return emitter.op("Unsqueeze", [positions, emitter.ints([0, 1, 2])], "keys", INT64)

    keys: gs.Tensor = emitter.once(("keys", geometry.name), make)
    return keys


def _key_positions(
    graph: gs.Graph, emitter: Emitter, facts: AttentionFacts, geometry: MaskGeometry, end: gs.Tensor | None
) -> gs.Tensor:
    """0, 1, ... up to the number of keys that take part."""
    if geometry.span is not None:
        span = next(t for t in graph.inputs if t.name == geometry.span)
        if facts.mask is None or end is None:
            return span
        return emitter.op("Slice", [span, emitter.ints([0]), end, emitter.ints([0])], "span_keys", INT64)
    if end is None and isinstance(facts.keys, int):
        return emitter.ints(list(range(facts.keys)))
    if end is None:
        key = facts.node.inputs[1]
        axis = sequence_axis(key)
        end = emitter.op("Shape", [key], "key_shape", INT64, start=axis, end=axis + 1)
    count = emitter.op("Squeeze", [end], "key_count", INT64)
    return emitter.op("Range", [emitter.ints(0), count, emitter.ints(1)], "key_positions", INT64)


def _own_mask(emitter: Emitter, facts: AttentionFacts, geometry: MaskGeometry, end: gs.Tensor | None) -> gs.Tensor:
    """The model's mask as 4-D, cut to the keys that take part."""
    mask = facts.mask
    assert mask is not None
    rank = len(dims(mask) or (0,) * 4)
    dtype = facts.dtype if geometry.additive else BOOL
    if end is not None and (geometry.span is not None):
        mask = emitter.op("Slice", [mask, emitter.ints([0]), end, emitter.ints([-1])], "own_mask_cut", dtype)
    if rank < 4:
        mask = emitter.op("Unsqueeze", [mask, emitter.ints(list(range(4 - rank)))], "own_mask", dtype)
    elif mask is facts.mask:
        mask = emitter.op("Identity", [mask], "own_mask", dtype)
    return mask


def _row_visible(emitter: Emitter, bias: gs.Tensor, geometry: MaskGeometry, dtype: int) -> gs.Tensor:
    """Whether a row of the finished mask lets any key through."""
    if geometry.additive:
        best = emitter.op("ReduceMax", [bias, emitter.ints([-1])], "best", dtype, keepdims=1)
        return emitter.op("Greater", [best, emitter.scalar(float("-inf"), dtype)], "row_visible", BOOL)
    flags = emitter.op("Cast", [bias], "flags", INT32, to=INT32)
    best = emitter.op("ReduceMax", [flags, emitter.ints([-1])], "best", INT32, keepdims=1)
    return emitter.op("Cast", [best], "row_visible", BOOL, to=BOOL)

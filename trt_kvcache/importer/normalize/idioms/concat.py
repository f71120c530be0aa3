"""Caches that grow by Concat, and may be cut to the newest rows.

    past [B, N, P, D] --.                        past [B, N, L, D] ------.
                         Concat(axis=2) -> present      ->                TensorScatter(axis=2) -> present
    new [B, N, S, D] ---'                        new, write_indices -----'

The new rows come behind the past, on one axis, which is as long as the text. Or a Slice cuts it to the newest rows, as
for attention of a window, which `kept` proves: past holds min(P, R) rows then, and attention reads what is not cut yet.
"""

from __future__ import annotations

from collections.abc import Sequence

import onnx_graphsurgeon as gs

from trt_kvcache.importer.graph import dims, is_op
from trt_kvcache.importer.normalize.candidate import (
    Candidate,
    Geometry,
    Proof,
    may_be_cache,
    nearest_update,
    richest,
)
from trt_kvcache.importer.normalize.views import cache_axis, trace_back

_ONE_SIDE = (
    "export what holds before and after that: with transformers, give caches to DynamicCache(past, config=config), "
    "which counts the rows that it is given, and leave cumulative_length alone"
)


def find(graph: gs.Graph, node: gs.Node, present: gs.Tensor, after: tuple[gs.Node, ...]) -> Candidate | None:
    """The update that a Concat makes; None where none of its inputs is a cache."""
    for index, tensor in enumerate(node.inputs):
        past, views = trace_back(tensor, cut=True)
        if may_be_cache(graph, past):
            axis = cache_axis(past, views, int(node.attrs["axis"]))
            others = tuple(t for i, t in enumerate(node.inputs) if i != index)
            reason = _why_not(node, index, past, axis)
            idiom = "Concat, Slice" if any(is_op(n, "Slice") for n in (*views, *after)) else "Concat"
            return Candidate(
                idiom, past, present, node, axis, True, views=views, after=after, updates=others, reason=reason
            )
    return None


def _why_not(node: gs.Node, index: int, past: gs.Tensor, axis: int | None) -> str:
    if len(node.inputs) != 2:
        return f"it joins {len(node.inputs)} tensors, where a past is joined with its new rows"
    if index != 0:
        return "it puts the new rows before the past"
    if axis == 0:
        return "it grows along the batch"
    length = room_of(past, axis)
    if length is not None:
        return f"its axis {axis} has the fixed size {length}, so that a step's result is no input of the next"
    return ""


def room_of(past: gs.Tensor, axis: int | None) -> int | None:
    """Rows of a past that always has as many."""
    length = dims(past)[axis] if axis is not None else "?"  # type: ignore[index]
    return length if isinstance(length, int) else None


def prove(candidate: Candidate, geometries: Sequence[Geometry]) -> Proof:
    """Show that a Concat puts S rows behind P rows.

    Raises:
        UnsupportedModelError: it does not.
    """
    assert candidate.node is not None
    geometry = richest(geometries)
    operand_axis = int(candidate.node.attrs["axis"]) % len(geometry.layout)
    group = geometry.layout[operand_axis]
    if len(group) != 1 or group[0] == 0:
        raise candidate.refusal(
            f"axis {operand_axis} of '{candidate.operand.name}' is not the sequence axis of the cache"
        )
    axis = group[0]
    update = candidate.updates[0]
    for g in geometries:
        wanted = list(g.operand_shape)
        wanted[operand_axis] = g.step.length
        shape = g.step.probe.shape(update.name)
        if shape is None and any(other.step.probe.shape(update.name) is not None for other in geometries):
            raise candidate.refusal(
                f"nothing says the shape of '{update.name}' with {g.step.past} tokens before {g.step.length} new ones: "
                "sizes do not fit each other there, as where an exporter chose one side of a condition for good, such "
                "as whether a sliding window is full",
                _ONE_SIDE,
            )
        held = g.step.held(candidate.kept) if candidate.room is None else candidate.room
        if g.sizes[axis] != held or shape != tuple(wanted):
            raise candidate.refusal(
                f"'{update.name}' has shape {_shape(shape)} in a step of {g.step.length} tokens, where the new rows "
                f"have {_shape(tuple(wanted))}"
            )
    return Proof(axis, *nearest_update(candidate, update, geometry.layout, axis, geometries))


def _shape(shape: tuple[int, ...] | None) -> str:
    return "?" if shape is None else f"[{', '.join(map(str, shape))}]"

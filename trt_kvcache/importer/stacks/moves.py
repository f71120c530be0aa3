"""Operators that choose pieces of a stacked tensor, or move its axes."""

from __future__ import annotations

import numpy as np
import onnx_graphsurgeon as gs

from trt_kvcache.importer.graph import INT64, dims, input_or_none
from trt_kvcache.importer.stacks.pieces import Pieces, UnsplittableError, axis_of, chosen, perm_of, text_of


def on_gather(at: Pieces, node: gs.Node) -> None:
    """Gather chooses pieces, or rows of each."""
    source, index = at.first(node), node.inputs[1]
    axis = axis_of(node.attrs.get("axis", 0), source.rank)
    if axis == source.axis:
        chosen = at.value(index)
        if chosen is None:
            raise UnsplittableError(f"Gather '{node.name}' computes which one it reads ('{index.name}')")
        if chosen.ndim == 0:
            at.become(node.outputs[0], source.pieces[int(chosen)])
        elif chosen.ndim == 1:
            at.put(node, axis, [source.pieces[int(i)] for i in chosen], source.rank)
        else:
            raise UnsplittableError(f"Gather '{node.name}' reads several in {chosen.ndim} dimensions")
        return
    extra = len(index.shape) if index.shape is not None else None
    if extra is None:
        raise UnsplittableError(f"nothing says the rank of '{index.name}', which Gather '{node.name}' reads")
    own = axis - (axis > source.axis)
    made = [at.emit.op("Gather", [p, index], "piece", axis=own) for p in source.pieces]
    at.put(node, source.axis + (extra - 1 if axis < source.axis else 0), made, source.rank + extra - 1)


def on_slice(at: Pieces, node: gs.Node) -> None:
    """Slice chooses a range of pieces, or cuts each."""
    source = at.first(node)
    starts, ends, given, steps = (*node.inputs[1:], *[None] * 4)[:4]
    given, steps = (None if t is None or t.is_empty() else t for t in (given, steps))
    first = at.value(starts)
    count = len(first) if first is not None else (dims(starts) or ("?",))[0]
    known = at.value(given) if given is not None else np.arange(count) if isinstance(count, int) else None
    if known is None:
        raise UnsplittableError(f"nothing says along which axes Slice '{node.name}' cuts")
    axes = [axis_of(a, source.rank) for a in known]
    pieces = list(source.pieces)
    numbers = [starts, ends, steps]
    if source.axis in axes:
        place = axes.index(source.axis)
        values = [at.value(t) if t is not None else np.ones(len(axes), int) for t in numbers]
        if any(v is None for v in values):
            raise UnsplittableError(f"Slice '{node.name}' computes which ones it reads")
        start, end, step = (int(v[place]) for v in values if v is not None)
        pieces = [pieces[i] for i in chosen(start, end, step, len(pieces))]
        numbers = [t if t is None else at.without(t, place, "piece_range") for t in numbers]
        axes.pop(place)
    if axes:
        kept = at.emit.ints([a - (a > source.axis) for a in axes])
        ranges = [numbers[0], numbers[1], kept, *([] if numbers[2] is None else [numbers[2]])]
        pieces = [at.emit.op("Slice", [p, *ranges], "piece") for p in pieces]
    at.put(node, source.axis, pieces, source.rank)


def on_split(at: Pieces, node: gs.Node) -> None:
    """Split deals the pieces out, or splits each."""
    source = at.first(node)
    axis = axis_of(node.attrs.get("axis", 0), source.rank)
    given = input_or_none(node, 1)
    count = len(source.pieces)
    if axis != source.axis:
        own = {**node.attrs, "axis": axis - (axis > source.axis)}
        parts = [[gs.Variable(at.emit.name("piece"), dtype=p.dtype) for _ in node.outputs] for p in source.pieces]
        for piece, made in zip(source.pieces, parts, strict=True):
            name = at.emit.name("piece:Split")
            at.graph.nodes.append(gs.Node("Split", name, dict(own), [piece, *node.inputs[1:]], made))
        for place, output in enumerate(node.outputs):
            at.set(output, source.axis, tuple(made[place] for made in parts), source.rank, at.origin(node))
        return
    sizes = node.attrs.get("split") if given is None else at.value(given)
    if sizes is None and given is not None:
        raise UnsplittableError(f"Split '{node.name}' computes how many it takes")
    even = -(-count // len(node.outputs))
    ends = np.minimum(np.cumsum(sizes if sizes is not None else [even] * len(node.outputs)), count)
    for output, start, end in zip(node.outputs, [0, *ends], ends, strict=False):
        at.set(output, axis, source.pieces[int(start) : int(end)], source.rank, at.origin(node))


def on_squeeze(at: Pieces, node: gs.Node) -> None:
    """Squeeze takes away the axis of a single piece, or axes of each."""
    source = at.first(node)
    axes = at.axes(node, source.rank)
    if axes is None:
        raise UnsplittableError(f"nothing says which axes Squeeze '{node.name}' takes away")
    others = [a - (a > source.axis) for a in axes if a != source.axis]
    made = [at.emit.op("Squeeze", [p, at.emit.ints(others)], "piece") if others else p for p in source.pieces]
    if source.axis not in axes:
        at.put(node, source.axis - sum(a < source.axis for a in axes), made, source.rank - len(axes))
    elif len(made) == 1:
        at.become(node.outputs[0], made[0])
    else:
        raise UnsplittableError(f"Squeeze '{node.name}' takes away an axis of size {len(made)}")


def on_unsqueeze(at: Pieces, node: gs.Node) -> None:
    """Unsqueeze adds axes to each piece."""
    source = at.first(node)
    added = input_or_none(node, 1)
    axes = node.attrs.get("axes") if added is None else at.value(added)
    if axes is None:
        raise UnsplittableError(f"nothing says which axes Unsqueeze '{node.name}' adds")
    rank = source.rank + np.asarray(axes).size
    new = [axis_of(a, rank) for a in np.asarray(axes).reshape(-1)]
    axis = [a for a in range(rank) if a not in new][source.axis]
    own = at.emit.ints([a - (a > axis) for a in new])
    at.put(node, axis, [at.emit.op("Unsqueeze", [p, own], "piece") for p in source.pieces], rank)


def on_transpose(at: Pieces, node: gs.Node) -> None:
    """Transpose moves the axis of the pieces, and transposes each."""
    source = at.first(node)
    perm = perm_of(node, source.rank)
    axis = perm.index(source.axis)
    at.put(node, axis, [at.turned(p, perm, axis) for p in source.pieces], source.rank)


def on_reshape(at: Pieces, node: gs.Node) -> None:
    """Reshape leaves the axis of the pieces, splits it, merges it with the next, or drops it where it is one piece."""
    source, target = at.first(node), node.inputs[1]
    axis, count = source.axis, len(source.pieces)
    before, after = dims(node.inputs[0]) or (), dims(node.outputs[0]) or ()
    known = at.value(target)
    copies = known is not None and not node.attrs.get("allowzero", 0) and 0 in known.reshape(-1)[axis:]
    same = "?" not in before[:axis] and before[:axis] == after[:axis] and len(after) > axis
    outer, inner = (after[axis], after[axis + 1 : axis + 2]) if same else (0, ())
    second = before[axis + 1] if axis + 1 < len(before) else "?"

    if same and outer == count:
        at.put(node, axis, at.reshaped(node, source.pieces, before[axis + 1 :], after[axis + 1 :], [axis]), len(after))
    elif count == 1 and not copies:
        at.become(node.outputs[0], at.emit.op("Reshape", [source.pieces[0], target], "piece", **node.attrs))
    elif isinstance(outer, int) and outer and inner == (count // outer,) and count % outer == 0:
        parts = at.reshaped(node, source.pieces, before[axis + 1 :], after[axis + 2 :], [axis, axis])
        groups = [parts[i : i + count // outer] for i in range(0, count, count // outer)]
        at.put(node, axis, [at.joined(group, axis, len(after) - 1) for group in groups], len(after))
    elif isinstance(second, int) and outer == count * second and len(after) == len(before) - 1:
        parts = [q for p in source.pieces for q in at.taken_apart(p, axis, second)]
        at.put(node, axis, at.reshaped(node, parts, before[axis + 2 :], after[axis + 1 :], [axis]), len(after))
    else:
        raise UnsplittableError(f"Reshape '{node.name}' mixes them ({text_of(before)} -> {text_of(after)})")


def on_shape(at: Pieces, node: gs.Node) -> None:
    """Shape is that of any piece, and their number."""
    source = at.first(node)
    start, end = (int(node.attrs.get(k, d)) for k, d in (("start", 0), ("end", source.rank)))
    wanted = range(source.rank)[start:end]
    own = at.emit.op("Shape", [source.pieces[0]], "piece_shape", dtype=INT64)
    sides = [a for a in wanted if a < source.axis], [a - 1 for a in wanted if a > source.axis]
    parts = [
        at.emit.op("Slice", [own, *map(at.emit.ints, ([places[0]], [places[-1] + 1], [0]))], "piece_shape", INT64)
        for places in sides
        if places
    ]
    if source.axis in wanted:
        parts.insert(int(wanted[0] < source.axis), at.emit.ints([len(source.pieces)]))
    made = parts[0] if len(parts) == 1 else at.emit.op("Concat", parts, "whole_shape", INT64, axis=0)
    at.become(node.outputs[0], made)

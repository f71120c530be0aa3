"""What operators do to a tensor that holds several caches, said of each cache by itself.

    past [L, B, N, P, H] -- Gather(1, axis=0) -> [B, N, P, H]           becomes     past.1
    past [L, B, N, P, H] -- Transpose(0, 1, 3, 2, 4)                    becomes     L x Transpose(0, 2, 1, 3)
    past -- ScatterND([1, b, n, row], new) -> Gather(1)                 becomes     ScatterND(past.1, [b, n, row], new)

Every rule is an identity: it holds whatever the caches are and wherever the operator stands. What no rule says of an
operator is refused by name.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import onnx_graphsurgeon as gs

from trt_kvcache.importer.extensions.stacked_caches.pieces import (
    Pieces,
    Stacked,
    UnsplittableError,
    axis_of,
    chosen,
    perm_of,
    rank_of,
    text_of,
)
from trt_kvcache.importer.graph import INT64, dims, input_or_none, is_op, producer

__all__ = ["split_readers"]

_SPREADS = ("Expand", "Unsqueeze", "Squeeze", "Reshape", "Identity", "Cast", "Tile", "Transpose")


def split_readers(pieces: Pieces) -> None:
    """Let what reads stacked tensors read their pieces.

    Args:
        pieces: knows those of the graph's inputs; then of everything that is made of them as a whole.

    Raises:
        UnsplittableError: naming the operator that cannot be said of each by itself.
    """
    for node in list(pieces.graph.nodes):
        name = pieces.origin(node)
        if name is None:
            continue
        rule = _RULES.get(node.op) if is_op(node, node.op) else None
        try:
            if rule is None:
                raise UnsplittableError(f"{node.op} '{node.name}' reads it as a whole")
            rule(pieces, node)
        except (UnsplittableError, IndexError) as error:
            raise UnsplittableError(f"'{name}' holds several caches, and {error}") from None


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


def on_concat(at: Pieces, node: gs.Node) -> None:
    """Concat puts pieces behind each other, or joins each with its counterpart."""
    source = next(s for t in node.inputs if (s := at.of(t)) is not None)
    axis = axis_of(node.attrs["axis"], source.rank)
    along = [s.axis for t in node.inputs if (s := at.of(t)) is not None]
    if set(along) != {source.axis}:
        raise UnsplittableError(f"Concat '{node.name}' joins some that lie along other axes")
    size = None if axis == source.axis else len(source.pieces)
    parts = [at.taken_apart(t, source.axis, size) for t in node.inputs]
    if axis == source.axis:
        at.put(node, axis, [piece for part in parts for piece in part], source.rank)
        return
    if len({len(part) for part in parts}) > 1:
        raise UnsplittableError(f"Concat '{node.name}' joins different numbers of them")
    own = axis - (axis > source.axis)
    made = [at.emit.op("Concat", list(group), "piece", axis=own) for group in zip(*parts, strict=True)]
    at.put(node, source.axis, made, source.rank)


def on_broadcast(at: Pieces, node: gs.Node) -> None:
    """Operators that work element by element."""
    held = [at.of(t) for t in node.inputs]
    ranks = [rank_of(t) if s is None else s.rank for t, s in zip(node.inputs, held, strict=True)]
    whole = {(s.rank - s.axis, len(s.pieces)) for s in held if s is not None}
    if len(whole) > 1:
        raise UnsplittableError(f"{node.op} '{node.name}' combines them in different orders")
    behind, count = whole.pop()
    operands: list[Sequence[gs.Tensor]] = []
    for tensor, rank in zip(node.inputs, ranks, strict=True):
        parts = [tensor] if rank < behind else at.taken_apart(tensor, rank - behind)
        if len(parts) not in (1, count):
            raise UnsplittableError(f"{node.op} '{node.name}' repeats them {len(parts)} times")
        operands.append(parts * (count // len(parts)))
    made = []
    for group in zip(*operands, strict=True):
        dtype = int(node.attrs["to"]) if node.op == "Cast" else group[-1].dtype  # Where's first one is bool
        made.append(at.emit.op(node.op, list(group), "piece", dtype, **node.attrs))
    at.put(node, max(ranks) - behind, made, max(ranks))


def on_scatter_nd(at: Pieces, node: gs.Node) -> None:
    """ScatterND writes into one piece that its index names by a constant, or into each."""
    source = at.first(node)
    data, index, updates = node.inputs
    if any(at.of(t) is not None for t in (index, updates)) and at.of(data) is None:
        raise UnsplittableError(f"ScatterND '{node.name}' writes them as a whole")
    columns, rank = _columns(at, index), rank_of(index)
    count = columns if isinstance(columns, int) else len(columns)
    if source.axis >= count:
        axis = rank - 1 + source.axis - count
        parts = at.taken_apart(updates, axis, len(source.pieces))
        if len(parts) != len(source.pieces):
            raise UnsplittableError(f"ScatterND '{node.name}' writes {len(parts)} of {len(source.pieces)}")
        made = [at.emit.op("ScatterND", [p, index, u], "piece", **node.attrs)
                for p, u in zip(source.pieces, parts, strict=True)]  # fmt: skip
        at.put(node, source.axis, made, source.rank)
        return
    known = at.value(index)
    rest: gs.Tensor | None = None
    place = None
    if known is not None:
        numbers = known[..., source.axis]
        place = int(numbers.flat[0]) if known.size and (numbers == numbers.flat[0]).all() else None
        rest = at.emit.constant(np.delete(known, source.axis, -1))
    elif not isinstance(columns, int):
        place = _uniform(at, columns[source.axis])
        others = [c for i, c in enumerate(columns) if i != source.axis]
        rest = at.emit.op("Concat", others, "rows", axis=-1) if others else None
    if place is None or not -len(source.pieces) <= place < len(source.pieces):
        raise UnsplittableError(f"ScatterND '{node.name}' computes which one it writes ('{index.name}')")
    if count == 1:
        _check_replaces(node)
        if list(dims(updates) or ("?",))[: rank - 1] != [1] * (rank - 1):
            raise UnsplittableError(f"ScatterND '{node.name}' writes one more than once")
        new = updates
        for _ in range(rank - 1):
            new = at.taken_apart(new, 0)[0]
    else:
        new = at.emit.op("ScatterND", [source.pieces[place], rest, updates], "piece", **node.attrs)
    _replace(at, node, source, place, new)


def _columns(at: Pieces, index: gs.Tensor) -> list[gs.Tensor] | int:
    """What each number of an index is computed by, or how many there are."""
    node = producer(index)
    is_joined = node is not None and is_op(node, "Concat") and all(_is_column(at, t) for t in node.inputs)
    if node is not None and is_joined and axis_of(node.attrs["axis"], rank_of(index)) == rank_of(index) - 1:
        return list(node.inputs)
    known, last = at.value(index), (dims(index) or ("?",))[-1]
    if known is not None or isinstance(last, int):
        return int(known.shape[-1]) if known is not None else int(last)
    raise UnsplittableError(f"nothing says what the index '{index.name}' is made of")


def _is_column(at: Pieces, tensor: gs.Tensor) -> bool:
    """Whether a tensor is one number of every index."""
    if (dims(tensor) or ("?",))[-1] == 1:
        return True
    node = producer(tensor)
    if node is None or not is_op(node, "Unsqueeze") or (axes := input_or_none(node, 1)) is None:
        return False
    added = at.value(axes)
    return added is not None and added.reshape(-1).tolist() == [-1]


def _uniform(at: Pieces, tensor: gs.Tensor) -> int | None:
    """The number that all elements of a tensor are; None where they may differ."""
    value = at.value(tensor)
    if value is not None:
        return int(value.flat[0]) if value.size and (value == value.flat[0]).all() else None
    node = producer(tensor)
    return _uniform(at, node.inputs[0]) if node is not None and is_op(node, *_SPREADS) else None


def on_scatter_elements(at: Pieces, node: gs.Node) -> None:
    """ScatterElements replaces one piece, or writes into each."""
    source = at.first(node)
    data, index, updates = node.inputs
    if at.of(data) is None:
        raise UnsplittableError(f"ScatterElements '{node.name}' writes them as a whole")
    axis = axis_of(node.attrs.get("axis", 0), source.rank)
    if axis == source.axis:
        place = _uniform(at, index)
        if place is None or not -len(source.pieces) <= place < len(source.pieces):
            raise UnsplittableError(f"ScatterElements '{node.name}' computes which one it writes ('{index.name}')")
        if not _is_whole(data, axis, index, updates):
            part = text_of(dims(updates) or ())
            raise UnsplittableError(f"ScatterElements '{node.name}' writes a part of one ({part})")
        _check_replaces(node)
        _replace(at, node, source, place, at.taken_apart(updates, axis)[0])
        return
    sizes = [(dims(t) or ("?",) * source.rank)[source.axis] for t in (index, updates)]
    if sizes != [len(source.pieces)] * 2:
        raise UnsplittableError(f"ScatterElements '{node.name}' writes some of them")
    indices, news = (at.taken_apart(t, source.axis) for t in (index, updates))
    own = {**node.attrs, "axis": axis - (axis > source.axis)}
    made = [at.emit.op("ScatterElements", [p, i, u], "piece", **own)
            for p, i, u in zip(source.pieces, indices, news, strict=True)]  # fmt: skip
    at.put(node, source.axis, made, source.rank)


def _is_whole(data: gs.Tensor, axis: int, index: gs.Tensor, updates: gs.Tensor) -> bool:
    """Whether updates cover one piece: they have its sizes, and the index theirs."""
    whole, part = list(dims(data) or ()), list(dims(updates) or ())
    if "?" in part or len(part) != len(whole) or part[axis] != 1:
        return False
    spread = producer(index)
    sizes = producer(spread.inputs[1]) if spread is not None and is_op(spread, "Expand") else None
    is_like = sizes is not None and is_op(sizes, "Shape") and sizes.inputs[0] is updates
    return whole[:axis] + whole[axis + 1 :] == part[:axis] + part[axis + 1 :] and (
        is_like or list(dims(index) or ()) == part
    )


def _check_replaces(node: gs.Node) -> None:
    if node.attrs.get("reduction", "none") not in ("none", b"none"):
        raise UnsplittableError(f"{node.op} '{node.name}' combines old and new")


def _replace(at: Pieces, node: gs.Node, source: Stacked, place: int, new: gs.Tensor) -> None:
    pieces = list(source.pieces)
    pieces[place] = new
    at.put(node, source.axis, pieces, source.rank)


_RULES: dict[str, Callable[[Pieces, gs.Node], None]] = {
    "Gather": on_gather, "Slice": on_slice, "Split": on_split, "Squeeze": on_squeeze,
    "Unsqueeze": on_unsqueeze, "Transpose": on_transpose, "Reshape": on_reshape,
    "Shape": on_shape, "Concat": on_concat, "ScatterND": on_scatter_nd,
    "ScatterElements": on_scatter_elements,
    **dict.fromkeys(("Add", "Sub", "Mul", "Div", "Where", "Identity", "Cast"), on_broadcast),
}  # fmt: skip

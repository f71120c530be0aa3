"""Operators that compute with a stacked tensor, or write into it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_graphsurgeon as gs

from trt_kvcache.importer.graph import dims, input_or_none, is_op, producer
from trt_kvcache.importer.stacks.pieces import Pieces, Stacked, UnsplittableError, axis_of, rank_of, text_of

_SPREADS = ("Expand", "Unsqueeze", "Squeeze", "Reshape", "Identity", "Cast", "Tile", "Transpose")


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

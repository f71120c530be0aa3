"""How one place of an operator's output is computed from places of its operands, and where axes end; see `pieces`.

Each rule takes the pieces, the node, the output, an axis of it, and the place along this axis.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_graphsurgeon as gs

from trt_kvcache.importer.extensions.stacked_caches.pieces import (
    ELEMENTWISE,
    Array,
    Pieces,
    Rule,
    UnsplittableError,
    axis_of,
    perm_of,
)
from trt_kvcache.importer.graph import INT64, dims, input_or_none, is_op, producer

__all__ = ["RULES", "read_pieces"]

_SPREADS = ("Expand", "Unsqueeze", "Squeeze", "Reshape", "Identity", "Cast", "Tile", "Transpose")


def read_pieces(at: Pieces) -> None:
    """Let operators at which the axis of a stacked input ends read its pieces.

    Raises:
        UnsplittableError: naming the operator that cannot be said of each by itat.
    """
    for node in list(at.graph.nodes):
        tensor = node.inputs[0] if node.inputs else gs.Variable.empty()
        for axis in [a for a in range(at.rank(tensor) or 0) if at.is_held(tensor, a)]:
            try:
                if (made := _ended(at, node, axis)) is not None:
                    at.become(node.outputs[0], made)
                    break
            except (UnsplittableError, IndexError) as error:
                name = min(at.labels(tensor, axis), default=(str(tensor.name), 0))[0]
                raise UnsplittableError(f"'{name}' holds several caches, and {error}") from None


def _ended(at: Pieces, node: gs.Node, axis: int) -> gs.Tensor | None:
    """The result of a node, made of pieces along an axis that the result lacks; None where the result has the axis."""
    tensor = node.inputs[0]
    rank = at.rank(tensor) or 0
    if is_op(node, "Shape"):
        return _shape(at, node, axis, rank)
    if is_op(node, "Gather") and axis_of(node.attrs.get("axis", 0), rank) == axis:
        index = at.value(node.inputs[1])
        if index is None:
            raise UnsplittableError(f"Gather '{node.name}' computes which one it reads ('{node.inputs[1].name}')")
        if index.ndim > 1:
            raise UnsplittableError(f"Gather '{node.name}' reads several in {index.ndim} dimensions")
        return at.piece(tensor, axis, _at_place(at, node, axis, index)) if index.ndim == 0 else None
    if is_op(node, "Squeeze"):
        axes = at.axes(node, rank)
        if axes is None:
            raise UnsplittableError(f"nothing says which axes Squeeze '{node.name}' takes away")
        if axis not in axes:
            return None
        if at.length(tensor, axis) > 1:
            raise UnsplittableError(f"Squeeze '{node.name}' takes away an axis of size {at.size(tensor, axis)}")
        others = [a - (a > axis) for a in axes if a != axis]
        one = at.piece(tensor, axis, 0)
        return at.emit.op("Squeeze", [one, at.emit.ints(others)], "piece") if others else one
    if is_op(node, "Reshape") and at.size(tensor, axis) == 1:
        passes = any((tensor, axis) in at.axis_before(node, node.outputs[0], a)
                     for a in range(at.rank(node.outputs[0]) or 0))  # fmt: skip
        target = at.value(node.inputs[1])
        copies = target is not None and not node.attrs.get("allowzero", 0) and 0 in target.reshape(-1)[axis:]
        if passes or copies:
            return None
        return at.emit.op("Reshape", [at.piece(tensor, axis, 0), node.inputs[1]], "piece", **node.attrs)
    return None


def _shape(at: Pieces, node: gs.Node, axis: int, rank: int) -> gs.Tensor:
    """Shape is that of any piece, and their number."""
    emit = at.emit
    start, end = (int(node.attrs.get(key, default)) for key, default in (("start", 0), ("end", rank)))
    wanted = range(rank)[start:end]
    own = emit.op("Shape", [at.piece(node.inputs[0], axis, 0)], "piece_shape", dtype=INT64)
    sides = [a for a in wanted if a < axis], [a - 1 for a in wanted if a > axis]
    parts = [
        emit.op("Slice", [own, *map(emit.ints, ([places[0]], [places[-1] + 1], [0]))], "piece_shape", INT64)
        for places in sides
        if places
    ]
    if axis in wanted:
        parts.insert(int(wanted[0] < axis), emit.ints([at.length(node.inputs[0], axis)]))
    return parts[0] if len(parts) == 1 else emit.op("Concat", parts, "whole_shape", INT64, axis=0)


def _at_place(at: Pieces, node: gs.Node, axis: int, index: Array) -> int:
    """The place that a Gather reads, from the front."""
    size = at.length(node.inputs[0], axis)
    if not -size <= int(index) < size:
        raise UnsplittableError(f"Gather '{node.name}' reads place {int(index)} of {size}")
    return int(index) % size


def _elementwise(at: Pieces, node: gs.Node, output: gs.Tensor, axis: int, index: int) -> gs.Tensor:
    rank = at.rank_of(output)
    ends = [(t, axis - rank + at.rank_of(t)) for t in node.inputs]
    group = [t if a < 0 else at.piece(t, a, index if at.length(t, a) > 1 else 0) for t, a in ends]
    dtype = int(node.attrs["to"]) if node.op == "Cast" else group[-1].dtype  # Where's first one is bool
    return at.emit.op(node.op, group, "piece", dtype, **node.attrs)


def _transpose(at: Pieces, node: gs.Node, output: gs.Tensor, axis: int, index: int) -> gs.Tensor:
    perm = perm_of(node, at.rank_of(output))
    piece, rest = at.piece(node.inputs[0], perm[axis], index), [p - (p > perm[axis]) for p in perm if p != perm[axis]]
    return piece if rest == sorted(rest) else at.emit.op("Transpose", [piece], "piece", perm=rest)


def _concat(at: Pieces, node: gs.Node, output: gs.Tensor, axis: int, index: int) -> gs.Tensor:
    own = axis_of(node.attrs["axis"], at.rank_of(output))
    if own != axis:
        return at.emit.op("Concat", [at.piece(t, axis, index) for t in node.inputs], "piece", axis=own - (own > axis))
    for tensor in node.inputs:
        if index < (size := at.length(tensor, axis)):
            return at.piece(tensor, axis, index)
        index -= size
    raise UnsplittableError(f"Concat '{node.name}' joins fewer than are read")


def _unsqueeze(at: Pieces, node: gs.Node, output: gs.Tensor, axis: int, index: int) -> gs.Tensor:
    axes, piece = at.axes(node, at.rank_of(output)) or [], node.inputs[0]
    if axis not in axes:
        piece = at.piece(piece, axis - sum(a < axis for a in axes), index)
    rest = [a - (a > axis) for a in axes if a != axis]
    return at.emit.op("Unsqueeze", [piece, at.emit.ints(rest)], "piece") if rest else piece


def _squeeze(at: Pieces, node: gs.Node, output: gs.Tensor, axis: int, index: int) -> gs.Tensor:
    ((tensor, along),) = at.axis_before(node, output, axis)
    axes = at.axes(node, at.rank_of(tensor)) or []
    own = at.emit.ints([a - (a > along) for a in axes])
    return at.emit.op("Squeeze", [at.piece(tensor, along, index), own], "piece")


def _gather(at: Pieces, node: gs.Node, output: gs.Tensor, axis: int, index: int) -> gs.Tensor:
    ((tensor, along),) = at.axis_before(node, output, axis)
    own = axis_of(node.attrs.get("axis", 0), at.rank_of(tensor))
    if own != along:
        piece = at.piece(tensor, along, index)
        return at.emit.op("Gather", [piece, node.inputs[1]], "piece", axis=own - (own > along))
    places = at.value(node.inputs[1])
    if places is None:
        raise UnsplittableError(f"Gather '{node.name}' computes which one it reads ('{node.inputs[1].name}')")
    return at.piece(tensor, along, _at_place(at, node, along, places.reshape(-1)[index]))


def _slice(at: Pieces, node: gs.Node, output: gs.Tensor, axis: int, index: int) -> gs.Tensor:
    rank = at.rank_of(output)
    axes, taken = at.cut_axes(node, rank), at.range_along(node, axis, rank)
    if axes is None:
        raise UnsplittableError(f"nothing says along which axes Slice '{node.name}' cuts")
    numbers = [*node.inputs[1:3], input_or_none(node, 4)]
    if axis in axes:
        if taken is None:
            raise UnsplittableError(f"Slice '{node.name}' computes which ones it reads")
        place, index = axes.index(axis), taken[index]
        numbers = [t if t is None else at.without(t, place, "piece_range") for t in numbers]
        axes = [a for a in axes if a != axis]
    piece = at.piece(node.inputs[0], axis, index)
    ends = [numbers[0], numbers[1], at.emit.ints([a - (a > axis) for a in axes]), *numbers[2:]]
    return at.emit.op("Slice", [piece, *(t for t in ends if t is not None)], "piece") if axes else piece


def _split(at: Pieces, node: gs.Node, output: gs.Tensor, axis: int, index: int) -> gs.Tensor:
    own, place = axis_of(node.attrs.get("axis", 0), at.rank_of(output)), _place(node.outputs, output)
    if own == axis:
        return at.piece(node.inputs[0], axis, index + sum(at.length(t, axis) for t in node.outputs[:place]))

    def make() -> list[gs.Variable]:
        piece = at.piece(node.inputs[0], axis, index)
        made = [gs.Variable(at.emit.name("piece"), dtype=piece.dtype) for _ in node.outputs]
        attrs = {**node.attrs, "axis": own - (own > axis)}
        at.graph.nodes.append(gs.Node("Split", at.emit.name("piece:Split"), attrs, [piece, *node.inputs[1:]], made))
        return made

    return at.emit.once((id(node), axis, index), make)[place]


def _reshape(at: Pieces, node: gs.Node, output: gs.Tensor, axis: int, index: int) -> gs.Tensor:
    regrouped, source = at.regrouped(node, axis), node.inputs[0]
    assert regrouped is not None
    how, first, count = regrouped
    before, after = dims(source) or (), dims(output) or ()
    if how == "kept":
        return _reshaped(at, node, at.piece(source, first, index), before[first + 1 :], after[first + 1 :], [first])
    if how == "merged":
        piece = at.piece(at.piece(source, first, index // count), first, index % count)
        return _reshaped(at, node, piece, before[first + 2 :], after[first + 1 :], [first])
    size = at.length(source, first)
    places = range(index * count, (index + 1) * count) if how == "outer" else range(index, size, count)
    parts = [
        _reshaped(at, node, at.piece(source, first, i), before[first + 1 :], after[first + 2 :], [first, first])
        for i in places
    ]
    axes = at.emit.ints([first])
    rows = [at.emit.op("Unsqueeze", [part, axes], "part") for part in parts]
    whole = at.emit.op("Concat", rows, "part", axis=first)
    at.stack(whole, first, parts, len(after) - 1)
    return whole


def _reshaped(
    at: Pieces,
    node: gs.Node,
    piece: gs.Tensor,
    before: Sequence[int | str],
    after: Sequence[int | str],
    gone: Sequence[int],
) -> gs.Tensor:
    """A piece as a Reshape of the whole has it.

    Args:
        at: takes pieces.
        node: the Reshape.
        piece: of its operand.
        before: the last sizes of the piece,
        after: and of its result; those in front are the same.
        gone: places of its target that the piece does not have, one after the other.
    """
    # It holds as many numbers as before: where one size at most is unknown or has another name, it is the same size.
    if len(before) == len(after) and sum(a != b or a == "?" for a, b in zip(before, after, strict=True)) < 2:
        return piece
    target = node.inputs[1]
    lost = len(dims(node.inputs[0]) or ()) - gone[0] - len(before)
    made = producer(target)
    parts = made.inputs if made is not None and is_op(made, "Concat") else [target]
    copies = any(0 in known for t in parts if (known := at.value(t)) is not None)
    if lost != len(gone) and copies and not node.attrs.get("allowzero", 0):
        raise UnsplittableError(f"Reshape '{node.name}' copies sizes by 0, which lie elsewhere in a single one")
    for place in gone:
        target = at.without(target, place, "piece_shape")
    return at.emit.op("Reshape", [piece, target], "piece", **node.attrs)


def _scatter_nd(at: Pieces, node: gs.Node, output: gs.Tensor, axis: int, index: int) -> gs.Tensor:
    """ScatterND writes into one piece that its index names by a constant, or into each."""
    data, rows, updates = node.inputs
    columns, rank = _columns(at, rows), at.rank_of(rows)
    count = columns if isinstance(columns, int) else len(columns)
    own = at.piece(data, axis, index)
    if axis >= count:
        part = at.piece(updates, rank - 1 + axis - count, index)
        return at.emit.op("ScatterND", [own, rows, part], "piece", **node.attrs)
    known, place = at.value(rows), None
    if known is not None:
        place = _only(known[..., axis])
        rest = [at.emit.constant(np.delete(known, axis, -1))]
    elif not isinstance(columns, int):
        place = _uniform(at, columns[axis])
        rest = [c for i, c in enumerate(columns) if i != axis]
    if place is None or not 0 <= (place := place + (place < 0) * at.length(data, axis)) < at.length(data, axis):
        raise UnsplittableError(f"ScatterND '{node.name}' computes which one it writes ('{rows.name}')")
    if place != index:
        return own
    if count == 1:
        for _ in range(rank - 1):
            updates = at.piece(updates, 0, 0)
        return updates
    left = rest[0] if known is not None else at.emit.op("Concat", rest, "rows", axis=-1)
    return at.emit.op("ScatterND", [own, left, updates], "piece", **node.attrs)


def _columns(at: Pieces, index: gs.Tensor) -> list[gs.Tensor] | int:
    """The tensors that an index is joined of, one for each number, or how many numbers it has."""
    node = producer(index)
    is_joined = node is not None and is_op(node, "Concat") and all(_is_column(at, t) for t in node.inputs)
    if node is not None and is_joined and axis_of(node.attrs["axis"], at.rank_of(index)) == at.rank_of(index) - 1:
        return list(node.inputs)
    known, last = at.value(index), (dims(index) or ("?",))[-1]
    if known is not None or isinstance(last, int):
        return int(known.shape[-1]) if known is not None else int(last)
    raise UnsplittableError(f"nothing says how the index '{index.name}' is made")


def _is_column(at: Pieces, tensor: gs.Tensor) -> bool:
    """True if a tensor is one number of every index."""
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
        return _only(value)
    node = producer(tensor)
    return _uniform(at, node.inputs[0]) if node is not None and is_op(node, *_SPREADS) else None


def _only(values: Array) -> int | None:
    return int(values.flat[0]) if values.size and (values == values.flat[0]).all() else None


def _scatter_elements(at: Pieces, node: gs.Node, output: gs.Tensor, axis: int, index: int) -> gs.Tensor:
    """ScatterElements replaces one piece, or writes into each."""
    data, rows, updates = node.inputs
    rank, own = at.rank_of(output), at.piece(data, axis, index)
    along = axis_of(node.attrs.get("axis", 0), rank)
    if along == axis:
        place, count = _uniform(at, rows), at.length(data, axis)
        if place is None or not -count <= place < count:
            raise UnsplittableError(f"ScatterElements '{node.name}' computes which one it writes ('{rows.name}')")
        return at.piece(updates, axis, 0) if place % count == index else own
    if [at.size(t, axis) for t in (rows, updates)] != [at.length(data, axis)] * 2:
        raise UnsplittableError(f"ScatterElements '{node.name}' writes some of them")
    group = [own, at.piece(rows, axis, index), at.piece(updates, axis, index)]
    return at.emit.op("ScatterElements", group, "piece", **{**node.attrs, "axis": along - (along > axis)})


def _place(tensors: Sequence[gs.Tensor], tensor: gs.Tensor) -> int:
    return next(i for i, t in enumerate(tensors) if t is tensor)


RULES: dict[str, Rule] = {
    "Transpose": _transpose, "Concat": _concat, "Unsqueeze": _unsqueeze, "Squeeze": _squeeze, "Gather": _gather,
    "Slice": _slice, "Split": _split, "Reshape": _reshape, "ScatterND": _scatter_nd,
    "ScatterElements": _scatter_elements, **dict.fromkeys(ELEMENTWISE, _elementwise),
}  # fmt: skip

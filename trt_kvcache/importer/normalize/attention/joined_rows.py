"""Rows of a cache and new rows joined in front of what only moves or repeats both in the same way.

    Transpose(repeated(past)), Transpose(repeated(new)) -> Transpose(repeated(Concat(past, new)))

That holds the same as a Concat behind it, and is what the model gives back as the cache, where it joins both itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import numpy as np
import onnx_graphsurgeon as gs

from trt_kvcache.importer.graph import (
    Emitter,
    consumers,
    dims,
    elem_type,
    input_or_none,
    is_op,
    producer,
    small_constant,
)
from trt_kvcache.importer.normalize.attention.apart import moved_from
from trt_kvcache.importer.normalize.candidate import may_be_cache
from trt_kvcache.importer.plan import Dim

Shape = tuple[Dim, ...]

_FACTORS = ("Mul", "Div")
_MOVES = ("Identity", "Cast")
_DEPTH = 12  # operators that are compared, at most, to say that two tensors are the same
_UNLIKE = {"RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike", "Bernoulli", "Multinomial"}


class RowJoiner:
    """Joins rows of caches with new ones; the same only once.

    Args:
        graph: edited.
    """

    def __init__(self, graph: gs.Graph, emit: Emitter) -> None:
        self._graph = graph
        self._emit = emit

    def join(self, past: gs.Tensor, new: gs.Tensor, axis: int) -> gs.Tensor | None:
        """Rows of a cache and new ones, joined along an axis.

        Returns:
            None where they are not that, or the rows of the cache are repeated or scaled and new ones otherwise.
        """
        rank = rank_of(past)
        is_past = [may_be_cache(self._graph, moved_from(t)) for t in (past, new)]
        if is_past != [True, False] or rank != rank_of(new) or rank < 2:
            return None
        return self._joined(past, new, axis % rank)

    def source(self, rows: gs.Tensor, axis: int) -> tuple[gs.Tensor, int]:
        """What rows are moved and repeated from, and the axis in it that is `axis` in them."""
        axis %= rank_of(rows)
        while (node := producer(rows)) is not None and (way := through(node, axis)) is not None:
            rows, axis = node.inputs[0], way[0]
        return rows, axis

    def _joined(self, past: gs.Tensor, new: gs.Tensor, axis: int) -> gs.Tensor | None:
        key = "rows", past.name, new.name, axis
        made: gs.Tensor | None = self._emit.once(key, lambda: self._join(past, new, axis))
        return made

    def _join(self, past: gs.Tensor, new: gs.Tensor, axis: int) -> gs.Tensor | None:
        for node in consumers(past):
            is_along = is_op(node, "Concat") and int(node.attrs["axis"]) % rank_of(past) == axis
            if is_along and len(node.inputs) == 2 and node.inputs[0] is past and same(node.inputs[1], new):
                return node.outputs[0]
        first, second = producer(past), producer(new)
        ways = [None if node is None else through(node, axis) for node in (first, second)]
        if first is not None and ways[0] is not None:
            place, operands = ways[0]
            before = None
            if is_op(first, "Transpose"):
                before = self._turned_back(new, first.attrs["perm"])
            elif second is not None and ways[0] == ways[1] and _alike(first, second):
                before = second.inputs[0]
            if before is not None:
                rows = self._joined(first.inputs[0], before, place)
                if rows is None:
                    return None
                attrs = first.attrs if operands is None else {}
                sizes = first.inputs[1:] if operands is None else [self._emit.ints(operands)]
                return self._emit.op(first.op, [rows, *sizes], "joined", elem_type(past), **attrs)
        if _is_changed(past):
            return None
        made: gs.Tensor = self._emit.op("Concat", [past, new], "joined", elem_type(past), axis=axis)
        return made

    def _turned_back(self, tensor: gs.Tensor, perm: Sequence[int]) -> gs.Tensor:
        """The tensor of which a Transpose makes this one."""
        order = [perm.index(axis) for axis in range(len(perm))]
        while (node := producer(tensor)) is not None and is_op(node, "Transpose") and "perm" in node.attrs:
            tensor, order = node.inputs[0], [node.attrs["perm"][axis] for axis in order]
        if order == sorted(order):
            return tensor
        for node in consumers(tensor):
            if is_op(node, "Transpose") and list(node.attrs.get("perm", ())) == order:
                return node.outputs[0]
        key = "turned", tensor.name, tuple(order)
        made: gs.Tensor = self._emit.once(key, lambda: self._emit.op("Transpose", [tensor], "turned", perm=order))
        made.shape = None if tensor.shape is None else [tensor.shape[axis] for axis in order]
        return made


def _alike(first: gs.Node, second: gs.Node) -> bool:
    """Whether two nodes do the same to their first input; what they make it as long as is another matter."""
    is_sized = is_op(first, "Expand", "Reshape")
    return _do_alike(first, second) and (is_sized or _all_same(first.inputs[1:], second.inputs[1:]))


def through(node: gs.Node, axis: int) -> tuple[int, list[int] | None] | None:
    """What lets a node take more rows: the axis in front of it that is `axis` behind it, and what it is given then.

    Returns:
        None where there is no such axis; instead of an operand None where that stays.
    """
    before, behind = dims(node.inputs[0]) if node.inputs else None, dims(node.outputs[0])
    if before is None or behind is None or axis >= len(behind):
        return None
    if is_op(node, *_MOVES):
        return axis, None
    if is_op(node, "Transpose"):
        perm = node.attrs.get("perm", ())
        return (int(perm[axis]), None) if sorted(perm) == list(range(len(before))) == list(range(len(behind))) else None
    if is_op(node, *_FACTORS):
        factor = small_constant(node.inputs[1])
        return (axis, None) if factor is not None and factor.size == 1 and factor.ndim <= len(before) else None
    if is_op(node, "Expand"):
        return _through_expand(before, behind, axis)
    if is_op(node, "Reshape"):
        return _through_reshape(before, _as_before(node, before, behind), axis)
    if is_op(node, "Gather"):
        at, rank = int(node.attrs.get("axis", 0)) % len(before), rank_of(node.inputs[1])
        place = axis if axis < at else axis + 1 - rank
        return None if rank < 0 or at <= axis < at + rank else (place, None)
    axes = small_constant(input_or_none(node, 3 if is_op(node, "Slice") else 1))
    if not is_op(node, "Slice", "Squeeze", "Unsqueeze", "Tile") or axes is None:
        return None
    if is_op(node, "Tile"):
        return (axis, None) if axes.size == len(behind) and axes[axis] == 1 else None
    rank = max(len(before), len(behind))
    taken = {int(a) % rank for a in axes.reshape(-1)}
    kept = [a for a in range(rank) if a not in taken]
    if is_op(node, "Squeeze"):
        return (kept[axis], None) if len(kept) == len(behind) else None
    return None if axis in taken else (axis if is_op(node, "Slice") else kept.index(axis), None)


def _through_expand(before: Shape, behind: Shape, axis: int) -> tuple[int, list[int]] | None:
    if len(before) != len(behind) or (before[axis] == 1 != behind[axis]):
        return None
    sizes: list[int] = []
    for at, (old, new) in enumerate(zip(before, behind, strict=True)):
        if at == axis or old == new or (old != 1 and new == "?"):  # an open axis is not one to repeat
            sizes.append(1)
        elif isinstance(new, int):
            sizes.append(new)
        else:
            return None
    return axis, sizes


def _as_before(node: gs.Node, before: Shape, behind: Shape) -> Shape:
    """The shape behind a Reshape, with sizes that it takes from what it reads called as they are in there."""
    made = producer(node.inputs[1])
    parts = made.inputs if made is not None and is_op(made, "Concat") else [node.inputs[1]]
    sizes: list[int | None] = []  # axes in front
    for part in parts:
        given, numbers = _axes_of(part, node.inputs[0]), small_constant(part)
        if given is not None:
            sizes += given
        elif numbers is not None:
            sizes += [None] * numbers.size
        else:
            return behind
    if len(sizes) != len(behind):
        return behind
    return tuple(dim if at is None or before[at] == "?" else before[at] for dim, at in zip(behind, sizes, strict=True))


def _axes_of(sizes: gs.Tensor, tensor: gs.Tensor) -> list[int] | None:
    """Of which axes of a tensor sizes are; None where they are of something else."""
    node = producer(sizes)
    if node is None or not node.inputs:
        return None
    if is_op(node, "Shape") and node.inputs[0] is tensor:
        axes = list(range(rank_of(tensor)))
        return axes[int(node.attrs.get("start", 0)) : node.attrs.get("end")]
    found = (
        _axes_of(node.inputs[0], tensor) if is_op(node, "Gather", "Slice", "Unsqueeze", "Squeeze", *_MOVES) else None
    )
    operands = [small_constant(t) for t in node.inputs[1:]]
    if found is None or any(value is None for value in operands):
        return None
    numbers = [value.reshape(-1).tolist() for value in operands if value is not None]
    if is_op(node, "Gather"):
        return [found[i] for i in numbers[0]] if all(-len(found) <= i < len(found) for i in numbers[0]) else None
    if is_op(node, "Slice"):
        return found[numbers[0][0] : numbers[1][0] : numbers[3][0] if len(numbers) > 3 else 1]
    return found


def _through_reshape(before: Shape, behind: Shape, axis: int) -> tuple[int, list[int]] | None:
    """Rows are an axis of their own on both sides, with as much behind it, and so in front of it."""
    for place in range(len(before)):
        fronts, backs = (before[:place], behind[:axis]), (before[place + 1 :], behind[axis + 1 :])
        rest = [[d for d in back if isinstance(d, int)] for back in backs]
        if list(map(len, rest)) != list(map(len, backs)) or prod(rest[0]) != prod(rest[1]):
            continue
        known = before[place] == behind[axis] != "?"
        opens = [[at for at, d in enumerate(front) if not isinstance(d, int)] for front in fronts]
        sizes = [[d for d in front if isinstance(d, int)] for front in fronts]
        numbers = [prod(front) for front in sizes]
        lead = [d if isinstance(d, int) else 0 for d in fronts[1]]  # 0: as it is in front of it
        if opens[0] == opens[1] and len(opens[0]) < 2 and numbers[0] == numbers[1]:  # the batch, or nothing
            if not known and any(before[at] != behind[at] or before[at] == "?" for at in opens[0]):
                continue
        elif known and not opens[0] and len(opens[1]) == 1 and numbers[0] % numbers[1] == 0:
            lead[opens[1][0]] = numbers[0] // numbers[1]
        else:
            continue
        return place, [*lead, -1, *rest[1]]
    return None


def same(one: gs.Tensor, other: gs.Tensor, depth: int = _DEPTH) -> bool:
    """Whether two tensors hold the same, as far as the graph says."""
    if one is other:
        return True
    value, wanted = small_constant(one), small_constant(other)
    if value is not None and wanted is not None:
        return value.dtype == wanted.dtype and np.array_equal(value, wanted)
    first, second = producer(one), producer(other)
    if first is None or second is None or not depth:
        return False
    places = [[i for i, t in enumerate(n.outputs) if t is x] for n, x in ((first, one), (second, other))]
    return places[0] == places[1] and _do_alike(first, second) and _all_same(first.inputs, second.inputs, depth - 1)


def _do_alike(first: gs.Node, second: gs.Node) -> bool:
    """Whether two nodes do the same to the same inputs."""
    if any(isinstance(value, (gs.Tensor, gs.Graph)) for value in first.attrs.values()):  # compared by name only
        return False
    keys = [(n.op, n.domain, n.attrs) for n in (first, second)]
    return keys[0] == keys[1] and first.op not in _UNLIKE


def _all_same(some: Sequence[gs.Tensor], others: Sequence[gs.Tensor], depth: int = _DEPTH) -> bool:
    return len(some) == len(others) and all(same(a, b, depth) for a, b in zip(some, others, strict=True))


def _is_changed(past: gs.Tensor) -> bool:
    """Whether rows of a cache are repeated or scaled."""
    while (node := producer(past)) is not None and not is_op(node, "Expand", "Tile", *_FACTORS):
        past = node.inputs[0] if node.inputs else gs.Variable.empty()
    return node is not None


def rank_of(tensor: gs.Tensor) -> int:
    """-1: unknown."""
    shape = dims(tensor)
    return -1 if shape is None else len(shape)

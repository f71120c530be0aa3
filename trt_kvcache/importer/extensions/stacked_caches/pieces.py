"""One place along an axis of a tensor, computed without the whole tensor.

    past [L, B, N, P, H], of which place 1 is an input `past.1` of its own

    place 1 of past                                             past.1
    place 1 of Transpose(past, 0, 1, 3, 2, 4)                   Transpose(past.1, 0, 2, 1, 3)
    place 1 of ScatterND(past, [[1, b, n, row]], new)           ScatterND(past.1, [[b, n, row]], new)
    place 1 of Concat(Unsqueeze(x), Unsqueeze(y))               y

Every rule is an identity: it holds whatever the tensors hold and wherever the operator stands. An operator without a
rule is cut by Gather, and then reads the whole tensor; `levels` refuses the model if that is left.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_graphsurgeon as gs

from trt_kvcache.importer.graph import Emitter, contains, dims, input_or_none, is_op, producer, replace_uses

__all__ = ["Pieces", "UnsplittableError"]

Array = npt.NDArray[Any]
Value = Callable[[gs.Tensor], Array | None]
Rule = Callable[["Pieces", gs.Node, gs.Tensor, int, int], gs.Tensor]
Label = tuple[str, int]  # an input of the graph, and an axis of it

ELEMENTWISE = ("Add", "Sub", "Mul", "Div", "Where", "Identity", "Cast")
_SCATTERS = ("ScatterND", "ScatterElements")
_SAME_RANK = ("Identity", "Cast", "Transpose", "Concat", "Slice", "Split", *_SCATTERS)


class UnsplittableError(Exception):
    """Why an operator cannot be said of each cache by itself."""


class Pieces:
    """Takes pieces of the tensors of a graph.

    Args:
        graph: edited; its nodes in topological order, its shapes inferred.
        value: of a tensor as the graph had it first, where constants alone decide it.
        rules: by operator, how a piece of its output is made.
    """

    def __init__(self, graph: gs.Graph, value: Value, rules: Mapping[str, Rule]) -> None:
        self.graph = graph
        self.emit = Emitter(graph)
        self.value = value
        self._rules = rules
        self._stacks: dict[tuple[int, int], Sequence[gs.Tensor]] = {}
        self._labels: dict[tuple[int, int], frozenset[Label]] = {}
        self._ranks: dict[int, int] = {}
        self._made: dict[tuple[int, int, int], gs.Tensor] = {}
        self._kept: list[gs.Tensor] = []  # ids of what is gone would be given to others

    def stack(self, tensor: gs.Tensor, axis: int, pieces: Sequence[gs.Tensor], rank: int | None = None) -> None:
        """Say what the pieces of a tensor are."""
        self._stacks[id(tensor), axis] = pieces
        self._kept.append(tensor)
        if rank is not None:
            self._ranks[id(tensor)] = rank

    # Which axis of a result is which axis of an operand.

    def follow(self, inputs: Iterable[tuple[gs.Tensor, int]]) -> None:
        """Find, through the whole graph, the axes whose places are made of the places of axes of inputs."""
        self._labels = {(id(t), axis): frozenset([(str(t.name), axis)]) for t, axis in inputs}
        reached = {tensor for tensor, _ in self._labels}
        for node in self.graph.nodes:
            if not any(id(t) in reached for t in node.inputs):
                continue
            for output in node.outputs:
                for axis in range(self.rank(output) or 0):
                    before = [self.labels(*pair) for pair in self.axis_before(node, output, axis)]
                    if found := frozenset[Label]().union(*before):
                        self._labels[id(output), axis] = found
                        reached.add(id(output))

    def labels(self, tensor: gs.Tensor, axis: int) -> frozenset[Label]:
        """The inputs, and axes of these, whose places make those of an axis."""
        return self._labels.get((id(tensor), axis), frozenset())

    def is_held(self, tensor: gs.Tensor, axis: int) -> bool:
        """True if the places of an axis are made of inputs that are pieces."""
        return (id(tensor), axis) in self._stacks or (id(tensor), axis) in self._labels

    def axis_before(self, node: gs.Node, output: gs.Tensor, axis: int) -> list[tuple[gs.Tensor, int]]:
        """The operands, each with an axis, whose places make the places of an output's axis; empty: there are none."""
        rank, first = self.rank(output), node.inputs[0] if node.inputs else None
        if rank is None or first is None or not is_op(node, *self._rules):
            return []
        if is_op(node, *_SAME_RANK):
            self._ranks.update((id(t), rank) for t in (node.inputs if is_op(node, "Concat") else [first]))
        if is_op(node, *ELEMENTWISE):
            ends = [(t, axis - rank + own) for t in node.inputs if (own := self.rank(t)) is not None]
            is_one = len(ends) == 1 or self.size(output, axis) == 1
            return [(t, a) for t, a in ends if a >= 0 and (is_one or self.size(t, a) != 1)]
        if is_op(node, "Transpose"):
            perm = perm_of(node, rank)
            return [(first, perm[axis])] if sorted(perm) == [*range(rank)] else []
        if is_op(node, "Concat"):
            return [(t, axis) for t in node.inputs]
        if is_op(node, "Unsqueeze"):
            axes = self.axes(node, rank)
            return [] if axes is None or axis in axes else [(first, axis - sum(a < axis for a in axes))]
        own = self.rank(first)
        if own is None:
            return []
        if is_op(node, "Squeeze"):
            axes = self.axes(node, own)
            left = [a for a in range(own) if a not in (axes or ())]
            return [(first, left[axis])] if axes is not None and len(left) == rank else []
        if is_op(node, "Gather"):
            along, extra = axis_of(node.attrs.get("axis", 0), own), rank - own
            inside = extra > 0 and along <= axis <= along + extra
            return [] if inside else [(first, axis if axis < along else axis - extra)]
        if is_op(node, "Reshape"):
            regrouped = self.regrouped(node, axis)
            return [] if regrouped is None else [(first, regrouped[1])]
        updates = self._updates(node, axis) if is_op(node, *_SCATTERS) else []
        return [(first, axis), *updates]

    def _updates(self, node: gs.Node, axis: int) -> list[tuple[gs.Tensor, int]]:
        """The axis of a scatter's updates that is one of its data; empty where an index chooses among the places."""
        index, updates = node.inputs[1:3]
        if is_op(node, "ScatterElements"):
            return [] if axis == axis_of(node.attrs.get("axis", 0), self.rank(index) or 1) else [(updates, axis)]
        columns, rank = (dims(index) or ("?",))[-1], self.rank(index)
        if not isinstance(columns, int) or rank is None or axis < columns:
            return []
        return [(updates, rank - 1 + axis - columns)]

    def regrouped(self, node: gs.Node, axis: int) -> tuple[str, int, int] | None:
        """The effect of a Reshape on the axis of its result: how, from which axis, and how many places go together.

        ``kept``; ``outer`` and ``inner``: an axis was split in two; ``merged``: two axes became one.
        """
        before, after = dims(node.inputs[0]) or (), dims(node.outputs[0]) or ()
        for how, at in (("kept", axis), ("outer", axis), ("inner", axis - 1), ("merged", axis)):
            if at < 0 or "?" in before[:at] or before[:at] != after[:at] or at >= min(len(before), len(after)):
                continue
            one, two = before[at : at + 2], after[at : at + 2]
            if how == "kept" and isinstance(one[0], int) and one[0] == two[0]:
                return how, at, 1
            if how in ("outer", "inner") and _is_product(one[0], two):
                return how, at, int(two[1])
            if how == "merged" and _is_product(two[0], one) and len(after) == len(before) - 1:
                return how, at, int(one[1])
        return None

    def rank(self, tensor: gs.Tensor) -> int | None:
        """The rank of a tensor, by its shape or by what it is made of or joined to."""
        if tensor.shape is not None:
            return len(tensor.shape)
        node = producer(tensor)
        if id(tensor) not in self._ranks and node is not None and is_op(node, *_SAME_RANK):
            own = self.rank(node.inputs[0])
            if own is not None:
                self._ranks[id(tensor)] = own
        return self._ranks.get(id(tensor))

    def rank_of(self, tensor: gs.Tensor) -> int:
        """The rank of a tensor.

        Raises:
            UnsplittableError: nothing says it.
        """
        rank = self.rank(tensor)
        if rank is None:
            raise UnsplittableError(f"nothing says the rank of '{tensor.name}'")
        return rank

    def size(self, tensor: gs.Tensor, axis: int) -> int | None:
        """How long an axis is; None where nothing says it."""
        shape, node = dims(tensor) or (), producer(tensor)
        if axis < len(shape) and isinstance(shape[axis], int):
            return int(shape[axis])
        if (id(tensor), axis) in self._stacks:
            return len(self._stacks[id(tensor), axis])
        rank = self.rank(tensor)
        if node is None or rank is None or not is_op(node, "Unsqueeze", "Concat", "Transpose", "Identity", "Cast"):
            return None
        if is_op(node, "Unsqueeze") and axis in (self.axes(node, rank) or ()):
            return 1
        sizes = [self.size(*pair) for pair in self.axis_before(node, tensor, axis)]
        if is_op(node, "Concat") and axis_of(node.attrs["axis"], rank) == axis:
            return None if None in sizes else sum(size for size in sizes if size is not None)
        return sizes[0] if sizes else None

    # Pieces.

    def leads(self, tensor: gs.Tensor, axis: int) -> bool:
        """True if the places of an axis are at hand: made of inputs that are pieces, or joined of tensors."""
        if self.is_held(tensor, axis):
            return True
        node, rank = producer(tensor), self.rank(tensor)
        if node is None or rank is None:
            return False
        if is_op(node, "Unsqueeze") and axis in (self.axes(node, rank) or ()):
            return True
        before = self.axis_before(node, tensor, axis)
        if is_op(node, "Concat"):
            return axis_of(node.attrs["axis"], rank) == axis and all(self.leads(*pair) for pair in before)
        if is_op(node, "Slice") and self.range_along(node, axis, rank) is None:
            return False
        moves = is_op(node, "Transpose", "Reshape", "Slice", "Unsqueeze", "Identity", "Cast")
        return moves and bool(before) and self.leads(*before[0])

    def all(self, tensor: gs.Tensor, axis: int) -> list[gs.Tensor]:
        """All pieces of a tensor along an axis.

        Raises:
            UnsplittableError: nothing says how long the axis is, or an operator cannot be said of each by itself.
        """
        return [self.piece(tensor, axis, i) for i in range(self.length(tensor, axis))]

    def length(self, tensor: gs.Tensor, axis: int) -> int:
        """How long an axis is.

        Raises:
            UnsplittableError: nothing says it.
        """
        size = self.size(tensor, axis)
        if size is None:
            raise UnsplittableError(f"nothing says how long axis {axis} of '{tensor.name}' is")
        return size

    def piece(self, tensor: gs.Tensor, axis: int, index: int) -> gs.Tensor:
        """The tensor at a place of an axis, without this axis.

        Raises:
            UnsplittableError: see `all`.
        """
        key = (id(tensor), axis, index)
        if key not in self._made:
            made = self._take(tensor, axis, index)
            self._kept.append(tensor)
            self._made[key] = made
            if (rank := self.rank(tensor)) is not None:
                self._ranks.setdefault(id(made), rank - 1)
        return self._made[key]

    def _take(self, tensor: gs.Tensor, axis: int, index: int) -> gs.Tensor:
        if (id(tensor), axis) in self._stacks:
            return self._stacks[id(tensor), axis][index]
        node = producer(tensor)
        if node is not None and self.leads(tensor, axis):
            return self._rules[node.op](self, node, tensor, axis, index)
        if self.length(tensor, axis) == 1:
            return self.emit.op("Squeeze", [tensor, self.emit.ints([axis])], "piece")
        return self.emit.op("Gather", [tensor, self.emit.ints(index)], "piece", axis=axis)

    def become(self, old: gs.Tensor, new: gs.Tensor) -> None:
        """Let all that reads `old` read `new`."""
        replace_uses(old, new)
        self._kept.append(old)
        for node in list(old.inputs):
            node.outputs = [t if t is not old else gs.Variable.empty() for t in node.outputs]
        if contains(self.graph.outputs, old):
            self.graph.nodes.append(gs.Node("Identity", self.emit.name("piece"), {}, [new], [old]))

    # Operands that say what an operator does.

    def axes(self, node: gs.Node, rank: int) -> list[int] | None:
        """The axes of Squeeze and Unsqueeze; None where they are left out or computed."""
        given = input_or_none(node, 1)
        axes = node.attrs.get("axes") if given is None else self.value(given)
        return None if axes is None else [axis_of(a, rank) for a in np.asarray(axes).reshape(-1)]

    def range_along(self, node: gs.Node, axis: int, rank: int) -> range | None:
        """The places along an axis that a Slice takes, all where it cuts others; None where that is computed."""
        given = [input_or_none(node, i) for i in range(1, 5)]
        starts, ends, _, steps = (None if t is None else self.value(t) for t in given)
        known = self.cut_axes(node, rank)
        size = self.size(node.inputs[0], axis)
        if known is None or (axis not in known and size is None):
            return None
        if axis not in known:
            return range(size or 0)
        place = known.index(axis)
        if starts is None or ends is None or size is None or (given[3] is not None and steps is None):
            return None
        return _chosen(int(starts[place]), int(ends[place]), 1 if steps is None else int(steps[place]), size)

    def cut_axes(self, node: gs.Node, rank: int) -> list[int] | None:
        """The axes that a Slice cuts; None where they are computed."""
        given = input_or_none(node, 3)
        if given is not None:
            known = self.value(given)
            return None if known is None else [axis_of(a, rank) for a in known]
        starts = self.value(node.inputs[1])
        count = len(starts) if starts is not None else (dims(node.inputs[1]) or ("?",))[0]
        return list(range(count)) if isinstance(count, int) else None

    def without(self, numbers: gs.Tensor, place: int, hint: str) -> gs.Tensor:
        """A vector of numbers without one of them."""
        known = self.value(numbers)
        if known is not None:
            return self.emit.ints([int(n) for n in np.delete(known.reshape(-1), place)])
        ints = self.emit.ints
        parts = [
            self.emit.op("Slice", [numbers, ints([start]), ints([end]), ints([0])], hint)
            for start, end in ((0, place), (place + 1, np.iinfo(np.int64).max))
        ]
        return self.emit.op("Concat", parts[place == 0 :], hint, axis=0)


def _chosen(start: int, end: int, step: int, size: int) -> range:
    """The places that a Slice takes: unlike Python's, it starts at the first backwards where that is out of range.

    Source: https://onnx.ai/onnx/operators/onnx__Slice.html
    """
    least, most = (0, size) if step > 0 else (-1, size - 1)
    start, end = (n + size if n < 0 else n for n in (start, end))
    return range(min(max(start, 0), most), min(max(end, least), most), step)


def axis_of(axis: Any, rank: int) -> int:
    """An axis counted from the front."""
    return int(axis) % rank if rank else 0


def perm_of(node: gs.Node, rank: int) -> list[int]:
    """The permutation of a Transpose."""
    return list(node.attrs.get("perm") or reversed(range(rank)))


def _is_product(whole: int | str, parts: Sequence[int | str]) -> bool:
    return len(parts) == 2 and all(isinstance(n, int) and n for n in (whole, *parts)) and (
        int(whole) == int(parts[0]) * int(parts[1])
    )  # fmt: skip

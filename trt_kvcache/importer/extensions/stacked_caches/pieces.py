"""Tensors that hold several caches, as these caches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_graphsurgeon as gs

from trt_kvcache.importer.graph import Emitter, contains, dims, input_or_none, is_op, producer, replace_uses
from trt_kvcache.importer.plan import Dim

Array = npt.NDArray[Any]
Value = Callable[[gs.Tensor], Array | None]


class UnsplittableError(Exception):
    """Why an operator cannot be said of each cache by itself."""


@dataclass(frozen=True, eq=False)
class Stacked:
    """A tensor, as the tensors that lie along one of its axes."""

    axis: int
    pieces: tuple[gs.Tensor, ...]
    rank: int


class Pieces:
    """The pieces of stacked tensors, as far as they are known.

    Args:
        graph: edited; its nodes in topological order, its shapes inferred.
        value: of a tensor as the graph had it first, where constants alone decide it.
    """

    def __init__(self, graph: gs.Graph, value: Value) -> None:
        self.graph = graph
        self.emit = Emitter(graph)
        self.value = value
        self._stacked: dict[int, Stacked] = {}
        self._ranks: dict[int, int] = {}
        self._origins: dict[int, str] = {}  # by id: tensors stay, since nodes that became dead stay in the graph

    def stack(self, tensor: gs.Tensor, axis: int, pieces: Sequence[gs.Tensor]) -> None:
        """Say what the pieces of a tensor are."""
        rank = len(tensor.shape) if tensor.shape is not None else len(pieces[0].shape) + 1
        self.set(tensor, axis, pieces, rank)

    def set(
        self, tensor: gs.Tensor, axis: int, pieces: Sequence[gs.Tensor], rank: int, origin: str | None = None
    ) -> None:
        """Say what the pieces of a tensor are that is made of another."""
        self._stacked[id(tensor)] = Stacked(axis, tuple(pieces), rank)
        self._origins[id(tensor)] = origin or str(tensor.name)

    def of(self, tensor: gs.Tensor) -> Stacked | None:
        """The pieces of a tensor, as far as they are known."""
        return self._stacked.get(id(tensor))

    def origin(self, node: gs.Node) -> str | None:
        """The graph's own tensor of which a node reads pieces; None where it reads none."""
        return next((self._origins[id(t)] for t in node.inputs if id(t) in self._stacked), None)

    def taken_apart(self, tensor: gs.Tensor, axis: int, size: int | None = None) -> list[gs.Tensor]:
        """The pieces of any tensor along an axis: those that it was joined of, where it was, or cut out of it.

        Raises:
            UnsplittableError: nothing says how long the axis is.
        """
        found = self._joined_of(tensor, axis)
        if found is not None:
            return found
        shape = dims(tensor) or ()
        count = shape[axis] if axis < len(shape) and isinstance(shape[axis], int) else size
        if not isinstance(count, int):
            raise UnsplittableError(f"nothing says how long axis {axis} of '{tensor.name}' is")
        if count == 1:
            return [self.emit.op("Squeeze", [tensor, self.emit.ints([axis])], "piece")]
        return [self.emit.op("Gather", [tensor, self.emit.ints(i)], "piece", axis=axis) for i in range(count)]

    def is_joined(self, tensor: gs.Tensor, axis: int) -> bool:
        """Whether something joins a tensor of pieces along this axis."""
        known = self._stacked.get(id(tensor))
        node = producer(tensor)
        if known is not None or node is None:
            return known is not None and known.axis == axis
        rank = self.rank(tensor)
        if rank is None:
            return False
        if is_op(node, "Concat", "Transpose", "Identity", "Cast", "Slice"):
            self._ranks.update((id(t), rank) for t in node.inputs)
        if is_op(node, "Concat") and axis_of(node.attrs["axis"], rank) == axis:
            return all(self.is_joined(t, axis) for t in node.inputs)
        if is_op(node, "Unsqueeze"):
            return axis in (self.axes(node, rank) or ())
        if is_op(node, "Transpose"):
            return self.is_joined(node.inputs[0], perm_of(node, rank)[axis])
        if is_op(node, "Reshape"):
            return _merged(node, axis) is not None and self.is_joined(node.inputs[0], axis)
        if is_op(node, "Slice"):
            return self.range_along(node, axis, rank) is not None and self.is_joined(node.inputs[0], axis)
        return is_op(node, "Identity", "Cast") and self.is_joined(node.inputs[0], axis)

    def rank(self, tensor: gs.Tensor) -> int | None:
        """The rank of a tensor, by its shape or by what it is joined to."""
        return len(tensor.shape) if tensor.shape is not None else self._ranks.get(id(tensor))

    def _joined_of(self, tensor: gs.Tensor, axis: int) -> list[gs.Tensor] | None:
        known = self._stacked.get(id(tensor))
        if known is not None and known.axis == axis:
            return list(known.pieces)
        node, emit, rank = producer(tensor), self.emit, self.rank(tensor)
        if node is None or rank is None or known is not None or not self.is_joined(tensor, axis):
            return None
        source = node.inputs[0]
        if is_op(node, "Concat"):
            return [piece for t in node.inputs for piece in self.taken_apart(t, axis)]
        if is_op(node, "Unsqueeze"):
            others = [a - (a > axis) for a in self.axes(node, rank) or () if a != axis]
            return [emit.op("Unsqueeze", [source, emit.ints(others)], "piece") if others else source]
        if is_op(node, "Slice"):
            parts, bounds = self.taken_apart(source, axis), self.range_along(node, axis, rank)
            assert bounds is not None
            return [parts[i] for i in chosen(*bounds, len(parts))]
        if is_op(node, "Transpose"):
            perm = perm_of(node, rank)
            return [self.turned(p, perm, axis) for p in self.taken_apart(source, perm[axis])]
        if is_op(node, "Reshape"):
            inner = [q for p in self.taken_apart(source, axis) for q in self.taken_apart(p, axis, _merged(node, axis))]
            return self.reshaped(
                node, inner, (dims(source) or ())[axis + 2 :], (dims(tensor) or ())[axis + 1 :], [axis]
            )
        return [emit.op(node.op, [p], "piece", **node.attrs) for p in self.taken_apart(source, axis)]

    def become(self, old: gs.Tensor, new: gs.Tensor) -> None:
        """Let what reads `old` read `new`."""
        replace_uses(old, new)
        for node in list(old.inputs):
            node.outputs = [t if t is not old else gs.Variable.empty() for t in node.outputs]
        if contains(self.graph.outputs, old):
            self.graph.nodes.append(gs.Node("Identity", self.emit.name("piece"), {}, [new], [old]))

    def put(self, node: gs.Node, axis: int, made: Sequence[gs.Tensor], rank: int) -> None:
        """Say what the pieces of a node's output are."""
        self.set(node.outputs[0], axis, made, rank, self.origin(node))

    def turned(self, piece: gs.Tensor, perm: Sequence[int], axis: int) -> gs.Tensor:
        """A piece, transposed as the whole is; `axis`: of the pieces behind the Transpose."""
        gone = perm[axis]
        rest = [p - (p > gone) for p in perm if p != gone]
        return piece if rest == sorted(rest) else self.emit.op("Transpose", [piece], "piece", perm=rest)

    def axes(self, node: gs.Node, rank: int) -> list[int] | None:
        """The axes of Squeeze and Unsqueeze; None where they are left out or computed."""
        given = input_or_none(node, 1)
        axes = node.attrs.get("axes") if given is None else self.value(given)
        return None if axes is None else [axis_of(a, rank) for a in np.asarray(axes).reshape(-1)]

    def range_along(self, node: gs.Node, axis: int, rank: int) -> tuple[int, int, int] | None:
        """Start, end and step of a Slice along this axis alone; None where it is along others, or computed."""
        given = [input_or_none(node, i) for i in range(1, 5)]
        starts, ends, axes, steps = (None if t is None else self.value(t) for t in given)
        if any(t is not None and v is None for t, v in zip(given, (starts, ends, axes, steps), strict=True)):
            return None
        if starts is None or ends is None or starts.size != 1 or axis_of(0 if axes is None else axes[0], rank) != axis:
            return None
        return int(starts[0]), int(ends[0]), 1 if steps is None else int(steps[0])

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

    def reshaped(
        self,
        node: gs.Node,
        parts: Sequence[gs.Tensor],
        before: Sequence[Dim],
        after: Sequence[Dim],
        gone: Sequence[int],
    ) -> list[gs.Tensor]:
        """Parts, each as a Reshape of the whole has it.

        Args:
            node: the Reshape.
            parts: of what it reads.
            before: the last sizes of a part,
            after: and of what becomes of it; those in front are the same.
            gone: places of its target that parts do not have, one after the other.

        Raises:
            UnsplittableError: sizes are copied, by 0, from places that are others in a part.
        """
        # As much is in it as before: where one size at most is unknown or has another name, it is the same size.
        if len(before) == len(after) and sum(a != b or a == "?" for a, b in zip(before, after, strict=True)) < 2:
            return list(parts)
        target = node.inputs[1]
        lost = len(dims(node.inputs[0]) or ()) - gone[0] - len(before)
        if lost != len(gone) and self._copies(node):
            raise UnsplittableError(f"Reshape '{node.name}' copies sizes by 0, which lie elsewhere in a single one")
        for place in gone:
            target = self.without(target, place, "piece_shape")
        return [self.emit.op("Reshape", [p, target], "piece", **node.attrs) for p in parts]

    def _copies(self, node: gs.Node) -> bool:
        """Whether a Reshape takes sizes of what it reads, at the same places."""
        target = node.inputs[1]
        made = producer(target)
        parts = made.inputs if made is not None and is_op(made, "Concat") else [target]
        zeros = any(0 in known for t in parts if (known := self.value(t)) is not None)
        return zeros and not node.attrs.get("allowzero", 0)

    def joined(self, parts: Sequence[gs.Tensor], axis: int, rank: int) -> gs.Tensor:
        """Pieces stacked again, for what takes them apart later on."""
        axes = self.emit.ints([axis])
        whole = self.emit.op("Concat", [self.emit.op("Unsqueeze", [p, axes], "part") for p in parts], "part", axis=axis)
        self.set(whole, axis, parts, rank)
        return whole

    def first(self, node: gs.Node) -> Stacked:
        """The stacked input that an operator works on."""
        found = [s for t in node.inputs if (s := self.of(t)) is not None]
        if self.of(node.inputs[0]) is None and not is_op(node, "ScatterND", "ScatterElements"):
            raise UnsplittableError(f"{node.op} '{node.name}' reads it as a whole")
        return found[0]


def chosen(start: int, end: int, step: int, size: int) -> range:
    """What a Slice takes: unlike Python's, it begins with the first one backwards where it would begin before that.

    Source: https://onnx.ai/onnx/operators/onnx__Slice.html
    """
    least, most = (0, size) if step > 0 else (-1, size - 1)
    start, end = (n + size if n < 0 else n for n in (start, end))
    return range(min(max(start, 0), most), min(max(end, least), most), step)


def axis_of(axis: Any, rank: int) -> int:
    """An axis counted from the front."""
    return int(axis) % rank if rank else 0


def rank_of(tensor: gs.Tensor) -> int:
    """The rank of a tensor.

    Raises:
        UnsplittableError: nothing says it.
    """
    if tensor.shape is None:
        raise UnsplittableError(f"nothing says the rank of '{tensor.name}'")
    return len(tensor.shape)


def perm_of(node: gs.Node, rank: int) -> list[int]:
    """The permutation of a Transpose."""
    return list(node.attrs.get("perm") or reversed(range(rank)))


def _merged(node: gs.Node, axis: int) -> int | None:
    """How many of the second axis a Reshape puts into each of `axis`; None where it does something else."""
    before, after = dims(node.inputs[0]) or (), dims(node.outputs[0]) or ()
    if "?" in before[:axis] or before[:axis] != after[:axis] or len(before) != len(after) + 1:
        return None
    pair = [d for d in before[axis : axis + 2] if isinstance(d, int)]
    if len(pair) < 2 or after[axis] != pair[0] * pair[1]:
        return None
    return pair[1]


def text_of(shape: Sequence[int | str]) -> str:
    """A shape in a message."""
    return f"[{', '.join(map(str, shape))}]"

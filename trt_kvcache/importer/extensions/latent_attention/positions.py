"""Tensors that hold rows by position: positions themselves, and rows of constant tables.

    Range(0, P + S) [T]                Slice(table [L, D], 0, P + S)        of all tokens
    Range(P, P + S) [S]                Slice(table [L, D], P, P + S)        of the new ones

What is made of them row by row, such as rotary factors, is the same function of other positions. Recognized by values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import onnx_graphsurgeon as gs

from trt_kvcache.errors import OptionError
from trt_kvcache.importer.graph import INT32, INT64, dims, elem_type, input_or_none, is_op
from trt_kvcache.importer.normalize.canonical import Canonical
from trt_kvcache.importer.normalize.evidence.blueprint import Array
from trt_kvcache.importer.normalize.evidence.samples import Sample, Samples


@dataclass(frozen=True)
class Taking:
    """How a Slice or Gather takes rows along one axis.

    Attributes:
        op: the operator.
        source: name of what it takes them from.
        operands: names of its other inputs; None where one is left out.
        axis: of the rows.
    """

    op: str
    source: str
    operands: tuple[str | None, ...]
    axis: int

    @property
    def names(self) -> list[str]:
        """What decides which rows."""
        return [name for name in self.operands if name is not None]

    def rows(self, sample: Sample) -> Array | None:
        """The rows that it takes, int64 ``[rows]``; None where nothing says."""
        shape = sample.probe.shape(self.source)
        first, last, _, step = (None if n is None else sample.probe.value(n) for n in self.operands)
        if shape is None or first is None or not first.ndim:
            return None
        rows = np.arange(shape[self.axis])
        if self.op == "Gather":
            alone = first.size == max(first.shape) and first.dtype.kind in "iu"
            return np.where(first < 0, first + len(rows), first).reshape(-1) if alone else None
        if last is None or not first.shape == last.shape == (1,) or (step is not None and np.any(step != 1)):
            return None
        start, end = int(first[0]), int(last[0])
        if 0 <= start < len(rows) < end <= sample.total:  # a table that ends before: whoever asks says so
            return np.arange(start, end)
        return rows[start:end]

    def takes_new(self, sample: Sample) -> bool:
        """Whether these are the new tokens' of those of all positions."""
        rows = self.rows(sample)
        return rows is not None and np.array_equal(rows, expected_rows(True, sample))


def read_taking(node: gs.Node, sample: Sample) -> Taking | None:
    """How a Slice or Gather takes rows; None for other nodes, and along several axes."""
    rank = len(dims(node.inputs[0]) or ())
    if not rank or not is_op(node, "Slice", "Gather"):
        return None
    if is_op(node, "Gather"):
        axis = int(node.attrs.get("axis", 0))
    else:
        operand = input_or_none(node, 3)
        along = sample.probe.value(operand.name) if operand is not None else np.array([0])
        if along is None or along.size != 1:
            return None
        axis = int(along[0])
    operands = [input_or_none(node, i) for i in range(1, 5)]
    names = tuple(None if t is None else str(t.name) for t in operands)
    return Taking(str(node.op), str(node.inputs[0].name), names, axis % rank)


def expected_rows(is_new: bool, sample: Sample) -> Array:
    """Positions of the new tokens in a sample, or of all of its tokens; int64 ``[rows]``."""
    return np.arange(sample.past if is_new else 0, sample.total)


@dataclass(frozen=True, eq=False)
class PositionRows:
    """Positions, or rows of a table by position.

    Attributes:
        tensor: it holds them.
        axis: of the rows; all others are 1, unless of a table.
        is_new: of the new tokens; else of all.
        offset: what is added to the positions.
        table: what a Slice or Gather takes them from,
        taking: and how; None: they are positions.
    """

    tensor: gs.Tensor
    axis: int
    is_new: bool
    offset: int
    table: gs.Tensor | None = None
    taking: Taking | None = None

    @property
    def positions(self) -> int:
        """Of how many the table has rows."""
        assert self.table is not None
        return int((dims(self.table) or ())[self.axis]) - self.offset

    def emit(self, canonical: Canonical, positions: gs.Tensor) -> gs.Tensor:
        """The same of other positions.

        Args:
            canonical: of the graph.
            positions: int64 ``[rows]``.

        Raises:
            OptionError: the capacity is more than the table's rows.
        """
        emit = canonical.emit
        if self.offset:
            positions = emit.op("Add", [positions, emit.ints(self.offset)], "row_positions")
        if self.table is not None:
            if self.positions < canonical.capacity:
                raise OptionError(
                    f"--capacity is {canonical.capacity}, but the model has {self.positions} positions: "
                    f"'{self.tensor.name}' holds rows of the table '{self.table.name}'; give at most --capacity "
                    f"{self.positions}"
                )
            return emit.op("Gather", [self.table, positions], "position_rows", axis=self.axis)
        shape = [1] * len(self.tensor.shape)
        shape[self.axis] = -1
        if len(shape) != 1:
            positions = emit.op("Reshape", [positions, emit.ints(shape)], "row_positions")
        wanted = elem_type(self.tensor)
        if wanted not in (None, 0, INT64):
            positions = emit.op("Cast", [positions], "row_positions", wanted, to=wanted)
        return positions


def find_position_rows(node: gs.Node, samples: Samples) -> PositionRows | None:
    """What the first output of a node holds, if that is rows by position."""
    tensor = node.outputs[0]
    looked_at = (*samples.plain, *samples.twins)
    if is_op(node, "Slice", "Gather") and samples.blueprint.is_constant(node.inputs[0].name):
        taking, shape = read_taking(node, looked_at[0]), dims(node.inputs[0]) or ()
        if taking is not None and len(dims(tensor) or ()) == len(shape) and isinstance(shape[taking.axis], int):
            found = _same(taking.rows, looked_at)
            return None if found is None else PositionRows(tensor, taking.axis, *found, node.inputs[0], taking)
    if not is_op(node, "Range") and elem_type(tensor) not in (INT32, INT64):
        return None
    rank = len(dims(tensor) or ())
    if not 1 <= rank <= 4:
        return None
    found = _same(partial(_positions_of, tensor.name), looked_at)
    axes = {axis for s in looked_at for axis, d in enumerate(s.probe.shape(tensor.name) or ()) if d != 1}
    if found is None or (not axes and rank > 1) or len(axes) > 1:
        return None
    return PositionRows(tensor, axes.pop() if axes else 0, *found)


def _positions_of(name: str, sample: Sample) -> Array | None:
    value = sample.probe.value(name)
    return None if value is None or value.size != max(value.shape, default=0) else value.reshape(-1)


def _same(rows: Callable[[Sample], Array | None], samples: Sequence[Sample]) -> tuple[bool, int] | None:
    """Whether rows are those of new tokens in all samples, or of all tokens, and how far behind these positions."""
    first = rows(samples[0])
    if first is None or not first.size:
        return None
    for is_new in (True, False):
        offset = int(first[0]) - int(expected_rows(is_new, samples[0])[0])
        expected = ((rows(sample), expected_rows(is_new, sample) + offset) for sample in samples)
        if offset >= 0 and all(found is not None and np.array_equal(found, wanted) for found, wanted in expected):
            return is_new, offset
    return None

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

from trt_kvcache.errors import OptionError, UnsupportedModelError
from trt_kvcache.importer.graph import INT32, INT64, dims, elem_type, is_op
from trt_kvcache.importer.normalize.attention.row_taking import Taking, expected_rows, read_taking
from trt_kvcache.importer.normalize.canonical import Canonical
from trt_kvcache.importer.normalize.evidence.blueprint import Array
from trt_kvcache.importer.normalize.evidence.samples import Sample, Samples


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

    def promise(self, samples: Samples) -> None:
        """See to it that they are these rows at every length."""
        name, taking = self.tensor.name, self.taking

        def stays(sample: Sample) -> None:
            rows = _positions_of(name, sample) if taking is None else taking.rows(sample)
            if rows is None or not np.array_equal(rows, expected_rows(self.is_new, sample) + self.offset):
                raise UnsupportedModelError(
                    f"'{name}' holds {'the new' if self.is_new else 'all'} tokens' positions, or rows of a "
                    f"table by these, but not with {sample.past} tokens in the cache and {sample.length} new; "
                    "supported are positions that count on from the cache at every length"
                )

        key = ("position rows", taking and taking.op, self.axis, self.is_new, self.offset)
        samples.promise([name] if taking is None else taking.names, key, stays)


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

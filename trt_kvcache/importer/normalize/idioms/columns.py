"""The index of a ScatterND column by column, without spreading it over all numbers that are written.

    Concat(Unsqueeze(Expand(sequences [B, 1, 1], [B, R, D])), Unsqueeze(Expand(rows [R, 1], [B, R, D])), .., axis=-1)

torch writes such an index for every single number of a row, of which each column repeats a few. An index that is made
in another way is read as a whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_graphsurgeon as gs

from trt_kvcache.importer.graph import input_or_none, is_op, producer, small_constant
from trt_kvcache.importer.normalize.evidence.probe import Probe

Array = npt.NDArray[Any]


@dataclass(frozen=True, eq=False)
class Columns:
    """The numbers of an index ``[.., columns]`` in a step.

    Attributes:
        shape: of the index, without its last axis.
        parts: of each column, its numbers: of as many axes as `shape`, each as long or 1, where they repeat.
    """

    shape: tuple[int, ...]
    parts: tuple[Array, ...]

    def laid(self, column: int, sizes: Sequence[int]) -> Array:
        """The numbers of a column, row-major in an array of `sizes`: its axes are as long or 1, where they repeat."""
        part = self.parts[column]
        return part if tuple(sizes) == self.shape else np.broadcast_to(part, self.shape).reshape(sizes)

    @property
    def least(self) -> int:
        """The smallest number; 0 if there are none."""
        return 0 if 0 in self.shape else min((int(part.min()) for part in self.parts), default=0)


@dataclass(frozen=True, eq=False)
class Index:
    """How an index is made.

    Attributes:
        tensor: the index.
        columns: what each one repeats, and in which shape; without: it is read as a whole.
    """

    tensor: gs.Tensor
    columns: tuple[tuple[gs.Tensor, gs.Tensor], ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """The tensors that decide it."""
        parts = [str(t.name) for column in self.columns for t in column]
        return tuple(parts) or (str(self.tensor.name),)

    def read(self, probe: Probe) -> Columns | None:
        """Its numbers; None where they are unknown, or do not fit together."""
        if not self.columns:
            value = probe.value(self.tensor.name)
            whole = value is not None and value.ndim > 0
            return Columns(value.shape[:-1], tuple(np.moveaxis(value, -1, 0))) if whole and value is not None else None
        found = [(probe.value(tensor.name), probe.value(shape.name)) for tensor, shape in self.columns]
        known = [(value, tuple(map(int, shape))) for value, shape in found if value is not None and shape is not None]
        try:
            shapes = {np.broadcast_shapes(value.shape, shape) for value, shape in known}
        except ValueError:
            return None
        if len(known) < len(found) or len(shapes) != 1:
            return None
        whole_shape = shapes.pop()
        parts = [value.reshape([1] * (len(whole_shape) - value.ndim) + list(value.shape)) for value, _ in known]
        return Columns(whole_shape, tuple(parts))


def read_index(tensor: gs.Tensor) -> Index:
    """How an index is made, by structure alone."""
    joined = producer(tensor)
    if joined is None or not is_op(joined, "Concat") or joined.attrs.get("axis") != -1:
        return Index(tensor)
    columns = [_column(part) for part in joined.inputs]
    return Index(tensor, tuple(c for c in columns if c is not None) if None not in columns else ())


def _column(tensor: gs.Tensor) -> tuple[gs.Tensor, gs.Tensor] | None:
    """What Unsqueeze(Expand(numbers, shape), -1) repeats, and in which shape."""
    lifted = producer(tensor)
    if lifted is None or not is_op(lifted, "Unsqueeze"):
        return None
    axes = small_constant(input_or_none(lifted, 1))
    spread = producer(lifted.inputs[0])
    if axes is None or axes.tolist() != [-1] or spread is None or not is_op(spread, "Expand"):
        return None
    return spread.inputs[0], spread.inputs[1]

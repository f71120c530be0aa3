"""How a Slice or Gather takes rows along one axis, such as the new tokens' of those of all positions.

Slice(rows [T, D], P, P + S)        Gather(rows [T, D], Range(P, P + S))
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_graphsurgeon as gs

from trt_kvcache.errors import UnsupportedModelError
from trt_kvcache.importer.graph import dims, input_or_none, is_op
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

    def promise(self, samples: Samples) -> None:
        """See to it that these are the new tokens' at every length."""

        def stays(sample: Sample) -> None:
            if not self.takes_new(sample):
                raise UnsupportedModelError(
                    f"{self.op} takes the new tokens' rows of '{self.source}', but not with {sample.past} tokens in "
                    f"the cache and {sample.length} new; supported are rows that count on from the cache at every "
                    "length"
                )

        samples.promise(self.names, ("rows taken", self.op, self.axis), stays)


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

"""Caches whose rows in use are taken out, written into, and put back: the front of the cache.

    past [B, L, D] -- Slice(0, P + S) -- ScatterND(rows P .. P + S - 1, new) -- front [B, P + S, D] -- attention
      '-- ScatterND(rows 0 .. P + S - 1, front) -> present [B, L, D]

        becomes

    present = TensorScatter(past, new), of which attention reads the rows in use

torch writes ``front = cache[:, :end]; front[:, -S:] = new; cache[:, :end] = front`` like this, as Whisper exports with
caches of a fixed length have it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_graphsurgeon as gs

from trt_kvcache.importer.graph import input_or_none, is_op, producer, small_constant
from trt_kvcache.importer.normalize.evidence.probe import Probe
from trt_kvcache.importer.normalize.views import cache_axis, is_view

__all__ = ["Front", "find_front"]


@dataclass(frozen=True, eq=False)
class Front:
    """The rows in use of a cache.

    Attributes:
        cut: the Slice that takes them out.
        write: the ScatterND that writes new rows into them.
        back: the nodes from there to what is put back, in order of execution.
    """

    cut: gs.Node
    write: gs.Node
    back: tuple[gs.Node, ...]

    @property
    def tensor(self) -> gs.Tensor:
        """The rows, with the new ones."""
        return self.write.outputs[0]

    @property
    def put(self) -> gs.Tensor:
        """The same, as it is put back."""
        return self.back[-1].outputs[0] if self.back else self.tensor

    def axis(self, past: gs.Tensor, views: Sequence[gs.Node]) -> int | None:
        """The axis of the past that the Slice cuts, as far as it is known without samples."""
        axes = small_constant(input_or_none(self.cut, 3))
        return None if axes is None or axes.size != 1 else cache_axis(past, views, int(axes[0]))

    @property
    def moves(self) -> Iterator[gs.Node]:
        """The operators whose operands say how rows are arranged."""
        yield from (self.cut, *self.back)

    def is_kept(self, probe: Probe, operand: gs.Tensor, place: int) -> bool:
        """Whether the Slice takes the first rows of an axis, and these come in order to what puts them back.

        Args:
            probe: of a step.
            operand: what the Slice reads.
            place: the axis of rows.
        """
        whole, front = probe.shape(operand.name), probe.shape(self.tensor.name)
        if whole is None or front is None:
            return False
        numbers = np.arange(np.prod(whole), dtype=np.float64).reshape(whole)
        taken = probe.given({operand.name: numbers}).value(self.cut.outputs[0].name)
        first = numbers[(slice(None),) * place + (slice(front[place]),)]
        if taken is None or not np.array_equal(taken, first):
            return False
        rows = np.arange(np.prod(front), dtype=np.float64).reshape(front)
        put = probe.given({self.tensor.name: rows}).value(self.put.name)
        return put is not None and np.array_equal(put.reshape(-1), rows.reshape(-1))


def find_front(node: gs.Node) -> Front | None:
    """What a ScatterND puts back into the tensor that it was taken out of, by structure alone."""
    back: list[gs.Node] = []
    tensor = node.inputs[2]
    while (maker := producer(tensor)) is not None and (is_view(maker) or is_op(maker, "Expand")):
        back.append(maker)
        tensor = maker.inputs[0]
    if maker is None or not is_op(maker, "ScatterND"):
        return None
    cut = producer(maker.inputs[0])
    if cut is None or not is_op(cut, "Slice") or cut.inputs[0] is not node.inputs[0]:
        return None
    return Front(cut, maker, tuple(reversed(back)))

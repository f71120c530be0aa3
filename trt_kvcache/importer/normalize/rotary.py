"""Give rotary factors that a graph computes from its own positions the new tokens' positions.

    cos = Cos(Range(0, P + S) x frequencies)[P : P + S]  [S, D]           Mul(query [B, H, S, D], cos)
becomes
    cos = Cos((write_indices + arange(S))  [B * S] x frequencies)  ->  [B, 1, S, D]

The same operators run over the new tokens' positions of all sequences, one after the other. So the result does not
depend on how the exported model picks the rows, or on the order of its operators.

    Gather(Cos(Range(0, P + S) x frequencies), position_ids)   becomes   Gather(Cos(Range(0, L) x frequencies), ...)
"""

from __future__ import annotations

from functools import partial

import onnx_graphsurgeon as gs

from trt_kvcache.importer.graph import INT64, Emitter, input_or_none, is_op, producer
from trt_kvcache.importer.interface.exported import Interface
from trt_kvcache.importer.normalize.canonical import Canonical
from trt_kvcache.importer.normalize.rows import RowFunction, Rows
from trt_kvcache.importer.plan import OriginalRole
from trt_kvcache.importer.recognize.samples import Samples

_ELEMENTWISE = ("Add", "Sub", "Mul", "Div")


class Positioned:
    """Tensors that a model computes from positions, row by row."""

    def __init__(self, graph: gs.Graph, canonical: Canonical, interface: Interface, samples: Samples) -> None:
        self._canonical = canonical
        self._samples = samples
        self._fed = {str(t.name) for t in interface.of(OriginalRole.POSITIONS)}  # and what is computed from these
        for node in graph.nodes:
            if any(t.name in self._fed for t in node.inputs):
                self._fed.update(str(t.name) for t in node.outputs)
        self._rows = Rows(graph, (), samples, self._fed)
        self._new: dict[str, gs.Tensor] = {}
        self._all: dict[str, gs.Tensor] = {}

    def meets_tokens(self, node: gs.Node) -> bool:
        """Feed `node` the new tokens' rows of each sequence, if it combines rows computed from positions with tokens.

        Returns:
            True if it was done.
        """
        operands = [(i, f) for i, t in enumerate(node.inputs) if (f := self._rows.known.get(t.name)) and f.is_new]
        if is_op(node, "RotaryEmbedding"):
            operands = [(i, f) for i in (1, 2) if (f := self._tables(node.inputs[i])) is not None]
            if len(operands) != 2 or input_or_none(node, 3) is not None:
                return False
        elif not is_op(node, *_ELEMENTWISE) or len(operands) != 1:
            return False
        shapes = [self._shape(node, function) for _, function in operands]
        if None in shapes:
            return False
        for (place, function), shape in zip(operands, shapes, strict=True):
            if shape is not None:
                node.inputs[place] = self._placed(function, *shape)
        return True

    def _tables(self, tensor: gs.Tensor) -> RowFunction | None:
        """The rows that a rotary operator reads, before an Expand repeats them for each sequence."""
        node = producer(tensor)
        function = self._rows.known.get((node.inputs[0] if node is not None and is_op(node, "Expand") else tensor).name)
        return function if function is not None and function.is_new else None

    def _placed(self, function: RowFunction, before: tuple[int, ...], after: tuple[int, ...]) -> gs.Tensor:
        """Compute a row function at the new tokens' positions, ``[B, before, S, after]``."""
        emit, tokens = self._canonical.emit, self._canonical.tokens
        flat = emit.once(
            "flat positions",
            lambda: emit.op("Reshape", [self._canonical.positions(), emit.ints([-1])], "flat_positions"),
        )
        values = self._emit(function, flat, self._new)
        sizes = [emit.once((tokens.name, i), partial(_size, emit, tokens, i)) for i in (0, 1)]
        parts = [sizes[0], emit.ints(list(before)), sizes[1], emit.ints(list(after))]
        whole = emit.op("Concat", [p for p in parts if p.shape != [0]], "rows_shape", INT64, axis=0)
        rows: gs.Tensor = emit.once(
            ("rows", function.tensor.name, before, after), lambda: emit.op("Reshape", [values, whole], "rows")
        )
        return rows

    def holds(self, tensor: gs.Tensor) -> bool:
        """True if a tensor is computed from positions, row by row."""
        return tensor.name in self._rows.known

    def is_looked_up(self, node: gs.Node) -> bool:
        """Feed a Gather a table of all positions, if its own table is only as long as the text.

        Returns:
            True if it was done.
        """
        function = self._rows.known.get(node.inputs[0].name) if is_op(node, "Gather") else None
        if function is None or function.is_new or node.inputs[1].name not in self._fed:
            return False
        every = self._canonical.emit.ints(range(self._canonical.capacity))
        node.inputs = [self._emit(function, every, self._all), node.inputs[1]]
        return True

    def _shape(self, node: gs.Node, function: RowFunction) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
        """The sizes between batch and tokens, and after tokens, in which `node` can read rows; None if none fit."""
        shapes = set()
        for sample in (*self._samples.plain, *self._samples.twins):
            rows, whole = (sample.probe.shape(t.name) for t in (function.tensor, node.outputs[0]))
            if whole is not None and is_op(node, "RotaryEmbedding"):  # its tables have no heads
                whole = (whole[0], whole[-2], whole[-1])
            if rows is None or whole is None:
                return None
            axis = function.axes[0]
            front, place = (*[1] * (len(whole) - len(rows)), *rows[:axis]), axis + len(whole) - len(rows)
            if place < 1 or any(d != 1 for d in front) or whole[0] != sample.batch or whole[place] != sample.length:
                return None
            shapes.add((front[1:], rows[axis + 1 :]))
        return shapes.pop() if len(shapes) == 1 else None

    def _emit(self, function: RowFunction, positions: gs.Tensor, emitted: dict[str, gs.Tensor]) -> gs.Tensor:
        canonical = self._canonical

        def leaf(source: RowFunction) -> gs.Tensor:
            assert source.positions is not None
            return source.positions.emit(canonical, positions)

        return self._rows.emit(str(function.tensor.name), emitted, canonical, leaf)


def _size(emit: Emitter, tensor: gs.Tensor, axis: int) -> gs.Variable:
    """One dimension, int64 ``[1]``."""
    return emit.op("Shape", [tensor], "tokens_size", INT64, start=axis, end=axis + 1)

"""Find tensors that a graph computes row by row from caches or positions, and compute them from other rows.

    latents [B, 1, T, 512] -- MatMul(weight) -> Reshape -> [B, T, H, 256] -- Transpose -> [B, H, T, 256]
    batch at 0, rows at 2                                  rows at 1                      rows at 2

    Range(0, P + S) [T]  -- Mul(frequencies), Cos -> [T, D] -- Slice(P, P + S) -> [S, D]
    rows at 0               rows at 0                          rows of the new tokens

This module follows tensors forward, operator by operator, and reads no values. Shapes in a few samples show the axis of
rows: one axis is as long as the text, another one as the batch. An operator may still mix rows, as a softmax over rows
does. The check refuses such models.

Give rotary factors that a graph computes from its own positions the new tokens' positions.

    cos = Cos(Range(0, P + S) x frequencies)[P : P + S]  [S, D]           Mul(query [B, H, S, D], cos)
becomes
    cos = Cos((write_indices + arange(S))  [B * S] x frequencies)  ->  [B, 1, S, D]

The same operators run over the new tokens' positions of all sequences, one after the other. So the result does not
depend on how the exported model picks the rows, or on the order of its operators.

    Gather(Cos(Range(0, P + S) x frequencies), position_ids)   becomes   Gather(Cos(Range(0, L) x frequencies), ...)

Emit keys and values that a graph computes from caches row by row, as multi-head latent attention does.

    latents [B, 1, T, r] -- MatMul, Reshape, Transpose, Split --> K without positions, V
    rotated [B, 1, T, d] -- Expand over the heads --------------> K with positions

Once caches have a fixed capacity, the graph computes keys and values again from constants and the cache rows in use.
Plain attention over these keys and values remains.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import prod

import numpy as np
import onnx_graphsurgeon as gs

from trt_kvcache.errors import OptionError, UnsupportedModelError
from trt_kvcache.importer.graph import (
    FLOATS,
    INT32,
    INT64,
    Emitter,
    dims,
    elem_type,
    input_or_none,
    is_constant,
    is_op,
    producer,
)
from trt_kvcache.importer.interface.exported import Interface
from trt_kvcache.importer.normalize.canonical import Canonical
from trt_kvcache.importer.operators import MOVES
from trt_kvcache.importer.plan import OriginalRole
from trt_kvcache.importer.planning.rows_in_use import emit_row_slice
from trt_kvcache.importer.recognize.probe import Array, Samples
from trt_kvcache.importer.recognize.records import Attention, Cache

Axes = tuple[int, ...]
_OTHERS = ("Attention", "Shape", "Size")
_SAMPLES = 3


class MixedError(Exception):
    """An operator mixes rows. The text is the reason; it may be empty."""


@dataclass(frozen=True)
class Positions:
    """The positions of rows, or rows of a table by position.

    Attributes:
        tensor: the tensor that holds the positions or rows.
        axis: of the rows.
        offset: constant added to the positions.
        table: a Slice takes the rows out of it; None: these are positions.
    """

    tensor: gs.Tensor
    axis: int
    offset: int
    table: gs.Tensor | None = None

    def emit(self, canonical: Canonical, positions: gs.Tensor) -> gs.Tensor:
        """Emit the rows at other positions, int64 ``[rows]``.

        Raises:
            OptionError: the capacity is more than the table's rows.
        """
        emit = canonical.emit
        if self.offset:
            positions = emit.op("Add", [positions, emit.ints(self.offset)], "row_positions")
        if self.table is not None:
            most = int((dims(self.table) or ())[self.axis]) - self.offset
            if most < canonical.capacity:
                raise OptionError(
                    f"--capacity is {canonical.capacity}, but the model has {most} positions: '{self.tensor.name}' "
                    f"holds rows of the table '{self.table.name}'; give at most --capacity {most}"
                )
            return emit.op("Gather", [self.table, positions], "position_rows", axis=self.axis)
        shape = [-1 if axis == self.axis else 1 for axis in range(len(self.tensor.shape))]
        positions = emit.op("Reshape", [positions, emit.ints(shape)], "row_positions")
        wanted = elem_type(self.tensor)
        if wanted not in (None, 0, INT64):
            positions = emit.op("Cast", [positions], "row_positions", wanted, to=wanted)
        return positions


@dataclass(frozen=True, eq=False)
class RowFunction:
    """One tensor that is computed row by row.

    Attributes:
        tensor: as exported.
        axes: of the batch and of the rows; only of the rows if they come from positions and constants.
        writes: the caches from which the tensor is computed.
        node: the node that makes it; None: it is a cache, or `positions`.
        shape: shape operand of a Reshape or Expand, with 0 and -1 as Reshape defines them; None for other operators.
        is_moved: the tensor is a single cache that operators only move, repeat and scale.
        is_new: the rows are those of the new tokens, not of all.
        takes: `node` takes the new tokens' rows from the rows of all tokens.
        positions: positions, or table rows by position, at which row functions begin.
    """

    tensor: gs.Tensor
    axes: Axes
    writes: tuple[Cache, ...] = ()
    node: gs.Node | None = None
    shape: Axes | None = None
    is_moved: bool = True
    is_new: bool = False
    takes: bool = False
    positions: Positions | None = None


class Rows:
    """All tensors of a model as exported that are computed row by row.

    With `writes`, these are tensors computed from caches; else, tensors computed from positions. Nodes that read a
    tensor in `fed` are left out: the caller's positions, and tensors computed from these.

    Attributes:
        known: by name of the tensor.
        reasons: by name of a cache, why the first operator over it works on more than a row.
        broken: the reason for the first such operator over computed rows; empty if every operator works row by row.
    """

    def __init__(self, graph: gs.Graph, writes: Sequence[Cache], samples: Samples, fed: Collection[str] = ()) -> None:
        self.known: dict[str, RowFunction] = {}
        self.reasons: dict[str, str] = {}
        self.broken = ""
        self._fixed: dict[str, Array] = {}  # integers that are computed, and the same in all samples
        self._every = (*samples.plain, *samples.twins)
        some = [s for s in samples.plain if s.length and s.total > 1]
        self._samples = sorted(some, key=lambda s: s.batch < 2)[:_SAMPLES]
        for write in writes if self._samples else ():
            if write.kept is None and not write.circular:
                for tensor in (write.present,):
                    self.known[tensor.name] = RowFunction(tensor, (0, write.axis), (write,))
        for node in graph.nodes if self._samples else ():
            if is_op(node, *_OTHERS) or not node.outputs or all(t.name in self.known for t in node.outputs):
                continue
            if any(t.name in fed for t in node.inputs):
                continue
            if any(t.name in self.known for t in node.inputs):
                self._follow(node)
            if writes or node.outputs[0].name in self.known:
                continue
            if (function := self._positions(node)) is not None:
                self.known[node.outputs[0].name] = function

    def emit(
        self,
        name: str,
        emitted: dict[str, gs.Tensor],
        canonical: Canonical,
        leaf: Callable[[RowFunction], gs.Tensor],
    ) -> gs.Tensor:
        """Compute a tensor from the rows that `leaf` returns; `emitted` caches tensors computed from the same rows."""
        if name not in emitted:
            function, emit = self.known[name], canonical.emit
            node = function.node
            if node is None:
                emitted[name] = leaf(function)
                return emitted[name]
            read = node.inputs[:1] if function.takes or function.shape is not None else node.inputs
            inputs = [self._operand(t, emitted, canonical, leaf) for t in read]
            if function.shape is not None:
                op, kind = "Expand" if is_op(node, "Expand") else "Reshape", elem_type(function.tensor)
                emitted[name] = emit.op(op, [inputs[0], emit.ints(list(function.shape))], "row", kind)
            elif function.takes:
                emitted[name] = inputs[0]  # of the new tokens already
            else:
                outputs = [t if t.is_empty() else gs.Variable(emit.name("row"), dtype=t.dtype) for t in node.outputs]
                copy = gs.Node(node.op, emit.name(f"row:{node.op}"), dict(node.attrs), inputs, outputs)
                canonical.graph.nodes.append(copy)
                emitted |= {old.name: new for old, new in zip(node.outputs, outputs, strict=True) if not old.is_empty()}
        return emitted[name]

    def _operand(
        self,
        tensor: gs.Tensor,
        emitted: dict[str, gs.Tensor],
        canonical: Canonical,
        leaf: Callable[[RowFunction], gs.Tensor],
    ) -> gs.Tensor:
        if tensor.name in self.known:
            return self.emit(tensor.name, emitted, canonical, leaf)
        return canonical.emit.constant(self._fixed[tensor.name]) if tensor.name in self._fixed else tensor

    def _follow(self, node: gs.Node) -> None:
        sources = [self.known[t.name] for t in node.inputs if t.name in self.known]
        try:
            for function in self._functions(node, sources):
                self.known.setdefault(function.tensor.name, function)
        except MixedError as error:
            for write in (w for source in sources for w in source.writes if str(error)):
                self.reasons.setdefault(write.past.name, str(error))
                if not all(source.is_moved for source in sources):
                    self.broken = self.broken or str(error)

    def _functions(self, node: gs.Node, sources: Sequence[RowFunction]) -> list[RowFunction]:
        """Derive the row functions of a node's outputs from its inputs.

        Raises:
            MixedError: the node mixes rows.
        """
        first, output = sources[0], node.outputs[0]
        if is_op(node, "Slice", "Gather") and not first.writes and not first.is_new and first.tensor is node.inputs[0]:
            axes = self._axes(node, output, first, is_new=True)
            after, before = self._shapes(output)[0], self._shapes(first.tensor)[0]
            shape = tuple(-1 if i == axes[0] else d for i, d in enumerate(after)) if len(after) != len(before) else None
            return [RowFunction(output, axes, node=node, shape=shape, is_moved=False, is_new=True, takes=True)]
        if len({source.is_new for source in sources}) > 1:
            raise MixedError(f"{node.op} '{node.name}' brings the new tokens' rows and those of all together")
        shaped = is_op(node, "Reshape", "Expand")
        for tensor in node.inputs[:1] if shaped else node.inputs:
            if not (tensor.name in self.known or tensor.is_empty() or self._is_constant(tensor)):
                # Of a MatMul: queries, or what a softmax makes of their scores.
                words = f"{node.op} '{node.name}' takes '{tensor.name}', which is no constant"
                raise MixedError("" if is_op(node, "MatMul") else words)
        writes = tuple(dict.fromkeys(w for source in sources for w in source.writes))
        functions = []
        for tensor in (t for t in node.outputs if not t.is_empty()):
            axes = self._axes(node, tensor, first, is_new=first.is_new)
            operand = self._shape(node, tensor, first.axes, axes) if shaped else None
            moves = self._moves(node, sources)
            functions.append(RowFunction(tensor, axes, writes, node, operand, moves, first.is_new))
        return functions

    def _positions(self, node: gs.Node) -> RowFunction | None:
        """Recognize a node that returns positions, or rows of a table by position."""
        tensor, samples = node.outputs[0], self._every
        if is_op(node, "Slice") and is_constant(node.inputs[0]):
            bounds = [[s.probe.value(t.name) for t in node.inputs[1:4]] for s in samples]
            ends = [[int(v.flat[0]) for v in bound if v is not None and v.size == 1] for bound in bounds]
            if any(len(bound) != 3 for bound in ends):
                return None
            rows = [np.arange(first, min(last, s.total)) for s, (first, last, _) in zip(samples, ends, strict=True)]
            table = node.inputs[0]
            axis = ends[0][2] % len(table.shape)
        elif elem_type(tensor) in (INT32, INT64):
            values = [v for s in samples if (v := s.probe.value(tensor.name)) is not None]
            if len(values) < len(samples) or any(not v.ndim or v.size != max(v.shape) for v in values):
                return None
            rows, table = [v.reshape(-1) for v in values], None
            axis = max((i for v in values for i, d in enumerate(v.shape) if d != 1), default=0)
        else:
            return None
        for is_new in (True, False):
            starts = [sample.past if is_new else 0 for sample in samples]
            offset = int(rows[0][0]) - starts[0] if rows[0].size else -1
            wanted = [np.arange(first, s.total) + offset for first, s in zip(starts, samples, strict=True)]
            if offset >= 0 and all(map(np.array_equal, rows, wanted)):
                positions = Positions(tensor, axis, offset, table)
                return RowFunction(tensor, (axis,), is_moved=False, is_new=is_new, positions=positions)
        return None

    def _is_constant(self, tensor: gs.Tensor) -> bool:
        if is_constant(tensor) or tensor.name in self._fixed:
            return True
        if self._samples[0].probe.elem_type(tensor.name) not in (INT32, INT64):
            return False
        values = [sample.probe.value(tensor.name) for sample in self._every]
        first = values[0]
        if first is None or any(v is None or not np.array_equal(v, first) for v in values):
            return False
        self._fixed[tensor.name] = first
        return True

    def _axes(self, node: gs.Node, tensor: gs.Tensor, before: RowFunction, *, is_new: bool) -> Axes:
        """Find the axes of batch and rows in an operator's output.

        Raises:
            MixedError: no axis has the length of the rows.
        """
        rank = len(self._shapes(before.tensor)[0])
        if is_op(node, "Transpose"):  # sizes of 1 would not say
            perm = list(node.attrs.get("perm") or reversed(range(rank)))
            return tuple(perm.index(axis) for axis in before.axes)
        shapes = self._shapes(tensor)
        near = before.axes[-1] + len(shapes[0]) - rank
        fixed = any(not write.growing for write in before.writes)  # it has a row for every token of the capacity
        sizes = [s.length if is_new else s.capacity if fixed else s.total for s in self._samples]
        row = min(_places(shapes, sizes), key=lambda axis: abs(axis - near), default=-1)
        batch = [axis for axis in _places(shapes, [s.batch for s in self._samples]) if axis != row]
        if row < 0 or (len(before.axes) > 1 and not batch):
            raise MixedError(f"{node.op} '{node.name}' does not keep rows of a cache apart")
        return (row,) if len(before.axes) == 1 else (batch[0], row)

    def _shape(self, node: gs.Node, tensor: gs.Tensor, before: Axes, after: Axes) -> Axes:
        """Make a shape operand for a Reshape or Expand that fits every batch and length."""
        shape = list(self._shapes(tensor)[0])
        same = [i for i in range(len(after) - 1) if before[i] == after[i]]
        for i, axis in enumerate(after):  # 0 is the same size as before, along the same axis
            if is_op(node, "Expand"):
                shape[axis] = 1
            else:
                shape[axis] = -1 if i == (len(after) - 1 if same or len(after) == 1 else 0) else 0
        return tuple(shape)

    def _moves(self, node: gs.Node, sources: Sequence[RowFunction]) -> bool:
        """True if a node only moves, repeats or scales (by one number) a single cache."""
        if len(sources) != 1 or not sources[0].is_moved:
            return False
        if is_op(node, "Mul", "Div"):
            other = node.inputs[1] if node.inputs[0].name in self.known else node.inputs[0]
            return prod(self._shapes(other)[0]) == 1 and (is_op(node, "Mul") or other is node.inputs[1])
        if is_op(node, "Slice"):
            return self._shapes(node.inputs[0])[0][-1] == self._shapes(node.outputs[0])[0][-1]
        return is_op(node, *MOVES) or is_float_cast(node)

    def _shapes(self, tensor: gs.Tensor) -> list[Axes]:
        """The shapes of a tensor in the samples.

        Raises:
            MixedError: a shape is unknown.
        """
        shapes = [sample.probe.shape(tensor.name) for sample in self._samples]
        known = [shape for shape in shapes if shape is not None]
        if len(known) < len(shapes) or len(set(map(len, known))) > 1:
            raise MixedError(f"nothing says the shape of '{tensor.name}'")
        return known


def _places(shapes: Sequence[Axes], sizes: Sequence[int]) -> list[int]:
    """The axes whose size in each sample equals the entry of `sizes`."""
    return [a for a in range(len(shapes[0])) if all(shape[a] == n for shape, n in zip(shapes, sizes, strict=True))]


def is_float_cast(node: gs.Node) -> bool:
    """True for a Cast to a float type, which changes only the precision of numbers."""
    return is_op(node, "Cast") and node.attrs.get("to") in FLOATS


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


class Computed:
    """Computes keys and values from canonical caches.

    Args:
        graph: sorted, as exported.
        caches: of the model.
        samples: of the model.
    """

    def __init__(self, graph: gs.Graph, caches: Sequence[Cache], samples: Samples) -> None:
        self._rows = Rows(graph, caches, samples)

    def place(self, attention: Attention, canonical: Canonical) -> Attention:
        """Emit the keys and values of an attention; returns the plain attention over them.

        Raises:
            UnsupportedModelError: keys or values are not computed row by row.
        """
        emitted: dict[str, gs.Tensor] = {}
        key, value = (
            self._placed(cache, attention, size, emitted, canonical)
            for cache, size in ((attention.key, attention.sizes["d"]), (attention.value, attention.sizes["v"]))
        )
        return replace(attention, key=key, value=value)

    def _placed(
        self, cache: Cache, attention: Attention, size: int, emitted: dict[str, gs.Tensor], canonical: Canonical
    ) -> Cache:
        name = str(cache.present.name)
        if name not in self._rows.known:
            raise UnsupportedModelError(
                f"'{name}', which '{attention.name}' attends to, is computed from caches"
                + (f", and {self._rows.broken}" if self._rows.broken else "")
                + "; supported are keys and values that are computed row by row with constants"
            )
        tensor = self._rows.emit(name, emitted, canonical, lambda leaf: _rows_in_use(leaf, canonical))
        kind = elem_type(cache.present) or elem_type(attention.computed_from[0].past) or 0
        if cache.axis == 3:
            tensor = canonical.emit.op("Transpose", [tensor], "rows_first", kind, perm=[0, 1, 3, 2])
        tensor.dtype = kind
        shape = (canonical.batch, attention.sizes["n"], canonical.capacity, size)
        canonical.known[tensor.name] = (kind, shape)
        return replace(cache, past=tensor, present=tensor, axis=2)


def _rows_in_use(leaf: RowFunction, canonical: Canonical) -> gs.Tensor:
    """Slice a cache to its rows in use."""
    cache = leaf.writes[0]
    rows = (cache.present.shape or ())[cache.axis]
    return emit_row_slice(canonical.emit, cache.present, cache.axis, int(rows))

"""All tensors of a model that are row functions: made of caches, and of positions, row by row.

Followed forward, operator by operator: from the caches, and from what holds positions or rows of tables by position. Of
what is made of all positions, the new tokens' rows may be taken.

Shapes say where rows go: one axis is as long as the text in every sample, another one as the batch. An operator may
still bring rows together, as a softmax over rows does; the comparison with the original refuses such models.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from math import prod

import numpy as np
import onnx_graphsurgeon as gs

from trt_kvcache.importer.extensions.latent_attention.function import MOVES, Axes, RowFunction
from trt_kvcache.importer.extensions.latent_attention.positions import find_position_rows, read_taking
from trt_kvcache.importer.graph import INT32, INT64, is_op, made_of_constants
from trt_kvcache.importer.normalize.evidence.blueprint import Array
from trt_kvcache.importer.normalize.evidence.samples import Samples
from trt_kvcache.importer.normalize.findings import Write
from trt_kvcache.importer.normalize.views import is_float_cast

_OTHERS = ("Attention", "Shape", "Size")
_SAMPLES = 3


class MixedError(Exception):
    """Why what an operator makes is no row function; empty where that needs no mention."""


class RowFunctions:
    """All row functions of a model as exported.

    Args:
        graph: sorted.
        writes: its caches.
        samples: of the model as exported.
        given: inputs with positions, of which nothing is made that is looked for here; with these, what is made of the
            new tokens' positions is looked for, too. None: it is not.

    Attributes:
        found: by name of the tensor.
        reasons: by name of a cache, why the first operator that makes no row function of it does not.
        broken: why the first one that makes none of what is computed from a cache does not; empty: all make some.
        fixed: by name, integers that are computed, and the same in all samples, such as half of the size of a head.
    """

    def __init__(
        self, graph: gs.Graph, writes: Sequence[Write], samples: Samples, given: Collection[str] | None = None
    ) -> None:
        self.found: dict[str, RowFunction] = {}
        self.reasons: dict[str, str] = {}
        self.broken = ""
        self.fixed: dict[str, Array] = {}
        self._given = set(given or ())  # and what is made of it
        self._every = (*samples.plain, *samples.twins)
        some = [s for s in samples.plain if s.length and s.total > 1]
        self._samples = sorted(some, key=lambda s: s.batch < 2)[:_SAMPLES]
        if not self._samples:
            return
        for write in writes:
            if write.kept is None and not write.circular:
                for tensor in (write.present, *write.aliases):
                    self.found[tensor.name] = RowFunction(tensor, (0, write.axis), (write,))
        for node in graph.nodes:
            if is_op(node, *_OTHERS) or not node.outputs:
                continue
            if any(t.name in self.found for t in node.inputs):
                self._follow(node)
            output = node.outputs[0]
            if any(t.name in self._given for t in node.inputs):
                self._given.update(t.name for t in node.outputs)
                continue
            rows = None if output.name in self.found else find_position_rows(node, samples)
            if rows is not None and (given is not None or not rows.is_new):
                self.found[output.name] = RowFunction(output, (rows.axis,), (), is_new=rows.is_new, rows=rows)
        self._explain_short_tables(samples.capacity)

    def is_given(self, name: str) -> bool:
        """Whether a tensor is made of positions that are inputs."""
        return name in self._given

    def _explain_short_tables(self, capacity: int) -> None:
        """Say which caches meet rows of tables that end before the capacity: there nothing else can be found."""
        for function in self.found.values():
            for tensor in function.inputs if function.writes else ():
                rows = self.found[tensor.name].rows if tensor.name in self.found else None
                if rows is None or rows.table is None or (most := rows.positions) >= capacity:
                    continue
                for write in function.writes:
                    reason = (
                        f"--capacity is {capacity}, but the table '{rows.table.name}', rows of which it is computed "
                        f"with, has {most} positions: give at most --capacity {most}"
                    )
                    self.reasons.setdefault(write.past.name, reason)

    def _follow(self, node: gs.Node) -> None:
        if all(t.name in self.found for t in node.outputs):
            return  # aliases
        sources = [self.found[t.name] for t in node.inputs if t.name in self.found]
        try:
            chosen = self._chosen(node)
            made = self._made(node, sources) if chosen is None else [chosen]
        except MixedError as error:
            for write in (w for source in sources for w in source.writes if str(error)):
                self.reasons.setdefault(write.past.name, str(error))
                if not all(source.is_moved for source in sources):
                    self.broken = self.broken or str(error)
            return
        for function in made:
            self.found.setdefault(function.tensor.name, function)

    def _chosen(self, node: gs.Node) -> RowFunction | None:
        """The new tokens' rows of what is made of all positions."""
        taking, found = read_taking(node, self._samples[0]), self.found.get(node.inputs[0].name)
        if taking is None or found is None or found.writes or found.is_new or found.axes != (taking.axis,):
            return None
        if any(name in self._given for name in taking.names) or not all(taking.takes_new(s) for s in self._every):
            return None
        sample = max(self._every, key=lambda s: s.length)
        index, shape = (sample.probe.shape(t.name) for t in (node.inputs[1], node.outputs[0]))
        if index is None or shape is None:
            return None
        made = replace(found, tensor=node.outputs[0], node=node, is_new=True, rows=None, taking=taking,
                       inputs=(node.inputs[0],), shape=None)  # fmt: skip
        if is_op(node, "Slice") or len(index) == 1:
            return made
        axis = taking.axis + index.index(max(index))
        return replace(made, axes=(axis,), shape=tuple(-1 if i == axis else d for i, d in enumerate(shape)))

    def _made(self, node: gs.Node, sources: Sequence[RowFunction]) -> list[RowFunction]:
        """What a node makes of row functions, of which it takes some.

        Raises:
            MixedError: it is none.
        """
        if len({source.is_new for source in sources}) > 1:
            raise MixedError(f"{node.op} '{node.name}' brings the new tokens' rows and those of all together")
        shaped = is_op(node, "Reshape", "Expand")
        for tensor in node.inputs[:1] if shaped else node.inputs:
            if not (tensor.name in self.found or tensor.is_empty() or self._is_constant(tensor)):
                if is_op(node, "MatMul"):
                    raise MixedError  # queries, or what a softmax makes of their scores
                raise MixedError(f"{node.op} '{node.name}' takes '{tensor.name}', which is no constant")
        if self._may_divide_by_zero(node):
            raise MixedError(
                f"{node.op} '{node.name}' may divide by 0, which rows of a cache hold before they are written"
            )
        writes = tuple(dict.fromkeys(w for source in sources for w in source.writes))
        made = []
        for tensor in (t for t in node.outputs if not t.is_empty()):
            axes = self._axes(node, tensor, sources)
            shape = self._shape(node, tensor, sources[0].axes, axes) if shaped else None
            made.append(
                RowFunction(tensor, axes, writes, node, shape, self._moves(node, sources), sources[0].is_new,
                            inputs=tuple(node.inputs))
            )  # fmt: skip
        return made

    def _may_divide_by_zero(self, node: gs.Node) -> bool:
        """Whether nothing is added to what an operator divides by, as norms do; 0 * inf would not hide such a row."""
        if not is_op(node, "Div", "Reciprocal", "Log"):
            return False
        found = self.found.get(node.inputs[-1].name)
        while found is not None and found.node is not None and is_op(found.node, "Sqrt", "Identity", "Cast"):
            found = self.found.get(found.node.inputs[0].name)
        return found is not None and bool(found.writes) and not (found.node and is_op(found.node, "Add", "Max", "Clip"))

    def _is_constant(self, tensor: gs.Tensor) -> bool:
        if made_of_constants(tensor) or tensor.name in self.fixed:
            return True
        if self._samples[0].probe.elem_type(tensor.name) not in (INT32, INT64):
            return False
        values = [sample.probe.value(tensor.name) for sample in self._every]
        first = values[0]
        if first is None or any(v is None or not np.array_equal(v, first) for v in values):
            return False
        self.fixed[tensor.name] = first
        return True

    def _axes(self, node: gs.Node, tensor: gs.Tensor, sources: Sequence[RowFunction]) -> Axes:
        """Batch and rows of what an operator makes."""
        before = max(sources, key=lambda source: len(source.axes))
        rank = len(self._shapes(before.tensor)[0])
        if is_op(node, "Transpose"):  # sizes of 1 would not say
            perm = list(node.attrs.get("perm") or reversed(range(rank)))
            return tuple(perm.index(axis) for axis in before.axes)
        shapes = self._shapes(tensor)
        near = before.axes[-1] + len(shapes[0]) - rank
        fixed = any(not write.growing for write in before.writes)  # it has a row for every token of the capacity
        sizes = [s.length if before.is_new else s.capacity if fixed else s.total for s in self._samples]
        row = min(self._places(shapes, sizes), key=lambda axis: abs(axis - near), default=-1)
        batch = [axis for axis in self._places(shapes, [s.batch for s in self._samples]) if axis != row]
        if row < 0 or (len(before.axes) > 1 and not batch):
            raise MixedError(f"{node.op} '{node.name}' does not keep rows of a cache apart")
        return (row,) if len(before.axes) == 1 else (batch[0], row)

    @staticmethod
    def _places(shapes: Sequence[Axes], sizes: Sequence[int]) -> list[int]:
        """The axes that have one size after the other."""
        return [a for a in range(len(shapes[0])) if all(shape[a] == n for shape, n in zip(shapes, sizes, strict=True))]

    def _shape(self, node: gs.Node, tensor: gs.Tensor, before: Axes, after: Axes) -> Axes:
        """The shape that a Reshape or Expand gives, for every batch and length."""
        shapes = self._shapes(tensor)
        made = list(shapes[0])
        if is_op(node, "Expand"):
            for axis in after:
                made[axis] = 1
        else:  # 0 is the same size as before, along the same axis
            same = [i for i in range(len(after) - 1) if before[i] == after[i]]
            if len(after) > 1 and not same and before[1] != after[1]:
                raise MixedError(f"{node.op} '{node.name}' moves both batch and rows")
            for i, axis in enumerate(after):
                made[axis] = -1 if i == (len(after) - 1 if same or len(after) == 1 else 0) else 0
        if any(shape[a] != n or n < 1 for shape in shapes for a, n in enumerate(made) if a not in after):
            raise MixedError(f"{node.op} '{node.name}' gives a shape that grows beside the rows")
        return tuple(made)

    def _moves(self, node: gs.Node, sources: Sequence[RowFunction]) -> bool:
        """Whether one cache is only moved, repeated as a whole, or scaled by one number."""
        if len(sources) != 1 or not sources[0].is_moved:
            return False
        if is_op(node, "Mul", "Div"):
            other = node.inputs[1] if node.inputs[0].name in self.found else node.inputs[0]
            return prod(self._shapes(other)[0]) == 1 and (is_op(node, "Mul") or other is node.inputs[1])
        if is_op(node, "Slice"):
            return self._shapes(node.inputs[0])[0][-1] == self._shapes(node.outputs[0])[0][-1]
        return is_op(node, *MOVES) or is_float_cast(node)

    def _shapes(self, tensor: gs.Tensor) -> list[Axes]:
        """In the samples.

        Raises:
            MixedError: nothing says them.
        """
        shapes = [sample.probe.shape(tensor.name) for sample in self._samples]
        known = [shape for shape in shapes if shape is not None]
        if len(known) < len(shapes) or len(set(map(len, known))) > 1:
            raise MixedError(f"nothing says the shape of '{tensor.name}'")
        return known

"""All tensors of a model that are row functions: made of caches, and of positions, row by row.

Followed forward, operator by operator: from the caches, and from what holds positions or rows of tables by position. Of
what is made of all positions, the new tokens' rows may be taken.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

import onnx_graphsurgeon as gs

from trt_kvcache.importer.extensions.latent_attention.function import RowFunction
from trt_kvcache.importer.extensions.latent_attention.operators import MixedError, RowOperators
from trt_kvcache.importer.extensions.latent_attention.positions import find_position_rows, read_taking
from trt_kvcache.importer.graph import is_op
from trt_kvcache.importer.normalize.evidence.samples import Samples
from trt_kvcache.importer.normalize.findings import Write

_OTHERS = ("Attention", "Shape", "Size")
_SAMPLES = 3


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
        fixed: by name, bounds and indices that are computed, and the same in all samples.
    """

    def __init__(
        self, graph: gs.Graph, writes: Sequence[Write], samples: Samples, given: Collection[str] | None = None
    ) -> None:
        self.found: dict[str, RowFunction] = {}
        self.reasons: dict[str, str] = {}
        self.broken = ""
        self._given = set(given or ())  # and what is made of it
        self._every = (*samples.plain, *samples.twins)
        some = [s for s in samples.plain if s.length and s.total > 1]
        self._samples = sorted(some, key=lambda s: s.batch < 2)[:_SAMPLES]
        self._operators = RowOperators(self.found, samples, self._samples)
        self.fixed = self._operators.fixed
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
        """Say which caches meet rows of tables that end before the capacity: there nothing else can be proven."""
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
        try:
            chosen = self._chosen(node)
            made = self._operators.made(node) if chosen is None else [chosen]
        except MixedError as error:
            sources = [self.found[t.name] for t in node.inputs if t.name in self.found]
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

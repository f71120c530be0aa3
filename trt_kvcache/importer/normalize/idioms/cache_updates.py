"""Cache updates, found by the flow of numbers: the region of nodes between a past and its present.

    past [B, N, L, D] -- Transpose(2, 0, 1, 3) --.
    start -- Add(Range(S)) -- Unsqueeze [S, 1] -- ScatterND -- Transpose(1, 2, 0, 3) -> present
    new [B, N, S, D] -- Transpose(2, 0, 1, 3) ---'

    becomes

    present = TensorScatter(past, new, write_indices, axis=2)

The past of an output is the nearest input that may be a cache. Their region is all nodes between them, whatever these
do. What else comes into it is computed from positions and sizes, and says where rows go, or is one tensor that is not:
the new rows. What the region does with them is seen by running it: `read_updates`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace

import onnx_graphsurgeon as gs
from onnx import TensorProto

from trt_kvcache.errors import UnsupportedModelError
from trt_kvcache.importer.graph import FLOATS, consumers, contains, dims, dtype_name, elem_type, is_op, producer
from trt_kvcache.importer.normalize.candidate import Candidate, may_be_cache
from trt_kvcache.importer.normalize.evidence.reach import data_dependent, deciding
from trt_kvcache.importer.normalize.views import trace_back
from trt_kvcache.plugins.operators import NAMESPACE

__all__ = ["find_candidates"]

_MOST = 64  # nodes of a region
_FEW_BITS: dict[int, str] = {
    TensorProto.INT8: "int8", TensorProto.UINT8: "int8", TensorProto.INT4: "int4", TensorProto.UINT4: "int4",
    TensorProto.FLOAT8E4M3FN: "fp8", TensorProto.FLOAT8E5M2: "fp8",
}  # fmt: skip
"""Types of caches that no step reads as they are, and what makes such caches of others."""
_GIVE_BACK = "give back what is joined with the past, or Concat(past, new) as a whole"


def find_candidates(graph: gs.Graph) -> tuple[Candidate, ...]:
    """Find what may be a cache update, in a sorted graph.

    Returns:
        One for each graph output that the numbers of a cache may reach, in their order, then caches of which an output
        gives the new rows only, then updates that reach no output.

    Raises:
        UnsupportedModelError: a cache is held in the model, where no caller can reach it.
    """
    flow = _Flow(graph)
    candidates = [c for output in graph.outputs if (c := flow.update(output)) is not None]
    _check_inside(graph, flow)
    return (*candidates, *flow.new_rows(candidates))


class _Flow:
    """The caches whose numbers reach each tensor, as bits: those of which only the shape is read do not count."""

    def __init__(self, graph: gs.Graph) -> None:
        self._outputs = graph.outputs
        self._pasts = [t for t in graph.inputs if may_be_cache(graph, t)]
        self._reached = {id(t): 1 << i for i, t in enumerate(self._pasts)}
        self._places = {id(node): place for place, node in enumerate(graph.nodes)}
        self._dependent = data_dependent(graph)
        for node in graph.nodes:
            bits = 0
            for tensor in () if is_op(node, "Shape", "Size") else node.inputs:
                bits |= self._reached.get(id(tensor), 0)
            if bits:
                self._reached |= dict.fromkeys(map(id, node.outputs), bits)

    def is_data(self, tensor: gs.Tensor) -> bool:
        """True if numbers are not computed from positions and sizes alone."""
        return id(tensor) in self._dependent and elem_type(tensor) in (*FLOATS, None, 0)

    def update(self, present: gs.Tensor) -> Candidate | None:
        """The update of which an output is the result."""
        past = self._nearest(present)
        region = () if past is None else self._between(past, present)
        if region:
            self._check_type(past, present, region)
        return self._candidate(past, present, region) if region else None

    def _check_type(self, past: gs.Tensor, present: gs.Tensor, region: Sequence[gs.Node]) -> None:
        """Refuse a cache of few bits to which new rows come.

        Raises:
            UnsupportedModelError: naming its type.
        """
        option = None if any(n.domain == NAMESPACE for n in region) else _FEW_BITS.get(elem_type(past) or 0)
        bit = self._reached[id(past)]
        others = (t for n in region for t in n.inputs if not self._reached.get(id(t), 0) & bit)
        if option and elem_type(present) == elem_type(past) and any(id(t) in self._dependent for t in others):
            raise UnsupportedModelError(
                f"the cache '{past.name}' is {dtype_name(past)}, to which the model itself quantizes; supported are "
                "caches of float32, float16 and bfloat16: export the model without quantized caches, and let them be "
                f"quantized here (--cache-dtype {option})"
            )

    def _nearest(self, present: gs.Tensor) -> gs.Tensor | None:
        """The cache of the same rank from which the fewest nodes lead to an output."""
        rank = None if present.shape is None else len(present.shape)
        pending, seen = deque([present]), set[int]()
        while pending and (rank is None or rank > 2):
            tensor = pending.popleft()
            node = producer(tensor)
            if node is None:
                if id(tensor) in self._reached and rank in (None, len(tensor.shape)):
                    return tensor
            elif id(node) not in seen:
                seen.add(id(node))
                pending += (t for t in node.inputs if id(t) in self._reached)
        return None

    def _between(self, past: gs.Tensor, present: gs.Tensor) -> tuple[gs.Node, ...]:
        """The nodes on paths from a cache to an output, in order of execution; none, if they are too many."""
        bit = self._reached[id(past)]
        nodes: dict[int, gs.Node] = {}
        pending = [present]
        while pending and len(nodes) <= _MOST:
            node = producer(pending.pop())
            if node is not None and id(node) in self._places and id(node) not in nodes:
                nodes[id(node)] = node
                pending += (t for t in node.inputs if self._reached.get(id(t), 0) & bit)
        return () if pending else tuple(sorted(nodes.values(), key=lambda node: self._places[id(node)]))

    def _candidate(self, past: gs.Tensor | None, present: gs.Tensor, region: tuple[gs.Node, ...]) -> Candidate | None:
        """The update that nodes may make; None: weights or other caches take part in it."""
        bit = self._reached[id(past)]
        own = {id(t): t for n in region for t in n.inputs if not t.is_empty() and not self._reached.get(id(t), 0) & bit}
        rows = tuple(t for t in own.values() if self.is_data(t))
        if any(isinstance(t, gs.Constant) or contains(self._pasts, t) for t in rows):
            return None
        where = tuple(t for t in own.values() if not self.is_data(t))
        node = next((n for n in reversed(region) if rows and contains(n.inputs, rows[0])), region[-1])
        updates = tuple(self._sources(rows[0])) if rows else ()
        reason = "" if len(rows) == 1 else f"it takes new rows from {len(rows)} tensors"
        return Candidate(
            str(node.op), past, present, node, region=region, rows=rows, updates=updates, where=where, reason=reason
        )

    def _sources(self, rows: gs.Tensor) -> list[gs.Tensor]:
        """Tensors that may be the new rows, from the projection on; the last one comes into the region."""
        path = [rows]
        while (node := producer(path[0])) is not None:
            data = [t for t in node.inputs if self.is_data(t)]
            if len(data) != 1 or elem_type(data[0]) != elem_type(rows):
                break
            path.insert(0, data[0])
        return path

    def new_rows(self, candidates: Sequence[Candidate]) -> list[Candidate]:
        """Caches of which an output gives the new rows only, and those of which no output gives anything back."""
        used = {id(t) for c in candidates if not c.reason for t in (c.past, c.present)}
        outputs = ", ".join(t.name for t in self._outputs)
        joins: list[Candidate] = []
        for join in (join for past in self._pasts if id(past) not in used for join in self._joins(past)):
            rows = join.rows[0]
            present = [t for t in self._outputs if id(t) not in used and trace_back(t) is trace_back(rows)]
            if present:
                used |= {id(present[0]), id(join.past)}
                joins.append(replace(join, present=present[0], rows_only=True))
            elif sorted(map(str, dims(join.past) or ())) == sorted(map(str, dims(join.present) or ())):
                joins.append(
                    replace(join, reason="the result is no output of the model, so that the new rows are lost")
                )
            else:
                why = f"no output gives its new rows '{rows.name}' as they are joined with the past, nor the whole"
                joins.append(replace(join, rows_only=True, reason=f"{why} (outputs: {outputs})", advice=_GIVE_BACK))
        ranks = {len(c.past.shape) for c in joins if not c.reason}
        lost = [c for c in joins if id(c.past) not in used and (not c.rows_only or len(c.past.shape) in ranks)]
        return [*(c for c in joins if not c.reason), *lost]

    def _joins(self, past: gs.Tensor) -> Iterator[Candidate]:
        """The first nodes that bring a cache and new rows together."""
        pending = [past]
        while pending:
            for node in consumers(pending.pop()):
                if is_op(node, "Shape", "Size"):
                    continue
                region = self._between(past, node.outputs[0])
                candidate = self._candidate(past, node.outputs[0], region) if region else None
                if candidate is not None and len(candidate.rows) == 1:
                    yield replace(candidate, node=node, idiom=f"{node.op}, new rows returned")
                elif candidate is not None and not candidate.rows:
                    pending += node.outputs


def _check_inside(graph: gs.Graph, flow: _Flow) -> None:
    """Refuse scatters into caches that come from no input.

    Raises:
        UnsupportedModelError: naming one.
    """
    for node in (n for n in graph.nodes if is_op(n, "ScatterND", "ScatterElements")):
        past, index = trace_back(node.inputs[0]), deciding(node.inputs[1])
        is_cache = isinstance(past, gs.Constant) and len(past.shape) >= 3 and flow.is_data(node.inputs[2])
        if is_cache and index.positions and not index.data_dependent():
            raise UnsupportedModelError(
                f"{node.op} '{node.name}' writes to '{past.name}', a cache that the model holds in itself: it starts "
                "anew in every step. Supported are caches that are inputs and outputs: export the model with the cache "
                "as an argument and a result of its forward function"
            )

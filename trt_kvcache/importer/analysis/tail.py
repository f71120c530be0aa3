"""The tail of a graph: what is computed of each position by itself, behind the last place that mixes positions.

    attention -> Add -> norm -> MLP -> Add -> norm -> MatMul -> softcap -> logits [B, S, V]
                  |                                                |
                  `- the narrowest value here is the place to cut -'

From the output back, operator by operator (`trt_kvcache.importer.analysis.positions`), as long as nothing outside of
the tail reads what is in it.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import onnx_graphsurgeon as gs

from trt_kvcache.importer.analysis.positions import MixedError, inputs_by_position
from trt_kvcache.importer.analysis.sources import inputs_behind
from trt_kvcache.importer.graph import consumers, contains, dims, is_op, producer

__all__ = ["Cut", "find_cut"]


@dataclass(frozen=True, eq=False)
class Cut:
    """Where a tail can be cut to some positions: one tensor that all of it is computed from.

    Attributes:
        axis: of its positions.
        readers: in the tail; to whoever else reads the tensor, nothing changes.
        width: numbers for each position.
    """

    tensor: gs.Tensor
    axis: int
    readers: tuple[gs.Node, ...]
    width: int


def find_cut(graph: gs.Graph, output: gs.Tensor, axis: int) -> Cut | str:
    """The narrowest value in the tail of an output, the first of several; or why there is none narrower than it.

    Args:
        graph: sorted.
        output: of the graph.
        axis: of its positions.
    """
    width = _width(output, axis)
    walk = _Walk(graph, output, axis)
    best: Cut | None = None
    while (reason := walk.step()) is None:
        cut = walk.cut()
        if cut is not None and cut.width < width and (best is None or cut.width <= best.width):
            best = cut
    return reason if best is None else best


def _width(tensor: gs.Tensor, axis: int) -> int | float:
    """Numbers for each position; infinite where the batch is not the only other size that is open."""
    shape = list(dims(tensor) or ())
    if shape and not isinstance(shape[-1], int):  # a product with weights knows
        weights = [dims(n.inputs[1]) or () for n in consumers(tensor) if is_op(n, "MatMul") and n.inputs[0] is tensor]
        shape[-1] = next((d[-2] for d in weights if len(d) == 2), "?")
    sizes = [d for i, d in enumerate(shape) if i not in (0, axis)]
    return prod(d for d in sizes if isinstance(d, int)) if all(isinstance(d, int) for d in sizes) else float("inf")


class _Walk:
    """Back through the tail, the last node first: so all ways lead through one tensor where only one is left."""

    def __init__(self, graph: gs.Graph, output: gs.Tensor, axis: int) -> None:
        self._graph = graph
        self._output = output
        self._order = {id(node): place for place, node in enumerate(graph.nodes)}
        self._behind = inputs_behind(graph)
        self._front: dict[int, tuple[gs.Tensor, int]] = {id(output): (output, axis)}
        self._readers: dict[int, list[tuple[gs.Node, int]]] = {id(output): []}

    def cut(self) -> Cut | None:
        """The only tensor that holds the positions of the tail so far."""
        if len(self._front) > 1:
            return None
        tensor, axis = next(iter(self._front.values()))
        width = _width(tensor, axis)
        readers = self._readers[id(tensor)]
        slots = {(id(node), index) for node, index in readers}
        also = [
            t for node, _ in readers for i, t in enumerate(node.inputs) if t is tensor and (id(node), i) not in slots
        ]
        if also or not isinstance(width, int):
            return None  # one node reads some of it, and all of it
        return Cut(tensor, axis, tuple({id(node): node for node, _ in readers}.values()), width)

    def step(self) -> str | None:
        """Take the last node that is left into the tail; why not, where that cannot be."""
        made = {tensor_id: producer(tensor) for tensor_id, (tensor, _) in self._front.items()}
        places = {i: self._order.get(id(node), -1) for i, node in made.items() if node is not None}
        if not places:
            return "all of the model works on each position by itself"
        last = max(places, key=lambda i: places[i])
        node = made[last]
        assert node is not None
        axis = self._front[last][1]
        outputs = [t for t in node.outputs if consumers(t) or contains(self._graph.outputs, t)]
        for tensor in outputs:
            if (reason := self._open(tensor, axis)) is not None:
                return reason
        try:
            inputs = inputs_by_position(node, axis, self._behind)
        except MixedError as error:
            return str(error)
        for tensor in outputs:
            del self._front[id(tensor)]
        for index, place in inputs.items():
            tensor = node.inputs[index]
            if self._front.setdefault(id(tensor), (tensor, place))[1] != place:
                return f"'{tensor.name}' is read along two of its axes"
            self._readers.setdefault(id(tensor), []).append((node, index))
        return None

    def _open(self, tensor: gs.Tensor, axis: int) -> str | None:
        """Who outside of the tail reads a tensor, or reads it another way."""
        if tensor is not self._output and contains(self._graph.outputs, tensor):
            return f"'{tensor.name}' is an output of its own"
        known = self._readers.get(id(tensor), [])
        others = [node for node in consumers(tensor) if all(node is not reader for reader, _ in known)]
        if others:
            return f"{others[0].op} '{others[0].name}' reads '{tensor.name}', too"
        slots = sum(t is tensor for node in consumers(tensor) for t in node.inputs)
        if self._front.get(id(tensor), (tensor, -1))[1] != axis or len(known) != slots:
            return f"'{tensor.name}' is read as a whole, too"
        return None

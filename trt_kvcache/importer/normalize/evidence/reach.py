"""Sources of a tensor's values: positions come from an input, data-dependent rows from tokens or masks."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod

import onnx_graphsurgeon as gs

from trt_kvcache.importer.graph import BOOL, INT32, INT64, elem_type, is_op, producer

# Operators that look for something in their input, or sum it up: what they make of positions is no position.
_SEARCHES = (
    "CumSum", "CumProd", "ReduceSum", "ReduceMean", "ReduceProd", "ReduceSumSquare", "ArgMax", "ArgMin", "NonZero",
    "TopK", "Unique", "Compress",
)  # fmt: skip
_PROJECTIONS = ("MatMul", "Gemm", "Einsum", "Conv")  # of tokens, by weights however small
_WEIGHT = 1 << 12  # elements; beyond it a floating-point constant is taken for a weight


@dataclass(frozen=True, eq=False)
class Reach:
    """Sources of the values (not the shape) of tensors.

    Attributes:
        inputs: graph inputs whose values take part, by name.
        searches: nodes that search in, or sum up, values of graph inputs.
        weights: whether a weight takes part.
    """

    inputs: dict[str, gs.Tensor]
    searches: tuple[gs.Node, ...]
    weights: bool

    @property
    def positions(self) -> tuple[str, ...]:
        """The integer inputs."""
        return tuple(name for name, tensor in self.inputs.items() if elem_type(tensor) in (INT32, INT64))

    def data_dependent(self) -> str | None:
        """The reason why the values are no positions, in words; None: they may be."""
        if self.weights:
            return "they are computed with the model's weights"
        if self.searches:
            node = self.searches[0]
            return f"{node.op} '{node.name}' computes them from the contents of '{', '.join(self.inputs)}'"
        others = [name for name in self.inputs if name not in self.positions]
        if others:
            return f"they are computed from the contents of '{', '.join(others)}'"
        return f"two inputs take part in them, '{', '.join(self.inputs)}'" if len(self.inputs) > 1 else None


def deciding(*tensors: gs.Tensor) -> Reach:
    """The sources of the values of these tensors."""
    inputs, searches, weights = _sources(tensors)
    return Reach(inputs, tuple(n for n in searches if _sources(n.inputs)[0]), weights)


def _sources(tensors: Iterable[gs.Tensor]) -> tuple[dict[str, gs.Tensor], list[gs.Node], bool]:
    """Graph inputs, searches of anything, and whether a weight takes part."""
    inputs: dict[str, gs.Tensor] = {}
    searches: list[gs.Node] = []
    weights = False
    pending, seen = list(tensors), set[int]()
    while pending:
        tensor = pending.pop()
        node = producer(tensor)
        if id(tensor) in seen or tensor.is_empty():
            continue
        seen.add(id(tensor))
        if isinstance(tensor, gs.Constant):
            weights = weights or _is_weight(tensor)
        elif node is None:
            inputs[tensor.name] = tensor
        elif not is_op(node, "Shape", "Size"):
            weights = weights or is_op(node, *_PROJECTIONS)
            searches += [node] if is_op(node, *_SEARCHES) else []
            pending += node.inputs
    return inputs, searches, weights


def _is_weight(constant: gs.Constant) -> bool:
    return prod(map(int, constant.shape)) > _WEIGHT and elem_type(constant) not in (INT32, INT64, BOOL)


def data_dependent(graph: gs.Graph) -> set[int]:
    """The ids of tensors of a sorted graph whose values weights or floating-point inputs decide."""
    reached = {id(t) for t in graph.inputs if elem_type(t) not in (INT32, INT64, BOOL)}
    for node in graph.nodes:
        for tensor in node.inputs:
            if isinstance(tensor, gs.Constant) and id(tensor) not in reached and _is_weight(tensor):
                reached.add(id(tensor))
        read = () if is_op(node, "Shape", "Size") else node.inputs
        if is_op(node, *_PROJECTIONS) or any(id(t) in reached for t in read):
            reached.update(map(id, node.outputs))
    return reached

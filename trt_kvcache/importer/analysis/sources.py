"""Which graph inputs every tensor is computed from."""

from __future__ import annotations

from collections.abc import Iterator

import onnx_graphsurgeon as gs

from trt_kvcache.importer.graph import is_op

__all__ = ["inputs_behind"]


def inputs_behind(graph: gs.Graph) -> dict[str, frozenset[str]]:
    """The graph inputs behind each tensor, by name; those of which only the shape is read do not count.

    The nodes must be in topological order, as ONNX demands.
    """
    found = {str(t.name): frozenset([str(t.name)]) for t in graph.inputs}
    for node in graph.nodes:
        names = () if is_op(node, "Shape", "Size") else _reads(node)
        behind = frozenset[str]().union(*(found.get(name, frozenset()) for name in names))
        found.update((str(t.name), behind) for t in node.outputs)
    return found


def _reads(node: gs.Node) -> Iterator[str]:
    """Names of what a node reads, in its nested graphs too."""
    yield from (str(t.name) for t in node.inputs)
    for body in (value for value in node.attrs.values() if isinstance(value, gs.Graph)):
        for inner in body.nodes:
            yield from _reads(inner)
        yield from (str(t.name) for t in body.outputs)

"""Along which axes of an input constants choose single places, and who reads the input as a whole."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import onnx_graphsurgeon as gs

from trt_kvcache.importer.extensions.stacked_caches.pieces import Label, Pieces, axis_of
from trt_kvcache.importer.graph import is_op


@dataclass(frozen=True)
class Uses:
    """How inputs are read.

    Attributes:
        chosen: the axes of which single places are chosen: as often as there are places, at least. (A model that takes
            the last row of one cache apart chooses a single one, too.)
        whole: by axis, the first node that reads several places at once.
    """

    chosen: frozenset[Label]
    whole: dict[Label, gs.Node]


def find_uses(at: Pieces, inputs: Sequence[gs.Tensor]) -> Uses:
    """Follow the fixed axes of inputs through the graph."""
    sizes = {(str(t.name), a): d for t in inputs for a, d in enumerate(t.shape) if isinstance(d, int)}
    at.follow((t, a) for t in inputs for a, d in enumerate(t.shape) if isinstance(d, int))
    counts: Counter[Label] = Counter()
    whole: dict[Label, gs.Node] = {}
    for node in at.graph.nodes:
        passed = {(id(t), a) for output in node.outputs for axis in range(at.rank(output) or 0)
                  for t, a in at.axis_before(node, output, axis)}  # fmt: skip
        for tensor in {id(t): t for t in node.inputs}.values():
            for axis in range(at.rank(tensor) or 0):
                labels = at.labels(tensor, axis)
                count = _chosen(at, node, tensor, axis) if labels else 0
                counts.update({label: count for label in labels if count})
                if not labels or count or is_op(node, "Shape") or at.size(tensor, axis) == 1:
                    continue
                if (id(tensor), axis) not in passed:
                    whole |= {label: node for label in labels if label not in whole}
    return Uses(frozenset(label for label, count in counts.items() if count >= sizes[label]), whole)


def _chosen(at: Pieces, node: gs.Node, tensor: gs.Tensor, axis: int) -> int:
    """The number of single places of an axis that a node chooses."""
    if node.inputs[0] is not tensor:
        return 0
    rank, size, after = at.rank_of(tensor), at.size(tensor, axis), at.rank(node.outputs[0])
    if is_op(node, "Gather") and axis_of(node.attrs.get("axis", 0), rank) == axis and after is not None:
        index = at.value(node.inputs[1])
        return int(after < rank or (index is not None and index.size == 1))
    if is_op(node, "Slice"):
        return int(size != 1 and at.size(node.outputs[0], axis) == 1)
    if is_op(node, "Split") and axis_of(node.attrs.get("axis", 0), rank) == axis:
        return len(node.outputs) if size == len(node.outputs) > 1 else 0
    return int(is_op(node, "Squeeze") and axis in (at.axes(node, rank) or ()))

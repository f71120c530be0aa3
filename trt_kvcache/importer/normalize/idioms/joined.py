"""Concatenations in disguise: parts that are written side by side into zeros.

    zeros [B, H, T, 24] -- Transpose -> ScatterND(rows 0..15 of axis 0) -> Transpose, Transpose ->
        ScatterND(rows 16..23) -> Transpose                     becomes           Concat(a, b, axis=-1)

torch writes an assignment to a slice so (``k[..., :16] = a; k[..., 16:] = b``). Where the parts cover everything,
nothing is left of the zeros, nor of their type or their shape, which is as long as the text.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_graphsurgeon as gs

from trt_kvcache.importer.graph import Emitter, is_op, producer
from trt_kvcache.importer.normalize.evidence.samples import Samples

Perm = tuple[int, ...]


@dataclass(frozen=True, eq=False)
class _Part:
    """What one ScatterND writes.

    Attributes:
        start, count: which rows of the axis that all parts lie along.
        tensor: its updates,
        perm: and how they are transposed into the layout of the whole.
    """

    start: int
    count: int
    tensor: gs.Tensor
    perm: Perm


def join_scattered(graph: gs.Graph, samples: Samples) -> bool:
    """Put a Concat, in place, for each chain of ScatterND that covers what it writes into.

    Args:
        graph: of the model as exported.
        samples: of the same model.

    Returns:
        Whether there was one. What it read is left behind, dead.
    """
    emit = Emitter(graph)
    wholes = [(node, found) for node in graph.nodes if (found := _parts(node, samples)) is not None]
    for node, (axis, parts) in wholes:
        _join(graph, emit, node, axis, parts)
    return bool(wholes)


def _parts(node: gs.Node, samples: Samples) -> tuple[int, list[_Part]] | None:
    """The axis that parts lie along and the parts, in order; None where they do not cover it exactly."""
    chain = _chain(node)
    total = samples.plain[0].probe.shape(node.outputs[0].name) if chain else None
    if total is None:
        return None
    axis = chain[0][1].index(0)
    parts: list[_Part] = []
    for scatter, perm in chain:
        indices = [s.probe.value(scatter.inputs[1].name) for s in samples.plain]
        first = indices[0]
        if first is None or first.ndim != 2 or first.shape[1] != 1 or not first.size or perm.index(0) != axis:
            return None
        start, count = int(first[0, 0]), len(first)
        if start < 0 or not np.array_equal(first[:, 0], start + np.arange(count)):
            return None
        if any(other is None or not np.array_equal(other, first) for other in indices):
            return None
        parts.append(_Part(start, count, scatter.inputs[2], perm))
    parts.sort(key=lambda part: part.start)
    ends = [0, *(part.start + part.count for part in parts)]
    whole = [shape[axis] for s in samples.plain if (shape := s.probe.shape(node.outputs[0].name)) is not None]
    if [part.start for part in parts] != ends[:-1] or whole != [ends[-1]] * len(samples.plain):
        return None
    return axis, parts


def _chain(node: gs.Node) -> list[tuple[gs.Node, Perm]]:
    """The ScatterND that write into one ConstantOfShape, and how each is transposed into the layout of the last."""
    found: list[tuple[gs.Node, Perm]] = []
    current: gs.Node | None = node
    perm: Perm = ()
    while current is not None and not _fills(current):
        if is_op(current, "Transpose") and "perm" in current.attrs and perm:
            perm = tuple(current.attrs["perm"][axis] for axis in perm)
        elif is_op(current, "ScatterND") and current.attrs.get("reduction", "none") in ("none", b"none"):
            perm = perm or tuple(range(len(current.outputs[0].shape or ())))
            found.append((current, perm))
        else:
            return []
        current = producer(current.inputs[0])
    return found if current is not None and all(p for _, p in found) else []


def _fills(node: gs.Node) -> bool:
    """Whether it makes one number for all places; a converter may have put another type behind it."""
    made = producer(node.inputs[0]) if is_op(node, "Cast") else node
    return made is not None and is_op(made, "ConstantOfShape")


def _join(graph: gs.Graph, emit: Emitter, node: gs.Node, axis: int, parts: list[_Part]) -> None:
    """Let a Concat make the output of the last ScatterND."""
    whole = node.outputs[0]
    tensors = [emit.op("Transpose", [part.tensor], "part", perm=list(part.perm)) for part in parts]
    node.outputs = []
    graph.nodes.append(gs.Node("Concat", emit.name("joined"), {"axis": axis}, tensors, [whole]))

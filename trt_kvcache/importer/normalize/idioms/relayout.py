"""Caches that grow along another axis than a buffer in place does, or whose batch is not their first axis.

    past [B, N, D, P] --.
                         Concat(axis=3) -> [B, N, D, P + S], of which scores are made as it is
    new [B, N, D, S] ---'

    becomes

    past [B, N, P, D] ------------.
                                   Concat(axis=2) -- Transpose -> [B, N, D, P + S]
    new [B, N, D, S] - Transpose -'

The caller holds the cache in another layout then; what reads it is left to what proves attention. Where a model
transposes the past itself before it joins new rows, the Transpose goes behind the Concat in the same way, and the
caller's layout stays.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import onnx_graphsurgeon as gs

from trt_kvcache.importer.graph import Emitter, consumers, contains, dims, is_op, producer
from trt_kvcache.importer.normalize.candidate import Candidate
from trt_kvcache.importer.normalize.idioms.cache_updates import find_candidates
from trt_kvcache.importer.normalize.views import permutation
from trt_kvcache.importer.plan import Dim, OriginalTensor

__all__ = ["Relayout", "read_presents", "relay_caches", "say_layouts"]

Order = tuple[int, ...]


@dataclass(frozen=True)
class Relayout:
    """A cache as exported, where it has another layout now.

    Attributes:
        shape: of an input or output as exported.
        order: its axes now, in the order in which they lay.
    """

    shape: tuple[Dim, ...]
    order: Order


def relay_caches(graph: gs.Graph) -> dict[str, Relayout]:
    """Lay caches that grow, in place, as ``[B, N, P, D]``, where they lie otherwise.

    Returns:
        What changed, by name of input or output.
    """
    emit = Emitter(graph)
    found: dict[str, Relayout] = {}
    candidates = find_candidates(graph)
    single = _is_single(graph, candidates)
    for candidate in candidates:
        order = _order(candidate, single=single)
        if order is None and (order := _order_within(graph, candidate)) is not None:
            _join_before(graph, emit, candidate, order)
        elif order is not None:
            names = [t for t in (candidate.past, candidate.present) if t is candidate.past or not candidate.rows_only]
            found |= {str(t.name): Relayout(tuple(dims(t) or ()), order) for t in names}
            _relay(graph, emit, candidate, order)
    return found


def read_presents(graph: gs.Graph) -> None:
    """Let, in place, what reads a cache of fixed length before it is transposed for the caller read what that gets.

    Optimizers leave it so that bring ``Transpose(Transpose(written))`` together.
    """
    emit = Emitter(graph)
    for candidate in find_candidates(graph):
        outside = producer(candidate.present)
        if candidate.reason or candidate.growing or outside is None or not is_op(outside, "Transpose"):
            continue
        inside = outside.inputs[0]
        readers = [node for node in consumers(inside) if node is not outside]
        if readers:
            back = [int(axis) for axis in np.argsort(permutation(outside, len(candidate.past.shape)))]
            _read(readers, inside, emit.op("Transpose", [candidate.present], "present", perm=back))
            graph.toposort()


def _is_single(graph: gs.Graph, candidates: Sequence[Candidate]) -> bool:
    """Whether a step is of one sequence, as what is no cache says."""
    pasts = [c.past for c in candidates]
    shapes = [dims(t) or () for t in graph.inputs if not contains(pasts, t)]
    return {shape[0] for shape in shapes if len(shape) > 1} == {1}


def _order(candidate: Candidate, *, single: bool) -> Order | None:
    """The axes of ``[B, N, P, D]`` in the order in which they lie; None: in that, or it cannot be told."""
    shape, node = dims(candidate.past) or (), candidate.node
    if candidate.reason or not candidate.growing or node is None:
        return None
    if len(shape) != 4 or candidate.views or not (candidate.rows_only or node.outputs[0] is candidate.present):
        return None
    axis = int(node.attrs["axis"]) % 4
    batch = int(single and shape[1] == 1 != shape[0] and isinstance(shape[0], int) and axis > 1)
    if axis not in (2, 3) or (batch, axis) == (0, 2):
        return None
    order = [1, 0] if batch else [0, 1]
    return (*order, *((2, 3) if axis == 2 else (3, 2)))


def _order_within(graph: gs.Graph, candidate: Candidate) -> Order | None:
    """How the past lies in the Concat, where the model has transposed it before; None: as it is."""
    node, views = candidate.node, candidate.views
    if candidate.reason or not candidate.growing or node is None or len(views) != 1:
        return None
    if not is_op(views[0], "Transpose") or contains(graph.outputs, node.outputs[0]):
        return None
    return permutation(views[0], len(candidate.past.shape))


def _join_before(graph: gs.Graph, emit: Emitter, candidate: Candidate, order: Order) -> None:
    """Join the past as it is, and transpose what is joined."""
    node = candidate.node
    assert node is not None
    whole, joined = node.outputs[0], gs.Variable(emit.name("joined"), candidate.past.dtype)
    new = emit.op("Transpose", [node.inputs[1]], "new_rows", perm=[int(axis) for axis in np.argsort(order)])
    node.inputs = [candidate.past, new]
    node.attrs["axis"] = order[int(node.attrs["axis"]) % len(order)]
    node.outputs = [joined]
    graph.nodes.append(gs.Node("Transpose", emit.name("joined:Transpose"), {"perm": list(order)}, [joined], [whole]))


def _relay(graph: gs.Graph, emit: Emitter, candidate: Candidate, order: Order) -> None:
    past, node = candidate.past, candidate.node
    assert node is not None
    whole, readers = node.outputs[0], [n for n in consumers(past) if n is not node]
    _join_before(graph, emit, candidate, order)
    _turn(past, order)
    if readers:
        _read(readers, past, emit.op("Transpose", [past], "past", perm=list(order)))
    if contains(graph.outputs, whole):
        outside, readers = producer(whole), consumers(whole)
        assert outside is not None
        _turn(whole, order)
        _read(readers, whole, emit.op("Transpose", [whole], "present", perm=list(order)))
        node.outputs = [whole]
        outside.outputs.clear()


def _turn(tensor: gs.Tensor, order: Order) -> None:
    if tensor.shape is not None:
        tensor.shape = [tensor.shape[order.index(axis)] for axis in range(len(order))]


def _read(readers: list[gs.Node], old: gs.Tensor, new: gs.Tensor) -> None:
    for reader in readers:
        reader.inputs = [new if t is old else t for t in reader.inputs]


def say_layouts(tensors: tuple[OriginalTensor, ...], found: Mapping[str, Relayout]) -> tuple[OriginalTensor, ...]:
    """The interface as exported, with the caches as they lay."""
    return tuple(_say(t, found[t.name]) if t.name in found else t for t in tensors)


def _say(tensor: OriginalTensor, lay: Relayout) -> OriginalTensor:
    axes = tuple(tensor.axes[axis] for axis in lay.order) if len(tensor.axes) == len(lay.order) else tensor.axes
    return replace(tensor, shape=lay.shape, axes=axes, order=lay.order)

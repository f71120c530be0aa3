"""Caches with the text along their first axis, as ``[P, B, D]``: the batch comes first here.

past [P, B, D] -- Concat(axis=0)        becomes        past [B, P, D] -- Transpose(1, 0, 2) -- Concat(axis=0)
"""

from __future__ import annotations

import onnx_graphsurgeon as gs

from trt_kvcache.importer.graph import Emitter, consumers, contains, dims, is_op, replace_uses
from trt_kvcache.importer.normalize.candidate import Candidate
from trt_kvcache.importer.normalize.idioms.writes import find_candidates
from trt_kvcache.importer.normalize.views import static_layout
from trt_kvcache.importer.plan import Dim

__all__ = ["put_batch_first"]

Order = tuple[int, ...]


def put_batch_first(graph: gs.Graph, batch: Dim) -> dict[str, Order]:
    """Reorder the axes of caches, in place.

    Args:
        graph: of the model.
        batch: as the new tokens have it.

    Returns:
        For each of these inputs and outputs, its axes as exported in their new order. That the second one is the batch
        where no symbol says so is a guess, which the proof of the update confirms or refuses.
    """
    emit = Emitter(graph)
    made: dict[str, Order] = {}
    for candidate in find_candidates(graph):
        past, present = candidate.past, candidate.present
        shape = dims(past) or ()
        if candidate.axis != 0 or past.name in made or not contains(graph.outputs, present):
            continue
        if present.shape is None or len(present.shape) != len(shape):
            continue
        place = shape.index(batch) if isinstance(batch, str) and batch in shape else 1
        if place == 0:
            continue
        order = _as_written(candidate, place) or (place, *(a for a in range(len(shape)) if a != place))
        made[past.name] = made[present.name] = order
        _reorder_input(graph, emit, past, order)
        _reorder_output(graph, emit, present, order)
    return made


def _as_written(candidate: Candidate, batch: int) -> Order | None:
    """The order of axes in which a cache is written, and mostly read, if the batch is first there."""
    layout = static_layout(candidate.views, len(candidate.past.shape))
    order = tuple(group[0] for group in layout or ())
    return order if order[:1] == (batch,) else None


def _reorder_input(graph: gs.Graph, emit: Emitter, past: gs.Variable, order: Order) -> None:
    inside = gs.Variable(emit.name("as_exported"), past.dtype, list(past.shape))
    replace_uses(past, inside)
    past.shape = [past.shape[a] for a in order]
    back = [order.index(a) for a in range(len(order))]
    graph.nodes.append(gs.Node("Transpose", emit.name("as_exported"), {"perm": back}, [past], [inside]))


def _reorder_output(graph: gs.Graph, emit: Emitter, present: gs.Variable, order: Order) -> None:
    """Put the batch of an output first; what else reads it reads the reordered one."""
    outside = gs.Variable(str(present.name), present.dtype, [present.shape[a] for a in order])
    inside = gs.Variable(emit.name("as_exported"), present.dtype, list(present.shape))
    back = [order.index(a) for a in range(len(order))]
    for reader in consumers(present):
        if is_op(reader, "Transpose") and "perm" in reader.attrs:
            reader.attrs["perm"] = [back[a] for a in reader.attrs["perm"]]
            reader.inputs = [outside]
    replace_uses(present, inside)
    present.name = emit.name("as_exported")
    for source, target, perm in ((present, outside, list(order)), (outside, inside, back)):
        graph.nodes.append(gs.Node("Transpose", emit.name("batch_first"), {"perm": perm}, [source], [target]))
    graph.outputs = [outside if t is present else t for t in graph.outputs]

"""Caches of which a step gives the new rows only: the caller writes them behind the past itself.

    past [B, N, P, D] --.
                         Concat -> what attention reads
    new [B, N, S, D] ---+
                        '-- views -> present [B, N, S, D], [B, S, N, D], [B, S, N * D] ...

becomes a cache like others: present is the whole of it, in the layout of past. An output is such rows where it and what
is joined with the past are made of one tensor by views alone, and numbers show that it holds the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import permutations
from math import prod

import numpy as np
import onnx_graphsurgeon as gs

from trt_kvcache.importer.graph import Emitter, consumers, is_op, producer
from trt_kvcache.importer.normalize.candidate import Candidate, Geometry, Proof, richest
from trt_kvcache.importer.normalize.findings import Write
from trt_kvcache.importer.normalize.idioms import concat
from trt_kvcache.importer.normalize.views import trace_back
from trt_kvcache.importer.plan import OriginalTensor

__all__ = ["IDIOM", "find_new_rows", "part_from_rows", "prove_new_rows", "say_new_rows"]

IDIOM = "Concat, new rows returned"

_PROVEN = 1 << 16  # elements of new rows, at most, that are compared beside the largest
_ADVICE = "give back what is joined with the past, or Concat(past, new) as a whole"


def find_new_rows(graph: gs.Graph, found: Sequence[Candidate]) -> list[Candidate]:
    """Caches that grow by Concat, and of which outputs give the new rows only, by structure alone.

    Args:
        graph: the model. Not changed.
        found: its other caches.

    Returns:
        Where some are found, those of the same rank as well of which no output gives anything back: with the reason.
    """
    taken = {id(c.past) for c in found}
    used = {id(t) for c in found for t in (c.present, c.node)}
    more: list[Candidate] = []
    lost: list[Candidate] = []
    for node in graph.nodes:
        if not is_op(node, "Concat") or id(node) in used:
            continue
        joined = concat.find(graph, node, node.outputs[0], ())
        if joined is None or id(joined.past) in taken or any(is_op(v, "Slice") for v in joined.views):
            continue
        room = concat.room_of(joined.past, joined.axis)
        is_first = len(node.inputs) == 2 and node.inputs[0] is joined.operand
        if joined.reason and not (room and is_first and joined.axis):
            continue
        source, _ = trace_back(joined.updates[0])
        given = [t for t in graph.outputs if id(t) not in used and trace_back(t)[0] is source]
        candidate = replace(joined, idiom=IDIOM, rows_only=True, room=room, reason="")
        if given:
            more.append(replace(candidate, present=given[0]))
            used.add(id(given[0]))
            taken.add(id(joined.past))
        else:
            lost.append(replace(candidate, reason=_why_lost(graph, joined), advice=_ADVICE))
    ranks = {len(c.past.shape) for c in more}
    return more + [c for c in lost if len(c.past.shape) in ranks and id(c.past) not in taken]


def _why_lost(graph: gs.Graph, candidate: Candidate) -> str:
    return (
        f"no output gives its new rows '{candidate.updates[0].name}' as they are joined with the past, nor the whole "
        f"(outputs: {', '.join(t.name for t in graph.outputs)})"
    )


def part_from_rows(graph: gs.Graph, candidates: Sequence[Candidate]) -> None:
    """Let, in place, nothing read an output that holds new rows: it becomes the whole cache."""
    emit = Emitter(graph)
    for present in (c.present for c in candidates if c.rows_only and not c.reason):
        maker = producer(present)
        assert maker is not None
        rows = gs.Variable(emit.name(f"{present.name}:rows"), present.dtype, present.shape)
        for node in consumers(present):
            node.inputs = [rows if t is present else t for t in node.inputs]
        maker.outputs = [rows if t is present else t for t in maker.outputs]
        graph.nodes.append(gs.Node("Identity", emit.name(f"{present.name}:Identity"), {}, [rows], [present]))


def prove_new_rows(candidate: Candidate, proof: Proof, geometries: Sequence[Geometry]) -> tuple[int, ...]:
    """Show that present holds the new rows.

    Returns:
        The axes of the cache in the order in which they lie in present, which may merge some.

    Raises:
        UnsupportedModelError: it holds something else.
    """
    source, _ = trace_back(candidate.updates[0])
    best = richest(geometries)
    orders = list(permutations(range(len(best.sizes))))
    for geometry in (best, *(g for g in geometries if g is not best)):
        sizes = geometry.with_rows(proof.axis)
        if geometry is not best and prod(sizes) > _PROVEN:
            continue
        shape = geometry.step.probe.shape(source.name)
        if shape is None or prod(shape) != prod(sizes):
            raise candidate.refusal(
                f"'{source.name}' {shape}, of which its new rows are made, is not as large", _ADVICE
            )
        probe = geometry.step.probe.given({source.name: np.arange(prod(sizes), dtype=np.float64).reshape(shape)})
        given, joined = probe.value(candidate.present.name), probe.value(proof.update.name)
        if given is None or joined is None:
            raise candidate.refusal(f"the operators from '{source.name}' to its new rows cannot be run", _ADVICE)
        rows = joined.transpose(proof.perm or range(len(sizes)))
        orders = [o for o in orders if np.array_equal(given.reshape(-1), rows.transpose(o).reshape(-1))]
        if not orders:
            raise candidate.refusal(
                f"the output '{candidate.present.name}' has other numbers than the new rows '{proof.update.name}'",
                _ADVICE,
            )
    return orders[0]


def say_new_rows(tensors: Sequence[OriginalTensor], writes: Sequence[Write]) -> tuple[OriginalTensor, ...]:
    """The interface as exported, with how the outputs lie that hold new rows."""
    written = {w.present.name: w for w in writes if w.new_rows is not None}
    return tuple(_say(t, written[t.name]) if t.io == "output" and t.name in written else t for t in tensors)


def _say(tensor: OriginalTensor, write: Write) -> OriginalTensor:
    order = write.new_rows
    assert order is not None
    known = {0: "batch", write.axis: "sequence"}
    axes = tuple(known.get(a, "") for a in order) if len(tensor.shape) == len(order) else tensor.axes
    return replace(tensor, axes=axes, order=order, rows_only=True)

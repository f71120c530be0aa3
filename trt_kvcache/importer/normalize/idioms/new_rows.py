"""Caches of which a step gives the new rows only: the caller writes them after the past itself.

    past [B, N, P, D] --.
                         Concat -> what attention reads
    new [B, N, S, D] ---+
                        '-- views -> present [B, N, S, D], [B, S, N, D], [B, S, N * D] ...

becomes a cache like others: present is the whole of it, in the layout of past.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import onnx_graphsurgeon as gs

from trt_kvcache.importer.graph import Emitter, producer, replace_uses
from trt_kvcache.importer.normalize.candidate import Candidate
from trt_kvcache.importer.normalize.findings import Write
from trt_kvcache.importer.plan import OriginalTensor

__all__ = ["part_from_rows", "say_layouts"]


def part_from_rows(graph: gs.Graph, candidates: Sequence[Candidate]) -> None:
    """Let, in place, nothing read an output that holds new rows: it becomes the whole cache."""
    emit = Emitter(graph)
    for present in (c.present for c in candidates if c.rows_only and not c.reason):
        maker = producer(present)
        assert maker is not None
        rows = gs.Variable(emit.name(f"{present.name}:rows"), present.dtype, present.shape)
        replace_uses(present, rows)
        maker.outputs = [rows if t is present else t for t in maker.outputs]
        graph.nodes.append(gs.Node("Identity", emit.name(f"{present.name}:Identity"), {}, [rows], [present]))


def say_layouts(tensors: Sequence[OriginalTensor], writes: Sequence[Write]) -> tuple[OriginalTensor, ...]:
    """The interface as exported, with how caches lie that have another layout now, and outputs of new rows."""
    written = {t.name: write for write in writes for t in (write.past, write.present)}
    return tuple(_say(t, written[t.name]) if t.name in written else t for t in tensors)


def _say(tensor: OriginalTensor, write: Write) -> OriginalTensor:
    order = write.new_rows
    if order is None or tensor.io == "input":
        return tensor if write.relaid is None else replace(tensor, order=write.relaid)
    known = {0: "batch", write.axis: "sequence"}
    axes = tuple(known.get(a, "") for a in order) if len(tensor.shape) == len(order) else tensor.axes
    if write.relaid is not None:
        order = tuple(write.relaid[a] for a in order)
    return replace(tensor, axes=axes, order=order, rows_only=True)

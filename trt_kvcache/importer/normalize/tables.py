"""Rows of tables by the length of the past: learned and sinusoidal positions.

onnxruntime-genai's Whisper cuts them out; torch looks up Marian's for all sequences at once:

    Add(x [B, S, H], Slice(table [positions, H], P, P + S))
    Add(x [B, S, H], Gather(table [positions, H], Range(P, P + S)  [S]))
become
    Add(x, Gather(table, write_indices + arange(S))  [B, S, H])

A constant beside P stays, where a table has other rows before that of the first position, as BART's.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx_graphsurgeon as gs

from trt_kvcache.importer.graph import consumers, contains, input_or_none, is_op, replace_uses
from trt_kvcache.importer.normalize.canonical import Canonical
from trt_kvcache.importer.normalize.evidence.blueprint import Array
from trt_kvcache.importer.normalize.evidence.samples import Sample, Samples


def gather_rows(graph: gs.Graph, node: gs.Node, canonical: Canonical, samples: Samples) -> bool:
    """Put a Gather by position in the place of `node`, if it provably takes the new tokens' rows of a table.

    Args:
        graph: edited in place.
        node: anything.
        canonical: gives the positions.
        samples: what the rows are proven on, and that each reader adds them to ``[B, S, H]``.

    Returns:
        Whether it was done.
    """
    if not is_op(node, "Slice", "Gather") or contains(graph.outputs, node.outputs[0]):
        return False
    table, rows = node.inputs[0], node.outputs[0]
    taken = _gathered(node) if is_op(node, "Gather") else _sliced(node)
    offset = taken(samples.twins[0])
    if offset is None or offset < 0 or taken(samples.twins[1]) != offset:
        return False
    if not all(_added_per_row(graph, rows, s) for s in samples.twins):
        return False
    index = shifted_positions(canonical, offset)
    replace_uses(rows, canonical.emit.op("Gather", [table, index], "position_rows", axis=0))

    return True


def shifted_positions(canonical: Canonical, offset: int) -> gs.Variable:
    """Int64 ``[B, S]``: the position of each new token, and `offset` more."""
    positions = canonical.positions()
    if not offset:
        return positions
    emit = canonical.emit
    made: gs.Variable = emit.once(
        ("positions", offset), lambda: emit.op("Add", [positions, emit.ints(offset)], "shifted_positions")
    )
    return made


def _gathered(node: gs.Node) -> Callable[[Sample], int | None]:
    """How far behind the new tokens' positions the rows are that a Gather takes; None where it takes others."""
    axis, index = node.attrs.get("axis", 0), node.inputs[1].name

    def offset(sample: Sample) -> int | None:
        value = sample.probe.value(index)
        return _offset(value, sample) if value is not None and value.ndim == 1 and axis == 0 else None

    return offset


def _sliced(node: gs.Node) -> Callable[[Sample], int | None]:
    """As `_gathered`, of a Slice."""
    bounds = [input_or_none(node, index) for index in range(1, 5)]

    def offset(sample: Sample) -> int | None:
        found: list[int] = []
        for tensor, default in zip(bounds, (None, None, 0, 1), strict=True):
            value = sample.probe.value(tensor.name) if tensor is not None else np.array([default])
            if value is None or value.shape != (1,) or value[0] is None:
                return None
            found.append(int(value[0]))
        start, end, axis, step = found
        if start < 0 or end - start != sample.length or (axis, step) != (0, 1):
            return None
        return _offset(np.arange(start, end), sample)

    return offset


def _offset(rows: Array, sample: Sample) -> int | None:
    offset = int(rows[0]) - sample.past if rows.size else 0
    return offset if np.array_equal(rows, sample.past + offset + np.arange(sample.length)) else None


def _added_per_row(graph: gs.Graph, rows: gs.Tensor, sample: Sample) -> bool:
    """Whether all that is done with rows ``[S, H]`` is adding them to ``[B, S, H]``: rows for each sequence fit."""
    shape = sample.probe.shape(rows.name)
    if shape is None or len(shape) != 2 or contains(graph.outputs, rows):
        return False
    sums = (sample.batch, sample.length, shape[1])
    return all(
        (is_op(n, "Cast") and _added_per_row(graph, n.outputs[0], sample))
        or (is_op(n, "Add") and sample.probe.shape(n.outputs[0].name) == sums)
        for n in consumers(rows)
    )

"""Rows of tables by the length of the past: learned and sinusoidal positions.

onnxruntime-genai's Whisper cuts them out; torch looks up Marian's for all sequences at once:

    Add(x [B, S, H], Slice(table [positions, H], P, P + S))
    Add(x [B, S, H], Gather(table [positions, H], Range(P, P + S)  [S]))
become
    Add(x, Gather(table, write_indices + arange(S))  [B, S, H])

A constant beside P stays, where a table has other rows before that of the first position, as BART's.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

import numpy as np
import onnx_graphsurgeon as gs

from trt_kvcache.errors import OptionError
from trt_kvcache.importer.graph import consumers, contains, dims, input_or_none, is_op, replace_uses
from trt_kvcache.importer.interface.exported import Interface
from trt_kvcache.importer.normalize.cancelled import canonical_step
from trt_kvcache.importer.normalize.canonical import Canonical
from trt_kvcache.importer.normalize.evidence.blueprint import Array, Blueprint
from trt_kvcache.importer.normalize.evidence.probe import Probe
from trt_kvcache.importer.normalize.evidence.samples import Sample, Samples

_LOOKUPS = {  # operator: places of index and table
    "Gather": (1, 0), "GatherND": (1, 0), "GatherElements": (1, 0), "RotaryEmbedding": (3, 1),
}  # fmt: skip


def gather_rows(graph: gs.Graph, node: gs.Node, canonical: Canonical, samples: Samples) -> bool:
    """Put a Gather by position in the place of `node`, if it provably takes the new tokens' rows of a table.

    Args:
        graph: edited in place.
        node: anything.
        canonical: gives the positions.
        samples: what the rows are proven on, and that each reader adds them to ``[B, S, H]``.

    Returns:
        Whether it was done.

    Raises:
        OptionError: the capacity is more than the table's rows; a Slice beyond them gives fewer, where Gather fails.
    """
    if not is_op(node, "Slice", "Gather") or contains(graph.outputs, node.outputs[0]):
        return False
    table, rows = node.inputs[0], node.outputs[0]
    looked_at = (*samples.plain, *samples.twins)
    taken = _gathered(node) if is_op(node, "Gather") else _sliced(node)
    offset = taken(looked_at[0])
    if offset is None or offset < 0 or any(taken(s) != offset for s in looked_at):
        return False
    held = (dims(table) or ("?",))[0]
    if isinstance(held, int):
        _check_rows(node, table, held, canonical.capacity + offset, canonical.capacity)
    if not all(_added_per_row(graph, rows, s) for s in looked_at):
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


def check_tables(
    graph: gs.Graph, canonical: Canonical, interface: Interface, samples: Samples, ids: Collection[int] = ()
) -> None:
    """Refuse tables that end before the caches do, where positions counted in the graph look them up.

    What a lookup behind the end gives is not defined: ONNX Runtime fails, TensorRT does not say so. Looked at is the
    last step that the caches have room for.

    Args:
        graph: canonical; dead nodes are gone.
        canonical: of the graph.
        interface: of the model as exported.
        samples: of the model as exported.
        ids: tokens that positions are counted with, where they are.

    Raises:
        OptionError: the capacity is more than a table's rows.
    """
    first = canonical.write_indices
    if all(is_op(n, "TensorScatter", "Attention") for n in consumers(first)):
        return
    length = samples.fixed_length or 1
    sample = samples.step(1, max(0, canonical.capacity - length), length)
    starts = np.full(sample.batch, sample.past, np.int64)
    step = canonical_step(graph, canonical, interface, Blueprint(gs.export_onnx(graph), {}), sample, starts)
    shape = (sample.batch, sample.length)
    for probe in [step.given({canonical.tokens.name: np.full(shape, i)}) for i in ids] or [step]:
        _check_step(first, probe, canonical.capacity)


def _check_step(first: gs.Tensor, probe: Probe, capacity: int) -> None:
    pending, seen = [first], {first.name}
    while pending:
        tensor = pending.pop()
        for node in consumers(tensor):
            if is_op(node, "TensorScatter", "Attention"):
                continue
            if is_op(node, *_LOOKUPS):
                _check_lookup(node, tensor, probe, capacity)
            known = [t for t in node.outputs if t.name not in seen and probe.value(t.name) is not None]
            seen.update(t.name for t in known)
            pending += known


def _check_lookup(node: gs.Node, index: gs.Tensor, probe: Probe, capacity: int) -> None:
    place, table = _LOOKUPS[node.op]
    value = probe.value(index.name)
    if place >= len(node.inputs) or node.inputs[place] is not index or value is None or not value.size:
        return
    axis = int(node.attrs.get("axis", 0)) if is_op(node, "Gather", "GatherElements") else 0
    shape = dims(node.inputs[table]) or ()
    rows = shape[axis] if axis < len(shape) else "?"
    if isinstance(rows, int):
        _check_rows(node, node.inputs[table], rows, int(value.max()) + 1, capacity)


def _check_rows(node: gs.Node, table: gs.Tensor, rows: int, needed: int, capacity: int) -> None:
    if rows < needed:
        most = capacity - (needed - rows)
        raise OptionError(
            f"--capacity is {capacity}, but the model has {most} positions: '{node.name}' takes rows of the table "
            f"'{table.name}'; give at most --capacity {most}"
        )

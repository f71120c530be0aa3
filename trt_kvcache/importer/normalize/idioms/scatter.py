"""Caches that are written by ScatterND or ScatterElements.

    past [B, N, L, D] -- Transpose(2, 0, 1, 3) --.
    start -- Add(Range(S)) -- Unsqueeze [S, 1] -- ScatterND -- Transpose(1, 2, 0, 3) -> present
    new [B, N, S, D] -- Transpose(2, 0, 1, 3) ---'
        becomes
    present = TensorScatter(past, new, write_indices, axis=2)

torch writes index_copy, index_put and slice assignment like this, with the indexed axes in front. An index of ScatterND
has a number for each of them: the row on the sequence axis, 0, 1, 2 .. on every other. ScatterElements has the row
alone, expanded to the shape of the update. Some models take the rows in use out first: see `fronts`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import permutations
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_graphsurgeon as gs

from trt_kvcache.importer.graph import is_op, producer
from trt_kvcache.importer.normalize.candidate import Candidate, Geometry, Proof, nearest_update, richest
from trt_kvcache.importer.normalize.evidence.probe import Probe
from trt_kvcache.importer.normalize.evidence.reach import reach
from trt_kvcache.importer.normalize.evidence.samples import Sample
from trt_kvcache.importer.normalize.idioms.columns import Columns, Index, read_index
from trt_kvcache.importer.normalize.idioms.fronts import Front, find_front
from trt_kvcache.importer.normalize.idioms.rows import prove_rows
from trt_kvcache.importer.normalize.views import Layout, cache_axis, regroup, trace_back

Array = npt.NDArray[Any]
Grid = tuple[Array, tuple[int, ...]]  # numbers, whose axes are 1 where they repeat, and the whole shape
Order = tuple[int, ...]  # the indexed axes, as the index runs through them, outermost first

_MOST_INDEXED = 5  # axes; their orders are tried one by one


def describe(node: gs.Node, past: gs.Tensor, present: gs.Tensor, views: tuple[gs.Node, ...]) -> Candidate:
    """The update that a scatter makes, whose data operand is `past` behind `views`."""
    front = find_front(node) if is_op(node, "ScatterND") else None
    found = reach(node.inputs[1] if front is None else front.cut.inputs[2])
    writes = [node] if front is None else [front.write, node]
    reductions = [str(n.attrs.get("reduction", "none")) for n in writes]
    dependent = found.data_dependent()
    reason = f"its positions depend on data: {dependent}" if dependent else ""
    if set(reductions) != {"none"}:
        reason = f"its reduction '{max(reductions)}' combines new rows with old ones"
    axis = _guess_axis(node, past, views) if front is None else front.axis(past, views)
    return Candidate(
        node.op,
        past,
        present,
        node,
        axis,
        positions=() if reason else found.positions,
        views=views,
        updates=tuple(n.inputs[2] for n in writes),
        index=(*(n.inputs[1] for n in writes), *(() if front is None else front.cut.inputs[1:])),
        inner=() if front is None else (front.cut, *writes),
        front=front,
        reason=reason,
    )


def _guess_axis(node: gs.Node, past: gs.Tensor, views: Sequence[gs.Node]) -> int | None:
    """The sequence axis by structure: the only axis that is indexed, or the only one whose number an input decides."""
    if is_op(node, "ScatterElements"):
        return cache_axis(past, views, int(node.attrs.get("axis", 0)))
    source, _ = trace_back(node.inputs[1])
    joined = producer(source)
    if joined is not None and is_op(joined, "Concat"):
        fed = [place for place, tensor in enumerate(joined.inputs) if reach(tensor).inputs]
        return cache_axis(past, views, fed[0]) if len(fed) == 1 else None
    shape = node.inputs[1].shape
    return cache_axis(past, views, 0) if shape and shape[-1] == 1 else None


def prove(candidate: Candidate, geometries: Sequence[Geometry]) -> Proof:
    """Show that a scatter writes S rows behind P rows.

    Args:
        candidate: the update.
        geometries: the samples, also those beyond the capacity.

    Raises:
        UnsupportedModelError: it does not, or it cannot be told.
    """
    assert candidate.node is not None
    plain = [g for g in geometries if not g.step.wrapped]
    geometry = richest(plain)
    read = read_index if is_op(candidate.node, "ScatterND") else Index
    indices = [read(tensor) for tensor in candidate.index[: 1 if candidate.front is None else 2]]
    if is_op(candidate.node, "ScatterElements"):
        place = int(candidate.node.attrs.get("axis", 0)) % len(geometry.layout)
        order: Order = tuple(range(len(geometry.layout)))
    else:
        order, place = _index_order(candidate, indices[0], plain, lambda step: step.past + np.arange(step.length))
    back: Order = ()
    if candidate.front is not None:
        if not all(candidate.front.is_kept(g.step.probe, candidate.operand, place) for g in plain):
            raise candidate.refusal(f"'{candidate.front.tensor.name}', which it puts back, is not its first rows")
        back, _ = _index_order(candidate, indices[1], plain, lambda step: np.arange(step.total))
        if back != tuple(range(len(back))):
            raise candidate.refusal(f"it puts '{candidate.front.tensor.name}' back in another order of its axes")
    axis = _sequence_axis(candidate, geometry, place)

    def rows_of(g: Geometry, probe: Probe) -> Array | None:
        if candidate.front is not None and not _is_put_back(indices[1], candidate.front, g, probe, back, place):
            return None
        if is_op(candidate.node, "ScatterElements"):
            value = probe.value(candidate.index[0].name)
            covers = value is not None and _covers(value.shape, g.operand_shape, place)
            grid = (value, value.shape) if value is not None and covers else None
        else:
            columns = indices[0].read(probe)
            grid = None if columns is None else _grid(columns, g.operand_shape, order, place)
        return None if grid is None else _rows(grid, g.layout, order, place)

    circular = prove_rows(candidate, axis, geometries, rows_of, [n for index in indices for n in index.names])
    laid = tuple(geometry.layout[a] for a in order) + geometry.layout[len(order) :]
    update = candidate.updates[0]
    layout = _update_layout(candidate, update, laid, axis, geometry)
    return Proof(axis, *nearest_update(candidate, update, layout, axis, plain), circular)


def _sequence_axis(candidate: Candidate, geometry: Geometry, place: int) -> int:
    group = [a for a in geometry.layout[place] if geometry.sizes[a] != 1]
    if len(group) != 1 or group[0] == 0:
        raise candidate.refusal(f"axis {place} of '{candidate.operand.name}' is not the sequence axis of the cache")
    return group[0]


def _update_layout(candidate: Candidate, update: gs.Tensor, laid: Layout, axis: int, geometry: Geometry) -> Layout:
    """The layout of the update as ScatterND takes it: the indexed axes in the order of the index, then the others."""
    sizes = geometry.with_rows(axis)
    shape = geometry.step.probe.shape(update.name)
    layout = regroup([a for group in laid for a in group], sizes, shape) if shape is not None else laid
    if layout is None:
        raise candidate.refusal(
            f"the new rows in '{update.name}' have the shape {list(shape or ())}, which splits an axis"
        )
    return layout


def _is_put_back(index: Index, front: Front, geometry: Geometry, probe: Probe, order: Order, place: int) -> bool:
    """Whether all rows that were taken out go to where they were."""
    columns, shape = index.read(probe), probe.shape(front.tensor.name)
    grid = None if columns is None else _grid(columns, geometry.operand_shape, order, place)
    rows = None if grid is None else _rows(grid, geometry.layout, order, place)
    return rows is not None and shape is not None and np.array_equal(rows, [np.arange(shape[place])] * len(rows))


def _index_order(
    candidate: Candidate, index: Index, geometries: Sequence[Geometry], wanted: Callable[[Sample], Array]
) -> tuple[Order, int]:
    """In which order an index of ScatterND runs through the axes, and which is the sequence axis.

    Args:
        candidate: the update.
        index: of it.
        geometries: samples.
        wanted: the rows that it writes.
    """
    fitting: list[tuple[Order, int]] | None = None
    for geometry in geometries:
        columns = index.read(geometry.step.probe)
        if columns is None:
            raise candidate.refusal("which rows it writes cannot be computed from positions and lengths")
        if columns.least < 0:
            raise candidate.refusal(f"it counts rows from the end (row {columns.least})")
        options = list(_orders(columns, geometry)) if fitting is None else fitting
        fitting = [o for o in options if _fits(columns, geometry, *o, wanted(geometry.step))]
        if not fitting:
            raise candidate.refusal(_misfit(columns, geometry))
    if not fitting:
        raise candidate.refusal("no sample shows which rows it writes")
    return fitting[0]


def _orders(columns: Columns, geometry: Geometry) -> Iterator[tuple[Order, int]]:
    count = len(columns.parts)
    if count <= min(_MOST_INDEXED, len(geometry.layout)):
        for order in permutations(range(count)):
            for place in range(count):
                yield order, place


def _fits(columns: Columns, geometry: Geometry, order: Order, place: int, wanted: Array) -> bool:
    grid = _grid(columns, geometry.operand_shape, order, place)
    if grid is None:
        return False
    rows = _rows(grid, geometry.layout, order, place)
    return rows is not None and rows.shape[-1] == wanted.size and bool((rows == wanted).all())


def _misfit(columns: Columns, geometry: Geometry) -> str:
    step = geometry.step
    value = np.stack([np.broadcast_to(part, columns.shape) for part in columns.parts], axis=-1)
    if value.shape[-1] == 1 and value.size == 1 and step.length > 1:
        return f"it writes one row although a step may bring {step.length} tokens"
    listed = value.reshape(-1, value.shape[-1])[:6].tolist()
    return f"its indices are {listed} when {step.past} rows hold tokens and {step.length} are new"


def _grid(columns: Columns, shape: tuple[int, ...], order: Order, place: int) -> Grid | None:
    """The sequence number of an index, with one axis for each indexed axis; None unless the others count 0, 1, 2 .."""
    sizes = [shape[a] for a in order]
    count = prod(columns.shape)
    others = prod(size for a, size in zip(order, sizes, strict=True) if a != place)
    if others == 0 or count % others:
        return None
    sizes[order.index(place)] = count // others
    for at, a in enumerate(order):
        if a != place and count:
            counted = np.arange(sizes[at]).reshape([-1 if i == at else 1 for i in range(len(sizes))])
            if not (columns.laid(a, sizes) == counted).all():
                return None
    return columns.laid(place, sizes), tuple(sizes)


def _covers(index: tuple[int, ...], operand: tuple[int, ...], place: int) -> bool:
    """Whether an index of ScatterElements reaches every element of a row."""
    pairs = enumerate(zip(index, operand, strict=True)) if len(index) == len(operand) else ()
    return len(index) == len(operand) and all(a == b or axis == place for axis, (a, b) in pairs)


def _rows(grid: Grid, layout: Layout, order: Order, place: int) -> Array | None:
    """The rows of a grid per sequence, ``[B, S]`` or ``[1, S]``; None where they differ along another axis."""
    numbers, sizes = grid
    if 0 in sizes:
        return np.zeros((1, 0), np.int64)
    batch = next((at for at, a in enumerate(order) if layout[a][:1] == (0,)), None)
    kept = (batch, order.index(place))
    whole = [size if at in kept else numbers.shape[at] for at, size in enumerate(sizes)]
    last = np.moveaxis(np.broadcast_to(numbers, whole), order.index(place), -1)
    if batch is None or batch == order.index(place):
        rows = last.reshape(1, -1, last.shape[-1])
    else:
        behind = batch - (batch > order.index(place))
        rows = np.moveaxis(last, behind, 0).reshape(sizes[batch], -1, last.shape[-1])
    if rows.shape[1] == 0 or bool((rows != rows[:, :1]).any()):
        return None
    return np.asarray(rows[:, 0])

"""Caches whose rows are selected element by element: one new row a step.

    chosen = Equal(arange [1, 1, L, 1], pos [B, 1, 1, 1])
    Where(chosen, new [B, N, 1, D], past [B, N, L, D]) -> present
    Add(Mul(past, 1 - chosen), Mul(new, chosen)) -> present
        become
    present = TensorScatter(past, new, write_indices, axis=2)

Elementwise operators treat all heads and all channels alike, so one of each shows what they do: numbers that differ for
every row and sequence are put in the place of past and new, and each must come out in its row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_graphsurgeon as gs

from trt_kvcache.importer.graph import is_op, producer
from trt_kvcache.importer.normalize.candidate import (
    Candidate,
    Geometry,
    Proof,
    may_be_cache,
    nearest_update,
    richest,
)
from trt_kvcache.importer.normalize.evidence.probe import Probe
from trt_kvcache.importer.normalize.evidence.reach import Reach, reach
from trt_kvcache.importer.normalize.idioms.rows import prove_rows
from trt_kvcache.importer.normalize.views import static_layout, trace_back

Array = npt.NDArray[Any]

_BLENDS = ("Add", "Sub", "Mul", "Where")
_DEEPEST = 4  # operators between the past and the output of a blend


@dataclass
class _Parts:
    """The operands of a blend of past and new rows."""

    past: list[gs.Tensor] = field(default_factory=list)
    updates: list[gs.Tensor] = field(default_factory=list)
    masks: list[gs.Tensor] = field(default_factory=list)
    inner: list[gs.Node] = field(default_factory=list)
    chosen: bool = False  # whether a mask decides what stays of the past


def find(graph: gs.Graph, node: gs.Node, present: gs.Tensor, after: tuple[gs.Node, ...]) -> Candidate | None:
    """The update that a Where, or an Add of products, makes; None where it is none."""
    parts = _Parts()
    if not _collect(graph, node.outputs[0], parts, 0) or not parts.chosen or not parts.updates:
        return None
    operand = parts.past[0]
    past, views = trace_back(operand)
    deciding = [reach(mask) for mask in parts.masks]
    if not any(r.inputs or r.shapes for r in deciding):
        return None
    found = _joined(deciding)
    reason = ""
    if any(t is not operand for t in parts.past) or len({id(t) for t in parts.updates}) > 1:
        reason = "it blends more than one past with one update"
    elif dependent := found.data_dependent():
        reason = f"its positions depend on data: {dependent}"
    return Candidate(
        "Where" if is_op(node, "Where") else "one-hot",
        past,
        present,
        node,
        _guess_axis(past, views, parts.masks),
        positions=() if reason else found.positions,
        views=views,
        after=after,
        updates=(parts.updates[0],),
        index=tuple(parts.masks),
        inner=tuple(parts.inner),
        reason=reason,
    )


def _joined(reaches: Sequence[Reach]) -> Reach:
    return Reach(
        {name: tensor for r in reaches for name, tensor in r.inputs.items()},
        tuple(node for r in reaches for node in r.searches),
        any(r.weights for r in reaches),
        any(r.shapes for r in reaches),
    )


def _collect(graph: gs.Graph, tensor: gs.Tensor, parts: _Parts, depth: int) -> bool:
    """Sort the operands behind `tensor` into `parts`; whether a past is among them."""
    node = producer(tensor)
    if node is None or depth > _DEEPEST or not is_op(node, *_BLENDS):
        return False
    parts.inner.append(node)
    found = False
    masks = len(parts.masks)
    for operand in node.inputs:
        source, _ = trace_back(operand)
        if may_be_cache(graph, source):
            parts.past.append(operand)
            found = True
        elif not _leads_to_cache(graph, operand, depth + 1):
            _sort(operand, parts)
        elif _collect(graph, operand, parts, depth + 1):
            found = True
    parts.chosen |= found and is_op(node, "Mul", "Where") and len(parts.masks) > masks
    return found


def _sort(operand: gs.Tensor, parts: _Parts) -> None:
    """Sort an operand that no cache is part of: a mask, the new rows, or their product."""
    if reach(operand).computable:
        parts.masks.append(operand)
        return
    node = producer(operand)
    if node is not None and is_op(node, "Mul", "Where"):
        computable = [t for t in node.inputs if reach(t).computable]
        others = [t for t in node.inputs if not any(t is c for c in computable)]
        if computable and len(others) == 1:
            parts.masks.extend(computable)
            parts.updates.extend(others)
            parts.inner.append(node)
            return
    parts.updates.append(operand)


def _leads_to_cache(graph: gs.Graph, tensor: gs.Tensor, depth: int) -> bool:
    source, _ = trace_back(tensor)
    if may_be_cache(graph, source):
        return True
    node = producer(source)
    if node is None or depth > _DEEPEST or not is_op(node, *_BLENDS):
        return False
    return any(_leads_to_cache(graph, t, depth + 1) for t in node.inputs)


def _guess_axis(past: gs.Tensor, views: Sequence[gs.Node], masks: Sequence[gs.Tensor]) -> int | None:
    """The one axis, besides the batch, along which a mask differs."""
    rank = len(past.shape)
    layout = static_layout(views, rank)
    if layout is None:
        return None
    axes: set[int] = set()
    for mask in masks:
        shape = list(_unexpanded(mask).shape or ())
        axes |= {layout[rank - len(shape) + i][0] for i, d in enumerate(shape) if d != 1 and len(shape) <= rank}
    axes -= {0}
    return axes.pop() if len(axes) == 1 else None


def prove(candidate: Candidate, geometries: Sequence[Geometry]) -> Proof:
    """Show that a blend puts one new row behind P rows.

    Args:
        candidate: the update.
        geometries: the samples, also those beyond the capacity.

    Raises:
        UnsupportedModelError: it does not, or it cannot be told.
    """
    plain = [g for g in geometries if not g.step.wrapped]
    geometry = richest(plain)
    place = _place(candidate, geometry)
    group = [a for a in geometry.layout[place] if geometry.sizes[a] != 1]
    if len(group) != 1 or group[0] == 0:
        raise candidate.refusal(f"axis {place} of '{candidate.operand.name}' is not the sequence axis of the cache")
    axis = group[0]
    update = candidate.updates[0]
    for g in plain:
        wanted = list(g.operand_shape)
        wanted[place] = 1
        shape = g.step.probe.shape(update.name)
        if g.step.length > 1:
            raise candidate.refusal(f"it writes one row although a step may bring {g.step.length} tokens")
        if shape != tuple(wanted):
            raise candidate.refusal(f"'{update.name}' has shape {list(shape or ())}, where one new row has {wanted}")

    def rows_of(g: Geometry, probe: Probe) -> Array | None:
        return _rows(candidate, g, probe, place)

    circular = prove_rows(candidate, axis, geometries, rows_of)
    return Proof(axis, *nearest_update(candidate, update, geometry.layout, axis, plain), circular)


def _place(candidate: Candidate, geometry: Geometry) -> int:
    """The axis of the operand along which the masks choose rows."""
    rank = len(geometry.layout)
    extents = {
        rank - value.ndim + axis
        for mask in candidate.index
        if (value := _mask(geometry.step.probe, mask)) is not None and value.ndim <= rank
        for axis, size in enumerate(value.shape)
        if size > 1
    }
    extents -= {place for place, group in enumerate(geometry.layout) if group[:1] == (0,)}
    if len(extents) != 1:
        raise candidate.refusal("which rows it writes cannot be computed from positions and lengths")
    return extents.pop()


def _mask(probe: Probe, mask: gs.Tensor) -> Array | None:
    """The value of a mask that broadcasts as the mask does."""
    return probe.value(_unexpanded(mask).name)


def _unexpanded(mask: gs.Tensor) -> gs.Tensor:
    """A mask as small as it was before it was expanded to the shape of the cache."""
    while (node := producer(mask)) is not None and is_op(node, "Expand"):
        mask = node.inputs[0]
    return mask


def _rows(candidate: Candidate, geometry: Geometry, probe: Probe, place: int) -> Array | None:
    """The rows that come from the update, per sequence; None unless all others come from the past."""
    assert candidate.node is not None
    rank = len(geometry.layout)
    batch = next((i for i, group in enumerate(geometry.layout) if group[:1] == (0,)), 0)
    shape = [1] * rank
    shape[batch] = geometry.sizes[0]
    update = -1.0 - np.arange(geometry.sizes[0], dtype=np.float64).reshape(shape)
    shape[place] = geometry.operand_shape[place]
    past = 1.0 + np.arange(np.prod(shape), dtype=np.float64).reshape(shape)
    values: dict[str, Array] = {candidate.operand.name: past, candidate.updates[0].name: update}
    for mask in candidate.index:
        value = _mask(probe, mask)
        if value is None:
            return None
        values[mask.name] = value.astype(np.float64) if value.dtype.kind not in "biu" else value
    result = probe.given(values).value(candidate.node.outputs[0].name)
    if result is None or result.ndim != rank:
        return None
    new, old = result == update, result == past
    if bool((new == old).any()):
        return None
    chosen = np.moveaxis(new, (batch, place), (0, -1)).reshape(new.shape[batch], -1, new.shape[place])
    if bool((chosen != chosen[:, :1]).any()) or np.unique(chosen[:, 0].sum(-1)).size != 1:
        return None
    return np.nonzero(chosen[:, 0])[1].reshape(len(chosen), -1)

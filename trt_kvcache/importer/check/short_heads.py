"""Shortens the heads of regions in long steps: these test lengths and masks, to which the size of a head is irrelevant.

    queries [B, 4, S, 256], cache [B, 1, L, 256]    ->    queries [B, 4, S, 16], cache [B, 1, L, 16]

A smaller size replaces the size of a head in boundaries, caches, and the shapes of Reshape and Expand. Heads keep their
size if the same number may mean something else, such as a window, or if weights have this size. Short steps always run
with whole heads. A region that differs or does not run with short heads runs again with whole heads.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace

import numpy as np
import onnx
from onnx import NodeProto, TensorProto, numpy_helper

from trt_kvcache.importer.check.region import Region
from trt_kvcache.importer.check.symbolic_shapes import Term
from trt_kvcache.importer.operators import RESHAPES
from trt_kvcache.importer.plan import CachePlan, CacheUpdate, PhysicalLayout
from trt_kvcache.importer.protos import copied

_SIZE = 16  # size of a short head
_WHOLE = (TensorProto.INT64, TensorProto.INT32)

Shape = tuple[int | str, ...]


def with_short_heads(region: Region, plan: CachePlan) -> tuple[Region, CachePlan] | None:
    """Return the region and the plan with short heads; None if heads must keep their size."""
    inputs = {v.name for model in region.models for v in model.graph.input}
    caches = [c for c in plan.caches if c.past in inputs]
    sizes = {c.logical_shape[-1] for c in caches} | {c.physical_shape[-1] for c in caches}
    size = sizes.pop() if len(sizes) == 1 else None
    if not isinstance(size, int) or size <= _SIZE or any(not _is_plain(c, size) for c in caches):
        return None
    if {s.past for s in plan.states} & inputs:
        return None
    models = [_with_short_heads(model, size) for model in region.models]
    shapes = [b.shape for b in region.boundaries] + list(region.joins.values())
    first, second = models
    if first is None or second is None or any(_is_mixed(term, size) for shape in shapes for term in shape):
        return None
    names = {name for c in caches for name in (c.past, c.present)}
    originals = tuple(replace(t, shape=_short(t.shape, size)) if t.name in names else t for t in plan.original)
    tensors = tuple(replace(t, shape=_short(t.shape, size)) if t.name in names else t for t in plan.tensors)
    updates = tuple(
        replace(c, logical_shape=_short(c.logical_shape, size), physical_shape=_short(c.physical_shape, size))
        if c in caches
        else c
        for c in plan.caches
    )
    return (
        replace(
            region,
            models=(first, second),
            joins={name: _terms(shape, size) for name, shape in region.joins.items()},
            boundaries=tuple(replace(b, shape=_terms(b.shape, size)) for b in region.boundaries),
        ),
        replace(plan, caches=updates, tensors=tensors, original=originals),
    )


def _is_plain(cache: CacheUpdate, size: int) -> bool:
    """True if the numbers of a head lie along the last axis, and no other axis has the same size."""
    last = len(cache.logical_shape) - 1
    return (
        cache.layout is not PhysicalLayout.VIEW and cache.sequence_axis < last and cache.logical_shape.count(size) == 1
    )


def _short(shape: Shape, size: int) -> Shape:
    return tuple(_SIZE if dim == size else dim for dim in shape)


def _terms(shape: Iterable[Term], size: int) -> tuple[Term, ...]:
    return tuple(replace(t, factor=_SIZE) if t.factor == size else t for t in shape)


def _is_mixed(term: Term, size: int) -> bool:
    """True if a term is the size of a head times another factor."""
    return term.factor % size == 0 and term != Term(size, 0, 0)


def _with_short_heads(model: onnx.ModelProto, size: int) -> onnx.ModelProto | None:
    """Return the model with short heads; None if the number that is the size of a head may also mean something else."""
    readers: dict[str, list[tuple[NodeProto, int]]] = {}
    for node in model.graph.node:
        for a in node.attribute:
            if a.type in (a.GRAPH, a.GRAPHS) or a.i == size or size in a.ints:
                return None
        for place, name in enumerate(node.input):
            readers.setdefault(name, []).append((node, place))
    copy = copied(model)
    for tensor in copy.graph.initializer:
        if tensor.data_type not in _WHOLE:
            if math.prod(tensor.dims) > 1 and size in tensor.dims:
                return None
            continue
        values = numpy_helper.to_array(tensor)
        sizes = [v for v in values.ravel().tolist() if v and v % size == 0]
        uses = _uses(tensor.name, readers) if sizes else {False}
        if uses == {False}:  # it is never a part of a shape
            continue
        if uses != {True} or sizes != [size]:
            return None
        tensor.CopyFrom(numpy_helper.from_array(np.where(values == size, _SIZE, values), tensor.name))
    return copy


def _uses(name: str, readers: Mapping[str, list[tuple[NodeProto, int]]]) -> set[bool]:
    """Return how an integer constant is used: True as a part of a shape, False in any other way."""
    uses: set[bool] = set()
    todo, done = [name], set[str]()
    while todo:
        current = todo.pop()
        if current in done:
            continue
        done.add(current)
        for node, place in readers.get(current, ()):
            if node.op_type == "Concat" or (node.op_type in ("Cast", *RESHAPES) and place == 0):
                todo += node.output
            else:
                uses.add(node.op_type in ("Reshape", "Expand") and place == 1)
    return uses

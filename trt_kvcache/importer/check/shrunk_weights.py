"""Shrinks regions with large weights: the same computation with fewer rows and columns, and with random weights.

    MatMulNBits of N = 128,256 rows        ->    N = 32: weights, scales, zero points and bias have 32 rows
    QMoE, 32 experts of 5,760 x 2,880      ->    32 experts of 128 x 64; each row has 32 bytes and 2 blocks

An operator treats all rows of a weight in the same way. So a smaller size replaces a size everywhere: in shapes of
weights and boundaries, attributes, and small integer constants. If sizes contradict each other, ONNX Runtime refuses
the model, and the check tries other sizes. Constants in the graph itself, such as added zero points, lose rows,
but get no random numbers. If some of their rows differ from the first row, some of these rows are kept.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from onnx import TensorProto, helper, numpy_helper

from trt_kvcache.importer.cache_plan import CachePlan
from trt_kvcache.importer.check.region import Region
from trt_kvcache.importer.interface import IndexLimits
from trt_kvcache.importer.protos import FLOATS, byte_size, copied
from trt_kvcache.importer.steps.probe import Term
from trt_kvcache.importer.weights import storage

_FEW = 32  # a long axis keeps at least this many rows
_LONG = 128  # a size may shrink without other sizes if it is at least this large
_LEAST = 2  # a divided size keeps at least this many entries, such as two blocks
_MATRIX = 2  # axes of a weight; a stack of experts has more
_TRIES = 2  # the most divisors to try for one set of sizes
_FLOATS8 = (TensorProto.FLOAT8E4M3FN, TensorProto.FLOAT8E5M2)
_WHOLE = (TensorProto.INT64, TensorProto.INT32)
_NUMBERS = 4  # the most numbers of a constant from which shapes are computed


@dataclass(frozen=True)
class _Choice:
    """The smaller sizes that replace the sizes of weights in a region (changed part of the model).

    Attributes:
        sizes: maps each size that shrinks to the smaller size.
        experts: the number of experts, which never shrinks; 0 if the model has no experts.
    """

    sizes: Mapping[int, int]
    experts: int = 0

    def of(self, size: int) -> int:
        return self.sizes.get(size, size)

    def shape(self, dims: Sequence[int]) -> list[int]:
        """Return the smaller shape of a constant. If it has only one axis, this axis may be rows times columns."""
        if len(dims) == 1 and dims[0] not in self.sizes:
            for size in sorted(self.sizes, reverse=True):
                if dims[0] % size == 0:
                    return [self.sizes[size] * self.of(dims[0] // size)]
        return [d if not axis and d == self.experts else self.of(d) for axis, d in enumerate(dims)]

    def terms(self, shape: Sequence[Term]) -> tuple[Term, ...]:
        return tuple(t if t.factor == self.experts else replace(t, factor=self.of(t.factor)) for t in shape)


def bytes_read(models: Sequence[onnx.ModelProto]) -> int:
    """Return the bytes of all constants of these models. Data that several constants share count only once."""
    sizes: dict[str, int] = {}
    for number, model in enumerate(models):
        for tensor in model.graph.initializer:
            own = storage(tensor) or f"{number}:{tensor.name}"
            sizes[own] = max(sizes.get(own, 0), byte_size(tensor) or 0)
    return sum(sizes.values())


def shrunk(
    region: Region, plan: CachePlan, limits: IndexLimits, few: int, most: int
) -> Iterator[tuple[Region, CachePlan, IndexLimits]]:
    """Yield variants of a region with smaller sizes: first those whose weights have up to `few` bytes, then `most`."""
    if bytes_read(region.models) <= few:
        yield region, plan, limits
    larger = []
    for choice in _choices(region, plan):
        small = _smaller(region, plan, limits, choice)
        size = most + 1 if small is None else bytes_read(small[0].models)
        if small is not None and size <= few:
            yield small
        elif small is not None and size <= most:
            larger.append(small)
    yield from larger


def drawn(region: Region) -> Region:
    """Return the region (changed part of the model) with random numbers in the weights that contain no data."""
    models = copied(region.models[0]), copied(region.models[1])
    for tensor in (t for model in models for t in model.graph.initializer):
        if (own := storage(tensor)) is not None:
            _draw(tensor, own)
    return replace(region, models=models, drawn=True)


def _choices(region: Region, plan: CachePlan) -> Iterator[_Choice]:
    weights = [list(t.dims) for m in region.models for t in m.graph.initializer if storage(t) is not None]
    matrices = [dims for dims in weights if len(dims) > 1]
    stacks = [dims for dims in matrices if len(dims) > _MATRIX]
    firsts = {dims[0] for dims in stacks}
    experts = firsts.pop() if len(firsts) == 1 and len(stacks) > 1 else 0
    inner = {d for dims in matrices for axis, d in enumerate(dims) if axis or not experts or len(dims) == _MATRIX}
    sizes = sorted((d for d in inner if d >= _LEAST), reverse=True)
    if has_caches(region, plan):
        # Heads keep their sizes. Only table rows beyond all positions, and sizes that products sum over, shrink.
        rows = max((c.capacity for c in plan.caches), default=0) + _FEW
        yield from (_Choice({size: rows}) for size in sizes if size > rows)
    yield from (_Choice({size: _FEW + size % _FEW}) for size in sizes if size >= _LONG)
    # The counts of numbers, bytes and blocks of one axis differ by powers of two. The shapes of experts have all three.
    for least in reversed(sizes) if experts else sizes:
        groups: dict[int, list[int]] = {}
        for size in sizes[: sizes.index(least) + 1]:
            groups.setdefault(size // (size & -size), []).append(size)
        for place in range(_TRIES):
            smaller: dict[int, int] = {}
            for group in groups.values():
                common = math.gcd(*group)
                divisors = (d for d in range(common, 1, -1) if common % d == 0 and group[-1] // d >= _LEAST)
                divisor = next(islice(divisors, place, None), 1)
                smaller |= {size: size // divisor for size in group if divisor > 1}
            if smaller:
                yield _Choice(smaller, experts)


def has_caches(region: Region, plan: CachePlan) -> bool:
    """True if a region (changed part of the model) writes or reads a cache."""
    caches = {c.past for c in plan.caches}
    return bool(region.presents) or any(v.name in caches for model in region.models for v in model.graph.input)


def _smaller(
    region: Region, plan: CachePlan, limits: IndexLimits, choice: _Choice
) -> tuple[Region, CachePlan, IndexLimits] | None:
    rows = _rows(region, choice)
    if rows is None:
        return None
    models = tuple(_resized(model, choice, rows) for model in region.models)
    stored: dict[str, int] = {}
    for tensor in (t for model in models for t in model.graph.initializer):
        own = storage(tensor)
        if own is not None and stored.setdefault(own, byte_size(tensor) or 0) != byte_size(tensor):
            return None  # the two sides would read different bytes of the shrunk constant

    def known(bounds: Mapping[str, int]) -> dict[str, int]:
        return {
            n: min([bound, *(few for size, few in choice.sizes.items() if size >= bound)])
            for n, bound in bounds.items()
        }

    caches = {name for c in plan.caches for name in (c.past, c.present)}
    tensors = tuple(
        t if t.name in caches else replace(t, shape=tuple(choice.of(d) if isinstance(d, int) else d for d in t.shape))
        for t in plan.tensors
    )
    small = replace(
        region,
        models=(models[0], models[1]),
        joins={name: choice.terms(shape) for name, shape in region.joins.items()},
        boundaries=tuple(replace(b, shape=choice.terms(b.shape)) for b in region.boundaries),
    )
    return small, replace(plan, tensors=tensors), IndexLimits(known(limits.tokens), known(limits.positions))


def _rows(region: Region, choice: _Choice) -> dict[int, npt.NDArray[np.int64]] | None:
    """Return the row numbers that shrunk constants keep, by size of the axis; None if this is ambiguous."""
    rows = {size: np.arange(few) for size, few in choice.sizes.items()}
    both = [{t.name: t for t in model.graph.initializer if storage(t) is None} for model in region.models]
    for tensor in both[1].values():
        same = both[0].get(tensor.name)
        if _is_whole(tensor) or (same is not None and same.SerializeToString() == tensor.SerializeToString()):
            continue
        for axis, (size, few) in enumerate(zip(tensor.dims, choice.shape(tensor.dims), strict=True)):
            if size == few:
                continue
            values = np.moveaxis(numpy_helper.to_array(tensor), axis, 0)
            differs = (values != values[:1]).reshape(size, -1).any(1)
            unlike, alike = np.flatnonzero(differs), np.flatnonzero(~differs)
            if not len(unlike):
                continue
            if len(choice.sizes) > 1 or size not in rows:
                return None
            most = max(few // 2, few - len(alike))  # the most rows that may differ from the first one
            rows[size] = np.sort(np.concatenate([unlike[:most], alike[: few - len(unlike[:most])]]))
    return rows


def _resized(model: onnx.ModelProto, choice: _Choice, rows: Mapping[int, npt.NDArray[np.int64]]) -> onnx.ModelProto:
    resized = copied(model)
    for tensor in resized.graph.initializer:
        if storage(tensor) is not None:
            tensor.dims[:] = choice.shape(tensor.dims)
        elif _is_whole(tensor):
            values = numpy_helper.to_array(tensor)
            if values.size <= _NUMBERS:
                smaller = np.array([choice.of(int(v)) for v in values.ravel()], values.dtype)
                tensor.CopyFrom(numpy_helper.from_array(smaller.reshape(values.shape), tensor.name))
        elif (shape := choice.shape(tensor.dims)) != list(tensor.dims):
            values = numpy_helper.to_array(tensor)
            for axis, (size, few) in enumerate(zip(tensor.dims, shape, strict=True)):
                if size != few:
                    values = np.take(values, rows.get(size, np.arange(few)), axis)
            tensor.CopyFrom(numpy_helper.from_array(np.ascontiguousarray(values), tensor.name))
    for node in resized.graph.node:
        for attribute in node.attribute:
            if attribute.type == attribute.INT:
                attribute.i = choice.of(attribute.i)
            elif attribute.type == attribute.INTS and len(attribute.ints) <= _NUMBERS:
                attribute.ints[:] = [choice.of(i) for i in attribute.ints]
    return resized


def _is_whole(tensor: TensorProto) -> bool:
    return tensor.data_type in _WHOLE or tensor.data_type == TensorProto.BOOL


def _draw(tensor: TensorProto, own: str) -> None:
    rng = np.random.default_rng(zlib.crc32(own.encode()))
    count = math.prod(tensor.dims)
    if tensor.data_type in (*FLOATS, *_FLOATS8):
        dtype: npt.DTypeLike = helper.tensor_dtype_to_np_dtype(tensor.data_type)
        values: npt.NDArray[Any] = (0.1 * rng.standard_normal(count, np.float32)).astype(dtype)
        data = values.tobytes()
    else:
        data = rng.bytes(byte_size(tensor) or 0)
    tensor.CopyFrom(TensorProto(name=tensor.name, data_type=tensor.data_type, dims=tensor.dims, raw_data=data))

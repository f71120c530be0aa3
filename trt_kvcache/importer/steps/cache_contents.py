"""Makes cache contents for steps, and converts them between the layouts of the original and the rewritten model.

If the rewrite made a cache circular (a ring), the ring holds only the newest tokens; the original's cache holds all.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import ml_dtypes
import numpy as np
import onnx

from trt_kvcache.dtypes import PLAIN, array_dtype
from trt_kvcache.errors import UnsupportedModelError
from trt_kvcache.importer.cache_plan import (
    CachePlan,
    CacheUpdate,
    OriginalRole,
    PhysicalLayout,
    Role,
    TensorRole,
    UpdateMode,
)
from trt_kvcache.importer.protos import Array

_POOL = 1 << 19  # random numbers in a pool; larger caches repeat them
_SHIFT = 7  # the contents of the caches start this far apart in the pool


@dataclass(frozen=True)
class CacheTensor:
    """One cache as the caller sees it: a graph input, and the graph output that becomes this input in the next step.

    Attributes:
        output: name of the graph output. None: no output returns the cache, so its contents stay the same.
        update: says how a step writes the cache; None if no single update writes it.
    """

    role: TensorRole
    output: str | None
    update: CacheUpdate | None

    def logical_shape(self, batch: int) -> tuple[int, ...]:
        """Return the shape in the original model, for a batch of `batch` rows."""
        shape = self.role.shape if self.update is None else self.update.logical_shape
        return tuple(dim if isinstance(dim, int) else batch for dim in shape)

    def to_physical(self, logical: Array) -> Array:
        """Convert an array of a cache from the original model's layout to that of the rewritten model."""
        cache = self.update
        if cache is None or cache.layout is PhysicalLayout.AS_IS:
            return logical
        shape = (len(logical), *(dim for dim in cache.physical_shape[1:] if isinstance(dim, int)))
        if cache.layout is PhysicalLayout.VIEW:
            return logical.reshape(shape)
        _, heads, rows, size = shape
        return np.ascontiguousarray(logical.reshape(-1, rows, heads, size).transpose(0, 2, 1, 3))

    def to_logical(self, physical: Array) -> Array:
        """Convert a cache's array from the rewritten model's layout to that of the original model."""
        cache = self.update
        if cache is None or cache.layout is PhysicalLayout.AS_IS:
            return physical
        if cache.layout is PhysicalLayout.HEADS_MAJOR:
            physical = physical.transpose(0, 2, 1, 3)
        return physical.reshape(len(physical), *self.logical_shape(1)[1:])  # rows of a fixed batch may come alone

    def rows(self, logical: Array) -> Array:
        """View an array in the original's layout as ``[B, S_max, ...]``: one entry for each cache row, no copy."""
        if self.update is None:
            return logical.reshape(len(logical), 1, -1)
        return np.moveaxis(logical, self.update.sequence_axis, 1)

    def physical_rows(self, physical: Array) -> Array:
        """View an array in the rewritten model's layout as ``[B, S_max, ...]``; each row is ordered as in `rows`."""
        if self.update is not None and self.update.layout is PhysicalLayout.HEADS_MAJOR:
            return np.moveaxis(physical, 2, 1)
        return self.rows(self.to_logical(physical))


def find_caches(plan: CachePlan) -> tuple[CacheTensor, ...]:
    """Return each cache input with the output that holds the cache after the step."""
    inputs = [t for t in plan.tensors if t.role is Role.CACHE and t.io == "input"]
    outputs = {t.name: t for t in plan.tensors if t.role is Role.CACHE and t.io == "output"}
    updates = {c.past: c for c in plan.caches}
    caches: list[CacheTensor] = []
    for tensor in inputs:
        update = updates.get(tensor.name)
        last = update
        while last is not None and last.present not in outputs:  # chained updates of one cache
            last = updates.get(last.present)
        caches.append(CacheTensor(tensor, last.present if last is not None else None, update))
    taken = {c.output for c in caches}
    free = [t for name, t in outputs.items() if name not in taken]
    for i, cache in enumerate(caches):
        # If views hide which output belongs to an input, inputs and outputs are paired in order.
        match = next((t for t in free if cache.output is None and t.shape == cache.role.shape), None)
        if match is not None:
            free.remove(match)
            caches[i] = CacheTensor(cache.role, match.name, cache.update)
    return tuple(caches)


def find_states(plan: CachePlan) -> tuple[CacheTensor, ...]:
    """Return the states, such as those of convolutions. Each step replaces the whole state."""
    roles = {s.past: TensorRole(s.past, "input", Role.STATE, s.dtype, s.shape, "graph: state", ()) for s in plan.states}
    roles |= {t.name: t for t in plan.tensors if t.io == "input"}
    return tuple(CacheTensor(roles[s.past], s.present, None) for s in plan.states)


def drawn_contents(
    cache: CacheTensor, seed: int, histories: Sequence[int], garbage: float, shift: int = 0, *, wide: bool = False
) -> Array:
    """Draw the contents of a cache before a step: random rows for tokens; elsewhere, arbitrary numbers or 0.

    Numbers are drawn once for each `seed`; each step takes a slice that begins at `shift`. A state without history
    holds zeros. `histories` are the tokens written so far in each batch row; circular caches keep the newest. `garbage`
    is the magnitude of arbitrary numbers, with random signs (integers take any value), or 0. It is finite, because
    ONNX's own Attention returns NaN for a masked NaN. The result is float32 for bfloat16 and, if `wide`, float16.
    """
    dtype = cache.role.dtype
    kind = np.dtype(np.float32) if wide and dtype == "float16" else numpy_dtype(dtype)
    contents = np.zeros(cache.logical_shape(len(histories)), kind)
    histories = [*histories, *(0,) * (len(contents) - len(histories))]  # a fixed batch may have more rows
    if cache.update is None:
        text = _pool((_POOL,), dtype, kind, seed, 0.0)
        for row, values in enumerate(contents):
            if histories[row]:
                _repeat(values.reshape(-1), text, shift + row * values.size)
        return contents
    axis = cache.update.sequence_axis
    entry = (*contents.shape[1:axis], *contents.shape[axis + 1 :])
    if not math.prod(entry):
        return contents
    count = max(1, _POOL // math.prod(entry))
    shape = (*entry[: axis - 1], count, *entry[axis - 1 :])
    text = np.moveaxis(_pool(shape, dtype, kind, seed, 0.0), axis - 1, 0)
    rest = np.moveaxis(_pool(shape, dtype, kind, seed, garbage), axis - 1, 0) if garbage else None
    for row, (target, tokens) in enumerate(zip(np.moveaxis(contents, axis, 1), histories, strict=True)):
        first = shift + row * max(1, count // len(histories))
        used = min(tokens, len(target))
        _repeat(target[:used], text, first)
        # Every second row without a token stays 0, as at the start of a session, to detect divisions by the norm of a
        # row. An output may be the last cache row alone: in one batch row, it has garbage; in the next one, it is 0.
        if rest is not None:
            _repeat(target[used + (len(target) - 1 - used + row) % 2 :: 2], rest, first)
    return contents


def all_contents(
    caches: Mapping[str, CacheTensor], seed: int, histories: Sequence[int], garbage: float, episode: int
) -> Iterator[tuple[str, Array]]:
    """Yield name and contents (`drawn_contents`) of each cache and state. Each `episode` (text) has other contents."""
    for number, (name, cache) in enumerate(caches.items(), len(caches) * episode):
        yield name, drawn_contents(cache, seed, histories, garbage, _SHIFT * number)


@lru_cache(maxsize=32)
def _pool(shape: tuple[int, ...], dtype: str, kind: np.dtype[Any], number: int, garbage: float) -> Array:
    """Return random cache rows: numbers from -1 to 1 if `garbage` is 0, otherwise numbers as large as `garbage`."""
    rng = np.random.default_rng([number, int(garbage)])
    if kind.kind == "b" and garbage:  # all True: a few random booleans may all be False
        return np.ones(shape, kind)
    if kind.kind in "iub":  # quantized and raw bytes: plausible numbers and garbage both have the whole range
        low, high = (0, 2) if kind.kind == "b" else (np.iinfo(kind).min, np.iinfo(kind).max)
        return rng.integers(low, high, shape, dtype=np.int8 if kind.kind == "b" else kind).astype(kind)
    values = rng.random(shape, np.float32) * 2 - 1
    if garbage:
        values = np.copysign(np.float32(garbage), values)
    narrow = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16}.get(dtype, kind)
    return values.astype(narrow).astype(kind, copy=False)  # round to numbers that the cache itself can hold


def _repeat(target: Array, source: Array, start: int) -> None:
    place = 0
    while place < len(target):
        taken = source[(start + place) % len(source) :][: len(target) - place]
        target[place : place + len(taken)] = taken
        place += len(taken)


def drawn_normal(shape: Sequence[int], place: int) -> Array:
    """Return float32 normal numbers from a pool that is drawn once; the first is number `place` of the pool."""
    numbers = np.empty(math.prod(shape), np.float32)
    _repeat(numbers, _normal(), place % _POOL)
    return numbers.reshape(shape)


@lru_cache(maxsize=1)
def _normal() -> Array:
    return np.random.default_rng(0).standard_normal(_POOL, np.float32)


def fixed_rows(plan: CachePlan, inputs: Iterable[onnx.ValueInfoProto]) -> dict[str, int]:
    """Return the number of rows of each cache of fixed length, by the name of the cache input."""
    rows = {}
    dims = {value.name: value.type.tensor_type.shape.dim for value in inputs}
    for cache in plan.caches:
        sizes = dims.get(cache.past, ())
        if len(sizes) > cache.sequence_axis and sizes[cache.sequence_axis].HasField("dim_value"):
            rows[cache.past] = sizes[cache.sequence_axis].dim_value
    return rows


def original_rows(update: CacheUpdate, plan: CachePlan, fixed: Mapping[str, int]) -> int | None:
    """Return a cache's rows in the original model; None if the cache grows. `fixed` is a result of `fixed_rows`."""
    bound = plan.options.capacity or update.capacity
    if not plan.original:
        return fixed.get(update.past, bound)
    tensor = next((t for t in plan.original if t.name == update.past and t.io == "input"), None)
    if tensor is None or tensor.role is not OriginalRole.FIXED_CACHE:
        return None
    return size_of(tensor.shape[update.sequence_axis]) or bound


def as_text(cache: CacheTensor, plan: CachePlan, fixed: Mapping[str, int], longest: int) -> CacheTensor:
    """If the rewrite made `cache` circular, return a linear cache that holds all tokens; otherwise `cache`."""
    update = cache.update
    if update is None or update.mode is not UpdateMode.CIRCULAR:
        return cache
    rows = original_rows(update, plan, fixed)
    if rows == update.capacity:
        return cache
    rows = rows or longest
    shape = list(update.logical_shape)
    shape[update.sequence_axis] = rows
    return replace(cache, update=replace(update, mode=UpdateMode.LINEAR, capacity=rows, logical_shape=tuple(shape)))


def ring_window(text: Array, cache: CacheTensor, ends: Sequence[int], garbage: float) -> Array:
    """Return the contents ``[B, ..., capacity, ...]`` of the circular cache after a text: its newest tokens.

    `text` is ``[B, ..., tokens, ...]``, in the cache's axis order. `ends` are the numbers of tokens of the batch rows;
    rows without a token get numbers as large as `garbage`.
    """
    assert cache.update is not None
    ring: Array = drawn_contents(cache, 0, (0,) * len(ends), garbage).astype(text.dtype)
    axis, capacity = cache.update.sequence_axis, cache.update.capacity
    target, source = np.moveaxis(ring, axis, 1), np.moveaxis(text, axis, 1)
    for row, end in enumerate(ends):
        tokens = np.arange(max(0, end - capacity), end)
        target[row, tokens % capacity] = source[row, tokens]
    return ring


def size_of(dim: int | str) -> int | None:
    """Return a dimension as a number, even if an exporter stored the number as text; None for a symbol."""
    return int(dim) if isinstance(dim, int) or dim.isdecimal() else None


def numpy_dtype(name: str) -> np.dtype[Any]:
    """Return the NumPy dtype for an ONNX dtype name such as ``"float16"``. For bfloat16, return float32."""
    if name == "bfloat16":
        return np.dtype(np.float32)
    if name not in PLAIN:
        raise UnsupportedModelError(
            f"verification uses ONNX Runtime, which does not support {name}; it supports {', '.join(PLAIN)}, and "
            "bfloat16 as float32: verify a float16 or float32 export of the same model"
        )
    return array_dtype(name)

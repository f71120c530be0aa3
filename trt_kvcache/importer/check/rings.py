"""Windows that became rings: the original holds a row for every token, the rewritten model the newest ones."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx

from trt_kvcache.importer.check.caches import CacheTensor, first_contents
from trt_kvcache.importer.check.original import size_of
from trt_kvcache.importer.plan import CachePlan, CacheUpdate, OriginalRole, UpdateMode

Array = npt.NDArray[Any]


def fixed_rows(plan: CachePlan, inputs: Iterable[onnx.ValueInfoProto]) -> dict[str, int]:
    """Rows of the caches that have a fixed length among the inputs, by name of the past."""
    found = {}
    values = {value.name: value for value in inputs}
    for cache in plan.caches:
        value = values.get(cache.past)
        dims = value.type.tensor_type.shape.dim if value is not None else ()
        if len(dims) > cache.sequence_axis and dims[cache.sequence_axis].HasField("dim_value"):
            found[cache.past] = dims[cache.sequence_axis].dim_value
    return found


def original_rows(update: CacheUpdate, plan: CachePlan, fixed: Mapping[str, int]) -> int | None:
    """Rows of a cache in the original; None: it grows.

    Args:
        update: of the cache, as the plan has it.
        plan: of the model.
        fixed: what `fixed_rows` says of the original.
    """
    bound = plan.options.capacity or update.capacity
    if not plan.original:
        return fixed.get(update.past, bound)
    tensor = next((t for t in plan.original if t.name == update.past and t.io == "input"), None)
    if tensor is None or tensor.role is not OriginalRole.FIXED_CACHE:
        return None
    return size_of(tensor.shape[update.sequence_axis]) or bound


def as_text(cache: CacheTensor, plan: CachePlan, fixed: Mapping[str, int], longest: int) -> CacheTensor:
    """The cache with a row for every token, where it became a ring; else the cache itself.

    Args:
        cache: as the plan has it.
        plan: of the model.
        fixed: what `fixed_rows` says of the original.
        longest: tokens of the longest text, for a cache that grows.
    """
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


def ring_window(
    text: Array, cache: CacheTensor, ends: Sequence[int], garbage: float, rng: np.random.Generator, *, twin: bool
) -> Array:
    """The newest tokens of a text at their places in a ring, ``[B, ..., capacity, ...]``.

    Args:
        text: ``[B, ..., tokens, ...]``, in the axis order of the cache.
        cache: the ring.
        ends: tokens of each row of the batch.
        garbage: magnitude of what lies in rows that no token goes to.
        rng: of the garbage.
        twin: bfloat16 is held as float32.
    """
    assert cache.update is not None
    made: Array = first_contents(cache, (0,) * len(ends), garbage, rng, twin=twin).astype(text.dtype)
    axis, capacity = cache.update.sequence_axis, cache.update.capacity
    target, source = np.moveaxis(made, axis, 1), np.moveaxis(text, axis, 1)
    for row, end in enumerate(ends):
        tokens = np.arange(max(0, end - capacity), end)
        target[row, tokens % capacity] = source[row, tokens]
    return made

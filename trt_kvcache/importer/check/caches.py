"""Cache contents: first values, and the way between the model's layout and the rewritten model's."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from trt_kvcache.importer.check.dtypes import numpy_dtype
from trt_kvcache.importer.plan import CachePlan, CacheUpdate, PhysicalLayout, Role, TensorRole

Array = npt.NDArray[Any]

_BLOCK = 1 << 20  # random values; larger caches repeat them


@dataclass(frozen=True)
class CacheTensor:
    """One cache as the caller sees it: a graph input, and the graph output that becomes the next step's input.

    Attributes:
        output: name of the graph output; None: no output carries this input on, and it keeps its first value.
        update: the write; None: no single update writes the cache.
    """

    role: TensorRole
    output: str | None
    update: CacheUpdate | None

    def logical_shape(self, batch: int) -> tuple[int, ...]:
        """Shape in the original model, for `batch` rows."""
        shape = self.role.shape if self.update is None else self.update.logical_shape
        return tuple(dim if isinstance(dim, int) else batch for dim in shape)

    def to_physical(self, logical: Array) -> Array:
        """The original model's array as the rewritten model takes it."""
        cache = self.update
        if cache is None or cache.layout is PhysicalLayout.AS_IS:
            return logical
        shape = (len(logical), *(dim for dim in cache.physical_shape[1:] if isinstance(dim, int)))
        if cache.layout is PhysicalLayout.VIEW:
            return logical.reshape(shape)
        _, heads, rows, size = shape
        return np.ascontiguousarray(logical.reshape(-1, rows, heads, size).transpose(0, 2, 1, 3))

    def to_logical(self, physical: Array) -> Array:
        """The rewritten model's array as the original model has it."""
        cache = self.update
        if cache is None or cache.layout is PhysicalLayout.AS_IS:
            return physical
        if cache.layout is PhysicalLayout.HEADS_MAJOR:
            physical = physical.transpose(0, 2, 1, 3)
        return physical.reshape(self.logical_shape(len(physical)))

    def rows(self, logical: Array) -> Array:
        """The same values as ``[B, S_max, ...]``, one entry per row of the cache; nothing is copied."""
        if self.update is None:
            return logical.reshape(len(logical), 1, -1)
        return np.moveaxis(logical, self.update.sequence_axis, 1)

    def physical_rows(self, physical: Array) -> Array:
        """As `rows`, of the rewritten model's array: each entry has the same values in the same order."""
        if self.update is not None and self.update.layout is PhysicalLayout.HEADS_MAJOR:
            return np.moveaxis(physical, 2, 1)
        return self.rows(self.to_logical(physical))


def find_caches(plan: CachePlan) -> tuple[CacheTensor, ...]:
    """Every cache input with the output that carries it on."""
    inputs = [t for t in plan.tensors if t.role is Role.CACHE and t.io == "input"]
    outputs = {t.name: t for t in plan.tensors if t.role is Role.CACHE and t.io == "output"}
    updates = {c.past: c for c in plan.caches}
    found: list[CacheTensor] = []
    for tensor in inputs:
        update = updates.get(tensor.name)
        last = update
        while last is not None and last.present not in outputs:  # chained updates of one cache
            last = updates.get(last.present)
        found.append(CacheTensor(tensor, last.present if last is not None else None, update))
    taken = {c.output for c in found}
    free = [t for name, t in outputs.items() if name not in taken]
    for i, cache in enumerate(found):
        # Views between the graph's input or output and the update hide the names: inputs and outputs keep their order.
        match = next((t for t in free if cache.output is None and t.shape == cache.role.shape), None)
        if match is not None:
            free.remove(match)
            found[i] = CacheTensor(cache.role, match.name, cache.update)
    return tuple(found)


def find_states(plan: CachePlan) -> tuple[CacheTensor, ...]:
    """State that is no attention cache, carried from step to step as a whole."""
    roles = {t.name: t for t in plan.tensors if t.io == "input"}
    return tuple(
        CacheTensor(
            roles.get(s.past) or TensorRole(s.past, "input", Role.STATE, s.dtype, s.shape, "graph: state", ()),
            s.present,
            None,
        )
        for s in plan.states
    )


def cache_bytes(caches: Sequence[CacheTensor], batch: int, *, twin: bool) -> int:
    """Bytes of one copy of all caches."""
    return sum(math.prod(c.logical_shape(batch)) * numpy_dtype(c.role.dtype, twin=twin).itemsize for c in caches)


def first_contents(
    cache: CacheTensor, histories: Sequence[int], garbage: float, rng: np.random.Generator, *, twin: bool
) -> Array:
    """Logical contents before the first step: values of a plausible size where history lies, garbage and 0 elsewhere.

    Args:
        cache: the cache.
        histories: tokens written to each row of the batch so far.
        garbage: magnitude of floating-point garbage, with random signs (integers take any value); 0: zeros. Finite,
            because ONNX's own Attention makes NaN of a masked NaN.
        rng: of contents and signs.
        twin: bfloat16 is held as float32.
    """
    dtype = numpy_dtype(cache.role.dtype, twin=twin)
    shape = cache.logical_shape(len(histories))
    plausible = _values(shape, dtype, rng, lambda n: rng.uniform(-1, 1, n))
    if cache.update is None:
        plausible[[tokens == 0 for tokens in histories]] = 0  # state starts from zeros
        return plausible
    axis, capacity = cache.update.sequence_axis, cache.update.capacity
    contents = np.zeros(shape, dtype)
    if garbage:  # every other row stays 0, as sessions start: a division by its norm would show
        whole = _values(shape, dtype, rng, lambda n: rng.choice([-garbage, garbage], n))
        np.moveaxis(contents, axis, 1)[:, ::2] = np.moveaxis(whole, axis, 1)[:, ::2]
    for row, tokens in enumerate(histories):
        # Linear caches never hold more tokens than rows; circular ones keep the newest.
        rows = slice(0, min(tokens, capacity))
        np.moveaxis(contents, axis, 1)[row, rows] = np.moveaxis(plausible, axis, 1)[row, rows]
    return contents


def _values(shape: tuple[int, ...], dtype: np.dtype[Any], rng: np.random.Generator, draw: Any) -> Array:
    count = math.prod(shape)
    if dtype.kind in "iub":  # quantized and raw bytes: the whole range is both plausible and garbage
        low, high = (0, 2) if dtype.kind == "b" else (np.iinfo(dtype).min, np.iinfo(dtype).max)
        block = rng.integers(low, high, min(count, _BLOCK), dtype=np.int8 if dtype.kind == "b" else dtype)
    else:
        block = draw(min(count, _BLOCK))
    return np.resize(block.astype(dtype), shape)

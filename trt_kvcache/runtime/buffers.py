"""Describes the buffers that a session keeps from step to step: caches and state.

A batch row of a cache has one cache row for each token. A batch row of state is one value for the whole sequence.
Both are addressed by ranges of tokens: a range that includes the first token includes the state.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any

import numpy as np

from trt_kvcache.dtypes import array_dtype
from trt_kvcache.importer.cache_plan import CachePlan, CacheUpdate, Dim, UpdateMode


def carried_caches(plan: CachePlan) -> tuple[CacheUpdate, ...]:
    """Return the caches of a plan that the caller keeps from step to step."""
    return tuple(c for c in plan.caches if c.carried)


def linear_capacity(plan: CachePlan) -> int | None:
    """Return the most tokens of a sequence, without padding, in the linear caches; None if all caches are circular."""
    linear = [c for c in carried_caches(plan) if c.mode is UpdateMode.LINEAR]
    return min((c.capacity - filled_up(c) for c in linear), default=None)


def filled_up(cache: CacheUpdate) -> int:
    """Return the padding tokens in a step with one real token, if the update length is fixed; else 0."""
    return cache.update_length - 1 if isinstance(cache.update_length, int) else 0


@dataclass(frozen=True)
class Carried:
    """The buffer of one cache or one state.

    A batch row of a cache has `planes` parts (such as heads), each with `capacity` cache rows of `width` numbers. A
    batch row of state counts as a single cache row.

    Attributes:
        past, present: names of the graph's input and output.
        shape: physical shape, batch first.
        axis: index of the sequence axis in `shape`; None for state.
        capacity: tokens along `axis`; 1 for state.
        in_place: True if past and present are one buffer; otherwise a step reads one buffer and writes another.
    """

    past: str
    present: str
    dtype: str
    shape: tuple[Dim, ...]
    axis: int | None
    capacity: int
    in_place: bool

    @property
    def is_state(self) -> bool:
        """True for state, False for a cache."""
        return self.axis is None

    @cached_property
    def array_dtype(self) -> np.dtype[Any]:
        """The NumPy dtype of the buffer."""
        return array_dtype(self.dtype)

    @cached_property
    def planes(self) -> int:
        """Number of parts, such as heads, in a batch row."""
        return prod(map(int, self.shape[1 : self.axis or 1]))

    @cached_property
    def width(self) -> int:
        """Number of elements in one cache row of one part (such as a head)."""
        return prod(map(int, self.shape[(self.axis or 0) + 1 :]))

    @property
    def row_bytes(self) -> int:
        """Bytes of one batch row, as NumPy stores it: elements of 4 bits take a byte each."""
        return self.range_bytes(0, self.capacity)

    def places(self, start: int, stop: int) -> tuple[int, int]:
        """Return the first index along `axis` of tokens ``start .. stop - 1``, and the index after their last one.

        State has the range (0, 1) if `start` is 0, and an empty range otherwise.
        """
        if self.axis is None:
            return 0, int(start == 0)
        return start, max(start, min(stop, self.capacity))

    def row_shape(self, tokens: int) -> tuple[int, ...]:
        """Return the shape of the part of a batch row that holds the first `tokens` tokens."""
        sizes = [int(d) for d in self.shape[1:]]
        if self.axis is not None:
            sizes[self.axis - 1] = min(tokens, self.capacity)
        return tuple(sizes)

    def range_bytes(self, start: int, stop: int) -> int:
        """Return the bytes of tokens ``start .. stop - 1`` in one batch row."""
        first, last = self.places(start, stop)
        return self.planes * (last - first) * self.width * self.array_dtype.itemsize


def carried_buffers(plan: CachePlan) -> tuple[Carried, ...]:
    """Return the buffers that the caller keeps from step to step: first caches, then state."""
    caches = [
        Carried(c.past, c.present, c.dtype, c.physical_shape, c.physical_sequence_axis, c.capacity, c.in_place)
        for c in carried_caches(plan)
    ]
    states = [Carried(s.past, s.present, s.dtype, s.shape, None, 1, in_place=False) for s in plan.states]
    return (*caches, *states)


def why_no_return(plan: CachePlan, *, rings: bool) -> str:
    """Return why a sequence of this model cannot drop its latest tokens and continue; empty if it can.

    With `rings`, circular caches are also a reason, because they lose the beginning of a long sequence.
    """
    if plan.states:
        return f"the model keeps state ('{plan.states[0].past}') that every step replaces"
    if plan.prefill_in_one_step:
        return "tokens of one step see later ones in this model"
    ring = next((c for c in carried_caches(plan) if c.mode is UpdateMode.CIRCULAR), None)
    if rings and ring is not None:
        return f"circular cache '{ring.past}' holds the last {ring.capacity} tokens of a text, and not its beginning"
    return ""

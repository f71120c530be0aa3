"""Describes the buffers that a session keeps from step to step: caches and state.

A batch row of a cache has one cache row for each token along its sequence axis. A batch row of state is one value for
the whole text. Callers name parts of both by ranges of *tokens*; state belongs to the first token.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any

import numpy as np

from trt_kvcache.dtypes import array_dtype
from trt_kvcache.importer.plan import CachePlan, CacheUpdate, Dim, UpdateMode


def carried_caches(plan: CachePlan) -> tuple[CacheUpdate, ...]:
    """Return the caches of a plan that the caller keeps from step to step."""
    return tuple(c for c in plan.caches if c.carried)


def linear_capacity(plan: CachePlan) -> int | None:
    """Return the largest number of tokens that a sequence may have in the linear caches; None if all are circular.

    If every step writes a fixed number of tokens, the padding tokens of the last step must fit, too.
    """
    linear = [c for c in carried_caches(plan) if c.mode is UpdateMode.LINEAR]
    return min((c.capacity - filled_up(c) for c in linear), default=None)


def filled_up(cache: CacheUpdate) -> int:
    """Return the number of padding tokens in a step with one real token. It is 0 if the update length is dynamic."""
    return cache.update_length - 1 if isinstance(cache.update_length, int) else 0


@dataclass(frozen=True)
class Carried:
    """The buffer of one cache or one state.

    A batch row of a cache consists of `planes` parts (such as heads). Each part has `capacity` cache rows of `width`
    numbers. A batch row of state counts as a single cache row.

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
        """True if this is the buffer of a state, False if it is that of a cache."""
        return self.axis is None

    @cached_property
    def array_dtype(self) -> np.dtype[Any]:
        """The NumPy dtype of the buffer."""
        return array_dtype(self.dtype)

    @cached_property
    def planes(self) -> int:
        """Number of separate parts (such as heads) in a batch row. Each has `capacity` cache rows."""
        return prod(map(int, self.shape[1 : self.axis or 1]))

    @cached_property
    def width(self) -> int:
        """Number of elements in one cache row of one head (or other separate part of a batch row)."""
        return prod(map(int, self.shape[(self.axis or 0) + 1 :]))

    @property
    def row_bytes(self) -> int:
        """Bytes of one batch row, as NumPy stores it: elements of 4 bits take a byte each."""
        return self.range_bytes(0, self.capacity)

    def places(self, start: int, stop: int) -> tuple[int, int]:
        """Return the first index along `axis` of tokens ``start .. stop - 1``, and the index after their last one.

        For state, return the whole range (0, 1) if `start` is 0, and an empty range otherwise.
        """
        if self.axis is None:
            return 0, int(start == 0)
        return start, max(start, min(stop, self.capacity))

    def row_shape(self, tokens: int) -> tuple[int, ...]:
        """Return the shape of that part of a batch row that holds the first `tokens` tokens."""
        sizes = [int(d) for d in self.shape[1:]]
        if self.axis is not None:
            sizes[self.axis - 1] = min(tokens, self.capacity)
        return tuple(sizes)

    def range_bytes(self, start: int, stop: int) -> int:
        """Return how many bytes tokens ``start .. stop - 1`` take in one batch row."""
        first, last = self.places(start, stop)
        return self.planes * (last - first) * self.width * self.array_dtype.itemsize


def carried_buffers(plan: CachePlan) -> tuple[Carried, ...]:
    """Return a `Carried` for each cache that the caller keeps from step to step, followed by one for each state."""
    caches = [
        Carried(c.past, c.present, c.dtype, c.physical_shape, c.physical_sequence_axis, c.capacity, c.in_place)
        for c in carried_caches(plan)
    ]
    states = [Carried(s.past, s.present, s.dtype, s.shape, None, 1, in_place=False) for s in plan.states]
    return (*caches, *states)


def why_no_return(plan: CachePlan, *, rings: bool) -> str:
    """Return why a sequence of this model cannot drop its latest tokens and continue without them; empty if it can.

    Args:
        plan: plan of the model.
        rings: count circular caches as a reason, because a text may be longer than such a cache.
    """
    if plan.states:
        return f"the model keeps state ('{plan.states[0].past}') that every step replaces"
    if plan.prefill_in_one_step:
        return "tokens of one step see later ones in this model"
    ring = next((c for c in carried_caches(plan) if c.mode is UpdateMode.CIRCULAR), None)
    if rings and ring is not None:
        return f"circular cache '{ring.past}' holds the last {ring.capacity} tokens of a text, and not its beginning"
    return ""

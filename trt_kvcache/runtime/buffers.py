"""Describes the buffers that a session keeps from step to step, caches and state, in one way.

A batch row of a cache has one place per token along its sequence axis. A batch row of state is one value for the whole
text. Rows are therefore moved by ranges of *tokens*; state moves with the first token.
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
    """Return the caches that the caller keeps from step to step."""
    return tuple(c for c in plan.caches if c.carried)


def linear_capacity(plan: CachePlan) -> int | None:
    """Return the largest number of tokens that a sequence may have in the linear caches.

    None if all caches are circular, because these never fill up.

    If every step writes a fixed number of tokens, the whole last step must fit, however few tokens it is asked for.
    """
    linear = [c for c in carried_caches(plan) if c.mode is UpdateMode.LINEAR]
    return min((c.capacity - filled_up(c) for c in linear), default=None)


def filled_up(cache: CacheUpdate) -> int:
    """Return how many padding tokens a step writes beside one real token."""
    return cache.update_length - 1 if isinstance(cache.update_length, int) else 0


@dataclass(frozen=True)
class Carried:
    """One buffer: a cache or a state.

    A batch row is `planes` runs of `capacity` cache rows of `width` numbers; state is one cache row.

    Attributes:
        past, present: names of the graph's input and output.
        shape: physical shape, batch first.
        axis: index of the sequence axis in `shape`; None for state.
        capacity: tokens along `axis`; 1 for state.
        in_place: past and present are one buffer; else a step reads one and writes the other.
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
        """Number of runs of cache rows in a batch row."""
        return prod(map(int, self.shape[1 : self.axis or 1]))

    @cached_property
    def width(self) -> int:
        """Numbers in one cache row of one plane."""
        return prod(map(int, self.shape[(self.axis or 0) + 1 :]))

    @property
    def row_bytes(self) -> int:
        """Bytes of one batch row, as NumPy stores it: elements of 4 bits take a byte each."""
        return self.range_bytes(0, self.capacity)

    def places(self, start: int, stop: int) -> tuple[int, int]:
        """Return the range along `axis` that tokens ``start .. stop - 1`` take.

        For state, this is everything if `start` is 0, and nothing otherwise.
        """
        if self.axis is None:
            return 0, int(start == 0)
        return start, max(start, min(stop, self.capacity))

    def row_shape(self, tokens: int) -> tuple[int, ...]:
        """Return the shape of the first `tokens` tokens of one batch row."""
        sizes = [int(d) for d in self.shape[1:]]
        if self.axis is not None:
            sizes[self.axis - 1] = min(tokens, self.capacity)
        return tuple(sizes)

    def range_bytes(self, start: int, stop: int) -> int:
        """Return the bytes of the range `places` of one batch row."""
        first, last = self.places(start, stop)
        return self.planes * (last - first) * self.width * self.array_dtype.itemsize


def carried_buffers(plan: CachePlan) -> tuple[Carried, ...]:
    """Return all caches that the caller keeps, then all state."""
    caches = [
        Carried(c.past, c.present, c.dtype, c.physical_shape, c.physical_sequence_axis, c.capacity, c.in_place)
        for c in carried_caches(plan)
    ]
    states = [Carried(s.past, s.present, s.dtype, s.shape, None, 1, in_place=False) for s in plan.states]
    return (*caches, *states)


def why_no_return(plan: CachePlan, *, rings: bool) -> str:
    """Return why a sequence cannot go back to its first tokens after other tokens followed them; empty if it can.

    Args:
        plan: plan of the model.
        rings: circular caches count as a reason, too, because the text may be longer than they are.
    """
    if plan.states:
        return f"the model keeps state ('{plan.states[0].past}') that every step replaces"
    if plan.prefill_in_one_step:
        return "tokens of one step see later ones in this model"
    ring = next((c for c in carried_caches(plan) if c.mode is UpdateMode.CIRCULAR), None)
    if rings and ring is not None:
        return f"circular cache '{ring.past}' holds the last {ring.capacity} tokens of a text, and not its beginning"
    return ""

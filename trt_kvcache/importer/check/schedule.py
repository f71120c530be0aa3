"""The steps that a region runs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import permutations

from trt_kvcache.importer.steps.step import Limits, Step

_MOST_INTEGERS = 8
_LARGEST_BATCH = 64
_LONGEST_PROMPT = 2048  # tokens; masks have that squared
_MANY = 128  # tokens of a step that costs much: it runs after the least and the most tokens of all pairs
_LONG = 1 << 14  # rows
_FARTHEST = 1 << 20  # tokens of a text, where every cache is circular
_PLAIN = ((0, 4), (5, 3), (9, 1), (1, 1), (0, 1), (7, 8), (11, 2), (0, 9))
"""Tokens before a step and new ones: short and long, from an empty past on."""
_RAGGED = (((0, 5, 11), 2), ((12, 1), 1), ((3, 0), 3))
_SHORT = (((3, 4), (2, 0)), ((0, 2, 0), (1, 3, 0)), ((4, 1), (1, 2)), ((2, 0), (0, 1)))
"""Tokens before a step, and how many of the new ones count: 0 is an idle row."""


def rows_needed(integers: Iterable[int], longest: int) -> int:
    """Rows that a cache needs for every step of the schedule that does not end at the capacity."""
    return max([*(past + length for past, length in _PLAIN), *(k + longest for k in integers)]) + 3


def plan_steps(limits: Limits, integers: Iterable[int], capacity: int, *, thorough: bool = False) -> list[Step]:
    """Plan steps near every integer, at the end of the capacity and across wraps, with ragged and idle rows.

    Args:
        limits: of the model.
        integers: integers with which the region computes lengths; the eight smallest are used.
        capacity: rows of its linear caches.
        thorough: steps after a past of every length, too.
    """
    return _fitting(_all(limits, sorted(integers), capacity, thorough=thorough), limits, capacity)


def end_steps(limits: Limits, capacity: int) -> list[Step]:
    """Steps that end near the capacity; a single step if the capacity is long, since each step copies whole caches."""
    steps = [_even(1, capacity - 1, 1), _even(1, capacity - 4, 4), _even(2, capacity - 2, 1)]
    return _fitting(steps[:1] if capacity > _LONG else steps, limits, capacity)


def _fitting(steps: Iterable[Step], limits: Limits, capacity: int) -> list[Step]:
    """Adapt each step to the limits of the model, without duplicates."""
    return list(dict.fromkeys(s for step in steps if (s := _fit(step, limits, capacity)) is not None))


def _all(limits: Limits, integers: list[int], capacity: int, *, thorough: bool) -> Iterator[Step]:
    for i, (past, length) in enumerate(_PLAIN):
        yield _even(1 + i % 2, past, length)
    for past, length in ((capacity - 1, 1), (capacity - 4, 4), (capacity - 2, 1)):
        yield _even(1, past, length)
    most = capacity if limits.linear is not None else max(capacity, _FARTHEST)
    near = [k for k in integers if 1 < k <= most][:_MOST_INTEGERS]
    for k in near:
        for past, length in ((k - 2, 1), (k - 1, 1), (k, 1), (k + 1, 1), (k - 2, 4), (k, 3)):
            yield _even(1, past, length)
        if k <= _LARGEST_BATCH:
            yield _even(k, 3, 2)
            yield _even(k + 1, 3, 2)
        for length in (k - 1, k, k + 1):
            if length <= _LONGEST_PROMPT:
                yield _even(1, 0, length)
    for k, other in permutations(near, 2):  # P and S, P and P + S
        others = [n for n in near if n != other]
        if other > _MANY and k not in (others[0], others[-1]):
            continue
        if other <= _LONGEST_PROMPT:
            yield _even(1, k, other)
            yield _even(1, k + 1, other + 1)
        if 0 < other - k <= _LONGEST_PROMPT:
            yield _even(1, k, other - k)
    for rows in limits.circular:
        for batch, past, length in (
            (1, rows - 1, 1), (1, rows, 1), (2, rows, 2), (1, 2 * rows - 1, 1), (2, 3 * rows, 1), (1, rows + 2, 3),
        ):  # fmt: skip
            yield _even(batch, past, length)
    for starts, length in _RAGGED:
        yield Step(length, starts, tuple(p + length for p in starts))
    if limits.lengths:
        for starts, counts in _SHORT:
            length = max(counts)
            yield Step(length, starts, tuple(p + n if n else 0 for p, n in zip(starts, counts, strict=True)))
    if thorough:
        for past in range(min(capacity, 4096)):
            yield _even(1, past, 1)
            yield _even(1, past, 3)


def _even(batch: int, past: int, length: int) -> Step:
    return Step(length, (past,) * batch, (past + length,) * batch)


def _fit(step: Step, limits: Limits, capacity: int) -> Step | None:
    """Adapt a step to the limits of the model; None if no similar step fits."""
    length, starts = step.length, step.starts
    counts = [v - s if v else 0 for s, v in zip(starts, step.valid, strict=True)]
    if limits.length is not None and length != limits.length:
        counts = [limits.length if n == length else min(n, limits.length) for n in counts]
        length = limits.length
    if not limits.ragged:
        starts, counts = (starts[0],) * len(starts), [counts[0]] * len(counts)
    if not limits.indexed:
        starts = (0,) * len(starts)
    if limits.fixed_batch:
        starts = tuple((starts * limits.batch)[: limits.batch])
        counts = (counts * limits.batch)[: limits.batch]
    if length > limits.longest or length < 1 or min(starts) < 0:
        return None
    if limits.linear is not None and any(s + length > capacity for s in starts):
        return None
    if any(s % rows + length > rows for rows in limits.no_straddle for s in starts):
        return None
    return Step(length, starts, tuple(s + n if n else 0 for s, n in zip(starts, counts, strict=True)))

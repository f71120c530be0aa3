"""Inputs of a sequence beside its token ids: embeddings until they are written, and positions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["IN_ORDER", "NO_EMBEDS", "Embeds", "Positions", "stack_positions"]

Array = npt.NDArray[Any]
Indices = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Embeds:
    """The caller's embeddings of some tokens that are not in the cache yet.

    Attributes:
        at: int64 ``[K]``, ascending: indices of the tokens.
        rows: ``[K, H]``, in the model's dtype.
    """

    at: Indices
    rows: Array

    def within(self, start: int, stop: int | None = None) -> Embeds:
        """Return the embeddings of tokens ``start .. stop - 1``; None as `stop`: all from `start` on."""
        if not len(self.at):
            return self
        first, last = np.searchsorted(self.at, [start, self.at[-1] + 1 if stop is None else stop])
        # A view of no rows would keep the memory of all rows.
        return Embeds(self.at[first:last], self.rows[first:last]) if first < last else NO_EMBEDS

    def followed(self, start: int, rows: Array) -> Embeds:
        """Return a copy with embeddings for tokens from `start` on; `start` is after all present ones."""
        at = np.arange(start, start + len(rows), dtype=np.int64)
        if not len(self.at):
            return Embeds(at, rows)
        return Embeds(np.concatenate([self.at, at]), np.concatenate([self.rows, rows]))


NO_EMBEDS = Embeds(np.empty(0, np.int64), np.empty((0, 0)))
"""For sequences whose tokens are ids alone."""


@dataclass(frozen=True, eq=False)
class Positions:
    """The positions of a sequence's tokens: first the caller's, then consecutive ones.

    A token without a position of its own comes one after the largest position before it, in every plane
    (``rope_deltas`` in transformers). A token sees all tokens before it in the sequence; positions do not change that.

    Attributes:
        array: int64 ``[planes, K]``: positions of the first K tokens; K may be 0.
        next: position of the next token after these.
    """

    array: Indices
    next: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "next", int(self.array.max(initial=-1)) + 1)

    def __bool__(self) -> bool:
        return bool(self.array.shape[1])

    def of(self, start: int, stop: int) -> Indices:
        """Return the positions of tokens ``start .. stop - 1``, int64 ``[planes, stop - start]``."""
        count = self.array.shape[1]
        known = self.array[:, start:stop]
        follow = np.arange(max(start, count), max(stop, count)) - count + self.next
        return np.concatenate([known, np.broadcast_to(follow, (len(self.array), len(follow)))], axis=1)

    def after(self, length: int) -> int:
        """Return the position of the token after the first `length`; `length` is at least K."""
        return self.next + length - int(self.array.shape[1])

    def followed(self, length: int, positions: Indices) -> Positions:
        """Return a copy in which tokens after the first `length` have these positions, int64 ``[planes, S]``."""
        before = np.broadcast_to(self.of(0, length), (len(positions), length))
        return Positions(np.concatenate([before, positions], axis=1))

    def first(self, length: int) -> Positions:
        """Return the positions of the first `length` tokens."""
        return self if length >= self.array.shape[1] else Positions(self.array[:, :length])


IN_ORDER = Positions(np.empty((1, 0), np.int64))
"""For sequences without positions of the caller: 0, 1, 2, ..."""


def stack_positions(rows: Sequence[Positions], starts: Sequence[int], length: int) -> npt.NDArray[np.int64] | None:
    """Return the positions of `length` tokens in each row, int64 ``[R, planes, length]``; None if all are in order.

    If all tokens come after the caller's positions, as in decoding, there is one plane.
    """
    if not any(rows):
        return None
    if all(start >= row.array.shape[1] for row, start in zip(rows, starts, strict=True)):
        first = np.array([row.after(start) for row, start in zip(rows, starts, strict=True)], np.int64)
        return first[:, np.newaxis, np.newaxis] + np.arange(length)
    planes = max(len(row.array) for row in rows)
    parts = [row.of(start, start + length) for row, start in zip(rows, starts, strict=True)]
    return np.stack([np.broadcast_to(part, (planes, length)) for part in parts])

"""Inputs of a sequence: token ids, positions, and the caller's embeddings of tokens that are not in the cache yet."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from trt_kvcache.arguments import shown
from trt_kvcache.errors import PromptError
from trt_kvcache.importer.cache_plan import CachePlan, Role
from trt_kvcache.input_values import axes_with_planes, fixed_length, named_axes


def read_ids(tokens: object, vocab: int) -> list[int]:
    """Return token ids as a list. Raises `PromptError` if `tokens` is not a flat list of ids 0 to ``vocab - 1``."""
    if isinstance(tokens, Iterable) and not (hasattr(tokens, "__array__") or isinstance(tokens, (Sequence, Mapping))):
        tokens = list(tokens)
    try:
        array = np.asarray(tokens)
    except ValueError:
        raise PromptError("a prompt must be a flat list of token ids (whole numbers); got a nested list") from None
    if array.size == 0:
        return []
    # too large for NumPy's integers
    huge = array.dtype.kind == "O" and all(isinstance(token, int) for token in array.flat)
    if array.ndim != 1 or not (array.dtype.kind in "iu" or huge):
        raise PromptError(
            f"a prompt must be a flat list of token ids (whole numbers); got {array.dtype} {list(array.shape)}"
        )
    wrong = array[(array < 0) | (array >= vocab)]
    if wrong.size:
        raise PromptError(f"token id {shown(int(wrong[0]))} is out of range; the model has 0 to {vocab - 1}")
    ids: list[int] = array.tolist()
    return ids


def common_length(one: Sequence[int], other: Sequence[int]) -> int:
    """Return how many leading tokens two sequences share. Slices are compared, which is faster than single tokens."""
    same, most = 0, min(len(one), len(other))
    while same < most:
        middle = (same + most + 1) // 2
        if one[same:middle] == other[same:middle]:
            same = middle
        else:
            most = middle - 1
    return same


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
        """Return the embeddings of tokens ``start .. stop - 1``; if `stop` is None, of all tokens from `start` on."""
        if not len(self.at):
            return self
        first, last = np.searchsorted(self.at, [start, self.at[-1] + 1 if stop is None else stop])
        # An empty view would keep the memory of all rows alive.
        return Embeds(self.at[first:last], self.rows[first:last]) if first < last else NO_EMBEDS

    def followed(self, start: int, rows: Array) -> Embeds:
        """Return a copy with more embeddings: `rows`, for tokens from `start` on. All of `at` must be below it."""
        at = np.arange(start, start + len(rows), dtype=np.int64)
        if not len(self.at):
            return Embeds(at, rows)
        return Embeds(np.concatenate([self.at, at]), np.concatenate([self.rows, rows]))


NO_EMBEDS = Embeds(np.empty(0, np.int64), np.empty((0, 0)))
"""The embeddings of a sequence for which the caller gives none."""


@dataclass(frozen=True, eq=False)
class Positions:
    """The positions of a sequence's tokens: first the caller's, then consecutive ones.

    If the caller gives a token no position, it gets the largest earlier position plus one, in every plane
    (``rope_deltas`` in transformers). Planes are the several positions of one token, such as 3 with M-RoPE. A token
    sees all tokens before it in the sequence, whatever their positions.

    Attributes:
        array: int64 ``[planes, K]``: positions of the first K tokens; K may be 0.
        next: position of the token after the first K.
    """

    array: Indices
    next: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "next", int(self.array.max(initial=-1)) + 1)

    def __bool__(self) -> bool:
        return bool(self.array.shape[1])

    def of(self, start: int, stop: int) -> Indices:
        """Return positions of tokens ``start .. stop - 1``: int64 ``[planes, stop - start]`` (3 planes with M-RoPE)."""
        count = self.array.shape[1]
        known = self.array[:, start:stop]
        follow = np.arange(max(start, count), max(stop, count)) - count + self.next
        return np.concatenate([known, np.broadcast_to(follow, (len(self.array), len(follow)))], axis=1)

    def after(self, length: int) -> int:
        """Return the position of the token that follows the first `length` tokens; `length` is at least K."""
        return self.next + length - int(self.array.shape[1])

    def followed(self, length: int, positions: Indices) -> Positions:
        """Return a copy in which the tokens after the first `length` have `positions`, int64 ``[planes, S]``."""
        before = np.broadcast_to(self.of(0, length), (len(positions), length))
        return Positions(np.concatenate([before, positions], axis=1))

    def first(self, length: int) -> Positions:
        """Return the positions of the first `length` tokens."""
        return self if length >= self.array.shape[1] else Positions(self.array[:, :length])


IN_ORDER = Positions(np.empty((1, 0), np.int64))
"""The positions of a sequence for which the caller gives none: 0, 1, 2, ..."""


def stack_positions(rows: Sequence[Positions], starts: Sequence[int], length: int) -> npt.NDArray[np.int64] | None:
    """Return the positions of `length` tokens in each row, int64 ``[R, planes, length]``; None if all are consecutive.

    If all tokens come after the caller's positions, as in decoding, `planes` (positions per token) is 1.
    """
    if not any(rows):
        return None
    if all(start >= row.array.shape[1] for row, start in zip(rows, starts, strict=True)):
        first = np.array([row.after(start) for row, start in zip(rows, starts, strict=True)], np.int64)
        return first[:, np.newaxis, np.newaxis] + np.arange(length)
    planes = max(len(row.array) for row in rows)
    parts = [row.of(start, start + length) for row, start in zip(rows, starts, strict=True)]
    return np.stack([np.broadcast_to(part, (planes, length)) for part in parts])


class PositionInput:
    """Checks the positions that callers give against the model's input for positions.

    Attributes:
        planes: positions of each token: 3 for time, height and width (M-RoPE); 0 if the model takes no positions.
    """

    def __init__(self, plan: CachePlan) -> None:
        inputs = [named_axes(t, plan) for t in plan.tensors if t.io == "input" and t.role is Role.POSITIONS]
        self._names = ", ".join(f"'{t.name}' {list(t.shape)}" for t in inputs)
        self.planes = 0
        if not inputs:
            self._why = "the model has no input of positions"
        elif len(inputs) > 1:
            self._why = f"the model has several inputs of positions ({self._names}), which may count different things"
        elif not {"sequence", "tokens"} & set(inputs[0].axes) and fixed_length(plan) != 1:
            self._why = f"the model takes one position for a whole step ({self._names}), not one for each token"
        else:
            (tensor,) = inputs
            planar = len(tensor.shape) == 3
            self.planes = int(tensor.shape[axes_with_planes(tensor).index("planes")]) if planar else 1

    def read(self, values: Any, count: int) -> Indices:
        """Check a prompt's positions; return int64 ``[planes, count]``, `planes` positions for each token.

        `values` are ``[count]`` (the same for all planes), ``[planes, count]`` or ``[planes, 1, count]``. Raises
        `PromptError` if the model takes no positions, or they have another shape, or are negative.
        """
        if not self.planes:
            raise PromptError(f"positions are given, but {self._why}; leave the positions out")
        try:
            array = np.asarray(values)
        except ValueError:
            raise PromptError("positions are a list of lists of different lengths") from None
        array = array[:, 0] if array.ndim == 3 and array.shape[1] == 1 else array
        array = array[np.newaxis] if array.ndim == 1 else array
        shapes = (1, count), (self.planes, count)
        if array.shape not in shapes or array.dtype.kind not in "iu":
            wanted = f"[{count}]" + (f" or [{self.planes}, {count}]" if self.planes > 1 else "")
            raise PromptError(
                f"positions are {array.dtype} {list(np.shape(values))}; for a prompt of {count} tokens the model takes "
                f"integers {wanted} ({self._names})"
            )
        if count and int(array.min()) < 0:
            raise PromptError(f"position {int(array.min())} is negative; positions count from 0")
        return np.array(np.broadcast_to(array, (self.planes, count)), np.int64)

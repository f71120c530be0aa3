"""Computes the inputs of a step that follow from its lengths: positions, write indices, valid lengths, masks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from trt_kvcache.errors import UnsupportedModelError
from trt_kvcache.importer.cache_plan import CachePlan, CacheUpdate, Dim, Role, TensorRole

Array = npt.NDArray[Any]
Indices = npt.NDArray[np.int64]
Named = tuple[Array, tuple[str, ...]]
"""Values, and the names of their axes, from which `place` makes a tensor's shape."""

_ORDER = {
    Role.TOKENS: ("batch", "sequence"),
    Role.POSITIONS: ("batch", "sequence"),
    Role.WRITE_INDICES: ("batch",),
    Role.VALID_LENGTHS: ("batch",),
    Role.ADAPTER: ("batch",),
    Role.LOGITS: ("batch", "sequence"),
}
"""For each role of a tensor: its axes, in order. A tensor with fewer axes lacks the first or the last one."""


def axis_sizes(rows: int, length: int) -> dict[str, int]:
    """Return the sizes of a plan's axes, by name, in a step of `length` tokens in each of `rows` rows."""
    return {"batch": rows, "sequence": length, "tokens": rows * length, "batch+1": rows + 1}


def from_lengths(role: Role, starts: Indices, length: int, valid: Indices) -> Named | None:
    """Return the values for an input with this role: positions, write indices or lengths; None for other roles.

    `starts` (int64 ``[R]``) counts all tokens of each row before the step, also those that a circular cache has lost.
    `length` is the number of new tokens of each row, and `valid` (int64 ``[R]``) the valid cache rows after the step.
    """
    match role:
        case Role.POSITIONS:
            return starts[:, np.newaxis] + np.arange(length), ("batch", "sequence")
        case Role.WRITE_INDICES:
            return starts, ("batch",)
        case Role.VALID_LENGTHS:
            return valid, ("batch",)
        case Role.UPDATE_LENGTHS:
            return np.arange(len(starts) + 1) * length, ("batch+1",)
        case _:
            return None


def newest_tokens(starts: Indices, length: int, keys: int, ring: int | None = None) -> tuple[Indices, Indices]:
    """Return the token indices of cache rows ``[R, 1, keys]`` after a step, and of new tokens ``[R, S, 1]``.

    A cache row without a token has a negative index, or one above all new tokens. A new token sees the cache rows with
    a token index of at least 0 and at most its own. `starts` (int64 ``[R]``) is the number of tokens of each row before
    the step, `length` the number of new ones, and `ring` the capacity of a circular cache; None for linear ones.
    """
    new = starts[:, np.newaxis, np.newaxis] + np.arange(length)[:, np.newaxis]
    row = np.arange(keys)
    if ring is None:
        return row[np.newaxis, np.newaxis], new
    last = new[:, -1:]
    return np.where(row < ring, last - (last - row) % ring, -1), new


def caches_under(plan: CachePlan, name: str) -> list[CacheUpdate]:
    """Return the caches that attention reads with the lengths or mask input `name`; empty if the plan does not tell."""
    geometries = {g.name for g in plan.masks if name in (g.lengths, g.mask)}
    read = {past for a in plan.attention if a.mask in geometries for past in a.caches}
    return [c for c in plan.caches if c.past in read]


def by_token(values: Array, tensor: TensorRole) -> Named:
    """Return values ``[R, S, ...]`` and their axes. R and S are joined if `tensor` has one axis for both."""
    if "tokens" in tensor.axes:
        return values.reshape(-1, *values.shape[2:]), ("tokens",)
    return values, ("batch", "sequence")


def place(named: Named, shape: Sequence[int], axes: Sequence[str]) -> Array:
    """Return values in the shape `shape` of a tensor with the axes `axes`; the caller must not change the result.

    - An axis without a name in `axes` stands for the first unused axis of the values that has its size.
    - The last axis of a mask holds the keys.
    - Values are repeated along the other axes of the tensor.
    - If the tensor lacks an axis of the values, one entry is kept: the last token of a sequence, the first row of a
      batch.
    """
    values, names = named
    if tuple(axes) == names:
        return np.broadcast_to(values, shape)
    sizes = dict(zip(names, values.shape, strict=True))
    order: list[str | None] = [axis if axis in names else None for axis in axes]
    if "keys" in names and order and "keys" not in order:
        order[-1] = "keys"
    for at, size in enumerate(shape):
        if order[at] is None and not (axes[at] and axes[at] != "?"):
            order[at] = next((n for n in names if n not in order and sizes[n] == size), None)
    for name in names:
        if name not in order:
            values = np.take(values, [-1 if name == "sequence" else 0], axis=names.index(name))
    # Axes that the tensor does not have are of size 1 now. They go to the end, where the reshape drops them.
    kept = [names.index(n) for n in order if n is not None]
    values = values.transpose([*kept, *(i for i, n in enumerate(names) if n not in order)])
    return np.broadcast_to(values.reshape([sizes[n] if n is not None else 1 for n in order]), shape)


def fixed_rows(plan: CachePlan) -> int | None:
    """Return the one batch size of caches, states and constants (None: dynamic), or raise `UnsupportedModelError`."""
    carried = [*(c.physical_shape for c in plan.caches if c.carried), *(s.shape for s in plan.states)]
    shapes = [*carried, *(t.shape for t in plan.tensors if t.role is Role.CONSTANT and t.io == "input")]
    sizes = sorted({shape[0] for shape in shapes if shape and isinstance(shape[0], int)})
    if len(sizes) > 1:
        raise UnsupportedModelError(
            f"the model's caches, states and constants have batches of {' and '.join(map(str, sizes))}; export all "
            "with one batch size, or a dynamic one"
        )
    return sizes[0] if sizes else None


def fixed_length(plan: CachePlan) -> int | None:
    """Return the fixed number of new tokens per row and step; None if the model's updates have a dynamic number."""
    lengths = {c.update_length for c in plan.caches if c.carried and isinstance(c.update_length, int)}
    return min(lengths, default=None)


def named_axes(tensor: TensorRole, plan: CachePlan) -> TensorRole:
    """Return the tensor with names for fixed axes, too: "batch", and "sequence" (new tokens), unless the size is 1."""
    sizes: dict[str, Dim | None] = {"batch": fixed_rows(plan), "sequence": fixed_length(plan)}
    axes, rank = list(tensor.axes), len(tensor.shape)
    indexed = rank - 1 if tensor.embedded else rank  # the last axis of embeddings is the width
    if tensor.role is Role.MASK:  # [B, 1, S, L], [B, S, L] or [B, L]
        places = {"batch": 0} | ({"sequence": rank - 2} if rank > 2 else {})
    else:
        places = {name: i for i, name in enumerate(_ORDER.get(tensor.role, ())[:indexed])}
        if indexed == 1 and tensor.role in (Role.TOKENS, Role.POSITIONS) and tensor.shape[0] == sizes["sequence"]:
            places = {"sequence": 0}
        elif rank == 3 and tensor.role is Role.POSITIONS:  # [planes, B, S]; the plan names the batch
            places = {"sequence": 2}
        elif rank == 2 and tensor.role is Role.LOGITS:
            places = {"batch": 0}
    for name, axis in places.items():
        if axis < rank and not axes[axis] and tensor.shape[axis] == sizes[name] != 1:
            axes[axis] = name
    return replace(tensor, axes=tuple(axes))


def axes_with_planes(tensor: TensorRole) -> tuple[str, ...]:
    """Return the axes of a positions input ``[planes, B, S]`` or ``[B, planes, S]``; planes: positions per token."""
    fixed = [i for i, axis in enumerate(tensor.axes[:-1]) if not axis]
    planes = max(fixed, key=lambda i: int(tensor.shape[i]))  # the smaller fixed axis is a batch of 1
    return tuple("planes" if i == planes else axis for i, axis in enumerate(tensor.axes))

"""Whether an update writes the S rows behind the P rows that a cache holds, in a line or around a ring.

The rows that it writes are evaluated in every sample, and at many more positions by moving the one input that they
depend on. In range they must be P, P + 1, .. P + S - 1. Beyond the capacity they tell a circular cache (each modulo L)
from a linear one, which has nothing to write there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from trt_kvcache.importer.normalize.candidate import Candidate, Geometry, richest
from trt_kvcache.importer.normalize.evidence.blueprint import is_small
from trt_kvcache.importer.normalize.evidence.probe import Probe

Array = npt.NDArray[Any]
_SHARED = 1 << 16  # bytes of what stays in memory
RowsOf = Callable[[Geometry, Probe], Array | None]


def prove_rows(
    candidate: Candidate, axis: int, geometries: Sequence[Geometry], rows_of: RowsOf, reads: Sequence[str] = ()
) -> bool:
    """Show which rows an update writes.

    Args:
        candidate: the update.
        axis: the sequence axis of the cache.
        geometries: the samples, also those beyond the capacity.
        rows_of: the rows that it writes in a sample, as some probe sees it: ``[B, S]``, or ``[1, S]`` where all
            sequences have the same; None where they cannot be told.
        reads: the tensors that it reads, where these are known. Other caches mostly read the same, which is found out
            once if they are small.

    Returns:
        Whether the cache is circular.

    Raises:
        UnsupportedModelError: these are other rows.
    """
    circular: set[bool] = set()
    for geometry in geometries:
        rows = rows_of(geometry, geometry.step.probe)
        circular |= _judge(candidate, geometry, axis, geometry.step.past, rows)
    geometry = richest([g for g in geometries if not g.step.wrapped])
    for past, probe in _moved(candidate, geometry, axis, reads):
        circular |= _judge(candidate, geometry, axis, past, rows_of(geometry, probe))
    if len(circular) == 2:
        raise candidate.refusal("beyond the capacity its rows wrap around at some positions only")
    _check_ragged(candidate, axis, geometry, rows_of)
    return circular == {True}


def _judge(candidate: Candidate, geometry: Geometry, axis: int, past: int, rows: Array | None) -> set[bool]:
    """Whether the rows at one position say that the cache is circular; in range they say nothing."""
    length, capacity = geometry.step.length, geometry.sizes[axis]
    wanted = past + np.arange(length)
    if past + length <= capacity:
        if rows is None or rows.shape[-1] != length or bool((rows != wanted).any()):
            raise candidate.refusal(_explain(rows, past, length))
        return set()
    if rows is None or rows.shape[-1] != length or bool((rows >= capacity).any()):
        return {False}
    is_ring = bool((rows == wanted % capacity).all())
    clamped = (np.minimum(wanted, capacity - 1), min(past, capacity - length) + np.arange(length))
    if any(bool((rows == c).all()) for c in clamped):
        return set() if is_ring else {False}  # the last row is where a ring has every L-th position, too
    if is_ring:
        return {True}
    raise candidate.refusal(
        f"beyond its capacity of {capacity} it writes rows {_listed(rows)} at position {past}, which is no ring"
    )


def _explain(rows: Array | None, past: int, length: int) -> str:
    if rows is None:
        return "which rows it writes cannot be computed from positions and lengths"
    if rows.size and bool((rows < 0).any()):
        return f"it counts rows from the end (row {int(rows.min())})"
    if rows.shape[-1] == 1 < length:
        return f"it writes one row although a step may bring {length} tokens"
    return f"it writes rows {_listed(rows)} when {past} rows hold tokens and {length} are new"


def _listed(rows: Array) -> str:
    return ", ".join(map(str, rows[0].tolist() if rows.size else ())) or "none"


def _moved(candidate: Candidate, geometry: Geometry, axis: int, reads: Sequence[str]) -> Iterator[tuple[int, Probe]]:
    """The sample at other positions: past length and probe."""
    step, capacity = geometry.step, geometry.sizes[axis]
    if len(candidate.positions) != 1 or (value := step.probe.value(candidate.positions[0])) is None:
        return
    last, half = capacity - step.length, capacity // 2
    inside = {0, 1, 2, 3, half - 1, half, half + 1, last - 1, last}
    outside = {
        last + 1,
        capacity,
        capacity + 1,
        capacity + half + 1,
        2 * capacity - 1,
        2 * capacity + 1,
        3 * capacity + 5,
    }
    pasts = sorted(p for p in inside if 0 <= p <= last) + sorted(p for p in outside if p > last)
    name = candidate.positions[0]
    values = [step.probe.value(n) for n in (*reads, name)]
    are_small = bool(reads) and is_small(value) and all(v is not None and v.nbytes <= _SHARED for v in values)
    given = step.probe.shared if are_small else step.probe.given
    yield from ((p, given({name: (value + (p - step.past)).astype(value.dtype)})) for p in pasts)


def _check_ragged(candidate: Candidate, axis: int, geometry: Geometry, rows_of: RowsOf) -> None:
    """Where positions are per sequence, each sequence must have its own, or all the same."""
    step = geometry.step
    if len(candidate.positions) != 1 or (value := step.probe.value(candidate.positions[0])) is None:
        return
    per_row = value.ndim == 2 or (value.ndim == 1 and np.unique(value).size == 1)
    if not per_row or value.shape[0] != step.batch or step.batch == 1:
        return
    if step.past + step.batch + step.length > geometry.sizes[axis]:
        return
    offsets = np.arange(step.batch)[::-1]
    shifted = value + offsets.reshape(-1, *[1] * (value.ndim - 1))
    rows = rows_of(geometry, step.probe.given({candidate.positions[0]: shifted.astype(value.dtype)}))
    wanted = step.past + offsets[:, None] + np.arange(step.length)
    if rows is None or rows.shape[-1] != step.length:
        raise candidate.refusal(_explain(rows, step.past, step.length))
    each = rows.reshape(step.batch, -1, step.length) if len(rows) % step.batch == 0 else rows
    own = bool((each == wanted[:, None]).all())
    common = bool((rows == rows[0, 0] + np.arange(step.length)).all())
    if not own and not common:
        raise candidate.refusal("it writes a sequence at the position of another")

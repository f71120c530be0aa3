"""ALiBi: a score loses a number per head with each token that its key lies behind the query.

    BLOOM, Falcon   slopes [H] * (CumSum(padding mask) - 1)           [B, H, 1, T]
    MPT             slopes [H] * (0, -1, -2, ...) up to the last key  [H, 1, T]

become ``slopes * (j - i)`` for query position ``i`` and key row ``j``: the same up to one number for each row of the
scores, which a softmax does not see, unless sinks stand beside them. The slopes are read off the values. ONNX's
Attention has no slopes: until its mask is built, an Attention of the importer carries them as one input more, `SLOPES`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_graphsurgeon as gs

from trt_kvcache.importer.normalize.evidence.samples import Sample, Samples

Array = npt.NDArray[Any]

_ULPS = 4  # by which two numbers of a row may be off, of the largest


def find_slopes(node: str, tensor: gs.Tensor, samples: Samples, *, shifted: bool) -> Array | None:
    """Prove that what is added to scores grows evenly along the keys; None where it does not.

    Args:
        node: name of the attention, for messages.
        tensor: ``[B or 1, H or 1, S or 1, T]``, or what broadcasts to it.
        samples: of the model as exported.
        shifted: it may add one more number to all of a row; else it adds nothing to the score of a query's own key.

    Returns:
        The slopes, float32 ``[H or 1]``.
    """
    longest = max(samples.plain, key=lambda sample: sample.total)
    slopes = _slopes(_as_scores(longest.probe.value(tensor.name)), longest)
    if slopes is None:
        return None

    known = _Known(_last_row(_as_scores(longest.probe.value(tensor.name)), longest), slopes, shifted)

    def is_even(sample: Sample) -> bool:
        value = _as_scores(sample.probe.value(tensor.name))
        return known.ends_or_begins_with(value, sample) or _grows(value, slopes, sample, shifted=shifted)

    if not all(is_even(sample) for sample in samples.plain):
        return None
    return slopes


class _Known:
    """The longest row of a bias: where its numbers are as exact as they get, others begin or end with the same ones.

    Comparing is much faster than computing, and there are as many rows as positions, times heads.

    Args:
        row: ``[H, T]``, or None.
        slopes: of it.
        shifted: rows may have one more number everywhere.
    """

    def __init__(self, row: Array | None, slopes: Array, shifted: bool) -> None:
        self._row = row
        self._ends = self._begins = False
        if row is not None and row.dtype.kind == "f":
            places = np.arange(row.shape[1])
            self._ends = _is_exact(row, slopes, places - places[-1])
            self._begins = shifted and _is_exact(row, slopes, places)

    def ends_or_begins_with(self, value: Array | None, sample: Sample) -> bool:
        """Whether these are the scores of one query, and a part of the row: so they grow as evenly."""
        if self._row is None or value is None or value.shape[0] != 1 or value.shape[2] != 1:
            return False
        row, count = value[0, :, 0, : sample.total], sample.total
        if row.dtype != self._row.dtype or row.shape != (len(self._row), count) or count > self._row.shape[1]:
            return False
        return (self._ends and np.array_equal(row, self._row[:, -count:])) or (
            self._begins and np.array_equal(row, self._row[:, :count])
        )


def _is_exact(row: Array, slopes: Array, places: Array) -> bool:
    """Whether each number is the slope times the place, but for its own rounding: then `_grows` holds of any part."""
    expected = slopes.astype(np.float64)[:, None] * places
    return bool(np.all(np.abs(row - expected) <= _ULPS / 2 * float(np.finfo(row.dtype).eps) * np.abs(expected)))


def _last_row(value: Array | None, sample: Sample) -> Array | None:
    """What the last query's bias is, ``[H, T]``."""
    return None if value is None else np.array(value[0, :, -1, : sample.total])


def _as_scores(value: Array | None) -> Array | None:
    """A bias with four axes; None where it has more."""
    return None if value is None or value.ndim > 4 else np.asarray(value[(None,) * (4 - value.ndim)])


def _slopes(value: Array | None, sample: Sample) -> Array | None:
    """What the last query's bias grows by, per head, next to where it is 0: there numbers are as exact as they get."""
    if value is None or value.dtype.kind != "f" or sample.total < 2 or value.shape[3] < sample.total or not value.size:
        return None
    rows = value[0, :, -1, : sample.total].astype(np.float64)
    nearest = np.minimum(np.argmin(np.abs(rows), axis=1), sample.total - 2)[:, None]
    here, after = (np.take_along_axis(rows, nearest + step, axis=1)[:, 0] for step in (0, 1))
    slopes = (after - here).astype(np.float32)
    return slopes if bool(np.all(np.isfinite(slopes))) else None


def _grows(value: Array | None, slopes: Array, sample: Sample, *, shifted: bool) -> bool:
    """Whether each query's bias grows so up to its own key; those behind it are hidden by causality."""
    if value is None or value.dtype.kind != "f" or value.shape[1] != len(slopes):
        return False
    if value.shape[0] not in (1, sample.batch) or value.shape[2] not in (1, sample.length):
        return False
    if value.shape[3] < sample.total:
        return False
    keys = np.arange(sample.total)
    if not shifted and value.shape[2] != sample.length:
        return False
    own = np.arange(sample.past, sample.total)[-value.shape[2] :]  # the last query sees what all others see
    behind = keys - own[:, None]
    for head, slope in enumerate(slopes.astype(np.float64)):
        rows = value[:, head, :, : sample.total].astype(np.float64)
        allowed = _ULPS * float(np.finfo(value.dtype).eps) * np.abs(rows).max(initial=0)
        shift = rows[:, np.arange(len(own)), own][..., None] if shifted else 0.0
        if not bool(np.all((np.abs(rows - shift - slope * behind) <= allowed) | (behind > 0))):
            return False
    return True

"""Is there enough GPU memory? Asked before anything is allocated, and answered with what to lower."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from trt_kvcache.errors import BackendError

__all__ = ["RESERVE", "Need", "admit", "format_size"]

RESERVE = 128 << 20
"""Bytes left to the driver and to TensorRT, which take some on their own (kernels, state of contexts). An estimate."""


@dataclass(frozen=True)
class Need:
    """Memory that will be taken.

    Attributes:
        what: ``"caches"``.
        size: bytes.
        per_row: the part of `size` that grows with each row of the batch.
    """

    what: str
    size: int
    per_row: int = 0


def admit(needs: Sequence[Need], free: int, total: int, gpu: str, max_batch: int, advice: str | None = None) -> None:
    """Refuse what does not fit.

    Args:
        needs: all memory that will be taken, in bytes, for `max_batch` rows.
        free: bytes of the GPU that are not in use, as the driver counts them.
        total: all its bytes.
        gpu: its name.
        max_batch: rows.
        advice: what to do; None: with the batch and the sizes of a decoder.

    Raises:
        BackendError: `needs` and `RESERVE` together are more than `free`; the message says how many rows fit.
    """
    needed = sum(need.size for need in needs) + RESERVE
    if needed <= free:
        return
    parts = ", ".join(f"{need.what} {format_size(need.size)}" for need in needs)
    raise BackendError(
        f"{gpu} has {format_size(free)} of {format_size(total)} free, and {format_size(needed)} are needed: {parts}, "
        f"reserve {format_size(RESERVE)}; {advice or _advice(needs, needed - free, max_batch)}"
    )


def _advice(needs: Sequence[Need], excess: int, max_batch: int) -> str:
    per_row = sum(need.per_row for need in needs)
    others = "build the engine again with a smaller --capacity or --max-chunk, or free memory that other programs hold"
    fitting = max_batch - -(-excess // per_row) if per_row else 0
    if fitting >= 1:
        return f"open it with max_batch {fitting} instead of {max_batch}, {others}"
    return f"not even one sequence fits: {others}"


def format_size(size: int) -> str:
    """``"1.5 GiB"``."""
    value = float(size)
    for unit in ("B", "KiB", "MiB"):
        if value < 1024:
            return f"{value:.0f} B" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} GiB"

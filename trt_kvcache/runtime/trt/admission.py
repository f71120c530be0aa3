"""Checks that the GPU has enough memory before anything is allocated, and says what to lower."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from trt_kvcache.errors import BackendError
from trt_kvcache.messages import human_bytes

RESERVE = 128 << 20
"""Bytes left to the driver and to TensorRT, which allocate some themselves (kernels, state of contexts). An estimate.
"""


@dataclass(frozen=True)
class Need:
    """Memory that will be allocated.

    Attributes:
        what: name of its use, such as ``"caches"``.
        size: bytes, as the driver allocates them.
        for_rows: bytes for a batch of fewer rows; None: `size`.
    """

    what: str
    size: int
    for_rows: Callable[[int], int] | None = None


def admit(needs: Sequence[Need], free: int, total: int, gpu: str, max_batch: int, advice: str | None = None) -> None:
    """Refuse to run if the memory does not suffice.

    Args:
        needs: all memory that will be allocated, for `max_batch` rows.
        free: free bytes of the GPU, as the driver counts them.
        total: all bytes of the GPU.
        gpu: name of the GPU.
        max_batch: number of rows.
        advice: what to do; None: the advice for a decoder, with batch and sizes.

    Raises:
        BackendError: `needs` and `RESERVE` together are more than `free`; the message says how many rows fit.
    """
    needed = sum(need.size for need in needs) + RESERVE
    if needed <= free:
        return
    parts = ", ".join(f"{need.what} {human_bytes(need.size)}" for need in needs)
    raise BackendError(
        f"{gpu} has {human_bytes(free)} of {human_bytes(total)} free, and {human_bytes(needed)} are needed: {parts}, "
        f"reserve {human_bytes(RESERVE)}; {advice or _advice(needs, free, max_batch)}"
    )


def _advice(needs: Sequence[Need], free: int, max_batch: int) -> str:
    def fits(rows: int) -> bool:
        return sum(need.for_rows(rows) if need.for_rows else need.size for need in needs) + RESERVE <= free

    others = "build the engine again with a smaller --capacity or --max-chunk, or free memory that other programs hold"
    fitting = next(filter(fits, range(max_batch - 1, 0, -1)), 0)
    if fitting:
        return f"open it with max_batch {fitting} instead of {max_batch}, {others}"
    return f"not even one sequence fits: {others}"

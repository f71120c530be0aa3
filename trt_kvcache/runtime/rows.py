"""The rows of the batch in every cache buffer: how far they are written, and operations on whole rows."""

from __future__ import annotations

from collections.abc import Collection

from trt_kvcache.runtime.runner import Runner

__all__ = ["Rows"]


class Rows:
    """Tracks, for each row, the cache row from which on it is zero.

    Args:
        runner: owns the buffers, which are zeroed.
    """

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._dirty = [0] * runner.max_batch

    def free(self, used: Collection[int]) -> int | None:
        """Return the first row that is not in use."""
        return next((row for row in range(self._runner.max_batch) if row not in used), None)

    def touch(self, row: int, stop: int) -> None:
        """Note that cache rows up to `stop` may be written."""
        self._dirty[row] = max(self._dirty[row], stop)

    def clean(self, row: int, start: int) -> None:
        """Zero a row from cache row `start` on."""
        if self._dirty[row] > start:
            self._runner.zero_rows(row, start, self._dirty[row])
            self._dirty[row] = start

    def truncate(self, row: int, length: int, written: int) -> None:
        """Zero a row from `length` on; circular caches may keep rows of the `written` tokens."""
        self._runner.zero_rows(row, length, self._dirty[row])
        self._dirty[row] = max(length, written)

    def copy(self, source: int, row: int) -> None:
        """Copy the contents of one row to another, which keeps nothing else."""
        length = self._dirty[source]
        self.clean(row, length)
        self.touch(row, length)
        self._runner.copy_rows(source, row, length)

"""The rows of the batch in every cache buffer: what is written in them, and what is done to a whole one."""

from __future__ import annotations

from collections.abc import Collection

from trt_kvcache.runtime.runner import Runner

__all__ = ["Rows"]


class Rows:
    """Knows, for each row, from which cache row on it is zero.

    Args:
        runner: owns the buffers, which are zeroed.
    """

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._dirty = [0] * runner.max_batch

    def free(self, used: Collection[int]) -> int | None:
        """The first row that is not in use."""
        return next((row for row in range(self._runner.max_batch) if row not in used), None)

    def touch(self, row: int, stop: int) -> None:
        """Cache rows up to `stop` may be written."""
        self._dirty[row] = max(self._dirty[row], stop)

    def clean(self, row: int, start: int) -> None:
        """Zero what a row holds from cache row `start` on."""
        if self._dirty[row] > start:
            self._runner.zero_rows(row, start, self._dirty[row])
            self._dirty[row] = start

    def truncate(self, row: int, length: int, written: int) -> None:
        """`clean` from `length` on a row of which some caches are circular, and hold what `written` tokens left."""
        self._runner.zero_rows(row, length, self._dirty[row])
        self._dirty[row] = max(length, written)

    def copy(self, source: int, row: int) -> None:
        """Copy the contents of one row to another, and nothing else of that one's past."""
        length = self._dirty[source]
        self.clean(row, length)
        self.touch(row, length)
        self._runner.copy_rows(source, row, length)

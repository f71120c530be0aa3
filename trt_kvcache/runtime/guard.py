"""Who may use a session now: one thread at a time, and nobody once it is closed."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType

from trt_kvcache.errors import SessionError

__all__ = ["Guard"]


class Guard:
    """The one lock of a session, and whether it is still open: ``with guard:`` around every public operation."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self.closed = False

    def __enter__(self) -> None:
        self._lock.acquire()
        if self.closed:
            self._lock.release()
            raise SessionError("the session is closed; open the model again")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._lock.release()

    @contextmanager
    def ending(self) -> Iterator[bool]:
        """Close for good; gives whether it was open until now."""
        with self._lock:
            first, self.closed = not self.closed, True
            yield first

"""Who may use a session now: one thread at a time, and nobody once it is closed."""

from __future__ import annotations

import threading
from types import TracebackType

from trt_kvcache.errors import SessionError

__all__ = ["Guard"]


class Guard:
    """``with guard.lock, guard.open:`` around every public operation of a session.

    The lock stands on its own, because Ctrl-C can come at any line of Python: in an ``__enter__`` or ``__exit__`` that
    takes or gives the lock, it would leave it taken, and all other threads waiting for ever. The lock's own have none.

    Attributes:
        lock: the one lock of the session; a thread that has it may take it again.
        open: refuses whoever comes once the session is closed.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.open = _Open()

    def close(self) -> None:
        """Refuse all who come from now on; to be called with the lock."""
        self.open.closed = True


class _Open:
    def __init__(self) -> None:
        self.closed = False

    def __enter__(self) -> None:
        if self.closed:
            raise SessionError("the session is closed; open the model again")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass

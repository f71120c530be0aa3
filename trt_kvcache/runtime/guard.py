"""The right to use a session: one thread at a time of the process that opened it, and nobody once it is closed."""

from __future__ import annotations

import os
import threading
from contextlib import AbstractContextManager
from types import TracebackType

from trt_kvcache.errors import SessionError

__all__ = ["Guard"]


class Guard:
    """``with guard.lock, guard.open:`` around whatever asks a session, ``guard.idle`` around whatever changes it.

    The lock stands on its own, because Ctrl-C can come at any line of Python: in an ``__enter__`` or ``__exit__`` that
    takes or gives the lock, it would leave it taken, and all other threads waiting for ever. The lock's own have none.

    Attributes:
        open: refuses whoever comes once the session is closed.
        idle: refuses those, too, who come from within a step.
        stepping: taken while a step runs.
    """

    def __init__(self) -> None:
        self._process = os.getpid()
        self._lock = threading.RLock()
        self.stepping = threading.Lock()
        self.open = _Entry()
        self.idle = _Entry(self.stepping)

    @property
    def lock(self) -> AbstractContextManager[bool]:
        """The one lock of the session; a thread that has it may take it again.

        Raises:
            SessionError: in a forked process. There the lock may be held by a thread that was not forked with it, and
                what the runner waits for, such as threads of ONNX Runtime and the GPU, stayed behind as well.
        """
        if self.elsewhere:
            raise SessionError(
                f"the session was opened in process {self._process}, and this is a fork of it, {os.getpid()}, without "
                "its threads and GPU; open the model in this one"
            )
        return self._lock

    @property
    def elsewhere(self) -> bool:
        """True in a fork of the process that opened the session."""
        return os.getpid() != self._process

    def close(self) -> None:
        """Refuse all who come from now on; to be called with the lock.

        Raises:
            SessionError: from within a step.
        """
        if not self.open.closed:
            with self.idle:
                self.open.closed = self.idle.closed = True


class _Entry:
    """Lets nobody in once it is closed, and nobody who would wait for a step that waits for him.

    Args:
        stepping: taken while a step runs, by a thread that has the session's lock: whoever has that as well is called
            by this step.
    """

    def __init__(self, stepping: threading.Lock | None = None) -> None:
        self.closed = False
        self._stepping = stepping

    def __enter__(self) -> None:
        if self.closed:
            raise SessionError("the session is closed; open the model again")
        if self._stepping is not None and self._stepping.locked():
            raise SessionError(
                "the session is in the middle of a step; what this calls, such as a logits_processor or a tokenizer, "
                "must not change the session, ask its encoder or copy what that left on the GPU: do so between steps"
            )

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass

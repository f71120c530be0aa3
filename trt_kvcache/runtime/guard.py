"""Access to a session: one thread at a time, in the process that opened it, until it is closed."""

from __future__ import annotations

import os
import threading
from contextlib import AbstractContextManager
from types import TracebackType

from trt_kvcache.errors import SessionError

__all__ = ["Guard"]


class Guard:
    """Use ``with guard.lock, guard.open:`` to read a session, and ``guard.idle`` instead of ``open`` to change it.

    The lock is a separate context manager, because Ctrl-C can interrupt any line of Python: an ``__enter__`` or
    ``__exit__`` in Python that takes or releases the lock could leave it locked, and all other threads would wait for
    ever. The lock's own methods are not Python code.

    Attributes:
        open: refuses calls after the session is closed.
        idle: refuses these, and calls from within a step.
        stepping: locked while a step runs.
    """

    def __init__(self) -> None:
        self._process = os.getpid()
        self._lock = threading.RLock()
        self.stepping = threading.Lock()
        self.open = _Entry()
        self.idle = _Entry(self.stepping)

    @property
    def lock(self) -> AbstractContextManager[bool]:
        """The lock of the session; a thread that holds it may take it again.

        Raises:
            SessionError: in a forked process. There the lock may be held by a thread that the fork does not have, and
                the threads of ONNX Runtime and the GPU are missing, too.
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
        """Refuse all later calls. The caller holds the lock.

        Raises:
            SessionError: the call comes from within a step.
        """
        if not self.open.closed:
            with self.idle:
                self.open.closed = self.idle.closed = True


class _Entry:
    """Refuses calls once it is closed, and calls from within a step if `stepping` is given.

    Args:
        stepping: locked while a step runs, by a thread that holds the session's lock: another call that holds this lock
            must come from within the step.
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

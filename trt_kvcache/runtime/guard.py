"""Limits access to a session: one thread at a time, in the process that opened it, until it is closed."""

from __future__ import annotations

import os
import threading
from contextlib import AbstractContextManager

from trt_kvcache.errors import SessionError
from trt_kvcache.native import HeldSignals


class Guard:
    """Locks a session: ``with guard.lock, guard.open:`` to read it, ``with guard.lock, guard.idle:`` to change it.

    While a session changes, Ctrl-C waits for the end of the block, so that no change is left half done. The lock is
    entered separately, because it is C code: Ctrl-C could stop a Python method just after it took the lock.

    Attributes:
        open: context manager that raises `SessionError` if the session is closed.
        idle: context manager that also refuses calls from code that runs within a step, and delays signals.
        stepping: a lock that is held while a step runs.
    """

    def __init__(self) -> None:
        self._process = os.getpid()
        self._lock = threading.RLock()
        self._signals = HeldSignals()
        self.stepping = threading.Lock()
        self.open = _Open()
        self.idle = _Idle(self.open, self.stepping, self._signals)

    @property
    def lock(self) -> AbstractContextManager[bool]:
        """The lock of the session; a thread that holds it may take it again. Raises `SessionError` in a forked process.

        In a fork, the thread that held the lock may not exist.
        """
        if self.elsewhere:
            raise SessionError(
                f"the session was opened in process {self._process}, but used in its fork, process {os.getpid()}, "
                "which has neither the session's threads nor its GPU; open the model in this process"
            )
        return self._lock

    @property
    def elsewhere(self) -> bool:
        """True in a fork of the process that opened the session."""
        return os.getpid() != self._process

    def pause(self) -> None:
        """Handle a waiting signal, such as Ctrl-C, between two steps of a long change. This may raise an error."""
        self._signals.deliver()

    def close(self) -> None:
        """Refuse all later calls. The caller holds the lock. Raises `SessionError` if the call comes from a step."""
        if not self.open.closed:
            with self.idle:
                self.open.closed = True


class _Open:
    def __init__(self) -> None:
        self.closed = False

    def __enter__(self) -> None:
        if self.closed:
            raise SessionError("the session is closed; open the model again")

    def __exit__(self, *error: object) -> None:
        pass


class _Idle:
    """A context manager for changes of a session: delays signals; refuses a session that is closed or in a step.

    The thread that locks `stepping` also holds the session's lock. So a call that gets the session's lock while
    `stepping` is locked comes from within the step.
    """

    def __init__(self, open_: _Open, stepping: threading.Lock, signals: HeldSignals) -> None:
        self._open, self._stepping, self._signals = open_, stepping, signals

    def __enter__(self) -> None:
        self._open.__enter__()
        if self._stepping.locked():
            raise SessionError(
                "the session is in a step; code that the step calls, such as a logits_processor or a tokenizer, "
                "must not change the session, use its encoder or copy its results from the GPU: do this between steps"
            )
        self._signals.hold()

    def __exit__(self, *error: object) -> None:
        self._signals.release()

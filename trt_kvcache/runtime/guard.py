"""Access to a session: one thread at a time, in the process that opened it, until it is closed."""

from __future__ import annotations

import os
import signal
import threading
from contextlib import AbstractContextManager
from types import FrameType, TracebackType
from typing import Any

from trt_kvcache.errors import SessionError

__all__ = ["Guard"]

_SIGNALS = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGBREAK") if hasattr(signal, name)]
"""Signals whose handlers may raise an exception. Windows has no SIGHUP; Linux has no SIGBREAK."""


class Guard:
    """Use ``with guard.lock, guard.open:`` to read a session, and ``with guard.lock, guard.idle:`` to change it.

    While a session changes, Ctrl-C waits for the end of the block: an exception between two lines would leave half of a
    change. The lock is a separate context manager, because its own methods are not Python code, which Ctrl-C can
    interrupt at any line.

    Attributes:
        open: refuses calls after the session is closed.
        idle: refuses these, and calls from within a step; within the block signals wait.
        stepping: locked while a step runs.
    """

    def __init__(self) -> None:
        self._process = os.getpid()
        self._lock = threading.RLock()
        self._signals = _Signals()
        self.stepping = threading.Lock()
        self.open = _Open()
        self.idle = _Idle(self.open, self.stepping, self._signals)

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

    def pause(self) -> None:
        """Let a signal that waits be handled now, between two steps of a long change; its handler may raise."""
        self._signals.deliver()

    def close(self) -> None:
        """Refuse all later calls. The caller holds the lock.

        Raises:
            SessionError: the call comes from within a step.
        """
        if not self.open.closed:
            with self.idle:
                self.open.closed = True


class _Open:
    """Refuses calls once it is closed."""

    def __init__(self) -> None:
        self.closed = False

    def __enter__(self) -> None:
        if self.closed:
            raise SessionError("the session is closed; open the model again")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass


class _Idle:
    """Refuses calls once the session is closed, and calls from within a step; within the block signals wait.

    Args:
        open_: tells whether the session is closed.
        stepping: locked while a step runs, by a thread that holds the session's lock: another call that holds this lock
            must come from within the step.
        signals: the waiting signals.
    """

    def __init__(self, open_: _Open, stepping: threading.Lock, signals: _Signals) -> None:
        self._open, self._stepping, self._signals = open_, stepping, signals

    def __enter__(self) -> None:
        self._open.__enter__()
        if self._stepping.locked():
            raise SessionError(
                "the session is in the middle of a step; what this calls, such as a logits_processor or a tokenizer, "
                "must not change the session, ask its encoder or copy what that left on the GPU: do so between steps"
            )
        self._signals.hold()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._signals.release()


class _Signals:
    """Lets signals wait in the main thread, the only one in which Python handles them. Blocks nest."""

    def __init__(self) -> None:
        self._depth = 0
        self._usual: dict[int, Any] = {}
        self._waiting: list[int] = []

    def hold(self) -> None:
        """Let signals wait from now on."""
        if threading.current_thread() is not threading.main_thread():
            return
        if self._depth == 0:
            try:
                for number in _SIGNALS:
                    usual = signal.getsignal(number)
                    if callable(usual) and usual != self._note:
                        self._usual[number] = usual
                        signal.signal(number, self._note)
            except BaseException:  # of a handler that still counts
                self._restore()
                raise
        self._depth += 1

    def release(self) -> None:
        """Handle the signals that wait, at the end of the outermost block."""
        if threading.current_thread() is threading.main_thread():
            self._depth -= 1
            if self._depth == 0:
                self._restore()
                self.deliver()

    def _restore(self) -> None:
        while self._usual:
            signal.signal(*self._usual.popitem())

    def deliver(self) -> None:
        """Handle the signals that wait."""
        if self._waiting and threading.current_thread() is threading.main_thread():
            number, self._waiting = self._waiting[0], []
            handler: Any = self._usual.get(number) or signal.getsignal(number)
            handler(number, None)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._waiting.append(number)

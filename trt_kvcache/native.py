"""Lets signals such as Ctrl-C end long calls into native code, but delays signals while a session's data change.

Calls end before the interpreter does: if a daemon thread were still in native code, C++ would abort the process.
"""

from __future__ import annotations

import atexit
import itertools
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

from trt_kvcache.errors import SessionError

_PATIENCE = 10.0  # seconds; a call ends at the next node of its graph
_PAUSE = 0.01

# No lock protects these, because Ctrl-C could leave a lock locked. Each access is one step that Python does not split.
_calls: dict[Endable, int] = {}
_numbers = itertools.count()
_ending: list[bool] = []


class Endable:
    """A native call that another thread can end by `stop`. Put the call in a ``with`` block, one call at a time."""

    def __init__(self, stop: Callable[[], None]) -> None:
        self.stop = stop

    def __enter__(self) -> None:
        _calls[self] = next(_numbers)
        if _ending:
            del _calls[self]
            raise SessionError("the process is ending and runs no more models")

    def __exit__(self, *error: object) -> None:
        _calls.pop(self, None)


def calls_under_way() -> dict[Endable, int]:
    """Return the calls into native code that run now, each with a number that no other call has."""
    return dict(_calls)


def end_calls(calls: dict[Endable, int]) -> None:
    """Make calls that are still running in native code return soon."""
    for call, number in calls.items():
        if _calls.get(call) == number:
            call.stop()


@atexit.register
def _end_all() -> None:
    _ending.append(True)
    late = time.monotonic() + _PATIENCE
    while _calls and time.monotonic() < late:
        end_calls(calls_under_way())
        time.sleep(_PAUSE)


_SIGNALS = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGBREAK") if hasattr(signal, name)]
"""Signals whose handlers may raise an exception. Windows has no SIGHUP; Linux has no SIGBREAK."""


class HeldSignals:
    """Delays signals within a ``with`` block of the main thread, so that no exception leaves a change half done.

    Python handles signals only in the main thread. Blocks may be nested.
    """

    def __init__(self) -> None:
        self._depth = 0
        self._usual: dict[int, Any] = {}
        self._waiting: list[int] = []

    def __enter__(self) -> None:
        self.hold()

    def __exit__(self, *error: object) -> None:
        self.release()

    def hold(self) -> None:
        """Delay signals from now on."""
        if threading.current_thread() is not threading.main_thread():
            return
        if self._depth == 0:
            try:
                for number in _SIGNALS:
                    usual = signal.getsignal(number)
                    if callable(usual) and usual != self._note:
                        self._usual[number] = usual
                        signal.signal(number, self._note)
            except BaseException:  # raised by a handler that was still in place
                self._restore()
                raise
        self._depth += 1

    def release(self) -> None:
        """End a block, and handle the delayed signals if it is the outermost one."""
        if threading.current_thread() is threading.main_thread():
            self._depth -= 1
            if self._depth == 0:
                self._restore()
                self.deliver()

    def _restore(self) -> None:
        while self._usual:
            signal.signal(*self._usual.popitem())

    def deliver(self) -> None:
        """Handle the delayed signals now."""
        if self._waiting and threading.current_thread() is threading.main_thread():
            number, self._waiting = self._waiting[0], []
            handler: Any = self._usual.get(number) or signal.getsignal(number)
            handler(number, None)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._waiting.append(number)

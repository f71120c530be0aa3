"""Calls into native code that a model may make endless; signals and the end of the interpreter can interrupt them.

Python handles a signal between two of its own steps: not while the main thread is in such a call. A daemon thread that
is in such a call when the interpreter ends makes C++ abort the process.
"""

from __future__ import annotations

import atexit
import itertools
import time
from collections.abc import Callable
from types import TracebackType

from trt_kvcache.errors import SessionError

__all__ = ["Endable", "calls_under_way", "end_calls"]

_PATIENCE = 10.0  # seconds; a call ends at the next node of its graph
_PAUSE = 0.01

# No lock, which Ctrl-C could leave taken: each use is one step of Python.
_calls: dict[Endable, int] = {}
_numbers = itertools.count()
_ending: list[bool] = []


class Endable:
    """Use ``with endable:`` around a call; one call at a time.

    Args:
        stop: makes the call return soon; another thread calls it.
    """

    def __init__(self, stop: Callable[[], None]) -> None:
        self.stop = stop

    def __enter__(self) -> None:
        _calls[self] = next(_numbers)
        if _ending:
            del _calls[self]
            raise SessionError("the process is ending, and runs no model any more")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _calls.pop(self, None)


def calls_under_way() -> dict[Endable, int]:
    """Return the running calls, each with its own number."""
    return dict(_calls)


def end_calls(calls: dict[Endable, int]) -> None:
    """Make those of the calls return soon that are still running."""
    for call, number in calls.items():
        if _calls.get(call) == number:
            call.stop()


@atexit.register
def _end_all() -> None:
    """End all calls before the interpreter ends. Threads that Python waits for have ended already."""
    _ending.append(True)
    late = time.monotonic() + _PATIENCE
    while _calls and time.monotonic() < late:
        end_calls(calls_under_way())
        time.sleep(_PAUSE)

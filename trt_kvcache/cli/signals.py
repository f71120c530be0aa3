"""Makes signals end a command like Ctrl-C: by an exception, so that temporary files are removed."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.machinery import ExtensionFileLoader
from types import FrameType

from trt_kvcache.native import calls_under_way, end_calls

INTERRUPTED = 128
"""The exit code of an interrupted command is this, plus the number of the signal."""

_NUMBERS = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP", "SIGBREAK") if hasattr(signal, name)]
"""Signals that end a command, except Ctrl-C's. Windows has no SIGHUP; Linux has no SIGBREAK (sent by Ctrl-Break)."""

_LATER = 0.02  # seconds
_PATIENCE = 2.0  # seconds in which a call into native code may return by itself
_later: set[int] = set()  # signals that a timer sends again


class Ended(KeyboardInterrupt):
    """Raised in the main thread when a signal other than Ctrl-C's ends the command."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number


def end_by_unwinding() -> None:
    """Make SIGTERM, SIGHUP and SIGBREAK raise `Ended` where they would otherwise end the process at once."""
    for number in _NUMBERS:
        if signal.getsignal(number) is signal.SIG_DFL:  # nohup makes its command ignore SIGHUP
            signal.signal(number, _end)
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _end)
    ours, theirs = socket.socketpair()  # Windows accepts only sockets
    theirs.setblocking(False)
    signal.set_wakeup_fd(theirs.detach(), warn_on_full_buffer=False)
    threading.Thread(target=_watch, args=(ours,), name="signals", daemon=True).start()


def _watch(arrived: socket.socket) -> None:
    """After each signal, end long native calls: Python handles signals in the main thread, and only between calls."""
    while arrived.recv(64):
        calls = calls_under_way()
        time.sleep(_PATIENCE)
        end_calls(calls)


def last_words(error: KeyboardInterrupt) -> tuple[str, int]:
    """Return the message about a signal that ends a process, and the exit code of the process."""
    if isinstance(error, Ended):
        return f"ended by {signal.Signals(error.number).name}", INTERRUPTED + error.number
    return "interrupted", INTERRUPTED + signal.SIGINT


@contextmanager
def interruptible() -> Iterator[threading.Event]:
    """Make Ctrl-C only set the yielded event, so that a running step can end. A second Ctrl-C interrupts at once."""
    asked = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield asked
        return
    usual = signal.getsignal(signal.SIGINT) or signal.default_int_handler

    def note(*_: object) -> None:
        asked.set()
        signal.signal(signal.SIGINT, usual)

    signal.signal(signal.SIGINT, note)
    try:
        yield asked
    finally:
        signal.signal(signal.SIGINT, usual)


def _end(number: int, frame: FrameType | None) -> None:
    if _is_loading(frame):
        _send_later(number)
    elif number == signal.SIGINT:
        raise KeyboardInterrupt
    else:
        for other in _NUMBERS:  # a second signal must not end the cleanup
            signal.signal(other, signal.SIG_IGN)
        raise Ended(number)


def _is_loading(frame: FrameType | None) -> bool:
    """Return True while an extension module is being loaded.

    An exception during the load crashes some modules (protobuf 7.36), or becomes an ImportError (ONNX Runtime 1.31.1).
    """
    while frame is not None:
        named = frame.f_code.co_name in ("create_module", "exec_module")
        if named and isinstance(frame.f_locals.get("self"), ExtensionFileLoader):
            return True
        frame = frame.f_back
    return False


def _send_later(number: int) -> None:
    """Send a signal again a little later, but only once: a second one would interrupt the cleanup after the first."""
    if number in _later:
        return
    _later.add(number)
    timer = threading.Timer(_LATER, _send, (number,))
    timer.daemon = True
    timer.start()


def _send(number: int) -> None:
    _later.discard(number)
    if sys.platform == "win32":
        signal.raise_signal(number)  # os.kill would end the process at once
    else:
        os.kill(os.getpid(), number)  # wakes the main thread if it waits

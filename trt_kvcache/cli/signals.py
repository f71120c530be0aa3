"""Signals that end a command as Ctrl-C does: what it has begun is undone on the way out."""

from __future__ import annotations

import signal
from types import FrameType

INTERRUPTED = 128
"""Exit codes above are those of interrupted commands: the number of a signal comes on top."""

_NUMBERS = (signal.SIGTERM, signal.SIGHUP)


class Ended(KeyboardInterrupt):
    """A signal other than Ctrl-C's ended the command.

    Args:
        number: of the signal.
    """

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number


def end_by_unwinding() -> None:
    """Make SIGTERM and SIGHUP raise `Ended`, where they would end the process at once."""
    for number in _NUMBERS:
        if signal.getsignal(number) is signal.SIG_DFL:  # nohup ignores SIGHUP, and so does what it runs
            signal.signal(number, _end)


def last_words(error: KeyboardInterrupt) -> tuple[str, int]:
    """What to say about an interrupt, and the exit code of a process that it ends."""
    if isinstance(error, Ended):
        return f"ended by {signal.Signals(error.number).name}", INTERRUPTED + error.number
    return "interrupted", INTERRUPTED + signal.SIGINT


def _end(number: int, _: FrameType | None) -> None:
    for other in _NUMBERS:  # a second one must not end the cleaning up
        signal.signal(other, signal.SIG_IGN)
    raise Ended(number)

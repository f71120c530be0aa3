"""A child process with limits, for work that a file from anywhere decides: it may need any time and any memory."""

from __future__ import annotations

import atexit
import errno
import math
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import psutil

import trt_kvcache

__all__ = ["NEWS", "Begun", "Child", "ChildError", "is_broken", "limit_memory", "unless_ended"]

if sys.platform == "win32":
    _GROUP = subprocess.CREATE_NEW_PROCESS_GROUP
else:
    _GROUP = 0
_ROOT = Path(trt_kvcache.__file__).parents[1]
NEWS = b"+"
"""The beginning of a line that is no answer yet."""


_MOST, _SHORTEST = 5, 0.05
"""Seconds of a clock for a second of processor time, at most, and a wait that is worth it."""


class Begun(NamedTuple):
    """The beginning of a request.

    Attributes:
        at: `time.monotonic`.
        worked: processor time that the child had taken, in seconds.
    """

    at: float
    worked: float


class ChildError(Exception):
    """The child gave no answer; the text says why, for the user."""


class Child:
    """A Python process that answers lines with lines. It ends with its parent.

    Args:
        module: to run with ``python -m``. It reads requests from stdin and writes one line for each to stdout, and
            before that any number of lines of `NEWS`.
        arguments: of the module.
    """

    def __init__(self, module: str, *arguments: str) -> None:
        self._owner = os.getpid()
        self._process = subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd=_ROOT,  # where python -m finds this very package
            start_new_session=True,  # Ctrl-C at a terminal reaches the parent only, which then ends the child
            creationflags=_GROUP,
        )
        self._answers: queue.Queue[bytes] = queue.Queue()
        threading.Thread(target=self._listen, name=module, daemon=True).start()
        atexit.register(self.end)

    @property
    def alive(self) -> bool:
        """It can take a request: a fork of the parent has no child."""
        return self._owner == os.getpid() and self._process.poll() is None

    def _listen(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as answers:
            for line in answers:
                self._answers.put(line)
        self._answers.put(b"")

    def ask(
        self,
        parts: Sequence[bytes],
        seconds: float,
        told: Callable[[bytes], None] = lambda _: None,
        begun: Begun | None = None,
    ) -> bytes:
        """Return the answer to a request, without its line break.

        Args:
            parts: of the request, one after the other.
            seconds: of processor time that the child may take; then it is ended. On a busy machine it gets fewer of
                them: it is ended after five times as many seconds in any case.
            told: called with the news that come before the answer.
            begun: when the request began, if this one goes on with it.

        Raises:
            ChildError: it takes longer, or it died.
        """
        assert self._process.stdin is not None
        try:
            with unless_ended():  # its answer says that it has not read everything
                for part in parts:
                    self._process.stdin.write(part)
                self._process.stdin.flush()
            while (line := self._next(seconds, begun or self.begin())).startswith(NEWS):
                told(line.removeprefix(NEWS))
        except queue.Empty:
            self.end()
            raise ChildError(f"took more than {seconds:g} s") from None
        except BaseException:  # an interrupt: nobody reads the answer
            self.end()
            raise
        if not line:
            self.end()
            raise ChildError(f"ended with exit code {self._process.returncode}, as for want of memory")
        return line.rstrip(b"\n")

    def begin(self) -> Begun:
        """Return the state of the clocks at the beginning of a request."""
        return Begun(time.monotonic(), self._worked())

    def _next(self, seconds: float, begun: Begun) -> bytes:
        """The next line of the child; queue.Empty: it took too long."""
        wait = seconds - (time.monotonic() - begun.at)
        while True:
            try:
                return self._answers.get(timeout=max(0.0, wait))
            except queue.Empty:
                left = _MOST * seconds - (time.monotonic() - begun.at)
                wait = min(seconds - (self._worked() - begun.worked), left)
                if wait < _SHORTEST:
                    raise

    def _worked(self) -> float:
        """Processor time of the child in seconds; infinite if it has ended."""
        try:
            used = psutil.Process(self._process.pid).cpu_times()
        except psutil.Error:
            return math.inf
        return float(used.user + used.system)

    def end(self) -> None:
        """End the process."""
        if self._owner == os.getpid():
            self._process.kill()
            self._process.wait()
            if self._process.stdin is not None:
                with suppress(OSError):  # what it has not read is lost
                    self._process.stdin.close()
        atexit.unregister(self.end)


def limit_memory(size: int) -> None:
    """In the child: let this process have no more than `size` bytes of address space, and no core dumps.

    On Windows, which has no such limit, nothing happens.
    """
    if sys.platform != "win32":
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_AS, (size, size))
        with suppress(OSError):
            Path("/proc/self/oom_score_adj").write_text("1000")


def is_broken(error: OSError) -> bool:
    """Return True if writing failed because the process at the other end of the pipe has ended."""
    return error.errno == errno.EPIPE or (sys.platform == "win32" and error.errno == errno.EINVAL)


@contextmanager
def unless_ended() -> Iterator[None]:
    """Write to the other process; it is no error if that process has ended."""
    try:
        yield
    except OSError as error:
        if not is_broken(error):
            raise

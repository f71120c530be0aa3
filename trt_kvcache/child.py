"""Runs work on untrusted files in child processes, because such work may need unlimited time and memory, or crash.

Nothing from a child is unpickled. Each message (frame) has a line with its kind and the sizes of its parts, and then
the parts; the first part is JSON. An error of this package in the child is raised again in the caller. Kinds::

    caller to child   >  a request, or the answer to a question
                      .  the child must keep its files when the caller ends
    child to caller   +  news, any number of them
                      ?  a question
                      =  the answer
                      !  an error
"""

from __future__ import annotations

import atexit
import errno
import math
import os
import queue
import re
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, NamedTuple, NoReturn, TypeVar

import msgspec
import psutil

import trt_kvcache
from trt_kvcache import errors
from trt_kvcache.errors import TrtKvCacheError

if sys.platform == "win32":
    _GROUP = subprocess.CREATE_NEW_PROCESS_GROUP
else:
    _GROUP = 0
_ROOT = Path(trt_kvcache.__file__).parents[1]
_REQUEST, _KEEP, _NEWS, _QUESTION, _ANSWER, _ERROR = b">.+?=!"
_HEAD = re.compile(rb"([>.+?=!])((?: \d{1,15})+)\n")
_MOST, _SHORTEST = 5, 0.05
"""Most seconds of real time for a second of processor time, and seconds of the shortest wait."""
_LONGEST = 20_000  # most characters of an error
_NO_DIALOGS = 0x8003  # SEM_FAILCRITICALERRORS, SEM_NOGPFAULTERRORBOX, SEM_NOOPENFILEERRORBOX
_Answer = TypeVar("_Answer")


class ChildError(Exception):
    """Raised if a child process gave no answer. The message gives the user the reason."""


class Begun(NamedTuple):
    """Times at the beginning of a request, in seconds: `time.monotonic()`, and the child's processor time so far."""

    at: float
    worked: float


class _Failure(msgspec.Struct):
    """An error that a child process sends instead of an answer.

    `kind` is the name of an error class (of `trt_kvcache.errors`, or ``"MemoryError"``); "": a bug, with its stack
    trace as `message`.
    """

    kind: str
    message: str


class _Frame(NamedTuple):
    kind: int
    data: bytes
    parts: list[bytes]


def _write(stream: IO[bytes], kind: int, *parts: bytes) -> None:
    stream.write(b"%c%s\n" % (kind, b"".join(b" %d" % len(part) for part in parts)))
    for part in parts:
        stream.write(part)
    stream.flush()


def _read(stream: IO[bytes]) -> _Frame | None:
    """Return the next message of a stream; None at its end. Skip other lines, which Python printed when it started."""
    for line in stream:
        if match := _HEAD.fullmatch(line):
            parts = []
            for size in map(int, match[2].split()):
                parts.append(stream.read(size))
                if len(parts[-1]) < size:
                    return None
            return _Frame(match[1][0], parts[0], parts[1:])
    return None


class Child:
    """A Python process that answers requests, and ends with its parent.

    Args:
        command: arguments of the Python interpreter, which start a module that calls `serve`. `memory` follows them.
        memory: bytes of address space that the child may use; 0: no limit.
        stderr: file for the child's stderr. None: the output is dropped.
        environment: environment variables of the child; None: those of this process.
        grace: seconds in which the child may end by itself.
    """

    def __init__(
        self,
        *command: str,
        memory: int = 0,
        stderr: IO[bytes] | None = None,
        environment: Mapping[str, str] | None = None,
        grace: float = 0.0,
    ) -> None:
        self._owner, self._memory, self._grace = os.getpid(), memory, grace
        self._process = subprocess.Popen(
            [sys.executable, *command, str(memory)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr or subprocess.DEVNULL,
            env=environment,
            cwd=_ROOT,  # so that python -m finds this package
            start_new_session=True,  # Ctrl-C at a terminal reaches the parent only, which then ends the child
            creationflags=_GROUP,
        )
        self._frames: queue.Queue[_Frame | None] = queue.Queue()
        threading.Thread(target=self._listen, name=command[-1], daemon=True).start()
        atexit.register(self.end)

    @property
    def alive(self) -> bool:
        """True if this process (not a fork of it) started the child, and the child still runs."""
        return self._owner == os.getpid() and self._process.poll() is None

    @property
    def status(self) -> int:
        """Exit code of the process; a negative number is the number of the signal that killed the process."""
        return self._process.wait()

    def _listen(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as answers:
            while frame := _read(answers):
                self._frames.put(frame)
        self._frames.put(None)

    def send(self, content: Any, parts: Sequence[bytes] = ()) -> None:
        """Send a request to the child, or the answer to its question, followed by bytes."""
        self._write(_REQUEST, msgspec.json.encode(content), *parts)

    def _write(self, kind: int, *parts: bytes) -> None:
        assert self._process.stdin is not None
        try:
            with _unless_ended():  # the child's answer tells if it has not read everything
                _write(self._process.stdin, kind, *parts)
        except BaseException:  # an interrupt: half a request was sent
            self.end()
            raise

    def keep(self) -> None:
        """Tell the child not to remove its files when the caller ends."""
        self._write(_KEEP, b"null")

    def answer(
        self,
        kind: type[_Answer],
        seconds: float | None = None,
        told: Callable[[bytes], None] = lambda _: None,
        asked: Callable[[str], bytes] | None = None,
    ) -> _Answer:
        """Wait for the child's answer to the request that was sent, and return it.

        `seconds` limits the child's processor time; real time may be five times as long. `told` is called with the JSON
        of each progress message; `asked` answers each question of the child. The errors of this package that the child
        raises are raised here.

        Raises:
            ChildError: the child takes longer, needs more memory, or died.
            RuntimeError: a bug in the child; the message is a trace.
        """
        begun = self.begin()
        try:
            while (frame := self._next(seconds, begun)) is not None and frame.kind in (_NEWS, _QUESTION):
                if frame.kind == _NEWS:
                    told(frame.data)
                elif asked is not None:
                    self.send(None, [asked(msgspec.json.decode(frame.data, type=str))])
        except queue.Empty:
            self.end()
            assert seconds is not None
            raise ChildError(f"took more than {round(seconds, 2):g} s") from None
        except BaseException:  # an interrupt: nobody will read the answer
            self.end()
            raise
        if frame is None:
            self.end()
            raise ChildError(f"{how_ended(self.status)}, probably for lack of memory")
        if frame.kind == _ANSWER:
            return msgspec.json.decode(frame.data, type=kind)
        failure = msgspec.json.decode(frame.data, type=_Failure)
        if failure.kind == MemoryError.__name__:
            raise ChildError(f"needs more than {self._memory >> 20} MiB of memory")
        if failure.kind:
            error = getattr(errors, failure.kind, None)
            if not (isinstance(error, type) and issubclass(error, TrtKvCacheError)):
                raise ChildError("gave no valid answer")  # the file that it reads may have written this
            raise error(failure.message)
        raise RuntimeError(f"a child process failed:\n{failure.message}")

    def ask(self, content: Any, kind: type[_Answer], seconds: float, parts: Sequence[bytes] = ()) -> _Answer:
        """Send a request to the child, and return its answer; see `send` and `answer`."""
        self.send(content, parts)
        return self.answer(kind, seconds)

    def begin(self) -> Begun:
        """Return the present times, from which a request's time limit counts."""
        return Begun(time.monotonic(), self._worked())

    def _next(self, seconds: float | None, begun: Begun) -> _Frame | None:
        if seconds is None:
            return self._frames.get()
        wait = seconds - (time.monotonic() - begun.at)
        while True:
            try:
                return self._frames.get(timeout=max(0.0, wait))
            except queue.Empty:
                left = _MOST * seconds - (time.monotonic() - begun.at)
                wait = min(seconds - (self._worked() - begun.worked), left)
                if wait < _SHORTEST:
                    raise

    def _worked(self) -> float:
        try:
            used = psutil.Process(self._process.pid).cpu_times()
        except psutil.Error:
            return math.inf
        return float(used.user + used.system)

    def end(self) -> None:
        """End the child, which has `grace` seconds to end by itself."""
        if self._owner == os.getpid():
            assert self._process.stdin is not None
            if self._grace:
                with suppress(OSError):
                    self._process.stdin.close()
                try:
                    self._process.wait(self._grace)
                except subprocess.TimeoutExpired:
                    pass
                finally:  # a second Ctrl-C, too
                    self._process.kill()
            self._process.kill()
            self._process.wait()
            with suppress(OSError):  # data that the child has not read is lost
                self._process.stdin.close()
        atexit.unregister(self.end)


def how_ended(status: int) -> str:
    """Return a text with the exit code of a process, or the signal that killed it."""
    if status < 0:
        return f"was killed by {signal.Signals(-status).name}"
    return f"ended with exit code {status:{'#x' if status > 255 else ''}}"


class Caller:
    """A child process's connection to the process that started it. `abandoned` is called when that process ends."""

    def __init__(self, abandoned: Callable[[], None]) -> None:
        self._out = os.fdopen(os.dup(1), "wb")
        os.dup2(2, 1)  # output that libraries print there goes to stderr
        self._lock = threading.Lock()  # TensorRT reports progress from several threads
        self._frames: queue.Queue[_Frame] = queue.Queue()
        threading.Thread(target=self._listen, args=(abandoned,), daemon=True).start()

    def _listen(self, abandoned: Callable[[], None]) -> None:
        keep = False
        while frame := _read(sys.stdin.buffer):
            keep = keep or frame.kind == _KEEP
            if frame.kind == _REQUEST:
                self._frames.put(frame)
        if not keep:
            abandoned()
        os._exit(0 if keep else 1)  # without unwinding: that may take long, or crash

    def next(self) -> _Frame:
        """Wait for the caller's next request, and return it."""
        return self._frames.get()

    def send(self, kind: int, content: Any) -> None:
        """Write a message to the caller, if the caller still runs."""
        with self._lock, _unless_ended():
            _write(self._out, kind, msgspec.json.encode(content))

    def tell(self, news: Any) -> None:
        """Send a progress message to the caller, before the answer."""
        self.send(_NEWS, news)

    def ask(self, question: str) -> bytes:
        """Ask the caller for the data that `question` names, and return the data."""
        self.send(_QUESTION, question)
        return self.next().parts[0]


def serve(
    work: Callable[[Any, list[bytes], Caller], Any], requests: Any, abandoned: Callable[[], None] = lambda: None
) -> NoReturn:
    """Answer requests in a child process until stdin ends, within `Child`'s memory limit, without core dumps.

    ``work(request, parts, caller)`` returns the answer. The request has type `requests`; `parts` are the bytes that
    follow it. `abandoned` is called in another thread when the caller ends, unless it has called `Child.keep`. If the
    machine runs out of memory, Linux kills this process before others. Windows has no memory limit.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C at a terminal: the caller ends this process
    _limit(int(sys.argv[-1]))
    caller = Caller(abandoned)
    while True:
        frame = caller.next()
        try:
            kind, content = _ANSWER, work(msgspec.json.decode(frame.data, type=requests), frame.parts, caller)
        except TrtKvCacheError as error:
            kind, content = _ERROR, _Failure(type(error).__name__, str(error)[:_LONGEST])
        except MemoryError:
            kind, content = _ERROR, _Failure(MemoryError.__name__, "")
        except Exception:  # noqa: BLE001 - the caller raises it again, with this trace
            kind, content = _ERROR, _Failure("", traceback.format_exc())
        del frame
        caller.send(kind, content)


def _limit(size: int) -> None:
    if sys.platform == "win32":
        import ctypes

        ctypes.windll.kernel32.SetErrorMode(_NO_DIALOGS)
    else:
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if size:
            resource.setrlimit(resource.RLIMIT_AS, (size, size))
        with suppress(OSError):
            Path("/proc/self/oom_score_adj").write_text("1000")


def is_broken(error: OSError) -> bool:
    """Return True if writing failed because the process that reads the pipe has ended."""
    return error.errno == errno.EPIPE or (sys.platform == "win32" and error.errno == errno.EINVAL)


@contextmanager
def _unless_ended() -> Iterator[None]:
    """Within the ``with`` block, ignore the error of a write to a process that has ended."""
    try:
        yield
    except OSError as error:
        if not is_broken(error):
            raise

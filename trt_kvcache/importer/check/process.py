"""The caller's side of the check's process: it is started early, and ended if it exceeds its limits.

One child process serves all checks of its parent, so that Python and ONNX Runtime start once.
"""

from __future__ import annotations

import atexit
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec
import onnx
from onnx import TensorProto

import trt_kvcache
from trt_kvcache.importer.plan import CachePlan
from trt_kvcache.importer.protos import byte_size

if sys.platform == "win32":
    _GROUP = subprocess.CREATE_NEW_PROCESS_GROUP
else:
    _GROUP = 0
_ROOT = Path(trt_kvcache.__file__).parents[1]
_EACH = 8 << 20  # bytes of a weight that is sent; larger ones lie in files, which the process reads
_ALL = 256 << 20


@dataclass(frozen=True)
class Verdict:
    """The answer for one region.

    Attributes:
        name: the tensor or the cache that the region makes.
        answer: ``"equal"``, ``"different"``, ``"vacuous"`` (nothing was compared) or ``"undecided"`` (it cannot run);
            ``"dependent"``: a sequence of a batch changes it for another one; ``"ends"``: the model takes no more
            tokens than `name` says; ``"alone"``: it takes one sequence only, and states an open batch.
        why: the reason in words; empty for most equal regions.
        layer: see `Region`.
    """

    name: str
    answer: str
    why: str = ""
    layer: int | None = None


@dataclass(frozen=True)
class Request:
    """A check to do.

    Attributes:
        sizes: bytes of the original, of the rewritten model, and of a model that holds weights, which follow.
        folder: the folder of external data.
        thorough: run steps after a past of every length, too.
    """

    sizes: tuple[int, int, int]
    plan: CachePlan
    folder: str
    thorough: bool


@dataclass(frozen=True)
class Answer:
    """The verdicts, or the reason that there are none.

    Attributes:
        refused: an error for the user.
        exhausted: the process needed more memory than it may use.
        bug: a trace.
    """

    verdicts: tuple[Verdict, ...]
    refused: str = ""
    exhausted: bool = False
    bug: str = ""


class CheckProcessError(Exception):
    """The process gave no verdicts; the text says why, for the user."""


class CheckProcess:
    """A process that checks.

    Args:
        memory: bytes of address space that it may use.
    """

    def __init__(self, memory: int) -> None:
        self.memory = memory
        self.owner = os.getpid()
        self._child = subprocess.Popen(
            [sys.executable, "-m", "trt_kvcache.importer.check.worker", str(memory)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd=_ROOT,  # where python -m finds this very package
            start_new_session=True,
            creationflags=_GROUP,
        )
        self._answers: queue.Queue[bytes] = queue.Queue()
        threading.Thread(target=self._listen, name="trt-kvcache-check", daemon=True).start()

    @property
    def alive(self) -> bool:
        """It can take a request."""
        return self.owner == os.getpid() and self._child.poll() is None

    def _listen(self) -> None:
        assert self._child.stdout is not None
        with self._child.stdout as answers:
            for line in answers:
                self._answers.put(line)
        self._answers.put(b"")

    def ask(self, request: Request, parts: tuple[bytes, bytes, bytes], seconds: float) -> Answer:
        """The answer to a request.

        Raises:
            CheckProcessError: it takes too long, or the process died.
        """
        assert self._child.stdin is not None
        try:
            self._child.stdin.write(msgspec.json.encode(request) + b"\n")
            for part in parts:
                self._child.stdin.write(part)
            self._child.stdin.flush()
            line = self._answers.get(timeout=seconds)
        except queue.Empty:
            self.end()
            raise CheckProcessError(f"took more than {seconds:g} s") from None
        except OSError:  # it died before it had read everything
            line = b""
        except BaseException:  # an interrupt: nobody reads the answer
            self.end()
            raise
        if not line:
            self.end()
            raise CheckProcessError(f"ended with exit code {self._child.returncode}, as for want of memory")
        return msgspec.json.decode(line, type=Answer)

    def end(self) -> None:
        """Ends the process."""
        if self.owner == os.getpid():
            self._child.kill()
            self._child.wait()
            if self._child.stdin is not None:
                with suppress(OSError):  # what it has not read is lost
                    self._child.stdin.close()


_lock = threading.Lock()
_current: list[CheckProcess] = []


def start_process(memory: int) -> CheckProcess:
    """The child process of this process; started if there is none. It loads while the caller goes on."""
    with _lock:
        if _current and (not _current[0].alive or _current[0].memory != memory):
            old = _current.pop()
            old.end()
        if not _current:
            _current.append(CheckProcess(memory))
        return _current[0]


@atexit.register
def _end() -> None:
    for process in _current:
        process.end()


def check_in_process(
    original: onnx.ModelProto,
    rewritten: onnx.ModelProto,
    plan: CachePlan,
    weights: Mapping[str, TensorProto],
    folder: Path,
    *,
    seconds: float,
    memory: int,
    thorough: bool = False,
) -> tuple[Verdict, ...]:
    """The verdicts of `check_models`, from a process with limits.

    Raises:
        CheckProcessError: the process exceeded a limit, ended, or refused the models.
    """
    held = onnx.ModelProto()
    room = _ALL
    for tensor in weights.values():
        size = byte_size(tensor) or 0
        if size <= min(_EACH, room):
            held.graph.initializer.append(tensor)
            room -= size
    parts = (original.SerializeToString(), rewritten.SerializeToString(), held.SerializeToString())
    sizes = (len(parts[0]), len(parts[1]), len(parts[2]))
    with _asking:
        answer = start_process(memory).ask(Request(sizes, plan, str(folder), thorough), parts, seconds)
    if answer.bug:
        raise RuntimeError(f"the check failed:\n{answer.bug}")
    if answer.exhausted:
        raise CheckProcessError(f"needs more than {memory >> 20} MiB of memory")
    if answer.refused:
        raise CheckProcessError(answer.refused)
    return answer.verdicts


_asking = threading.Lock()

"""The proof of an engine, recorded while it is built: how much it takes, and the process that does it.

Each step of the original reads all of its weights. Assumed are 0.6 s a step and 1.5 s to open it for a GB of weights,
and 2.5 times the time where weights of float16 are converted anew at each step; what was measured stands in
`trt_kvcache.verify.memory`.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import trt_kvcache
from trt_kvcache import errors
from trt_kvcache.engine.protocol import unless_ended
from trt_kvcache.errors import TrtKvCacheError
from trt_kvcache.machine import free_memory

if TYPE_CHECKING:
    from trt_kvcache.importer import ImportedModel

__all__ = ["PHASE", "UNBOUND", "Answer", "Request", "bound", "record"]

PHASE = "recording the proof"
UNBOUND = b"?" * 64
"""In the place of the digest of an engine that is not built yet."""

_BUDGET = 120.0  # seconds that nobody asked for
_SCHEDULES: tuple[tuple[int, int | None], ...] = ((3, None), (2, 6), (1, 5))
"""Rows and steps, largest first."""
_USUAL = 12  # steps, if nothing else is said
_STEP, _OPEN, _ANEW = 0.6, 1.5, 2.5  # seconds for a GB; times
_CONVERTED = 2.7  # of the bytes of float16 weights
_PATIENCE = 3.0  # times the estimate, after which a recording ends
_START = 180.0  # seconds
Most = tuple[int, int, int | None, int | None, int]
_ROOT = Path(trt_kvcache.__file__).parents[1]
if sys.platform == "win32":
    _GROUP = subprocess.CREATE_NEW_PROCESS_GROUP
else:
    _GROUP = 0


@dataclass(frozen=True)
class Request:
    """A proof to record.

    Attributes:
        most: the engine's largest batch, chunk, positions with logits and positions of a sequence, and a length of an
            encoder's output that it takes.
        rows: most rows of the batch in a step.
        steps: how many; None: as many as it takes.
    """

    imported: ImportedModel
    most: Most
    rows: int
    steps: int | None


@dataclass(frozen=True)
class Answer:
    """The bytes of a proof, not bound to an engine yet; or why there is none.

    Attributes:
        kind: name of a class of `trt_kvcache.errors`; ``"bug"``: `why` is a trace.
    """

    proof: bytes
    why: str = ""
    kind: str = ""


def record(
    imported: ImportedModel,
    most: Most,
    wanted: str | int,
    weights: int,
    *,
    half: bool,
) -> tuple[bytes, str]:
    """Record the proof of an engine.

    Args:
        imported: model and plan.
        most: see `Request`.
        wanted: ``"auto"``, or the number of steps.
        weights: bytes of all weights.
        half: they are float16, which ONNX Runtime converts.

    Returns:
        The bytes of its file, in which `UNBOUND` stands for the engine; none with the reason.

    Raises:
        TrtKvCacheError: steps are asked for, and it cannot be done.
    """
    auto = wanted == "auto"
    slow = half and _CONVERTED * weights > free_memory()
    gigabytes = weights / 1e9 * (_ANEW if slow else 1)

    def seconds(rows: int, steps: int | None) -> float:
        runs = 2 * ((steps or _USUAL) + 2) * (min(rows, most[0]) if imported.plan.original else 1)
        return gigabytes * (2 * _OPEN + runs * _STEP)

    schedules = _SCHEDULES if auto else ((_SCHEDULES[0][0], int(wanted)),)
    fitting = [s for s in schedules if not auto or seconds(*s) <= _BUDGET]
    if not fitting:
        least = _SCHEDULES[-1]
        why = f"{least[1]} steps of the original on the CPU take about {seconds(*least):.0f} s here"
        return _refused(f"{why}, more than {_BUDGET:.0f}; --proof {least[1]} records them all the same", auto=auto)
    rows, steps = fitting[0]
    limit = _START + _PATIENCE * seconds(rows, steps) if auto else None
    answer = _ask(Request(imported, most, rows, steps), limit)
    if answer.proof:
        return answer.proof, ""
    if answer.kind == "bug":
        if not auto:
            raise RuntimeError(f"recording the proof failed:\n{answer.why}")
        last = answer.why.strip().splitlines()[-1]
        return _refused(f"{last}: a fault in trt_kvcache, please report it with the output of --proof 5", auto=auto)
    return _refused(answer.why, auto=auto, kind=answer.kind)


def bound(proof: bytes, engine: str) -> bytes:
    """A proof with the digest (BLAKE3, hex) of its engine."""
    return proof.replace(UNBOUND, engine.encode(), 1)


def _refused(why: str, *, auto: bool, kind: str = "OptionError") -> tuple[bytes, str]:
    said = f"the engine has no proof: {why}"
    if auto:
        return b"", said
    error = getattr(errors, kind)
    assert issubclass(error, TrtKvCacheError)
    raise error(f"{said}; leave --proof out, or give --proof off")


def _ask(request: Request, limit: float | None) -> Answer:
    """What the process answers, in `limit` seconds."""
    try:
        sent = pickle.dumps(request)
    except ValueError as error:  # a model of more than 2 GB, which has its weights inside
        return Answer(b"", f"the model cannot be sent to the process that records: {error}", "OptionError")
    # Its temporary files lie where they are removed, however it ends.
    with TemporaryDirectory(prefix="trt-kvcache-proof-") as scratch:
        return _answer(sent, limit, {**os.environ, **dict.fromkeys(("TMPDIR", "TEMP", "TMP"), scratch)})


def _answer(sent: bytes, limit: float | None, environment: Mapping[str, str]) -> Answer:
    child = subprocess.Popen(
        [sys.executable, "-m", "trt_kvcache.proof.worker"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment,
        cwd=_ROOT, start_new_session=True, creationflags=_GROUP,
    )  # fmt: skip
    assert child.stdin is not None
    assert child.stdout is not None
    late = threading.Event()

    def end() -> None:
        late.set()
        child.kill()

    timer = threading.Timer(limit or 0, end)
    try:
        if limit is not None:
            timer.start()
        with unless_ended():
            child.stdin.write(sent)
            child.stdin.flush()
        content = child.stdout.read()
    finally:
        timer.cancel()
        child.kill()  # it is done, or nobody reads the answer
        child.wait()
        with unless_ended():
            child.stdin.close()
        child.stdout.close()
    if content:
        answer: Answer = pickle.loads(content)
        return answer
    if late.is_set():
        return Answer(b"", f"the original took more than {limit:.0f} s on the CPU; --proof 5 waits", "OptionError")
    return Answer(b"", "the process that records it died, as for want of memory", "OptionError")

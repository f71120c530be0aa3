"""The proof of an engine, recorded while TensorRT builds it: how much it takes, and the process that does it.

Each step of the original reads all of its weights. Assumed are 0.6 s a step and 1.5 s to open it for a GB of weights,
and 2.5 times the time where weights of float16 are converted anew at each step; what was measured stands in
`trt_kvcache.verify.memory`.
"""

from __future__ import annotations

import os
import pickle
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from trt_kvcache import errors
from trt_kvcache.child import Child, ChildError, ChildLateError
from trt_kvcache.engine.manifest import NO_PROOF
from trt_kvcache.engine.memory import build_memory
from trt_kvcache.errors import TrtKvCacheError
from trt_kvcache.machine import free_memory

if TYPE_CHECKING:
    from trt_kvcache.importer import ImportedModel

__all__ = ["PHASE", "UNBOUND", "Answer", "Recording", "Request", "bound"]

PHASE = "recording the proof"
UNBOUND = b"?" * 64
"""In the place of the digest of an engine that is not built yet."""

_BUDGET = 120.0  # seconds that nobody asked for
_SCHEDULES: tuple[tuple[int, int | None], ...] = ((3, None), (2, 6), (1, 5))
"""Rows and steps, largest first."""
_USUAL = 20  # steps, if nothing else is said
_TEXT = 50  # runs that make the text
_STEP, _OPEN, _ANEW = 0.6, 1.5, 2.5  # seconds for a GB; times
_CONVERTED = 2.7  # of the bytes of float16 weights
_RESIDENT = 3.2, 1.3  # times the weights: memory of a recording that converts them, and of one that does not
_PATIENCE = 3.0  # times the estimate, after which a recording ends
_START = 180.0  # seconds
Most = tuple[int, int, int | None, int | None, int]


@dataclass(frozen=True)
class Request:
    """A proof to record; the pickled model and plan follow.

    Attributes:
        most: the engine's largest batch, chunk, positions with logits and positions of a sequence, and a length of an
            encoder's output that it takes.
        rows: most rows of the batch in a step.
        steps: how many; None: as many as it takes.
    """

    most: Most
    rows: int
    steps: int | None


@dataclass(frozen=True)
class Answer:
    """The bytes of a proof, not bound to an engine yet, and what it cannot show; or why there is none.

    Attributes:
        kind: name of a class of `trt_kvcache.errors`; ``"bug"``: `why` is a trace.
    """

    proof: bytes
    why: str = ""
    kind: str = ""


class Recording:
    """A proof that a process of its own records, beside TensorRT where memory is enough for both.

    Args:
        imported: model and plan. They are sent at once, and not kept.
        most: see `Request`.
        wanted: ``"auto"``, ``"off"``, or the number of steps.
        weights: bytes of all weights.
        half: they are float16, which ONNX Runtime converts.

    Raises:
        TrtKvCacheError: steps are asked for, and it cannot be done.
    """

    def __init__(self, imported: ImportedModel, most: Most, wanted: str | int, weights: int, *, half: bool) -> None:
        self.wanted = wanted
        self._auto = wanted == "auto"
        self._children: list[Child] = []
        self._closed = False
        self.answer: Future[Answer] = Future()
        slow = half and _CONVERTED * weights > free_memory()
        gigabytes = weights / 1e9 * (_ANEW if slow else 1)
        resident = _RESIDENT[0 if half and not slow else 1] * weights
        self.beside = resident + build_memory(weights) <= free_memory()
        """TensorRT may build meanwhile."""

        def seconds(rows: int, steps: int | None) -> float:
            runs = 2 * (steps or _USUAL) * (min(rows, max(most[0], 2)) if imported.plan.original else 1) + _TEXT
            return gigabytes * (2 * _OPEN + runs * _STEP)

        if wanted == "off":
            self.answer.set_result(Answer(b""))
            return
        schedules = _SCHEDULES if self._auto else ((_SCHEDULES[0][0], int(wanted)),)
        fitting = [s for s in schedules if not self._auto or seconds(*s) <= _BUDGET]
        if not fitting:
            least = _SCHEDULES[-1]
            why = f"{least[1]} steps of the original on the CPU take about {seconds(*least):.0f} s here"
            why = f"{why}, more than {_BUDGET:.0f}; --proof {least[1]} records them all the same"
            self.answer.set_result(Answer(b"", why, "OptionError"))
            return
        rows, steps = fitting[0]
        limit = _START + _PATIENCE * seconds(rows, steps) if self._auto else None
        try:
            model = pickle.dumps(imported)
        except ValueError as error:  # a model of more than 2 GB, which has its weights inside
            why = f"the model cannot be sent to the process that records: {error}"
            self.answer.set_result(Answer(b"", why, "OptionError"))
            return
        thread = ThreadPoolExecutor(1, "proof")
        self.answer = thread.submit(self._ask, Request(most, rows, steps), [model], limit)
        thread.shutdown(wait=False)

    def result(self) -> tuple[bytes, tuple[str, ...]]:
        """The bytes of the proof's file, in which `UNBOUND` stands for the engine, and notes; or none, and why.

        Raises:
            TrtKvCacheError: steps are asked for, and it cannot be done.
        """
        answer = self.answer.result()
        if answer.proof or not answer.why:
            return answer.proof, (answer.why,) if answer.why else ()
        if answer.kind != "bug":
            why, kind = answer.why, answer.kind
        elif self._auto:
            last = answer.why.strip().splitlines()[-1]
            why, kind = f"{last}: a fault in trt_kvcache, please report it with the output of --proof 5", "BuildError"
        else:
            raise RuntimeError(f"recording the proof failed:\n{answer.why}")
        said = f"{NO_PROOF}{why}"
        if self._auto:
            return b"", (said,)
        error = getattr(errors, kind)
        assert issubclass(error, TrtKvCacheError)
        raise error(f"{said}; leave --proof out, or give --proof off")

    def close(self) -> None:
        """End the process."""
        self._closed = True
        for child in self._children:
            child.end()
        with suppress(Exception):  # said where it is asked for
            self.answer.result()

    def _ask(self, request: Request, model: list[bytes], limit: float | None) -> Answer:
        """The answer of the process, in `limit` seconds."""
        # Its temporary files lie where they are removed, however it ends.
        with TemporaryDirectory(prefix="trt-kvcache-proof-") as scratch:
            environment = {**os.environ, **dict.fromkeys(("TMPDIR", "TEMP", "TMP"), scratch)}
            child = Child("-m", "trt_kvcache.proof.recorder", environment=environment)
            self._children.append(child)
            try:
                if self._closed:
                    return Answer(b"")
                child.send(request, [model.pop()])
                return child.answer(Answer, limit)
            except ChildError as error:
                late = isinstance(error, ChildLateError)
                why = f"the original {error} on the CPU; --proof 5 waits" if late else f"its process {error}"
                return Answer(b"", why, "OptionError")
            except TrtKvCacheError as error:
                return Answer(b"", error.message, type(error).__name__)
            except RuntimeError as error:
                return Answer(b"", str(error), "bug")
            finally:
                child.end()  # it is done, or nobody reads the answer


def bound(proof: bytes, engine: str) -> bytes:
    """A proof with the digest (BLAKE3, hex) of its engine."""
    return proof.replace(UNBOUND, engine.encode(), 1)

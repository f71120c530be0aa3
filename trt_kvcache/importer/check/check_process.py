"""Starts the process that checks, early; asks it for verdicts; and ends it if it exceeds its limits.

One child process serves all checks of its parent, so that Python and ONNX Runtime start once.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec
import onnx
from onnx import TensorProto

from trt_kvcache.child import Child
from trt_kvcache.errors import TrtKvCacheError, UnsupportedModelError
from trt_kvcache.importer.plan import CachePlan, PlanOptions
from trt_kvcache.progress import ProgressEvent, phase, tell


@dataclass(frozen=True)
class Verdict:
    """The answer for one region.

    Attributes:
        name: the tensor or the cache that the region makes.
        answer: ``"equal"``, ``"different"``, ``"vacuous"`` (nothing was compared), ``"undecided"`` (it cannot run) or
            ``"stuck"`` (the rewritten side does not run);
            ``"dependent"``: it depends on other sequences of the batch; ``"ends"``: the model takes no more tokens than
            `name` says; ``"alone"``: the model declares an open batch, but takes only one sequence; ``"mixed"``: it
            depends on how many tokens come in one step.
        why: the reason in words; empty for most equal regions.
        layer: see `Region`.
    """

    name: str
    answer: str
    why: str = ""
    layer: int | None = None


@dataclass(frozen=True)
class Request:
    """A request for a check. The bytes of the original and of the rewritten model follow it.

    Attributes:
        folder: the folder of external data.
        thorough: run steps after a past of every length, too.
    """

    plan: CachePlan
    folder: str
    thorough: bool


_lock = threading.Lock()
_asking = threading.Lock()
_current: dict[int, Child] = {}
"""Processes by bytes of address space: one, and a second one while the first still has to answer."""
_answering: list[Child] = []
"""Processes that still have to answer a caller."""


def start_process(options: PlanOptions, *, to_ask: bool = False) -> Child:
    """Start the process that checks, or return the running one. It loads ONNX Runtime while the caller continues.

    `to_ask`: the process joins `_answering`; no other call ends it until it leaves that list.
    """
    memory = options.check_memory << 30
    with _lock:
        child = _current.get(memory)
        if child is None or not child.alive:
            for size in [size for size, other in _current.items() if other not in _answering]:
                _current.pop(size).end()
            child = _current[memory] = Child("-m", "trt_kvcache.importer.check.checker", memory=memory)
        if to_ask:
            _answering.append(child)
        return child


def _pass_on(news: bytes) -> None:
    tell(msgspec.json.decode(news, type=ProgressEvent))


def check_in_process(
    original: onnx.ModelProto,
    rewritten: onnx.ModelProto,
    plan: CachePlan,
    weights: Mapping[str, TensorProto],
    folder: Path,
    *,
    thorough: bool = False,
) -> tuple[Verdict, ...]:
    """Return the verdicts of `check_models`, from a process with the limits of the plan's options.

    Raises:
        ChildError: the process exceeded a limit, or ended.
        UnsupportedModelError: the process refused the models.
    """
    parts = (original.SerializeToString(), rewritten.SerializeToString())
    with _asking, phase("comparing with the original"):
        child = start_process(plan.options, to_ask=True)
        try:
            child.send(Request(plan, str(folder), thorough), parts)
            return child.answer(
                tuple[Verdict, ...],
                plan.options.check_seconds,
                _pass_on,
                lambda name: weights[name].SerializeToString(),
            )
        except TrtKvCacheError as error:
            raise UnsupportedModelError(
                f"the rewritten model could not be compared with the original: {error.message}"
            ) from None
        finally:
            _answering.remove(child)

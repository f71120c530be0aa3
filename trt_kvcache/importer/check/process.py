"""The caller's side of the check's process: it is started early, and ended if it exceeds its limits.

One child process serves all checks of its parent, so that Python and ONNX Runtime start once.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import onnx
from onnx import TensorProto

from trt_kvcache.child import Child, ChildError
from trt_kvcache.importer.plan import CachePlan, PlanOptions
from trt_kvcache.progress import ProgressEvent, phase, tell


@dataclass(frozen=True)
class Verdict:
    """The answer for one region.

    Attributes:
        name: the tensor or the cache that the region makes.
        answer: ``"equal"``, ``"different"``, ``"vacuous"`` (nothing was compared), ``"undecided"`` (it cannot run) or
            ``"stuck"`` (the rewritten side does not run);
            ``"dependent"``: a sequence of a batch changes it for another one; ``"ends"``: the model takes no more
            tokens than `name` says; ``"alone"``: it takes one sequence only, and states an open batch; ``"counted"``:
            how many tokens come at once changes it.
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
        sizes: bytes of the original and of the rewritten model, which follow.
        folder: the folder of external data.
        thorough: run steps after a past of every length, too.
    """

    sizes: tuple[int, int]
    plan: CachePlan
    folder: str
    thorough: bool


@dataclass(frozen=True)
class Answer:
    """The verdicts, the reason that there are none, or a question.

    Attributes:
        wanted: the name of a weight; its bytes, and before them a line with their number, are the next request.
        refused: an error for the user.
        exhausted: the process needed more memory than it may use.
        bug: a trace.
    """

    verdicts: tuple[Verdict, ...] = ()
    wanted: str = ""
    refused: str = ""
    exhausted: bool = False
    bug: str = ""


_lock = threading.Lock()
_asking = threading.Lock()
_current: dict[int, Child] = {}
"""By bytes of address space; there is one, and another one while that has to answer."""
_answering: list[Child] = []
"""The one that was asked, for which another caller waits."""


def start_process(options: PlanOptions, *, to_ask: bool = False) -> Child:
    """The process that checks; it loads ONNX Runtime while the caller goes on.

    `to_ask`: nobody ends it until it is taken from `_answering`.
    """
    memory = options.check_memory << 30
    with _lock:
        child = _current.get(memory)
        if child is None or not child.alive:
            for size in [size for size, other in _current.items() if other not in _answering]:
                _current.pop(size).end()
            child = _current[memory] = Child("trt_kvcache.importer.check.worker", str(memory))
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
    """The verdicts of `check_models`, from a process with the limits of the plan's options.

    Raises:
        ChildError: the process exceeded a limit, ended, or refused the models.
    """
    parts = (original.SerializeToString(), rewritten.SerializeToString())
    request = msgspec.json.encode(Request((len(parts[0]), len(parts[1])), plan, str(folder), thorough))
    with _asking, phase("comparing with the original"):
        child = start_process(plan.options, to_ask=True)
        try:
            answer = _ask(child, (request, b"\n", *parts), weights, plan.options.check_seconds)
        finally:
            _answering.remove(child)
    if answer.bug:
        raise RuntimeError(f"the check failed:\n{answer.bug}")
    if answer.exhausted:
        raise ChildError(f"needs more than {plan.options.check_memory << 10} MiB of memory")
    if answer.refused:
        raise ChildError(answer.refused)
    return answer.verdicts


def _ask(child: Child, parts: Sequence[bytes], weights: Mapping[str, TensorProto], seconds: float) -> Answer:
    """The answer to a request; the child gets the weights that it asks for meanwhile."""
    begun = child.begin()
    while True:
        line = child.ask(parts, seconds, _pass_on, begun)
        answer = msgspec.json.decode(line, type=Answer)
        if not answer.wanted:
            return answer
        data = weights[answer.wanted].SerializeToString()
        parts = (b"%d\n" % len(data), data)

"""The messages between the caller's process and the build process, which `trt_kvcache.child` transports.

The caller sends a `Job` and the rewritten model. The build process sends messages of type `Event`, and at last `Done`.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import IO

import msgspec

from trt_kvcache.child import Child, ChildError, how_ended
from trt_kvcache.compare.bounds import Bounds
from trt_kvcache.engine.build_options import BuildOptions
from trt_kvcache.engine.manifest import Profile
from trt_kvcache.errors import BuildError
from trt_kvcache.importer.cache_plan import CachePlan, Target
from trt_kvcache.importer.files.flipped import Flipped
from trt_kvcache.messages import visible
from trt_kvcache.progress import ProgressEvent

STAGES = (
    "loading TensorRT", "parsing the model", "checking the network", "recording the proof", "building the engine",
)  # fmt: skip
"""The stages of the build process, in order. A build without a proof skips the stage of the proof."""


@dataclass(frozen=True)
class Job:
    """The request to build one engine.

    Attributes:
        title: name and version of the builder, for messages.
        model: absolute path of the source model; its external data lie in the same folder.
        engine: absolute path of an existing file to write the engine to; `output` is its final path, for messages.
        flipped: weights that the rewritten model declares as signed, while their bytes in the model's file are
            unsigned.
        bounds: sizes of the engine whose proof is recorded; None: no proof is recorded.
    """

    target: Target
    title: str
    model: str
    engine: str
    output: str
    plan: CachePlan
    profiles: tuple[Profile, ...]
    build: BuildOptions
    flipped: tuple[Flipped, ...] = ()
    bounds: Bounds | None = None


class Stage(msgspec.Struct, tag=True, frozen=True):
    """Message: the build process begins one of `STAGES`."""

    name: str


class Node(msgspec.Struct, tag=True, frozen=True):
    """Message: the parser begins a node, ``name [operator]``. If the parser crashes, this node is named."""

    name: str


class Progress(msgspec.Struct, tag=True, frozen=True):
    """Message: TensorRT's progress monitor reported a step."""

    event: ProgressEvent


class Log(msgspec.Struct, tag=True, frozen=True):
    """Message: a warning or an error of TensorRT's log."""

    error: bool
    message: str


class Line(msgspec.Struct, tag=True, frozen=True):
    """Message: any line of TensorRT's log, to be shown to the user."""

    text: str


class Done(msgspec.Struct, frozen=True):
    """The last message: the engine is complete on disk.

    Attributes:
        network: a text with the result of comparing the parsed network with the model.
        proof: the bytes of the file of the proof (a recorded decode); empty if there is no proof.
        note: what the proof cannot show, or why there is no proof.
    """

    version: str
    size: int
    blake3: str
    network: str = ""
    proof: bytes = b""
    note: str = ""


Event = Stage | Node | Progress | Log | Line
Send = Callable[[Event], None]

WORKER = ("-m", "trt_kvcache.engine.builder")
"""Arguments of the interpreter for the build process; the path of the engine follows."""

_GRACE = 3.0  # seconds in which the child may end by itself, once its pipe is closed
_CRASH = 0xC0000000  # from this number on, exit codes of Windows mean unhandled exceptions


@dataclass
class _Heard:
    """The messages that the build process has sent so far, for the error message if it dies."""

    progress: Callable[[ProgressEvent], None]
    stage: str = STAGES[0]
    node: str | None = None
    errors: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    def hear(self, news: bytes) -> None:
        match msgspec.json.decode(news, type=Event):
            case Stage(name):
                if name != self.stage:
                    self.progress(ProgressEvent(self.stage, None, 1, 1, finished=True))
                self.stage = name
                self.progress(ProgressEvent(name, None, 0, 1))
            case Node(name):
                self.node = name
            case Progress(event):
                self.progress(event)
            case Line(text):
                sys.stderr.write(f"{visible(text)}\n")
            case Log(error, message):
                (self.errors if error else self.warnings).append(message)


def run_worker(
    job: Job, model: Callable[[], bytes], progress: Callable[[ProgressEvent], None] = lambda _: None
) -> tuple[Done, tuple[str, ...]]:
    """Build an engine in a child process; return the result, and TensorRT's warnings.

    `model` returns the bytes of the rewritten model, which are freed while the child works. `progress` is called in
    this thread for every event; if it raises an exception, or on Ctrl-C, the child is ended. Raises `BuildError` if
    TensorRT refused the model or its process died, and `OutputError` if the engine could not be written.
    """
    heard = _Heard(progress)
    # The child's temporary files go to a folder that is removed even if the child crashes.
    with tempfile.TemporaryFile() as stderr, tempfile.TemporaryDirectory(prefix="trt-kvcache-build-") as scratch:
        environment = {**os.environ, **dict.fromkeys(("TMPDIR", "TEMP", "TMP"), scratch)}
        child = Child(*WORKER, job.engine, stderr=stderr, environment=environment, grace=_GRACE)
        try:
            child.send(job, [model()])
            done = child.answer(Done, told=heard.hear)
            child.keep()
        except ChildError:
            raise BuildError(_death_message(job, heard, child.status, stderr)) from None
        finally:
            child.end()
    progress(ProgressEvent(heard.stage, None, 1, 1, finished=True))
    return done, tuple(heard.warnings)


def _death_message(job: Job, heard: _Heard, status: int, stderr: IO[bytes]) -> str:
    stderr.seek(0)
    lines = [line for line in stderr.read().decode(errors="replace").splitlines() if line.strip()]
    node = f", at node {heard.node}" if heard.stage == STAGES[1] and heard.node is not None else ""
    words, how, advice = [*heard.errors[-3:], *lines[-2:]], how_ended(status), ""
    last = f" (its last output: {'; '.join(words)})" if words else ""
    if how.endswith("SIGKILL"):
        advice = "; it was probably out of memory: free some, or build on a larger machine"
    elif status < 0 or status >= _CRASH:
        advice = "; that is a crash inside TensorRT: change this part of the model, or try another version of TensorRT"
    return f"the process of {job.title} {how} while {heard.stage}{node}{advice}{last}"

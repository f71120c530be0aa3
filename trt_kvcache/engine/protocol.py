"""What the caller's process and the build process say to each other.

Caller to child, on its stdin: one line of JSON (`Job`), one line with the length of the rewritten model, and that many
bytes. The pipe then stays open for as long as the caller lives; a last byte takes over the finished engine, and closing
it without one makes the child remove its file. Child to caller, on what was its stdout: one line of JSON per `Event`.
"""

from __future__ import annotations

import errno
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import msgspec

from trt_kvcache.engine.manifest import Profile
from trt_kvcache.engine.options import BuildOptions
from trt_kvcache.importer.files.flipped import Flipped
from trt_kvcache.importer.plan import CachePlan, Target


@dataclass(frozen=True)
class ProgressEvent:
    """Progress of one phase of a build; phases nest.

    Attributes:
        phase: its name: one of `STAGES`, or TensorRT's own (IProgressMonitor).
        parent: the phase that it is part of, or None.
        step, steps: how many of its steps are done.
        finished: it is over, whether all steps were needed or not.
    """

    phase: str
    parent: str | None
    step: int
    steps: int
    finished: bool = False


STAGES = ("loading TensorRT", "parsing the model", "checking the network", "building the engine")
"""What the build process does, in this order; each is a phase of one step without a parent."""


@dataclass(frozen=True)
class Job:
    """What to build.

    Attributes:
        title: name and version of the builder, for messages.
        model: absolute path of the source model: external data are looked up beside it.
        engine: absolute path of an existing file to write the engine to.
        output: what becomes of that file, for messages.
        flipped: external data that the model declares signed and that are not, yet.
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


class Stage(msgspec.Struct, tag=True, frozen=True):
    """The child begins one of `STAGES`."""

    name: str


class Node(msgspec.Struct, tag=True, frozen=True):
    """The parser begins a node, as ``name [operator]``: the last word before a crash."""

    name: str


class Progress(msgspec.Struct, tag=True, frozen=True):
    """TensorRT's progress."""

    event: ProgressEvent


class Log(msgspec.Struct, tag=True, frozen=True):
    """A line of TensorRT's log, of severity warning or worse."""

    error: bool
    message: str


class Failed(msgspec.Struct, tag=True, frozen=True):
    """The build failed in a way that was foreseen: the name of a class of `trt_kvcache.errors`, and its message."""

    kind: str
    message: str


class Bug(msgspec.Struct, tag=True, frozen=True):
    """The child failed in a way that was not foreseen."""

    traceback: str


class Done(msgspec.Struct, tag=True, frozen=True):
    """The engine is written and on disk."""

    version: str
    size: int
    blake3: str


Event = Stage | Node | Progress | Log | Failed | Bug | Done

Send = Callable[[Event], None]


def is_broken(error: OSError) -> bool:
    """Whether writing failed because the process at the other end of the pipe has ended."""
    return error.errno == errno.EPIPE or (sys.platform == "win32" and error.errno == errno.EINVAL)


@contextmanager
def unless_ended() -> Iterator[None]:
    """Write to the other process: if it has ended, that is no error here."""
    try:
        yield
    except OSError as error:
        if not is_broken(error):
            raise

"""The messages between the caller's process and the build process, which `trt_kvcache.child` transports.

The request is a `Job`, followed by the bytes of the rewritten model; news are of type `Event`, the answer is `Done`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from trt_kvcache.compare.bounds import Bounds
from trt_kvcache.engine.manifest import Profile
from trt_kvcache.engine.options import BuildOptions
from trt_kvcache.importer.files.signed_weights import Flipped
from trt_kvcache.importer.plan import CachePlan, Target
from trt_kvcache.progress import ProgressEvent

STAGES = (
    "loading TensorRT", "parsing the model", "checking the network", "recording the proof", "building the engine",
)  # fmt: skip
"""The stages of the build process, in order; each is a phase of one step without a parent. A build without a proof
skips its stage."""


@dataclass(frozen=True)
class Job:
    """An engine to build.

    Attributes:
        title: name and version of the builder, for messages.
        model: absolute path of the source model; its external data lie in the same folder.
        engine: absolute path of an existing file to write the engine to.
        output: the final path of that file, for messages.
        flipped: external data that the model declares signed, but whose bytes are still unsigned.
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
    """The child begins one of `STAGES`."""

    name: str


class Node(msgspec.Struct, tag=True, frozen=True):
    """The parser begins a node, as ``name [operator]``; after a crash, the last one shows where it happened."""

    name: str


class Progress(msgspec.Struct, tag=True, frozen=True):
    """TensorRT's progress."""

    event: ProgressEvent


class Log(msgspec.Struct, tag=True, frozen=True):
    """A line of TensorRT's log, of severity warning or worse."""

    error: bool
    message: str


class Line(msgspec.Struct, tag=True, frozen=True):
    """A line of TensorRT's log, of any severity, for display."""

    text: str


class Done(msgspec.Struct, frozen=True):
    """The engine is written and on disk.

    Attributes:
        network: see `trt_kvcache.engine.manifest.Manifest`.
        proof: the bytes of its file; empty without a proof.
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

"""The manifest: what a built engine needs to be run or audited. Written beside the engine as ``<engine>.json``."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from trt_kvcache.errors import ManifestError
from trt_kvcache.importer.plan import CachePlan

SCHEMA_VERSION = 1


@dataclass(frozen=True)
class FileIdentity:
    """A file by name, size in bytes and BLAKE3 digest (hex) of its content."""

    name: str
    size: int
    blake3: str


@dataclass(frozen=True)
class ShapeRange:
    """The smallest, typical and largest shape of one input in one profile."""

    min: tuple[int, ...]
    opt: tuple[int, ...]
    max: tuple[int, ...]


@dataclass(frozen=True)
class Profile:
    """One optimization profile; its position in `Manifest.profiles` is its index in the engine.

    Attributes:
        name: ``"prefill"`` or ``"decode"``.
        shapes: per input with a dynamic dimension.
    """

    name: str
    shapes: dict[str, ShapeRange]


@dataclass(frozen=True)
class Manifest:
    """What a built engine needs to be run or audited.

    Attributes:
        aliases: present tensor -> past tensor, bound to one device address.
        double_buffered: present tensor -> past tensor for caches that are not in place.
        max_batch, max_chunk: the largest batch, and the longest update in tokens.
        backend: ``"tensorrt"`` or ``"tensorrt-rtx"``.
        compute_capabilities: those asked for; empty: the backend's default.
        model: the source model and its external data files.
        options: the build options as given, for the audit.
    """

    created_by: str
    backend: str
    backend_version: str
    compute_capabilities: tuple[str, ...]
    plan: CachePlan
    aliases: dict[str, str]
    double_buffered: dict[str, str]
    profiles: tuple[Profile, ...]
    max_batch: int
    max_chunk: int
    model: tuple[FileIdentity, ...]
    engine: FileIdentity
    options: dict[str, str | int | float | bool | None] = field(default_factory=dict)
    schema_version: int = SCHEMA_VERSION

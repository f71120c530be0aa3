"""Reads and writes the manifest: a file ``<engine>.json`` with facts that are needed to run or audit an engine."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
from blake3 import blake3

from trt_kvcache.arguments import as_path
from trt_kvcache.errors import ManifestError, OptionError
from trt_kvcache.files import FileIdentity, atomic_file, identify, read_file
from trt_kvcache.importer.cache_plan import CachePlan
from trt_kvcache.messages import human_bytes
from trt_kvcache.model_paths import engine_in
from trt_kvcache.page import Html, table, tag

_LARGEST = 1 << 28  # bytes
SCHEMA_VERSION = 2
NO_PROOF = "the engine has no proof: "
"""The first words of the warning of a build that records no proof (decode for the engine to repeat)."""
ENCODER = "encoder"
"""The name of the only profile in an encoder's engine."""


@dataclass(frozen=True)
class ShapeRange:
    """The smallest, typical and largest shape of one input in one profile."""

    min: tuple[int, ...]
    opt: tuple[int, ...]
    max: tuple[int, ...]


@dataclass(frozen=True)
class Profile:
    """One optimization profile. Its index in the engine is its position in `Manifest.profiles`.

    Attributes:
        name: ``"prefill"`` or ``"decode"``; `ENCODER` for an encoder.
        shapes: the range of shapes of each input with a dynamic dimension.
    """

    name: str
    shapes: dict[str, ShapeRange]


@dataclass(frozen=True, repr=False)
class Manifest:
    """The facts that are needed to run or to audit an engine.

    Attributes:
        aliases: maps each present tensor to the past tensor with the same device address.
        double_buffered: maps each present tensor to its past tensor, for states and for caches that are not updated in
            place.
        max_batch, max_chunk: the largest batch, and the longest update in tokens.
        max_logits: the most positions per sequence whose logits a step returns; None: the model decides.
        vocab, max_positions: number of rows of the lookup tables for token ids, and for positions; None if no table is
            known. The runtime checks ids and positions, because TensorRT reports no error for an index beyond a table.
        backend: ``"tensorrt"`` or ``"tensorrt-rtx"``.
        compute_capabilities: the GPUs that the caller asked for; empty: the backend's default.
        model: the source model and its external data files.
        options: the build options of the caller, for audits.
        warnings: TensorRT's warnings during the build, each once.
        network: a text with the result of comparing the model with the network that TensorRT parsed.
        encoder: file name of the encoder's engine, built together with this decoder's engine; None: there is no
            encoder. The manifest of an encoder's engine has no caches, and one profile, `ENCODER`.
        generation: settings from files beside the model, by the names of transformers' ``GenerationConfig``: end
            tokens, forced and suppressed tokens.
        proof: the file with a recorded decode of the rewritten model. On each GPU, the runtime checks the engine
            against this file before the first use. None: there is no proof.
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
    warnings: tuple[str, ...] = ()
    network: str = ""
    vocab: int | None = None
    max_positions: int | None = None
    max_logits: int | None = None
    encoder: FileIdentity | None = None
    proof: FileIdentity | None = None
    generation: dict[str, Any] = field(default_factory=dict)
    schema_version: int = SCHEMA_VERSION

    def __repr__(self) -> str:
        limits = "of an encoder" if self.is_encoder else f"batch {self.max_batch}, chunk {self.max_chunk}"
        built = f"{self.engine.name}, {self.backend} {self.backend_version}"
        return f"<Manifest: {built}, {self.plan.in_place_text}, {limits}>"

    def _repr_html_(self) -> Html:
        files = [f for f in (self.engine, self.encoder, self.proof, *self.model) if f is not None]
        rows = [(file.name, human_bytes(file.size), file.blake3[:16]) for file in files]
        return tag("div", tag("p", repr(self)[1:-1]), table(("file", "size", "BLAKE3"), rows), self.plan._repr_html_())

    @property
    def no_proof(self) -> str:
        """Why the engine has no proof (recorded decode), and how to record one; empty if it has one or needs none."""
        if self.proof is not None or self.is_encoder:
            return ""
        said = [warning.removeprefix(NO_PROOF) for warning in self.warnings if warning.startswith(NO_PROOF)]
        off = "it was built with --strip-plan" if self.options.get("strip_plan") else "it was built with --proof off"
        return (
            f"{said[0] if said else off}; 'build --proof STEPS' records a proof with this number of steps, "
            "however long they take"
        )

    @property
    def is_encoder(self) -> bool:
        """True for the engine of an encoder."""
        return tuple(profile.name for profile in self.profiles) == (ENCODER,)


@dataclass(frozen=True)
class _SchemaOnly:
    """The schema version of a manifest, which is read first, because other fields differ between versions."""

    schema_version: int


def manifest_path(engine: str | os.PathLike[str]) -> Path:
    """Return the path of an engine's manifest: ``model.engine.json`` for ``model.engine``."""
    return Path(f"{Path(engine)}.json")


def proof_path(engine: str | os.PathLike[str]) -> Path:
    """Return the path of an engine's proof (recorded decode): ``model.engine.proof`` for ``model.engine``."""
    return Path(f"{Path(engine)}.proof")


def encoder_path(engine: Path) -> Path:
    """Return the path of the encoder's engine for a decoder's engine: ``model.encoder.engine`` for ``model.engine``."""
    return engine.with_name(f"{engine.stem}.{ENCODER}{engine.suffix}")


def save_manifest(manifest: Manifest, path: str | os.PathLike[str]) -> None:
    """Write a manifest, completely or not at all; raise `OutputError` on failure."""
    with atomic_file(path) as file:
        file.write(encode_manifest(manifest))


def encode_manifest(manifest: Manifest) -> bytes:
    """Return the manifest as indented JSON. Its entry ``digest`` is the hash of all other entries."""
    content = msgspec.json.decode(msgspec.json.encode(manifest))
    content["digest"] = _digest(content)
    return msgspec.json.format(msgspec.json.encode(content), indent=2) + b"\n"


def _digest(content: dict[str, Any]) -> str:
    return blake3(msgspec.json.encode(content)).hexdigest()


def load_manifest(path: str | os.PathLike[str]) -> Manifest:
    """Read the manifest of an engine; `path` is the engine, its folder or the manifest.

    This function does not check the engine; see `check_engine`.

    Raises:
        ManifestError: the file is missing, is not a manifest, has an unknown schema version, or was edited.
    """
    path = engine_in(as_path("." if isinstance(path, str) and not path else path, "engine"))
    if path.is_dir():
        raise ManifestError(f"{path}: this is a folder; give the path of an engine")
    file = path if path.suffix == ".json" else manifest_path(path)
    try:
        data = read_file(file, _LARGEST)
    except FileNotFoundError:
        if not path.exists():
            raise ManifestError(f"{path}: no such file; check the path") from None
        if path.suffix == ".onnx":
            raise ManifestError(
                f"{path}: this is a model, which has no manifest; give an engine, or use 'trt-kvcache plan' to look "
                "at models"
            ) from None
        raise ManifestError(
            f"{file}: no such file; an engine needs the manifest that 'trt-kvcache build' wrote beside it"
        ) from None
    except OSError as error:
        raise ManifestError(f"{file}: cannot be read: {error.strerror}") from error
    advice = "build the engine again"
    try:
        version = msgspec.json.decode(data, type=_SchemaOnly).schema_version
        if version != SCHEMA_VERSION:
            raise ManifestError(
                f"{file}: the manifest has schema {version}, but this version of trt_kvcache reads schema "
                f"{SCHEMA_VERSION}: use the version of trt_kvcache that built the engine, or build it again"
            )
        content = msgspec.json.decode(data)
        if content.pop("digest", None) != _digest(content):
            raise ManifestError(
                f"{file}: the manifest was edited or damaged since 'trt-kvcache build' wrote it; {advice}"
            )
        return msgspec.json.decode(data, type=Manifest)
    except (msgspec.ValidationError, OptionError) as error:  # OptionError comes from the plan's options
        raise ManifestError(f"{file}: this is not a valid manifest: {error}; {advice}") from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ManifestError(f"{file}: not JSON: {error}; {advice}") from error


def check_engine(manifest: Manifest, engine: str | os.PathLike[str]) -> None:
    """Raise `ManifestError` if the engine is missing, or its size or BLAKE3 digest differ from the manifest's."""
    engine = Path(engine)
    if engine.suffix == ".json":
        raise ManifestError(f"{engine}: this is a manifest; give the engine beside it, {engine.with_suffix('')}")
    advice = "the manifest is not of this engine; build again, or put back the pair that was built together"
    try:
        size = engine.stat().st_size
        if size != manifest.engine.size:
            raise ManifestError(
                f"{engine}: the engine has {size} bytes, but its manifest says {manifest.engine.size}; {advice}"
            )
        digest = identify(engine).blake3
    except OSError as error:
        raise ManifestError(f"{engine}: the engine cannot be read: {error.strerror}") from error
    if digest != manifest.engine.blake3:
        raise ManifestError(
            f"{engine}: the engine has the BLAKE3 digest {digest}, but its manifest says "
            f"{manifest.engine.blake3}; {advice}"
        )

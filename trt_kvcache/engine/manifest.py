"""The manifest: the facts that running or auditing an engine needs, beside the engine as ``<engine>.json``."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from trt_kvcache.arguments import as_path
from trt_kvcache.errors import ManifestError
from trt_kvcache.files import FileIdentity, atomic_file, identify, read_file
from trt_kvcache.importer.plan import TENSORRT_DTYPES, AdapterPlan, CachePlan, Target
from trt_kvcache.names import engine_in
from trt_kvcache.page import Html, table, tag
from trt_kvcache.words import human_bytes

__all__ = [
    "ENCODER",
    "NO_PROOF",
    "SCHEMA_VERSION",
    "FileIdentity",
    "Manifest",
    "Profile",
    "ShapeRange",
    "check_engine",
    "encode_manifest",
    "encoder_path",
    "load_manifest",
    "manifest_path",
    "proof_path",
    "save_manifest",
]

_LARGEST = 1 << 28  # bytes
_SIZES = 1 << 31  # TensorRT counts elements of an axis in 32 bits
_FEW = 4
SCHEMA_VERSION = 1
NO_PROOF = "the engine has no proof: "
"""The beginning of the warning of a build that recorded none."""
ENCODER = "encoder"
"""The profile of an encoder's engine."""


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
        name: ``"prefill"`` or ``"decode"``; `ENCODER` of an encoder.
        shapes: per input with a dynamic dimension.
    """

    name: str
    shapes: dict[str, ShapeRange]


@dataclass(frozen=True, repr=False)
class Manifest:
    """The facts that running or auditing an engine needs.

    Attributes:
        aliases: present tensor -> past tensor, bound to one device address.
        double_buffered: present tensor -> past tensor for state, and for caches that are not in place.
        max_batch, max_chunk: the largest batch, and the longest update in tokens.
        max_logits: most positions of one sequence with logits in a step; None: the model decides.
        vocab, max_positions: rows of the tables that token ids and positions look up; None if none is known. The
            runtime checks ids and positions, because TensorRT reports no error for an index beyond them.
        backend: ``"tensorrt"`` or ``"tensorrt-rtx"``.
        compute_capabilities: of the caller; empty: the backend's default.
        model: the source model and its external data files.
        options: the build options of the caller, for the audit.
        warnings: TensorRT's warnings during the build, each once.
        encoder: the engine of the encoder that was built with this decoder's, by its name beside it; None: there is
            none. An encoder's own engine has no caches, and one profile, `ENCODER`.
        generation: settings from files beside the model, by the names of transformers' ``GenerationConfig``: tokens
            that end a text, start or end it by force, or never come.
        proof: the file with a decode of the original, which the engine has to repeat where it runs; None: none.
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
        """Why the engine has no proof, and how it gets one; empty if it has one, and for an encoder's."""
        if self.proof is not None or self.is_encoder:
            return ""
        said = [warning.removeprefix(NO_PROOF) for warning in self.warnings if warning.startswith(NO_PROOF)]
        off = "it was built with --strip-plan" if self.options.get("strip_plan") else "it was built with --proof off"
        return f"{said[0] if said else off}; 'build --proof STEPS' records one of so many steps, whatever they take"

    @property
    def is_encoder(self) -> bool:
        """True for the engine of an encoder."""
        return tuple(profile.name for profile in self.profiles) == (ENCODER,)


@dataclass(frozen=True)
class _SchemaOnly:
    """The one field that every schema version has: decoded first, because the rest may have changed."""

    schema_version: int


def manifest_path(engine: str | os.PathLike[str]) -> Path:
    """Return the path of an engine's manifest: ``model.engine.json`` for ``model.engine``."""
    engine = Path(engine)
    return engine.with_name(engine.name + ".json")


def proof_path(engine: str | os.PathLike[str]) -> Path:
    """Return the path of an engine's proof: ``model.engine.proof`` for ``model.engine``."""
    engine = Path(engine)
    return engine.with_name(engine.name + ".proof")


def encoder_path(engine: Path) -> Path:
    """Return the path of the engine of a decoder's encoder: ``model.encoder.engine`` for ``model.engine``."""
    return engine.with_name(f"{engine.stem}.{ENCODER}{engine.suffix}")


def save_manifest(manifest: Manifest, path: str | os.PathLike[str]) -> None:
    """Write a manifest, all or nothing.

    Raises:
        OutputError: the file cannot be written.
    """
    with atomic_file(path) as file:
        file.write(encode_manifest(manifest))


def encode_manifest(manifest: Manifest) -> bytes:
    """Return the manifest as indented JSON."""
    return msgspec.json.format(msgspec.json.encode(manifest), indent=2) + b"\n"


def load_manifest(path: str | os.PathLike[str]) -> Manifest:
    """Read the manifest of an engine, given the engine, its folder or the manifest itself.

    The engine is not read: see `check_engine`.

    Raises:
        ManifestError: the file is missing, no manifest, or of an unknown schema version.
    """
    path = engine_in(as_path("." if isinstance(path, str) and not path else path, "engine"))
    if path.is_dir():
        raise ManifestError(f"{path}: a folder; give the path of an engine")
    file = path if path.suffix == ".json" else manifest_path(path)
    try:
        data = read_file(file, _LARGEST)
    except FileNotFoundError:
        if not path.exists():
            raise ManifestError(f"{path}: no such file; check the path") from None
        if path.suffix == ".onnx":
            raise ManifestError(
                f"{path}: a model without a manifest; give an engine; 'trt-kvcache plan' shows models"
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
                f"{file}: manifest schema {version}; this version of trt_kvcache knows schema {SCHEMA_VERSION}: "
                "use the version of trt_kvcache that built the engine, or build it again"
            )
        manifest = msgspec.json.decode(data, type=Manifest)
        _check(manifest)
        return manifest
    except msgspec.ValidationError as error:
        raise ManifestError(f"{file}: not a valid manifest: {error}; {advice}") from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ManifestError(f"{file}: not JSON: {error}; {advice}") from error


def _check(manifest: Manifest) -> None:
    """Check that a manifest does not contradict itself. All readers rely on that.

    Raises:
        ValidationError: it does, with everything that was found.
    """
    faults = [*_limits(manifest), *_tensors(manifest), *_profiles(manifest)]
    in_place = {c.present: c.past for c in manifest.plan.caches if c.carried and c.in_place}
    if manifest.aliases != in_place:
        pairs = ", ".join(f"{present!r} is {past!r}" for present, past in manifest.aliases.items() - in_place.items())
        faults.append(f"aliases are not those of the plan's caches in place ({pairs or 'some are missing'})")
    if manifest.double_buffered != manifest.plan.double_buffered:
        faults.append("the tensors with two buffers are not those of the plan")
    if faults:
        more = f"; and {len(faults) - _FEW} more" if len(faults) > _FEW else ""
        raise msgspec.ValidationError("; ".join(faults[:_FEW]) + more)


def _limits(manifest: Manifest) -> Iterator[str]:
    backends = [target.value for target in Target]
    if manifest.backend not in backends:
        yield f"backend {manifest.backend!r}; there are {', '.join(backends)}"
    for name in ("max_batch", "max_chunk", "max_logits", "vocab", "max_positions"):
        value = getattr(manifest, name)
        if value is not None and not 0 < value < _SIZES:
            yield f"{name} is {value}, which is no size"


def _tensors(manifest: Manifest) -> Iterator[str]:
    seen = set()
    for tensor in manifest.plan.tensors:
        called = f"{tensor.io} {tensor.name!r}"
        if not tensor.name.isprintable():
            yield f"{called} has a control character or line break in its name"
        if (tensor.io, tensor.name) in seen:
            yield f"{called} is there twice"
        seen.add((tensor.io, tensor.name))
        if tensor.dtype not in TENSORRT_DTYPES:
            yield f"{called} has the dtype {tensor.dtype!r}, which no engine has"
        if any(isinstance(dim, int) and not 0 <= dim < _SIZES for dim in tensor.shape):
            yield f"{called} has the shape {list(tensor.shape)}"
        ranges = [r for p in manifest.profiles for name, r in p.shapes.items() if name == tensor.name]
        ranks = {len(tensor.axes), *(len(shape) for r in ranges for shape in (r.min, r.opt, r.max))}
        if ranks != {len(tensor.shape)}:
            yield f"{called} {list(tensor.shape)} has axes or profiles of another length"
    plan = manifest.plan
    for past, dtype in [*((c.past, c.dtype) for c in plan.caches), *((s.past, s.dtype) for s in plan.states)]:
        if dtype not in TENSORRT_DTYPES:
            yield f"{past!r} has the dtype {dtype!r}, which no engine has"
    yield from (f"state {state.past!r} has no axes" for state in manifest.plan.states if not state.shape)
    if plan.adapters is not None:
        yield from _adapters(plan.adapters, manifest)
    for cache in manifest.plan.caches:
        for shape, axis in (
            (cache.logical_shape, cache.sequence_axis),
            (cache.physical_shape, cache.physical_sequence_axis),
        ):
            if not 0 <= axis < len(shape):
                yield f"cache {cache.past!r} {list(shape)} has no axis {axis}"
        for name, io in ((cache.past, "input"), (cache.present, "output")):
            if cache.carried and (io, name) not in seen:
                yield f"cache {name!r} is no {io} of the engine"


def _adapters(adapters: AdapterPlan, manifest: Manifest) -> Iterator[str]:
    shapes = {t.name: t.shape for t in manifest.plan.tensors if t.io == "input"}
    if len(shapes.get(adapters.index, ())) != 1 or not 0 < adapters.slots < _SIZES or not 0 < adapters.rank < _SIZES:
        yield f"adapters are {adapters.slots} of rank {adapters.rank}, chosen by '{adapters.index}'"
    for product in adapters.products:
        slots = adapters.slots + 1
        wanted = {product.a: (slots, product.inputs, product.rank), product.b: (slots, product.rank, product.outputs)}
        yield from (
            f"{name!r} is no input {list(shape)}" for name, shape in wanted.items() if shapes.get(name) != shape
        )
        if not all(0 <= part.start < part.stop <= product.outputs for part in product.parts):
            yield f"{product.a!r} has modules outside of its {product.outputs} columns"


def _profiles(manifest: Manifest) -> Iterator[str]:
    if not manifest.profiles:
        yield "it has no profiles"
    inputs = {tensor.name for tensor in manifest.plan.tensors if tensor.io == "input"}
    for profile in manifest.profiles:
        for name, shapes in profile.shapes.items():
            sizes = list(zip(shapes.min, shapes.opt, shapes.max, strict=False))
            if name not in inputs:
                yield f"profile {profile.name!r} has {name!r}, which is no input"
            elif not all(0 <= low <= typical <= high < _SIZES for low, typical, high in sizes):
                yield f"profile {profile.name!r} has sizes of {name!r} in no order: {sizes}"


def check_engine(manifest: Manifest, engine: str | os.PathLike[str]) -> None:
    """Check that the manifest describes this engine, by size and BLAKE3 digest of the whole file.

    Raises:
        ManifestError: the engine is missing, or the manifest is of another one.
    """
    engine = Path(engine)
    if engine.suffix == ".json":
        raise ManifestError(f"{engine}: a manifest; give the engine beside it, {engine.with_suffix('')}")
    advice = "the manifest is not of this engine; build again, or put back the pair that was built together"
    try:
        size = engine.stat().st_size
        if size != manifest.engine.size:
            raise ManifestError(f"{engine}: {size} bytes, its manifest says {manifest.engine.size}; {advice}")
        digest = identify(engine).blake3
    except OSError as error:
        raise ManifestError(f"{engine}: the engine cannot be read: {error.strerror}") from error
    if digest != manifest.engine.blake3:
        raise ManifestError(f"{engine}: BLAKE3 {digest}, its manifest says {manifest.engine.blake3}; {advice}")

"""From an ONNX decoder to an engine and its manifest."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from trt_kvcache import __version__
from trt_kvcache.engine.backend import Backend, check_build_options, choose_backend
from trt_kvcache.engine.doctor import find_gpus
from trt_kvcache.engine.files import FileIdentity, check_output, identify, publish, sync, temporary_file
from trt_kvcache.engine.manifest import Manifest, Profile, encode_manifest, manifest_path
from trt_kvcache.engine.memory import check_memory
from trt_kvcache.engine.options import CURRENT, BuildOptions, format_shapes
from trt_kvcache.engine.process import run_worker
from trt_kvcache.engine.profiles import Limits, make_profiles, resolve_limits
from trt_kvcache.engine.protocol import Done, Job, ProgressEvent
from trt_kvcache.errors import BuildError, ModelError, OutputError
from trt_kvcache.importer.plan import CachePlan, PlanOptions, Target, UpdateContract

__all__ = ["ProgressEvent", "build_engine"]


def build_engine(
    model: str | os.PathLike[str],
    output: str | os.PathLike[str],
    *,
    options: PlanOptions | None = None,
    build: BuildOptions | None = None,
    progress: Callable[[ProgressEvent], None] | None = None,
) -> Manifest:
    """Build an engine whose caches are updated in place, and write it with its manifest.

    The engine goes to `output`, the manifest to ``<output>.json``. Both appear together and complete, or existing files
    stay as they are. TensorRT runs in a child process, which ends with the caller; Ctrl-C leaves nothing behind.

    Args:
        model: path of an ONNX decoder, opset 24 or later.
        output: path of the engine.
        options: how to plan; `target` and `packed_native` follow from the backend.
        build: how to build.
        progress: called with every step; what it raises ends the build.

    Returns:
        The manifest, as written.

    Raises:
        InvalidModelError, UnsupportedModelError, AmbiguousRoleError: the model cannot be used.
        OptionError: an option is illegal for this model or backend; it would not fit into memory.
        OutputError: a file cannot be written.
        BackendError: no fitting TensorRT is installed.
        BuildError: TensorRT refuses the model; with its words.
    """
    # Not at the top: every other name of the engine package works without ONNX.
    from trt_kvcache.importer import import_model
    from trt_kvcache.importer.index_limits import index_limits
    from trt_kvcache.importer.protos import byte_size, is_op, iter_tensors
    from trt_kvcache.importer.serialize import serialize_model
    from trt_kvcache.importer.signed import sign_weights

    build = build or BuildOptions()
    engine_path = check_output(output)
    if engine_path.suffix == ".json":
        raise OutputError(f"{output}: manifests end in .json; give another name for the engine, such as model.engine")
    check_output(manifest_path(engine_path))
    backend = choose_backend(build.backend)
    check_build_options(backend, build)
    options = replace(options or PlanOptions(), target=backend.target, packed_native=backend.packed_native)

    imported = import_model(model, options)
    source, plan, rewritten = imported.source.path, imported.plan, [imported.model]
    files = {source: source.name} | {p: os.path.relpath(p, source.parent) for p in imported.source.external_files}
    tables = index_limits(imported.model, plan)
    flipped = sign_weights(imported.model, source.parent)
    quantized = any(is_op(node, "DequantizeLinear") for node in imported.model.graph.node)
    weights = sum(byte_size(tensor) or 0 for tensor in iter_tensors(imported.model))
    scans = [node.name for node in imported.model.graph.node if is_op(node, "Scan")]
    del imported  # a model with its weights inside is large; nobody needs it while TensorRT works
    _check_not_model(engine_path, files)
    limits = resolve_limits(plan, build)
    profiles = make_profiles(plan, build, limits, quantized=quantized)
    plan = _bound_contracts(plan, limits.max_chunk)
    if build.memory_check and backend.target is Target.TENSORRT_RTX:
        twice = build.decode_weights == "own" and limits.max_batch == 1 and not quantized
        check_memory(weights, sum(weight.length for weight in flipped), twice=twice)

    with temporary_file(engine_path) as engine_file, _identities(files) as identities:
        job = Job(backend.target, backend.title, str(source), str(engine_file), plan, profiles, build, flipped)
        try:
            done, warnings = run_worker(job, lambda: serialize_model(rewritten.pop()), progress)
        except BuildError as error:
            if not scans or limits.max_chunk == 1:
                raise
            raise BuildError(f"{error}; {_about_scans(scans)}") from None
        manifest = _manifest(backend, build, plan, limits, profiles, done, warnings, engine_path, identities.result())
        manifest = replace(
            manifest,
            vocab=min(tables.tokens.values(), default=None),
            max_positions=min(tables.positions.values(), default=None),
        )
        _write(manifest, engine_file, engine_path)
    return manifest


def _check_not_model(engine: Path, files: dict[Path, str]) -> None:
    """Refuse to write over the model."""
    for written in (engine, manifest_path(engine)):
        for path in files:
            if written.exists() and written.samefile(path):
                raise OutputError(f"{written}: is a file of the model; give another name for the engine")


def _about_scans(scans: list[str]) -> str:
    """What may be the matter where a build fails: see `importer.scans`."""
    return (
        f"the model has a Scan over the tokens of an update ('{scans[0]}'), and some operators do not build before one "
        "while their number is open: try --max-chunk 1 (one token in a step), or export with a fixed number of tokens"
    )


def _bound_contracts(plan: CachePlan, max_chunk: int) -> CachePlan:
    """The plan with the longest update in every contract."""

    def bounded(contract: UpdateContract) -> UpdateContract:
        known = contract.max_update_length
        return replace(contract, max_update_length=max_chunk if known is None else min(known, max_chunk))

    caches = tuple(replace(c, contract=bounded(c.contract)) if c.contract else c for c in plan.caches)
    return replace(plan, caches=caches)


@contextmanager
def _identities(files: dict[Path, str]) -> Iterator[Future[tuple[FileIdentity, ...]]]:
    """Identify the model's files in a thread, which ends with the block."""
    cancelled = threading.Event()

    def work() -> tuple[FileIdentity, ...]:
        try:
            return tuple(identify(path, name, cancelled) for path, name in files.items())
        except InterruptedError:
            raise
        except OSError as error:
            raise ModelError(f"{error.filename}: cannot be read: {error.strerror}") from error

    with ThreadPoolExecutor(1, "identify-model") as pool:
        try:
            yield pool.submit(work)
        finally:
            cancelled.set()


def _manifest(
    backend: Backend,
    build: BuildOptions,
    plan: CachePlan,
    limits: Limits,
    profiles: tuple[Profile, ...],
    done: Done,
    warnings: tuple[str, ...],
    engine: Path,
    model: tuple[FileIdentity, ...],
) -> Manifest:
    carried = [c for c in plan.caches if c.carried]
    return Manifest(
        created_by=f"trt_kvcache {__version__}",
        backend=backend.target.value,
        backend_version=done.version,
        compute_capabilities=_built_for(build),
        plan=plan,
        aliases={c.present: c.past for c in carried if c.in_place},
        double_buffered=plan.double_buffered,
        profiles=profiles,
        max_batch=limits.max_batch,
        max_chunk=limits.max_chunk,
        max_logits=limits.max_logits,
        model=model,
        engine=FileIdentity(engine.name, done.size, done.blake3),
        options=_flat(build),
        warnings=warnings,
    )


def _built_for(build: BuildOptions) -> tuple[str, ...]:
    """The compute capabilities by name: ``current`` means something else on the next machine."""
    if build.compute_capabilities != (CURRENT,):
        return build.compute_capabilities
    _, gpus, _ = find_gpus()
    return tuple(f"sm{gpu.compute_capability.replace('.', '')}" for gpu in gpus[:1])


def _flat(build: BuildOptions) -> dict[str, str | int | float | bool | None]:
    """The options as they would be given on a command line."""
    flat = {name: value for name, value in vars(build).items() if not name.endswith("shapes")}
    flat["compute_capabilities"] = ",".join(build.compute_capabilities)
    for name in ("min_shapes", "opt_shapes", "max_shapes"):
        flat[name] = format_shapes(getattr(build, name))
    return flat


def _write(manifest: Manifest, engine_file: Path, engine: Path) -> None:
    """Put engine and manifest in place: the manifest last, and neither if one fails."""
    final = check_output(manifest_path(engine))
    with temporary_file(final) as manifest_file:
        try:
            with open(manifest_file, "wb") as file:
                file.write(encode_manifest(manifest))
                sync(file)
        except OSError as error:
            raise OutputError(f"{final}: cannot be written: {error.strerror}") from error
        publish([(engine_file, engine), (manifest_file, final)])

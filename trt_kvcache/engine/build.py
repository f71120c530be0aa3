"""Builds an engine and its manifest from an ONNX decoder."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from blake3 import blake3

from trt_kvcache import __version__
from trt_kvcache.arguments import as_options, shown
from trt_kvcache.compare.bounds import Bounds
from trt_kvcache.engine.backend import Backend, check_build_options, choose_backend
from trt_kvcache.engine.doctor import find_gpus
from trt_kvcache.engine.encoder import EncoderJob, find_job, which_encoder
from trt_kvcache.engine.folder import copy_texts, new_folders, output_engine
from trt_kvcache.engine.manifest import Manifest, Profile, encode_manifest, encoder_path, manifest_path, proof_path
from trt_kvcache.engine.memory import check_memory
from trt_kvcache.engine.options import CURRENT, BuildOptions, format_shapes
from trt_kvcache.engine.process import run_worker
from trt_kvcache.engine.profiles import make_profiles, resolve_limits, without_shapes
from trt_kvcache.engine.protocol import Done, Job
from trt_kvcache.errors import BuildError, ModelError, OptionError, OutputError, TrtKvCacheError
from trt_kvcache.files import FileIdentity, check_output, identify, publish, sync, temporary_file
from trt_kvcache.importer.plan import CachePlan, PlanOptions, Role, Target, UpdateContract
from trt_kvcache.progress import ProgressEvent, listener

if TYPE_CHECKING:
    import onnx

    from trt_kvcache.importer.check import Checked
    from trt_kvcache.importer.files.signed_weights import Flipped
    from trt_kvcache.importer.files.source import SourceModel

__all__ = ["ProgressEvent", "build_engine"]

_T = TypeVar("_T")
_ENCODER = 6  # positions of an encoder's output in a proof, if the engine takes them


def build_engine(
    model: str | os.PathLike[str],
    output: str | os.PathLike[str],
    *,
    options: PlanOptions | None = None,
    build: BuildOptions | None = None,
    progress: Callable[[ProgressEvent], None] | None = None,
) -> Manifest:
    """Build an engine whose caches are updated in place, and write it with its manifest.

    The engine goes to `output`, the manifest to ``<output>.json``, the proof to ``<output>.proof``. If an encoder lies
    beside the model, its engine goes to ``model.encoder.engine`` for ``model.engine``. All files appear together and
    complete; after an error, existing files are unchanged. TensorRT runs in a child process, which ends with the
    caller; Ctrl-C leaves no files.

    Args:
        model: path of an ONNX decoder, opset 24 or later.
        output: path of the engine; or of a folder, which exists or ends with a slash: the folder also gets tokenizer,
            chat template and generation config. Missing folders are created.
        options: options of the plan; `target` and `packed_native` follow from the backend.
        build: options of the build.
        progress: called with every step; an exception from it ends the build.

    Returns:
        The manifest, as written.

    Raises:
        InvalidModelError, UnsupportedModelError, AmbiguousRoleError: the model cannot be used.
        OptionError: an option is illegal for this model or backend, or the build would not fit into memory.
        OutputError: a file cannot be written.
        BackendError: no suitable TensorRT is installed.
        BuildError: TensorRT refuses the model; the message quotes TensorRT.
    """
    watched = _Watched(progress)
    engine, folder = output_engine(output)
    try:
        with new_folders(engine.parent):
            manifest = _build_engine(model, engine, options, build, watched)
            if folder is not None:
                copy_texts(Path(model), folder)
            return manifest
    except Exception:
        if watched.verdict is not None:
            watched.verdict.result()  # a refusal of the check says more than later errors of such a model
        raise


def _build_engine(
    model: str | os.PathLike[str],
    output: str | os.PathLike[str],
    options: PlanOptions | None,
    build: BuildOptions | None,
    watched: _Watched,
) -> Manifest:
    """`build_engine`, while the check of the model runs: files appear only after the check has ended."""
    # Not at the top: all other names of the engine package work without ONNX.
    from trt_kvcache.engine.generation import settings_beside
    from trt_kvcache.importer import import_unchecked
    from trt_kvcache.importer.planning.index_limits import index_limits
    from trt_kvcache.importer.protos import is_op

    build = BuildOptions() if build is None else as_options(build, BuildOptions, "build")
    options = PlanOptions() if options is None else as_options(options, PlanOptions, "options")
    engine_path = check_output(output)
    if engine_path.suffix == ".json":
        raise OutputError(f"{output}: manifests end in .json; give another name for the engine, such as model.engine")
    for beside in (manifest_path(engine_path), proof_path(engine_path)):
        check_output(beside)
    if build.log not in (None, "-"):
        build = replace(build, log=str(check_output(build.log)))  # the build process runs in another folder
    backend = choose_backend(build.backend)
    check_build_options(backend, build)
    options = replace(options, target=backend.target, packed_native=backend.packed_native)

    imported, watched.verdict = import_unchecked(model, options)
    generation = settings_beside(Path(model))
    plan, part = imported.plan, _part([imported.source], imported.model)
    tables = index_limits(imported.model, plan)
    quantized = any(is_op(node, "DequantizeLinear") for node in imported.model.graph.node)
    scans = [node.name for node in imported.model.graph.node if is_op(node, "Scan")]
    del imported  # the weights may be inside
    _check_not_model(engine_path, part.files)
    if engine_path.suffix.lower() == ".onnx":  # how commands and sessions tell a model from an engine
        raise OutputError(f"{output}: models end in .onnx; give another name for the engine, such as model.engine")

    setup = _Setup(build, backend, watched)
    if build.encoder != "auto":
        which_encoder(part.path, plan, build)  # a named encoder has to exist
    encoder, said = _or_on_the_cpu(setup, lambda: find_job(part.path, plan, build))
    own = build if encoder is None else _of_decoder(build, plan, encoder)
    try:
        limits = resolve_limits(plan, own)
        profiles = make_profiles(plan, own, limits, quantized=quantized)
    except OptionError as error:
        raise OptionError("; ".join([error.message, *said])) from None
    plan = _bound_contracts(plan, limits.max_chunk)
    positions = min(tables.positions.values(), default=None)
    bounds = Bounds(
        limits.max_batch, limits.max_chunk, limits.max_logits, positions, _encoder_length(plan, profiles)
    )  # fmt: skip
    twice = build.decode_weights == "own" and limits.max_batch == 1 and not quantized
    _check_memory(part, setup, twice=twice)
    unproved = build.strip_plan or build.proof == "off"
    with ExitStack() as stack:
        ready: list[tuple[Manifest, Path, Path]] = []
        if encoder is not None:
            entry, more = _or_on_the_cpu(setup, lambda: _build_encoder(stack, encoder, setup, engine_path))
            ready, said = [entry] if entry is not None else [], (*said, *more)
        try:
            built = stack.enter_context(
                _built(part, plan, profiles, setup, engine_path, twice=twice, bounds=None if unproved else bounds)
            )
        except BuildError as error:
            if not scans or limits.max_chunk == 1:
                raise
            raise BuildError(f"{error.message}; {_about_scans(scans)}") from None
        plan = watched.verdict.result().on(plan)
        manifest = replace(
            _manifest(setup, plan, profiles, built, engine_path),
            max_batch=limits.max_batch,
            max_chunk=limits.max_chunk,
            max_logits=limits.max_logits,
            vocab=min(tables.tokens.values(), default=None),
            max_positions=positions,
            proof=_proof_identity(built.done.proof, engine_path),
            encoder=ready[0][0].engine if ready else None,
            generation=generation,
            warnings=(*said, *filter(None, [built.done.note]), *built.warnings),
        )
        _publish([*ready, (manifest, built.file, engine_path)], built.done.proof)
    return manifest


def _proof_identity(proof: bytes, engine: Path) -> FileIdentity | None:
    return FileIdentity(proof_path(engine).name, len(proof), blake3(proof).hexdigest()) if proof else None


class _Watched:
    """The caller's `progress`, and the check, which runs at the same time.

    It keeps the exception that one of them raised; that exception ends the whole build.
    """

    def __init__(self, progress: Callable[[ProgressEvent], None] | None) -> None:
        if progress is not None and not callable(progress):
            raise OptionError(f"progress is {shown(progress)}; give a function that takes a ProgressEvent")
        self._progress = progress or listener()
        self.verdict: Future[Checked] | None = None
        self.raised: BaseException | None = None

    def __call__(self, event: ProgressEvent) -> None:
        try:
            if self.verdict is not None and self.verdict.done():
                self.verdict.result()
            if self._progress is not None:
                self._progress(event)
        except BaseException as error:
            self.raised = error
            raise


@dataclass(frozen=True)
class _Setup:
    """The choices that all engines of one build share."""

    build: BuildOptions
    backend: Backend
    progress: _Watched


@dataclass(frozen=True)
class _Part:
    """A model that becomes an engine.

    Attributes:
        path: path of the model's file; external data lie in the same folder.
        files: all files of the model, by path, with their names in the manifest.
        sources: the models as read.
        model: the rewritten model; taken out when it is sent to TensorRT.
        flipped: external data whose bytes change for TensorRT.
        weights: size of all weights in bytes.
    """

    path: Path
    files: dict[Path, str]
    sources: tuple[SourceModel, ...]
    model: list[onnx.ModelProto]
    flipped: tuple[Flipped, ...]
    weights: int


@dataclass(frozen=True)
class _Built:
    """An engine in a temporary file."""

    file: Path
    done: Done
    warnings: tuple[str, ...]
    model: tuple[FileIdentity, ...]


def _part(sources: Sequence[SourceModel], model: onnx.ModelProto) -> _Part:
    from trt_kvcache.importer.files.signed_weights import for_tensorrt
    from trt_kvcache.importer.protos import byte_size, iter_tensors

    folder = sources[0].path.parent
    paths = dict.fromkeys(path for source in sources for path in (source.path, *source.external_files))
    files = {path: os.path.relpath(path, folder) for path in paths}
    flipped = for_tensorrt(model, folder)
    weights = sum(byte_size(tensor) or 0 for tensor in iter_tensors(model))
    return _Part(sources[0].path, files, tuple(sources), [model], flipped, weights)


def _of_decoder(build: BuildOptions, plan: CachePlan, encoder: EncoderJob) -> BuildOptions:
    """Return the options for the decoder, which takes the encoder's output for the longest source.

    Raises:
        OptionError: the caller allows less. Otherwise the first step after a long source would fail.
    """
    positions, allowed = encoder.positions, build.max_encoder
    if positions is not None and allowed is not None and positions > allowed:
        sizes = ", ".join(f"{name} {list(r.max)}" for name, r in encoder.profile.shapes.items())
        of = f"the longest source ({sizes})" if sizes else "every source"
        raise OptionError(
            f"--max-encoder is {allowed}, and the encoder makes {positions} positions of {of}; give "
            f"--max-encoder {positions}, {'allow shorter sources with --maxShapes, ' if sizes else ''}or leave it out"
        )
    own = without_shapes(build, plan, encoder.plan)
    shaped = own.min_shapes.keys() | own.opt_shapes.keys() | own.max_shapes.keys()
    is_set = allowed is not None or any(t.name in shaped and "encoder" in t.axes for t in plan.tensors)
    return own if positions is None or is_set else replace(own, max_encoder=positions)


def _or_on_the_cpu(setup: _Setup, work: Callable[[], _T]) -> tuple[_T | None, tuple[str, ...]]:
    """Return the result of `work` for the encoder's engine; if it fails and no encoder is named, None and a warning.

    An unexpected error becomes a warning, too, so that the decoder is still built; a caller who names the encoder gets
    the error itself. An `OutputError` ends the build, because the decoder's engine could not be written either.
    """
    try:
        return work(), ()
    except (ModelError, OptionError, BuildError) as error:
        if error is setup.progress.raised:
            raise
        if setup.build.encoder != "auto":
            raise type(error)(f"{error.message}; with --encoder none the encoder runs on the CPU") from error
        why = error.message
    except Exception as error:
        named = setup.build.encoder != "auto"
        if error is setup.progress.raised or isinstance(error, TrtKvCacheError) or named:
            raise
        last = (str(error).strip().splitlines() or [""])[-1]
        why = (
            f"{type(error).__name__}: {last}: a fault in trt_kvcache, please report it with the output of "
            "--encoder FILE, the encoder's"
        )
    return None, (f"the encoder becomes no engine, and runs on the CPU: {why}",)


def _build_encoder(stack: ExitStack, job: EncoderJob, setup: _Setup, engine: Path) -> tuple[Manifest, Path, Path]:
    """Build an encoder; return its manifest, its engine in a temporary file of `stack`, and the final path."""
    path = check_output(encoder_path(engine))
    check_output(manifest_path(path))
    part = _part(job.sources, job.model.pop())
    _check_not_model(path, part.files)
    built = stack.enter_context(_built(part, job.plan, (job.profile,), setup, path))
    manifest = _manifest(setup, job.plan, (job.profile,), built, path)
    return replace(manifest, vocab=job.vocab), built.file, path


@contextmanager
def _built(
    part: _Part, plan: CachePlan, profiles: tuple[Profile, ...], setup: _Setup, output: Path, *, twice: bool = False,
    bounds: Bounds | None = None,
) -> Iterator[_Built]:  # fmt: skip
    """Build an engine into a temporary file beside `output`; the block's end removes the file unless it was moved."""
    from trt_kvcache.importer.serialize import serialize_model

    build, backend = setup.build, setup.backend
    _check_memory(part, setup, twice=twice)
    with temporary_file(output) as file:
        with _identities(part.files) as identities:
            paths = str(part.path), str(file), str(output)
            job = Job(backend.target, backend.title, *paths, plan, profiles, build, part.flipped, bounds)
            try:
                done, warnings = run_worker(job, lambda: serialize_model(part.model.pop()), setup.progress)
                model = identities.result()
            finally:  # TensorRT and the digests read the files at different times; if a file changed, say so
                for source in part.sources:
                    source.check_unchanged()
        yield _Built(file, done, warnings, model)


def _check_memory(part: _Part, setup: _Setup, *, twice: bool) -> None:
    """Refuse a build that would not fit into memory."""
    if setup.build.memory_check and setup.backend.target is Target.TENSORRT_RTX:
        check_memory(part.weights, sum(weight.length for weight in part.flipped), twice=twice)


def _encoder_length(plan: CachePlan, profiles: Sequence[Profile]) -> int:
    """Return an encoder's output length that all profiles accept."""
    names = {t.name: t.axes for t in plan.tensors if t.io == "input" and t.role is Role.CONSTANT}
    ranges = [(p.shapes[name], axes) for p in profiles for name, axes in names.items() if name in p.shapes]
    sizes = [(r.min[i], r.max[i]) for r, axes in ranges for i, axis in enumerate(axes) if axis == "encoder"]
    return max([*(low for low, _ in sizes), min([_ENCODER, *(high for _, high in sizes)])])


def _check_not_model(engine: Path, files: dict[Path, str]) -> None:
    """Refuse to overwrite the model."""
    for written in (engine, manifest_path(engine)):
        for path in files:
            if written.exists() and written.samefile(path):
                raise OutputError(f"{written}: is a file of the model; give another name for the engine")


def _about_scans(scans: list[str]) -> str:
    """Return a likely reason for a failed build of a model with a Scan: see `importer.scans`."""
    return (
        f"the model has a Scan over the tokens of an update ('{scans[0]}'), and some operators do not build before one "
        "while their number is open: try --max-chunk 1 (one token in a step), or export with a fixed number of tokens"
    )


def _bound_contracts(plan: CachePlan, max_chunk: int) -> CachePlan:
    """Return the plan with the longest update in every contract."""

    def bounded(contract: UpdateContract) -> UpdateContract:
        known = contract.max_update_length
        return replace(contract, max_update_length=max_chunk if known is None else min(known, max_chunk))

    caches = tuple(replace(c, contract=bounded(c.contract)) if c.contract else c for c in plan.caches)
    return replace(plan, caches=caches)


@contextmanager
def _identities(files: dict[Path, str]) -> Iterator[Future[tuple[FileIdentity, ...]]]:
    """Identify the model's files in a thread that ends with the block."""
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


def _manifest(setup: _Setup, plan: CachePlan, profiles: tuple[Profile, ...], built: _Built, engine: Path) -> Manifest:
    """Return the manifest of an engine, with the sizes of an encoder; the caller sets a decoder's sizes."""
    carried = [c for c in plan.caches if c.carried]
    return Manifest(
        created_by=f"trt_kvcache {__version__}",
        backend=setup.backend.target.value,
        backend_version=built.done.version,
        compute_capabilities=_built_for(setup.build),
        plan=plan,
        aliases={c.present: c.past for c in carried if c.in_place},
        double_buffered=plan.double_buffered,
        profiles=profiles,
        max_batch=1,
        max_chunk=1,
        model=built.model,
        engine=FileIdentity(engine.name, built.done.size, built.done.blake3),
        options=_flat(setup.build),
        warnings=built.warnings,
        network=built.done.network,
    )


def _built_for(build: BuildOptions) -> tuple[str, ...]:
    """Return the compute capabilities by name, because ``current`` means another GPU on another machine."""
    if build.compute_capabilities != (CURRENT,):
        return build.compute_capabilities
    _, gpus, _ = find_gpus()
    return tuple(f"sm{gpu.compute_capability.replace('.', '')}" for gpu in gpus[:1])


def _flat(build: BuildOptions) -> dict[str, str | int | float | bool | None]:
    """Return the options as plain values, in the form of the command line."""
    flat = {name: value for name, value in vars(build).items() if not name.endswith("shapes")}
    flat["compute_capabilities"] = ",".join(build.compute_capabilities)
    for name in ("min_shapes", "opt_shapes", "max_shapes"):
        flat[name] = format_shapes(getattr(build, name))
    return flat


def _publish(engines: Sequence[tuple[Manifest, Path, Path]], proof: bytes) -> None:
    """Move engines and manifests to their paths, each manifest after its engine; if one fails, move none.

    The proof belongs to the last engine. A manifest without a proof stays true even beside an older engine's proof.
    """
    with ExitStack() as stack:
        files = []
        for manifest, engine_file, engine in engines:
            files.append((engine_file, engine))
            if manifest.proof is not None:
                files.append(_written(stack, proof_path(engine), proof))
            files.append(_written(stack, manifest_path(engine), encode_manifest(manifest)))
        publish(files)


def _written(stack: ExitStack, path: Path, content: bytes) -> tuple[Path, Path]:
    """Write a temporary file of `stack`; return it and its final path."""
    final = check_output(path)
    temporary = stack.enter_context(temporary_file(final))
    try:
        with open(temporary, "wb") as file:
            file.write(content)
            sync(file)
    except OSError as error:
        raise OutputError(f"{final}: cannot be written: {error.strerror}") from error
    return temporary, final

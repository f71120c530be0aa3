"""Builds an engine and its manifest from an ONNX decoder."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from blake3 import blake3

from trt_kvcache import __version__
from trt_kvcache.arguments import as_options, shown
from trt_kvcache.compare.bounds import Bounds
from trt_kvcache.engine.backend import Backend, check_build_options, choose_backend
from trt_kvcache.engine.build_options import CURRENT, BuildOptions, format_shapes
from trt_kvcache.engine.build_process import Job, run_worker
from trt_kvcache.engine.diagnosis import find_gpus
from trt_kvcache.engine.engine_folder import copy_texts, new_folders, output_engine
from trt_kvcache.engine.manifest import Manifest, Profile, encode_manifest, encoder_path, manifest_path, proof_path
from trt_kvcache.engine.profiles import Limits, make_encoder_profile, make_profiles, resolve_limits, without_shapes
from trt_kvcache.errors import BuildError, ModelError, OptionError, OutputError, TrtKvCacheError
from trt_kvcache.files import FileIdentity, check_output, identify, publish, sync, temporary_file
from trt_kvcache.importer.cache_plan import CachePlan, PlanOptions, Role, Target, TensorRole, UpdateContract
from trt_kvcache.machine import shortage
from trt_kvcache.progress import ProgressEvent, listener

if TYPE_CHECKING:
    import onnx

    from trt_kvcache.importer.check import Checked
    from trt_kvcache.importer.files.flipped import Flipped
    from trt_kvcache.importer.files.source import SourceModel
    from trt_kvcache.importer.interface import IndexLimits


_T = TypeVar("_T")
_FACTOR = 1.65  # memory of a build with TensorRT for RTX, as a multiple of the weights: docs/verify-and-build.md
_FIXED = 500_000_000  # bytes that a build takes in addition
_ENCODER = 6  # positions of an encoder's output in a proof, if the engine takes this number


def build_engine(
    model: str | os.PathLike[str],
    output: str | os.PathLike[str],
    *,
    options: PlanOptions | None = None,
    build: BuildOptions | None = None,
    progress: Callable[[ProgressEvent], None] | None = None,
) -> Manifest:
    """Build an engine whose caches are updated in place, and write it with its manifest.

    The engine goes to `output`, the manifest to ``<output>.json``, the proof to ``<output>.proof``. If there is an
    encoder in the model's folder, its engine goes to ``model.encoder.engine`` for ``model.engine``. All files appear
    together when they are complete. After an error or Ctrl-C, existing files are unchanged. TensorRT runs in a child
    process, which ends with the caller.

    Args:
        model: path of an ONNX decoder, opset 24 or later.
        output: path of the engine; or of a folder that exists or ends with a slash. A folder also gets the tokenizer,
            chat template and generation config. Missing folders are created.
        options: options of the plan; `target` and `packed_native` follow from the backend.
        build: options of the build.
        progress: called with each step of the build; an exception from it ends the build.

    Returns:
        The manifest, as written.

    Raises:
        InvalidModelError, UnsupportedModelError, AmbiguousRoleError: the model cannot be used.
        OptionError: an option is illegal for this model or backend, or the build would not fit into memory.
        OutputError: a file cannot be written.
        BackendError: no suitable TensorRT is installed.
        BuildError: TensorRT refuses the model; the message quotes TensorRT.
    """
    build = BuildOptions() if build is None else as_options(build, BuildOptions, "build")
    options = PlanOptions() if options is None else as_options(options, PlanOptions, "options")
    watched = _Watched(progress)
    engine, folder = output_engine(output)
    try:
        with new_folders(engine.parent), ExitStack() as files:
            setup = _setup(engine, build, watched)
            engines = _run(_prepare(model, options, setup), setup, files)
            _publish(engines)
            if folder is not None:
                copy_texts(Path(model), folder)
            return engines[-1].manifest
    except Exception:
        if watched.verdict is not None:
            watched.verdict.result()  # the check's refusal of the model says more than the errors that follow from it
        raise


@dataclass(frozen=True)
class _Prepared:
    """A decoder that is ready to be built, and its encoder.

    Attributes:
        tables: numbers of rows of the lookup tables for token ids, and for positions.
        scans: names of the Scan nodes that run token by token.
        encoder: the encoder to build; None: the model has no encoder, or its encoder cannot become an engine.
        said: the reason why the encoder cannot become an engine; empty if there is no such reason.
    """

    model: _Part
    plan: CachePlan
    limits: Limits
    profiles: tuple[Profile, ...]
    generation: dict[str, Any]
    tables: IndexLimits
    scans: tuple[str, ...]
    encoder: EncoderJob | None
    said: tuple[str, ...]

    @property
    def positions(self) -> int | None:
        """Number of rows in the smallest table of positions; None: no table was found."""
        return min(self.tables.positions.values(), default=None)

    @property
    def bounds(self) -> Bounds:
        """The engine's sizes, which the steps of its proof (a recorded decode) must respect."""
        sizes = self.limits.max_batch, self.limits.max_chunk, self.limits.max_logits
        return Bounds(*sizes, self.positions, _encoder_length(self.plan, self.profiles))


def _setup(output: Path, build: BuildOptions, watched: _Watched) -> _Setup:
    engine = check_output(output)
    if engine.suffix == ".json":
        raise OutputError(
            f"{output}: a name that ends in .json is for manifests; give another name for the engine, "
            "such as model.engine"
        )
    for path in (manifest_path(engine), proof_path(engine)):
        check_output(path)
    if build.log not in (None, "-"):
        build = replace(build, log=str(check_output(build.log)))  # the build process runs in another folder
    backend = choose_backend(build.backend)
    check_build_options(backend, build)
    return _Setup(engine, build, backend, watched)


def _prepare(model: str | os.PathLike[str], options: PlanOptions, setup: _Setup) -> _Prepared:
    """Import the model, and choose the sizes of its engine. Start the check of the model in the background."""
    # Not at the top: all other names of the engine package work without ONNX.
    from trt_kvcache.engine.engine_folder import settings_beside
    from trt_kvcache.importer import import_unchecked
    from trt_kvcache.importer.interface import index_limits
    from trt_kvcache.importer.protos import is_op

    options = replace(options, target=setup.backend.target, packed_native=setup.backend.packed_native)
    imported, setup.progress.verdict = import_unchecked(model, options)
    plan, part = imported.plan, _part([imported.source], imported.model)
    _check_not_model(setup.engine, part.files)
    if setup.engine.suffix.lower() == ".onnx":  # commands and sessions take such a file for a model
        raise OutputError(
            f"{setup.engine}: a name that ends in .onnx is for models; give another name for the "
            "engine, such as model.engine"
        )
    if setup.build.encoder != "auto":
        which_encoder(part.path, plan, setup.build)  # if an encoder is named, it has to exist
    encoder, said = _or_on_the_cpu(setup, lambda: find_job(part.path, plan, setup.build))
    own = setup.build if encoder is None else _of_decoder(setup.build, plan, encoder)
    quantized = any(is_op(node, "DequantizeLinear") for node in imported.model.graph.node)
    try:
        limits = resolve_limits(plan, own)
        profiles = make_profiles(plan, own, limits, quantized=quantized)
    except OptionError as error:
        raise OptionError("; ".join([error.message, *said])) from None
    twice = own.decode_weights == "own" and limits.max_batch == 1 and not quantized
    _check_memory(part, setup, twice=twice)
    scans = tuple(node.name for node in imported.model.graph.node if is_op(node, "Scan"))
    tables, plan = index_limits(imported.model, plan), _bound_contracts(plan, limits.max_chunk)
    return _Prepared(part, plan, limits, profiles, settings_beside(Path(model)), tables, scans, encoder, said)


def _run(prepared: _Prepared, setup: _Setup, files: ExitStack) -> list[_Engine]:
    """Build engines into temporary files, which `files` removes: first the encoder's (if any), then the decoder's."""
    engines, said, limits = [], prepared.said, prepared.limits
    if (job := prepared.encoder) is not None:
        entry, more = _or_on_the_cpu(setup, lambda: _build_encoder(files, job, setup))
        engines, said = [entry] if entry is not None else [], (*said, *more)
    bounds = None if setup.build.proof == "off" or setup.build.strip_plan else prepared.bounds
    try:
        engine = _built(prepared.model, prepared.plan, prepared.profiles, setup, setup.engine, files, bounds)
    except BuildError as error:
        if not prepared.scans or limits.max_chunk == 1:
            raise
        raise BuildError(
            f"{error.message}; the model has a Scan over the tokens of an update ('{prepared.scans[0]}'), and "
            "TensorRT cannot build some operators before a Scan while the number of tokens is dynamic: try "
            "--max-chunk 1 (one token in a step), or export with a fixed number of tokens"
        ) from None
    assert setup.progress.verdict is not None
    plan = setup.progress.verdict.result().on(prepared.plan)
    manifest = replace(
        engine.manifest,
        plan=plan,
        max_batch=limits.max_batch,
        max_chunk=limits.max_chunk,
        max_logits=limits.max_logits,
        vocab=min(prepared.tables.tokens.values(), default=None),
        max_positions=prepared.positions,
        encoder=engines[0].manifest.engine if engines else None,
        generation=prepared.generation,
        warnings=(*said, *engine.manifest.warnings),
    )
    return [*engines, replace(engine, manifest=manifest)]


class _Watched:
    """Calls the caller's `progress` during the build, and watches the model's check in the background.

    An exception from `progress` or from the check ends the build; `raised` keeps the exception.
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
    """The choices for all engines of one build; `engine` is the path of the decoder's engine."""

    engine: Path
    build: BuildOptions
    backend: Backend
    progress: _Watched


@dataclass(frozen=True)
class _Part:
    """A model that becomes an engine: a decoder or an encoder.

    Attributes:
        path: path of the model's file; external data lie in the same folder.
        files: maps the path of each file of the model to its name in the manifest.
        sources: the models as loaded from their files, without their graphs.
        model: a list with the rewritten model, which may hold all weights; emptied when the build process gets the
            model.
        flipped: weights that TensorRT gets with changed bytes.
    """

    path: Path
    files: dict[Path, str]
    sources: tuple[SourceModel, ...]
    model: list[onnx.ModelProto]
    flipped: tuple[Flipped, ...]


@dataclass(frozen=True)
class _Engine:
    """An engine in a temporary `file`, its manifest, final `path`, and proof (a recorded decode; empty: none)."""

    manifest: Manifest
    file: Path
    path: Path
    proof: bytes


def _part(sources: Sequence[SourceModel], model: onnx.ModelProto) -> _Part:
    from trt_kvcache.importer.files.signed_weights import for_tensorrt

    folder = sources[0].path.parent
    paths = dict.fromkeys(path for source in sources for path in (source.path, *source.external_files))
    files = {path: os.path.relpath(path, folder) for path in paths}
    flipped = for_tensorrt(model, folder)
    # Without their graphs: these may hold all weights, and TensorRT needs the memory.
    light = tuple(replace(source, proto=type(source.proto)()) for source in sources)
    return _Part(sources[0].path, files, light, [model], flipped)


def _of_decoder(build: BuildOptions, plan: CachePlan, encoder: EncoderJob) -> BuildOptions:
    """Return the build options for the decoder. It accepts the encoder's longest output if no option sets a length.

    Raises `OptionError` if `--max-encoder` is smaller, because the first step after a long source would fail.
    """
    positions, allowed = encoder.positions, build.max_encoder
    if positions is not None and allowed is not None and positions > allowed:
        sizes = ", ".join(f"{name} {list(r.max)}" for name, r in encoder.profile.shapes.items())
        of = f"the longest source ({sizes})" if sizes else "every source"
        raise OptionError(
            f"--max-encoder is {allowed}, but the encoder makes {positions} positions from {of}; give --max-encoder "
            f"{positions}, {'allow shorter sources with --maxShapes, ' if sizes else ''}or leave --max-encoder out"
        )
    own = without_shapes(build, plan, encoder.plan)
    shaped = own.min_shapes.keys() | own.opt_shapes.keys() | own.max_shapes.keys()
    is_set = allowed is not None or any(t.name in shaped and "encoder" in t.axes for t in plan.tensors)
    return own if positions is None or is_set else replace(own, max_encoder=positions)


def _or_on_the_cpu(setup: _Setup, work: Callable[[], _T]) -> tuple[_T | None, tuple[str, ...]]:
    """Return the result of `work` (a step of building the encoder's engine) and an empty tuple of warnings.

    If `work` fails and the caller named no encoder, return None and a warning: the encoder then runs on the CPU. An
    `OutputError` always ends the build, because the decoder's engine could not be written either.
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
        if error is setup.progress.raised or isinstance(error, TrtKvCacheError) or setup.build.encoder != "auto":
            raise
        last = (str(error).strip().splitlines() or [""])[-1]
        why = (
            f"{type(error).__name__}: {last}: a fault in trt_kvcache, please report it with the output of a build "
            "with --encoder FILE, the encoder's file"
        )
    return None, (f"no engine could be built from the encoder, so it runs on the CPU: {why}",)


def _build_encoder(files: ExitStack, job: EncoderJob, setup: _Setup) -> _Engine:
    path = check_output(encoder_path(setup.engine))
    check_output(manifest_path(path))
    _check_not_model(path, job.part.files)
    _check_memory(job.part, setup, twice=False)
    engine = _built(job.part, job.plan, (job.profile,), setup, path, files)
    return replace(engine, manifest=replace(engine.manifest, vocab=job.vocab))


def _built(
    part: _Part, plan: CachePlan, profiles: tuple[Profile, ...], setup: _Setup, output: Path, files: ExitStack,
    bounds: Bounds | None = None,
) -> _Engine:  # fmt: skip
    """Build an engine into a temporary file in the folder of `output`, and return it with its manifest.

    For a decoder, the caller later sets sizes such as `max_batch` in the manifest.
    """
    from trt_kvcache.importer.serialize import serialize_model

    file = files.enter_context(temporary_file(output))
    with _identities(part.files) as identities:
        paths = str(part.path), str(file), str(output)
        target, title = setup.backend.target, setup.backend.title
        job = Job(target, title, *paths, plan, profiles, setup.build, part.flipped, bounds)
        try:
            done, warnings = run_worker(job, lambda: serialize_model(part.model.pop()), setup.progress)
            model = identities.result()
        finally:  # TensorRT and the digests read the files at different times; a change between is an error
            for source in part.sources:
                source.check_unchanged()
    proof = FileIdentity(proof_path(output).name, len(done.proof), blake3(done.proof).hexdigest())
    manifest = Manifest(
        created_by=f"trt_kvcache {__version__}",
        backend=target.value,
        backend_version=done.version,
        compute_capabilities=_built_for(setup.build),
        plan=plan,
        aliases={c.present: c.past for c in plan.caches if c.carried and c.in_place},
        double_buffered=plan.double_buffered,
        profiles=profiles,
        max_batch=1,
        max_chunk=1,
        model=model,
        engine=FileIdentity(output.name, done.size, done.blake3),
        options=_flat(setup.build),
        warnings=(*filter(None, [done.note]), *warnings),
        network=done.network,
        proof=proof if done.proof else None,
    )
    return _Engine(manifest, file, output, done.proof)


def _check_memory(part: _Part, setup: _Setup, *, twice: bool) -> None:
    """Refuse a build that would not fit into memory. `twice`: the engine has two copies of most weights."""
    from trt_kvcache.importer.protos import byte_size, iter_tensors

    if not setup.build.memory_check or setup.backend.target is not Target.TENSORRT_RTX:
        return
    weights = sum(byte_size(tensor) or 0 for tensor in iter_tensors(*part.model))
    need = int(_FACTOR * weights) * (2 if twice else 1) + _FIXED + sum(weight.length for weight in part.flipped)
    if free := shortage(need):
        raise OptionError(
            f"this build takes about {need / 1e9:.1f} GB of memory ({weights / 1e9:.1f} GB of weights, and TensorRT's "
            f"copies of most of them), and {free}; close other programs, add swap space, or build on a larger machine "
            "(TensorRT for RTX needs no GPU to build); --no-memory-check skips this check"
        )


def _encoder_length(plan: CachePlan, profiles: Sequence[Profile]) -> int:
    names = {t.name: t.axes for t in plan.tensors if t.io == "input" and t.role is Role.CONSTANT}
    ranges = [(p.shapes[name], axes) for p in profiles for name, axes in names.items() if name in p.shapes]
    sizes = [(r.min[i], r.max[i]) for r, axes in ranges for i, axis in enumerate(axes) if axis == "encoder"]
    return max([*(low for low, _ in sizes), min([_ENCODER, *(high for _, high in sizes)])])


def _check_not_model(engine: Path, files: dict[Path, str]) -> None:
    for written in (engine, manifest_path(engine)):
        for path in files:
            if written.exists() and written.samefile(path):
                raise OutputError(f"{written}: this is a file of the model; give another name for the engine")


def _bound_contracts(plan: CachePlan, max_chunk: int) -> CachePlan:
    """Return the plan whose circular caches allow at most `max_chunk` tokens in an update (`UpdateContract`)."""

    def bounded(contract: UpdateContract) -> UpdateContract:
        known = contract.max_update_length
        return replace(contract, max_update_length=max_chunk if known is None else min(known, max_chunk))

    caches = tuple(replace(c, contract=bounded(c.contract)) if c.contract else c for c in plan.caches)
    return replace(plan, caches=caches)


@contextmanager
def _identities(files: dict[Path, str]) -> Iterator[Future[tuple[FileIdentity, ...]]]:
    """Compute sizes and hashes of the model's files in a thread, which ends with the ``with`` block."""
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


def _built_for(build: BuildOptions) -> tuple[str, ...]:
    """Return the compute capabilities to build the engine for; ``current`` becomes that of this machine's GPU."""
    if build.compute_capabilities != (CURRENT,):
        return build.compute_capabilities
    _, gpus, _ = find_gpus()
    return tuple(f"sm{gpu.compute_capability.replace('.', '')}" for gpu in gpus[:1])


def _flat(build: BuildOptions) -> dict[str, str | int | float | bool | None]:
    flat: dict[str, Any] = vars(build) | {"compute_capabilities": ",".join(build.compute_capabilities)}
    return flat | {name: format_shapes(shapes) for name, shapes in flat.items() if name.endswith("_shapes")}


def _publish(engines: Sequence[_Engine]) -> None:
    """Move engines, proofs and manifests to their final paths: all files or, after an error, no file.

    An older proof file may stay if the new engine has no proof. The manifest does not name it.
    """
    with ExitStack() as stack:
        files = []
        for engine in engines:
            files.append((engine.file, engine.path))
            if engine.manifest.proof is not None:
                files.append(_written(stack, proof_path(engine.path), engine.proof))
            files.append(_written(stack, manifest_path(engine.path), encode_manifest(engine.manifest)))
        publish(files)


def _written(stack: ExitStack, path: Path, content: bytes) -> tuple[Path, Path]:
    """Write a temporary file that `stack` removes; return its path and its final path."""
    final = check_output(path)
    temporary = stack.enter_context(temporary_file(final))
    try:
        with open(temporary, "wb") as file:
            file.write(content)
            sync(file)
    except OSError as error:
        raise OutputError(f"{final}: cannot be written: {error.strerror}") from error
    return temporary, final


@dataclass(frozen=True)
class EncoderJob:
    """An encoder for which an engine is built; `profile` has the lengths of sources (encoder inputs).

    Attributes:
        vocab: token ids are 0 to ``vocab - 1``; None: the encoder takes no tokens, or the table's size is unknown.
        positions: length of the output for the longest source; None: unknown.
    """

    part: _Part
    plan: CachePlan
    profile: Profile
    vocab: int | None
    positions: int | None


def which_encoder(model: Path, plan: CachePlan, build: BuildOptions) -> Path | None:
    """Return the path of a decoder's encoder; None if there is no encoder, or `build` turns it off.

    Raises `OptionError` if `build` names an encoder that does not exist, or that the decoder does not use.
    """
    from trt_kvcache.importer.families.encoders.encoder_files import find_encoder, named_encoder

    if build.encoder == "none":
        return None
    constants = _constants(plan)
    named = None if build.encoder == "auto" else Path(build.encoder)
    path = find_encoder(model) if named is None else named_encoder(named)
    if constants and path is not None:
        return path
    if named is not None:
        reason = f"there is no encoder at {named}" if constants else f"{model} takes no inputs from an encoder"
        raise OptionError(f"--encoder names an encoder, but {reason}; leave --encoder out")
    return None


def find_job(model: Path, plan: CachePlan, build: BuildOptions) -> EncoderJob | None:
    """Import a decoder's encoder and choose its sizes; None if there is no encoder, or `build` turns it off.

    Raises `ModelError` for an unusable encoder, and `OptionError` if the named encoder is missing or unused, or the
    longest source (encoder input) is unknown or exceeds the encoder's table of positions.
    """
    from trt_kvcache.importer.families.encoders.encoder_files import find_first_step
    from trt_kvcache.importer.families.encoders.model import check_positions, count_positions, import_encoder, most_ids

    path = which_encoder(model, plan, build)
    if path is None:
        return None
    first_step = find_first_step(path) or find_first_step(model)
    encoder = import_encoder(path, first_step, _constants(plan), plan.options)
    profile = make_encoder_profile(encoder.plan, build)
    shapes: dict[str, Any] = {t.name: t.shape for t in encoder.plan.tensors if t.io == "input"}
    shapes |= {name: range_.max for name, range_ in profile.shapes.items()}
    check_positions(encoder.model, shapes)
    axes = {t.name: t.axes.index("encoder") for t in encoder.plan.tensors if t.io == "output" and "encoder" in t.axes}
    positions = count_positions(encoder.model, shapes, axes)
    ids = most_ids(encoder.model)
    return EncoderJob(_part(encoder.sources, encoder.model), encoder.plan, profile, ids, positions)


def _constants(plan: CachePlan) -> list[TensorRole]:
    return [t for t in plan.tensors if t.io == "input" and t.role is Role.CONSTANT]

"""The build process: parses, patches and checks a model, then builds the engine and writes it to disk.

It is a separate process, because some models crash TensorRT's parser (measured on TensorRT for RTX 1.7.1: SIGFPE on one
contrib RotaryEmbedding), and because the system gets TensorRT's memory back only when its process ends.
"""

from __future__ import annotations

import ctypes
import os
import sys
import warnings
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from onnx import ModelProto

from trt_kvcache.child import serve
from trt_kvcache.compare.network_comparison import NetworkComparison, NetworkWatch, compare_network, too_large
from trt_kvcache.compare.proof import Proof, encode_proof
from trt_kvcache.compare.proof_recording import Watch, record_proof
from trt_kvcache.engine.build_options import CURRENT
from trt_kvcache.engine.build_process import STAGES, Done, Job, Log, Send, Stage
from trt_kvcache.engine.manifest import NO_PROOF
from trt_kvcache.errors import BuildError, ModelError, OutputError, TrtKvCacheError
from trt_kvcache.files import atomic_file
from trt_kvcache.importer import ImportedModel
from trt_kvcache.importer.cache_plan import TENSORRT_DTYPES, AttentionKind, CachePlan, Dim, Route, Target, TensorRole
from trt_kvcache.importer.files.flipped import Flipped
from trt_kvcache.importer.files.source import load_source
from trt_kvcache.importer.planning.cache_plans import without_plugin

if TYPE_CHECKING:
    from trt_kvcache.engine.parsing import Request

_REPORT = "this is a fault in trt_kvcache, please report it with the model"
_BUDGET = 50.0  # seconds of the proof's first decode, without --proof STEPS; the whole proof takes 2.5 times as long
_COMPARED = (0, 2, 4)  # steps of the proof that NumPy runs on TensorRT's network: a large model takes seconds for one


def patch_network(network: Any, plan: CachePlan, trt: Any, *, decompose_all: bool = False) -> None:
    """Allow TensorRT to decompose attentions for which it has no fused kernel; with `decompose_all`, every attention.

    Without this permission, the build fails ("Attention operation was not supported by a dedicated kernel", measured on
    TensorRT for RTX 1.7.1). The ONNX attribute ``TRT_decomposable`` would do the same, but other runtimes refuse it.
    Raises `BuildError` if network and plan have different attention layers.
    """
    wanted = {a.node for a in plan.attention if a.kind is AttentionKind.DECOMPOSED}
    names: set[str] = set()
    for index in range(network.num_layers):
        attention_layer = network.get_layer(index)
        if attention_layer.type != trt.LayerType.ATTENTION_INPUT:
            continue
        # The parser names an attention's layers <node>_AttentionInput and <node>_AttentionOutput.
        name = attention_layer.name.removesuffix("_AttentionInput")
        names.add(name)
        if decompose_all or name in wanted:
            attention_layer.__class__ = trt.IAttentionInputLayer
            attention_layer.attention.decomposable = True
    expected = {a.node for a in plan.attention if a.kind is not AttentionKind.LOWERED}
    if names != expected:
        raise BuildError(
            f"the parsed network has attention layers {sorted(names - expected)} that are not in the plan, and does "
            f"not have {sorted(expected - names)}: this TensorRT version names layers differently; please report this"
        )


def check_network(network: Any, plan: CachePlan, trt: Any) -> None:
    """Raise `BuildError` if the parsed network differs from the plan in cache updates, inputs or outputs."""
    layers = [network.get_layer(i) for i in range(network.num_layers)]
    updates = [layer for layer in layers if layer.type == trt.LayerType.KV_CACHE_UPDATE]
    parsed = Counter((layer.get_input(0).name, layer.get_output(0).name) for layer in updates)
    planned = Counter((c.past, c.present) for c in plan.caches if c.route is Route.NATIVE)
    if missing := planned - parsed:
        raise BuildError(
            f"the parsed network has {parsed.total()} KV-cache layers, but the plan has {planned.total()}; missing: "
            f"{_pairs(missing)}. The engine would not update them in place; {_REPORT}"
        )
    if surplus := parsed - planned:
        raise BuildError(
            f"the parsed network has KV-cache layers that are not in the plan: {_pairs(surplus)}; {_REPORT}"
        )
    # If the parser does not find the plugin, it uses the node's definition in ONNX: correct, but with a copy.
    plugins = [layer for layer in layers if layer.type == trt.LayerType.PLUGIN_V3]
    # The caches are the plugin's first inputs, and its outputs.
    written = {(p.get_input(j).name, p.get_output(j).name) for p in plugins for j in range(p.num_outputs)}
    by_plugin = [(c.past, c.present) for c in plan.caches if c.route is Route.PLUGIN]
    if lost := [pair for pair in by_plugin if pair not in written]:
        raise BuildError(
            f"the parsed network has no layer of the cache-update plugin for {_pairs(lost)}. The engine would not "
            f"update them in place; {_REPORT}"
        )
    inputs, outputs = ([t for t in plan.tensors if t.io == io] for io in ("input", "output"))
    _check_tensors("input", [network.get_input(i) for i in range(network.num_inputs)], inputs)
    _check_tensors("output", [network.get_output(i) for i in range(network.num_outputs)], outputs)


def _pairs(pairs: Iterable[tuple[str, str]]) -> str:
    return ", ".join(f"{past} -> {present}" for past, present in pairs)


def _check_tensors(io: str, parsed: list[Any], planned: list[TensorRole]) -> None:
    expected = {t.name: t for t in planned}
    names = [t.name for t in parsed]
    if set(names) != set(expected):
        raise BuildError(
            f"the parsed network's {io}s differ from the plan's: "
            f"missing {sorted(set(expected) - set(names))}, unknown {sorted(set(names) - set(expected))}"
        )
    for tensor in parsed:
        role = expected[tensor.name]
        dtype = tensor.dtype.name
        if dtype != TENSORRT_DTYPES.get(role.dtype):
            raise BuildError(f"TensorRT gives {io} {role.name!r} the dtype {dtype}, but the model says {role.dtype}")
        if not _same_shape(tuple(tensor.shape), role.shape, exact=io == "input"):
            raise BuildError(
                f"TensorRT gives {io} {role.name!r} the shape {list(tensor.shape)}, but the plan says "
                f"{list(role.shape)}"
            )
        if io == "input" and tensor.is_shape_tensor:
            raise BuildError(
                f"input {role.name!r} decides shapes by its values (TensorRT reads it on the CPU before every step), "
                "which is not supported; export the model so that it takes this size from the shape of an input"
            )


def _same_shape(parsed: tuple[int, ...], planned: tuple[Dim, ...], *, exact: bool) -> bool:
    """Return True if TensorRT's shape (-1: dynamic) agrees with the plan. `exact`: the same sizes must be dynamic."""
    sizes = tuple(dim if isinstance(dim, int) else -1 for dim in planned)
    if exact or len(parsed) != len(sizes):
        return parsed == sizes
    return all(size == dim or -1 in (size, dim) for size, dim in zip(parsed, sizes, strict=True))


@dataclass(frozen=True)
class Recorded:
    """The result of `record`: a proof (None: not recorded), what it cannot show, and the comparison of the network."""

    proof: Proof | None = None
    note: str = ""
    network: NetworkComparison | None = None


def record(job: Job, content: bytes, weights: dict[str, bytearray], network: Any, trt: Any) -> Recorded:
    """Record the proof (a decode) of an engine, and compare TensorRT's network with the model on some of its steps.

    `content` is the rewritten model. `weights` has the bytes that TensorRT got instead of those in the model's files.
    Raises `BuildError` if network and model compute different outputs, and `TrtKvCacheError` if the caller asked for a
    number of steps that cannot be recorded.
    """
    assert job.bounds is not None
    model, steps = ModelProto.FromString(content), None if job.build.proof == "auto" else int(job.build.proof)
    large = too_large(model, job.plan, job.bounds.batch)
    watches: list[NetworkWatch] = []

    def watch(wide: ModelProto, folder: Path, garbage: float) -> Watch:
        watches.append(NetworkWatch(network, trt, wide, folder, garbage, () if large else _COMPARED))

        def look(feeds: Any, outputs: Any) -> None:
            watches[0](feeds, outputs)
            watches[0].found.check()

        return look

    def compared() -> NetworkComparison | None:
        found = NetworkComparison(0, 0.0, note=large) if large or not watches else watches[0].found
        return found if found.steps or found.note else None

    try:
        imported = ImportedModel(load_source(job.model), job.plan, model)
        proof = record_proof(
            imported, job.bounds, steps=steps, seconds=_BUDGET if steps is None else None, replaced=weights, watch=watch
        )  # fmt: skip
    except BuildError:
        raise
    except TrtKvCacheError as failure:
        if steps is not None:
            raise type(failure)(f"{NO_PROOF}{failure.message}; leave --proof out, or give --proof off") from failure
        why = failure.message
    except Exception as failure:
        if steps is not None:
            raise
        last = (str(failure).strip().splitlines() or [""])[-1]
        why = f"{type(failure).__name__}: {last}: a fault in trt_kvcache, please report it with the output of --proof 5"
    else:
        return Recorded(proof, proof.facts.note, compared())
    return Recorded(None, f"{NO_PROOF}{why}", compared())


_NO_KERNEL = "not supported by a dedicated kernel"


def main() -> None:
    """Run the build process: build an engine. If the calling process ends, remove the engine's file."""

    def abandon() -> None:
        with suppress(PermissionError):  # Windows, while the file is open
            Path(sys.argv[1]).unlink(missing_ok=True)

    serve(lambda job, parts, caller: _build(job, parts, caller.tell), Job, abandon)


def _build(job: Job, model: list[bytes], send: Send) -> Done:
    send(Stage(STAGES[0]))
    trt = import_tensorrt(job.target)
    from trt_kvcache.engine.callbacks import make_listeners, make_writer

    logger, monitor = make_listeners(trt, send, job.build.log)
    refusals = _register_plugins(trt, job)
    content = model.pop()

    send(Stage(STAGES[1]))
    weights = flipped_weights(Path(job.model).parent, job.flipped)  # TensorRT reads these until it ends
    try:
        builder, network, _parser = parsed(trt, logger, job, content, weights)
    except BuildError as failure:
        raise BuildError(_with_refusals(job, failure.message, refusals)) from None

    send(Stage(STAGES[2]))
    patch_network(network, job.plan, trt)
    check_network(network, job.plan, trt)
    if job.bounds is None:
        recorded = Recorded()
    else:
        send(Stage(STAGES[3]))
        recorded = record(job, content, weights, network, trt)
    compared = recorded.network
    if compared is None:
        compared = compare_network(network, trt, content, Path(job.model).parent, job.plan, weights)
    del content
    compared.check()

    send(Stage(STAGES[4]))
    config = create_config(trt, builder, network, job, monitor)
    with open(job.engine, "wb") as file:
        writer = make_writer(trt, file)
        # Writing the engine in pieces needs 0.6 GB less than IHostMemory for an engine of 2.2 GB.
        built = builder.build_serialized_network_to_stream(network, config, writer)
        if not built and _NO_KERNEL in logger.words():
            # The plan expects the fused attention kernels of the measured version; this version may lack one.
            patch_network(network, job.plan, trt, decompose_all=True)
            logger.errors.clear()
            file.truncate(0)
            file.seek(0)
            writer = make_writer(trt, file)
            built = builder.build_serialized_network_to_stream(network, config, writer)
            send(Log(False, f"{job.title} has no fused kernel for an attention that the plan expects to be fused: "
                            "it may now decompose every attention"))  # fmt: skip
        if writer.error is not None:
            raise OutputError(f"{job.output}: cannot be written: {writer.error.strerror}") from writer.error
        if not built or not writer.size:
            raise BuildError(_with_refusals(job, f"{job.title} cannot build the engine: {logger.words()}", refusals))
        try:
            file.flush()
            os.fsync(file.fileno())
        except OSError as error:
            raise OutputError(f"{job.output}: cannot be written: {error.strerror}") from error
    if job.build.timing_cache is not None:
        save_timing_cache(config, Path(job.build.timing_cache))
    digest = writer.digest.hexdigest()
    proof = b"" if recorded.proof is None else encode_proof(recorded.proof, digest)
    return Done(trt.__version__, writer.size, digest, str(compared), proof, recorded.note)


def flipped_weights(folder: Path, flipped: Sequence[Flipped]) -> dict[str, bytearray]:
    """Return the changed bytes of weights that become signed, by name; raise `ModelError` if a file is unreadable."""
    weights = {}
    for weight in flipped:
        data = weights[weight.name] = bytearray()
        try:
            for piece in weight.read(folder):
                data += piece
        except OSError as error:
            raise ModelError(f"{folder / weight.location}: cannot be read: {error.strerror or error}") from error
    return weights


def parsed(
    trt: Any, logger: Any, job: Job | Request, model: bytes, weights: dict[str, bytearray]
) -> tuple[Any, Any, Any]:
    """Parse a model; the bytes in `weights` replace those in its files. Return builder, network, and parser.

    Keep all three as long as the network is used. Raises `BuildError` with the parser's words if it refuses the model.
    """
    # Without this flag, TensorRT 10 may change precisions; TensorRT 11 and TensorRT for RTX never change them.
    typed = 1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED) if job.target is Target.TENSORRT else 0
    builder = trt.Builder(logger)
    network = builder.create_network(typed)
    parser = trt.OnnxParser(network, logger)
    if not _parse(parser, model, job.model, weights):
        raise BuildError(_parser_message(job.title, parser))
    return builder, network, parser


def _parse(parser: Any, model: bytes, path: str, weights: dict[str, bytearray]) -> bool:
    if not weights:
        return bool(parser.parse(model, path))
    loaded = parser.load_model_proto(model, path) and all(
        parser.load_initializer(name, ctypes.addressof(ctypes.c_char.from_buffer(data)), len(data))
        for name, data in weights.items()
    )
    return bool(loaded and parser.parse_model_proto())


def import_tensorrt(target: Target) -> Any:
    """Import and return the builder's module, and make Polygraphy use it, too."""
    os.environ["POLYGRAPHY_USE_TENSORRT_RTX"] = "1" if target is Target.TENSORRT_RTX else "0"
    try:
        if target is Target.TENSORRT_RTX:
            import tensorrt_rtx as trt
        else:
            import tensorrt as trt
    except ImportError as error:
        raise BuildError(f"{target.value} is installed but cannot be imported: {error}") from error
    if not hasattr(trt.INetworkDefinition, "add_kv_cache_update"):
        raise BuildError(f"{target.value} {trt.__version__} has no KV-cache layer (IKVCacheUpdateLayer); update it")
    return trt


def _register_plugins(trt: Any, job: Job) -> list[TrtKvCacheError]:
    """Register the cache-update plugin if the plan needs it. Return the list to which the plugin appends its errors."""
    if not any(cache.route is Route.PLUGIN for cache in job.plan.caches):
        return []
    from trt_kvcache.plugins.embed import register_for_this_gpu

    try:
        return register_for_this_gpu(trt, declare_aliases=job.build.declare_aliases).errors
    except TrtKvCacheError as refusal:
        raise type(refusal)(f"{refusal.message}; {without_plugin(job.plan.caches)}") from refusal


def _with_refusals(job: Job, message: str, refusals: list[TrtKvCacheError]) -> str:
    """Return TensorRT's message, advice, and the plugin's errors, which TensorRT does not pass on."""
    if not refusals:
        return message
    said = "; the cache-update plugin: ".join([message, *dict.fromkeys(map(str, refusals))])
    return f"{said}; {without_plugin(job.plan.caches)}"


def _parser_message(title: str, parser: Any) -> str:
    errors = []
    for i in range(parser.num_errors):
        error = parser.get_error(i)
        node = f"node {error.node_name()!r} ({error.node_operator()}): " if error.node_operator() else ""
        errors.append(f"{node}{error.code().name}: {' '.join(error.desc().split())}")
    return f"{title} cannot parse the model: {'; '.join(dict.fromkeys(errors)) or 'it gives no reason'}"


def create_config(trt: Any, builder: Any, network: Any, job: Job, monitor: Any) -> Any:
    """Return the builder configuration for this job; raise `BuildError` if an option is refused."""
    from polygraphy.backend.trt import CreateConfig
    from polygraphy.backend.trt import Profile as TrtProfile
    from polygraphy.exception import PolygraphyException
    from polygraphy.logger import G_LOGGER

    G_LOGGER.module_severity = G_LOGGER.CRITICAL  # Polygraphy reports errors by exception
    build = job.build
    profiles = [TrtProfile() for _ in job.profiles]
    for shapes, profile in zip(profiles, job.profiles, strict=True):
        for name, range_ in profile.shapes.items():
            shapes.add(name, min=range_.min, opt=range_.opt, max=range_.max)
    common: dict[str, Any] = {
        "profiles": profiles,
        "profiling_verbosity": getattr(trt.ProfilingVerbosity, build.profiling_verbosity.upper().replace("-", "_")),
        "memory_pool_limits": None if build.workspace is None else {trt.MemoryPoolType.WORKSPACE: build.workspace},
        "refittable": build.refit == "any",
        "strip_plan": build.strip_plan,
        "version_compatible": build.version_compatible,
        "builder_optimization_level": build.opt_level,
        "load_timing_cache": build.timing_cache,
        "progress_monitor": monitor,
    }
    if job.target is Target.TENSORRT_RTX:
        from polygraphy.backend.tensorrt_rtx import CreateConfigRTX

        here = build.compute_capabilities == (CURRENT,)
        capabilities = [] if here else [(int(c[2:-1]), int(c[-1])) for c in build.compute_capabilities]
        loader = CreateConfigRTX(compute_capabilities=capabilities or None, use_gpu=here, **common)
    else:
        loader = CreateConfig(tf32=True, **common)  # this is TensorRT's own default; only Polygraphy turns TF32 off
    try:
        with warnings.catch_warnings():
            # Polygraphy sets an empty timing cache on every builder; for TensorRT for RTX that is deprecated.
            warnings.filterwarnings("ignore", "Use Deprecated in TensorRT-RTX", DeprecationWarning)
            config = loader(builder, network)
    except PolygraphyException as error:
        raise BuildError(f"{job.title} cannot be configured: {' '.join(str(error).split())}") from error
    if build.refit == "identical":
        config.set_flag(trt.BuilderFlag.REFIT_IDENTICAL)
    if job.target is Target.TENSORRT_RTX:
        import tensorrt_rtx

        # Otherwise (TensorRT's header) engines with large tensors may allocate memory while they run: no CUDA graphs.
        config.set_flag(tensorrt_rtx.BuilderFlag.REQUIRE_USER_ALLOCATION)
    elif build.declare_aliases:
        # A preview feature since 10.3; without it TensorRT refuses plugins that declare an alias.
        import tensorrt

        config.set_preview_feature(tensorrt.PreviewFeature.ALIASED_PLUGIN_IO_10_03, True)
    return config


def save_timing_cache(config: Any, path: Path) -> None:
    """Write TensorRT's timing cache (measured kernel times) for the next build; raise `OutputError` on failure."""
    with atomic_file(path) as file:
        file.write(config.get_timing_cache().serialize())


if __name__ == "__main__":
    main()

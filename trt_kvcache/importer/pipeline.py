"""Runs the importer from end to end: reads, plans, rewrites and checks a model."""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from contextvars import copy_context
from dataclasses import dataclass, replace

import onnx
import onnx_graphsurgeon as gs

from trt_kvcache.arguments import as_options
from trt_kvcache.errors import InvalidModelError, OptionError, UnsupportedModelError
from trt_kvcache.importer import families
from trt_kvcache.importer.analysis import analyze, weights_read
from trt_kvcache.importer.cache_plan import CachePlan, PlanOptions
from trt_kvcache.importer.check import Checked, check_rewrite, start_process
from trt_kvcache.importer.files.model_folder import longest_text, usual_capacity
from trt_kvcache.importer.files.save import save_model
from trt_kvcache.importer.files.signed_weights import for_tensorrt
from trt_kvcache.importer.files.source import SourceModel, load_source, take_readable
from trt_kvcache.importer.graph import fold_identities
from trt_kvcache.importer.plan_options import record_options, refuse_rewritten
from trt_kvcache.importer.prepare import Prepared, attach_weights, detach_weights, prepare
from trt_kvcache.importer.protos import copied, replace_field
from trt_kvcache.importer.rewrite import rewrite_graph
from trt_kvcache.progress import phase

_DEFAULTS = PlanOptions()


@dataclass(frozen=True)
class ImportedModel:
    """The result of an import: the source model, the plan and the rewritten model.

    Attributes:
        model: the rewritten model. Its external data are not loaded; references are relative to ``source.path.parent``.
    """

    source: SourceModel
    plan: CachePlan
    model: onnx.ModelProto


def plan_model(model: str | os.PathLike[str], options: PlanOptions = _DEFAULTS) -> CachePlan:
    """Plan a model without writing files: the dry run of `rewrite_model` and of a build.

    This needs neither TensorRT nor the weights. Models that ONNX Runtime's quantizers made for CPUs are refused,
    because TensorRT lacks their operators.

    Args:
        model: path of the ``.onnx`` file.
        options: the options of the plan.

    Raises:
        ModelError: the model is unreadable, invalid or unsupported.
        OptionError: an option contradicts the model.
    """
    source = _load(model, options)
    prepared, plan, rewritten = _rewrite(source, options)
    plan = _check(source, options, prepared, plan, rewritten).on(plan)
    plan = _adapt(source, prepared, plan, rewritten)
    return _quantize(plan, rewritten)[0]


def import_model(
    model: str | os.PathLike[str], options: PlanOptions = _DEFAULTS, *, thorough: bool = False
) -> ImportedModel:
    """Plan, rewrite and check a model in memory; raises `ModelError`. See `plan_model` and `check_rewrite`."""
    source = _load(model, options)
    prepared, plan, rewritten = _rewrite(source, options)
    plan = _check(source, options, prepared, plan, rewritten, thorough=thorough).on(plan)
    return _whole(source, prepared, plan, rewritten)


def import_unchecked(
    model: str | os.PathLike[str], options: PlanOptions = _DEFAULTS, *, default_capacity: int | None = None
) -> tuple[ImportedModel, Future[Checked]]:
    """Plan and rewrite a model in memory, and return while the check still runs.

    The caller must not publish the model, or anything made from it, until the future ends without an error. The future
    returns facts for the plan, or raises the errors of `import_model`. This function raises errors as `plan_model`.
    `default_capacity` is used if neither the options nor the model give a capacity; None: `usual_capacity`.
    """
    source = _load(model, options)
    prepared, plan, rewritten = _rewrite(source, options, default_capacity)
    checked, verdict = copied(rewritten), Future[Checked]()  # a small copy: weights are placeholders

    def work() -> None:
        try:
            verdict.set_result(_check(source, options, prepared, plan, checked))
        except BaseException as error:  # noqa: BLE001 - raised where the result is asked for
            verdict.set_exception(error)

    # A daemon thread, so that Python can exit if the caller fails. Python would wait for threads of a pool.
    threading.Thread(target=copy_context().run, args=(work,), name="trt-kvcache-verdict", daemon=True).start()
    return _whole(source, prepared, plan, rewritten), verdict


def rewrite_model(
    model: str | os.PathLike[str], output: str | os.PathLike[str], options: PlanOptions = _DEFAULTS
) -> CachePlan:
    """Rewrite a model into standard ONNX that TensorRT can build, with the same meaning; write it, and return its plan.

    If `output` is in the model's folder, external data stay in their files. Otherwise this function copies the files to
    the folder of `output`. Quantized weights that must change for TensorRT are written to ``<output>.signed``.

    Raises:
        ModelError, OptionError: as in `plan_model`.
        UnsupportedModelError: TensorRT does not support the scales of weights, which `plan_model` does not read.
        OutputError: `output` cannot be written.
    """
    imported = import_model(model, options)
    flipped = for_tensorrt(imported.model, imported.source.path.parent)
    record_options(imported.model, imported.plan.options)
    save_model(imported.model, output, imported.source, flipped)
    return imported.plan


def _load(model: str | os.PathLike[str], options: PlanOptions) -> SourceModel:
    with phase("reading the model"), _memory_named(model):
        return load_source(model, config=as_options(options, PlanOptions, "options").config)


def _rewrite(
    source: SourceModel, options: PlanOptions, default_capacity: int | None = None
) -> tuple[Prepared, CachePlan, onnx.ModelProto]:
    """Return the plan and the rewritten model, before the check. The model has placeholders for large weights."""
    usual = usual_capacity(source.path.parent)
    if default_capacity is not None:
        longest = longest_text(source.path.parent)
        usual = default_capacity if longest is None else min(default_capacity, longest[0])
    with phase("planning"), _memory_named(source.path), _default_named(options.capacity, usual):
        return _plan_and_rewrite(source, options, usual)


@contextmanager
def _memory_named(model: str | os.PathLike[str]) -> Iterator[None]:
    """Within the ``with`` block, turn a MemoryError into an `UnsupportedModelError` that names the model."""
    try:
        yield
    except MemoryError:
        raise UnsupportedModelError(
            f"{model}: the fixed sizes of the model need more memory than this machine has; export it with smaller "
            "sizes, or with symbols"
        ) from None


@contextmanager
def _default_named(capacity: int | None, usual: int | None) -> Iterator[None]:
    """Within the ``with`` block, add to errors about the default capacity that it is the default."""
    try:
        yield
    except OptionError as error:
        if capacity is not None or f"--capacity is {usual}" not in error.message:
            raise
        raise OptionError(f"{error.message} ({usual} is the default if --capacity is not given)") from None


def _plan_and_rewrite(
    source: SourceModel, options: PlanOptions, usual: int
) -> tuple[Prepared, CachePlan, onnx.ModelProto]:
    refuse_rewritten(source.proto, source.path)
    most, where = longest_text(source.path.parent) or (None, "")
    if options.capacity is not None and most is not None and options.capacity > most and not options.beyond_length:
        raise OptionError(
            f"--capacity is {options.capacity}, but the model was made for texts of at most {most} tokens ({where}); "
            f"longer texts are unreliable. Give at most --capacity {most}, or --beyond-length on"
        )
    start_process(options)
    prepared = prepare(source.proto, options, usual, source.path.parent)
    options = prepared.options
    try:
        graph = gs.import_onnx(prepared.model)
    except Exception as error:  # graphsurgeon raises exceptions of any type
        raise InvalidModelError(f"{source.path}: the graph cannot be read: {error}") from error
    _check_unique_outputs(graph)
    fold_identities(graph)
    plan = analyze(prepared, graph, source.path)
    for finish in prepared.finishes:
        plan = finish(plan)
    if options.capacity is not None and most is not None and options.capacity > most:
        beyond = (
            f"caches hold {options.capacity} tokens, but the model was made for texts of at most {most} tokens "
            f"({where}); longer texts are unreliable"
        )
        plan = replace(plan, warnings=(*plan.warnings, beyond))
    rewrite_graph(graph, plan)
    return prepared, plan, _export(source.proto, graph)


def _check(
    source: SourceModel,
    options: PlanOptions,
    prepared: Prepared,
    plan: CachePlan,
    rewritten: onnx.ModelProto,
    *,
    thorough: bool = False,
) -> Checked:
    try:
        with _default_named(options.capacity, plan.options.capacity):
            return check_rewrite(
                prepared.reference, rewritten, plan, prepared.weights, source.path.parent, thorough=thorough
            )
    except UnsupportedModelError:
        source.check_unchanged()  # files that changed since they were read may cause the difference
        raise


def _whole(source: SourceModel, prepared: Prepared, plan: CachePlan, rewritten: onnx.ModelProto) -> ImportedModel:
    """Complete a rewritten model as the options say: add adapters, restore weights, quantize caches."""
    plan = _adapt(source, prepared, plan, rewritten)
    attach_weights(rewritten, prepared.weights)
    take_readable(rewritten, source.path.parent)  # as load_source, for tables that the rewrite made integers
    return quantize_caches(ImportedModel(source, plan, rewritten))


def _adapt(source: SourceModel, prepared: Prepared, plan: CachePlan, rewritten: onnx.ModelProto) -> CachePlan:
    """Add the requested LoRA adapters to a rewritten model, in place. Return the plan, with the bytes of weights."""
    plan = replace(plan, weights=weights_read(rewritten))
    if plan.options.lora_rank is None:
        return plan
    weights, folder = prepared.weights, source.path.parent
    return families.adapters.add_adapters(rewritten, plan, source.proto, folder, weights)


def quantize_caches(imported: ImportedModel, *, plain: bool = False) -> ImportedModel:
    """Quantize the caches if the plan's options request it. With `plain`, the model is for ONNX Runtime."""
    if imported.plan.options.cache_dtype is None:
        return imported
    light, weights = detach_weights(imported.model)
    plan, model = _quantize(imported.plan, light, plain=plain)
    attach_weights(model, weights)
    return replace(imported, plan=plan, model=model)


def _quantize(plan: CachePlan, model: onnx.ModelProto, *, plain: bool = False) -> tuple[CachePlan, onnx.ModelProto]:
    if plan.options.cache_dtype is None:
        return plan, model
    graph = gs.import_onnx(model)
    plan = families.quantized_caches.quantize(graph, plan, plain=plain)
    return plan, _export(model, graph)


def _export(source: onnx.ModelProto, graph: gs.Graph) -> onnx.ModelProto:
    model: onnx.ModelProto = gs.export_onnx(graph)
    del model.graph.value_info[:]  # shapes of intermediate tensors changed; later code infers them if needed
    model.ir_version = max(source.ir_version, 10)
    for field in ("producer_name", "producer_version", "domain", "model_version", "doc_string"):
        setattr(model, field, getattr(source, field))
    model.graph.doc_string = source.graph.doc_string
    replace_field(model.metadata_props, source.metadata_props)
    del model.functions[:]  # `define` then adds functions only for cache updates that ONNX lacks
    return families.define(model)


def _check_unique_outputs(graph: gs.Graph) -> None:
    """Raise `InvalidModelError` if two outputs have the same name. ONNX forbids this, and TensorRT reports it late."""
    name, count = max(Counter(t.name for t in graph.outputs).items(), key=lambda item: item[1], default=("", 0))
    if count > 1:
        raise InvalidModelError(
            f"the model lists the output '{name}' twice; export the model with one output of this name"
        )

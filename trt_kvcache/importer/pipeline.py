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
from pathlib import Path

import onnx
import onnx_graphsurgeon as gs

from trt_kvcache.arguments import as_options
from trt_kvcache.errors import InvalidModelError, OptionError, UnsupportedModelError
from trt_kvcache.importer import families
from trt_kvcache.importer.cache_plan import (
    CachePlan,
    CacheUpdate,
    Dim,
    LogitsSpan,
    PlanOptions,
    Role,
    Route,
    StateUpdate,
    Target,
    TensorRole,
    UpdateContract,
    UpdateForm,
)
from trt_kvcache.importer.check import Checked, check_rewrite, start_process
from trt_kvcache.importer.emit.canonical_nodes import Findings
from trt_kvcache.importer.files.model_folder import longest_text, usual_capacity
from trt_kvcache.importer.files.save import save_model
from trt_kvcache.importer.files.signed_weights import for_tensorrt
from trt_kvcache.importer.files.source import SourceModel, load_source, take_readable
from trt_kvcache.importer.graph import ONNX_DOMAINS, contains, dims, fold_identities, is_op, producer
from trt_kvcache.importer.interface import carry_roles, find_roles, index_limits
from trt_kvcache.importer.interface.role_evidence import Known, open_axes
from trt_kvcache.importer.plan_options import record_options, refuse_rewritten
from trt_kvcache.importer.planning.attention_plans import AttentionAnalysis, analyze_attention
from trt_kvcache.importer.planning.cache_plans import analyze_caches, check_dtypes
from trt_kvcache.importer.planning.logits_span import change_of, plan_logits, role_of, with_span
from trt_kvcache.importer.planning.weights_read import weights_read
from trt_kvcache.importer.prepare import Prepared, attach_weights, detach_weights, prepare
from trt_kvcache.importer.protos import all_nodes, copied, opset_version, replace_field
from trt_kvcache.importer.recognize.carried import find_states, stack_in_words
from trt_kvcache.importer.rewrite import rewrite_graph
from trt_kvcache.importer.steps.later_tokens import see_later_tokens
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

    Before the future ends without an error, the caller must not publish the model or anything made from it. The future
    gives facts for the plan, or the error of `import_model`. Other errors are those of `plan_model`. `default_capacity`
    is the capacity to use if neither the options nor the model give one; None: `usual_capacity`.
    """
    source = _load(model, options)
    prepared, plan, rewritten = _rewrite(source, options, default_capacity)
    checked, verdict = copied(rewritten), Future[Checked]()  # a small copy: weights are stand-ins

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
        UnsupportedModelError: TensorRT does not support the scales of quantized weights. `plan_model` does not read the
            scales.
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
    """Within the ``with`` block, turn a MemoryError into an error with the name and fixed sizes of the model."""
    try:
        yield
    except MemoryError:
        raise UnsupportedModelError(
            f"{model}: the fixed sizes of the model need more memory than this machine has; export it with smaller "
            "sizes, or with symbols"
        ) from None


@contextmanager
def _default_named(capacity: int | None, usual: int | None) -> Iterator[None]:
    """Within the ``with`` block, make errors about the default capacity say that it is the default."""
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
    check_unique_outputs(graph)
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
    take_readable(rewritten, source.path.parent)  # also loads tables that became integers, as load_source does
    return quantize_caches(ImportedModel(source, plan, rewritten))


def _adapt(source: SourceModel, prepared: Prepared, plan: CachePlan, rewritten: onnx.ModelProto) -> CachePlan:
    """Add the requested LoRA adapters to a rewritten model, in place. Return the plan, with the bytes of weights."""
    plan = replace(plan, weights=weights_read(rewritten))
    if plan.options.lora_rank is None:
        return plan
    weights, folder = prepared.weights, source.path.parent
    return families.adapters.add_adapters(rewritten, plan, source.proto, folder, weights)


def quantize_caches(imported: ImportedModel, *, plain: bool = False) -> ImportedModel:
    """Return the model with quantized caches if its options request them; `plain`: for ONNX Runtime."""
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
    del model.functions[:]  # only `define` adds functions, for cache updates that are not in ONNX
    return families.define(model)


_WHOLE = (
    "tokens see later tokens of the same step; so a session processes a prompt in one step of at most --max-chunk "
    "tokens, and uses no prefix cache and no drafts with this model; export with a causal mask to allow both"
)


def analyze(prepared: Prepared, graph: gs.Graph, path: Path) -> CachePlan:
    """Return the plan of a prepared model: caches, attention, spans, and the role of every input and output."""
    model, options, findings = prepared.model, prepared.options, prepared.findings
    if options.target is Target.TENSORRT_RTX:
        _check_operators(model)
    caches = analyze_caches(graph, options)
    foreign = _foreign_cache(graph) if not caches else ""
    if foreign or (not caches and not any(is_op(n, "Attention") for n in graph.nodes)):
        if stack := stack_in_words(graph):
            raise UnsupportedModelError(stack)
        raise UnsupportedModelError(
            f"{path}: found no supported cache update (found: "
            f"{foreign or _holder(graph) or 'no cache that a step writes'}). Caches must be inputs and outputs of the "
            "model, and each must be read as a whole: export with a past, and with outputs that are Concat(past, new) "
            "or equivalent"
        )
    caches = tuple(_with_findings(c, findings) for c in caches)
    attention = analyze_attention(graph, caches, options)
    if findings.original:
        states, roles = findings.states, carry_roles(findings.roles, model)
    else:
        states = find_states(graph, {name for c in caches for name in (c.past, c.present)})
        roles = find_roles(model, _known(caches, states), options.config)
    roles = tuple(open_axes(role) for role in roles)
    check_dtypes(roles)
    logits, note = plan_logits(graph, roles, options)
    cut = [r for r in roles if findings.written and logits is not None and (r.name, r.io) == (logits.output, "output")]
    plan = CachePlan(
        options=options,
        opset=opset_version(model) or 0,
        caches=caches,
        attention=attention.attention,
        masks=attention.masks,
        spans=attention.spans,
        tensors=_rewritten_roles(roles, caches, attention, logits),
        warnings=(*_warnings(caches), *attention.warnings),
        inlined=prepared.inlined,
        states=states,
        notes=(*findings.notes, *_planes(roles), *((note,) if note else ())),
        changes=(*findings.changes, *(change_of(r, logits) for r in cut if logits is not None)),
        original=findings.original,
        logits_span=logits,
    )
    if see_later_tokens(model, plan):
        plan = replace(plan, prefill_in_one_step=True, notes=(*plan.notes, _WHOLE))
    return replace(plan, warnings=(*plan.warnings, *_short_tables(model, plan)))


def _check_operators(model: onnx.ModelProto) -> None:
    """Refuse operators that TensorRT for RTX never supports (measured with version 1.7.1)."""
    for node in all_nodes(model.graph):
        if node.op_type == "NonZero" and node.domain in ("", "ai.onnx"):
            raise UnsupportedModelError(
                f"NonZero '{node.name or node.output[0]}' returns a number of indices that depends on values, but "
                "TensorRT for RTX does not support this operator; sizes must not depend on tokens: export a mixture of "
                "experts with mobius-onnx, or with torch.onnx (dynamo) from transformers 5 after "
                'model.set_experts_implementation("batched_mm"), or plan for TensorRT (--target tensorrt)'
            )


def _short_tables(model: onnx.ModelProto, plan: CachePlan) -> list[str]:
    """Return warnings about position tables with fewer rows than the caches: later positions read the last row."""
    rows = index_limits(model, plan).positions
    longest = max((c.capacity for c in plan.caches), default=0)
    return [
        f"'{name}' looks up a table of {count} positions, but the caches hold {longest} tokens: no text may have more "
        f"than {count} tokens"
        for name, count in rows.items()
        if count < longest
    ]


def _planes(roles: tuple[TensorRole, ...]) -> list[str]:
    """Return notes about position inputs that have several positions per token."""
    return [
        f"'{r.name}' {list(r.shape)} has several positions per token (such as time, height and width). A session gives "
        "a token the same position in all planes, which is correct for text. Tokens of images need different "
        "positions, which only a caller that runs the engine itself can give"
        for r in roles
        if r.role is Role.POSITIONS and len(r.shape) == 3 and r.shape[r.axes[0] == "batch"] != 1
    ]


def _with_findings(cache: CacheUpdate, findings: Findings) -> CacheUpdate:
    cache = replace(cache, idiom=findings.idioms.get(cache.present, cache.idiom))
    if longest := findings.longest.get(cache.past):
        contract = cache.contract or UpdateContract(no_straddle=False)
        cache = replace(cache, contract=replace(contract, max_update_length=longest))
    return cache


_GENERATORS = ("BeamSearch", "GreedySearch", "Sampling", "WhisperBeamSearch")


def _foreign_cache(graph: gs.Graph) -> str:
    """Describe the first sign of a cache whose update is not supported; empty if there is none."""
    for node in (n for n in graph.nodes if is_op(n, "Concat", "ScatterND", "ScatterElements")):
        past = node.inputs[0]
        while (maker := producer(past)) is not None and is_op(maker, "Transpose", "Reshape", "Unsqueeze", "Squeeze"):
            past = maker.inputs[0]
        if contains(graph.inputs, past) and len(dims(past) or ()) >= 3:
            return f"{node.op} '{node.name}' on '{past.name}'"
    return ""


def _holder(graph: gs.Graph) -> str:
    """Describe the first operator that may contain a cache or a decoder, or is not in ONNX; empty if there is none."""
    for node in graph.nodes:
        if node.domain not in ONNX_DOMAINS and ("Attention" in node.op or node.op in _GENERATORS):
            contents = "its own cache, if there is one"
            if node.op in _GENERATORS:
                contents = "the decoder: give only the decoder, without the search"
            return f"{node.domain}::{node.op} '{node.name}', which contains {contents}"
        if node.domain in ONNX_DOMAINS and not onnx.defs.has(node.op):
            return f"{node.op} '{node.name}', which is not an ONNX operator: the exporter did not convert it"
    return ""


def _known(caches: tuple[CacheUpdate, ...], states: tuple[StateUpdate, ...]) -> Known:
    return Known(
        caches={c.past: c.present for c in caches if c.carried},
        states={s.past: s.present for s in states},
        write_indices=frozenset(c.write_indices for c in caches if c.write_indices is not None),
        update_lengths=frozenset(c.update_lengths for c in caches if c.update_lengths is not None),
        updates={
            c.update: ("tokens", "?", "?")
            if c.form is UpdateForm.PACKED_NHD
            else tuple({0: "batch", c.sequence_axis: "sequence"}.get(i, "?") for i in range(len(c.logical_shape)))
            for c in caches
        },
    )


def _rewritten_roles(
    roles: tuple[TensorRole, ...], caches: tuple[CacheUpdate, ...], facts: AttentionAnalysis, logits: LogitsSpan | None
) -> tuple[TensorRole, ...]:
    """Return the roles of the rewritten model's inputs and outputs, with physical cache shapes and added inputs."""
    physical = {name: c for c in caches if c.carried for name in (c.past, c.present)}
    result: list[TensorRole] = []
    for role in roles:
        cache = physical.get(role.name)
        if cache is not None:
            shape: tuple[Dim, ...] = cache.physical_shape
            axes = tuple("batch" if i == 0 and not isinstance(d, int) else "" for i, d in enumerate(shape))
            result.append(replace(role, shape=shape, axes=axes))
        elif keys := facts.relaxed.get(role.name):
            result.append(replace(role, shape=(*role.shape[:-1], keys), axes=(*role.axes[:-1], "keys")))
        else:
            result.append(with_span(role, logits))
    added = [TensorRole(s.name, "input", Role.SPAN, "int64", (s.symbol,), "added", ("span",)) for s in facts.spans]
    added += [role_of(logits)] if logits is not None else []
    return (*(r for r in result if r.io == "input"), *added, *(r for r in result if r.io != "input"))


def _warnings(caches: tuple[CacheUpdate, ...]) -> list[str]:
    warnings = [] if caches else ["the model updates no cache; only its attention is rewritten"]
    for cache in caches:
        if cache.route is Route.FUNCTIONAL:
            warnings.append(
                f"cache '{cache.past}' is not updated in place, so each step writes the whole cache: {cache.reason}"
            )
        elif cache.contract is not None:
            limit = cache.contract.max_update_length
            most = f" of at most {limit} tokens" if limit else ""
            warnings.append(
                f"cache '{cache.past}' is circular: no update{most} may cross the end of its {cache.capacity} rows "
                "(TensorRT drops such a write without a message); the caller must split such an update, or plan with "
                "--fallback functional"
            )
    return warnings


def check_unique_outputs(graph: gs.Graph) -> None:
    """Raise `InvalidModelError` if two outputs have the same name. ONNX forbids this, and TensorRT reports it late."""
    name, count = max(Counter(t.name for t in graph.outputs).items(), key=lambda item: item[1], default=("", 0))
    if count > 1:
        raise InvalidModelError(
            f"the model lists the output '{name}' twice; export the model with one output of this name"
        )

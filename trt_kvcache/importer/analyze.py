"""Analyze a prepared graph into a plan: caches, attention, spans, and the role of every input and output."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import onnx
import onnx_graphsurgeon as gs

from trt_kvcache.errors import InvalidModelError, UnsupportedModelError
from trt_kvcache.importer.graph import ONNX_DOMAINS, contains, dims, is_op, producer
from trt_kvcache.importer.interface import Known, carry_roles, find_roles, open_axes
from trt_kvcache.importer.normalize.findings import Findings
from trt_kvcache.importer.plan import (
    CachePlan,
    CacheUpdate,
    Dim,
    InterfaceChange,
    LogitsSpan,
    PlanOptions,
    Role,
    Route,
    SpanInput,
    StateUpdate,
    Target,
    TensorRole,
    UpdateContract,
    UpdateForm,
)
from trt_kvcache.importer.planning.attention import analyze_attention
from trt_kvcache.importer.planning.caches import analyze_caches
from trt_kvcache.importer.planning.experts import EXPERTS
from trt_kvcache.importer.planning.index_limits import index_limits
from trt_kvcache.importer.planning.logits_span import change_of, plan_logits, role_of, with_span
from trt_kvcache.importer.planning.routes import check_dtypes
from trt_kvcache.importer.protos import all_nodes
from trt_kvcache.importer.recognize.caches import stack_in_words
from trt_kvcache.importer.recognize.states import find_states
from trt_kvcache.importer.steps.later_tokens import see_later_tokens

_WHOLE = (
    "tokens of one step see each other, later ones too: a session writes a prompt in one step, of --max-chunk tokens "
    "at most, and has no prefix cache and no drafts for this model; a causal mask in the export would allow both"
)


def analyze(
    model: onnx.ModelProto,
    graph: gs.Graph,
    options: PlanOptions,
    inlined: tuple[str, ...],
    findings: Findings,
    path: Path,
) -> CachePlan:
    """Plan a prepared model.

    Raises:
        UnsupportedModelError: the model has no cache update, or one without a route.
        AmbiguousRoleError: the role of an input is ambiguous.
    """
    if options.target is Target.TENSORRT_RTX:
        _check_operators(model)
    caches = analyze_caches(graph, options)
    foreign = _foreign_cache(graph) if not caches else ""
    if foreign or (not caches and not any(is_op(n, "Attention") for n in graph.nodes)):
        if stack := stack_in_words(graph):
            raise UnsupportedModelError(stack)
        raise UnsupportedModelError(
            f"{path}: updates no cache that is known here "
            f"(found: {foreign or _holder(graph) or 'no cache that a step writes'}); supported are "
            "decoders whose caches are inputs and outputs, each read as a whole: export with a past, and with outputs "
            "that give Concat(past, new), or what is joined so"
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
    plan = CachePlan(
        options=options,
        opset=next((o.version for o in model.opset_import if o.domain in ("", "ai.onnx")), 0),
        caches=caches,
        attention=attention.attention,
        masks=attention.masks,
        spans=attention.spans,
        tensors=_rewritten_roles(roles, caches, attention.spans, attention.relaxed, logits),
        warnings=(*_warnings(caches), *attention.warnings),
        inlined=inlined,
        states=states,
        notes=(*findings.notes, *_planes(roles), *((note,) if note else ())),
        changes=_changes(findings, roles, logits),
        original=findings.original,
        logits_span=logits,
    )
    if see_later_tokens(model, plan):
        plan = replace(plan, prefill_in_one_step=True, notes=(*plan.notes, _WHOLE))
    return replace(plan, warnings=(*plan.warnings, *_short_tables(model, plan)))


def _check_operators(model: onnx.ModelProto) -> None:
    """Refuse operators that TensorRT for RTX cannot build in any model (measured, 1.7.1)."""
    for node in all_nodes(model.graph):
        if node.op_type == "NonZero" and node.domain in ("", "ai.onnx"):
            raise UnsupportedModelError(
                f"NonZero '{node.name or node.output[0]}' gives as many indices as it finds, and TensorRT for RTX has "
                f"no such operator; supported are sizes that do not depend on tokens: {EXPERTS}, or plan for TensorRT "
                "(--target tensorrt)"
            )


def _short_tables(model: onnx.ModelProto, plan: CachePlan) -> list[str]:
    """Warn of position tables shorter than the caches: a lookup beyond their end reads their last row."""
    rows = index_limits(model, plan).positions
    longest = max((c.capacity for c in plan.caches), default=0)
    return [
        f"'{name}' looks up a table of {count} positions, and the caches hold {longest} tokens: no text may be longer "
        f"than {count}"
        for name, count in rows.items()
        if count < longest
    ]


def _planes(roles: tuple[TensorRole, ...]) -> list[str]:
    """Note inputs with several positions per token."""
    return [
        f"'{r.name}' {list(r.shape)} has several positions per token (such as time, height and width): a session gives "
        "a token the same one in all planes, which is right for text; tokens of images need positions of their own, "
        "which only a caller that drives the engine itself can give"
        for r in roles
        if r.role is Role.POSITIONS and len(r.shape) == 3 and r.shape[r.axes[0] == "batch"] != 1
    ]


def _with_findings(cache: CacheUpdate, findings: Findings) -> CacheUpdate:
    cache = replace(cache, idiom=findings.idioms.get(cache.past, cache.idiom))
    if (longest := findings.longest.get(cache.past)) is None:
        return cache
    contract = cache.contract or UpdateContract(no_straddle=False)
    return replace(cache, contract=replace(contract, max_update_length=longest))


_GENERATORS = ("BeamSearch", "GreedySearch", "Sampling", "WhisperBeamSearch")


def _foreign_cache(graph: gs.Graph) -> str:
    """Describe the first sign of a cache that is written in an unsupported way; else an empty text."""
    for node in graph.nodes:
        if is_op(node, "Concat", "ScatterND", "ScatterElements") and (past := _input_behind(graph, node.inputs[0])):
            return f"{node.op} '{node.name}' on '{past}'"
    return ""


def _holder(graph: gs.Graph) -> str:
    """Describe the first operator that may contain a cache or the decoder, or that ONNX lacks; else an empty text."""
    for node in graph.nodes:
        if node.domain not in ONNX_DOMAINS and ("Attention" in node.op or node.op in _GENERATORS):
            contents = "its cache itself, if there is one"
            if node.op in _GENERATORS:
                contents = "the decoder in itself: give the decoder alone, without the search"
            return f"{node.domain}::{node.op} '{node.name}', which holds {contents}"
        if node.domain in ONNX_DOMAINS and not onnx.defs.has(node.op):
            return f"{node.op} '{node.name}', which is no operator of ONNX: the exporter did not convert it"
    return ""


def _input_behind(graph: gs.Graph, tensor: gs.Tensor) -> str:
    """The name of the graph input of rank 3 or more that `tensor` is a view of, or an empty string."""
    while (node := producer(tensor)) is not None and is_op(node, "Transpose", "Reshape", "Unsqueeze", "Squeeze"):
        tensor = node.inputs[0]
    return str(tensor.name) if contains(graph.inputs, tensor) and len(dims(tensor) or ()) >= 3 else ""


def _known(caches: tuple[CacheUpdate, ...], states: tuple[StateUpdate, ...]) -> Known:
    return Known(
        caches={c.past: c.present for c in caches if c.carried},
        states={s.past: s.present for s in states},
        write_indices=frozenset(c.write_indices for c in caches if c.write_indices is not None),
        update_lengths=frozenset(c.update_lengths for c in caches if c.update_lengths is not None),
        updates={c.update: _update_axes(c) for c in caches},
    )


def _update_axes(cache: CacheUpdate) -> tuple[str, ...]:
    """The meaning of each axis of an update."""
    if cache.form is UpdateForm.PACKED_NHD:
        return "tokens", "?", "?"
    rank = len(cache.logical_shape)
    return tuple("batch" if i == 0 else "sequence" if i == cache.sequence_axis else "?" for i in range(rank))


def _changes(
    findings: Findings, roles: tuple[TensorRole, ...], logits: LogitsSpan | None
) -> tuple[InterfaceChange, ...]:
    """Interface changes for the caller, including the logits."""
    if not findings.idioms or logits is None:
        return findings.changes
    return (*findings.changes, *(change_of(r, logits) for r in roles if (r.name, r.io) == (logits.output, "output")))


def _rewritten_roles(
    roles: tuple[TensorRole, ...],
    caches: tuple[CacheUpdate, ...],
    spans: tuple[SpanInput, ...],
    relaxed: dict[str, str],
    logits: LogitsSpan | None,
) -> tuple[TensorRole, ...]:
    """Roles of the rewritten model: physical cache shapes, relaxed masks, added inputs, logits of some positions."""
    physical = {name: c for c in caches if c.carried for name in (c.past, c.present)}
    result: list[TensorRole] = []
    for role in roles:
        cache = physical.get(role.name)
        if cache is not None:
            shape: tuple[Dim, ...] = cache.physical_shape
            axes = tuple("batch" if i == 0 and not isinstance(d, int) else "" for i, d in enumerate(shape))
            result.append(replace(role, shape=shape, axes=axes))
        elif role.name in relaxed:
            result.append(replace(role, shape=(*role.shape[:-1], relaxed[role.name]), axes=(*role.axes[:-1], "keys")))
        else:
            result.append(with_span(role, logits))
    added = [TensorRole(s.name, "input", Role.SPAN, "int64", (s.symbol,), "added", ("span",)) for s in spans]
    added += [role_of(logits)] if logits is not None else []
    inputs = [r for r in result if r.io == "input"]
    outputs = [r for r in result if r.io != "input"]
    return (*inputs, *added, *outputs)


def _warnings(caches: tuple[CacheUpdate, ...]) -> list[str]:
    warnings = [] if caches else ["the model updates no cache: only its attention is made right"]
    for cache in caches:
        if cache.route is Route.FUNCTIONAL:
            warnings.append(
                f"cache '{cache.past}' is not updated in place, the whole cache is written each step: {cache.reason}"
            )
        elif cache.contract is not None:
            limit = cache.contract.max_update_length
            most = f" of at most {limit} tokens" if limit else ""
            warnings.append(
                f"cache '{cache.past}' is circular: no update{most} may straddle the end of its {cache.capacity} rows "
                "(TensorRT drops such a write silently); the caller must split it there, or plan with --fallback "
                "functional"
            )
    return warnings


def check_unique_outputs(graph: gs.Graph) -> None:
    """Refuse a graph in which two outputs share a name, which ONNX forbids and TensorRT reports late.

    Raises:
        InvalidModelError: naming the tensor.
    """
    seen: set[str] = set()
    for tensor in graph.outputs:
        if tensor.name in seen:
            raise InvalidModelError(f"the model lists output '{tensor.name}' twice; export it once")
        seen.add(tensor.name)

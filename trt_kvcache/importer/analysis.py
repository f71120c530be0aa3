"""Makes the plan of a prepared model, and counts the bytes of weights that a step reads.

Logits are computed only for the last positions of a step, with a Slice before the last product:

    attention -> Add -> norm -> x [B, S, H] -> MatMul -> softcap -> logits [B, S, V]
                                `- becomes x[:, S - K :]

A prefill needs only the logits of one position. Logits of all positions would take 7 to 60 % of all multiplications,
and gigabytes. If this module does not know an operator after the Slice, the model computes all logits.

If tokens see later tokens of their step, the result of a prompt changes when the prompt is split:

    causal      query i sees keys up to its own                any split gives the same numbers
    no mask     query i sees all keys of its step              the whole prompt must be in one step
    a prefix    every query sees the first N tokens            the first N tokens must be in one step

The plan describes most masks. If the graph computes a mask itself, this module evaluates it for two sample steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import onnx_graphsurgeon as gs
from onnx import ModelProto, NodeProto, TensorProto, numpy_helper

from trt_kvcache.errors import OptionError, UnsupportedModelError
from trt_kvcache.importer.cache_plan import (
    CachePlan,
    CacheUpdate,
    Dim,
    InterfaceChange,
    LogitPositions,
    LogitsSpan,
    Mask,
    PlanOptions,
    Role,
    Route,
    StateUpdate,
    Target,
    TensorRole,
    UpdateContract,
    UpdateForm,
)
from trt_kvcache.importer.emit.canonical_nodes import Findings
from trt_kvcache.importer.graph import (
    ONNX_DOMAINS,
    contains,
    dims,
    free_name,
    inputs_behind,
    is_op,
    producer,
    small_constant,
)
from trt_kvcache.importer.interface import carry_roles, find_roles, index_limits
from trt_kvcache.importer.interface.role_evidence import Known, open_axes
from trt_kvcache.importer.operators import NORMS
from trt_kvcache.importer.planning.attention_plans import AttentionAnalysis, analyze_attention
from trt_kvcache.importer.planning.cache_plans import analyze_caches, check_dtypes
from trt_kvcache.importer.prepare import Prepared
from trt_kvcache.importer.protos import (
    Array,
    all_nodes,
    byte_size,
    constants_of,
    int_attribute,
    opset_version,
    readers_of,
)
from trt_kvcache.importer.recognize.carried import find_states, stack_in_words
from trt_kvcache.importer.steps.cache_contents import drawn_contents, find_caches
from trt_kvcache.importer.steps.drawn_inputs import DrawnInputs, Step, draw_constants
from trt_kvcache.importer.steps.probe import Blueprint, Probe

_WHOLE = (
    "tokens see later tokens of the same step; so a session processes a prompt in one step of at most --max-chunk "
    "tokens, and uses no prefix cache and no drafts with this model; export with a causal mask to allow both"
)


def analyze(prepared: Prepared, graph: gs.Graph, path: Path) -> CachePlan:
    """Return the plan of a prepared model: its caches, its attentions, and the role of every input and output."""
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
    logits, note = _plan_logits(graph, roles, options)
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
        changes=(*findings.changes, *(_change_of(r, logits) for r in cut if logits is not None)),
        original=findings.original,
        logits_span=logits,
    )
    if _see_later_tokens(model, plan):
        plan = replace(plan, prefill_in_one_step=True, notes=(*plan.notes, _WHOLE))
    return replace(plan, warnings=(*plan.warnings, *_short_tables(model, plan)))


def _check_operators(model: ModelProto) -> None:
    """Refuse operators that TensorRT for RTX never supports (measured with version 1.7.1)."""
    for node in all_nodes(model.graph):
        if node.op_type == "NonZero" and node.domain in ("", "ai.onnx"):
            raise UnsupportedModelError(
                f"NonZero '{node.name or node.output[0]}' returns a number of indices that depends on values, but "
                "TensorRT for RTX does not support this operator; sizes must not depend on tokens: export a mixture of "
                "experts with mobius-onnx, or with torch.onnx (dynamo) from transformers 5 after "
                'model.set_experts_implementation("batched_mm"), or plan for TensorRT (--target tensorrt)'
            )


def _short_tables(model: ModelProto, plan: CachePlan) -> list[str]:
    """Return a warning for each table of positions that has fewer rows than the caches hold tokens."""
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
    """Name the first node that seems to update a cache in an unsupported way; empty if there is none."""
    for node in (n for n in graph.nodes if is_op(n, "Concat", "ScatterND", "ScatterElements")):
        past = node.inputs[0]
        while (maker := producer(past)) is not None and is_op(maker, "Transpose", "Reshape", "Unsqueeze", "Squeeze"):
            past = maker.inputs[0]
        if contains(graph.inputs, past) and len(dims(past) or ()) >= 3:
            return f"{node.op} '{node.name}' on '{past.name}'"
    return ""


def _holder(graph: gs.Graph) -> str:
    """Name the first node that may contain a cache or a decoder, or is not in ONNX; empty if there is none."""
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
            result.append(_with_span(role, logits))
    added = [TensorRole(s.name, "input", Role.SPAN, "int64", (s.symbol,), "added", ("span",)) for s in facts.spans]
    added += [_role_of(logits)] if logits is not None else []
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


_ELEMENTWISE = ("Add", "Cast", "Clip", "Div", "Identity", "Mul", "Sub", "Tanh")


def _plan_logits(graph: gs.Graph, roles: Sequence[TensorRole], options: PlanOptions) -> tuple[LogitsSpan | None, str]:
    """Plan which tensor to cut to the last positions, so that other logits are not computed; or None and the reason."""
    logits = _single(roles, Role.LOGITS, "output")
    tokens = _single(roles, Role.TOKENS, "input")
    if options.logits is LogitPositions.ALL or logits is None or not _has_many_logits(logits, tokens):
        return None, ""
    output = next(t for t in graph.outputs if t.name == logits.name)
    product, why = None, "the tokens of all sequences are packed into one axis"
    if "tokens" not in logits.axes:
        product = _last_product(graph, output)
        why = "the last product is followed by operations other than factors, a bias, a softcap or a softmax"
    if product is None:
        return None, f"'{logits.name}' still has the logits of all positions of a step: {why}"
    tensor, nodes = product
    taken = {str(name) for name in graph.tensors()} | {str(d) for r in roles for d in r.shape}
    name = free_name("logits_span", taken)
    return LogitsSpan(name, name, logits.name, str(tensor.name), 1, tuple(str(node.name) for node in nodes)), ""


def _single(roles: Sequence[TensorRole], role: Role, io: str) -> TensorRole | None:
    matches = [r for r in roles if r.role is role and r.io == io]
    return matches[0] if len(matches) == 1 else None


def _has_many_logits(logits: TensorRole, tokens: TensorRole | None) -> bool:
    """True if a step may have several tokens, and the model returns logits for each of them."""
    if "tokens" in logits.axes:
        return True
    if len(logits.shape) != 3 or tokens is None or len(tokens.shape) < 2:
        return False
    return logits.axes[1] == "sequence" or (logits.shape[1] == tokens.shape[1] != 1 and logits.axes[1] == "")


def _role_of(span: LogitsSpan) -> TensorRole:
    return TensorRole(span.name, "input", Role.SPAN, "int64", (span.symbol,), "added", ("kept",))


def _with_span(role: TensorRole, span: LogitsSpan | None) -> TensorRole:
    """Return a role in the rewritten model, where logits ``[B, S, V]`` become ``[B, K, V]``, with K set by `span`."""
    if span is None or role.name != span.output or role.io != "output":
        return role
    return replace(role, shape=(role.shape[0], span.symbol, role.shape[2]), axes=(role.axes[0], "kept", role.axes[2]))


def _change_of(role: TensorRole, span: LogitsSpan) -> InterfaceChange:
    names = {"batch": "B", "sequence": "S"}
    old = [names.get(a, str(d)) for d, a in zip(role.shape, role.axes, strict=True)]
    new = [old[0], span.symbol, old[2]]
    why = f"only the last positions, as many as the length of {span.name}; --logits all keeps all positions"
    return InterfaceChange("output", f"{role.name} [{', '.join(old)}]", f"{role.name} [{', '.join(new)}]", why)


def _last_product(graph: gs.Graph, output: gs.Tensor) -> tuple[gs.Tensor, list[gs.Node]] | None:
    """Return the tensor ``[B, S, H]`` to cut before the last MatMul with a weight, and its readers; None if unknown."""
    sources = inputs_behind(graph)

    def is_fixed(tensor: gs.Tensor) -> bool:
        return tensor.is_empty() or not sources.get(str(tensor.name))

    def products(tensor: gs.Tensor) -> Iterator[gs.Tensor]:
        node = producer(tensor)
        if node is not None and is_op(node, "MatMul"):
            yield from node.inputs[:1] if is_fixed(node.inputs[1]) else ()
        elif node is not None and _keeps_positions(node, [t for t in node.inputs if is_fixed(t)]):
            for before in (t for t in node.inputs if not is_fixed(t)):
                yield from products(before)

    for start in products(output):
        if len(dims(start) or ()) != 3:
            continue
        tail: dict[int, gs.Node] = {}
        pending = [output]
        while pending:
            tensor = pending.pop()
            node = producer(tensor)
            if node is None:
                break
            is_product = is_op(node, "MatMul") and is_fixed(node.inputs[1])
            if not is_product and not _keeps_positions(node, [t for t in node.inputs if is_fixed(t)]):
                break
            if tensor is not output and contains(graph.outputs, tensor):
                break
            tail[id(node)] = node
            pending += [t for t in node.inputs if t is not start and not is_fixed(t)]
        else:
            inner = [t for node in tail.values() for t in node.outputs]
            if all(id(reader) in tail for t in inner for reader in t.outputs):
                readers = [node for node in tail.values() if contains(node.inputs, start)]
                return _before_factor(graph, start, readers, is_fixed) or (start, readers)
    return None


def _before_factor(
    graph: gs.Graph, start: gs.Tensor, readers: list[gs.Node], is_fixed: Callable[[gs.Tensor], bool]
) -> tuple[gs.Tensor, list[gs.Node]] | None:
    """Return the input of the node that makes `start`, and this node, if it mixes no positions (a norm); else None."""
    node = producer(start)
    if node is None or contains(graph.outputs, start) or {*map(id, start.outputs)} != {*map(id, readers)}:
        return None
    others = [t for t in node.inputs if not is_fixed(t)]
    by_position = _keeps_positions(node, [t for t in node.inputs if is_fixed(t)]) or (
        is_op(node, *NORMS) and int(node.attrs.get("axis", -1)) in (-1, 2) and len(node.outputs) == 1
    )
    return (others[0], [node]) if by_position and len(others) == 1 and len(dims(others[0]) or ()) == 3 else None


def _keeps_positions(node: gs.Node, fixed: Sequence[gs.Tensor]) -> bool:
    """True if a node certainly computes each position (axis 1) separately; `fixed` are its constant inputs."""
    if is_op(node, *_ELEMENTWISE):  # constants must not have different numbers for different positions
        rank = len(dims(node.outputs[0]) or ())
        shapes = [() if t.is_empty() else dims(t) for t in fixed]
        ranks = {len(dims(t) or ()) for t in node.inputs if not contains(fixed, t)}
        return (
            rank == 3
            and ranks == {3}
            and all(shape is not None and (len(shape) < 2 or shape[-2] == 1) for shape in shapes)
        )
    if is_op(node, "Softmax", "LogSoftmax"):
        return int(node.attrs.get("axis", -1)) in (-1, len(dims(node.outputs[0]) or ()) - 1)
    if is_op(node, "Reshape"):  # into blocks, as `lower.matmul_nbits` does to correct zero points
        shape = small_constant(node.inputs[1])
        return shape is not None and len(shape) > 2 and not shape[:2].any()
    if is_op(node, "ReduceSum"):
        axes = small_constant(node.inputs[1]) if len(node.inputs) > 1 else None
        return axes is not None and [int(a) for a in axes.reshape(-1)] in ([-1], [len(dims(node.inputs[0]) or ()) - 1])
    return False


_STEPS = (Step(4, (0,), (4,)), Step(3, (2,), (5,)))
_LONGEST = 4  # the most tokens of a step
_HIDDEN = -15.0  # a score counts as hidden if a mask adds this or less; float masks of `DrawnInputs` add -20


def _see_later_tokens(model: ModelProto, plan: CachePlan) -> bool:
    """True if a query may see a later token of the same step. `model` must have inferred shapes."""
    lengths = {c.update_length for c in plan.caches if c.carried}
    if lengths <= {1}:
        return False
    masks = {m.name: m for m in plan.masks}
    names = dict.fromkeys(a.mask for a in plan.attention if a.caches)
    return any(name is None or _shows_later(model, plan, masks[name]) for name in names)


def _shows_later(model: ModelProto, plan: CachePlan, mask: Mask) -> bool:
    if mask.causal or mask.right_window == 0:
        return False
    if mask.mask is None:
        return True
    tensor = next((t for t in plan.tensors if t.name == mask.mask and t.io == "input"), None)
    if tensor is not None and tensor.role is Role.MASK:
        # if the mask has an axis of queries, the caller gives a causal mask, as sessions do
        return "sequence" not in tensor.axes and tensor.shape[-2:-1] in ((), (1,))
    return any(_is_open(values, step) for step, values in _mask_values(model, plan, mask.mask))


def _is_open(values: Array, step: Step) -> bool:
    visible = values if values.dtype == np.bool_ else values > _HIDDEN
    start = step.starts[0]
    keys = min(visible.shape[-1], start + step.length)
    if visible.ndim < 2 or visible.shape[-2] == 1:  # all queries share one row
        return bool(visible[..., start + 1 : keys].any())
    queries = np.arange(visible.shape[-2])[:, np.newaxis] + start
    return bool((visible[..., :keys] & (np.arange(keys) > queries)).any())


def _mask_values(model: ModelProto, plan: CachePlan, name: str) -> Iterator[tuple[Step, Array]]:
    """Yield sample steps with a tensor's values in them; nothing if these depend on weights or unknown operators."""
    blueprint, limits = Blueprint(model, {}), index_limits(model, plan)
    caches = {c.role.name: c for c in find_caches(plan)}
    # In inputs without a role, such as token types, the value 1 may show tokens that the value 0 hides.
    ones = {
        t.name: np.ones([d if isinstance(d, int) else _LONGEST for d in t.shape])
        for t in plan.tensors
        if t.io == "input" and t.role is Role.OTHER
    }
    for step, others in ((step, others) for step in _STEPS for others in ({}, ones)):
        try:
            values = draw_constants(plan, 1, 0) | others
            inputs = DrawnInputs(plan, limits, values, np.random.default_rng(0), unknown=_LONGEST, plain=True)
            feeds = inputs.shared(step)
            feeds |= {n: drawn_contents(c, 0, step.starts, 0.0) for n, c in caches.items() if n in blueprint.inputs}
        except (OptionError, UnsupportedModelError):
            return
        value = Probe(blueprint, {n: v.shape for n, v in feeds.items()}, feeds).value(name)
        if value is None:
            return
        yield step, value


_SAME = ("Cast", "DequantizeLinear", "Identity")
"""Operators whose result has the same rows as the first input."""


def weights_read(model: ModelProto) -> int:
    """Return the bytes of weights that a step of one token reads. Of a lookup table, count only the rows it reads."""
    constants = constants_of(model.graph)
    readers = readers_of(model.graph.node)
    makers = {name: node for node in model.graph.node for name in node.output}
    return sum(
        math.ceil((byte_size(tensor) or 0) * _share(name, tensor.dims, readers, makers, constants))
        for name, tensor in constants.items()
    )


def _share(
    name: str, shape: Sequence[int], readers: Mapping[str, list[NodeProto]], makers: Mapping[str, NodeProto],
    constants: Mapping[str, TensorProto],
) -> float:  # fmt: skip
    """Return the share (0 to 1) of a constant that a step of one token reads."""
    shares = [0.0] if name in readers else [1.0]
    for node in readers.get(name, ()):
        if node.op_type in _SAME and node.input[0] == name:
            shares.append(_share(node.output[0], shape, readers, makers, constants))
        elif node.op_type in ("Gather", "GatherND") and node.input[0] == name and shape:
            axis = int_attribute(node, "axis") if node.op_type == "Gather" else 0
            shares.append(min(1.0, _rows(node.input[1], makers, constants) / max(shape[axis], 1)))
        elif node.op_type == "Slice" and node.input[0] == name and not {*node.input[1:3]} <= constants.keys():
            shares.append(0.0)  # of row numbers and masks, only the rows in use are read
        elif node.op_type == "RotaryEmbedding" and name != node.input[0] and len(shape) == 2:
            shares.append(1 / max(shape[0], 1))
        else:
            return 1.0
    return max(shares)


def _rows(indices: str, makers: Mapping[str, NodeProto], constants: Mapping[str, TensorProto]) -> float:
    """Return how many table rows a token reads: k if a TopK computes `indices` (infinite if k is unknown), else 1."""
    pending, seen = [indices], {indices}
    while pending:
        node = makers.get(pending.pop())
        if node is None:
            continue
        if node.op_type == "TopK":
            count = constants.get(node.input[1])
            known = count is not None and not count.external_data
            return float(numpy_helper.to_array(count).item()) if count is not None and known else math.inf
        pending += {*node.input} - seen
        seen.update(node.input)
    return 1.0

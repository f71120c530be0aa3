"""Turn a decoder whose caches are no TensorScatter caches into one whose caches are.

    Einsum -> MatMul, Mul                               einsum
    what is read, in which order                        exported
    samples of a step                                   evidence: samples, probe (blueprint), sizes
    constants in disguise                               evidence: fixed
    cache updates, found and read                       idioms: cache_updates (candidate, views, evidence: reach),
                                                        read_updates; short_masks, new_rows
    attention over them                                 attention: search (cache_reads, head_order), masks
                                                        (square_masks, bias), extensions: rounded_attention
    keys and values computed from caches                extensions: latent_attention
    caches inside operators                             idioms: attention_past
    state that is no cache                              idioms: states
    what was found                                      findings
    the canonical form                                  canonical, readers, residual,
                                                        trim
    windows as circular buffers                         extensions: ring_windows

Finding reads the model as exported; only then is the graph edited. A model whose caches are canonical
already, or that has none, goes through as it is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import onnx
import onnx_graphsurgeon as gs

from trt_kvcache.importer.extensions import load
from trt_kvcache.importer.graph import Emitter, consumers, contains, dims, fold_identities, is_op
from trt_kvcache.importer.interface.changes import find_changes
from trt_kvcache.importer.interface.exported import Interface
from trt_kvcache.importer.normalize.attention.head_order import in_groups
from trt_kvcache.importer.normalize.attention.square_masks import SINGLY
from trt_kvcache.importer.normalize.canonical import Canonical
from trt_kvcache.importer.normalize.evidence.samples import Sample, Samples
from trt_kvcache.importer.normalize.exported import Exported, read_exported
from trt_kvcache.importer.normalize.findings import Core, Findings
from trt_kvcache.importer.normalize.idioms.attention_past import holds_cache, rewrite_held
from trt_kvcache.importer.normalize.idioms.cache_updates import find_candidates
from trt_kvcache.importer.normalize.idioms.new_rows import say_layouts
from trt_kvcache.importer.normalize.residual import (
    NOTE,
    check_padding,
    check_readers,
    drop_copies,
    free_positions,
    free_shapes,
    lift_shapes,
)
from trt_kvcache.importer.plan import Dim, PlanOptions, Sliding

if TYPE_CHECKING:
    from trt_kvcache.importer.extensions.ring_windows import Rings

__all__ = ["Normalized", "normalize"]

_UPDATES = ("TensorScatter", "TRT_KVCacheUpdate")


@dataclass(frozen=True)
class Normalized:
    """A model in canonical form.

    Attributes:
        model: the model; the same object where nothing was to do.
        findings: what was done; None where nothing was.
    """

    model: onnx.ModelProto
    findings: Findings | None


def normalize(model: onnx.ModelProto, weights: Mapping[str, onnx.TensorProto], options: PlanOptions) -> Normalized:
    """Bring the caches of a model into canonical form.

    Args:
        model: flat, with named nodes and without functions; large inline weights are stand-ins. Not changed.
        weights: the detached weights.
        options: capacity, name patterns, and what to do with windows.

    Raises:
        UnsupportedModelError: what was found cannot be proven to be what is supported.
        OptionError: the capacity is missing or contradicts the model.
    """
    if any(node.op_type in _UPDATES for node in model.graph.node):
        return _slide(model, options)
    graph = gs.import_onnx(model)
    fold_identities(graph)
    if any(is_op(node, "QuantizeLinear") for node in graph.nodes):
        load("rounded_attention").round_new_rows(graph)
    if not find_candidates(graph) and not holds_cache(graph):
        return Normalized(model, None)
    exported = read_exported(graph, weights, options)
    return Normalized(model, None) if exported is None else _rewrite(exported, options)


def _rewrite(exported: Exported, options: PlanOptions) -> Normalized:
    """Edit the graph as proven, and free it from what only the caches as exported needed."""
    graph, interface, samples = exported.graph, exported.interface, exported.samples
    computed = exported.computed
    tokens = next(t for t in graph.inputs if t.name == interface.tokens)
    canonical = Canonical(graph, tokens, exported.batch, exported.capacity)
    for held in exported.held:
        rewrite_held(canonical, held)
    for write in exported.writes:
        canonical.write(write)
    for core in exported.cores:
        plain = canonical.with_heads(core)
        plain = plain if computed is None else computed.place(plain, canonical)
        canonical.core(in_groups(plain, canonical))
    counts, copies = _drop_counts(graph, samples), drop_copies(graph)
    graph.cleanup().toposort()
    check_readers(graph, {} if computed is None else computed.reasons)
    free_shapes(graph, canonical.emit, interface)
    graph.cleanup()
    by_tokens = free_positions(graph, canonical, interface, samples)  # sorts the graph
    check_padding(graph, interface)
    lift_shapes(graph, canonical.emit)
    rings: Rings | None = None
    if options.sliding is Sliding.CIRCULAR:
        rings = load("ring_windows").make_circular(graph, canonical.emit, exported.capacity, options.window_chunk)
    _drop_inputs(graph, interface)

    model = _export(graph, exported.model, canonical.opset)
    for name, (kind, shape) in canonical.known.items():
        named = [None if d == "?" else d for d in shape]
        model.graph.value_info.append(onnx.helper.make_tensor_value_info(name, kind, named))
    tensors = say_layouts(interface.tensors, exported.writes)
    tensors = tuple(replace(t, singly=exported.singly and t.name == interface.tokens) for t in tensors)
    changes = find_changes(tensors, model, counts, copies)
    notes = (
        *_own_masks(exported.cores),
        *(() if computed is None else computed.notes),
        *((NOTE,) if by_tokens else ()),
        *(() if rings is None else rings.notes),
    )
    notes += (SINGLY,) if exported.singly else ()
    roles = (*interface.roles, *canonical.added)
    longest = {} if rings is None else rings.longest
    return Normalized(model, Findings(canonical.idioms, changes, tensors, roles, interface.states, notes, longest))


def _own_masks(cores: Sequence[Core]) -> list[str]:
    """What to know about the masks that the caller gives."""
    names = dict.fromkeys(core.visibility.own.name for core in cores if core.visibility.own is not None)
    return [
        f"the mask '{name}' stays the caller's own: a session fills it causally, and a window, if the model was "
        "trained with one, is in this mask only"
        for name in names
    ]


def _slide(model: onnx.ModelProto, options: PlanOptions) -> Normalized:
    """A canonical model, with its windowed caches circular if asked."""
    if options.sliding is not Sliding.CIRCULAR:
        return Normalized(model, None)
    graph = gs.import_onnx(onnx.shape_inference.infer_shapes(model, data_prop=True))
    fold_identities(graph)
    lengths = [d for n in graph.nodes if is_op(n, "TensorScatter") if isinstance(d := _length(n), int)]
    capacity = options.capacity or max(lengths, default=0)
    if not capacity:
        return Normalized(model, None)  # binding the capacity says what is missing
    rings = load("ring_windows").make_circular(graph, Emitter(graph), capacity, options.window_chunk, idle=True)
    idioms = {n.inputs[0].name: "TensorScatter" for n in graph.nodes if is_op(n, "TensorScatter")}
    findings = Findings(idioms, notes=rings.notes, longest=rings.longest)
    graph.cleanup(remove_unused_graph_inputs=False).toposort()
    return Normalized(_export(graph, model, 0) if rings.longest else model, findings)


def _length(update: gs.Node) -> Dim:
    return (dims(update.inputs[0]) or ("?",))[int(update.attrs.get("axis", -2))]


def _drop_counts(graph: gs.Graph, samples: Samples) -> set[str]:
    """Take away outputs that count the tokens in the cache: the caller knows."""
    counts = set()
    for tensor in list(graph.outputs):
        if all(_counts(tensor, sample) for sample in samples.plain):
            counts.add(str(tensor.name))
            graph.outputs = [t for t in graph.outputs if t is not tensor]
    return counts


def _counts(tensor: gs.Tensor, sample: Sample) -> bool:
    value = sample.probe.value(tensor.name)
    return value is not None and value.dtype.kind in "iu" and bool((value == sample.total).all())


def _drop_inputs(graph: gs.Graph, interface: Interface) -> None:
    """Take away the inputs that nothing reads: they only served the caches as exported, or nothing from the start."""
    graph.inputs = [t for t in graph.inputs if consumers(t) or contains(graph.outputs, t) or t.name == interface.tokens]


def _export(graph: gs.Graph, snapshot: onnx.ModelProto, least: int) -> onnx.ModelProto:
    model: onnx.ModelProto = gs.export_onnx(graph)
    del model.graph.value_info[:]
    for opset in model.opset_import:
        if opset.domain in ("", "ai.onnx"):
            opset.version = max(opset.version, least)
    model.ir_version = max(snapshot.ir_version, 10)
    return model

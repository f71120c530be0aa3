"""Turn a decoder whose caches are no TensorScatter caches into one whose caches are.

    samples of a step                                   evidence: samples, probe
    constants in disguise                               evidence: fixed
    cache updates, found and read                       idioms: cache_updates (candidate, views, evidence: reach),
                                                        read_updates (update_runs); new_rows
    attention over them                                 attention: search, masks
                                                        extensions: position_biases
    keys and values computed from caches                extensions: latent_attention
    caches inside operators                             idioms: attention_past
    state that is no cache                              idioms: states
    what was found                                      findings
    the canonical form                                  canonical, residual
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

from trt_kvcache.errors import UnsupportedModelError
from trt_kvcache.importer import extensions
from trt_kvcache.importer.graph import (
    INT32,
    INT64,
    consumers,
    contains,
    elem_type,
    export_inferred,
    fold_identities,
    is_op,
    tidy,
)
from trt_kvcache.importer.interface.changes import find_changes
from trt_kvcache.importer.interface.exported import Interface
from trt_kvcache.importer.normalize.attention.search import find_attentions
from trt_kvcache.importer.normalize.candidate import Candidate, ExportedUpdate, refusal
from trt_kvcache.importer.normalize.canonical import Canonical
from trt_kvcache.importer.normalize.evidence.fixed import fold_fixed
from trt_kvcache.importer.normalize.evidence.probe import Blueprint
from trt_kvcache.importer.normalize.evidence.samples import Samples
from trt_kvcache.importer.normalize.findings import AttentionSite, Findings, Write
from trt_kvcache.importer.normalize.idioms.attention_past import (
    find_inner_caches,
    has_inner_caches,
    read_inner_attentions,
)
from trt_kvcache.importer.normalize.idioms.cache_updates import find_candidates
from trt_kvcache.importer.normalize.idioms.new_rows import part_from_rows, say_layouts
from trt_kvcache.importer.normalize.idioms.read_updates import check_sizes, read_updates
from trt_kvcache.importer.normalize.idioms.states import find_states
from trt_kvcache.importer.normalize.residual import (
    NOTE,
    check_readers,
    drop_copies,
    free_positions,
    free_shapes,
)
from trt_kvcache.importer.plan import PlanOptions, Sliding, StateUpdate

if TYPE_CHECKING:
    from trt_kvcache.importer.extensions.latent_attention import ComputedAttention
    from trt_kvcache.importer.extensions.ring_windows import Rings

__all__ = ["Exported", "canonical_form", "normalize", "read_graph"]

FLOAT16, BFLOAT16 = int(onnx.TensorProto.FLOAT16), int(onnx.TensorProto.BFLOAT16)
_SINGLY = (
    "the masks of the model as exported fit several tokens only while nothing is in its caches; here every step may "
    "bring several, each of which sees those before it"
)


@dataclass(frozen=True, eq=False)
class Exported:
    """A model as exported, and what was found in it.

    Attributes:
        model: in standard operators of opset 24; `graph` is the same, and is edited from now on.
        computed: the same attentions, where keys or values are computed from caches; None: caches are read as they are.
        inner: attentions whose operators hold their caches.
    """

    model: onnx.ModelProto
    graph: gs.Graph
    interface: Interface
    samples: Samples
    writes: tuple[Write, ...]
    sites: tuple[AttentionSite, ...]
    computed: ComputedAttention | None
    inner: tuple[AttentionSite, ...]


def normalize(
    model: onnx.ModelProto, weights: Mapping[str, onnx.TensorProto], options: PlanOptions, usual: int
) -> tuple[onnx.ModelProto, Findings | None]:
    """Bring the caches of a model into canonical form.

    Args:
        model: flat, with named nodes and without functions; large inline weights are stand-ins. Not changed.
        weights: the detached weights.
        options: capacity, name patterns, and what to do with windows.
        usual: the capacity where neither options nor model say it.

    Returns:
        The model and what was done; the same object and None where nothing was to do.

    Raises:
        UnsupportedModelError: what was found is not what is supported.
        OptionError: the capacity contradicts the model.
    """
    if any(node.op_type in ("TensorScatter", "TRT_KVCacheUpdate") for node in model.graph.node):
        if options.sliding is Sliding.CIRCULAR:
            return extensions.ring_windows.slide(model, options, usual)
        return model, None
    graph = read_graph(model)
    exported = _recognize(graph, weights, options, usual)
    return (model, None) if exported is None else canonical_form(exported, options)


def read_graph(model: onnx.ModelProto) -> gs.Graph:
    """A model as a graph that is edited, without Identity."""
    graph = gs.import_onnx(model)
    fold_identities(graph)
    return graph


def _recognize(
    graph: gs.Graph, weights: Mapping[str, onnx.TensorProto], options: PlanOptions, usual: int
) -> Exported | None:
    """Find caches and attentions, in a graph that is edited; None where what looked like caches is state."""
    if (standard := _standard(graph)) is None:
        return None
    graph, model, inner = standard
    blueprint = Blueprint(model, weights)
    inside = {id(t) for c in inner for t in (c.past, c.present)}
    candidates = [c for c in find_candidates(graph) if inside.isdisjoint((id(c.past), id(c.present)))]
    read, states = _states(graph, inner, read_updates(candidates, blueprint, options.capacity or usual))
    if not read and not inner:
        return None
    for update in read:
        if isinstance(update, Candidate):
            raise refusal(update, update.reason, update.advice)
    interface = Interface(model, [*read, *inner], options.config, states)
    capacity = interface.fixed_capacity(options.capacity) or options.capacity or usual
    samples = Samples(blueprint, interface, capacity)
    if (folded := fold_fixed(samples)) is not None:
        return _recognize(read_graph(folded), weights, options, usual)
    writes = tuple(update for update in read if isinstance(update, Write))
    samples = samples.that_run()
    check_sizes(writes, samples)
    attentions = read_inner_attentions(graph, interface, samples)
    sites, computed = _attention(graph, (*writes, *inner), interface, samples, options)
    return Exported(model, graph, interface, samples, writes, sites, computed, attentions)


def _attention(
    graph: gs.Graph, writes: Sequence[Write], interface: Interface, samples: Samples, options: PlanOptions
) -> tuple[tuple[AttentionSite, ...], ComputedAttention | None]:
    """All attentions; where one of the caches is read by none as it is, those over what is computed from caches too."""
    try:
        sites = find_attentions(graph, writes, interface, samples)
        attended = {write.past.name for site in sites for write in (site.key, site.value)}
        if all(write.past.name in attended or not _is_read(write) for write in writes):
            return sites, None
    except UnsupportedModelError:
        pass  # the extension has what is computed to look at, too, and refuses what is left
    computed = extensions.latent_attention.find_attention(graph, writes, interface, samples, options.latent_attention)
    return computed.sites, computed


def _is_read(write: Write) -> bool:
    """True if an operator takes numbers of a cache after its update."""
    tensors = (write.present, *write.aliases, *(t for t, _ in write.turned))
    return any(not is_op(node, "Shape") for t in tensors for node in consumers(t))


def _standard(graph: gs.Graph) -> tuple[gs.Graph, onnx.ModelProto, list[Write]] | None:
    """The same in standard operators, as a graph and as a model; caches in operators. None: nothing may be a cache."""
    tidy(graph)
    if any(t.shape is None and not t.is_empty() for node in graph.nodes for t in node.outputs):
        graph = gs.import_onnx(onnx.shape_inference.infer_shapes(gs.export_onnx(graph), data_prop=True))
    candidates = find_candidates(graph)
    if not candidates and not any(map(has_inner_caches, graph.nodes)):
        return None
    part_from_rows(graph, candidates)
    inner = find_inner_caches(graph)  # which states the shapes of their caches
    return graph, export_inferred(tidy(graph)), inner


def _states(
    graph: gs.Graph, inner: Sequence[Write], read: Sequence[Write | Candidate]
) -> tuple[list[Write | Candidate], tuple[StateUpdate, ...]]:
    """Caches outside of operators, and state that is none."""
    caches = {c.past.name for c in inner} | {c.past.name for c in read if not _may_be_state(c)}
    states = find_states(graph, caches)
    return [c for c in read if c.past.name not in {s.past for s in states}], states


def _may_be_state(cache: ExportedUpdate) -> bool:
    """True if it may be state instead, as of a convolution: `find_states` says.

    Like new rows after a past of a fixed length, or like a shifted cache whose next value nothing reads.
    """
    return cache.fixed_rows is not None or (cache.shifted and not consumers(cache.present))


def canonical_form(exported: Exported, options: PlanOptions) -> tuple[onnx.ModelProto, Findings]:
    """Edit the graph, and free it from what only the caches as exported needed."""
    graph, interface, samples = exported.graph, exported.interface, exported.samples
    computed, writes = exported.computed, exported.writes
    inner = [write for site in exported.inner for write in (site.key, site.value)]
    tokens = next(t for t in graph.inputs if t.name == interface.tokens)
    canonical = Canonical(graph, tokens, (*writes, *inner)[0].past, samples.capacity)
    for write in (*inner, *writes):
        canonical.write(write)
    for site in exported.inner:
        canonical.attend(site)
    for site in exported.sites:
        plain = canonical.with_heads(site)
        canonical.attend(plain if computed is None else computed.place(plain, canonical))
    counts, copies = _drop_counts(graph, samples), drop_copies(graph)
    tidy(graph)
    check_readers(graph, {} if computed is None else computed.reasons, samples)
    free_shapes(graph, canonical.emit, interface)
    tidy(graph, sort=False)
    by_tokens = free_positions(graph, canonical, interface, samples)  # sorts the graph
    rings: Rings | None = None
    if options.sliding is Sliding.CIRCULAR:
        rings = extensions.ring_windows.make_circular(graph, canonical.emit, samples.capacity, options.window_chunk)
    # Inputs that nothing reads only served the caches as exported, or nothing from the start.
    graph.inputs = [t for t in graph.inputs if consumers(t) or contains(graph.outputs, t) or t is tokens]

    model: onnx.ModelProto = gs.export_onnx(graph)
    del model.graph.value_info[:]
    for opset in model.opset_import:
        if opset.domain in ("", "ai.onnx"):
            opset.version = max(opset.version, canonical.opset)
    model.ir_version = max(exported.model.ir_version, 10)
    for name, (kind, shape) in canonical.known.items():
        named = [None if d == "?" else d for d in shape]
        model.graph.value_info.append(onnx.helper.make_tensor_value_info(name, kind, named))
    tensors = say_layouts(interface.tensors, writes)
    tensors = tuple(replace(t, singly=samples.singly and t.name == interface.tokens) for t in tensors)
    shifted = {c.visibility.own.name: c.key.kept for c in exported.sites if c.key.shifted and c.visibility.own}
    tensors = tuple(replace(t, kept=shifted.get(t.name, t.kept)) for t in tensors)
    changes = find_changes(tensors, model, counts, copies)
    notes = (
        *_own_masks(exported.sites),
        *_narrower(exported.sites),
        *(() if computed is None else computed.notes),
        *((NOTE,) if by_tokens else ()),
        *(() if rings is None else rings.notes),
    )
    notes += (_SINGLY,) if samples.singly else ()
    roles = (*interface.roles, *canonical.added)
    longest = {} if rings is None else rings.longest
    open_capacity = None if interface.fixed_capacity(options.capacity) else samples.capacity
    return model, Findings(canonical.idioms, changes, tensors, roles, interface.states, notes, longest, open_capacity)


def _own_masks(sites: Sequence[AttentionSite]) -> list[str]:
    """Notes on the masks that the caller gives."""
    own = [site.visibility.own for site in sites if not site.key.shifted]
    names = dict.fromkeys(mask.name for mask in own if mask is not None)
    return [
        f"the mask '{name}' stays the caller's own: a session fills it causally, and a window, if the model was "
        "trained with one, is in this mask only"
        for name in names
    ]


def _narrower(sites: Sequence[AttentionSite]) -> list[str]:
    """A note on weights of keys that are computed in float32, and here in the type of the caches."""
    kinds = {elem_type(site.key.past) for site in sites if site.wide_weights and not site.wide}
    return [
        f"the weights that a softmax makes of scores are float32 in the model as exported, and {name} here, which "
        f"rounds each by {share} % at most; products of queries and keys have the type that they had"
        for kind, name, share in ((FLOAT16, "float16", "0.05"), (BFLOAT16, "bfloat16", "0.4"))
        if kind in kinds
    ]


def _drop_counts(graph: gs.Graph, samples: Samples) -> set[str]:
    """Take away outputs that count the tokens in the cache: the caller knows."""

    def counts(tensor: gs.Tensor) -> bool:
        values = [(step, step.probe.value(tensor.name)) for step in samples.plain]
        return all(value is not None and bool((value == step.total).all()) for step, value in values)

    counters = {str(t.name) for t in graph.outputs if elem_type(t) in (INT32, INT64) and counts(t)}
    graph.outputs = [t for t in graph.outputs if t.name not in counters]
    return counters

"""Read a model as exported: what its caches and states are, and proof of all that the canonical form will say of them.

standard operators     the same model without operators and idioms that have an equal in plain ONNX
caches and states      which inputs and outputs belong together
samples                steps of it, evaluated as far as they follow from lengths and masks
proof                  writes, what attention reads of them, operators that hold caches; at every length
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import onnx
import onnx_graphsurgeon as gs

from trt_kvcache.errors import UnsupportedModelError
from trt_kvcache.importer.extensions import load
from trt_kvcache.importer.graph import consumers, export_inferred, fold_identities, is_op
from trt_kvcache.importer.interface.exported import Interface
from trt_kvcache.importer.normalize.attention.search import find_cores
from trt_kvcache.importer.normalize.attention.square_masks import hold_by_position, pad_square_masks
from trt_kvcache.importer.normalize.candidate import Candidate
from trt_kvcache.importer.normalize.canonical import batch_of
from trt_kvcache.importer.normalize.einsum import lower_einsum
from trt_kvcache.importer.normalize.evidence.blueprint import Blueprint
from trt_kvcache.importer.normalize.evidence.fixed import fold_fixed
from trt_kvcache.importer.normalize.evidence.samples import Samples
from trt_kvcache.importer.normalize.findings import Core, Write
from trt_kvcache.importer.normalize.idioms.attention_past import HeldAttention, HeldCache, find_held, read_held
from trt_kvcache.importer.normalize.idioms.cache_updates import find_candidates
from trt_kvcache.importer.normalize.idioms.new_rows import part_from_rows
from trt_kvcache.importer.normalize.idioms.read_updates import find_kept, read_update
from trt_kvcache.importer.normalize.idioms.short_masks import find_short_masks
from trt_kvcache.importer.normalize.idioms.states import find_states, resized
from trt_kvcache.importer.plan import Dim, PlanOptions, StateUpdate

if TYPE_CHECKING:
    from trt_kvcache.importer.extensions.latent_attention import ComputedAttention

__all__ = ["Exported", "read_exported"]


@dataclass(frozen=True, eq=False)
class Exported:
    """A model as exported, with everything that is proven about it.

    Attributes:
        model: in standard operators of opset 24; `graph` is the same, and is edited from now on.
        computed: the same attentions, where keys or values are computed from caches; None: caches are read as they are.
        held: operators that hold caches.
        batch: the batch dimension of the caches.
        capacity: tokens per sequence.
        singly: behind others, the model as exported takes tokens one by one only.
    """

    model: onnx.ModelProto
    graph: gs.Graph
    interface: Interface
    samples: Samples
    writes: tuple[Write, ...]
    cores: tuple[Core, ...]
    computed: ComputedAttention | None
    held: tuple[HeldAttention, ...]
    batch: Dim
    capacity: int
    singly: bool = False


def read_exported(graph: gs.Graph, weights: Mapping[str, onnx.TensorProto], options: PlanOptions) -> Exported | None:
    """Find and prove.

    Args:
        graph: of the model; edited.
        weights: the detached weights.
        options: capacity and name patterns.

    Returns:
        None where what looked like caches is state.

    Raises:
        UnsupportedModelError: what was found cannot be proven to be what is supported.
        OptionError: the capacity is missing or contradicts the model.
    """
    graph, model, held = _standard(graph)
    candidates, states = _caches(graph, held)
    if not candidates and not held:
        return None
    candidates, interface, samples = _sampled(graph, Blueprint(model, weights), candidates, held, states, options)
    if (folded := fold_fixed(samples)) is not None:
        graph = gs.import_onnx(folded)
        fold_identities(graph)
        return read_exported(graph, weights, options)
    if pad_square_masks(graph, samples):
        exported = read_exported(graph, weights, options)
        if exported is not None:
            hold_by_position(exported.graph, exported.samples)
        return None if exported is None else replace(exported, singly=True)
    writes = tuple(read_update(candidate, samples) for candidate in candidates)
    cores, computed = _attention(graph, writes, interface, samples, options)
    attentions = read_held(graph, interface, samples)
    batch = batch_of(candidates[0].past if candidates else held[0].past)
    return Exported(model, graph, interface, samples, writes, cores, computed, attentions, batch, samples.capacity)


def _attention(
    graph: gs.Graph, writes: Sequence[Write], interface: Interface, samples: Samples, options: PlanOptions
) -> tuple[tuple[Core, ...], ComputedAttention | None]:
    """All attentions; where one of the caches is read by none as it is, those over what is computed from caches too."""
    try:
        cores = find_cores(graph, writes, interface, samples)
        attended = {write.past.name for core in cores for write in (core.key, core.value)}
        if all(write.past.name in attended or not _is_read(write) for write in writes):
            return cores, None
    except UnsupportedModelError:
        pass  # the extension has what is computed to look at, too, and refuses what is left
    computed = load("latent_attention").find_attention(graph, writes, interface, samples, options.latent_attention)
    return computed.cores, computed


def _is_read(write: Write) -> bool:
    """Whether an operator takes numbers of a cache after its update."""
    tensors = (write.present, *write.aliases, *(t for t, _ in write.turned))
    return any(not is_op(node, "Shape") for t in tensors for node in consumers(t))


def _standard(graph: gs.Graph) -> tuple[gs.Graph, onnx.ModelProto, list[HeldCache]]:
    """The same in standard operators, as a graph and as a model; caches in operators."""
    lower_einsum(graph)
    graph.cleanup().toposort()
    if any(t.shape is None and not t.is_empty() for node in graph.nodes for t in node.outputs):
        graph = gs.import_onnx(onnx.shape_inference.infer_shapes(gs.export_onnx(graph), data_prop=True))
    if any(is_op(node, "QuantizeLinear") for node in graph.nodes):
        load("rounded_attention").round_first(
            graph, {t.name for c in find_candidates(graph) for t in (c.present, *_outputs(c))}
        )
    part_from_rows(graph, find_candidates(graph))
    held = find_held(graph)  # which states the shapes of their caches
    return graph, export_inferred(graph.cleanup().toposort()), held


def _outputs(candidate: Candidate) -> list[gs.Tensor]:
    return [] if candidate.node is None else candidate.node.outputs


def _caches(graph: gs.Graph, held: Sequence[HeldCache]) -> tuple[tuple[Candidate, ...], list[StateUpdate]]:
    """What may be caches outside of operators, and what is state."""
    candidates = find_candidates(graph)
    caches = {c.past.name for c in held} | {c.past.name for c in candidates if not _may_be_state(c)}
    found = find_states(graph, caches)
    states = [s for s in found if all(s.past != c.past.name or _may_be_state(c) for c in candidates)]
    candidates = tuple(c for c in candidates if c.past.name not in {s.past for s in states})
    for candidate in candidates:
        if candidate.reason:
            raise resized(candidate) or candidate.refusal(candidate.reason)
    return candidates, states


def _sampled(
    graph: gs.Graph,
    blueprint: Blueprint,
    candidates: tuple[Candidate, ...],
    held: Sequence[HeldCache],
    states: Sequence[StateUpdate],
    options: PlanOptions,
) -> tuple[tuple[Candidate, ...], Interface, Samples]:
    """Interface and samples; and the caches again, where some are cut, with the rows that these keep."""

    def read(shorter: Mapping[str, int]) -> Interface:
        return Interface(blueprint.model, [*candidates, *held], options.config, states, shorter)

    interface = read({})
    capacity = interface.capacity(options.capacity)
    samples = Samples(blueprint, interface, capacity)
    if not any(candidate.is_cut for candidate in candidates):
        return candidates, interface, samples
    candidates = find_kept(candidates, samples)
    kept = {t.name: c.kept for c in candidates if c.kept is not None for t in (c.past, c.present)}
    interface = read(kept)
    samples = Samples(blueprint, interface, capacity)
    if short := find_short_masks(graph, interface, samples):
        interface = read(kept | short)
        samples = Samples(blueprint, interface, capacity)
    return candidates, interface, samples


def _may_be_state(cache: Candidate) -> bool:
    """Whether what looks like a cache may be state: `find_states` says.

    Of a convolution, like a rolling cache whose next value nothing reads, or like new rows behind a past of a fixed
    length; of linear attention, like a cache written by masked addition that cannot be one.
    """
    if cache.idiom == "rolling":
        return not consumers(cache.present)
    if cache.room is not None:
        return True
    return bool(cache.reason) and cache.node is not None and is_op(cache.node, "Add")

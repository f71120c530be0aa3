"""Attention over growing caches: shapes delimit it, runs describe it.

    cut       regions around attentions, by the shapes of tensors alone
    turned    caches that lie otherwise than by sequence
    read      a region run on chosen numbers: what it computes
    layout    the axes of tensors, as products of the sizes of an attention

`find_sites` is tried where `trt_kvcache.importer.normalize` finds no caches or no attention that it knows. It names no
operator but Shape, so that it does not matter how an exporter writes an attention. It guesses, too: the check decides.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import product
from math import prod

import onnx
import onnx_graphsurgeon as gs

from trt_kvcache.errors import UnsupportedModelError
from trt_kvcache.importer import extensions
from trt_kvcache.importer.extensions import Finish
from trt_kvcache.importer.graph import FLOATS, Emitter, elem_type, export_inferred, inputs_behind, producer
from trt_kvcache.importer.interface.exported import Interface
from trt_kvcache.importer.normalize import Exported, canonical_form, read_graph
from trt_kvcache.importer.normalize.candidate import ExportedUpdate
from trt_kvcache.importer.normalize.canonical import emit_sizes
from trt_kvcache.importer.normalize.evidence.fixed import fold_fixed
from trt_kvcache.importer.normalize.evidence.probe import Blueprint
from trt_kvcache.importer.normalize.evidence.samples import Samples
from trt_kvcache.importer.normalize.findings import AttentionSite, Findings, Visibility, Write
from trt_kvcache.importer.normalize.idioms.attention_past import find_inner_caches
from trt_kvcache.importer.normalize.idioms.states import find_states
from trt_kvcache.importer.plan import Dim, PlanOptions, StateUpdate
from trt_kvcache.importer.sites.cut import Cutter, FartherError, MisfitError, Region, SiteError, UnknownError
from trt_kvcache.importer.sites.layout import ATTENTION, Layout, order_of
from trt_kvcache.importer.sites.read import AttentionSeen, CacheSeen, Reader
from trt_kvcache.importer.sites.turned import growing, ways

__all__ = ["find_sites"]

_MOST_STEPS = 12  # back from short tensors to those before them
_PLACES = ((4, 2), (4, 1), (4, 3), (3, 1))  # ranks of caches, and axes of their rows
_PLAIN = (("b",), ("n", "g"), ("s",), ("d",))


def find_sites(
    model: onnx.ModelProto, weights: Mapping[str, onnx.TensorProto], options: PlanOptions, usual: int
) -> tuple[onnx.ModelProto, Findings, tuple[Finish, ...]] | None:
    """Bring the growing caches of a model into canonical form, whatever operators write and read them.

    Args:
        model: flat, with named nodes and without functions; large inline weights are stand-ins. Not changed.
        weights: the detached weights.
        options: capacity and name patterns.
        usual: the capacity where neither options nor model say it.

    Returns:
        The model, what was done, and what else the plan has to say; None: it has no attention over growing caches.

    Raises:
        UnsupportedModelError: in words what was seen of an attention that is not supported.
        OptionError: the capacity contradicts the model.
    """
    refusal = ""
    for way, stacks in ways(model):
        try:
            canonical, findings = _described(way, weights, options, usual)
        except (SiteError, UnsupportedModelError) as error:
            runs = not isinstance(error, MisfitError)
            refusal = refusal or runs * str(error)
            if runs and any(stack.heads for stack in stacks):
                break  # with another number of heads the model does not run
            continue
        return canonical, findings, (partial(extensions.stacked_caches.finish, stacks),) if stacks else ()
    if refusal:
        raise UnsupportedModelError(f"no attention over caches could be described: {refusal}")
    return None


def _described(
    model: onnx.ModelProto,
    weights: Mapping[str, onnx.TensorProto],
    options: PlanOptions,
    usual: int,
    positions: tuple[str, ...] = (),
) -> tuple[onnx.ModelProto, Findings]:
    """The model in canonical form, whose caches lie by sequence; `positions` are inputs that hold such, too."""
    graph = read_graph(model)
    graph.cleanup().toposort()
    find_inner_caches(graph)  # which states the shapes of their caches
    model = export_inferred(graph)
    tensors = graph.tensors()
    update = partial(ExportedUpdate, "attention", growing=True, positions=positions)
    caches = [update(tensors[p.name], tensors[q.name], axis=axis) for p, q, axis in growing(model.graph)]
    states = find_states(graph, {t.name for c in caches for t in (c.past, c.present)})
    _check_others(graph, caches, states)
    interface = Interface(model, caches, options.config, states)
    capacity = interface.fixed_capacity(options.capacity) or options.capacity or usual
    samples = Samples(Blueprint(model, weights), interface, capacity)
    if (folded := fold_fixed(samples)) is not None:
        return _described(folded, weights, options, usual, positions)
    try:
        seen = _read(model, caches, interface, samples, weights)
    except UnknownError as error:
        if positions or interface.inputs[error.args[0]].shape != interface.inputs[interface.tokens].shape:
            raise
        # If queries see the keys up to their own where it holds positions, then it does.
        return _described(model, weights, options, usual, error.args)
    if not seen:
        raise SiteError(f"no attention reads {', '.join(repr(c.past.name) for c in caches) or 'a cache that grows'}")
    writes = {c.past: _write(tensors, c) for site in seen for c in (site.key, site.value)}
    emit, tokens = Emitter(graph), tensors[interface.tokens]
    sites = tuple(_site(emit, tensors, tokens, site, writes) for site in seen)
    return canonical_form(Exported(model, graph, interface, samples, tuple(writes.values()), sites, None, ()), options)


def _check_others(graph: gs.Graph, caches: Sequence[ExportedUpdate], states: Sequence[StateUpdate]) -> None:
    """Refuse a model that may give back an input otherwise than as a growing cache: a caller would have to know.

    Raises:
        SiteError: naming both.
    """
    known = {t.name for c in caches for t in (c.past, c.present)} | {n for s in states for n in (s.past, s.present)}
    inputs, outputs = ([t for t in tensors if t.name not in known] for tensors in (graph.inputs, graph.outputs))
    sources = inputs_behind(graph)
    for past, present in product(inputs, outputs):
        sizes: Sequence[Dim] = past.shape or ()
        after: Sequence[Dim] = present.shape or ()
        same = [one == two for one, two in zip(sizes, after, strict=False)]
        alike = elem_type(past) == elem_type(present) in FLOATS and 2 < len(sizes) == len(after) == sum(same) + 1
        by_token = alike and isinstance(sizes[1], str) and same[1]  # such as embeddings, and logits
        if alike and not by_token and past.name in sources[present.name]:
            raise SiteError(f"'{past.name}' may come back as '{present.name}', and is no growing cache")


def _read(
    model: onnx.ModelProto,
    caches: Sequence[ExportedUpdate],
    interface: Interface,
    samples: Samples,
    weights: Mapping[str, onnx.TensorProto],
) -> list[AttentionSeen]:
    """Every attention, in the order of the caches."""
    presents = {str(c.past.name): str(c.present.name) for c in caches}
    axes = {str(c.past.name): int(c.axis or 0) for c in caches}
    cutter = Cutter(model, samples, presents, interface.tokens, weights)
    known: dict[str, tuple[Region, AttentionSeen | FartherError]] = {}

    def read(past: str) -> AttentionSeen:
        """The attention over a cache; its region goes back until queries and new rows are one tensor each."""
        passed: set[str] = set()
        for _ in range(_MOST_STEPS):
            region = cutter.region(past, passed)
            if region.key not in known:
                try:
                    known[region.key] = region, Reader(region, samples.step, axes, samples.capacity).read()
                except FartherError as error:
                    known[region.key] = region, error
            first, seen = known[region.key]
            names = dict(zip(first.names, region.names, strict=True))
            if isinstance(seen, AttentionSeen):
                return seen.renamed(names)
            passed.add(max((names[n] for n in seen.args), key=region.texts.index))
        raise SiteError(f"queries and new rows of '{past}' are no single tensors")

    sites: dict[str, AttentionSeen] = {}
    for past in presents:
        if past not in sites:
            site = read(past)
            for cache in (site.key, site.value):
                if presents[cache.past] != cache.present:
                    raise SiteError(f"'{cache.past}' comes back as '{cache.present}'")
                sites[cache.past] = site
    return list(dict.fromkeys(sites.values()))


def _write(tensors: Mapping[str, gs.Tensor], cache: CacheSeen) -> Write:
    past, present = tensors[cache.past], tensors[cache.present]
    node = producer(present)
    assert node is not None
    if (len(past.shape), cache.axis) not in _PLACES:
        raise SiteError(
            f"the cache '{cache.past}' {list(past.shape)} has its rows on axis {cache.axis}; supported are "
            "[B, N, P, D], [B, P, N, D], [B, N, D, P] and [B, P, N * D]"
        )
    perm = None if cache.perm == tuple(range(len(cache.perm))) else cache.perm
    return Write(node.op, past, present, tensors[cache.rows], node.name, axis=cache.axis, growing=True, perm=perm)


def _site(
    emit: Emitter, tensors: Mapping[str, gs.Tensor], tokens: gs.Tensor, site: AttentionSeen, writes: Mapping[str, Write]
) -> AttentionSite:
    """The attention, with what brings queries and results into ``[B, H, S, D]`` and back."""
    query, result, sizes = tensors[site.query], tensors[site.result], site.sizes
    node = producer(result)
    assert node is not None
    query_type, result_type = elem_type(query) or 0, elem_type(result) or 0
    seen = Visibility(causal=site.causal, window=site.window)

    def turned(tensor: gs.Tensor, old: Layout, new: Layout, size: int) -> gs.Tensor:
        """The same numbers in another layout."""
        named: dict[str, Dim] = {"b": "batch", "n": sizes["n"], "g": sizes["g"], "s": "sequence", "d": size}
        both = set(order_of(old)).intersection(order_of(new))  # sizes of 1 are in neither
        before, after = ([n for n in order_of(layout) if n in both] for layout in (old, new))
        if before != after:
            shape = emit_sizes(emit, tokens, tuple(named[n] for n in before))
            tensor = emit.op("Reshape", [tensor, shape], "axes")
            tensor = emit.op("Transpose", [tensor], "turned", perm=[before.index(n) for n in after])
        shape = emit_sizes(emit, tokens, tuple(_size([named[n] for n in axis]) for axis in new))
        return emit.op("Reshape", [tensor, shape], "laid")

    if not _is_plain(site.query_layout):
        query = turned(query, site.query_layout, _PLAIN, sizes["d"])
    if not _is_plain(site.result_layout):
        heads = gs.Variable(emit.name("result_heads"), dtype=result.dtype)
        result.inputs.clear()
        last = turned(heads, _PLAIN, site.result_layout, sizes["v"])
        last.inputs[0].outputs = [result]
        result = heads
    return AttentionSite(
        node.name, result, query, writes[site.key.past], writes[site.value.past], site.scale, site.softcap, seen,
        sizes["n"] * sizes["g"], sizes["d"], sizes["v"], query_type, result_type, wide_weights=site.wide,
    )  # fmt: skip


def _is_plain(layout: Layout) -> bool:
    """True for ``[B, H, S, D]``."""
    order = order_of(layout)
    in_order = order == tuple(n for n in ATTENTION if n in order)
    return in_order and len(layout) == 4 and all(map(set.issuperset, map(set, _PLAIN), layout))


def _size(axis: Sequence[Dim]) -> Dim:
    """The size of an axis of these; "?" where it is more than one of batch and new tokens, or one of them and more."""
    if len(axis) == 1:
        return axis[0]
    return prod(d for d in axis if isinstance(d, int)) if all(isinstance(d, int) for d in axis) else "?"

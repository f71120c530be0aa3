"""Attention over growing caches, found by shapes and described by running it.

    cut       regions around attentions, by the shapes of tensors alone
    turned    caches that lie otherwise than by sequence
    read      a region run on chosen numbers: what it computes
    layout    the axes of tensors, as products of the sizes of an attention

`find_sites` is tried where `trt_kvcache.importer.normalize` finds no caches or no attention that it knows. It names no
operator but Shape, so that it does not matter how an exporter writes an attention. It guesses, too: the check decides.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import onnx
import onnx_graphsurgeon as gs

from trt_kvcache.errors import UnsupportedModelError
from trt_kvcache.importer.check.graph import Graph
from trt_kvcache.importer.extensions import Finish, load
from trt_kvcache.importer.graph import FLOATS, Emitter, elem_type, export_inferred, inputs_behind, producer
from trt_kvcache.importer.interface.exported import Interface
from trt_kvcache.importer.normalize import Exported, canonical_form, read_graph
from trt_kvcache.importer.normalize.candidate import ExportedUpdate
from trt_kvcache.importer.normalize.canonical import emit_sizes
from trt_kvcache.importer.normalize.evidence.fixed import fold_fixed
from trt_kvcache.importer.normalize.evidence.probe import Blueprint
from trt_kvcache.importer.normalize.evidence.samples import Samples
from trt_kvcache.importer.normalize.findings import Core, Findings, Visibility, Write
from trt_kvcache.importer.normalize.idioms.states import find_states
from trt_kvcache.importer.plan import Dim, PlanOptions, StateUpdate
from trt_kvcache.importer.sites.cut import Cutter, MisfitError, Region, SiteError
from trt_kvcache.importer.sites.layout import ATTENTION, Layout, order_of
from trt_kvcache.importer.sites.read import AttentionSeen, CacheSeen, FartherError, Reader, UnknownError
from trt_kvcache.importer.sites.turned import growing, ways

__all__ = ["find_sites"]

_MOST_STEPS = 12  # back from short tensors to those before them


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
            made, found = _described(way, weights, options, usual)
        except (SiteError, UnsupportedModelError) as error:
            runs = not isinstance(error, MisfitError)
            refusal = refusal or runs * str(error)
            if runs and any(stack.heads for stack in stacks):
                break  # with another number of heads the model does not run
            continue
        return made, found, (partial(load("stacked_caches").finish, stacks),) if stacks else ()
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
    model = export_inferred(graph)
    tensors = graph.tensors()
    caches = [
        ExportedUpdate(
            "attention", tensors[past.name], tensors[present.name], axis=axis, growing=True, positions=positions
        )
        for past, present, axis in growing(model.graph)
    ]
    states = find_states(graph, {t.name for c in caches for t in (c.past, c.present)})
    _check_others(graph, caches, states)
    interface = Interface(model, caches, options.config, states)
    samples = Samples(
        Blueprint(model, weights), interface, interface.fixed_capacity(options.capacity) or options.capacity or usual
    )
    if (folded := fold_fixed(samples)) is not None:
        return _described(folded, weights, options, usual, positions)
    try:
        seen = _read(model, caches, interface, samples, weights)
    except UnknownError as error:
        if positions or interface.inputs[error.name].shape != interface.inputs[interface.tokens].shape:
            raise
        # If queries see the keys up to their own where it holds positions, then it does.
        return _described(model, weights, options, usual, (error.name,))
    writes = {c.past: _write(graph, c) for site in seen for c in (site.key, site.value)}
    tokens = next(t for t in graph.inputs if t.name == interface.tokens)
    emit = Emitter(graph)
    cores = tuple(_core(graph, emit, tokens, site, writes) for site in seen)
    return canonical_form(Exported(model, graph, interface, samples, tuple(writes.values()), cores, None, ()), options)


def _check_others(graph: gs.Graph, caches: Sequence[ExportedUpdate], states: Sequence[StateUpdate]) -> None:
    """Refuse a model that may give back an input otherwise than as a growing cache: a caller would have to know.

    Raises:
        SiteError: naming both.
    """
    known = {t.name for c in caches for t in (c.past, c.present)} | {n for s in states for n in (s.past, s.present)}
    behind = inputs_behind(graph)
    others = [t for t in graph.inputs if t.name not in known and elem_type(t) in FLOATS and len(t.shape or ()) > 2]
    for present in (t for t in graph.outputs if t.name not in known):
        for past in (t for t in others if t.name in behind[present.name] and elem_type(t) == elem_type(present)):
            same = [one == two for one, two in zip(past.shape, present.shape or (), strict=False)]
            by_token = isinstance(past.shape[1], str) and len(same) > 1 and same[1]  # such as embeddings, and logits
            if len(past.shape) == len(present.shape or ()) == sum(same) + 1 and not by_token:
                raise SiteError(f"'{past.name}' may come back as '{present.name}', and is no growing cache")


def _read(
    model: onnx.ModelProto,
    caches: Sequence[ExportedUpdate],
    interface: Interface,
    samples: Samples,
    weights: Mapping[str, onnx.TensorProto],
) -> list[AttentionSeen]:
    """Every attention, in the order of the caches."""
    inputs = [t for t in interface.tensors if t.io == "input"]
    batch = next((t.shape[0] for t in inputs if t.name == interface.tokens and isinstance(t.shape[0], int)), None)
    presents = {str(c.past.name): str(c.present.name) for c in caches}
    axes = {str(c.past.name): int(c.axis or 0) for c in caches}
    cutter = Cutter(Graph(model), samples, presents, interface.tokens, weights)

    known: dict[str, tuple[Region, AttentionSeen | FartherError]] = {}
    found: list[AttentionSeen] = []
    read: set[str] = set()
    for past in presents:
        if past not in read:
            site = _site(
                cutter, past, known, lambda r: Reader(r, samples.step, cutter.shape, axes, batch or 0, samples.capacity)
            )
            for cache in (site.key, site.value):
                if presents[cache.past] != cache.present:
                    raise SiteError(f"'{cache.past}' comes back as '{cache.present}'")
            read |= {site.key.past, site.value.past}
            found.append(site)
    return found


def _site(
    cutter: Cutter,
    past: str,
    known: dict[str, tuple[Region, AttentionSeen | FartherError]],
    reader: Callable[[Region], Reader],
) -> AttentionSeen:
    """The attention over a cache; its region goes back until queries and new rows are one tensor each.

    Regions that compute the same are read once: `known` has them by key.
    """
    behind: set[str] = set()
    for _ in range(_MOST_STEPS):
        region = cutter.region(past, behind)
        key = region.key(cutter.describe)
        if key not in known:
            try:
                known[key] = region, reader(region).read()
            except FartherError as error:
                known[key] = region, error
        first, seen = known[key]
        names = dict(zip(first.names, region.names, strict=True))
        if isinstance(seen, AttentionSeen):
            return seen.renamed(names)
        behind.add(max((names[n] for n in seen.names), key=region.texts.index))
    raise SiteError(f"queries and new rows of '{past}' are no single tensors")


def _write(graph: gs.Graph, cache: CacheSeen) -> Write:
    tensors = graph.tensors()
    past, present = tensors[cache.past], tensors[cache.present]
    node = producer(present)
    assert node is not None
    perm = None if cache.perm == tuple(range(len(cache.perm))) else cache.perm
    order = tuple(n for n in ("b", "n", "d") if n in order_of(cache.layout))
    rank = len(past.shape)
    if order_of(cache.layout) != order or (rank, cache.axis) not in ((4, 2), (4, 1), (4, 3), (3, 1)):
        raise SiteError(
            f"the cache '{cache.past}' {list(past.shape)} lies in an order that is not supported: its rows are axis "
            f"{cache.axis}, and its other axes {cache.layout}"
        )
    return Write(
        node.op, past, present, tensors[cache.rows], node.name, axis=cache.axis, growing=True, perm=perm,
    )  # fmt: skip


def _core(graph: gs.Graph, emit: Emitter, tokens: gs.Tensor, site: AttentionSeen, writes: Mapping[str, Write]) -> Core:
    """The attention, with what brings queries and results into ``[B, H, S, D]`` and back."""
    tensors = graph.tensors()
    query, result = tensors[site.query], tensors[site.result]
    maker = producer(result)
    assert maker is not None
    heads = site.heads[0] * site.heads[1]
    shape: tuple[Dim, ...] = ("batch", heads, "sequence", site.head_size)
    query_type, result_type = elem_type(query) or 0, elem_type(result) or 0
    if not _is_plain(site.query_layout, ATTENTION):
        order = order_of(site.query_layout)
        named = _named(site, site.head_size)
        target = [n for n in ATTENTION if n in order]
        if list(order) != target:
            query = emit.op("Reshape", [query, emit_sizes(emit, tokens, tuple(named[n] for n in order))], "apart")
            query = emit.op("Transpose", [query], "turned", perm=[order.index(n) for n in target])
        query = emit.op("Reshape", [query, emit_sizes(emit, tokens, shape)], "query_heads", query_type)
    if not _is_plain(site.result_layout, ATTENTION):
        made = gs.Variable(emit.name("result_heads"), dtype=result.dtype)
        named = _named(site, site.value_size)
        order = order_of(site.result_layout)
        target = [n for n in ATTENTION if n in order]
        last: gs.Tensor = made
        if list(order) != target:
            last = emit.op("Reshape", [last, emit_sizes(emit, tokens, tuple(named[n] for n in target))], "apart")
            last = emit.op("Transpose", [last], "turned", perm=[target.index(n) for n in order])
        sizes = emit_sizes(emit, tokens, tuple(_size(axis, named) for axis in site.result_layout))
        result.inputs.clear()
        graph.nodes.append(gs.Node("Reshape", emit.name("result"), {}, [last, sizes], [result]))
        result = made
    seen = Visibility(causal=site.causal, window=site.window)
    return Core(
        maker.name, result, query, writes[site.key.past], writes[site.value.past], site.scale, site.softcap, seen,
        heads, site.head_size, site.value_size, query_type, result_type, wide_weights=site.wide,
    )  # fmt: skip


def _is_plain(layout: Layout, order: Sequence[str]) -> bool:
    """True for ``[B, H, S, D]``."""
    return (
        len(layout) == 4
        and order_of(layout) == tuple(n for n in order if n in order_of(layout))
        and all(set(axis) <= set(names) for axis, names in zip(layout, ("b", "ng", "s", "d"), strict=True))
    )


def _named(site: AttentionSeen, size: int) -> dict[str, Dim]:
    return {"b": "batch", "n": site.heads[0], "g": site.heads[1], "s": "sequence", "d": size}


def _size(axis: Sequence[str], named: Mapping[str, Dim]) -> Dim:
    """The size of an axis; "?" where it is more than one of batch and new tokens, or one of them and a number."""
    found = [named[n] for n in axis]
    if len(found) == 1:
        return found[0]
    made = 1
    for size in found:
        if isinstance(size, str):
            return "?"
        made *= size
    return made

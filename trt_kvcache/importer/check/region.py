"""Cuts regions, the parts that the rewrite changed, out of the graphs of both models.

A *join* is a tensor with the same name in both graphs, but computed differently. A region tests that both versions of
its join are equal. Regions that read the join assume this. A region goes back from its join to other joins, graph
inputs, and *boundaries*: tensors that depend on the tokens and are equal by construction, and that the check fills with
random numbers. A graph output that is not equal by construction ends a region. So regions cover every changed path.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import TypeGuard

import onnx
from onnx import TensorProto

from trt_kvcache.errors import UnsupportedModelError
from trt_kvcache.importer.cache_plan import CachePlan, OriginalTensor, Role
from trt_kvcache.importer.check.hashed_graph import Graph
from trt_kvcache.importer.check.models import ModelPair, check_interface
from trt_kvcache.importer.protos import FLOATS, copied, is_op, names_read, part_of, replace_field
from trt_kvcache.importer.steps.cache_contents import find_caches, fixed_rows
from trt_kvcache.importer.steps.probe import Kind, Kinds, Term
from trt_kvcache.importer.weights import storage

Cone = tuple[list[onnx.NodeProto], list[str], list[str]]
_WHOLE = (TensorProto.INT64, TensorProto.INT32)
_PRODUCTS = ("Attention", "Einsum", "MatMul")
_FEW = 4  # the most numbers of a constant from which lengths are computed


@dataclass(frozen=True)
class Boundary:
    """A tensor that both versions of a region read: equal in both models, and filled with random numbers in tests.

    Attributes:
        names: the tensor's names in the original and the rewritten graph; several if a graph computes it repeatedly.
        elem_type: the tensor's element type in the original.
        shape: the tensor's shape, in terms of B and S.
        in_span: True if the rewritten model has only the tensor's last positions, those with wanted logits.
    """

    names: tuple[tuple[str, ...], tuple[str, ...]]
    elem_type: int
    shape: tuple[Term, ...]
    in_span: bool


@dataclass(frozen=True)
class Region:
    """A changed part of the model. In both graphs, it computes the same outputs from the same inputs.

    Attributes:
        joins: shapes of the tensors to compare, by name. Both graphs have these names, and the region computes them.
        in_span: names in `joins` of which the rewritten graph computes only the last positions.
        presents: names of cache outputs that the region computes.
        models: the region of the original and of the rewritten graph. The outputs are `joins`, then `presents`.
        boundaries: inner tensors of the graphs that are inputs of both models.
        key: regions with the same key get the same verdict.
        integers: integer constants from which one of the models computes lengths.
        rows: number of rows of the original's caches of fixed length, by name of the past.
        layer: index of the attention that reads the region's caches; None without caches or with only one attention.
        is_end: True if the only join is a graph output that no other region reads.
        drawn: True if the weights are random numbers; then results that are all one number are no proof.
    """

    joins: Mapping[str, tuple[Term, ...]]
    in_span: frozenset[str]
    presents: tuple[str, ...]
    models: tuple[onnx.ModelProto, onnx.ModelProto]
    boundaries: tuple[Boundary, ...]
    key: str
    integers: tuple[int, ...]
    rows: Mapping[str, int]
    layer: int | None
    is_end: bool = False
    drawn: bool = False


def find_regions(pair: ModelPair) -> list[Region]:
    """Cut all regions (changed parts) out of both models; those that write caches come first."""
    original, rewritten = pair.sides
    plan = pair.plan
    present_of = {c.role.name: c.output for c in find_caches(plan) if c.output}
    presents = set(present_of.values())
    check_interface(pair, presents)
    leaves = [
        {name: name if name in pair.shared else f"{side}:{name}" for name in graph.inputs}
        for side, graph in enumerate(pair.sides)
    ]

    def digests(taken: Container[str]) -> list[tuple[dict[str, str], dict[str, str]]]:
        return [graph.digests(leaf, taken) for graph, leaf in zip(pair.sides, leaves, strict=True)]

    plain = [seen for seen, _ in digests(())]
    masks = {t.name for t in plan.tensors if t.role in (Role.MASK, Role.POSITIONS)}
    data = {n for n in pair.shared - masks if (kind := pair.kinds[0].get(n)) and kind.elem_type in FLOATS}
    data |= {t.name for t in plan.tensors if t.role is Role.TOKENS}
    over_rows = _over_rows(pair)
    candidates = {
        name
        for name in original.makes
        if name in rewritten.makes
        and name not in presents
        and name not in pair.refuted
        and plain[0].get(name) != plain[1].get(name)
        and name not in over_rows
        and _is_text(pair, name)
    }
    own = [computed for _, computed in digests(candidates)]
    ordered = [name for node in rewritten.nodes for name in node.output if name in candidates]
    claims = [name for name in ordered if own[0][name] != own[1][name]]
    candidates = set(claims)
    seen = [by_name for by_name, _ in digests(candidates)]
    differ = [name for name in rewritten.outputs if name not in presents and seen[0].get(name) != seen[1].get(name)]
    ends = _ends(pair, differ, seen[0], leaves[1], candidates)

    text = [graph.tainted(data | candidates, shapes=False) for graph in pair.sides]
    kinds = [{seen[s][n]: pair.kinds[s].get(n) for n in text[s] if n in seen[s]} for s in (0, 1)]
    equal = {d for d in kinds[0].keys() & kinds[1].keys() if _known(kinds[0][d]) or _known(kinds[1][d])}
    equal |= {f"join:{n}" for n in candidates}
    stops = [
        {n: seen[s][n] for n in text[s] if seen[s].get(n) in equal and n in graph.makes}
        for s, graph in enumerate(pair.sides)
    ]

    # A guard against NaN hides numbers that are not finite. So a region with a guard begins earlier, at products with
    # weights, and contains all tensors computed from positions. Then such numbers arise inside the region.
    products = [
        {n: d for n, d in stop.items() if n in tokens and (d.startswith("join:") or _reads_weight(graph, n))}
        for stop, graph in zip(stops, pair.sides, strict=True)
        for tokens in [graph.tainted(data, shapes=False)]
    ]
    left = list(dict.fromkeys(present_of.values()))
    regions = []
    for claim in claims:
        region = _region(pair, [claim], [], stops, stops)
        guarded = any(node.op_type in ("IsNaN", "IsInf") for node in region.models[0].graph.node)
        if guarded:  # the integers of the smaller region choose the steps
            region = replace(_region(pair, [claim], [], products, stops), integers=region.integers)
        shapes = unread(region.models, present_of)
        mine = [present_of[i] for i in _inputs(region.models[1]) if i not in shapes and present_of.get(i) in left]
        if mine:
            ends_of = products if guarded else stops
            region = replace(_region(pair, [claim], mine, ends_of, stops), integers=region.integers)
            left = [p for p in left if p not in mine]
        regions.append(region)
    regions += [_region(pair, [], [present], stops, stops) for present in left]
    regions += [replace(_region(pair, [end], [], stops, stops), is_end=True) for end in ends]
    return sorted(regions, key=lambda r: not r.presents)


def _over_rows(pair: ModelPair) -> set[str]:
    """Return tensors with an entry for every cache row. They are not compared: in unused rows, they may differ."""
    graph = pair.original
    softmax = [name for node in graph.nodes if node.op_type == "Softmax" for name in node.output]
    products = [node for node in graph.nodes if node.op_type in _PRODUCTS]
    ends = {name for node in products for name in node.output}
    weights = graph.tainted(softmax, through=ends, shapes=False)
    sums = {
        n for node in products if is_op(node, "Attention") or not weights.isdisjoint(node.input) for n in node.output
    }
    capacities = {Term(c.capacity, 0, 0) for c in pair.plan.caches}
    read = graph.tainted({c.past for c in pair.plan.caches}, through=sums, shapes=False)
    names = {n for n in read if (kind := pair.kinds[0].get(n)) and not capacities.isdisjoint(kind.shape or ())}
    return names - set(graph.outputs)


def _ends(
    pair: ModelPair, differ: list[str], original: Mapping[str, str], leaves: Mapping[str, str], candidates: set[str]
) -> list[str]:
    """Return the graph outputs that both models compute differently. A Slice to the last positions does not count."""
    span = pair.plan.logits_span
    if span is not None and span.output in differ:
        again, _ = _without_span(pair.rewritten, span.name).digests(leaves, candidates)
        if again.get(span.output) == original.get(span.output):
            differ.remove(span.output)
    for name in differ:
        kind, other = (kinds.get(name) for kinds in pair.kinds)
        if kind is None or kind.shape is None or kind != other:
            raise UnsupportedModelError(
                f"the rewritten model computes the output '{name}' differently from the original, and the check cannot "
                "cut out a part around it to compare"
            )
    return differ


def _without_span(graph: Graph, span: str) -> Graph:
    below = graph.tainted([span])
    model = copied(graph.model)
    slices = [n for n in graph.nodes if n.op_type == "Slice" and not below.isdisjoint(n.input[1:])]
    names = {n.output[0]: n.input[0] for n in slices if n.input[0] not in below}
    for node in model.graph.node:
        for i, name in enumerate(node.input):
            if name in names and node.output[0] not in names:
                node.input[i] = names[name]
    return Graph(model)


def _region(
    pair: ModelPair,
    joins: list[str],
    presents: list[str],
    stops: Sequence[Mapping[str, str]],
    equal: Sequence[Mapping[str, str]],
) -> Region:
    """Return the region (changed part of the model) that computes the tensors `joins` and `presents`.

    Its inputs are tensors in `stops`, and tensors in `equal` of which it reads only the shape: else most regions would
    contain the embedding table, because exporters take batch and length from the embedded tokens.
    """
    outputs = [*joins, *presents]
    stops = copies = [dict(stop) for stop in stops]
    for copy, name in product(copies, outputs):
        copy.pop(name, None)
    passed: tuple[set[str], set[str]] = (set(outputs), set(outputs))
    while True:
        cones = [graph.cone(outputs, stop) for graph, stop in zip(pair.sides, stops, strict=True)]
        shapes = [
            {n for n in _measured(graph, cone[0]) - gone if n in same and _known(kinds.get(n))}
            for graph, cone, gone, same, kinds in zip(pair.sides, cones, passed, equal, pair.kinds, strict=True)
        ]
        if any(own - stop.keys() for own, stop in zip(shapes, stops, strict=True)):
            stops = [
                {**stop, **{n: same[n] for n in own}} for stop, own, same in zip(stops, shapes, equal, strict=True)
            ]
            continue
        fed = [_by_digest(cone[1], stop) for cone, stop in zip(cones, stops, strict=True)]
        one_sided = [
            {n for d in own.keys() - other.keys() for n in own[d]} - measured
            for own, other, measured in zip(fed, reversed(fed), shapes, strict=True)
        ]
        if not any(one_sided):
            break
        # An input of only one side is no shared input, unless that side reads only its shape. If the other side
        # computes the tensor (such as the sum that a fused norm returns), this side must compute it, too. Else both
        # sides must begin earlier.
        inside = [
            {same[o] for node in cone[0] for o in node.output if o in same and o not in outputs}
            for cone, same in zip(cones, equal, strict=True)
        ]
        within = [
            {n for n in own if stop[n] in other}
            for own, stop, other in zip(one_sided, stops, reversed(inside), strict=True)
        ]
        alone = {stop[n] for own, stop in zip(one_sided, stops, strict=True) for n in own}
        dropped = within if any(within) else [{n for n, d in stop.items() if d in alone} for stop in stops]
        for gone, own in zip(passed, dropped, strict=True):
            gone |= own
        stops = [{n: d for n, d in stop.items() if n not in own} for stop, own in zip(stops, dropped, strict=True)]
    boundaries = []
    last = pair.last_positions
    for digest in sorted(fed[0].keys() | fed[1].keys()):
        names = (fed[0].get(digest, ()), fed[1].get(digest, ()))
        kinds = (pair.kinds[side].get(name) for side in (0, 1) for name in names[side])
        kind = next(k for k in kinds if _known(k))
        boundaries.append(Boundary(names, kind.elem_type, kind.shape or (), not last.isdisjoint(names[1])))
    models = [
        _model(graph, cone, outputs, {n: b for b in boundaries for n in b.names[s]})
        for s, (graph, cone) in enumerate(zip(pair.sides, cones, strict=True))
    ]
    read, also_read = (
        {_data(graph, n) for n in cone[2] if _is_weight(graph.constants[n])}
        for graph, cone in zip(pair.sides, cones, strict=True)
    )
    weights = read & also_read  # a verdict does not depend on the values of weights that both models read
    numbers: dict[str, str] = {}
    key = repr(
        [
            _key(graph, cone[0], outputs, {n: d for d, names in f.items() for n in names}, weights, numbers, pair)
            for graph, cone, f in zip(pair.sides, cones, fed, strict=True)
        ]
    )
    parts = zip(pair.sides, pair.kinds, cones, strict=True)
    rows = {c.capacity for c in pair.plan.caches}
    integers = sorted({v for graph, kinds, cone in parts for v in _integers(graph, kinds, cone, rows)})
    return Region(
        {name: _shape(pair, name) for name in joins},
        frozenset(n for n in joins if n in last),
        tuple(presents),
        (models[0], models[1]),
        tuple(boundaries),
        key,
        tuple(integers),
        fixed_rows(pair.plan, pair.original.inputs.values()),
        _layer(pair.plan, _inputs(models[1])),
    )


def _layer(plan: CachePlan, inputs: Iterable[str]) -> int | None:
    readers = (i for i, a in enumerate(plan.attention) if not set(a.caches).isdisjoint(inputs))
    return next(readers, None) if len(plan.attention) > 1 else None


def products_of(model: onnx.ModelProto, caches: Iterable[str]) -> list[str]:
    """Return the names of keys and values in a model: operands of attentions and of MatMuls that read `caches`."""
    graph = Graph(model)
    weights = {name for node in graph.nodes if node.op_type == "Softmax" for name in node.output}
    of_caches = graph.tainted(caches, through=weights, shapes=False)
    products = [n for n in graph.nodes if is_op(n, "Attention") or is_op(n, "MatMul")]
    return sorted({n for node in products for n in node.input[:3] if n in of_caches and n in graph.makes})


def unread(models: Iterable[onnx.ModelProto], caches: Iterable[str]) -> set[str]:
    """Return the caches that no model returns, and of which the models read nothing but the shape."""
    both = list(models)
    nodes = (node for model in both for node in model.graph.node if node.op_type not in ("Shape", "Size"))
    outputs = ({value.name for value in model.graph.output} for model in both)
    return set(caches).difference(*(names_read(node) for node in nodes), *outputs)


def with_outputs(model: onnx.ModelProto, names: Iterable[str]) -> onnx.ModelProto:
    """Return a copy of the model whose only outputs are these tensors."""
    copy = copied(model)
    replace_field(copy.graph.output, (onnx.ValueInfoProto(name=name) for name in names))
    return copy


def _measured(graph: Graph, nodes: Sequence[onnx.NodeProto]) -> set[str]:
    read: set[str] = set()
    measured: set[str] = set()
    for node in nodes:
        (measured if node.op_type in ("Shape", "Size") else read).update(graph.reads[id(node)])
    return measured - read


def _by_digest(names: Iterable[str], digests: Mapping[str, str]) -> dict[str, tuple[str, ...]]:
    by_digest: dict[str, tuple[str, ...]] = {}
    for name in names:
        if name in digests:
            by_digest[digests[name]] = (*by_digest.get(digests[name], ()), name)
    return by_digest


def _model(graph: Graph, cone: Cone, outputs: Sequence[str], boundaries: Mapping[str, Boundary]) -> onnx.ModelProto:
    nodes, fed, used = cone
    inputs = []
    for name in fed:
        value = graph.inputs.get(name)
        if value is not None:
            tensor = value.type.tensor_type
            elem_type, rank = tensor.elem_type, len(tensor.shape.dim) if tensor.HasField("shape") else None
        else:
            elem_type, rank = boundaries[name].elem_type, len(boundaries[name].shape)
        inputs.append(onnx.helper.make_tensor_value_info(name, elem_type, None if rank is None else [None] * rank))
    constants = [_named(graph.constants[n], n) for n in used]
    return part_of(graph.model, [_without_outputs(node, set(fed)) for node in nodes], inputs, outputs, constants)


def _without_outputs(node: onnx.NodeProto, fed: set[str]) -> onnx.NodeProto:
    if fed.isdisjoint(node.output):
        return node
    copy = copied(node)
    copy.output[:] = [f"{name}:unused" if name in fed else name for name in node.output]
    return copy


def _named(tensor: TensorProto, name: str) -> TensorProto:
    if tensor.name == name:
        return tensor
    copy = copied(tensor)
    copy.name = name
    return copy


def _key(
    graph: Graph,
    nodes: Sequence[onnx.NodeProto],
    outputs: Iterable[str],
    boundaries: Mapping[str, str],
    weights: set[str],
    numbers: dict[str, str],
    pair: ModelPair,
) -> list[str]:
    """Return a digest of how each output is computed. Inputs and weights are numbered, so equal layers agree."""
    caches = {c.past: c for c in pair.plan.caches}
    exported = {t.name: t for t in pair.plan.original}
    kinds: dict[str, str] = {}
    named: dict[str, str] = {}
    for name in (n for node in nodes for n in (*node.input, *graph.reads[id(node)])):
        if name in boundaries:
            kind = pair.kinds[0].get(name) or pair.kinds[1].get(name)
            kinds[name], named[name] = f"boundary {kind}", boundaries[name]
        elif name in caches:
            c = caches[name]
            facts = (c.dtype, c.logical_shape, c.physical_shape, c.layout, c.mode, c.sequence_axis, c.capacity)
            kinds[name], named[name] = f"cache {facts} {_facts(exported.get(name))}", name
        elif name in graph.constants and (data := _data(graph, name)) in weights:
            tensor = graph.constants[name]
            kinds[name], named[name] = f"weight {tensor.data_type} {list(tensor.dims)}", data
        elif name in graph.inputs:
            kinds[name] = f"input {name}"
    for node in nodes:  # caches of the same kind have the same shape; exporters read it from any of them
        if is_op(node, "Shape") and node.input[0] in caches:
            kinds[node.output[0]] = f"shape {graph.attributes(node)} of {kinds[node.input[0]]}"
    # The number of a tensor depends on what the outputs compute from it, not on names or the order of nodes.
    seen, _ = graph.digests(kinds, nodes=nodes)
    for name in _leaves(graph, nodes, outputs, kinds, seen):
        if name in named:
            numbers.setdefault(named[name], str(len(numbers)))
    numbered = {name: f"{kind} {numbers.get(named.get(name, ''), '')}" for name, kind in kinds.items()}
    seen, _ = graph.digests(numbered, nodes=nodes)
    return [f"{seen.get(name, name)} {_facts(exported.get(name))}" for name in outputs]


def _facts(tensor: OriginalTensor | None) -> str:
    """Return the properties of an input or output that the check compares: all except its name and symbols."""
    if tensor is None:
        return ""
    sizes = tuple(size if isinstance(size, int) else "?" for size in tensor.shape)
    return repr(replace(tensor, name="", shape=sizes))


def _leaves(
    graph: Graph,
    nodes: Sequence[onnx.NodeProto],
    outputs: Iterable[str],
    leaves: Container[str],
    seen: Mapping[str, str],
) -> Iterator[str]:
    makes = {name: node for node in nodes for name in node.output}
    todo = [*outputs][::-1]
    done = set()
    while todo:
        name = todo.pop()
        if name in done:
            continue
        done.add(name)
        if name in leaves:
            yield name
        elif name in makes:
            todo += graph.operands(makes[name], seen)[::-1]


def _data(graph: Graph, name: str) -> str:
    """Return a text that identifies the contents of a constant. It does not depend on type and shape."""
    return storage(graph.constants[name]) or graph.constant_digest(name)


def _is_weight(tensor: TensorProto) -> bool:
    is_whole = tensor.data_type in (*_WHOLE, TensorProto.BOOL) and storage(tensor) is None
    return not is_whole and math.prod(tensor.dims) > _FEW


def _reads_weight(graph: Graph, name: str) -> bool:
    return any(n in graph.constants and _is_weight(graph.constants[n]) for n in graph.makes[name].input)


def _integers(graph: Graph, kinds: Kinds, cone: Cone, rows: Collection[int]) -> Iterable[int]:
    """Yield integers in constants of a region that may limit lengths, such as a window; not sizes of heads."""
    divides: dict[str, bool] = {}
    for node in cone[0]:
        features = _divides_features(node, kinds, rows)
        for at, name in enumerate(node.input):
            divides[name] = divides.get(name, True) and features and at == 1
    for name in cone[2]:
        if divides.get(name):
            continue
        tensor = graph.constants[name]
        if (
            tensor.data_type in _WHOLE
            and 0 < math.prod(tensor.dims) <= _FEW
            and tensor.data_location != TensorProto.EXTERNAL
        ):
            yield from (abs(int(v)) for v in onnx.numpy_helper.to_array(tensor).ravel())


def _divides_features(node: onnx.NodeProto, kinds: Kinds, rows: Collection[int]) -> bool:
    """True for a Reshape or Split that keeps the axes of batch and tokens, and has no axis as long as a cache."""
    if node.op_type not in ("Reshape", "Split") or len(node.input) < 2:
        return False
    shapes = [kind.shape for name in (node.input[0], node.output[0]) if (kind := kinds.get(name)) and kind.shape]
    if len(shapes) < 2 or any(term.factor in rows for shape in shapes for term in shape):
        return False
    before, after = ([t for t in shape if t.batch or t.sequence] for shape in shapes)
    return before == after and all(t.factor == 1 for t in before)


def _is_text(pair: ModelPair, name: str) -> bool:
    """True if a tensor has the same float type in both models, and the same shape in terms of B and S."""
    kinds = [kinds.get(name) for kinds in pair.kinds]
    known = [k for k in kinds if _known(k)]
    return bool(known) and all(k == known[0] for k in known)


def _known(kind: Kind | None) -> TypeGuard[Kind]:
    return kind is not None and kind.shape is not None and kind.elem_type in FLOATS


def _shape(pair: ModelPair, name: str) -> tuple[Term, ...]:
    return next(k.shape for kinds in pair.kinds if (k := kinds.get(name)) and k.shape is not None)


def _inputs(model: onnx.ModelProto) -> list[str]:
    return [value.name for value in model.graph.input]

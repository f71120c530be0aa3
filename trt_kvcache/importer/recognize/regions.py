"""Cuts the region of each attention out of a graph: the nodes from queries, new rows and caches to the result.

The cuts depend on what each tensor is computed from, not on operators. This module uses these words for tensors:

    short     its shape depends only on the batch and the number of new tokens
    text      depends on the tokens, and on caches only through the results of earlier attentions
    long      depends on a cache, and is not short
    front     the result of an attention, or a part of the result: a short tensor that is computed from long ones.
              Between it and the next product with a weight, no tensor is long

A region starts at caches and at text tensors (queries and new rows). Fronts that read the same cache and do not depend
on each other are parts of one attention, such as single heads. Its result is the first short tensor that depends on all
parts.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Collection, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import onnx
from onnx import TensorProto, numpy_helper

from trt_kvcache.importer.check.hashed_graph import Graph
from trt_kvcache.importer.protos import FLOATS, copied, part_of
from trt_kvcache.importer.recognize.records import Cache, RecognizeError
from trt_kvcache.importer.recognize.sample_steps import Samples
from trt_kvcache.importer.steps.probe import POINTS, terms
from trt_kvcache.importer.steps.runnable import runnable
from trt_kvcache.importer.weights import held

_PASTS = (6, 8)  # past tokens of two steps; no sum with them equals a product of batch and new tokens
_MOST = 1 << 22  # the most numbers that a region's constants may have


@dataclass(frozen=True, eq=False)
class Region:
    """The part of a model that computes an attention's result, or writes caches, from new rows and caches.

    Attributes:
        model: the part as a model, without shapes. Its outputs are `result` (if not empty) and `presents`.
        key: equal for regions that compute the same.
        result: name of the attention's result; empty if the region only writes caches.
        presents: names of the cache outputs, in the order of `caches`.
        texts: names of inputs that depend on tokens only (queries, new rows), in the order of the graph.
        caches: names of the cache inputs.
        inputs: names of other graph inputs whose values, not only shapes, the region reads.
        integers: constants that may be a limit, such as a window. Sample steps have lengths below and above each limit.
        wide: names of caches that are not float32, and that the region casts to float32 before it multiplies.
        wide_weights: True if any tensor with an axis of cache rows is float32 or double.
        computed: names of keys and values that are computed from caches and are inputs of the region.
    """

    model: onnx.ModelProto
    key: str
    inputs: tuple[str, ...]
    integers: tuple[int, ...]
    wide_weights: bool
    result: str = ""
    presents: tuple[str, ...] = ()
    texts: tuple[str, ...] = ()
    caches: tuple[str, ...] = ()
    wide: tuple[str, ...] = ()
    computed: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all inputs and outputs of the region, in an order that is the same for regions with equal keys."""
        return (self.result, *self.presents, *self.texts, *self.caches, *self.computed)


class Cutter:
    """Cuts regions out of a model without functions: parts that compute one attention or write one cache.

    `caches` maps the name of each cache input to the guessed cache. `weights` has the data of placeholders, by name.

    Attributes:
        fronts: names of the results of all attentions, in the order of the graph.
    """

    def __init__(
        self, samples: Samples, caches: Mapping[str, Cache], weights: Mapping[str, TensorProto], folder: Path | None
    ) -> None:
        self._graph = Graph(samples.blueprint.model)
        self._weights, self._folder = weights, folder
        self._presents = {past: str(c.present.name) for past, c in caches.items()}
        points = zip(POINTS, _PASTS, strict=True)
        self._steps = [samples.step(p["batch"], past, p["sequence"]) for p, past in points]
        self._rows = {rows for c in caches.values() for rows in self._lengths(c)}
        self._last = {n: place for place, node in enumerate(self._graph.nodes) for n in self._reads(node)}
        self._last |= dict.fromkeys(set(self._graph.outputs) - set(self._presents.values()), len(self._graph.nodes))
        self._results: dict[str, set[str]] = {}
        self._known: dict[str, tuple[int | None, list[tuple[int, ...] | None]]] = {}
        self._order = {name: place for place, node in enumerate(self._graph.nodes) for name in node.output}
        sizes = (n.output[0] for n in self._graph.nodes if n.op_type in ("Shape", "Size"))
        self._sizes = {n for n in sizes if all(step.probe.value(n) is not None for step in self._steps)}
        self._split(samples.interface.tokens)

    def _lengths(self, cache: Cache) -> Iterator[int]:
        shape, step = self._steps[0].probe.shape(cache.past.name), self._steps[0]
        if shape is not None and (cache.shifted or not cache.growing):
            yield from (shape[cache.axis], shape[cache.axis] + 1)  # a sink adds one column to the scores
        elif cache.window_rows is not None and cache.window_rows <= _PASTS[0]:
            yield from (cache.window_rows, cache.window_rows + step.length)

    def _split(self, tokens: str) -> None:
        """Find which tensors depend on new tokens and which on cache rows. This shows the results of attentions."""
        readers: dict[str, list[onnx.NodeProto]] = {}
        for node in self._graph.nodes:
            for name in self._reads(node):
                readers.setdefault(name, []).append(node)
        self._fixed = set(self._graph.constants)  # constants, and tensors computed from constants
        for node in self._graph.nodes:
            if self._fixed.issuperset(self._graph.reads[id(node)]):
                self._fixed.update(node.output)
        self._text, presents = {tokens}, set(self._presents.values())
        reached = {past: frozenset([past]) for past in self._presents}  # long tensors, and the caches that reach them
        after: dict[str, int] = {}  # for each tensor, one bit for each front that it depends on
        fronts: dict[str, frozenset[str]] = {}
        for node in self._graph.nodes:
            read = self._reads(node)
            caches = frozenset[str]().union(*(reached[n] for n in read if n in reached))
            before = functools.reduce(operator.or_, (after[n] for n in read if n in after), 0)
            is_text = not self._text.isdisjoint(read)
            for name in filter(None, node.output):
                if caches:
                    short = name not in presents and self._is_short(name)
                    if not short or self._is_inner(name, readers):
                        reached[name] = caches
                        after[name] = before
                        continue
                    after[name] = before | 1 << len(fronts)
                    fronts[name] = caches
                elif is_text:
                    after[name] = before
                self._text |= {name} if caches or is_text else set()
        self._long = reached.keys()
        bits = {name: 1 << i for i, name in enumerate(fronts)}
        self._results = {}
        for name in fronts:
            beside = (f for f in fronts if not after[f] & bits[name] and not after[name] & bits[f])
            parts = [f for f in beside if fronts[f] & fronts[name]]
            result, between = self._joined([*parts, name]) if parts else (name, set[str]())
            if guard := self._guard(result, readers.get(result, ())):
                result, between = guard, between | {result}
            self._results[result] = self._results.get(result, set()) | between
        self.fronts = tuple(self._results)
        self._ends = set(self.fronts)

    def _guard(self, name: str, readers: Sequence[onnx.NodeProto]) -> str:
        """Return the output of a node, such as Where, that replaces results of queries without visible keys; or ""."""
        if len(readers) != 1 or len(readers[0].output) != 1:
            return ""
        (guard,) = readers[0].output
        others = {*self._reads(readers[0])} - {name}
        by_length = others - self._fixed - self._text - self._sizes - self._graph.inputs.keys()
        is_alike = self._described(guard) == self._described(name)
        return (
            guard if by_length and self._long.isdisjoint(others) and self._text.isdisjoint(others) and is_alike else ""
        )

    def _joined(self, parts: list[str]) -> tuple[str, set[str]]:
        """Return the first tensor that depends on all `parts` (such as results of single heads), and those between."""
        live, between = set(parts), set(parts)
        for place in range(min(self._order[n] for n in parts), len(self._graph.nodes)):
            node = self._graph.nodes[place]
            if live.isdisjoint(self._reads(node)):
                continue
            live = {n for n in (*live, *node.output) if self._last.get(n, -1) > place}
            if len(live) == 1 and place >= max(self._order[n] for n in parts):
                (result,) = live
                return result, between
            between |= live
        raise RecognizeError(
            f"'{parts[0]}' and other tensors are computed from the same cache, but not combined into one attention"
        )

    def _is_inner(self, name: str, readers: Mapping[str, list[onnx.NodeProto]]) -> bool:
        """True if `name` is inside an attention: tensors over cache rows are computed from it, as from a sum."""
        todo, seen = [name], {name}
        while todo:
            for node in readers.get(todo.pop(), ()):
                if any(n and None not in self._described(n)[1] and not self._is_short(n) for n in node.output):
                    return True
                if any(self._is_weight(n) for n in self._reads(node)):
                    continue
                todo += [n for n in node.output if n and n not in seen]
                seen.update(node.output)
        return False

    def _is_weight(self, name: str) -> bool:
        return name in self._fixed and sum(d > 1 for d in self._steps[0].probe.shape(name) or ()) > 1

    def front(self, name: str, passed: Collection[str] = ()) -> Region:
        """Cut out the part that computes the attention result `name`. Tensors `passed` may not be its inputs."""
        return self._region(name, {*passed, *self._results[name]})

    def update(self, past: str, passed: Collection[str] = ()) -> Region:
        """Cut out the part that writes the cache with the input `past`. Tensors `passed` may not be its inputs."""
        return self._region("", passed, (past,))

    def _region(self, result: str, passed: Collection[str], caches: Iterable[str] = ()) -> Region:
        graph, taken, pasts = self._graph, {result, *passed}, {*caches}
        while True:
            stops = _Stops(self, taken)
            presents = [self._presents[c] for c in sorted(pasts)]
            nodes, fed, used = graph.cone([n for n in (result, *presents) if n], stops)
            read = {n for node in nodes for n in self._reads(node)}.intersection(fed)
            more, texts = read & self._presents.keys(), {n for n in read - self._sizes if n in stops}
            below = self._below(texts)
            if more <= pasts and not below:
                break
            pasts |= more
            taken |= below
        ends = (*sorted(texts, key=self._order.__getitem__), *sorted(pasts))
        wide = tuple(past for past in pasts if not self._is_wide(past) and self._widened(nodes, past))
        region = self._made(nodes, fed, used, [n for n in (result, *presents) if n], ends)
        texts_read, caches_read = ends[: len(texts)], ends[len(texts) :]
        return replace(region, result=result, presents=tuple(presents), texts=texts_read, caches=caches_read, wide=wide)

    def computed(self, region: Region, query: str) -> Region:
        """Return the part of `region` whose inputs are `query`, and keys and values that are computed from caches."""
        nodes, _, _ = self._graph.cone([region.result], {*region.texts, *self._sizes})
        queried, cached, ends = {query}, {*region.caches, *region.texts} - {query}, dict[str, None]()
        for node in nodes:
            read = self._reads(node)
            if not queried.isdisjoint(read):
                queried.update(filter(None, node.output))
                ends |= dict.fromkeys(n for n in read if n in cached)
            elif not cached.isdisjoint(read):
                cached.update(filter(None, node.output))
        nodes, fed, used = self._graph.cone([region.result], {*ends, query, *self._sizes})
        part = self._made(nodes, fed, used, [region.result], (query, *ends))
        return replace(part, result=region.result, texts=(query,), computed=tuple(ends))

    def _made(
        self,
        nodes: Sequence[onnx.NodeProto],
        fed: Sequence[str],
        used: Sequence[str],
        outputs: Sequence[str],
        ends: tuple[str, ...],
    ) -> Region:
        graph = self._graph
        digests, _ = graph.digests({n: self._leaf(n, ends) for n in fed}, nodes=nodes)
        constants = [self._constant(name) for name in used]
        if sum(math.prod(t.dims) for t in constants) > _MOST:
            raise RecognizeError(
                f"the part of the model that computes '{outputs[0]}' from queries and caches reads large "
                "weights, so it is not an attention"
            )
        inputs = [onnx.helper.make_tensor_value_info(n, self._described(n)[0] or 0, None) for n in fed]
        return Region(
            model=runnable(part_of(graph.model, nodes, inputs, outputs, constants)),
            key=repr([digests[n] for n in outputs]),
            inputs=tuple(sorted(graph.inputs.keys() & {n for node in nodes for n in self._reads(node)} - {*ends})),
            integers=tuple(sorted(_sizes(constants))),
            wide_weights=any(self._is_wide(n) for node in nodes for n in node.output if n in self._long),
        )

    def _leaf(self, name: str, ends: tuple[str, ...]) -> str:
        """Describe an input for `Region.key`: by its values if it is a size, its index in `ends`, or else its name."""
        if name in self._sizes:
            return repr([step.probe.value(name) for step in self._steps])
        return f"{ends.index(name) if name in ends else name} {self._described(name)}"

    def _below(self, texts: Collection[str]) -> set[str]:
        """Return the tensors in `texts` that are computed from others in `texts` without an attention in between."""
        if not texts:
            return set()
        first, last = (f(self._order[n] for n in texts) for f in (min, max))
        reached, below = set(texts), set[str]()
        for node in self._graph.nodes[first : last + 1]:
            if not reached.isdisjoint(self._reads(node)):
                below.update(n for n in node.output if n in texts)
                reached.update(n for n in node.output if n and n not in self._ends)
        return below

    def _widened(self, nodes: Sequence[onnx.NodeProto], past: str) -> bool:
        alone = {past, self._presents[past]}
        for node in nodes:
            read = self._reads(node)
            if not alone.isdisjoint(read) and all(n in alone or n not in self._text | self._long for n in read):
                alone.update(n for n in node.output if n)
        kinds = {self._described(n)[0] for n in alone}
        return len(kinds.intersection(FLOATS)) > 1

    def _is_wide(self, name: str) -> bool:
        return self._described(name)[0] in (TensorProto.FLOAT, TensorProto.DOUBLE)

    def _reads(self, node: onnx.NodeProto) -> Collection[str]:
        return () if node.op_type in ("Shape", "Size") else self._graph.reads[id(node)]

    def _described(self, name: str) -> tuple[int | None, list[tuple[int, ...] | None]]:
        if name not in self._known:
            shapes = [step.probe.shape(name) for step in self._steps]
            self._known[name] = self._steps[0].probe.elem_type(name), shapes
        return self._known[name]

    def ends_at(self, name: str) -> bool:
        """True if a part with an attention may begin at this tensor: a size, or floats computed from tokens."""
        if name in self._sizes or name not in self._text or name not in self._graph.makes:
            return name in self._sizes
        kind, shapes = self._described(name)
        return kind in FLOATS and None not in shapes

    def _is_short(self, name: str) -> bool:
        """True if a tensor's shape depends only on batch and new tokens, so that no axis is as long as a cache."""
        kind, shapes = self._described(name)
        if kind == TensorProto.BOOL or terms(*shapes) is None:
            return False
        whole = shapes[0] or ()
        step = self._steps[0]
        by_token = len(whole) in (2, 3) and math.prod(whole[:-1]) == step.batch * step.length
        return self._rows.isdisjoint(whole) or by_token

    def _constant(self, name: str) -> TensorProto:
        tensor = self._graph.constants[name]
        if tensor.data_location == TensorProto.EXTERNAL:
            tensor = self._weights.get(name, tensor)
        constant: TensorProto = copied(tensor)
        if tensor.data_location == TensorProto.EXTERNAL:
            if self._folder is None or math.prod(tensor.dims) > _MOST:
                raise RecognizeError(f"an attention reads the weight '{name}', which is large or not available")
            constant = copied(held(tensor, self._folder))
        constant.name = name
        return constant


class _Stops:
    """The tensors that may be inputs of a region, except those in `taken`, which the region computes itself."""

    def __init__(self, cutter: Cutter, taken: Container[str]) -> None:
        self._cutter, self._taken = cutter, taken

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and name not in self._taken and self._cutter.ends_at(name)


def _sizes(constants: Iterable[TensorProto]) -> set[int]:
    """Return integers that may be lengths, such as a window: sizes of constants, and numbers in small constants."""
    sizes: set[int] = set()
    for tensor in constants:
        sizes.update(tensor.dims)
        if math.prod(tensor.dims) <= 4 and tensor.data_type in (*FLOATS, TensorProto.INT64, TensorProto.INT32):
            values = numpy_helper.to_array(tensor).astype(float).ravel()
            sizes.update(math.ceil(abs(v)) for v in values if abs(v) < 1 << 30)
    return sizes

"""Cut attention regions out of a graph by shapes alone; no operator is named but Shape and Size.

A tensor is *short* if its shape depends on batch and new tokens alone, and *long* otherwise. All that a cache of keys
reaches flows, in the end, through one short tensor: the result of its attention. The region goes back from there to
short tensors of the text that no cache of the region reaches: queries and new rows.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

import onnx
from onnx import TensorProto

from trt_kvcache.importer.check.graph import Graph
from trt_kvcache.importer.check.shapes import Kind, Term
from trt_kvcache.importer.normalize.evidence.samples import Samples
from trt_kvcache.importer.protos import FLOATS, copied, part_of

_POINTS = ((3, 6, 5), (5, 9, 7))  # batch, past and new tokens: few, and none a product of others or next to one
_MOST = 1 << 20  # numbers in the constants of a region


class SiteError(Exception):
    """No attention that can be described; the text says what was seen."""


class MisfitError(SiteError):
    """Nothing runs: sizes do not fit each other, or there is no attention at all."""


@dataclass(frozen=True, eq=False)
class Region:
    """The part of a model between queries, new rows and caches at one end, and the result and presents at the other.

    Attributes:
        model: without shapes; the outputs are `result` and `presents`.
        texts: short tensors of the text that it is fed with, in the order of the graph.
        measured: short tensors and graph inputs of which it reads the shape alone.
        inputs: graph inputs that it is fed with.
        caches: those of them that are caches.
        integers: sizes in its constants, at which lengths may change what it does.
        wide: some long tensor is float32.
    """

    model: onnx.ModelProto
    result: str
    presents: tuple[str, ...]
    texts: tuple[str, ...]
    measured: tuple[str, ...]
    inputs: tuple[str, ...]
    caches: tuple[str, ...]
    integers: tuple[int, ...]
    wide: bool

    @property
    def names(self) -> tuple[str, ...]:
        """The tensors at its ends, in an order that regions of one key share."""
        return (self.result, *self.presents, *self.texts, *self.caches)

    def key(self, describe: Callable[[str], object]) -> str:
        """Equal for regions that compute the same; `describe` says what it is fed with, but for its name."""
        graph = self.model.graph
        numbers: dict[str, object] = {"": ""}
        own = set(self.names)
        for value in graph.input:
            numbers[value.name] = (describe(value.name), value.name not in own and value.name)
        for tensor in graph.initializer:
            numbers[tensor.name] = (tensor.data_type, *tensor.dims, onnx.numpy_helper.to_array(tensor).tobytes())
        said = []
        for node in graph.node:
            attributes = sorted(a.SerializeToString(deterministic=True) for a in node.attribute)
            places = [self.names.index(n) if n in own else "" for n in (*node.input, *node.output)]
            said.append((node.op_type, node.domain, attributes, [numbers.get(n, n) for n in node.input], places))
            numbers |= {name: (len(said), i) for i, name in enumerate(node.output) if name}
        return hashlib.sha256(repr(said).encode()).hexdigest()


class Cutter:
    """Cuts regions out of one model.

    Args:
        graph: the model.
        samples: of the model.
        presents: by name of a past.
        tokens: the input of the new tokens.
        weights: constants that are stand-ins in the model, by name.
    """

    def __init__(
        self,
        graph: Graph,
        samples: Samples,
        presents: Mapping[str, str],
        tokens: str,
        weights: Mapping[str, TensorProto],
    ) -> None:
        self._graph, self._weights = graph, weights
        self._steps = [samples.step(*sizes) for sizes in _POINTS]
        self._kinds: dict[str, Kind | None] = {}
        self._presents = presents
        self._text = graph.tainted({tokens, *presents}, shapes=False)
        self._last: dict[str, int] = {}
        for place, node in enumerate(graph.nodes):
            if node.op_type not in ("Shape", "Size"):
                self._last |= dict.fromkeys(graph.reads[id(node)], place)
        for name in set(graph.outputs) - set(presents.values()):
            self._last[name] = len(graph.nodes)

    def kind(self, name: str) -> Kind | None:
        """Type of a tensor, and its shape in batch and new tokens if it is short."""
        if name not in self._kinds:
            elem_type = self._steps[0].probe.elem_type(name)
            shapes = [step.probe.shape(name) for step in self._steps]
            self._kinds[name] = None if elem_type is None else Kind(elem_type, _terms(*shapes))
        return self._kinds[name]

    def describe(self, name: str) -> object:
        """Type and shapes of a tensor."""
        return self._steps[0].probe.elem_type(name), [step.probe.shape(name) for step in self._steps]

    def shape(self, name: str, batch: int, length: int) -> tuple[int, ...]:
        """The shape of a short tensor in a step."""
        kind = self.kind(name)
        return tuple(term.at(batch, length) for term in (kind.shape if kind else None) or ())

    def result(self, past: str) -> str:
        """The first short tensor that all flows through that a cache reaches.

        Raises:
            MisfitError: there is none.
        """
        live = {past}
        for place, node in enumerate(self._graph.nodes):
            if node.op_type in ("Shape", "Size") or live.isdisjoint(self._graph.reads[id(node)]):
                continue
            live.update(name for name in node.output if self._last.get(name, -1) > place)
            live = {name for name in live if self._last.get(name, -1) > place}
            if len(live) == 1 and self._is_short(one := next(iter(live))) and one != past:
                return one
        raise MisfitError(f"what the cache '{past}' reaches is not the result of one attention")

    def region(self, past: str, behind: Collection[str] = ()) -> Region:
        """The region of the attention over a cache.

        Args:
            past: the cache.
            behind: short tensors at which it does not end.

        Raises:
            SiteError: there is none, or it reads large weights.
        """
        graph, result = self._graph, self.result(past)
        caches, passed = {past}, set(behind)
        while True:
            own = graph.tainted(caches, shapes=False)
            stops = {n for n in self._text - own - passed if n in graph.makes and self._is_short(n)}
            outputs = [result, *sorted(self._presents[c] for c in caches)]
            nodes, fed, used = graph.cone(outputs, stops - {result})
            valued = {n for node in nodes if node.op_type not in ("Shape", "Size") for n in graph.reads[id(node)]}
            found = {n for n in fed if n in self._presents and n in valued}
            texts = [n for n in fed if n in stops and n in valued]
            below = {n for n in texts if any(n in graph.tainted([o], shapes=False) for o in texts if o != n)}
            if found <= caches and not below:
                break
            caches |= found
            passed |= below
        constants = [self._constant(name) for name in used]
        if sum(math.prod(t.dims) for t in constants) > _MOST:
            raise SiteError(f"the attention around '{result}' reads large weights")
        inputs = [self._input(name) for name in fed]
        order = {name: i for i, node in enumerate(graph.nodes) for name in node.output}
        long = (n for node in nodes for n in node.output if n in own and not self._is_short(n))
        return Region(
            model=part_of(graph.model, nodes, inputs, outputs, constants),
            result=result,
            presents=tuple(outputs[1:]),
            texts=tuple(sorted(texts, key=order.__getitem__)),
            measured=tuple(n for n in fed if n not in valued),
            inputs=tuple(n for n in fed if n in graph.inputs and n in valued),
            caches=tuple(sorted(caches)),
            integers=tuple(sorted(_sizes(constants))),
            wide=any((k := self.kind(n)) and k.elem_type == TensorProto.FLOAT for n in long),
        )

    def _is_short(self, name: str) -> bool:
        kind = self.kind(name)
        return kind is not None and kind.shape is not None and kind.elem_type in FLOATS

    def _input(self, name: str) -> onnx.ValueInfoProto:
        value = self._graph.inputs.get(name)
        known = self.kind(name)
        kind = value.type.tensor_type.elem_type if value is not None else known.elem_type if known is not None else 0
        return onnx.helper.make_tensor_value_info(name, kind, None)

    def _constant(self, name: str) -> TensorProto:
        tensor = self._graph.constants[name]
        if tensor.data_location == TensorProto.EXTERNAL:
            tensor = self._weights.get(name, tensor)
        if tensor.data_location == TensorProto.EXTERNAL:
            raise SiteError(f"an attention reads '{name}' of another file")
        made: TensorProto = copied(tensor)
        made.name = name
        return made


def _sizes(constants: Collection[TensorProto]) -> set[int]:
    """Numbers in small constants, and sizes of others, that may be lengths."""
    found: set[int] = set()
    for tensor in constants:
        found.update(tensor.dims)
        if math.prod(tensor.dims) <= 4 and tensor.data_type in (*FLOATS, TensorProto.INT64, TensorProto.INT32):
            values = onnx.numpy_helper.to_array(tensor).astype(float).ravel()
            found.update(math.ceil(abs(v)) for v in values if abs(v) < 1 << 30)
    return found


def _terms(one: tuple[int, ...] | None, two: tuple[int, ...] | None) -> tuple[Term, ...] | None:
    """A shape in batch and new tokens; None if it depends on the past, or is not known."""
    if one is None or two is None or len(one) != len(two):
        return None
    found = [_term(a, b) for a, b in zip(one, two, strict=True)]
    known = tuple(t for t in found if t is not None)
    return known if len(known) == len(found) else None


def _term(one: int, two: int) -> Term | None:
    (b, _, s), (c, _, t) = _POINTS
    powers = ((0, 0), (1, 0), (0, 1), (1, 1))
    fits = (Term(one // (b**i * s**j), i, j) for i, j in powers if one % (b**i * s**j) == 0)
    return next((term for term in fits if term.at(c, t) == two), None)

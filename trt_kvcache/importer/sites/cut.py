"""Cut attention regions out of a graph by shapes alone; no operator is named but Shape and Size.

A tensor is *short* if its shape depends on batch and new tokens alone, and *long* otherwise. All that a cache of keys
reaches flows, in the end, through one short tensor: the result of its attention. The region goes back from there to
short tensors of the text that no cache of the region reaches: queries and new rows.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import cache

import onnx
from onnx import TensorProto, numpy_helper

from trt_kvcache.importer.check.graph import Graph
from trt_kvcache.importer.check.shapes import POINTS, terms
from trt_kvcache.importer.normalize.evidence.samples import Samples
from trt_kvcache.importer.protos import FLOATS, copied, is_op, opset_version, part_of, replace_field

_PASTS = (6, 8)  # short, and no products of batch and new tokens, alone or with these
_MOST = 1 << 20  # numbers in the constants of a region


class SiteError(Exception):
    """No attention that can be described; the text says what was seen."""


class MisfitError(SiteError):
    """Nothing runs: sizes do not fit each other, or there is no attention at all."""


class UnknownError(SiteError):
    """An input of whole numbers, its first argument, may be positions, and nothing else says so."""

    def __str__(self) -> str:
        return f"nothing says what '{self.args[0]}' holds in a step: name it with --config"


class FartherError(Exception):
    """A tensor at which a region has to end lies before one of these short tensors, at which it does."""


@dataclass(frozen=True, eq=False)
class Region:
    """The part of a model between queries, new rows and caches at one end, and the result and presents at the other.

    Attributes:
        model: without shapes; the outputs are `result` and `presents`.
        key: equal for regions that compute the same.
        result: the result of the attention.
        presents: caches after the step.
        texts: short tensors of the text that it is fed with, in the order of the graph.
        caches: inputs that are caches.
        inputs: other inputs of the graph of which it reads the numbers.
        integers: sizes in its constants, at which lengths may change what it does.
        wide: some long tensor is float32.
    """

    model: onnx.ModelProto
    key: str
    result: str
    presents: tuple[str, ...]
    texts: tuple[str, ...]
    caches: tuple[str, ...]
    inputs: tuple[str, ...]
    integers: tuple[int, ...]
    wide: bool

    @property
    def names(self) -> tuple[str, ...]:
        """The tensors at its ends, in an order that regions of one key share."""
        return (self.result, *self.presents, *self.texts, *self.caches)


class Cutter:
    """Cuts regions out of one model.

    Args:
        model: flat.
        samples: of the model.
        presents: by name of a past.
        tokens: the input of the new tokens.
        weights: constants that are stand-ins in the model, by name.
    """

    def __init__(
        self,
        model: onnx.ModelProto,
        samples: Samples,
        presents: Mapping[str, str],
        tokens: str,
        weights: Mapping[str, TensorProto],
    ) -> None:
        self._graph = graph = Graph(model)
        self._presents, self._weights = presents, weights
        sizes = ((p["batch"], past, p["sequence"]) for p, past in zip(POINTS, _PASTS, strict=True))
        self._probes = [samples.step(*s).probe for s in sizes]
        self._text = graph.tainted({tokens, *presents}, shapes=False)
        self._order = {name: place for place, node in enumerate(graph.nodes) for name in node.output}
        self._last = {n: place for place, node in enumerate(graph.nodes) for n in self._reads(node)}
        self._last |= dict.fromkeys(set(graph.outputs) - set(presents.values()), len(graph.nodes))
        self._is_short = cache(self._measure)

    def region(self, past: str, passed: Collection[str] = ()) -> Region:
        """The region of the attention over a cache.

        Args:
            past: the cache.
            passed: short tensors at which it does not end.

        Raises:
            SiteError: there is none, or it reads large weights.
        """
        graph, result = self._graph, self._result(past)
        caches, passed = {past}, {result, *passed}
        while True:
            reached = graph.tainted(caches, shapes=False)
            stops = {n for n in self._text - reached - passed if n in graph.makes and self._is_short(n)}
            presents = sorted(self._presents[c] for c in caches)
            nodes, fed, used = graph.cone([result, *presents], stops)
            read = {n for node in nodes for n in self._reads(node)}.intersection(fed)
            pasts, texts = read & self._presents.keys(), read & stops
            after = graph.tainted(texts, shapes=False)
            below = {n for n in texts if not after.isdisjoint(self._reads(graph.makes[n]))}
            if pasts <= caches and not below:
                break
            caches |= pasts
            passed |= below
        ends = (*sorted(texts, key=self._order.__getitem__), *sorted(caches))
        leaves = {n: f"{ends.index(n) if n in ends else n} {self._described(n)}" for n in fed}
        digests, _ = graph.digests(leaves, nodes=nodes)
        constants = [self._constant(name) for name in used]
        if sum(math.prod(t.dims) for t in constants) > _MOST:
            raise SiteError(f"the attention around '{result}' reads large weights")
        inputs = [onnx.helper.make_tensor_value_info(n, self._described(n)[0] or 0, None) for n in fed]
        long = (n for node in nodes for n in node.output if n in reached and not self._is_short(n))
        model = part_of(graph.model, nodes, inputs, [result, *presents], constants)
        for node in model.graph.node:
            _make_public(node, opset_version(model) or 0)
        return Region(
            model=model,
            key=repr([digests[n] for n in (result, *presents)]),
            result=result,
            presents=tuple(presents),
            texts=ends[: len(texts)],
            caches=ends[len(texts) :],
            inputs=tuple(read & graph.inputs.keys() - caches),
            integers=tuple(sorted(_sizes(constants))),
            wide=any(self._described(n)[0] == TensorProto.FLOAT for n in long),
        )

    def _result(self, past: str) -> str:
        """The first short tensor that all flows through that a cache reaches.

        Raises:
            MisfitError: there is none.
        """
        live = {past}
        for place, node in enumerate(self._graph.nodes):
            if live.isdisjoint(self._reads(node)):
                continue
            live = {name for name in (*live, *node.output) if self._last.get(name, -1) > place}
            if len(live) == 1 and self._is_short(one := next(iter(live))) and one != past:
                return one
        raise MisfitError(f"what the cache '{past}' reaches is not the result of one attention")

    def _reads(self, node: onnx.NodeProto) -> Collection[str]:
        """Tensors of which a node reads the numbers."""
        return () if node.op_type in ("Shape", "Size") else self._graph.reads[id(node)]

    def _described(self, name: str) -> tuple[int | None, list[tuple[int, ...] | None]]:
        """Type and shapes of a tensor."""
        return self._probes[0].elem_type(name), [probe.shape(name) for probe in self._probes]

    def _measure(self, name: str) -> bool:
        kind, shapes = self._described(name)
        return kind in FLOATS and terms(*shapes) is not None

    def _constant(self, name: str) -> TensorProto:
        tensor = self._graph.constants[name]
        if tensor.data_location == TensorProto.EXTERNAL:
            tensor = self._weights.get(name, tensor)
        if tensor.data_location == TensorProto.EXTERNAL:
            raise SiteError(f"an attention reads '{name}' of another file")
        constant: TensorProto = copied(tensor)
        constant.name = name
        return constant


def _make_public(node: onnx.NodeProto, opset: int) -> None:
    """Take from an Attention, in place, what `lower` says of the operator that it was: it computes the same without.

    Raises:
        SiteError: not without the rest that ONNX's operator does not have.
    """
    if not is_op(node, "Attention"):
        return
    known = onnx.defs.get_schema("Attention", opset, "")
    replace_field(node.attribute, [a for a in node.attribute if a.name != "operator"])
    others = [a.name for a in node.attribute if a.name not in known.attributes]
    others += ["sinks"] * any(node.input[len(known.inputs) :])
    if others:
        raise SiteError(f"the attention '{node.name}' has {others[0]}, which ONNX Runtime does not run so")


def _sizes(constants: Iterable[TensorProto]) -> set[int]:
    """Numbers in small constants, and sizes of others, that may be lengths."""
    sizes: set[int] = set()
    for tensor in constants:
        sizes.update(tensor.dims)
        if math.prod(tensor.dims) <= 4 and tensor.data_type in (*FLOATS, TensorProto.INT64, TensorProto.INT32):
            values = numpy_helper.to_array(tensor).astype(float).ravel()
            sizes.update(math.ceil(abs(v)) for v in values if abs(v) < 1 << 30)
    return sizes

"""Find attention over caches: from a Softmax to the caches of keys and values, or as an Attention node.

    K ── repeat_kv, Transpose, Mul ─┐
    Q ──────────────────────────── MatMul ── Mul, softcap, Add(mask) ── Softmax ── MatMul ── output
    V ── repeat_kv ───────────────────────────────────────────────────────────────┘

becomes ``Attention(Q, present K, present V, ...)``, which reads each cache once. Scores have rows in the order of
batch, query head and token, and a number for each key: ``[B, H, S, T]``, ``[B * H, S, T]``, ``[B, N, G, S, T]`` and
``[B, N, G * S, T]`` hold the same numbers in the same order. So no form is matched: queries and results are reshaped to
``[B, H, S, D]``. How caches are read is seen by numbers (`cache_reads`), as is what is added to scores (`masks`).
Everything here is a guess that the check decides.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from math import prod

import numpy as np
import onnx_graphsurgeon as gs

from trt_kvcache.errors import UnsupportedModelError
from trt_kvcache.importer.extensions import load
from trt_kvcache.importer.graph import consumers, contains, input_or_none, is_op, producer
from trt_kvcache.importer.interface.exported import Interface
from trt_kvcache.importer.normalize.attention.cache_reads import CacheReads, elem_type_of, smallest
from trt_kvcache.importer.normalize.attention.masks import Masks, ZeroScores, check_bias, classify, sinks_of
from trt_kvcache.importer.normalize.evidence.samples import Sample, Samples
from trt_kvcache.importer.normalize.findings import Core, Sinks, Visibility, Write
from trt_kvcache.importer.plan import Dim
from trt_kvcache.importer.planning.rounding import Rounding


@dataclass(frozen=True, eq=False)
class _Site:
    """One attention, as operators.

    Attributes:
        node: the Softmax, or the Attention.
        query, keys, values, output: what the products read and make.
        key, value: the caches that `keys` and `values` are made of.
        scale, softcap: of the scores.
        rounding, weights: how scores, and what the softmax makes of them, are rounded.
        added: what is added to the scores: what the Softmax reads, or the mask of an Attention; None: nothing.
        product: the scores; None: those of an Attention.
    """

    node: gs.Node
    query: gs.Tensor
    keys: gs.Tensor
    values: gs.Tensor
    output: gs.Tensor
    key: Write
    value: Write
    scale: float
    softcap: float
    added: gs.Tensor | None
    product: gs.Tensor | None = None
    rounding: Rounding | None = None
    weights: Rounding | None = None


@dataclass
class _Scale:
    """What is done to scores before the softmax, beside masks."""

    scale: float = 1.0
    softcap: float = 0.0
    rounding: Rounding | None = None
    before: list[float] = field(default_factory=list)


def find_cores(graph: gs.Graph, writes: Sequence[Write], interface: Interface, samples: Samples) -> tuple[Core, ...]:
    """Find every attention over the caches, in graph order.

    Raises:
        UnsupportedModelError: an attention over a cache is not what is supported; see `masks.classify` too.
    """
    finder = _Finder(graph, writes, interface, samples)
    sites = [site for node in graph.nodes if (site := finder.site(node)) is not None]
    zero = ZeroScores([site.product.name for site in sites if site.product is not None])
    return tuple(finder.core(site, zero) for site in sites)


class _Finder:
    def __init__(self, graph: gs.Graph, writes: Sequence[Write], interface: Interface, samples: Samples) -> None:
        self._graph = graph
        self._interface = interface
        self._samples = samples
        self._small = smallest(samples)
        self._caches = CacheReads(writes, samples)

    def site(self, node: gs.Node) -> _Site | None:
        """The attention that a node is part of, or None."""
        if is_op(node, "Softmax"):
            return self._decomposed(node)
        if is_op(node, "Attention") and input_or_none(node, 4) is None and input_or_none(node, 5) is None:
            return self._fused(node)
        return None

    def _decomposed(self, softmax: gs.Node) -> _Site | None:
        shape = self._shape(softmax.inputs[0])
        before = self._path(softmax.inputs[0], shape, lambda node: node.inputs, lambda t: [producer(t)])
        if not before:
            return None
        product, between = before[-1], before[-2::-1]
        key = self._caches.behind(product.inputs[1])
        after = self._path(softmax.outputs[0], shape, lambda node: node.outputs, consumers)
        value = self._caches.behind(after[-1].inputs[1]) if after else None
        assert key is not None
        if value is None:
            raise UnsupportedModelError(
                f"the probabilities of '{softmax.name}', made of cache '{key.past.name}', do not go to one MatMul with "
                "a cache of values; supported is MatMul, Softmax, MatMul over a pair of caches"
            )
        scale = self._scale(between)
        pairs = [pair for node in after if (pair := _rounding(node, "what the softmax makes of scores")) is not None]
        return _Site(
            softmax, product.inputs[0], product.inputs[1], after[-1].inputs[1], after[-1].outputs[0], key, value,
            prod(scale.before) if scale.rounding is not None else scale.scale, scale.softcap,
            softmax.inputs[0], product.outputs[0],
            None if scale.rounding is None else replace(scale.rounding, factor=scale.scale),
            pairs[0] if pairs else None,
        )  # fmt: skip

    def _path(
        self,
        start: gs.Tensor,
        shape: Sequence[int],
        after: Callable[[gs.Node], Iterable[gs.Tensor]],
        nodes: Callable[[gs.Tensor], Iterable[gs.Node | None]],
    ) -> list[gs.Node]:
        """The nodes between a softmax and a product with a cache, with the product; none if there is no product.

        All that is between has as many rows as the softmax, and as many keys: or one less, without sinks.
        """
        pending: list[tuple[gs.Tensor, tuple[gs.Node, ...]]] = [(start, ())]
        seen: set[str] = set()
        while pending:
            tensor, path = pending.pop()
            sizes = self._shape(tensor)
            if tensor.name in seen or not sizes or prod(sizes[:-1]) != prod(shape[:-1]):
                continue
            if shape[-1] - sizes[-1] not in (0, 1):
                continue
            seen.add(tensor.name)
            for node in nodes(tensor):
                if node is not None and is_op(node, "MatMul"):
                    if (tensor is start or node.inputs[1] is not tensor) and self._caches.behind(node.inputs[1]):
                        return [*path, node]
                elif node is not None:
                    pending += [(t, (*path, node)) for t in reversed(list(after(node)))]
        return []

    def _scale(self, between: Sequence[gs.Node]) -> _Scale:
        """The factors of scores, and what caps and rounds these, in the order of nodes."""
        made = _Scale()
        for node in between:
            pair = self._caches.factor(node) if is_op(node, "Mul", "Div") else None
            if pair is not None and made.softcap:  # cap * tanh(scores * factor) is softcap(scores * factor * cap)
                made.softcap *= pair[1]
            if pair is not None:
                made.scale *= pair[1]
            if is_op(node, "Tanh"):
                made.softcap = 1.0
            if (rounds := _rounding(node, "scores")) is not None:
                if made.softcap:  # the check takes both orders for the same, up to what is rounded
                    raise UnsupportedModelError(f"'{node.name}' rounds scores that are capped already")
                made.before.append(made.scale)
                made.scale, made.rounding = 1.0, rounds
        return made

    def _fused(self, node: gs.Node) -> _Site | None:
        """An Attention node over caches, or None."""
        key, value = self._caches.behind(node.inputs[1]), self._caches.behind(node.inputs[2])
        if key is None and value is None:
            return None
        if key is None or value is None or input_or_none(node, 6) is not None:
            raise UnsupportedModelError(
                f"Attention '{node.name}' reads a cache as only one of K and V, or has nonpad_kv_seqlen beside a cache "
                "that is not updated by TensorScatter; supported is a pair of caches"
            )
        if len(node.outputs) > 1 and any(consumers(t) or contains(self._graph.outputs, t) for t in node.outputs[1:]):
            raise UnsupportedModelError(
                f"Attention '{node.name}' has outputs beside its result that are read; none may be"
            )
        if any(int(node.attrs.get(name, -1)) >= 0 for name in ("left_window_size", "right_window_size")):
            raise UnsupportedModelError(
                f"Attention '{node.name}' has a window and no past: export the mask as an input"
            )
        query, keys, values = node.inputs[:3]
        size = (self._shape(query) or (1,))[-1]  # `core` refuses queries without a shape
        scale = float(node.attrs.get("scale", size**-0.5))
        softcap = float(node.attrs.get("softcap", 0.0))
        return _Site(node, query, keys, values, node.outputs[0], key, value, scale, softcap, input_or_none(node, 3))

    def core(self, site: _Site, zero: ZeroScores) -> Core:
        """The attention of a site.

        Raises:
            UnsupportedModelError: it is not what is supported.
        """
        name, key, value, sample = site.node.name, site.key, site.value, self._small
        heads, size = self._heads(site.query, sample)
        query, query_shape = self._split(site.query, heads, size, _earlier)
        made = [self._shape(t) for t in (site.output, site.product or site.query)]
        lead = made[1][:-2] if site.product is not None else None
        read = self._caches.read(name, site.keys, key, lead, heads, transposed=site.product is not None)
        read_values = self._caches.read(name, site.values, value, lead, heads, transposed=False)
        if read.turns != read_values.turns:
            raise UnsupportedModelError(
                f"the query heads of '{name}' share heads of keys and of values in another order; supported is the "
                "same: those of a group next to each other, or in turns, over as many heads of both"
            )
        if key.kept != value.kept:
            kept = [w.kept or "all" for w in (key, value)]
            raise UnsupportedModelError(
                f"'{name}' keeps {kept[0]} rows of its keys and {kept[1]} of its values; supported are as many of both"
            )
        if abs(read_values.scale - 1) > 1e-6:
            raise UnsupportedModelError(
                f"the values of '{name}' are scaled by {read_values.scale}; supported are values as they are"
            )
        keys = made[1][-1] if site.product is not None else 0
        has_sinks = site.added is not None and keys > 0 and self._shape(site.added)[-1] > keys
        causal = site.product is None and bool(site.node.attrs.get("is_causal", 0))
        masks = Masks(name, site.added, zero, causal, key, read.in_use, has_sinks, product=site.product)
        visibility = check_bias(name, classify(masks, self._graph, self._interface, self._samples))
        sinks: Sinks | None = sinks_of(masks, heads, self._samples) if has_sinks else None
        output = unguarded(site.output, visibility, self._samples)
        output, output_shape = self._split(output, heads, (made[0] or (0,))[-1], _later)
        query_type, output_type = (sample.probe.elem_type(t.name) or elem_type_of(key.past) for t in (query, output))
        return Core(
            name, output, query, key, value, site.scale * read.scale, site.softcap, visibility,
            heads, size, (made[0] or (0,))[-1], query_type, output_type, sinks, site.rounding, site.weights, read.turns,
            query_shape is not None, output_shape,
        )  # fmt: skip

    def _heads(self, query: gs.Tensor, sample: Sample) -> tuple[int, int]:
        """Number and size of the heads of queries."""
        shape = self._shape(query)
        heads, rest = divmod(prod(shape), sample.batch * sample.length * (shape or (1,))[-1] or 1)
        if rest or not heads or len(shape) < 3:
            raise UnsupportedModelError(
                f"the query '{query.name}' has the shape {list(shape)} in a step of {sample.length} tokens of "
                f"{sample.batch} sequences; supported is [B, heads, S, head size]"
            )
        return heads, shape[-1]

    def _split(
        self, tensor: gs.Tensor, heads: int, size: int, step: Callable[[gs.Tensor], gs.Tensor | None]
    ) -> tuple[gs.Tensor, tuple[Dim, ...] | None]:
        """A tensor that is ``[B, heads, S, size]``, up to Reshapes; or as it is, and its shape for the editor."""
        found: gs.Tensor | None = None
        other: gs.Tensor | None = tensor
        while other is not None:
            shapes = [sample.probe.shape(other.name) for sample in self._samples.few]
            if shapes == [(sample.batch, heads, sample.length, size) for sample in self._samples.few]:
                found = other
                if step is _later:
                    break
            other = step(other)
        if found is not None:
            return found, None
        shapes = [sample.probe.shape(tensor.name) for sample in self._samples.few]
        if shapes[0] is None or shapes[1] is None or len(shapes[0]) != len(shapes[1]):
            raise UnsupportedModelError(f"the shape of '{tensor.name}', which attention reads or makes, is unknown")
        first, last = self._samples.few
        form: list[Dim] = []
        for one, two in zip(*shapes, strict=True):
            if one == two:
                form.append(one)
            elif (one, two) in ((first.batch, last.batch), (first.length, last.length)):
                form.append("batch" if (one, two) == (first.batch, last.batch) and not form else "sequence")
            else:
                form.append("?")
        return tensor, tuple(form)

    def _shape(self, tensor: gs.Tensor) -> tuple[int, ...]:
        return self._small.probe.shape(tensor.name) or ()


def _rounding(node: gs.Node, what: str) -> Rounding | None:
    """How a DequantizeLinear, after a QuantizeLinear, rounds scores or weights; None where a node does not."""
    if not is_op(node, "DequantizeLinear"):
        return None
    pair = load("rounded_attention").read_pair(node, what)
    return None if pair is None else pair[1]


def _earlier(tensor: gs.Tensor) -> gs.Tensor | None:
    """What a Reshape makes a tensor of."""
    node = producer(tensor)
    return node.inputs[0] if node is not None and is_op(node, "Reshape", "Squeeze", "Unsqueeze") else None


def _later(tensor: gs.Tensor) -> gs.Tensor | None:
    """What a Reshape, the only one that reads a tensor, makes of it."""
    readers = consumers(tensor)
    return readers[0].outputs[0] if len(readers) == 1 and is_op(readers[0], "Reshape", "Squeeze", "Unsqueeze") else None


def unguarded(output: gs.Tensor, visibility: Visibility, samples: Samples) -> gs.Tensor:
    """What an attention gives after its guard for queries that see no key; `output` itself where there is none.

    PyTorch's exporter writes ``Where(ReduceSum(mask visible) < 1, 0, attention)``: its attention gives zero there.
    """
    readers = consumers(output)
    if len(readers) != 1 or not is_op(readers[0], "Where") or readers[0].inputs[2] is not output:
        return output
    condition, zeros, _ = (samples.plain[0].probe.value(t.name) for t in readers[0].inputs)
    if zeros is None or np.any(zeros != 0) or (condition is None and visibility.bias is None):
        return output
    return readers[0].outputs[0]

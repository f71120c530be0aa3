"""Find attention over caches: from a Softmax to the caches of keys and values, or as an Attention node.

    K ── repeat_kv, Transpose, Mul ─┐
    Q ──────────────────────────── MatMul ── Mul, softcap, Add(mask) ── Softmax ── MatMul ── output
    V ── repeat_kv ───────────────────────────────────────────────────────────────┘

becomes ``Attention(Q, present K, present V, ...)``, which reads each cache once. Scores have rows in the order of
batch, query head and token, and a number for each key: ``[B, H, S, T]``, ``[B * H, S, T]``, ``[B, N, G, S, T]`` and
``[B, N, G * S, T]`` hold the same numbers in the same order. So no form is matched: queries and results are reshaped to
``[B, H, S, D]``. What moves, repeats or scales the numbers of a cache on the way to a product is followed by operator,
and taken for repeated heads. What is added to scores is seen by numbers (`masks`). Everything here is a guess that the
check decides.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import prod

import numpy as np
import onnx
import onnx_graphsurgeon as gs

from trt_kvcache.errors import UnsupportedModelError
from trt_kvcache.importer.graph import DOUBLE, FLOAT, consumers, elem_type, input_or_none, is_op, producer
from trt_kvcache.importer.interface.exported import Interface
from trt_kvcache.importer.normalize.attention.masks import Masks, ZeroScores, classify, sinks_of
from trt_kvcache.importer.normalize.attention.unlike import mixed_heads, other_order, to_values
from trt_kvcache.importer.normalize.evidence.samples import Sample, Samples
from trt_kvcache.importer.normalize.findings import AttentionSite, Sinks, Write
from trt_kvcache.importer.normalize.views import MOVES, is_float_cast
from trt_kvcache.importer.plan import Dim
from trt_kvcache.importer.planning.attention_facts import gives_scores

_WIDE = (FLOAT, DOUBLE)
_HALVES = {int(onnx.TensorProto.FLOAT16), int(onnx.TensorProto.BFLOAT16)}  # each holds numbers that the other does not


@dataclass(frozen=True, eq=False)
class _Operators:
    """One attention, as operators.

    Attributes:
        node: the Softmax, or the Attention.
        query, output: what the products read and make.
        key, value: the caches that keys and values are made of.
        keys: how many there are in the smallest step.
        scale, softcap: of the scores.
        added: what is added to the scores: what the Softmax reads, or the mask of an Attention; None: nothing.
        product: the scores; None: those of an Attention.
    """

    node: gs.Node
    query: gs.Tensor
    output: gs.Tensor
    key: Write
    value: Write
    keys: int
    scale: float
    softcap: float
    added: gs.Tensor | None
    product: gs.Tensor | None = None


def find_attentions(
    graph: gs.Graph, writes: Sequence[Write], interface: Interface, samples: Samples
) -> tuple[AttentionSite, ...]:
    """Find every attention over the caches, in graph order.

    Raises:
        UnsupportedModelError: an attention over a cache is not what is supported; see `masks.classify` too.
    """
    finder = _Finder(graph, writes, interface, samples)
    every = [ops for node in graph.nodes if (ops := finder.attention(node)) is not None]
    zero = ZeroScores([ops.product.name for ops in every if ops.product is not None])
    return tuple(finder.site(ops, zero) for ops in every)


class _Finder:
    def __init__(self, graph: gs.Graph, writes: Sequence[Write], interface: Interface, samples: Samples) -> None:
        self._graph = graph
        self._interface = interface
        self._samples = samples
        self._small = smallest(samples)
        self._presents = {t.name: write for write in writes for t in (*_read(write), *write.fronts)}
        self._presents |= {t.name: write for write in writes for t, _ in write.turned}

    def attention(self, node: gs.Node) -> _Operators | None:
        """The attention that a node is part of, or None."""
        if is_op(node, "Softmax"):
            return self._decomposed(node)
        if is_op(node, "Attention") and input_or_none(node, 4) is None and input_or_none(node, 5) is None:
            return self._fused(node)
        return None

    def _cache(self, tensor: gs.Tensor) -> tuple[Write, float] | None:
        """The cache that a tensor is made of by moving, repeating and scaling numbers, and the factor."""
        factor, share = 1.0, Fraction(1)
        while tensor.name not in self._presents:
            node = producer(tensor)
            if node is None:
                return None
            if is_op(node, *MOVES) or is_float_cast(node):
                if is_op(node, "Slice"):
                    share *= Fraction(prod(self._shape(tensor)), prod(self._shape(node.inputs[0])) or 1)
                tensor = node.inputs[0]
            elif is_op(node, "Mul", "Div") and (pair := self._factor(node)) is not None:
                tensor = pair[0]
                factor *= pair[1]
            else:
                return None
        write = self._presents[tensor.name]
        rows = 0 if write.growing else (self._small.probe.shape(write.past.name) or (0,) * 9)[write.axis]
        # Rows in use may be cut out of a fixed cache. A part of each row is computed from it: see `latent_attention`.
        whole = write.kept is not None or share in (1, Fraction(self._small.total, rows or 1))
        return (write, factor) if whole else None

    def _factor(self, node: gs.Node) -> tuple[gs.Tensor, float] | None:
        """The varying operand of a Mul or Div, and the factor that the other one is."""
        for data, other in (node.inputs, reversed(node.inputs)):
            value, last = (sample.probe.value(other.name) for sample in (self._small, self._samples.plain[-1]))
            if value is None or value.size != 1 or (is_op(node, "Div") and other is node.inputs[0]):
                continue
            if last is not None and np.array_equal(value, last) and self._small.probe.value(data.name) is None:
                number = float(value.reshape(()))
                return data, 1 / number if is_op(node, "Div") else number
        return None

    def _decomposed(self, softmax: gs.Node) -> _Operators | None:
        shape = self._shape(softmax.inputs[0])
        before = self._path(softmax.inputs[0], shape, lambda node: node.inputs, lambda t: [producer(t)])
        if not before or (keys := self._cache(before[-1].inputs[1])) is None:
            return None
        product, between = before[-1], before[-2::-1]
        after = self._path(softmax.outputs[0], shape, lambda node: node.outputs, consumers)
        values = self._cache(after[-1].inputs[1]) if after else None
        way = (*between, *after[:-1])
        if values is None:
            way = to_values(product, lambda tensor: self._cache(tensor) is not None, self._samples) or ()
        if mixed := mixed_heads(way, keys[0].past.name):
            raise UnsupportedModelError(mixed)
        if values is None:
            raise UnsupportedModelError(
                f"the probabilities of '{softmax.name}', made of cache '{keys[0].past.name}', do not go to one MatMul "
                "with a cache of values; supported is MatMul, Softmax, MatMul over a pair of caches"
            )
        axis = int(softmax.attrs.get("axis", -1))
        if axis % len(shape) != len(shape) - 1:
            raise UnsupportedModelError(
                f"Softmax '{softmax.name}' is over axis {axis} of scores {list(shape)}, made of the cache "
                f"'{keys[0].past.name}'; supported is the last axis, that of the keys"
            )
        scale, softcap = self._scale(between, keys[1])
        self._check_order(product.inputs[0], product.inputs[1], keys)
        self._check_order(after[-1].outputs[0], after[-1].inputs[1], values)
        return _Operators(
            softmax, product.inputs[0], after[-1].outputs[0], keys[0], values[0],
            (self._shape(product.outputs[0]) or (0,))[-1], scale, softcap, softmax.inputs[0], product.outputs[0],
        )  # fmt: skip

    def _check_order(self, like: gs.Tensor, read: gs.Tensor, cache: tuple[Write, float]) -> None:
        """Refuse heads that are read in another order; those of `like` are as large."""
        size = (self._shape(like) or (0,))[-1]
        if size and (why := other_order(read, *cache, size, self._samples)):
            raise UnsupportedModelError(why)

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
                    if (tensor is start or node.inputs[1] is not tensor) and self._cache(node.inputs[1]):
                        return [*path, node]
                elif node is not None:
                    pending += [(t, (*path, node)) for t in reversed(list(after(node)))]
        return []

    def _scale(self, between: Sequence[gs.Node], scale: float) -> tuple[float, float]:
        """Factor and softcap of scores; `between` are the nodes from these on, `scale` is that of keys."""
        softcap = 0.0
        for node in between:
            pair = self._factor(node) if is_op(node, "Mul", "Div") else None
            if pair is not None:
                scale *= pair[1]
                softcap *= pair[1]  # cap * tanh(scores * factor) is softcap(scores * factor * cap)
            if is_op(node, "Tanh"):
                softcap = 1.0
        return scale, softcap

    def _fused(self, node: gs.Node) -> _Operators | None:
        """An Attention node over caches, or None.

        Raises:
            UnsupportedModelError: the operator that it was has to read a cache, see `lower.fused_attention`.
        """
        key, value = self._cache(node.inputs[1]), self._cache(node.inputs[2])
        if (key is None or value is None) and "operator" in node.attrs:
            read = f"'{node.inputs[1].name}' and '{node.inputs[2].name}'"
            raise UnsupportedModelError(
                f"{node.attrs['operator']} '{node.name}' has no keys and values of its own, and {read}, which it reads "
                "instead, are no caches after their update; supported are the presents of another layer: export the "
                "model so"
            )
        if key is None or value is None:
            return None
        if gives_scores(self._graph, node):
            raise UnsupportedModelError(
                f"Attention '{node.name}' gives its scores as an output (qk_matmul_output, '{node.outputs[3].name}'), "
                "which has a column for each key of the text; the rewritten attention has other columns: leave that "
                "output out"
            )
        query, keys = node.inputs[:2]
        self._check_order(query, keys, key)
        self._check_order(node.outputs[0], node.inputs[2], value)
        size = (self._shape(query) or (1,))[-1]  # `site` refuses queries without a shape
        scale = float(node.attrs.get("scale", size**-0.5)) * key[1]
        softcap = float(node.attrs.get("softcap", 0.0))
        count = (0, 0, *self._shape(keys))[-2]
        return _Operators(node, query, node.outputs[0], key[0], value[0], count, scale, softcap, input_or_none(node, 3))

    def site(self, ops: _Operators, zero: ZeroScores) -> AttentionSite:
        """The site of an attention.

        Raises:
            UnsupportedModelError: it is not what is supported.
        """
        name, key, sample = ops.node.name, ops.key, self._small
        heads, size = self._heads(ops.query, sample)
        query, query_shape = self._split(ops.query, heads, size, _earlier)
        value_size = (self._shape(ops.output) or (0,))[-1]
        has_sinks = ops.product is not None and ops.added is not None and self._shape(ops.added)[-1] > ops.keys > 0
        causal = ops.product is None and bool(ops.node.attrs.get("is_causal", 0))
        in_use = not key.growing and ops.keys == sample.total
        masks = Masks(name, ops.added, zero, causal, key, in_use, has_sinks, product=ops.product)
        visibility = classify(masks, self._graph, self._interface, self._samples)
        sinks: Sinks | None = sinks_of(masks, heads, self._samples) if has_sinks else None
        output, output_shape = self._split(unguarded(ops.output, self._samples), heads, value_size, _later)
        query_type, output_type = (sample.probe.elem_type(t.name) or elem_type(key.past) or 0 for t in (query, output))
        product, after = (sample.probe.elem_type(t.name) or elem_type(t) for t in (ops.query, ops.output))
        softmax = after if ops.product is None else sample.probe.elem_type(ops.node.outputs[0].name)
        return AttentionSite(
            name, output, query, key, ops.value, ops.scale, ops.softcap, visibility, heads, size, value_size,
            query_type, output_type, sinks,
            wide=product in _WIDE or {product, elem_type(key.past)} == _HALVES,
            wide_weights=not {softmax, after}.isdisjoint(_WIDE),
            query_is_flat=query_shape is not None, output_shape=output_shape,
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
        cache: gs.Tensor | None = None
        other: gs.Tensor | None = tensor
        while other is not None:
            shapes = [sample.probe.shape(other.name) for sample in self._samples.few]
            if shapes == [(sample.batch, heads, sample.length, size) for sample in self._samples.few]:
                cache = other
                if step is _later:
                    break
            other = step(other)
        if cache is not None:
            return cache, None
        shapes = [sample.probe.shape(tensor.name) for sample in self._samples.few]
        if shapes[0] is None or shapes[1] is None or len(shapes[0]) != len(shapes[1]):
            raise UnsupportedModelError(
                f"nothing says the shape of '{tensor.name}', which attention reads or makes; supported are shapes that "
                "follow from those of the inputs; export the model again"
            )
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


def smallest(samples: Samples) -> Sample:
    """The step that costs least to evaluate, of several sequences if there is one."""
    return min(samples.plain, key=lambda s: (s.batch < 2, s.total * s.batch))


def _read(write: Write) -> tuple[gs.Tensor, ...]:
    """The tensors of a cache that attention may read: not a present that is cut to less than that."""
    return (write.present, *write.aliases) if write.kept is None or write.shifted else write.aliases


def _earlier(tensor: gs.Tensor) -> gs.Tensor | None:
    """The input of the Reshape that makes a tensor; None: none does."""
    node = producer(tensor)
    return node.inputs[0] if node is not None and is_op(node, "Reshape", "Squeeze", "Unsqueeze") else None


def _later(tensor: gs.Tensor) -> gs.Tensor | None:
    """The output of the Reshape that alone reads a tensor; None: there is none."""
    readers = consumers(tensor)
    return readers[0].outputs[0] if len(readers) == 1 and is_op(readers[0], "Reshape", "Squeeze", "Unsqueeze") else None


def unguarded(output: gs.Tensor, samples: Samples) -> gs.Tensor:
    """The output of an attention after its guard for queries that see no key; `output` itself if there is none.

    PyTorch's exporter writes ``Where(ReduceSum(mask visible) < 1, 0, attention)``: its attention gives zero there.
    """
    readers = consumers(output)
    if len(readers) != 1 or not is_op(readers[0], "Where") or readers[0].inputs[2] is not output:
        return output
    zeros = samples.plain[0].probe.value(readers[0].inputs[1].name)
    return output if zeros is None or zeros.any() else readers[0].outputs[0]

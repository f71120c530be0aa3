"""Find attention over caches, decomposed or as an Attention node.

    K ── repeat_kv, Transpose, Mul ─┐
    Q ──────────────────────────── MatMul ── Mul, softcap, Add(mask) ── Softmax ── MatMul ── output
    V ── repeat_kv ───────────────────────────────────────────────────────────────┘

becomes ``Attention(Q, present K, present V, ...)``, which reads each cache once. What lies between a cache and its
MatMul is read by `cache_reads`. Beside the scores may stand sinks: see `sinks`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_graphsurgeon as gs

from trt_kvcache.errors import UnsupportedModelError
from trt_kvcache.importer.graph import consumers, contains, input_or_none, is_op, producer
from trt_kvcache.importer.interface.exported import Interface
from trt_kvcache.importer.normalize.attention.cache_reads import CacheReads, elem_type_of, smallest
from trt_kvcache.importer.normalize.attention.guards import unguarded
from trt_kvcache.importer.normalize.attention.mask_values import MaskKind, MaskUse, is_low
from trt_kvcache.importer.normalize.attention.masks import check_bias, classify
from trt_kvcache.importer.normalize.attention.merged_heads import after_reshapes, before_reshapes, before_spread
from trt_kvcache.importer.normalize.attention.rounded import masked_already, read_pair
from trt_kvcache.importer.normalize.attention.sinks import Sinks, drops_sink, joined, peeled, read_sinks
from trt_kvcache.importer.normalize.evidence.samples import Sample, Samples
from trt_kvcache.importer.normalize.findings import Core, Write
from trt_kvcache.importer.normalize.views import is_float_cast
from trt_kvcache.importer.planning.rounding import Rounding

Array = npt.NDArray[Any]


@dataclass
class _Scores:
    """What lies between the first MatMul and the softmax."""

    matmul: gs.Node
    scale: float
    softcap: float
    masks: list[MaskUse]
    column: gs.Tensor | None = None  # of sinks, beside the scores
    rounding: Rounding | None = None  # of scores that are not masked or capped yet,
    before: float = 1.0  # and what scales them before it
    rounded_weights: Rounding | None = None


def find_cores(graph: gs.Graph, writes: Sequence[Write], interface: Interface, samples: Samples) -> tuple[Core, ...]:
    """Find every attention over the caches, in graph order.

    Raises:
        UnsupportedModelError: an attention over a cache is not what is supported; see `masks.classify` too.
    """
    finder = _Finder(graph, writes, interface, samples)
    cores: list[Core] = []
    for node in graph.nodes:
        if is_op(node, "Softmax"):
            core = finder.decomposed(node)
        elif is_op(node, "Attention") and input_or_none(node, 4) is None and input_or_none(node, 5) is None:
            core = finder.fused(node)
        else:
            continue
        if core is not None:
            cores.append(core)
    return tuple(cores)


class _Finder:
    def __init__(self, graph: gs.Graph, writes: Sequence[Write], interface: Interface, samples: Samples) -> None:
        self._graph = graph
        self._interface = interface
        self._samples = samples
        self._small = smallest(samples)
        self._caches = CacheReads(writes, samples)

    def decomposed(self, softmax: gs.Node) -> Core | None:
        """The attention around a Softmax, or None if no cache takes part."""
        scores = self._beside_sinks(softmax)
        if scores is None:
            return None
        key = self._caches.behind(scores.matmul.inputs[1])
        query = scores.matmul.inputs[0]
        assert key is not None
        if scores.softcap < 0:  # nothing scales what Tanh gives
            scores.softcap = 1.0
        if not _last_axis(softmax, self._small):
            raise UnsupportedModelError(
                f"'{softmax.name}' over the scores of cache '{key.past.name}' is not over the keys"
            )
        product = self._product(softmax.outputs[0], scores, sinks=scores.column is not None)
        value = self._caches.behind(product.inputs[1]) if product is not None else None
        if (product is None or value is None) and scores.column is not None:
            raise UnsupportedModelError(
                f"'{softmax.name}' is over the scores of cache '{key.past.name}' and '{scores.column.name}' beside "
                "them, and what it makes of them does not go without its last column to one MatMul with a cache of "
                "values; supported are sinks: a last column that is dropped behind the softmax"
            )
        if product is None or value is None:
            raise UnsupportedModelError(
                f"the probabilities of '{softmax.name}', made of cache '{key.past.name}', do not go to one MatMul with "
                "a cache of values; supported is MatMul, Softmax, MatMul over a pair of caches"
            )
        keys, values, output = scores.matmul.inputs[1], product.inputs[1], product.outputs[0]
        name = softmax.name
        return self._core(name, keys, values, query, output, key, value, scores, transposed=True, is_causal=False)

    def _beside_sinks(self, softmax: gs.Node) -> _Scores | None:
        """The scores that a softmax is over, with the sinks beside them."""
        join = joined(softmax.inputs[0], self._samples)
        if join is None:
            return self._scores(peeled(softmax.inputs[0], self._samples))
        scores = self._scores(join.inputs[0])
        if scores is not None:
            scores.column = join.inputs[1]
        elif (other := self._scores(join.inputs[1])) is not None:
            raise UnsupportedModelError(
                f"'{join.inputs[0].name}' stands before the scores of '{other.matmul.name}' in '{softmax.name}'; "
                "supported are sinks behind them, as the last column"
            )
        return scores

    def fused(self, node: gs.Node) -> Core | None:
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
        size = (self._small.probe.shape(node.inputs[0].name) or (1,))[-1]  # `_core` refuses queries without a shape
        scale = float(node.attrs.get("scale", size**-0.5))
        mask = input_or_none(node, 3)
        scores = _Scores(node, scale, float(node.attrs.get("softcap", 0.0)), [])
        if mask is not None:
            scores.masks.append(MaskUse(mask, MaskKind.ADDED))
        query, keys, values = node.inputs[:3]
        output, causal = node.outputs[0], bool(node.attrs.get("is_causal", 0))
        return self._core(
            node.name, keys, values, query, output, key, value, scores, transposed=False, is_causal=causal
        )

    def _core(
        self,
        name: str,
        keys: gs.Tensor,
        values: gs.Tensor,
        query: gs.Tensor,
        output: gs.Tensor,
        key: Write,
        value: Write,
        scores: _Scores,
        *,
        transposed: bool,
        is_causal: bool,
    ) -> Core:
        query = before_reshapes(query, self._samples)
        shape = self._small.probe.shape(query.name)
        if shape is None or len(shape) != 4:
            raise UnsupportedModelError(
                f"the query '{query.name}' of '{name}' has the shape {list(shape or ())}; supported is [B, heads, "
                "S, head size]"
            )
        self._check_queries(name, query)
        read = self._caches.read(name, keys, key, shape[1], transposed=transposed)
        read_values = self._caches.read(name, values, value, shape[1], transposed=False)
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
        sinks: Sinks | None = None
        if scores.column is not None:
            sinks = read_sinks(name, scores.column, shape[1], self._samples)
        if abs(read_values.scale - 1) > 1e-6:
            raise UnsupportedModelError(
                f"the values of '{name}' are scaled by {read_values.scale}; supported are values as they are"
            )
        rounding, scale = scores.rounding, scores.scale * read.scale
        if rounding is not None:
            rounding, scale = replace(rounding, factor=scores.scale), scores.before * read.scale
        graph, interface, samples = self._graph, self._interface, self._samples
        beside = scores.column is not None
        visibility = classify(
            name, scores.masks, is_causal, graph, interface, samples, key, sinks=beside, in_use=read.in_use
        )
        check_bias(name, visibility)
        output = unguarded(output, visibility, self._samples)
        sizes = self._small.probe.shape(output.name)
        if sizes is None or len(sizes) != 4:
            raise UnsupportedModelError(f"the shape of '{output.name}', the result of attention '{name}', is unknown")
        query_type, output_type = (
            self._small.probe.elem_type(t.name) or elem_type_of(key.past) for t in (query, output)
        )
        return Core(name, output, query, key, value, scale, scores.softcap, visibility,
                    shape[1], shape[3], sizes[3], query_type, output_type, sinks, rounding,
                    scores.rounded_weights, read.turns)  # fmt: skip

    def _check_queries(self, name: str, query: gs.Tensor) -> None:
        """Refuse queries that are not one for each new token of each sequence."""
        shape, sample = self._small.probe.shape(query.name), self._small
        if shape is not None and (shape[0], shape[2]) != (sample.batch, sample.length):
            raise UnsupportedModelError(
                f"the query '{query.name}' of '{name}' has the shape {list(shape)} in a step of {sample.length} "
                f"tokens of {sample.batch} sequences; supported is [B, heads, S, head size]: split queries into "
                "[B, key heads, group, S, head size] where several heads share one of keys"
            )

    def _scores(self, tensor: gs.Tensor) -> _Scores | None:
        """Walk back from the softmax to the MatMul of queries and keys; None if there is none over a cache."""
        node = producer(tensor)
        if node is None:
            return None
        if is_op(node, "MatMul"):
            return _Scores(node, 1.0, 0.0, []) if self._caches.behind(node.inputs[1]) is not None else None
        if is_op(node, "Identity") or is_float_cast(node):
            return self._scores(node.inputs[0])
        if is_op(node, "Reshape"):
            before = before_reshapes(tensor, self._samples)
            return None if before is tensor else self._scores(before)
        if is_op(node, "Mul", "Div"):
            return self._scaled(node)
        if is_op(node, "DequantizeLinear"):
            return self._rounded(node)
        if is_op(node, "Tanh"):
            if (scores := self._scores(node.inputs[0])) is not None:
                if scores.masks or scores.softcap:
                    raise UnsupportedModelError(f"'{node.name}' caps scores that are masked or capped already")
                scores.softcap = -1.0  # the cap is the factor that follows
            return scores
        if is_op(node, "Add"):
            return self._masked(node.inputs[0], node.inputs[1], MaskKind.ADDED) or self._masked(
                node.inputs[1], node.inputs[0], MaskKind.ADDED
            )
        if is_op(node, "Where"):
            condition, yes, no = node.inputs
            for lowest, seen, kind in ((no, yes, MaskKind.VISIBLE), (yes, no, MaskKind.HIDDEN)):
                low = self._small.probe.value(lowest.name)
                if is_low(low) and (scores := self._masked(seen, condition, kind)) is not None:
                    scores.masks[-1] = replace(scores.masks[-1], lowest=_largest(low))
                    return scores
        if is_op(node, "Max") and len(node.inputs) == 2:
            floor = self._small.probe.value(node.inputs[1].name)
            scores = self._scores(node.inputs[0]) if is_low(floor) else None
            if scores is not None:
                scores.masks = [replace(use, lowest=max(use.lowest, _largest(floor))) for use in scores.masks]
            return scores
        return None

    def _rounded(self, node: gs.Node) -> _Scores | None:
        pair = read_pair(node, "scores")
        scores = self._scores(pair[0]) if pair is not None else None
        if pair is None or scores is None:
            return None
        if scores.masks:
            raise masked_already(node)
        if scores.softcap or scores.rounding is not None:
            what = "capped" if scores.softcap else "rounded"
            raise UnsupportedModelError(f"'{node.name}' rounds scores that are {what} already")
        scores.before, scores.scale, scores.rounding = scores.scale, 1.0, pair[1]
        return scores

    def _masked(self, scores: gs.Tensor, mask: gs.Tensor, kind: MaskKind) -> _Scores | None:
        found = self._scores(scores)
        if found is not None:
            found.masks.append(MaskUse(before_spread(mask, self._samples), kind))
        return found

    def _scaled(self, node: gs.Node) -> _Scores | None:
        pair = self._caches.factor(node)
        scores = self._scores(pair[0]) if pair is not None else None
        if pair is None or scores is None:
            return None
        if pair[1] <= 0:
            raise UnsupportedModelError(f"'{node.name}' scales scores by {pair[1]:g}; supported are factors above 0")
        if scores.softcap < 0:  # cap * tanh(scores * factor) is softcap(scores * factor * cap)
            scores.softcap = pair[1]
        elif scores.softcap:
            raise UnsupportedModelError(f"'{node.name}' scales scores that are capped already")
        scores.masks = [replace(use, factor=use.factor * pair[1]) for use in scores.masks]
        scores.scale *= pair[1]
        return scores

    def _product(self, probabilities: gs.Tensor, scores: _Scores, *, sinks: bool) -> gs.Node | None:
        """The MatMul that the probabilities go to, without that of the sinks if there are `sinks`.

        Rounding is added to `scores`.
        """
        tensor = probabilities
        for _ in range(8):
            readers = [n for n in consumers(tensor) if not is_op(n, "Shape") and not _asks_for_nan(n)]
            if len(readers) != 1:
                return None
            node = readers[0]
            if is_op(node, "MatMul") and node.inputs[0] is tensor:
                return None if sinks else node
            if sinks and is_op(node, "Slice") and node.inputs[0] is tensor and drops_sink(node, self._samples):
                sinks, tensor = False, node.outputs[0]
                continue
            if is_op(node, "Reshape"):
                before, tensor = tensor, after_reshapes(tensor, self._samples)
                if tensor is before:
                    return None
                continue
            if is_op(node, "QuantizeLinear") and len(consumers(node.outputs[0])) == 1:
                pair = read_pair(behind := consumers(node.outputs[0])[0], "what the softmax makes of scores")
                if pair is None or scores.rounded_weights is not None:
                    return None
                scores.rounded_weights, tensor = pair[1], behind.outputs[0]
                continue
            guarded = is_op(node, "Where") and node.inputs[2] is tensor and _is_nan_of(node.inputs[0], tensor)
            if not guarded and not is_op(node, "Identity", "Dropout") and not is_float_cast(node):
                return None
            tensor = node.outputs[0]
        return None


def _largest(low: Array | None) -> float:
    return -np.inf if low is None else float(low.max())


def _is_nan_of(condition: gs.Tensor, tensor: gs.Tensor) -> bool:
    node = producer(condition)
    return node is not None and is_op(node, "IsNaN") and _before_casts(node.inputs[0]) is _before_casts(tensor)


def _asks_for_nan(node: gs.Node) -> bool:
    """Whether all that becomes of what a node reads is whether it is NaN, which it is in every type."""
    if is_float_cast(node) and consumers(node.outputs[0]):
        return all(_asks_for_nan(reader) for reader in consumers(node.outputs[0]))
    return is_op(node, "IsNaN")


def _before_casts(tensor: gs.Tensor) -> gs.Tensor:
    while (node := producer(tensor)) is not None and is_float_cast(node):
        tensor = node.inputs[0]
    return tensor


def _last_axis(softmax: gs.Node, sample: Sample) -> bool:
    axis = int(softmax.attrs.get("axis", -1))
    shape = sample.probe.shape(softmax.inputs[0].name)
    return axis == -1 or (shape is not None and axis == len(shape) - 1)

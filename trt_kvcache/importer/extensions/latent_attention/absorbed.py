"""Attention over latents, instead of over the keys and values that weights make of them for each head.

    q (c W)^T  =  (q W^T) c^T                  p (c W)  =  (p c) W

    Q [B, N, S, D] -- Slice -- MatMul(W^T [N, D1, R]) -- Concat [B, N, S, R + D2]
    latents [B, 1, L, R], rotated [B, 1, L, D2] -------- Concat [B, 1, L, R + D2]
    Attention(those queries, those keys, latents) [B, N, S, R] -- MatMul(W [N, R, Dv]) -- output

The sums are the same in another order. One head of keys and values is left, and no row of a cache is multiplied with a
weight: N * (2 R + D2) multiplications for each token and row in use, where keys and values take R * N * (D1 + Dv) for
each row and N * (D + Dv) for each token and row. That is for steps of few tokens: both take the same for
R * (D1 + Dv) / (2 R - D1 - Dv) of them, 170 in DeepSeek V3.

The columns of weights are not matched to heads, but read off numbers: results of the MatMul are numbered, and the keys
show where each number goes.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import prod

import numpy as np
import onnx_graphsurgeon as gs

from trt_kvcache.errors import UnsupportedModelError
from trt_kvcache.importer.extensions.latent_attention.computed import Computed
from trt_kvcache.importer.extensions.latent_attention.rows import RowFunction
from trt_kvcache.importer.graph import FLOAT, INT64, Emitter, dtype_name, elem_type, is_op, producer
from trt_kvcache.importer.normalize.attention.search import smallest
from trt_kvcache.importer.normalize.canonical import Canonical
from trt_kvcache.importer.normalize.evidence.probe import Array
from trt_kvcache.importer.normalize.evidence.samples import Sample, Samples
from trt_kvcache.importer.normalize.findings import AttentionSite, Write
from trt_kvcache.importer.normalize.views import is_float_cast
from trt_kvcache.importer.operators import MOVES, VIEWS

_JOINS = ("Concat", "Split")


@dataclass(frozen=True, eq=False)
class _Weight:
    """A weight ``[R, columns]`` in which each head has columns of its own.

    Attributes:
        heads, rows, columns: N, R, and all columns.
        first, step: head n has those from ``first + n * step`` on.
        start, count: of the columns of a head those that count.
    """

    tensor: gs.Tensor
    heads: int
    rows: int
    columns: int
    first: int
    step: int
    start: int
    count: int

    def multiply(self, tensor: gs.Tensor, kind: int, emit: Emitter, *, transposed: bool) -> gs.Variable:
        """``[B, N, S, R]`` times the weight, ``[B, N, S, count]``; `transposed`: the other way round.

        One product for each head, over the rows of all sequences: where the batch is an axis beside the heads, TensorRT
        for RTX 1.7.1 copies the weight for each sequence in each step.
        """
        size, width = (self.count, self.rows) if transposed else (self.rows, self.count)
        heads = emit.op("Transpose", [tensor], "heads_first", kind, perm=[1, 0, 2, 3])
        rows = emit.op("Reshape", [heads, emit.ints([0, -1, size])], "head_rows", kind)
        product = emit.op("MatMul", [rows, self._emit(emit, transposed=transposed)], "per_head", kind)
        sizes = emit.op("Shape", [heads], "head_sizes", INT64, start=0, end=3)
        whole = emit.op("Concat", [sizes, emit.ints([width])], "head_sizes", INT64, axis=0)
        by_head = emit.op("Reshape", [product, whole], "per_head", kind)
        return emit.op("Transpose", [by_head], "per_head", kind, perm=[1, 0, 2, 3])

    def _emit(self, emit: Emitter, *, transposed: bool) -> gs.Tensor:
        """As ``[N, R, count]``, or `transposed` as ``[N, count, R]``."""
        tensor = emit.op("Reshape", [self.tensor, emit.ints([self.rows, self.columns])], "weight")
        tensor = _some(emit, tensor, 1, self.first, self.heads * self.step, self.columns)
        tensor = emit.op("Reshape", [tensor, emit.ints([self.rows, self.heads, self.step])], "weight")
        tensor = _some(emit, tensor, 2, self.start, self.count, self.step)
        return emit.op("Transpose", [tensor], "weight", perm=[1, 2, 0] if transposed else [1, 0, 2])


@dataclass(frozen=True, eq=False)
class _Part:
    """Columns of the keys or values of all heads, and their source.

    Attributes:
        source: the same for all heads; its rows are multiplied with `weight`, if there is one.
        first, count: the columns of it that count; all where there is a weight.
        start, size: the columns of keys or values.
    """

    source: RowFunction
    first: int
    count: int
    start: int
    size: int
    weight: _Weight | None


@dataclass(frozen=True, eq=False)
class Absorbed:
    """One attention over computed keys and values, as one over the latents that these are computed from."""

    keys: tuple[_Part, ...]
    value: _Part
    sample: Sample

    def place(self, site: AttentionSite, computed: Computed, canonical: Canonical) -> AttentionSite:
        """Put the nodes around an attention into the graph; returns the attention over latents."""
        emit = canonical.emit
        key_type, value_type = (elem_type(w.present) or 0 for w in (site.key, site.value))
        if site.wide and key_type != FLOAT:
            raise UnsupportedModelError(
                f"attention '{site.node}' multiplies in float32, and its keys and values are computed from latents in "
                f"{dtype_name(site.key.present)}; over latents one type is supported: keep both (--latent-attention "
                "expanded), or export the attention in the type of the cache"
            )
        emitted: dict[str, gs.Tensor] = {}
        rows = [self._row(part, computed, emitted, canonical) for part in self.keys]
        values = self._row(self.value, computed, emitted, canonical)
        keys = rows[0] if len(rows) == 1 else emit.op("Concat", rows, "latent_keys", key_type, axis=3)
        query = self._query(site, key_type, emit)
        size, value_size = sum(part.count for part in self.keys), self.value.count
        for tensor, kind, width in ((keys, key_type, size), (values, value_type, value_size)):
            canonical.known[tensor.name] = (kind, (canonical.batch, 1, canonical.capacity, width))
        inner = replace(
            site,
            query=query,
            key=replace(site.key, past=keys, present=keys, axis=2),
            value=replace(site.value, past=values, present=values, axis=2),
            head_size=size,
            value_size=value_size,
            query_type=key_type,
        )
        if self.value.weight is None:
            return inner
        output = gs.Variable(emit.name("over_latents"), dtype=value_type)
        result = self.value.weight.multiply(output, value_type, emit, transposed=False)
        if value_type != site.output_type:
            result = emit.op("Cast", [result], "values", site.output_type, to=site.output_type)
        site.output.inputs.clear()
        result.inputs[0].outputs = [site.output]
        return replace(inner, output=output, output_type=value_type)

    def _query(self, site: AttentionSite, kind: int, emit: Emitter) -> gs.Tensor:
        query = site.query
        if site.query_type != kind:
            query = emit.op("Cast", [query], "query", kind, to=kind)
        parts: list[gs.Tensor] = []
        for part in self.keys:
            some = _some(emit, query, 3, part.start, part.size, site.head_size)
            if part.weight is not None:
                some = part.weight.multiply(some, kind, emit, transposed=True)
            parts.append(some)
        return parts[0] if len(parts) == 1 else emit.op("Concat", parts, "latent_queries", kind, axis=3)

    def _row(self, part: _Part, computed: Computed, emitted: dict[str, gs.Tensor], canonical: Canonical) -> gs.Tensor:
        """The source of a part, as one head ``[B, 1, rows, count]``."""
        emit, function = canonical.emit, part.source
        name = str(function.tensor.name)
        tensor = computed.emit(name, emitted, canonical)
        shape = self.sample.probe.shape(name) or ()
        width = _features(shape, function)
        if len(shape) != 4 or function.axes != (0, 2) or shape[1] != 1:
            if (alone := f"{name} as one head") not in emitted:
                emitted[alone] = emit.op("Reshape", [tensor, emit.ints([0, 1, -1, width])], "row", tensor.dtype)
            tensor = emitted[alone]
        return _some(emit, tensor, 3, part.first, part.count, width)

    @property
    def balance(self) -> int | None:
        """The most tokens of a step that cost no more multiplications than with keys and values; None: any number."""
        parts = (*self.keys, self.value)
        expansion = sum(part.weight.rows * part.size for part in parts if part.weight is not None)
        more = sum(part.count - part.size for part in parts)
        return expansion // more if more > 0 else None


def note(absorbed: Collection[Absorbed]) -> tuple[str, ...]:
    """A note on attentions whose queries go to latents; nothing where there are none."""
    balances = [item.balance for item in absorbed if item.balance is not None]
    if not absorbed:
        return ()
    text = "queries go to the latents in the caches, and no keys and values are made of those"
    if balances:
        text += (
            f"; in steps of more than {min(balances)} tokens, keys and values would take fewer multiplications "
            "(--latent-attention expanded)"
        )
    return (text,)


def find_absorbed(sites: Sequence[AttentionSite], computed: Computed, samples: Samples) -> dict[str, Absorbed]:
    """The attentions, by name, whose queries may go to what their keys and values are computed from.

    Nothing is refused: others stay as they are.
    """
    sample = smallest(samples)
    finder = _Finder(computed, sample)
    absorbed: dict[str, Absorbed] = {}
    for site in sites:
        if site.heads < 2 or not {site.key.present.name, site.value.present.name} & computed.heads.keys():
            continue
        keys = finder.parts(site.key, site.heads, site.head_size)
        values = finder.parts(site.value, site.heads, site.value_size)
        if keys and len(values) == 1 and any(part.weight is not None for part in keys + values):
            absorbed[site.node] = Absorbed(keys, values[0], sample)
    return absorbed


class _Finder:
    def __init__(self, computed: Computed, sample: Sample) -> None:
        self._functions = computed.functions
        self._sample = sample

    def parts(self, write: Write, heads: int, size: int) -> tuple[_Part, ...]:
        """The parts of all columns of keys or values, in order; none where that is not supported."""
        name = str(write.present.name)
        places = self._places(name, size)
        if places is None or len(places[1]) not in (1, heads):
            return ()
        leaves, numbers = places
        numbers = np.broadcast_to(numbers, (heads, size, 2))
        whose = numbers[0, :, 0]
        bounds = [0, *(np.flatnonzero(np.diff(whose)) + 1), size]
        parts: list[_Part] = []
        for start, end in pairwise(bounds):
            part = self._part(leaves[whose[start]], numbers[:, start:end], int(start))
            if (numbers[:, start:end, 0] != whose[start]).any() or part is None:
                return ()
            parts.append(part)
        return tuple(parts)

    def _places(self, name: str, size: int) -> tuple[list[RowFunction], Array] | None:
        """Tensors that ``[B, N, T, D]`` is moved from, and for each ``[N, D]`` which of those, and which column."""
        leaves = self._leaves(name)
        if leaves is None:
            return None
        shape = self._sample.probe.shape(name)
        if shape is None or len(shape) != 4 or shape[3] != size:
            return None
        rows = shape[0] * shape[2]
        feeds: dict[str, Array] = {}
        owners: list[Array] = []
        begin = 0
        for index, leaf in enumerate(leaves):
            whole = self._sample.probe.shape(leaf.tensor.name)
            if whole is None or (whole[leaf.axes[0]], whole[leaf.axes[1]]) != (shape[0], shape[2]):
                return None
            width = _features(whole, leaf)
            numbers = (begin + np.arange(width)) * rows + np.arange(rows).reshape(shape[0], shape[2], 1)
            others = [d for axis, d in enumerate(whole) if axis not in leaf.axes]
            feeds[leaf.tensor.name] = np.moveaxis(numbers.reshape(shape[0], shape[2], *others), (0, 1), leaf.axes)
            owners.append(np.stack([np.full(width, index), np.arange(width)], axis=1))
            begin += width
        moved = self._sample.probe.with_values(feeds).value(name)
        if moved is None or moved.shape != shape:
            return None
        columns, row = np.divmod(moved, rows)
        if (row != np.arange(rows).reshape(shape[0], 1, shape[2], 1)).any() or (columns != columns[:1, :, :1]).any():
            return None
        return leaves, np.concatenate(owners)[columns[0, :, 0]]

    def _leaves(self, name: str) -> list[RowFunction] | None:
        """The row functions that a tensor is put together of, as they are."""
        leaves: dict[str, RowFunction] = {}
        pending, seen = [name], set[str]()
        while pending:
            function = self._functions.known.get(current := pending.pop())
            if function is None:
                return None
            if current in seen:
                continue
            seen.add(current)
            if function.node is not None and is_op(function.node, *MOVES, *_JOINS):
                pending += [t.name for t in function.node.inputs if t.name in self._functions.known]
            else:
                leaves[current] = function
        return list(leaves.values())

    def _part(self, leaf: RowFunction, numbers: Array, start: int) -> _Part | None:
        """The part of columns from `start` on, which are moved from `leaf`.

        `numbers` ``[N, size, 2]`` say for each head the tensor and the column that each of them is.
        """
        columns = numbers[..., 1]
        heads, size = columns.shape
        first, step = int(columns[0, 0]), int(columns[1, 0] - columns[0, 0])
        if (columns != first + step * np.arange(heads)[:, None] + np.arange(size)).any() or step < 0:
            return None
        if step == 0:
            return _Part(leaf, first, size, start, size, None) if self._is_flat(leaf) else None
        node = leaf.node
        if node is None or not is_op(node, "MatMul"):
            return None
        source = self._functions.known.get(node.inputs[0].name)
        shape = self._sample.probe.shape(node.inputs[1].name)
        if source is None or not self._is_flat(source) or shape is None or not _is_weight(node.inputs[1]):
            return None
        rows, width = shape[-2:]
        begin = min(first, width - heads * step)
        if prod(shape[:-2]) != 1 or begin < 0 or first - begin + size > step:
            return None
        weight = _Weight(node.inputs[1], heads, rows, width, begin, step, first - begin, size)
        return _Part(source, 0, rows, start, size, weight)

    def _is_flat(self, function: RowFunction) -> bool:
        """True if a row is one axis, the last one, so that a Reshape makes one head of it."""
        shape = self._sample.probe.shape(function.tensor.name) or ()
        return function.axes[0] == 0 and len(shape) - 1 not in function.axes and _features(shape, function) == shape[-1]


def _features(shape: Sequence[int], function: RowFunction) -> int:
    return prod(d for axis, d in enumerate(shape) if axis not in function.axes)


def _is_weight(tensor: gs.Tensor) -> bool:
    """True for a weight, as it is or arranged otherwise: one of few bits stays with its MatMul."""
    while not isinstance(tensor, gs.Constant):
        node = producer(tensor)
        if node is None or not (is_op(node, *VIEWS) or is_float_cast(node)):
            return node is not None and is_op(node, "Constant")
        tensor = node.inputs[0]
    return True


def _some(emit: Emitter, tensor: gs.Tensor, axis: int, start: int, count: int, whole: int) -> gs.Tensor:
    """So many numbers of an axis from `start` on, of the `whole`."""
    if count == whole:
        return tensor
    return emit.op("Slice", [tensor, *(emit.ints([n]) for n in (start, start + count, axis))], "some")

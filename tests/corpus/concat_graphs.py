"""Decoders whose caches grow by Concat and whose attention is in pieces, in the ways that exporters write them.

Every part may be replaced by a function of the graph under construction, for decoders that only look like one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
from graphs import Dim, Graph
from onnx import TensorProto

from corpus import Entry, built

VOCABULARY = 32
Rows = Dim | list[Dim]
TYPES = {np.float32: TensorProto.FLOAT, np.float16: TensorProto.FLOAT16}


@dataclass(frozen=True)
class Decoder:
    """The form of a decoder.

    Attributes:
        scale: where the scores are scaled: "scores", "q", "k", "both" or "none", and by which operator.
        mask: what the mask is made of: "past" (lengths of the past), "padding" (these and the padding mask),
            "positions", "buffer" (GPT-2's), "own" (an input), "none", or a function that gives a bool ``[., ., S, T]``.
        apply: how the mask meets the scores: "add", "where" or "hide".
        repeat: how key heads are repeated: "expand", "tile", "gather" or "none".
        layout: of the caches: the order of their axes, such as "bsnd", or "flat"; or of those of keys and of values.
        positions: where they come from: "input", "past", "padding", "present" or "none", or a function that makes them.
        sinks: what stands beside the scores: "" nothing, "weight" a logit per head, "zero" a constant.
        scores, masked, weights, keys, values: change a tensor on its way, in every layer: scores before and after the
            mask, what the softmax makes of them, repeated keys and values.
        after: changes the hidden states at the end of the model.
        attend: attention over queries, keys and values that is written in another way.
        write: writes new rows to a cache, in its layout; returns what attention reads, in that of `Build.laid`.
        rows: those of the past and of the present of a layer's keys or values; or the whole shape of a present.
    """

    heads: int = 4
    kv_heads: int = 2
    size: int = 4
    layers: int = 1
    dtype: Any = np.float32
    scale: str = "scores"
    by: str = "Mul"
    softcap: float = 0.0
    mask: str | Callable[[Build], str] = "past"
    apply: str = "add"
    lowest: float = float(np.finfo(np.float16).min)
    window: int = 0
    upcast: bool = False
    guard: bool = False
    sinks: str = ""
    repeat: str = "expand"
    layout: str | tuple[str, str] = "bnsd"
    positions: str | Callable[[Build], str] = "input"
    own_type: Any = np.bool_
    batch: Dim = "batch"
    sequence: Dim = "sequence"
    total: Dim = "total"
    embedded: bool = False
    last: bool = False
    names: tuple[str, str] = ("past_key_values.{layer}.{kind}", "present.{layer}.{kind}")
    opset: int = 18
    capacity: int = 24
    scores: Callable[[Build, str], str] = field(default=lambda build, tensor: tensor)
    masked: Callable[[Build, str], str] = field(default=lambda build, tensor: tensor)
    weights: Callable[[Build, str], str] = field(default=lambda build, tensor: tensor)
    keys: Callable[[Build, str], str] = field(default=lambda build, tensor: tensor)
    values: Callable[[Build, str], str] = field(default=lambda build, tensor: tensor)
    after: Callable[[Build, str], str] = field(default=lambda build, tensor: tensor)
    attend: Callable[[Build, str, str, str], str] = field(default=lambda *operands: _attend(*operands))
    write: Callable[[Build, str, str, str], str] = field(default=lambda *names: joined(*names))
    rows: Callable[[int, str], tuple[Dim, Rows]] | None = None


class Build(Graph):
    """A decoder under construction: the tensors that its parts share, each made once."""

    def __init__(self, decoder: Decoder) -> None:
        super().__init__()
        self.decoder = decoder
        self.tokens = ""
        self.pasts: list[str] = []
        self.presents: list[str] = []
        self.read: list[str] = []
        self.laid: dict[str, str] = {}
        self.layer = self.part = 0
        self._made: dict[str, str] = {}
        self._rng = np.random.default_rng(11)

    def once(self, what: str, make: Callable[[], str]) -> str:
        if what not in self._made:
            self._made[what] = make()
        return self._made[what]

    def number(self, value: float) -> str:
        return self.constant(value, np.float32 if self.decoder.upcast else self.decoder.dtype)

    def weight(self, *shape: int) -> str:
        return self.constant(self._rng.standard_normal(shape) / np.sqrt(shape[0]), self.decoder.dtype)

    def size_of(self, tensor: str, axis: int) -> str:
        return self.Gather(self.Shape(tensor), axis, axis=0)

    @property
    def length(self) -> str:
        return self.once("length", lambda: self.size_of(self.tokens, 1))

    @property
    def layout(self) -> str:
        """That of keys, or of values while they are written."""
        both = self.decoder.layout
        return both if isinstance(both, str) else both[self.part]

    @property
    def axis(self) -> int:
        """The rows of caches."""
        return 1 if self.layout == "flat" else self.layout.index("s")

    @property
    def past(self) -> str:
        return self.once("past", lambda: self.size_of(self.pasts[0], self.axis))

    @property
    def all(self) -> str:
        """P + S."""
        return self.once("all", lambda: self.Add(self.past, self.length))

    @property
    def key_rows(self) -> str:
        """``[T]``."""
        return self.once("rows", lambda: self.Range(self.constant(0), self.all, 1))

    @property
    def query_rows(self) -> str:
        """``[S, 1]``."""

        def make() -> str:
            rows = self.Range(self.past, self.all, 1)
            return self.Unsqueeze(rows, [1])

        return self.once("queries", make)

    @property
    def padding(self) -> str:
        """The padding mask, int64 ``[B, T]``."""
        shape = [self.decoder.batch, self.decoder.total]
        return self.once("padding", lambda: self.input("attention_mask", TensorProto.INT64, shape))

    @property
    def position_ids(self) -> str:
        shape = [self.decoder.batch, self.decoder.sequence]
        return self.once("position_ids", lambda: self.input("position_ids", TensorProto.INT64, shape))

    def causal(self) -> str:
        """Bool ``[S, T]``."""
        return self.LessOrEqual(self.key_rows, self.query_rows)

    def to_scores(self, visible: str) -> str:
        """Bool ``[S, T]`` -> ``[1, 1, S, T]``."""
        return self.Unsqueeze(visible, [0, 1])


def make_decoder(decoder: Decoder) -> onnx.ModelProto:
    g = Build(decoder)
    width = decoder.heads * decoder.size
    kind = TYPES[decoder.dtype]
    if decoder.embedded:
        x = g.tokens = g.input("inputs_embeds", kind, [decoder.batch, decoder.sequence, width])
    else:
        g.tokens = g.input("input_ids", TensorProto.INT64, [decoder.batch, decoder.sequence])
        x = g.Gather(g.weight(VOCABULARY, width), g.tokens, axis=0)
    _declare_caches(g)
    make = POSITIONS.get(decoder.positions) if isinstance(decoder.positions, str) else decoder.positions
    if make and decoder.positions != "present":
        x = g.Add(x, signal(g, make(g)))
    for g.layer in range(decoder.layers):
        x = g.Add(x, _layer(g, x))
    if make and decoder.positions == "present":
        x = g.Add(x, signal(g, make(g)))
    if decoder.last:
        x = g.Slice(x, [-1], [2**31], [1])
    x = decoder.after(g, x)
    g.MatMul(x, g.weight(width, VOCABULARY), out="logits")
    g.output("logits", kind, [decoder.batch, 1 if decoder.last else decoder.sequence, VOCABULARY])
    for index, present in enumerate(g.presents):
        g.part = index % 2
        g.output(present, kind, _shape(g, _rows(decoder, index)[1]))
    model = g.model(decoder.opset)
    onnx.checker.check_model(model, full_check=True)
    return model


def _rows(decoder: Decoder, index: int) -> tuple[Dim, Rows]:
    if decoder.rows is None:
        return "past", f"{decoder.total}_{index}"
    return decoder.rows(index // 2, ("key", "value")[index % 2])


def _shape(g: Build, length: Rows) -> list[Dim]:
    decoder = g.decoder
    if isinstance(length, list):
        return length
    dims: dict[str, Dim] = {"b": decoder.batch, "n": decoder.kv_heads, "s": length, "d": decoder.size}
    if g.layout == "flat":
        return [decoder.batch, length, decoder.kv_heads * decoder.size]
    return [dims[axis] for axis in g.layout]


def _declare_caches(g: Build) -> None:
    decoder = g.decoder
    for layer in range(decoder.layers):
        for g.part, kind in enumerate(("key", "value")):
            past, present = (n.format(layer=layer, kind=kind) for n in decoder.names)
            shape = _shape(g, _rows(decoder, len(g.pasts))[0])
            g.pasts.append(g.input(past, TYPES[decoder.dtype], shape))
            g.presents.append(present)
    g.part = 0


def signal(g: Build, positions: str, width: int = 0) -> str:
    """The part of the hidden states that positions add; `width`: of some of them."""
    width = width or g.decoder.heads * g.decoder.size
    column = g.Unsqueeze(g.Cast(positions, to=TensorProto.FLOAT), [-1])
    angles = g.Mul(column, g.constant(np.linspace(0.05, 1.5, width), np.float32))
    return g.Cast(g.Sin(angles), to=TYPES[g.decoder.dtype])


def _from_padding(g: Build) -> str:
    """The last S of the numbers of ones before each token."""
    counted = g.Sub(g.CumSum(g.padding, 1), 1)
    first = g.Unsqueeze(g.Neg(g.length), [0])
    return g.Slice(counted, first, [2**31], [1])


def _from_present(g: Build) -> str:
    layout = g.laid.get(g.read[0], g.layout)
    total = g.size_of(g.read[0], 1 if layout == "flat" else layout.index("s"))
    rows = g.Range(g.Sub(total, g.length), total, 1)
    return g.Unsqueeze(rows, [0])


POSITIONS: dict[str, Callable[[Build], str]] = {
    "input": lambda g: g.position_ids,
    "past": lambda g: g.Transpose(g.query_rows, perm=[1, 0]),
    "padding": _from_padding,
    "present": _from_present,
}


def _layer(g: Build, x: str) -> str:
    decoder = g.decoder
    width, narrow = decoder.heads * decoder.size, decoder.kv_heads * decoder.size
    query = _split(g, g.MatMul(x, g.weight(width, width)), decoder.heads)
    new = [g.MatMul(x, g.weight(width, narrow)) for _ in range(2)]
    keys, values = (_cached(g, tensor, 2 * g.layer + g.part) for g.part, tensor in enumerate(new))
    g.part = 0
    keys, values = decoder.keys(g, _repeat(g, keys)), decoder.values(g, _repeat(g, values))
    output = decoder.attend(g, query, keys, values)
    merged = g.Reshape(g.Transpose(output, perm=[0, 2, 1, 3]), [0, 0, width])
    return g.MatMul(merged, g.weight(width, width))


def _split(g: Build, tensor: str, heads: int) -> str:
    rows = g.Reshape(tensor, [0, 0, heads, g.decoder.size])
    return g.Transpose(rows, perm=[0, 2, 1, 3])


def _cached(g: Build, new: str, index: int) -> str:
    """Write to a cache; returns it as ``[B, N, T, D]``."""
    past, present, heads, layout = g.pasts[index], g.presents[index], g.decoder.kv_heads, g.layout
    flat = layout == "flat"
    rows = new if flat else turned(g, g.Reshape(new, [0, 0, heads, g.decoder.size]), "bsnd", layout)
    g.read.append(g.decoder.write(g, past, rows, present))
    return _split(g, g.read[-1], heads) if flat else turned(g, g.read[-1], g.laid.get(g.read[-1], layout), "bnsd")


def turned(g: Graph, tensor: str, layout: str, to: str) -> str:
    return tensor if layout == to else g.Transpose(tensor, perm=[layout.index(axis) for axis in to])


def joined(g: Build, past: str, new: str, present: str = "") -> str:
    return g.Concat(past, new, out=present, axis=g.axis)


def _repeat(g: Build, tensor: str) -> str:
    decoder = g.decoder
    groups = decoder.heads // decoder.kv_heads
    if decoder.repeat == "none" or groups == 1:
        return tensor
    if decoder.repeat == "gather":
        return g.Gather(tensor, np.arange(decoder.heads) // groups, axis=1)
    spread = g.Unsqueeze(tensor, [2])
    if decoder.repeat == "tile":
        spread = g.Tile(spread, [1, 1, groups, 1, 1])
    else:
        sizes = [g.Unsqueeze(g.size_of(tensor, axis), [0]) for axis in range(4)]
        shape = g.Concat(*sizes[:2], g.constant([groups]), *sizes[2:], axis=0)
        spread = g.Expand(spread, shape)
    return g.Reshape(spread, [0, decoder.heads, -1, decoder.size])


def _attend(g: Build, query: str, keys: str, values: str) -> str:
    decoder = g.decoder
    factor = decoder.size**-0.5

    def scaled(tensor: str, by: float) -> str:
        return g.node(decoder.by, [tensor, g.constant(by if decoder.by == "Mul" else 1 / by, decoder.dtype)])

    keys = g.Transpose(keys, perm=[0, 1, 3, 2])
    if decoder.scale in ("q", "both"):
        query = scaled(query, factor if decoder.scale == "q" else factor**0.5)
    if decoder.scale in ("k", "both"):
        keys = scaled(keys, factor if decoder.scale == "k" else factor**0.5)
    scores = g.MatMul(query, keys)
    if decoder.scale == "scores":
        scores = scaled(scores, factor)
    if decoder.upcast:
        scores = g.Cast(scores, to=TensorProto.FLOAT)
    if decoder.softcap:
        cap = g.number(decoder.softcap)
        scores = g.Mul(g.Tanh(g.Div(scores, cap)), cap)
    scores = decoder.masked(g, _masked(g, decoder.scores(g, scores)))
    if decoder.sinks:
        scores = beside_sinks(g, scores, sink_column(g, scores))
    weights = decoder.weights(g, g.Softmax(scores, axis=-1))
    if decoder.sinks:
        weights = without_sinks(g, weights)
    if decoder.guard:
        weights = g.Where(g.IsNaN(weights), g.number(0.0), weights)
    if decoder.upcast:
        weights = g.Cast(weights, to=TYPES[decoder.dtype])
    return g.MatMul(weights, values)


def sink_column(g: Build, scores: str) -> str:
    """``[B, H, S, 1]``."""
    heads = g.decoder.heads
    shape = [g.Unsqueeze(g.size_of(scores, axis), [0]) for axis in (0, 2)]
    rows = g.Concat(shape[0], [heads], shape[1], [1], axis=0)
    if g.decoder.sinks == "zero":
        return g.Expand(g.number(0.0), rows)
    dtype = np.float32 if g.decoder.upcast else g.decoder.dtype
    sinks = g.constant(np.linspace(-1.0, 3.0, heads), dtype)
    return g.Expand(g.Reshape(sinks, [1, -1, 1, 1]), rows)


def beside_sinks(g: Build, scores: str, column: str) -> str:
    """``[B, H, S, T + 1]``, with the largest number of each row taken off, as gpt-oss does."""
    both = g.Concat(scores, column, axis=-1)
    return g.Sub(both, g.ReduceMax(both, [-1], keepdims=1))


def without_sinks(g: Build, weights: str, start: int = 0, end: int = -1) -> str:
    return g.Slice(weights, [start], [end], [-1])


def _masked(g: Build, scores: str) -> str:
    decoder = g.decoder
    if decoder.mask == "none":
        return scores
    if decoder.mask == "own":
        shape = [decoder.batch, 1, decoder.sequence, decoder.total]
        code = onnx.helper.np_dtype_to_tensor_dtype(np.dtype(decoder.own_type))
        mask = g.once("own", lambda: g.input("mask", code, shape))
        if decoder.own_type is not np.bool_:
            return g.Add(scores, mask)
    else:
        make = MASKS[decoder.mask] if isinstance(decoder.mask, str) else decoder.mask
        mask = g.once("mask", lambda: make(g))
    lowest = g.number(decoder.lowest)
    if decoder.apply == "where":
        return g.Where(mask, scores, lowest)
    if decoder.apply == "hide":
        return g.Where(g.Not(mask), lowest, scores)
    return g.Add(scores, g.Where(mask, g.number(0.0), lowest))


def _near(g: Build, visible: str, queries: str) -> str:
    """Hide what lies before the window."""
    if not g.decoder.window:
        return visible
    first = g.Sub(queries, g.decoder.window)
    return g.And(visible, g.Greater(g.key_rows, first))


def _by_past(g: Build) -> str:
    return g.to_scores(_near(g, g.causal(), g.query_rows))


def _by_padding(g: Build) -> str:
    shown = g.Cast(g.padding, to=TensorProto.BOOL)
    return g.And(_by_past(g), g.Unsqueeze(shown, [1, 2]))


def _by_positions(g: Build) -> str:
    queries = g.Unsqueeze(g.position_ids, [1, 3])
    return _near(g, g.LessOrEqual(g.key_rows, queries), queries)


def _by_buffer(g: Build) -> str:
    """GPT-2: rows P to P + S and columns to P + S of a lower triangle."""
    length = g.decoder.capacity + 8
    triangle = g.constant(np.tril(np.ones((1, 1, length, length))), np.bool_)
    past, total = (g.Unsqueeze(n, [0]) for n in (g.past, g.all))
    rows = g.Slice(triangle, past, total, [2])
    return g.Slice(rows, [0], total, [3])


MASKS: dict[str, Callable[[Build], str]] = {
    "past": _by_past,
    "padding": _by_padding,
    "positions": _by_positions,
    "buffer": _by_buffer,
}


def entries() -> Iterator[Entry]:
    """Each choice by itself; promises/test_combinations.py combines them."""
    forms: dict[str, dict[str, Any]] = {"plain": {}, "upcast": {"dtype": np.float16, "upcast": True}}
    choices: dict[str, tuple[Any, ...]] = {
        "scale": ("both",), "softcap": (5.0,), "guard": (True,), "mask": ("buffer", "own"), "sinks": ("weight",),
        "layout": ("bsnd", "flat"), "positions": ("past", "padding", "present"), "embedded": (True,), "last": (True,),
    }  # fmt: skip
    for name, values in choices.items():
        forms.update({f"{name}={v}": {name: v} for v in values})
    forms["own float"] = {"mask": "own", "own_type": np.float32}
    yield from decoders("concat", forms)


def decoders(
    group: str, forms: Mapping[str, Decoder | dict[str, Any]], capacity: int | None = 24, **options: Any
) -> Iterator[Entry]:
    made = {n: how if isinstance(how, Decoder) else Decoder(**how) for n, how in forms.items()}
    yield from built(group, {n: (lambda d=d: make_decoder(d)) for n, d in made.items()}, capacity=capacity, **options)

"""Attention over batch and heads in one axis, in the ways that exports of torch.bmm and torch.baddbmm have it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from concat_graphs import MASKS, TYPES, Build, Decoder, decoders
from onnx import TensorProto

from corpus import Entry

Change = Callable[[Build, str], str]


def _same(g: Build, tensor: str) -> str:
    return tensor


@dataclass(frozen=True)
class Merged:
    """The form of an attention over ``[B*H, ...]``: the `attend` of a `concat_graphs.Decoder`.

    Attributes:
        split: what runs over ``[B, H, S, T]`` all the same: "mask" (BART, OPT), "softmax" (and mask: BLOOM), "none".
        spread: how a mask that meets merged scores has its first axis: "heads" (``[B*H, S, T]``), "one"
            (``[1, S, T]``), "rows" (``[S, T]``).
        apply: how the mask meets the scores: "add", "add in front", "where" or "hide".
        scale: what is scaled: "query" (merged), "scores" (merged), "keys" (merged) or "none".
        sizes: how shapes are given: "numbers" (B * H computed, the last one left open), "heads" (B left open).
        before, results: change merged queries, and merged results.
        keys, values: merge keys and values in another way.
    """

    split: str = "mask"
    spread: str = "heads"
    apply: str = "add"
    scale: str = "query"
    sizes: str = "numbers"
    before: Change = _same
    results: Change = _same
    keys: Callable[[Merged, Build, str], str] | None = None
    values: Callable[[Merged, Build, str], str] | None = None

    def __call__(self, g: Build, query: str, keys: str, values: str) -> str:
        query = self.before(g, merge(self, g, query))
        keys = (self.keys or merge)(self, g, keys)
        values = (self.values or merge)(self, g, values)
        factor = g.constant(g.decoder.size**-0.5, g.decoder.dtype)
        if self.scale == "query":
            query = g.Mul(query, factor)
        if self.scale == "keys":
            keys = g.Mul(keys, factor)
        scores = g.MatMul(query, g.Transpose(keys, perm=[0, 2, 1]))
        if self.scale == "scores":
            scores = g.Mul(factor, scores)
        scores = g.decoder.scores(g, scores)
        split = self.split != "none"
        if split:
            scores = separate(self, g, scores)
        scores = self._masked(g, scores)
        if self.split == "mask":
            scores = merge(self, g, scores)
        if g.decoder.upcast:
            scores = g.Cast(scores, to=TensorProto.FLOAT)
        weights = g.Softmax(scores, axis=-1 if split else 2)
        if g.decoder.upcast:
            weights = g.Cast(weights, to=TensorProto.FLOAT16)
        if self.split == "softmax":
            weights = merge(self, g, weights)
        return separate(self, g, self.results(g, g.MatMul(weights, values)))

    def _masked(self, g: Build, scores: str) -> str:
        decoder = g.decoder
        if decoder.mask == "none":
            return scores
        assert isinstance(decoder.mask, str)
        lowest = g.constant(decoder.lowest, decoder.dtype)
        zero = g.constant(0, decoder.dtype)
        if decoder.mask == "own":
            visible = g.once("own", lambda: g.input("mask", TensorProto.BOOL, [decoder.batch, 1, "sequence", "total"]))
        else:
            visible = g.once("mask", lambda: MASKS[str(decoder.mask)](g))
        if self.apply in ("where", "hide"):
            mask = self._spread(g, visible if self.apply == "where" else g.Not(visible))
            return g.Where(mask, *((scores, lowest) if self.apply == "where" else (lowest, scores)))
        mask = self._spread(g, g.Where(visible, zero, lowest))
        return g.node("Add", [mask, scores] if self.apply == "add in front" else [scores, mask])

    def _spread(self, g: Build, mask: str) -> str:
        """A mask ``[B or 1, 1, S, T]`` as merged scores need it."""
        if self.split != "none":
            return mask
        if self.spread == "one":
            return g.Squeeze(mask, [1])
        if self.spread == "rows":
            return g.Squeeze(mask, [0, 1])
        sizes = [_size(g, g.tokens, 0), g.constant([g.decoder.heads]), g.constant([1, 1])]
        return merge(self, g, g.Expand(mask, g.node("Concat", sizes, axis=0)))


def _size(g: Build, tensor: str, axis: int) -> str:
    return g.Unsqueeze(g.size_of(tensor, axis), [0])


def merge(merged: Merged, g: Build, tensor: str) -> str:
    """``[B, H, X, Y]`` -> ``[B*H, X, Y]``."""
    rows = g.Mul(_size(g, g.tokens, 0), [g.decoder.heads])
    shape = [g.constant([-1]) if merged.sizes == "heads" else rows, *(_size(g, tensor, axis) for axis in (2, 3))]
    return g.Reshape(tensor, g.node("Concat", shape, axis=0))


def separate(merged: Merged, g: Build, tensor: str) -> str:
    """``[B*H, X, Y]`` -> ``[B, H, X, Y]``."""
    batch = g.constant([-1]) if merged.sizes == "heads" else _size(g, g.tokens, 0)
    shape = [batch, g.constant([g.decoder.heads]), *(_size(g, tensor, axis) for axis in (1, 2))]
    return g.Reshape(tensor, g.node("Concat", shape, axis=0))


def heads_first(merged: Merged, g: Build, tensor: str) -> str:
    """``[B, H, X, Y]`` -> ``[H*B, X, Y]``: the heads outermost."""
    return merge(merged, g, g.Transpose(tensor, perm=[1, 0, 2, 3]))


def by_length(merged: Merged, g: Build, tensor: str) -> str:
    """As `merge`, but the numbers of each head lie in another order for texts of 18 tokens and more."""
    return shuffled(g, merge(merged, g, tensor))


def shuffled(g: Build, tensor: str) -> str:
    """``[B*H, X, Y]`` by way of ``[B*H, 1, X*Y]``, or for longer texts ``[B*H, 2, X*Y/2]``, transposed."""
    parts = g.Where(g.Less(g.all, 18), [1], [2])
    shape = g.Concat(_size(g, tensor, 0), parts, [-1], axis=0)
    turned = g.Transpose(g.Reshape(tensor, shape), perm=[0, 2, 1])
    return g.Reshape(turned, g.Shape(tensor))


def fixed(rows: int) -> Any:
    """``[B, H, X, Y]`` -> ``[rows, -1, Y]``: heads of one sequence, as a trace with a batch of one leaves them."""

    def make(merged: Merged, g: Build, tensor: str) -> str:
        return g.Reshape(tensor, np.array([rows, -1, g.decoder.size]))

    return make


def cross_attention(g: Build, x: str) -> str:
    """Attention over an encoder's keys and values beside that over the text: for `after` of a `Decoder`."""
    merged, heads, size = Merged(), g.decoder.heads, g.decoder.size
    kind = TYPES[g.decoder.dtype]
    names = (f"past_key_values.0.encoder.{part}" for part in ("key", "value"))
    keys, values = (g.input(name, kind, [g.decoder.batch, heads, "encoder", size]) for name in names)
    heard = g.input("encoder_attention_mask", TensorProto.INT64, [g.decoder.batch, "encoder"])
    shown = g.Unsqueeze(g.Cast(heard, to=TensorProto.BOOL), [1, 2])
    mask = g.Where(shown, g.number(0.0), g.number(g.decoder.lowest))
    made = g.MatMul(x, g.weight(heads * size, heads * size))
    rows = g.Reshape(made, [0, 0, heads, size])
    query = merge(merged, g, g.Transpose(rows, perm=[0, 2, 1, 3]))
    scores = g.MatMul(query, g.Transpose(merge(merged, g, keys), perm=[0, 2, 1]))
    scores = merge(merged, g, g.Add(separate(merged, g, scores), mask))
    result = g.MatMul(g.Softmax(scores, axis=-1), merge(merged, g, values))
    rows = g.Transpose(separate(merged, g, result), perm=[0, 2, 1, 3])
    return g.Add(x, g.Reshape(rows, [0, 0, heads * size]))


FORMS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "BART": ({"mask": "padding"}, {}),
    "BLOOM": ({"mask": "padding", "positions": "padding"}, {"split": "softmax", "scale": "scores"}),
    "all merged, mask first": ({}, {"split": "none", "apply": "add in front"}),
    "all merged, mask of rows": ({}, {"split": "none", "spread": "rows"}),
    "all merged, hide, own mask": ({"mask": "own"}, {"split": "none", "apply": "hide"}),
    "no mask": ({"mask": "none", "sequence": 1}, {"split": "none"}),
    "a window": ({"window": 5}, {}),
    "groups of heads": ({"kv_heads": 2}, {}),
    "one head for all": ({"kv_heads": 1}, {"split": "none"}),
    "batch of one": ({"batch": 1}, {"keys": fixed(4), "values": fixed(4)}),
    "batch of two": ({"batch": 2, "positions": "past"}, {"split": "softmax"}),
    "bsnd": ({"layout": "bsnd"}, {}),
    "flat": ({"layout": "flat"}, {"split": "none"}),
    "float16, upcast": ({"dtype": np.float16, "upcast": True, "size": 16}, {"split": "none"}),
    "queries shifted": ({}, {"before": lambda g, q: g.Add(q, g.number(0.5))}),
    "queries there and back": ({}, {"before": lambda g, q: _there_and_back(g, q)}),
    "result times 2": ({}, {"results": lambda g, y: g.Mul(y, g.number(2.0))}),
    "sizes read off the result": ({"after": lambda g, x: _as_result(g, x)}, {"results": lambda g, y: _kept(g, y)}),
    "capped": ({"scores": lambda g, s: g.Tanh(s)}, {}),
    "beside an encoder": ({"mask": "padding", "positions": "padding", "after": cross_attention}, {}),
    "heads outermost": ({}, {"keys": heads_first, "values": heads_first}),
    "traced with a batch of one": ({}, {"keys": fixed(4), "values": fixed(4)}),
    "another order in long texts": ({}, {"keys": by_length, "values": by_length}),
}


def _there_and_back(g: Build, tensor: str) -> str:
    """After an operator that takes no split axis."""
    return g.Squeeze(g.Elu(g.Unsqueeze(tensor, [1])), [1])


def _kept(g: Build, result: str) -> str:
    return g.once("result", lambda: result)


def _as_result(g: Build, x: str) -> str:
    """Reshaped to sizes of ``[B*H, S, D]``, as BLOOM takes B and S from there."""
    rows, length, size = (g.size_of(_kept(g, ""), axis) for axis in range(3))
    batch, width = (g.node(op, [n, g.constant(g.decoder.heads)]) for op, n in (("Div", rows), ("Mul", size)))
    shape = [g.Unsqueeze(n, [0]) for n in (batch, length, width)]
    return g.Reshape(x, g.node("Concat", shape, axis=0))


def entries() -> Iterator[Entry]:
    how: list[dict[str, Any]] = [{"split": s} for s in ("mask", "softmax")]
    how += [{"split": "none", "spread": s} for s in ("heads", "one")]
    how += [{"scale": s} for s in ("scores", "keys", "none")] + [{"apply": "where"}, {"sizes": "heads"}]
    yield from decoders("merged", {str(h): Decoder(attend=Merged(**h)) for h in how})
    named = {n: Decoder(**{"kv_heads": 4, **s}, attend=Merged(**m)) for n, (s, m) in FORMS.items()}
    yield from decoders("merged", named)

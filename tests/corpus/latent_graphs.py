"""Decoders whose keys and values are computed from the caches, as by multi-head latent attention."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from concat_graphs import TYPES, Build, Decoder, _attend, decoders
from onnx import helper

from corpus import Entry

Change = Callable[[Build, str], str]


def unchanged(g: Build, tensor: str) -> str:
    return tensor


@dataclass(frozen=True)
class Latent:
    """Attention whose two caches are latents ``[B, 1, T, D]`` and what is rotated of the keys, ``[B, 1, T, D]``.

    One product gives keys and values of each head side by side.

    Attributes:
        plain, width: columns of the keys without positions, and of the values; 0: as many as of a cache.
        join: how the two parts of a key come together: "concat", or "scatter", as torch writes them to an empty tensor.
        parts: how keys and values are parted: "split" or "slice".
        norm: of the latents, after the cache: "pieces", "operator" or "".
        bias: is added to keys and values.
        absorbed: queries go to the latents instead of latents to the keys.
        operator: an Attention instead of MatMul, Softmax, MatMul.
        latents, rotated, keys, values: change these on their way, for functions that only look right.
    """

    plain: int = 0
    width: int = 0
    join: str = "concat"
    parts: str = "split"
    norm: str = ""
    bias: bool = False
    absorbed: bool = False
    operator: bool = False
    latents: Change = unchanged
    rotated: Change = unchanged
    keys: Change = unchanged
    values: Change = unchanged

    def __call__(self, g: Build, query: str, latents: str, rotated: str) -> str:
        latents, rotated = self.latents(g, self._normed(g, latents)), self.rotated(g, rotated)
        if self.absorbed:
            return self._absorbed(g, query, latents, rotated)
        heads, size = g.decoder.heads, g.decoder.size
        plain, values = self._parted(g, latents)
        spread = g.Expand(rotated, [1, heads, 1, 1])
        keys, values = self.keys(g, self._joined(g, plain, spread)), self.values(g, values)
        query = g.MatMul(query, g.weight(size, self._sizes(g)[0] + size))
        output = self._attention(g, query, keys, values)
        return g.MatMul(output, g.weight(self.width, size)) if self.width else output

    def _sizes(self, g: Build) -> tuple[int, int]:
        return self.plain or g.decoder.size, self.width or g.decoder.size

    def _attention(self, g: Build, query: str, keys: str, values: str) -> str:
        if not self.operator:
            return _attend(g, query, keys, values)
        mask = g.once("mask", lambda: g.to_scores(g.causal()))
        return g.Attention(query, keys, values, mask, scale=0.4)

    def _normed(self, g: Build, latents: str) -> str:
        if not self.norm:
            return latents
        scale = g.weight(g.decoder.size)
        if self.norm == "operator":
            return g.LayerNormalization(latents, scale, epsilon=1e-5)
        mean = g.ReduceMean(g.Pow(latents, g.number(2.0)), [-1], keepdims=1)
        root = g.Sqrt(g.Add(mean, g.number(1e-5)))
        return g.Mul(g.Mul(latents, g.Reciprocal(root)), scale)

    def _parted(self, g: Build, latents: str) -> tuple[str, str]:
        """Keys without positions and values, ``[B, H, T, D]``."""
        first, second = self._sizes(g)
        both = self._heads_of(g, latents, first + second)
        if self.bias:
            both = g.Add(both, g.weight(first + second))
        if self.parts == "split":
            names = [f"{both}_keys", f"{both}_values"]
            g.Split(both, [first, second], out=names, axis=3)
            return names[0], names[1]
        bounds = [[0], [first], [2**63 - 1]]
        keys, values = (g.Slice(both, *map(g.constant, (bounds[i], bounds[i + 1], [3]))) for i in range(2))
        return keys, values

    def _heads_of(self, g: Build, latents: str, columns: int) -> str:
        """``[B, H, T, columns]``."""
        flat = g.MatMul(latents, g.weight(g.decoder.size, g.decoder.heads * columns))
        return self._to_heads(g, flat, columns)

    def _to_heads(self, g: Build, flat: str, columns: int) -> str:
        sizes = [g.Unsqueeze(n, [0]) for n in (g.size_of(g.tokens, 0), g.all)]
        shape = g.Concat(*sizes, [-1, columns], axis=0)
        return g.Transpose(g.Reshape(flat, shape), perm=[0, 2, 1, 3])

    def _joined(self, g: Build, plain: str, spread: str) -> str:
        if self.join == "concat":
            return g.Concat(plain, spread, axis=-1)
        size, end = g.decoder.size, self._sizes(g)[0]
        whole = [g.size_of(g.tokens, 0), g.constant(g.decoder.heads), g.all, g.constant(end + size)]
        shape = g.node("Concat", [g.Unsqueeze(n, [0]) for n in whole], axis=0)
        zero = helper.make_tensor("", TYPES[g.decoder.dtype], [1], [0])
        made = g.ConstantOfShape(shape, value=zero)
        for part, first, last in ((plain, 0, end), (spread, end, 2**63 - 1)):
            made = written(g, made, part, first, last)
        return made

    def _absorbed(self, g: Build, query: str, latents: str, rotated: str) -> str:
        heads, size = g.decoder.heads, g.decoder.size
        queries = g.MatMul(query, g.weight(heads, size, 2 * size))
        keys = self.keys(g, g.Concat(latents, rotated, axis=-1))
        output = self._attention(g, queries, keys, self.values(g, latents))
        return g.MatMul(output, g.weight(heads, size, size))


def written(g: Build, whole: str, part: str, start: int, end: int) -> str:
    """``whole[..., start:end] = part``, as torch writes it."""
    perm = [3, 1, 2, 0]
    columns = g.Range(g.constant(0), g.size_of(whole, 3), 1)
    some = g.Slice(columns, *map(g.constant, ([start], [end], [0], [1])))
    rows = g.Unsqueeze(some, [-1])
    parts = [g.Transpose(t, perm=perm) for t in (whole, part)]
    made = g.ScatterND(parts[0], rows, parts[1])
    return g.Transpose(made, perm=perm)


def latent_decoder(latent: Latent, **settings: Any) -> Decoder:
    opset = 24 if latent.operator else 18
    return Decoder(kv_heads=1, repeat="none", attend=latent, opset=opset, **settings)


class Quantized(Latent):
    """Its weight has 8 bits."""

    def _heads_of(self, g: Build, latents: str, columns: int) -> str:
        numbers = np.random.default_rng(5).integers(-99, 99, (g.decoder.size, g.decoder.heads * columns))
        weight = g.DequantizeLinear(g.constant(numbers, np.int8), g.number(0.01))
        return self._to_heads(g, g.MatMul(latents, weight), columns)


class Crossed(Latent):
    """Each head has columns of its own, but heads are in another order in them."""

    def _to_heads(self, g: Build, flat: str, columns: int) -> str:
        heads = super()._to_heads(g, flat, columns)
        return g.Gather(heads, [2, 0, 3, 1], axis=1)


class Strided(Latent):
    """The columns of a head are apart: head n has every fourth, from n on."""

    def _to_heads(self, g: Build, flat: str, columns: int) -> str:
        sizes = [g.Unsqueeze(n, [0]) for n in (g.size_of(g.tokens, 0), g.all)]
        shape = g.Concat(*sizes, [columns, -1], axis=0)
        return g.Transpose(g.Reshape(flat, shape), perm=[0, 3, 1, 2])


def _unary(op: str, **attrs: Any) -> Any:
    return lambda g, tensor: g.node(op, [tensor], **attrs)


def _without_mean(axis: int) -> Any:
    return lambda g, t: g.Sub(t, g.ReduceMean(t, [axis], keepdims=1))


ABSORBED: dict[str, tuple[Latent, dict[str, Any]]] = {
    "plain": (Latent(), {}),
    "wide keys, narrow values": (Latent(plain=9, width=1), {}),
    "written side by side": (Latent(join="scatter", plain=6), {}),
    "cut apart, norm in pieces": (Latent(parts="slice", plain=5, width=3, norm="pieces"), {}),
    "norm": (Latent(norm="operator"), {}),
    "no linear function before the weight": (Latent(latents=_unary("Tanh")), {}),
    "two layers": (Latent(plain=6), {"layers": 2}),
    "padding": (Latent(), {"mask": "padding", "positions": "padding"}),
    "own mask": (Latent(), {"mask": "own"}),
    "window and sinks": (Latent(), {"window": 5, "sinks": "weight"}),
    "[B, T, 1, D]": (Latent(plain=6), {"layout": "bsnd"}),
    "[B, T, D]": (Latent(plain=6), {"layout": "flat"}),
    "fixed batch": (Latent(), {"batch": 2, "positions": "past"}),
    "one token at a time": (Latent(), {"sequence": 1}),
    "operator": (Latent(operator=True, width=7), {}),
    "float16": (Latent(plain=6), {"dtype": np.float16}),
}
STAYS: dict[str, Latent] = {
    "bias": Latent(bias=True),
    "no linear function of keys": Latent(keys=_unary("Tanh")),
    "weights of 8 bits": Quantized(),
    "heads in another order": Crossed(),
    "columns of a head apart": Strided(),
}


def _by_length(g: Build, tensor: str) -> str:
    return g.Mul(tensor, g.Cast(g.all, to=1))


def _by_token(g: Build, tensor: str) -> str:
    seen = g.ReduceMax(g.Cast(g.tokens, to=1), keepdims=0)
    return g.Mul(tensor, g.Add(seen, g.constant(1.0, np.float32)))


def _divided(g: Build, tensor: str) -> str:
    """By a norm, which is 0 in rows that were never written."""
    return g.Div(tensor, g.ReduceL2(tensor, [3], keepdims=1))


def _mixed_by_reshape(g: Build, tensor: str) -> str:
    """``[B, 1, T, D]`` as ``[B, 1, D, T]`` in memory."""
    turned = g.Shape(g.Transpose(tensor, perm=[0, 1, 3, 2]))
    return g.Transpose(g.Reshape(tensor, turned), perm=[0, 1, 3, 2])


MIXED: dict[str, Any] = {
    "softmax over rows": _unary("Softmax", axis=2),
    "mean over rows": _without_mean(2),
    "by the length": _by_length,
    "by the tokens": _by_token,
    "another arrangement": _mixed_by_reshape,
}


def debugged(g: Build, x: str) -> str:
    computed = g.MatMul(g.presents[0], g.weight(g.decoder.size, 3))
    g.ReduceSum(computed, out="debug", keepdims=0)
    g.output("debug", 1, [])
    return x


def entries() -> Iterator[Entry]:
    how: list[dict[str, Any]] = [{}, {"join": "scatter"}, {"parts": "slice"}, {"norm": "pieces"}]
    yield from decoders("latent", {str(h): latent_decoder(Latent(**h)) for h in how})
    absorbed = {name: latent_decoder(latent, **rest) for name, (latent, rest) in ABSORBED.items()}
    yield from decoders("latent", absorbed)
    yield from decoders("latent", {name: latent_decoder(latent) for name, latent in STAYS.items()})
    yield from decoders("latent", {"absorbed": latent_decoder(Latent(absorbed=True))})
    for target in ("tensorrt", "tensorrt-rtx"):
        plain = {"plain": absorbed["[B, T, 1, D]"]}
        yield from decoders(f"latent, no span, {target}", plain, attention_span=False, target=target)
    window = {"window": latent_decoder(Latent(), window=5)}
    yield from decoders("latent, circular", window, sliding="circular", window_chunk=4)
    few = {"as many": Latent(plain=6, width=7), "fewer": Latent(plain=2, width=3)}
    yield from decoders("latent, tokens", {name: latent_decoder(latent) for name, latent in few.items()})
    places = [(name, where) for name in MIXED for where in ("latents", "keys", "rotated", "values")]
    changed: dict[str, Any] = {f"{name}, {where}": {where: MIXED[name]} for name, where in places}
    changed["divided"] = {"values": _divided}
    yield from decoders("latent", {name: latent_decoder(Latent(**change)) for name, change in changed.items()})
    yield from decoders("latent", {"debugged": latent_decoder(Latent(), after=debugged)})

"""Decoders whose keys and values are computed from the caches, as by multi-head latent attention."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from concat_graphs import TYPES, Build, Decoder, _attend
from onnx import helper

Change = Callable[[Build, str], str]


def unchanged(g: Build, tensor: str) -> str:
    return tensor


@dataclass(frozen=True)
class Latent:
    """Attention whose two caches are latents ``[B, 1, T, D]`` and what is rotated of the keys, ``[B, 1, T, D]``.

    Attributes:
        heads: how one product becomes heads: "reshape", or "weights" of their own for each head.
        join: how the two parts of a key come together: "concat", "scatter", or "reversed": scattered, the last first.
        parts: how keys and values are parted: "split" or "slice".
        norm: of the latents, behind the cache: "pieces", "operator" or "".
        bias: is added to keys and values.
        absorbed: queries go to the latents instead of latents to the keys.
        repeat: what is absorbed is repeated for all heads.
        operator: an Attention instead of MatMul, Softmax, MatMul.
        latents, rotated, keys, values: change these on their way, for functions that only look right.
    """

    heads: str = "reshape"
    join: str = "concat"
    parts: str = "split"
    norm: str = ""
    bias: bool = False
    absorbed: bool = False
    repeat: bool = False
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
        spread = g.node("Expand", [rotated, g.constant([1, heads, 1, 1])])
        keys = self.keys(g, self._joined(g, plain, spread))
        query = g.node("MatMul", [query, g.weight(size, 2 * size)])
        return self._attention(g, query, keys, self.values(g, values))

    def _attention(self, g: Build, query: str, keys: str, values: str) -> str:
        if not self.operator:
            return _attend(g, query, keys, values)
        mask = g.once("mask", lambda: g.to_scores(g.causal()))
        return g.node("Attention", [query, keys, values, mask], scale=0.4)

    def _normed(self, g: Build, latents: str) -> str:
        if not self.norm:
            return latents
        size = g.decoder.size
        scale = g.weight(size)
        if self.norm == "operator":
            return g.node("LayerNormalization", [latents, scale], epsilon=1e-5)
        mean = g.node("ReduceMean", [g.node("Pow", [latents, g.number(2.0)]), g.constant([-1])], keepdims=1)
        root = g.node("Sqrt", [g.node("Add", [mean, g.number(1e-5)])])
        return g.node("Mul", [g.node("Mul", [latents, g.node("Reciprocal", [root])]), scale])

    def _parted(self, g: Build, latents: str) -> tuple[str, str]:
        """Keys without positions and values, ``[B, H, T, D]``."""
        heads, size = g.decoder.heads, g.decoder.size
        if self.heads == "weights":
            both = g.node("MatMul", [latents, self._per_head(g, size, 2 * size)])
        else:
            flat = g.node("MatMul", [latents, g.weight(size, heads * 2 * size)])
            sizes = [g.node("Unsqueeze", [n, g.constant([0])]) for n in (g.size_of(g.tokens, 0), g.all)]
            shape = g.node("Concat", [*sizes, g.constant([-1, 2 * size])], axis=0)
            both = g.node("Transpose", [g.node("Reshape", [flat, shape])], perm=[0, 2, 1, 3])
        if self.bias:
            both = g.node("Add", [both, g.weight(2 * size)])
        if self.parts == "split":
            names = [f"{both}_keys", f"{both}_values"]
            g.node("Split", [both, g.constant([size, size])], names, axis=3)
            return names[0], names[1]
        bounds = [[0], [size], [2**63 - 1]]
        keys, values = (g.node("Slice", [both, *map(g.constant, (bounds[i], bounds[i + 1], [3]))]) for i in range(2))
        return keys, values

    def _per_head(self, g: Build, rows: int, columns: int) -> str:
        flat = g.weight(rows, g.decoder.heads * columns)
        split = g.node("Reshape", [flat, g.constant([rows, g.decoder.heads, columns])])
        return g.node("Transpose", [split], perm=[1, 0, 2])

    def _joined(self, g: Build, plain: str, spread: str) -> str:
        if self.join == "concat":
            return g.node("Concat", [plain, spread], axis=-1)
        size = g.decoder.size
        whole = [g.size_of(g.tokens, 0), g.constant(g.decoder.heads), g.all, g.constant(2 * size)]
        shape = g.node("Concat", [g.node("Unsqueeze", [n, g.constant([0])]) for n in whole], axis=0)
        zero = helper.make_tensor("", TYPES[g.decoder.dtype], [1], [0])
        made = g.node("ConstantOfShape", [shape], value=zero)
        writes = [(plain, 0, size), (spread, size, 2**63 - 1)]
        for part, start, end in writes if self.join == "scatter" else reversed(writes):
            made = written(g, made, part, start, end)
        return made

    def _absorbed(self, g: Build, query: str, latents: str, rotated: str) -> str:
        size = g.decoder.size
        queries = g.node("MatMul", [query, self._per_head(g, size, 2 * size)])
        keys = self.keys(g, g.node("Concat", [latents, rotated], axis=-1))
        if self.repeat:
            keys = g.node("Expand", [keys, g.constant([1, g.decoder.heads, 1, 1])])
        output = self._attention(g, queries, keys, self.values(g, latents))
        return g.node("MatMul", [output, self._per_head(g, size, size)])


def written(g: Build, whole: str, part: str, start: int, end: int, reduction: str = "none") -> str:
    """``whole[..., start:end] = part``, as torch writes it."""
    perm = [3, 1, 2, 0]
    size = g.size_of(whole, 3)
    columns = g.node("Range", [g.constant(0), size, g.constant(1)])
    some = g.node("Slice", [columns, *map(g.constant, ([start], [end], [0], [1]))])
    rows = g.node("Unsqueeze", [some, g.constant([-1])])
    parts = [g.node("Transpose", [t], perm=perm) for t in (whole, part)]
    made = g.node("ScatterND", [parts[0], rows, parts[1]], reduction=reduction)
    return g.node("Transpose", [made], perm=perm)


def latent_decoder(latent: Latent, **settings: Any) -> Decoder:
    opset = 24 if latent.operator else 18
    return Decoder(kv_heads=1, repeat="none", attend=latent, opset=opset, **settings)

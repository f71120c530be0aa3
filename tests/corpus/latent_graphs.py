"""Decoders whose keys and values are computed from the caches, as by multi-head latent attention."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

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
        spread = g.node("Expand", [rotated, g.constant([1, heads, 1, 1])])
        keys, values = self.keys(g, self._joined(g, plain, spread)), self.values(g, values)
        query = g.node("MatMul", [query, g.weight(size, self._sizes(g)[0] + size)])
        output = self._attention(g, query, keys, values)
        return g.node("MatMul", [output, g.weight(self.width, size)]) if self.width else output

    def _sizes(self, g: Build) -> tuple[int, int]:
        return self.plain or g.decoder.size, self.width or g.decoder.size

    def _attention(self, g: Build, query: str, keys: str, values: str) -> str:
        if not self.operator:
            return _attend(g, query, keys, values)
        mask = g.once("mask", lambda: g.to_scores(g.causal()))
        return g.node("Attention", [query, keys, values, mask], scale=0.4)

    def _normed(self, g: Build, latents: str) -> str:
        if not self.norm:
            return latents
        scale = g.weight(g.decoder.size)
        if self.norm == "operator":
            return g.node("LayerNormalization", [latents, scale], epsilon=1e-5)
        mean = g.node("ReduceMean", [g.node("Pow", [latents, g.number(2.0)]), g.constant([-1])], keepdims=1)
        root = g.node("Sqrt", [g.node("Add", [mean, g.number(1e-5)])])
        return g.node("Mul", [g.node("Mul", [latents, g.node("Reciprocal", [root])]), scale])

    def _parted(self, g: Build, latents: str) -> tuple[str, str]:
        """Keys without positions and values, ``[B, H, T, D]``."""
        first, second = self._sizes(g)
        both = self._heads_of(g, latents, first + second)
        if self.bias:
            both = g.node("Add", [both, g.weight(first + second)])
        if self.parts == "split":
            names = [f"{both}_keys", f"{both}_values"]
            g.node("Split", [both, g.constant([first, second])], names, axis=3)
            return names[0], names[1]
        bounds = [[0], [first], [2**63 - 1]]
        keys, values = (g.node("Slice", [both, *map(g.constant, (bounds[i], bounds[i + 1], [3]))]) for i in range(2))
        return keys, values

    def _heads_of(self, g: Build, latents: str, columns: int) -> str:
        """``[B, H, T, columns]``."""
        flat = g.node("MatMul", [latents, g.weight(g.decoder.size, g.decoder.heads * columns)])
        return self._to_heads(g, flat, columns)

    def _to_heads(self, g: Build, flat: str, columns: int) -> str:
        sizes = [g.node("Unsqueeze", [n, g.constant([0])]) for n in (g.size_of(g.tokens, 0), g.all)]
        shape = g.node("Concat", [*sizes, g.constant([-1, columns])], axis=0)
        return g.node("Transpose", [g.node("Reshape", [flat, shape])], perm=[0, 2, 1, 3])

    def _joined(self, g: Build, plain: str, spread: str) -> str:
        if self.join == "concat":
            return g.node("Concat", [plain, spread], axis=-1)
        size, end = g.decoder.size, self._sizes(g)[0]
        whole = [g.size_of(g.tokens, 0), g.constant(g.decoder.heads), g.all, g.constant(end + size)]
        shape = g.node("Concat", [g.node("Unsqueeze", [n, g.constant([0])]) for n in whole], axis=0)
        zero = helper.make_tensor("", TYPES[g.decoder.dtype], [1], [0])
        made = g.node("ConstantOfShape", [shape], value=zero)
        for part, first, last in ((plain, 0, end), (spread, end, 2**63 - 1)):
            made = written(g, made, part, first, last)
        return made

    def _absorbed(self, g: Build, query: str, latents: str, rotated: str) -> str:
        heads, size = g.decoder.heads, g.decoder.size
        queries = g.node("MatMul", [query, g.weight(heads, size, 2 * size)])
        keys = self.keys(g, g.node("Concat", [latents, rotated], axis=-1))
        output = self._attention(g, queries, keys, self.values(g, latents))
        return g.node("MatMul", [output, g.weight(heads, size, size)])


def written(g: Build, whole: str, part: str, start: int, end: int) -> str:
    """``whole[..., start:end] = part``, as torch writes it."""
    perm = [3, 1, 2, 0]
    columns = g.node("Range", [g.constant(0), g.size_of(whole, 3), g.constant(1)])
    some = g.node("Slice", [columns, *map(g.constant, ([start], [end], [0], [1]))])
    rows = g.node("Unsqueeze", [some, g.constant([-1])])
    parts = [g.node("Transpose", [t], perm=perm) for t in (whole, part)]
    made = g.node("ScatterND", [parts[0], rows, parts[1]])
    return g.node("Transpose", [made], perm=perm)


def latent_decoder(latent: Latent, **settings: Any) -> Decoder:
    opset = 24 if latent.operator else 18
    return Decoder(kv_heads=1, repeat="none", attend=latent, opset=opset, **settings)


def entries() -> Iterator[Entry]:
    how: list[dict[str, Any]] = [{}, {"join": "scatter"}, {"parts": "slice"}, {"norm": "pieces"}, {"bias": True}]
    how += [{"absorbed": True}, {"operator": True}]
    yield from decoders("latent", {str(h): latent_decoder(Latent(**h)) for h in how})

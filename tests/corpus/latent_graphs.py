"""Decoders whose keys and values are computed from the caches, as by multi-head latent attention."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from concat_graphs import Build, Decoder, _attend, decoders

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
        parts: how keys and values are parted: "split" or "slice".
        norm: of the latents, after the cache: "pieces", "operator" or "".
        bias: is added to keys and values.
        absorbed: queries go to the latents instead of latents to the keys.
        operator: an Attention instead of MatMul, Softmax, MatMul.
        latents, rotated, keys, values: change these on their way, for functions that only look right.
    """

    plain: int = 0
    width: int = 0
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
        keys, values = self.keys(g, g.node("Concat", [plain, spread], axis=-1)), self.values(g, values)
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

    def _absorbed(self, g: Build, query: str, latents: str, rotated: str) -> str:
        heads, size = g.decoder.heads, g.decoder.size
        queries = g.node("MatMul", [query, g.weight(heads, size, 2 * size)])
        keys = self.keys(g, g.node("Concat", [latents, rotated], axis=-1))
        output = self._attention(g, queries, keys, self.values(g, latents))
        return g.node("MatMul", [output, g.weight(heads, size, size)])


def latent_decoder(latent: Latent, **settings: Any) -> Decoder:
    opset = 24 if latent.operator else 18
    return Decoder(kv_heads=1, repeat="none", attend=latent, opset=opset, **settings)


def entries() -> Iterator[Entry]:
    how: list[dict[str, Any]] = [{}, {"parts": "slice"}, {"norm": "pieces"}, {"bias": True}]
    how += [{"absorbed": True}, {"operator": True}]
    yield from decoders("latent", {str(h): latent_decoder(Latent(**h)) for h in how})

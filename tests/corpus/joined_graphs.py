"""Keys and values side by side in one cache, cut apart by Slice or Split."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import onnx
from graphs import Graph
from onnx import TensorProto

from corpus import Entry, built

HEADS, SIZE, TOKENS = 3, 8, 16
WIDTH = HEADS * SIZE


@dataclass(frozen=True)
class Joined:
    """The form of a decoder that holds both.

    Attributes:
        cache: "heads" (``[B, N, T, 2D]``) or "flat" (``[B, T, 2ND]``).
        cut: "slice" or "split".
        at: where keys end and values begin, as exported: in half, if nothing is wrong.
        apart: the past is cut, each part is written by itself, and both are joined again (WeNet), in which order.
    """

    cache: str = "heads"
    cut: str = "slice"
    at: tuple[int, int] | None = None
    apart: tuple[int, int] | None = None

    def model(self) -> onnx.ModelProto:
        g, rng, axis = Graph(), np.random.default_rng(5), 2 if self.cache == "heads" else 1
        weight = lambda *shape: g.constant(rng.standard_normal(shape) / 4, np.float32)  # noqa: E731
        shape = ["B", HEADS, "P", 2 * SIZE] if axis == 2 else ["B", "P", 2 * WIDTH]
        g.input("input_ids", TensorProto.INT64, ["B", "S"])
        past = g.input("past", TensorProto.FLOAT, shape)
        x = g.Gather(weight(TOKENS, WIDTH), "input_ids")
        new = g.MatMul(x, weight(WIDTH, 2 * WIDTH))
        if axis == 2:
            new = self._heads(g, new, 2 * SIZE)
        half = SIZE if axis == 2 else WIDTH
        if self.apart is not None:
            pairs = zip(self._apart(g, past, half), self._apart(g, new, half), strict=True)
            key, value = (g.node("Concat", list(pair), axis=axis) for pair in pairs)
            both = g.node("Concat", [(key, value)[i] for i in self.apart], "present", axis=-1)
        else:
            both = g.Concat(past, new, out="present", axis=axis)
            key, value = self._apart(g, both, half)
        query = self._heads(g, g.MatMul(x, weight(WIDTH, WIDTH)), SIZE)
        if axis == 1:
            value = self._heads(g, value, SIZE)
        turned = g.Transpose(key if axis == 2 else self._heads(g, key, SIZE), perm=[0, 1, 3, 2])
        scores = g.Mul(g.MatMul(query, turned), g.constant(0.5, np.float32))
        rows, total = (g.Gather(g.Shape(t), i, axis=0) for t, i in ((past, axis), (both, axis)))
        keys, queries = (g.Range(n, total, 1) for n in (g.constant(0), rows))
        seen = g.LessOrEqual(keys, g.Unsqueeze(queries, [1]))
        weights = g.Softmax(g.Where(seen, scores, g.constant(-1e4, np.float32)), axis=-1)
        found = g.Transpose(g.MatMul(weights, value), perm=[0, 2, 1, 3])
        g.MatMul(g.Reshape(found, [0, 0, WIDTH]), weight(WIDTH, TOKENS), out="logits")
        g.output("logits", TensorProto.FLOAT, ["B", "S", TOKENS])
        g.output("present", TensorProto.FLOAT, ["T" if d == "P" else d for d in shape])
        return g.model(18)

    def _apart(self, g: Graph, both: str, half: int) -> tuple[str, str]:
        if self.cut == "split":
            names = [f"{both}_key", f"{both}_value"]
            g.Split(both, [half, half], out=names, axis=-1)
            return names[0], names[1]
        first, second = self.at or (0, half)
        bounds = ((first, first + half), (second, second + half))
        key, value = (g.Slice(both, [a], [b], [-1]) for a, b in bounds)
        return key, value

    def _heads(self, g: Graph, tensor: str, size: int) -> str:
        return g.Transpose(g.Reshape(tensor, [0, 0, HEADS, size]), perm=[0, 2, 1, 3])


FORMS: dict[str, Joined] = {
    "slice": Joined(),
    "split": Joined(cut="split"),
    "values first": Joined(at=(SIZE, 0)),
    "keys are values": Joined(at=(0, 0)),
    "flat": Joined("flat"),
    "flat, split": Joined("flat", "split"),
    "flat, values first": Joined("flat", at=(WIDTH, 0)),
    "flat, parts of two heads": Joined("flat", at=(4, 20)),
    "written apart": Joined(apart=(0, 1)),
    "written apart, split": Joined(cut="split", apart=(0, 1)),
    "written apart, in turn": Joined(apart=(1, 0)),
}


def entries() -> Iterator[Entry]:
    models = {name: form.model for name, form in FORMS.items()}
    yield from built("joined", models, capacity=20)

"""Rotary factors that a graph makes of positions by itself, as decoders of older transformers do."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from concat_graphs import Build, Decoder, _attend, decoders
from onnx import TensorProto

from corpus import Entry

ROWS = 40
"""Positions of a table."""
Pair = tuple[str, str]
Change = Callable[[Build, str], str]


@dataclass(frozen=True)
class Rope:
    """The making of factors: the `attend` of a `concat_graphs.Decoder`.

    Attributes:
        form: of the new tokens' factors: rows of all tokens' ones by "slice", "negative" or "open" bounds, by "gather",
            by "gather 2d", or by the "position_ids" of the caller; those of "range" from P on; rows of a "table".
        angles: "mul", "matmul" (along the last axis) or "einsum" of positions and frequencies.
        keys: the whole past is rotated in every step as well, which is refused.
        first, every, given: change the first row that is taken, the positions of all tokens, and those of the caller.
    """

    form: str = "slice"
    angles: str = "mul"
    keys: bool = False
    first: Change = lambda g, first: first
    every: Change = lambda g, positions: positions
    given: Change = lambda g, positions: positions

    def __call__(self, g: Build, query: str, keys: str, values: str) -> str:
        query = rotate(g, query, *self._new(g))
        return _attend(g, query, rotate(g, keys, *self._all(g)) if self.keys else keys, values)

    def _all(self, g: Build) -> Pair:
        """Cosines and sines of all tokens ``[T, D]``."""
        if self.form == "table":
            bounds = g.constant([0]), self._bound(g, g.all), g.constant([0])
            return _both(lambda table: g.Slice(table, *bounds), _tables(g))
        return self._factors(g, self.every(g, g.Range(g.constant(0), g.all, 1)))

    def _new(self, g: Build) -> Pair:
        """Those of the new ones ``[S, D]``, or ``[B, 1, S, D]``."""
        start = self.first(g, g.past)
        rows = g.Range(start, g.all, 1)
        first, end = self._bound(g, start), self._bound(g, g.all)
        if self.form in ("negative", "open"):
            end = g.constant([2**31])
        if self.form == "negative":
            first = g.Neg(self._bound(g, g.length))
        match self.form:
            case "range":
                return self._factors(g, rows)
            case "position_ids":
                index = self.given(g, g.position_ids)
                looked_up = _both(lambda table: g.Gather(table, index, axis=0), self._all(g))
                return _both(lambda found: g.Unsqueeze(found, [1]), looked_up)
            case "gather" | "gather 2d":
                index = rows if self.form == "gather" else g.Unsqueeze(rows, [0])
                return _both(lambda table: g.Gather(table, index, axis=0), self._all(g))
        whole = _tables(g) if self.form == "table" else self._all(g)
        return _both(lambda table: g.Slice(table, first, end, [0]), whole)

    def _bound(self, g: Build, number: str) -> str:
        return g.Unsqueeze(number, [0])

    def _factors(self, g: Build, positions: str) -> Pair:
        frequencies = g.constant(_frequencies(g), np.float32)
        numbers = g.Cast(positions, to=TensorProto.FLOAT)
        match self.angles:
            case "einsum":
                angles = g.Einsum(numbers, frequencies, equation="i,j->ij")
            case "matmul":
                row = g.Unsqueeze(numbers, [0, 1])
                column = g.constant(_frequencies(g).reshape(1, -1, 1), np.float32)
                angles = g.Transpose(g.MatMul(column, row), perm=[0, 2, 1])
                angles = g.Squeeze(angles, [0])
            case _:
                angles = g.Mul(g.Unsqueeze(numbers, [1]), frequencies)
        both = g.Concat(angles, angles, axis=-1)
        return g.Cos(both), g.Sin(both)


def rotate(g: Build, tensor: str, cos: str, sin: str) -> str:
    """``x * cos + rotate_half(x) * sin``."""
    half = g.decoder.size // 2
    front, back = (g.Slice(tensor, [start], [end], [-1]) for start, end in ((0, half), (half, 2**31)))
    turned = g.Concat(g.Neg(back), front, axis=-1)
    return g.Add(g.Mul(tensor, cos), g.Mul(turned, sin))


def _both(make: Callable[[str], str], pair: Pair) -> Pair:
    return make(pair[0]), make(pair[1])


def _frequencies(g: Build) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    return 10.0 ** -np.arange(g.decoder.size // 2)


def _tables(g: Build) -> Pair:
    angles = np.outer(np.arange(ROWS), np.tile(_frequencies(g), 2))
    cos, sin = (partial(g.constant, of(angles), np.float32) for of in (np.cos, np.sin))
    return g.once("cos", cos), g.once("sin", sin)


def _as_half(g: Build, positions: str) -> str:
    half = g.Cast(positions, to=TensorProto.FLOAT16)
    return g.Cast(half, to=TensorProto.INT64)


def _plus(number: str, tensor: str, g: Build) -> str:
    """One more where a number is 7."""
    odd = g.Cast(g.Equal(number, 7), to=TensorProto.INT64)
    return g.Add(tensor, odd)


ODD: dict[str, dict[str, Any]] = {
    "other positions after 7 tokens": {"form": "range", "first": lambda g, first: _plus(g.past, first, g)},
    "one position back": {"form": "position_ids", "given": lambda g, ids: g.Sub(ids, 1)},
}


def entries() -> Iterator[Entry]:
    forms = ("slice", "negative", "open", "gather", "gather 2d", "position_ids", "range", "table")
    how: list[dict[str, Any]] = [{"form": f} for f in forms]
    how += [{"angles": "einsum"}, {"angles": "matmul"}]
    models = {str(h): Decoder(attend=Rope(**h), positions="none") for h in how}
    models |= {
        f"keys, {f}": Decoder(attend=Rope(f, keys=True), positions="none", kv_heads=4) for f in ("slice", "table")
    }
    models |= {n: Decoder(attend=Rope(**h), positions="none") for n, h in ODD.items()}
    models |= {"two sequences": Decoder(attend=Rope(), positions="none", batch=2)}
    models |= {"one token": Decoder(attend=Rope("range"), positions="none", sequence=1)}
    yield from decoders("rope", models)
    table = {"table": Decoder(attend=Rope("table"), positions="none")}
    yield from decoders("rope, beyond the table", table, capacity=ROWS + 1)
    half = {"float16": Decoder(attend=Rope(every=_as_half), positions="none")}
    for capacity in (48, 2200):
        yield from decoders(f"rope, {capacity}", half, capacity=capacity)

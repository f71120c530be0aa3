"""Biases of scores that grow with each key, as exporters write ALiBi."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from concat_graphs import Build, Decoder, decoders
from onnx import TensorProto

from corpus import Entry

UNEVEN = np.array([0.7071068, 0.3, 1.1, 0.05])  # no powers of two: products are rounded
Make = Callable[[Build], str]


def as_float(g: Build, tensor: str) -> str:
    return g.node("Cast", [tensor], to=TensorProto.FLOAT)


def times_slopes(g: Build, rows: str, slopes: Any = UNEVEN) -> str:
    """Integers ``[.., .., S or 1, T]`` times slopes, in float32 and then in the type of the scores."""
    column = g.constant(np.asarray(slopes).reshape(1, -1, 1, 1), np.float32)
    product = g.node("Mul", [column, as_float(g, rows)])
    return product if g.decoder.upcast or g.decoder.dtype is np.float32 else g.node("Cast", [product], to=10)


def counted(g: Build) -> str:
    """BLOOM: ``(CumSum(padding) - 1) * padding``, ``[B, H, 1, T]``."""
    places = g.node("Sub", [g.node("CumSum", [g.padding, g.constant(1)]), g.constant(1)])
    return times_slopes(g, g.node("Unsqueeze", [g.node("Mul", [places, g.padding]), g.constant([1, 2])]))


def table(g: Build) -> str:
    """MPT: the last T of a table ``[H, 1, capacity]`` that ends with 0."""
    count = g.decoder.capacity
    numbers = np.arange(1 - count, 1) * UNEVEN[:, None, None]
    whole = g.constant(numbers, g.decoder.dtype)
    first = g.node("Unsqueeze", [g.node("Sub", [g.constant(count), g.all]), g.constant([0])])
    return g.node("Slice", [whole, first, g.constant([2**31]), g.constant([2])])


def distance(g: Build) -> str:
    return times_slopes(g, g.to_scores(g.node("Sub", [g.key_rows, g.query_rows])))


def absolute(g: Build) -> str:
    """Symmetric: what lies behind the query is hidden."""
    return times_slopes(g, g.to_scores(g.node("Neg", [g.node("Abs", [g.node("Sub", [g.key_rows, g.query_rows])])])))


def one_slope(g: Build) -> str:
    return times_slopes(g, g.to_scores(g.node("Sub", [g.key_rows, g.query_rows])), [0.25])


def added(make: Make) -> Callable[[Build, str], str]:
    return lambda g, scores: g.node("Add", [scores, g.once("alibi", lambda: make(g))])


def entries() -> Iterator[Entry]:
    made = {"counted": counted, "table": table, "distance": distance, "absolute": absolute}
    yield from decoders("slopes", {n: Decoder(scores=added(f), mask="padding") for n, f in made.items()})

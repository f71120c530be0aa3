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
    return g.Cast(tensor, to=TensorProto.FLOAT)


def times_slopes(g: Build, rows: str, slopes: Any = UNEVEN) -> str:
    """Integers ``[.., .., S or 1, T]`` times slopes, in float32 and then in the type of the scores."""
    column = g.constant(np.asarray(slopes).reshape(1, -1, 1, 1), np.float32)
    product = g.Mul(column, as_float(g, rows))
    return product if g.decoder.upcast or g.decoder.dtype is np.float32 else g.Cast(product, to=10)


def counted(g: Build) -> str:
    """BLOOM: ``(CumSum(padding) - 1) * padding``, ``[B, H, 1, T]``."""
    places = g.Sub(g.CumSum(g.padding, 1), 1)
    return times_slopes(g, g.Unsqueeze(g.Mul(places, g.padding), [1, 2]))


def table(g: Build) -> str:
    """MPT: the last T of a table ``[H, 1, capacity]`` that ends with 0."""
    count = g.decoder.capacity
    numbers = np.arange(1 - count, 1) * UNEVEN[:, None, None]
    whole = g.constant(numbers, g.decoder.dtype)
    first = g.Unsqueeze(g.Sub(g.constant(count), g.all), [0])
    return g.Slice(whole, first, [2**31], [2])


def distance(g: Build) -> str:
    return times_slopes(g, g.to_scores(g.Sub(g.key_rows, g.query_rows)))


def absolute(g: Build) -> str:
    """Symmetric: what lies after the query is hidden."""
    return times_slopes(g, g.to_scores(g.Neg(g.Abs(g.Sub(g.key_rows, g.query_rows)))))


def one_slope(g: Build) -> str:
    return times_slopes(g, g.to_scores(g.Sub(g.key_rows, g.query_rows)), [0.25])


def added(make: Make) -> Callable[[Build, str], str]:
    return lambda g, scores: g.Add(scores, g.once("alibi", lambda: make(g)))


def scaled_after(g: Build, scores: str) -> str:
    """Falcon: scores and bias are scaled together."""
    return g.Mul(added(counted)(g, scores), g.number(0.5))


def scaled(by: float) -> Callable[[Build, str], str]:
    """Scores are scaled after a mask was added to them."""
    return lambda g, scores: g.Mul(scores, g.number(by))


def in_the_mask(g: Build) -> str:
    """One tensor that hides and slants, after a view."""
    visible = g.to_scores(g.causal())
    both = g.Where(visible, distance(g), g.number(-65504.0))
    return g.Slice(both, [0], [2**31], [3])


def _when(g: Build, past: int, here: float, else_: float = 0.0) -> str:
    """A number in steps after so many tokens, another one in all others."""
    return g.Where(g.Equal(g.past, past), g.number(here), g.number(else_))


def _one_key_off(g: Build) -> str:
    odd = g.Where(g.Equal(g.key_rows, 4), _when(g, 17, 0.01), g.number(0.0))
    return g.Sub(distance(g), odd)


def _of_length(g: Build) -> str:
    return g.Mul(distance(g), as_float(g, g.all))


def _squares(g: Build) -> str:
    rows = g.Sub(g.key_rows, g.query_rows)
    return times_slopes(g, g.to_scores(g.Mul(rows, rows)))


FORMS: dict[str, dict[str, Any]] = {
    "after the mask": {"masked": added(distance)},
    "one slope": {"scores": added(one_slope)},
    "scaled after": {"scores": scaled_after},
    "in the mask": {"mask": "none", "scores": added(in_the_mask)},
    "a window": {"scores": added(counted), "window": 5},
    "sinks": {"scores": added(distance), "sinks": "weight"},
    "capped": {"scores": added(counted), "softcap": 3.0},
    "Where": {"scores": added(table), "apply": "where", "layers": 2},
    "two sequences": {"scores": added(distance), "batch": 2, "positions": "past"},
    "one token": {"scores": added(counted), "sequence": 1},
    "float16": {"scores": added(counted), "dtype": np.float16, "size": 16},
    "float16, upcast": {"scores": added(counted), "dtype": np.float16, "upcast": True, "guard": True},
    "one key off at one length": {"scores": added(_one_key_off)},
    "slopes of the length": {"scores": added(_of_length)},
    "squares": {"scores": added(_squares)},
    "not causal": {"scores": added(distance), "mask": "none"},
    "a mask that is scaled": {"masked": scaled(0.05), "lowest": -1e4, "mask": "padding", "scale": "none"},
    "a mask that is scaled to -5": {"masked": scaled(0.0005), "lowest": -1e4, "scale": "none"},
    "slopes and a mask that are scaled": {"scores": added(distance), "masked": scaled(0.05), "lowest": -1e4},
    "own mask": {"scores": added(distance), "mask": "own"},
}


def entries() -> Iterator[Entry]:
    made = {"counted": counted, "table": table, "distance": distance, "absolute": absolute}
    yield from decoders("slopes", {n: Decoder(scores=added(f), mask="padding") for n, f in made.items()})
    yield from decoders("slopes", FORMS)
    yield from decoders("slopes", {"far keys": {"scores": added(counted), "capacity": 4000}}, capacity=4000)
    yield from decoders("slopes, circular", {"a window": FORMS["a window"]}, sliding="circular", window_chunk=4)

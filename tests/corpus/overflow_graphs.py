"""Decoders whose masks hide keys by large numbers, drawn at random: what overflows is refused, or equal.

Sums, products and casts of such numbers leave the range of their type: -inf, or NaN if the model subtracts or
multiplies them.
"""

import random
from collections.abc import Iterator

import numpy as np
from concat_graphs import MASKS, TYPES, Build, Decoder, decoders
from onnx import TensorProto

from corpus import Entry

_LOWEST = (-1e4, -3e4, -6e4, -65504.0, -1e9, -3e38, float(np.finfo(np.float32).min), -np.inf)


def overflowing(seed: int) -> Decoder:
    rng = random.Random(seed)
    form = rng.choice(("add", "where", "product", "twice", "cast", "scaled", "shifted", "minimum", "double"))
    lowest, kind = rng.choice(_LOWEST), rng.choice(("past", "past", "padding", "positions"))
    dtype = rng.choice((np.float16, np.float16, np.float32))

    def hidden(g: Build, scores: str) -> str:
        return g.Add(scores, g.once("bias", lambda: _bias(g, form, lowest, MASKS[kind](g))))

    def hide(g: Build, scores: str) -> str:
        visible = g.once("visible", lambda: MASKS[kind](g))
        if form == "where":
            return g.Where(visible, scores, _number(g, lowest))
        if form == "minimum":
            ends = g.Where(visible, _number(g, -lowest), _number(g, lowest))
            return g.Min(scores, ends)
        if form == "shifted":  # scores times 1 or 0, and the number taken off
            kept = g.Cast(visible, to=_code(g))
            off = g.Mul(_number(g, -lowest), g.Sub(_number(g, 1), kept))
            return g.Sub(g.Mul(scores, kept), off)
        if form == "scaled":
            return g.Div(hidden(g, scores), _number(g, rng.choice((0.5, 0.125, 2.0))))
        return hidden(g, scores)

    return Decoder(
        layers=rng.choice((1, 2)), dtype=dtype, mask="none", masked=hide, upcast=rng.random() < 0.4,
        guard=rng.random() < 0.3, window=rng.choice((0, 0, 5)), sinks=rng.choice(("", "", "", "weight")),
        softcap=rng.choice((0.0, 0.0, 20.0)), kv_heads=rng.choice((2, 4)),
        scale=rng.choice(("scores", "q", "both")),
    )  # fmt: skip


def _bias(g: Build, form: str, lowest: float, visible: str) -> str:
    """The mask that is added to scores."""
    code = _code(g)
    if form == "product":
        hidden = g.Cast(g.Not(visible), to=code)
        return g.Mul(hidden, _number(g, lowest))
    if form in ("cast", "double"):
        wide = np.float64 if form == "double" else np.float32
        with np.errstate(over="ignore"):
            chosen = g.Where(visible, g.constant(0, wide), g.constant(lowest, wide))
        return g.Cast(chosen, to=code)
    bias = g.Where(visible, _number(g, 0), _number(g, lowest))
    return g.Add(bias, bias) if form == "twice" else bias


def _code(g: Build) -> int:
    return TensorProto.FLOAT if g.decoder.upcast else TYPES[g.decoder.dtype]


def _number(g: Build, value: float) -> str:
    with np.errstate(over="ignore"):
        return g.number(value)


def entries() -> Iterator[Entry]:
    yield from decoders("overflow", {str(seed): overflowing(seed) for seed in range(30)})

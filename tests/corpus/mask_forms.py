"""Masks by their values: causal, window, padding and the caller's own are taken; all others are refused."""

from collections.abc import Iterator
from typing import Any

import numpy as np
from concat_graphs import Build, decoders
from onnx import TensorProto

from corpus import Entry


def later(g: Build, by: int) -> str:
    """Keys after the query's row minus `by`."""
    return g.Greater(g.key_rows, g.Sub(g.query_rows, by))


def before(g: Build, row: int) -> str:
    """Keys before `row`."""
    return g.Less(g.key_rows, row)


def off_by_one(g: Build) -> str:
    return g.LessOrEqual(g.key_rows, g.Add(g.query_rows, 1))


def prefix(g: Build) -> str:
    return g.Or(g.causal(), before(g, 8))


def blocks(g: Build) -> str:
    block = [g.Div(rows, 8) for rows in (g.key_rows, g.query_rows)]
    return g.And(g.causal(), g.node("Equal", block))


def sink(g: Build) -> str:
    return g.And(g.causal(), g.Or(before(g, 1), later(g, 6)))


def window_of_the_update_only(g: Build) -> str:
    """Right in every decode step, and in prompts of up to 16 tokens."""
    step = g.Sub(g.query_rows, g.past)
    return g.And(g.causal(), g.Greater(g.key_rows, g.Sub(step, 16)))


def without_the_first_two_in_long_texts(g: Build) -> str:
    short = g.Less(g.all, 18)
    return g.And(g.causal(), g.Or(short, g.Greater(g.key_rows, 1)))


def window_on_both_sides(g: Build) -> str:
    ahead = g.Less(g.key_rows, g.Add(g.query_rows, 2))
    return g.And(later(g, 3), ahead)


LOOK_ALIKES = (
    off_by_one, prefix, blocks, sink, window_of_the_update_only, without_the_first_two_in_long_texts,
    window_on_both_sides,
)  # fmt: skip


def by_head(g: Build) -> str:
    """Half of the heads see the whole text, half of them a window of 3."""
    near = g.And(g.causal(), later(g, 3))
    both = [g.to_scores(tensor) for tensor in (g.causal(), near)]
    return g.Concat(*both, *both, axis=1)


def even_bias(g: Build, scores: str) -> str:
    """Added to the scores: a slope per head times the distance (ALiBi)."""
    slopes = g.constant(np.array([0.5, 0.25, 0.125, 0.06]).reshape(1, 4, 1, 1), np.float32)
    distance = g.Cast(g.Sub(g.key_rows, g.query_rows), to=TensorProto.FLOAT)
    return g.Add(scores, g.Mul(g.to_scores(distance), slopes))


def own(g: Build) -> str:
    return g.once("mask", lambda: g.input("mask", TensorProto.BOOL, ["batch", 1, "sequence", "total"]))


FORMS: dict[str, dict[str, Any]] = {
    **{f"window of {n}": {"mask": "padding", "window": n} for n in (1, 24)},
    "hidden by -inf": {"lowest": -np.inf},
    "own, added, float16, upcast": {"mask": "own", "own_type": np.float32, "dtype": np.float16, "upcast": True},
    "heads with different masks": {"mask": by_head},
    "even bias": {"scores": even_bias},
    "own and causal": {"mask": lambda g: g.And(own(g), g.to_scores(g.causal()))},
    "own turned round": {"mask": lambda g: g.Not(own(g))},
    **{mask.__name__: {"mask": lambda g, mask=mask: g.to_scores(mask(g))} for mask in LOOK_ALIKES},
}


def entries() -> Iterator[Entry]:
    yield from decoders("mask", FORMS)

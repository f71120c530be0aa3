"""Masks by their values: causal, window, padding and the caller's own are taken; all others are refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
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


def dilated(g: Build) -> str:
    distance = g.Mod(g.Sub(g.query_rows, g.key_rows), 2)
    return g.And(g.causal(), g.Equal(distance, 0))


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
    off_by_one, prefix, blocks, sink, dilated, window_of_the_update_only,
    without_the_first_two_in_long_texts, window_on_both_sides,
)  # fmt: skip


def one_head_near(g: Build) -> str:
    near = g.to_scores(g.And(g.causal(), later(g, 3)))
    return g.node("Concat", [g.to_scores(g.causal())] * 3 + [near], axis=1)


def of_tokens(g: Build) -> str:
    total = g.ReduceSum(g.tokens, [1], keepdims=1)
    shown = g.Unsqueeze(g.Greater(total, 3), [1, 2])
    return g.And(g.to_scores(g.causal()), shown)


def padding_turned_round(g: Build) -> str:
    shown = g.Not(g.Cast(g.padding, to=TensorProto.BOOL))
    return g.And(g.to_scores(g.causal()), g.Unsqueeze(shown, [1, 2]))


def bias(g: Build, scores: str, even: bool) -> str:
    """Added to the scores: a slope per head times the distance (ALiBi), or times the product of both positions."""
    number = g.node("Sub" if even else "Mul", [g.key_rows, g.query_rows])
    slopes = g.constant(np.array([0.5, 0.25, 0.125, 0.06]).reshape(1, 4, 1, 1), np.float32)
    numbers = g.Cast(number, to=TensorProto.FLOAT)
    return g.Add(scores, g.Mul(g.to_scores(numbers), slopes))


def own(g: Build, kind: int = TensorProto.BOOL, name: str = "mask") -> str:
    return g.once(name, lambda: g.input(name, kind, ["batch", 1, "sequence", "total"]))


FORMS: dict[str, dict[str, Any]] = {
    **{f"window of {n}": {"mask": "padding", "window": n} for n in (1, 2, 23, 24, 27)},
    "window, positions": {"mask": "positions", "window": 5},
    **{f"hidden by {n}": {"lowest": n} for n in (-1e4, float(np.finfo(np.float32).min), -np.inf)},
    "one token, none": {"mask": "none", "sequence": 1},
    "padding, hide": {"mask": "padding", "apply": "hide"},
    "buffer, where": {"mask": "buffer", "apply": "where"},
    "own, float16, upcast": {"mask": "own", "dtype": np.float16, "upcast": True, "layers": 2},
    "own, added, float16": {"mask": "own", "own_type": np.float16, "dtype": np.float16},
    "own, added, float16, upcast": {"mask": "own", "own_type": np.float32, "dtype": np.float16, "upcast": True},
    "one for all heads": {"mask": lambda g: g.node("Concat", [g.to_scores(g.causal())] * 4, axis=1)},
    "one head near": {"mask": one_head_near},
    "of tokens": {"mask": of_tokens},
    "padding turned round": {"mask": padding_turned_round},
    "even bias": {"scores": partial(bias, even=True)},
    "even bias after the mask": {"masked": partial(bias, even=True)},
    "uneven bias": {"scores": partial(bias, even=False)},
    "own and causal": {"mask": lambda g: g.And(own(g), g.to_scores(g.causal()))},
    "own turned round": {"mask": lambda g: g.Not(own(g))},
    "own, integers": {"mask": lambda g: g.Cast(own(g, TensorProto.INT64, "attention_mask"), to=TensorProto.BOOL)},
    "own doubled": {
        "mask": "none",
        "scores": lambda g, t: g.Add(t, g.Mul(own(g, TensorProto.FLOAT), g.number(2))),
    },
}


def by_head(g: Build) -> str:
    """Half of the heads see the whole text, half of them a window of 3."""
    near = g.And(g.causal(), g.Greater(g.key_rows, g.Sub(g.query_rows, 3)))
    both = [g.to_scores(tensor) for tensor in (g.causal(), near)]
    return g.Concat(*both, *both, axis=1)


def giving_scores(g: Build, query: str, keys: str, values: str) -> str:
    """Attention that gives its scores as an output of the model, too."""
    mask = g.Where(g.to_scores(g.causal()), g.number(0.0), g.number(-1e4))
    y = g.node("Attention", [query, keys, values, mask], ["", "", "", "scores"])
    g.output("scores", TensorProto.FLOAT, ["batch", 4, "sequence", "total"])
    return y


REFUSED: dict[str, dict[str, Any]] = {
    "heads with different masks": {"mask": by_head},
    "scores as an output": {"attend": giving_scores, "opset": 24},
}


def entries() -> Iterator[Entry]:
    yield from decoders("mask", REFUSED)
    yield from decoders("mask", FORMS)
    for apply in ("add", "where"):
        forms = {mask.__name__: {"mask": _shown(mask), "apply": apply} for mask in LOOK_ALIKES}
        yield from decoders(f"mask, {apply}", forms)


def _shown(mask: Callable[[Build], str]) -> Callable[[Build], str]:
    return lambda g: g.to_scores(mask(g))

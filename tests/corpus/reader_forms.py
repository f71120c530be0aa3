"""Decoders whose caches somebody reads beside attention, or whose update is none: refused by name."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import onnx
from concat_graphs import Build, Decoder, decoders, joined, make_decoder
from graphs import Graph, renamed
from onnx import TensorProto

from corpus import Builders, Entry, built

FLOAT = TensorProto.FLOAT
After = Callable[[Build, str], str]
Write = Callable[[Build, str, str, str], str]


def shown(what: Callable[[Build], str], rank: int = 4) -> After:
    """An output beside the logits."""

    def after(g: Build, x: str) -> str:
        g.Identity(what(g), out="debug")
        g.output("debug", FLOAT, [f"d{axis}" for axis in range(rank)])
        return x

    return after


def mixed(what: Callable[[Build], str]) -> After:
    """Added to the hidden states."""
    return lambda g, x: g.Add(x, g.ReduceMean(what(g), keepdims=0))


def first(kind: str) -> Callable[[Build], str]:
    return lambda g: (g.pasts if kind == "past" else g.presents)[0]


def norm(g: Build) -> str:
    return g.ReduceL2(g.presents[0], [3], keepdims=0)


def probabilities(g: Build, x: str) -> str:
    softmax = next(n for n in g.nodes if n.op_type == "Softmax")
    g.output(softmax.output[0], FLOAT, ["a", "b", "c", "d"])
    return x


READERS: dict[str, After] = {
    "present shown": shown(first("present")),
    "norm of the present shown": shown(norm, 3),
    "present in the hidden states": mixed(first("present")),
    "past in the hidden states": mixed(first("past")),
    "probabilities shown": probabilities,
}


def of_keys(write: Write) -> dict[str, Any]:
    """Keys are written in another way than values."""
    return {"write": lambda g, *names: joined(g, *names) if g.part else write(g, *names)}


def read_before(g: Build, past: str, new: str, present: str) -> str:
    """Attention reads the keys as they were before this step."""
    joined(g, past, new, present)
    return past


def picked(g: Build, past: str, new: str, present: str) -> str:
    """New rows that are picked by what the tokens are."""
    places = g.Squeeze(g.Slice(g.NonZero(g.tokens), [1], [2], [0]))
    return joined(g, past, g.Gather(new, places, axis=2), present)


UPDATES: dict[str, dict[str, Any]] = {
    "new_rows_first": of_keys(lambda g, past, new, present: joined(g, new, past, present)),
    "past_twice": {"write": lambda g, past, new, present: joined(g, g.pasts[0], new, present)},
    "three_parts": of_keys(lambda g, past, new, present: g.Concat(past, new, new, out=present, axis=2)),
    "past_with_past": of_keys(lambda g, past, new, present: joined(g, past, past, present)),
    "attention_over_past": of_keys(read_before),
    "fixed_length": {"rows": lambda layer, kind: (7 if kind == "key" else "past", f"total_{kind}")},
    "picked": of_keys(picked),
}
ONE = "length"
"""Exporters do not always care."""


def style(g: Build, x: str) -> str:
    """A Concat of an input that is no cache."""
    extra = g.input("style", FLOAT, ["batch", "styles", 16])
    joined = g.Concat(extra, x, axis=1)
    return g.Add(x, g.ReduceMean(joined, [1], keepdims=1))


def joined_features(symbol: str = "n") -> onnx.ModelProto:
    """Prompt vectors in front of embedded tokens, as an output: a Concat of an input that is no cache."""
    g = Graph()
    features = g.input("prompt", FLOAT, ["batch", symbol, 8])
    tokens = g.input("input_ids", TensorProto.INT64, ["batch", "sequence"])
    table = g.constant(np.random.default_rng(0).standard_normal((16, 8)), np.float32)
    rows = g.Gather(table, tokens)
    joined = g.Concat(features, rows, axis=1)
    g.MatMul(joined, g.constant(np.ones((8, 16)), np.float32), out="logits")
    g.output("logits", FLOAT, ["batch", "all", 16])
    return g.model(18)


def entries() -> Iterator[Entry]:
    yield from decoders("reader", {name: {"after": after} for name, after in READERS.items()})
    yield from decoders("update", {n: {"repeat": "tile", "mask": "positions", **how} for n, how in UPDATES.items()})
    one: dict[str, Any] = {"sequence": ONE, "total": ONE, "rows": lambda layer, kind: (ONE, ONE)}
    yield from decoders("update", {"one symbol": {"mask": "padding", "layers": 2, **one}})
    models: Builders = {
        "an input of that name": lambda: renamed(make_decoder(Decoder()), {"position_ids": "write_indices"}),
        "prompt in front": joined_features,
    }
    yield from built("update", models, capacity=24)
    yield from built("no capacity", {"plain": lambda: make_decoder(Decoder())})
    yield from decoders("beside", {"style": {"after": style}})

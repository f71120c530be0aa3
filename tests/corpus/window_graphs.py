"""Windows as circular buffers: decoders that grow by Concat, and canonical caches under a window."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import onnx
from attention_forms import near_in_turns
from concat_graphs import decoders
from graphs import Graph
from onnx import TensorProto

from corpus import Entry, built

LONG = 40


FORMS: dict[str, dict[str, Any]] = {
    "window": {"window": 5},
    "padding": {"window": 5, "mask": "padding"},
    "bsnd": {"window": 3, "layout": "bsnd"},
    "flat": {"window": 3, "layout": "flat", "layers": 2},
    "in turns": {"layers": 3, "scores": near_in_turns},
    "causal": {},
}


def canonical(nonpad: bool, *, shown: bool = False, **attrs: int) -> onnx.ModelProto:
    """A model with TensorScatter caches and an Attention of opset 25; `shown`: its scores are an output."""
    g = Graph()
    query = g.input("query", TensorProto.FLOAT, ["B", 2, "S", 4])
    indices = g.input("write_indices", TensorProto.INT64, ["B"])
    presents = []
    for kind in ("key", "value"):
        past = g.input(f"{kind}_cache", TensorProto.FLOAT, ["B", 2, LONG, 4])
        new = g.input(f"new_{kind}", TensorProto.FLOAT, ["B", 2, "S", 4])
        presents.append(g.TensorScatter(past, new, indices, out=f"updated_{kind}_cache", axis=2))
        g.output(presents[-1], TensorProto.FLOAT, ["B", 2, LONG, 4])
    lengths = ["", "", "", g.input("nonpad_kv_seqlen", TensorProto.INT64, ["B"])] if nonpad else []
    scores = ["", "", "scores"] if shown else []
    g.Attention(query, *presents, *lengths, out=["out", *scores], **attrs)
    g.output("out", TensorProto.FLOAT, ["B", 2, "S", 4])
    if scores:
        g.output("scores", TensorProto.FLOAT, ["B", 2, "S", LONG])
    return g.model(25)


CANONICAL: dict[str, dict[str, Any]] = {
    "window": {"nonpad": True, "is_causal": 1, "left_window_size": 4},
    "causal": {"nonpad": True, "is_causal": 1},
    "not causal": {"nonpad": True, "left_window_size": 4},
    "of the first key": {"nonpad": False, "is_causal": 1, "left_window_size": 4},
    "no window": {"nonpad": True, "is_causal": 1, "left_window_size": -1},
    "scores shown": {"nonpad": True, "shown": True, "is_causal": 1, "left_window_size": 4},
}


def entries() -> Iterator[Entry]:
    models = {name: partial(canonical, **how) for name, how in CANONICAL.items()}
    yield from built("canonical window", {"window": models["window"]})
    yield from built("canonical window, circular", models, sliding="circular", window_chunk=3)
    for chunk in (1, 4):
        yield from decoders(f"window, chunks of {chunk}", FORMS, LONG, sliding="circular", window_chunk=chunk)
    one = {"window": FORMS["window"]}
    for chunk in (36, 0):
        yield from decoders(f"window, chunks of {chunk}", one, LONG, sliding="circular", window_chunk=chunk)

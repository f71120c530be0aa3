"""Windows as circular buffers: decoders that grow by Concat, and canonical caches under a window."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import onnx
from attention_forms import near_in_turns
from concat_graphs import decoders
from layer_graphs import Layers
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


def canonical(*, lengths: str = "nonpad_kv_seqlen", shown: bool = False, **attrs: int) -> onnx.ModelProto:
    """A model with TensorScatter caches and an Attention of opset 25; `shown`: its scores are an output."""
    g = Layers(TensorProto.FLOAT, "S", lengths)
    inputs = [g.query(heads=2), *g.caches(capacity=LONG), *(["", "", "", lengths] if lengths else [])]
    g.Attention(*inputs, out=["y", "", "", "scores"] if shown else "y", **attrs)
    for name, size in {"y": 16, **({"scores": LONG} if shown else {})}.items():
        g.output(name, TensorProto.FLOAT, ["B", 2, "S", size])
    return g.model(25)


CANONICAL: dict[str, dict[str, Any]] = {
    "window": {"is_causal": 1, "left_window_size": 4},
    "causal": {"is_causal": 1},
    "not causal": {"left_window_size": 4},
    "of the first key": {"lengths": "", "is_causal": 1, "left_window_size": 4},
    "no window": {"is_causal": 1, "left_window_size": -1},
    "scores shown": {"shown": True, "is_causal": 1, "left_window_size": 4},
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

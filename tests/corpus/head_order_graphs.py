"""Query heads that take turns at the heads of keys and values, with all that may differ from head to head."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
from concat_graphs import Build, Decoder, decoders
from onnx import TensorProto
from slope_graphs import added, times_slopes

from corpus import Entry

HEADS, KV_HEADS = 6, 3
TURNS = [0, 1, 2, 0, 1, 2]


def taking(g: Build, tensor: str, heads: Any = TURNS) -> str:
    return g.node("Gather", [tensor, g.constant(np.asarray(heads))], axis=1)


def tiled(g: Build, tensor: str) -> str:
    return g.node("Tile", [tensor, g.constant([1, HEADS // KV_HEADS, 1, 1])])


def spread(g: Build, tensor: str) -> str:
    """[B, 1, N, T, D] -> [B, G, N, T, D] -> [B, G * N, T, D]."""
    apart = g.node("Unsqueeze", [tensor, g.constant([1])])
    groups = g.constant([1, HEADS // KV_HEADS, 1, 1, 1])
    whole = g.node("Expand", [apart, groups])
    return g.node("Reshape", [whole, g.constant([0, HEADS, -1, g.decoder.size])])


def slopes(g: Build) -> str:
    distances = g.to_scores(g.node("Sub", [g.key_rows, g.query_rows]))
    return times_slopes(g, distances, np.linspace(0.03, 0.7, HEADS))


def bias(g: Build, scores: str) -> str:
    """T5: a number per head and distance, out of a table."""
    far = g.node("Clip", [g.node("Sub", [g.query_rows, g.key_rows]), g.constant(0), g.constant(7)])
    found = g.node("Gather", [g.weight(8, HEADS), far], axis=0)
    turned = g.node("Transpose", [found], perm=[2, 0, 1])
    return g.node("Add", [scores, g.node("Unsqueeze", [turned, g.constant([0])])])


def turns(**settings: Any) -> Decoder:
    given = {"heads": HEADS, "kv_heads": KV_HEADS, "repeat": "none", "keys": tiled, "values": tiled}
    return Decoder(**given | settings)


def masked_by_head(g: Build, scores: str) -> str:
    mask = g.input("mask", TensorProto.BOOL, ["batch", HEADS, "sequence", "total"])
    return g.node("Where", [mask, scores, g.number(-65504.0)])


def both(make: Any) -> dict[str, Any]:
    return {"keys": make, "values": make}


FORMS: dict[str, dict[str, Any]] = {
    "tiled": {},
    "spread": both(spread),
    "taken": both(taking),
    "repeated in two ways": {"values": spread},
    "sinks": {"sinks": "weight"},
    "the same sink": {"sinks": "zero"},
    "slopes": {"scores": added(slopes)},
    "a bias": {"scores": bias},
    "a window, capped": {"window": 5, "softcap": 3.0},
    "float16, upcast": {"dtype": np.float16, "upcast": True, "layout": "bsnd"},
    "padding, two layers": {"mask": "padding", "positions": "padding", "layers": 2},
    "one key head": {"kv_heads": 1, **both(partial(taking, heads=[0] * HEADS))},
    **{str(order): both(partial(taking, heads=order)) for order in ([0, 1, 2, 2, 1, 0], [1, 2, 0, 1, 2, 0])},
    "values in another order": {"values": partial(taking, heads=np.arange(HEADS) // 2)},
    "a mask for each head": {"mask": "none", "masked": masked_by_head},
}


def entries() -> Iterator[Entry]:
    yield from decoders("head order", {name: turns(**how) for name, how in FORMS.items()})

"""Decoders that give back the new rows of their caches only: what models that grow by Concat become if edited so."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from concat_graphs import Build, Decoder, decoders, joined
from graphs import Dim
from onnx import TensorProto
from stored import edited

from corpus import Entry

ROOM = 20


def new_rows(
    given: tuple[str, str] = ("", ""),
    change: str = "Identity",
    past: Callable[[str], Dim] = lambda kind: "past",
    **how: Any,
) -> Decoder:
    """A decoder whose outputs are what is joined with the past.

    Args:
        given: layouts of the outputs of keys and of values, if they are not those of what is joined.
        change: an operator on the keys that are given.
        past: rows of the past.
        how: see `Decoder`.
    """
    sequence = how.get("sequence", "sequence")

    def write(g: Build, past: str, new: str, present: str) -> str:
        layout = given[g.part]
        if layout == "flat":
            g.Reshape(g.Transpose(new, perm=[0, 2, 1, 3]), [0, 0, -1], out=present)
        elif layout:
            g.Transpose(new, out=present, perm=[g.layout.index(axis) for axis in layout])
        else:
            g.node("Identity" if g.part else change, [new], present)
        return joined(g, past, new)

    def rows(layer: int, kind: str) -> tuple[Dim, Dim | list[Dim]]:
        dims: dict[str, Dim] = {"b": "batch", "n": 2, "s": sequence, "d": 4}
        layout = given[kind == "value"]
        if layout == "flat":
            return past(kind), ["batch", sequence, 8]
        return past(kind), [dims[axis] for axis in layout] if layout else sequence

    return Decoder(**{"write": write, "rows": rows} | how)


DECODERS: dict[str, dict[str, Any]] = {
    "bsnd": {"layout": "bsnd"},
    "flat caches": {"layout": "flat"},
    "padding": {"mask": "padding", "positions": "padding"},
    "window": {"window": 3},
    "own mask": {"mask": "own", "apply": "where"},
    "lengths of the whole": {"positions": "present"},
    "float16": {"dtype": np.float16},
}
FULL: dict[str, dict[str, Any]] = {
    "padding": {"mask": "padding", "positions": "padding"},
    "padding and given positions": {"mask": "padding"},
    "own mask": {"mask": "own", "apply": "where"},
    "own mask, added": {"mask": "own", "own_type": np.float32},
    "one token at a time": {"mask": "own", "own_type": np.float32, "sequence": 1},
    "four tokens at a time": {"mask": "padding", "sequence": 4},
    "no mask": {"mask": "none"},
    "causal by place": {"mask": "past"},
    "window by place": {"mask": "padding", "window": 3},
}
"""A past that always has as many rows: a mask has to hide those that hold nothing."""


def prefixed(g: Build, x: str) -> str:
    """Another input that is joined is no cache, such as embeddings of a prefix."""
    prefix = g.input("prefix", TensorProto.FLOAT, ["batch", "rows", 16])
    more = g.Concat(prefix, x, axis=1)
    return g.Add(x, g.ReduceMean(more, [1]))


def by_batch(g: Build, x: str) -> str:
    """Hidden states, spread over as many sequences as the past has."""
    batch = g.Slice(g.Shape(g.pasts[0]), [0], [1])
    return g.Expand(x, g.Concat(batch, [1, 1], axis=0))


def given_twice(g: Build, past: str, new: str, present: str) -> str:
    """Values that are not given back are not taken for the keys, although another output has their shape."""
    rows = g.once("keys", lambda: new)
    g.Identity(rows, out=present)
    return joined(g, past, new)


def turned_within(g: Build, past: str, new: str, present: str) -> str:
    """Caches ``[B, P, N, D]`` that are joined, and read, with heads before rows."""
    whole = g.Concat(*(g.Transpose(t, perm=[0, 2, 1, 3]) for t in (past, new)), axis=2)
    g.Transpose(whole, out=present, perm=[0, 2, 1, 3])
    g.laid[whole] = "bnsd"
    return whole


def read_before(perm: tuple[int, ...], folder: Path) -> Path:
    """onnxsim joins the Transpose before an output with the one that reads the output."""

    def fuse(model: onnx.ModelProto) -> None:
        written = next(node.output[0] for node in model.graph.node if node.op_type == "ScatterND")
        reader = next(node for node in model.graph.node if list(node.input) == ["k_cache_out"])
        reader.input[0], reader.attribute[0].ints[:] = written, perm

    return edited("plain-torch/bshd_index_put_dynamo_op18", folder, fuse)


KEYS = ("bnds", "bnsd")
LAID: dict[str, dict[str, Any]] = {
    "keys transposed": {"layers": 2, "layout": KEYS},
    "both transposed": {"mask": "padding", "positions": "padding", "layout": "bnds"},
    "lengths of the whole": {"positions": "present", "layout": KEYS},
    "own mask": {"mask": "own", "apply": "where", "layout": KEYS},
    "heads before one sequence": {"layers": 2, "batch": 1, "layout": ("nbds", "nbsd")},
    "sizes read off a past": {"after": by_batch, "layout": KEYS},
}


FORMS: dict[str, dict[str, Any]] = {
    "keys transposed": {"given": ("bnds", "")},
    "tokens first": {"given": ("sbnd", "snbd")},
    "flat and transposed": {"given": ("flat", "bdns")},
    "negated keys": {"change": "Neg"},
}


def entries() -> Iterator[Entry]:
    models = {name: new_rows(**how) for name, how in DECODERS.items()}
    models |= {name: new_rows(layers=2, **how) for name, how in FORMS.items()}
    models |= {"prefixed": new_rows(after=prefixed), "given twice": new_rows(write=given_twice)}
    yield from decoders("new rows", models)
    yield from decoders("new rows, circular", {"window": models["window"]}, sliding="circular", window_chunk=3)
    full = {name: new_rows(past=lambda kind: ROOM, **_whole_masks(how)) for name, how in FULL.items()}
    full["several lengths"] = new_rows(past=lambda kind: ROOM + (kind == "value"), mask="padding")
    yield from decoders("full past", full, None)
    yield from decoders("full past, capacity 64", {"padding": full["padding"]}, capacity=64)
    yield from decoders("laid", LAID)
    yield from decoders("laid, new rows", {name: new_rows(**how) for name, how in LAID.items()})
    yield from decoders("turned", {
        **{p: {"layout": "bsnd", "positions": p, "write": turned_within} for p in ("input", "present")},
        "one head, three sequences": {"kv_heads": 1, "batch": 3},
    })  # fmt: skip
    for perm in ((1, 2, 0, 3), (1, 2, 3, 0)):
        yield f"turned/read before {perm}", partial(read_before, perm), {}


def _whole_masks(how: dict[str, Any]) -> dict[str, Any]:
    """Masks have one length, too, where steps have."""
    return how | ({"total": ROOM + how["sequence"]} if "sequence" in how else {})

"""Decoders whose caches grow by Concat and are cut to their newest rows, as layers with a window have it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from concat_graphs import VOCABULARY
from graphs import Dim, Graph
from onnx import TensorProto

from corpus import Entry, built

HEADS, KV_HEADS, SIZE = 4, 2, 4
WIDTH = HEADS * SIZE
FAR = 2**31


@dataclass(frozen=True)
class Cut:
    """The form of a decoder.

    Attributes:
        kept: rows that each layer keeps; 0: all.
        window: tokens that each layer sees, its own included; 0: all.
        cut: name in `CUTS`: how rows are cut off.
        mask: name in `MASKS`: what the masks are made of; "": there are none.
        values: rows that values keep more than keys.
        attention: "plain" operators, or "fused".
        layout: of the caches, "bnsd" or "bsnd".
        sequence: S where it is fixed, or a symbol.
        reads: "all" rows, or what is left of them after the "cut".
        counted: the layer from whose rows positions are counted; None: they are an input.
        after: adds something to the hidden states.
    """

    kept: tuple[int, ...] = (7,)
    window: tuple[int, ...] = (8,)
    cut: str = "slice"
    mask: str = "lengths"
    values: int = 0
    attention: str = "plain"
    layout: str = "bnsd"
    sequence: Dim = "sequence"
    reads: str = "all"
    counted: int | None = None
    after: Callable[[Built, str], str] | None = None


class Built(Graph):
    """A decoder under construction."""

    def __init__(self, how: Cut) -> None:
        super().__init__()
        self.how = how
        self.rng = np.random.default_rng(5)
        self.tokens = self.input("input_ids", TensorProto.INT64, ["batch", how.sequence])
        self.padding = self.input("attention_mask", TensorProto.INT64, ["batch", "total"]) if "pad" in how.mask else ""
        self.length = self.rows(self.tokens, 1)
        self.pasts = {
            f"{layer}.{kind}": self.input(
                f"past_key_values.{layer}.{kind}", TensorProto.FLOAT, _shape(how, f"past_{layer}_{kind}")
            )
            for layer in range(len(how.kept))
            for kind in ("key", "value")
        }
        if how.counted is None:
            self.positions = self.input("position_ids", TensorProto.INT64, ["batch", how.sequence])
        else:
            held = self.rows(self.pasts[f"{how.counted}.key"])
            numbers = self.range(held, self.Add(held, self.length))
            self.positions = self.Unsqueeze(numbers, [0])

    @property
    def axis(self) -> int:
        return 2 if self.how.layout == "bnsd" else 1

    def weight(self, *shape: int) -> str:
        return self.constant(self.rng.standard_normal(shape) / np.sqrt(shape[0]), np.float32)

    def rows(self, tensor: str, axis: int | None = None) -> str:
        """One dimension as ``[1]``."""
        place = self.axis if axis is None else axis
        return self.Shape(tensor, start=place, end=place + 1)

    def slice(self, tensor: str, start: str | int, end: str | int = FAR, axis: int | None = None, step: int = 1) -> str:
        bounds = [b if isinstance(b, str) else self.constant([b]) for b in (start, end)]
        return self.Slice(tensor, *bounds, [self.axis if axis is None else axis],
                                   [step])  # fmt: skip

    def range(self, start: str, end: str) -> str:
        zero = self.constant([0])
        ends = [self.Squeeze(t, zero) for t in (start, end)]
        return self.Range(*ends, 1)


def _computed(g: Built, joined: str, kept: int) -> str:
    """From Max(T - R, 0) on."""
    first = g.Sub(g.rows(joined), [kept])
    return g.slice(joined, g.Max(first, [0]))


def _chosen(g: Built, joined: str, kept: int) -> str:
    """From Where(T > R, T - R, 0) on."""
    total, rows = g.rows(joined), g.constant([kept])
    full = g.Greater(total, rows)
    return g.slice(joined, g.Where(full, g.Sub(total, rows), [0]))


def _by_update(g: Built, joined: str, kept: int) -> str:
    """As many rows more as there are new tokens."""
    return g.slice(joined, g.Neg(g.Add(g.length, [kept])))


CUTS: dict[str, Callable[[Built, str, int], str]] = {
    "slice": lambda g, joined, kept: g.slice(joined, -kept),
    "twice": lambda g, joined, kept: g.slice(g.slice(joined, -kept - 3), -kept),
    "computed": _computed,
    "chosen": _chosen,
    "the oldest rows": lambda g, joined, kept: g.slice(joined, 0, kept),
    "backwards": lambda g, joined, kept: g.slice(joined, -1, -kept - 1, step=-1),
    "heads": lambda g, joined, kept: g.slice(joined, -KV_HEADS, axis=3 - g.axis),
    "by the update": _by_update,
    "by a position": lambda g, joined, kept: g.slice(joined, g.Neg(g.slice(
        g.Reshape(g.positions, [-1]), 0, 1, axis=0))),
}  # fmt: skip


def _spread(g: Built, window: int, keys: str, queries: str) -> str:
    """Causal, and in the window: bool ``[.., S, T]`` from positions of keys and queries."""
    near = g.LessOrEqual(keys, queries)
    if window:
        near = g.And(near, g.Greater(keys, g.Sub(queries, window)))
    return near


def _lengths(g: Built, past: str, window: int) -> str:
    """Positions counted from the first row that is left."""
    held = g.rows(past)
    total = g.Add(held, g.length)
    keys = g.Unsqueeze(g.range(g.constant([0]), total), [0, 1, 2])
    queries = g.Unsqueeze(g.range(held, total), [0, 1, 3])
    return _spread(g, window, keys, queries)


def _positions(g: Built, past: str, window: int) -> str:
    """Positions of tokens: the last rows are the newest ones."""
    total = g.Add(g.rows(past), g.length)
    last = g.slice(g.positions, -1, axis=1)  # [B, 1]
    back = g.Sub(g.range(g.constant([0]), total), g.Sub(total, [1]))
    keys = g.Unsqueeze(g.Add(last, back), [1, 2])
    return _spread(g, window, keys, g.Unsqueeze(g.positions, [1, 3]))


def _padded(g: Built, past: str, window: int, newest: bool | None) -> str:
    """The padding mask over the newest rows, or over the first ones; None: it has no others."""
    total = g.Add(g.rows(past), g.length)
    ends = (g.Neg(total), FAR) if newest else (0, total)
    part = g.padding if newest is None else g.slice(g.padding, *ends, axis=1)
    seen = g.Cast(part, to=TensorProto.BOOL)
    return g.And(g.Unsqueeze(seen, [1, 2]), _lengths(g, past, window))


MASKS: dict[str, Callable[[Built, str, int], str]] = {
    "lengths": _lengths,
    "positions": _positions,
    "padding": lambda g, past, window: _padded(g, past, window, newest=True),
    "padding of the rows": lambda g, past, window: _padded(g, past, window, newest=None),
    "padding from the first": lambda g, past, window: _padded(g, past, window, newest=False),
}


def make_cut(how: Cut) -> onnx.ModelProto:
    """The decoder as a model."""
    g = Built(how)
    x = g.Gather(g.weight(VOCABULARY, WIDTH), g.tokens, axis=0)
    column = g.Unsqueeze(g.Cast(g.positions, to=TensorProto.FLOAT), [-1])
    angles = g.Mul(column, g.constant(np.linspace(0.05, 1.5, WIDTH), np.float32))
    x = g.Add(x, g.Sin(angles))
    for layer in range(len(how.kept)):
        x = g.Add(x, _layer(g, x, layer))
    if how.after is not None:
        x = how.after(g, x)
    g.MatMul(x, g.weight(WIDTH, VOCABULARY), out="logits")
    g.output("logits", TensorProto.FLOAT, ["batch", how.sequence, VOCABULARY])
    for layer in range(len(how.kept)):
        for kind in ("key", "value"):
            g.output(f"present.{layer}.{kind}", TensorProto.FLOAT, _shape(how, f"after_{layer}_{kind}"))
    model = g.model(24 if how.attention == "fused" else 18)
    onnx.checker.check_model(model, full_check=True)
    return model


def _shape(how: Cut, rows: Dim) -> list[Dim]:
    return ["batch", KV_HEADS, rows, SIZE] if how.layout == "bnsd" else ["batch", rows, KV_HEADS, SIZE]


def _layer(g: Built, x: str, layer: int) -> str:
    how = g.how
    query = g.Transpose(_heads(g, g.MatMul(x, g.weight(WIDTH, WIDTH)), HEADS), perm=[0, 2, 1, 3])
    pasts: list[str] = []
    read: list[str] = []
    for kind in ("key", "value"):
        past = g.pasts[f"{layer}.{kind}"]
        new = _heads(g, g.MatMul(x, g.weight(WIDTH, KV_HEADS * SIZE)), KV_HEADS)
        kept = how.kept[layer] + (how.values if kind == "value" and how.kept[layer] else 0)
        pasts.append(past)
        read.append(_cached(g, past, new, kept, f"present.{layer}.{kind}"))
    keys, values = (t if how.layout == "bnsd" else g.Transpose(t, perm=[0, 2, 1, 3]) for t in read)
    mask = MASKS[how.mask](g, pasts[0], how.window[layer]) if how.mask else ""
    if how.attention == "fused":
        output = g.Attention(query, keys, values, *([mask] if mask else []))
    else:
        scores = g.MatMul(query, g.Transpose(_repeat(g, keys), perm=[0, 1, 3, 2]))
        if mask:
            scores = g.Where(mask, scores, g.constant(-65504.0, np.float32))
        output = g.MatMul(g.Softmax(scores, axis=-1), _repeat(g, values))
    merged = g.Reshape(g.Transpose(output, perm=[0, 2, 1, 3]), [0, 0, WIDTH])
    return g.MatMul(merged, g.weight(WIDTH, WIDTH))


def _heads(g: Built, tensor: str, heads: int) -> str:
    return g.Reshape(tensor, [0, 0, heads, SIZE])


def _cached(g: Built, past: str, new: str, kept: int, present: str) -> str:
    """The keys or values that attention reads."""
    if g.how.layout == "bnsd":
        new = g.Transpose(new, perm=[0, 2, 1, 3])
    if not kept:
        return g.Concat(past, new, out=present, axis=g.axis)
    before = g.slice(past, -kept) if g.how.cut == "twice" else past
    joined = g.Concat(before, new, axis=g.axis)
    g.Identity(CUTS[g.how.cut](g, joined, kept), out=present)
    return joined if g.how.reads == "all" else present


def _repeat(g: Built, tensor: str) -> str:
    return g.Gather(tensor, np.arange(HEADS) // (HEADS // KV_HEADS), axis=1)


FORMS: dict[str, Cut] = {
    "a window of two": Cut(kept=(1,), window=(2,)),
    "a large window": Cut(kept=(15,), window=(16,)),
    "more kept than seen": Cut(kept=(11,), window=(6,)),
    "every layer": Cut(kept=(7, 7), window=(8, 8)),
    "windows of their own": Cut(kept=(7, 4), window=(8, 5)),
    "cut first": Cut(kept=(7, 0), window=(8, 0)),
    "cut last": Cut(kept=(0, 7), window=(0, 8)),
    "a window that is not cut": Cut(kept=(7, 0), window=(8, 8)),
    "a computed start": Cut(cut="computed", kept=(7, 0), window=(8, 0)),
    "a chosen start": Cut(cut="chosen"),
    "positions": Cut(mask="positions", kept=(7, 0), window=(8, 0)),
    "padding": Cut(mask="padding", kept=(7, 0), window=(8, 0)),
    "padding from the first row": Cut(mask="padding from the first"),
    "padding of the rows that are kept": Cut(mask="padding of the rows", kept=(7, 7), window=(8, 8)),
    "fewer kept than the capacity, padding": Cut(mask="padding of the rows", kept=(12,), window=(5,)),
    "another layout": Cut(layout="bsnd", kept=(7, 0), window=(8, 0)),
    "fused by positions": Cut(attention="fused", mask="positions"),
    # One token at a time sees what is kept and itself, mask or not; several would see more than a window.
    "one token, no window": Cut(sequence=1, window=(0,)),
    "one token, no mask": Cut(sequence=1, window=(0,), mask=""),
    "one token, fused, no mask": Cut(sequence=1, window=(0, 0), kept=(7, 0), mask="", attention="fused"),
    "one token, fewer kept than the window": Cut(sequence=1, kept=(5,)),
    "positions counted from a layer that keeps all": Cut(kept=(7, 0), window=(8, 0), counted=1),
    "a cut that leaves all heads": Cut(cut="heads", kept=(0,)),
    "as long as the capacity": Cut(kept=(40,), window=(41,)),
    "longer than the capacity": Cut(kept=(80,), window=(81,)),
    "much longer": Cut(kept=(4095,), window=(4096,), cut="computed"),
    "not cut within the capacity, no window": Cut(kept=(40,), window=(0,)),
    "fewer kept than seen": Cut(kept=(5,)),
    "no window": Cut(window=(0,)),
    "no mask": Cut(mask=""),
    "positions counted from rows that are kept": Cut(counted=0),
    "attention over the rest": Cut(reads="cut", mask=""),
    **{f"kept {n - 1}": Cut(kept=(n - 1, 0), window=(n, 0), mask="positions") for n in (2, 9, 10)},
}


def entries() -> Iterator[Entry]:
    how: list[dict[str, Any]] = [{"cut": c} for c in CUTS] + [{"mask": m} for m in MASKS]
    how += [{"attention": "fused"}, {"layout": "bsnd"}, {"kept": (0, 7), "window": (0, 8)}, {"sequence": 1}]
    how += [{"values": 1}, {"reads": "cut"}]
    cuts = {str(h): (lambda h=h: make_cut(Cut(**h))) for h in how}
    yield from built("cut", cuts, capacity=24)
    forms = {n: (lambda h=h: make_cut(h)) for n, h in FORMS.items()}
    yield from built("cut", forms, capacity=40)
    at_the_end = {n: m for n, m in forms.items() if n.startswith("kept")}
    yield from built("cut, capacity 9", at_the_end, capacity=9)
    rings = {n: m for n, m in cuts.items() if "attention" in n or "kept" in n or n == "{'mask': 'lengths'}"}
    yield from built("cut, circular", rings, capacity=24, sliding="circular", window_chunk=8)

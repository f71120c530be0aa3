"""Decoders whose caches have a fixed number of rows, out of which the oldest are shifted as new ones come."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import onnx
from graphs import Dim, Graph
from onnx import TensorProto

from corpus import Entry, built

ROWS, LONG = 8, 40
HEADS, SIZE, VOCABULARY = 2, 4, 32
WIDTH = HEADS * SIZE
FAR = 2**62


@dataclass(frozen=True)
class Shifted:
    """The form of a decoder.

    Attributes:
        layers: how each layer's caches are written: "cat" (rows are cut off, new ones joined), "cut" (joined, then
            cut), "roll" (rolled by one, then the last row is written; `length` is 1), "full" (`LONG` rows, written at a
            counter), "grows"; or a look-alike: "front" (new rows first), "oldest" (the oldest are kept), "whole"
            (attention reads what is cut), "still" (the same row is written in every step).
        mask: over shifted rows: "own" (an input), "added" (one of floats), "counted" (from positions), "late" (the
            same, without the oldest row), "still" (the same in every step), "none".
        length: S.
        layout: axes of the caches, "bnsd", "bsnd" or "bnds".
    """

    layers: tuple[str, ...] = ("cat",)
    mask: str = "own"
    length: Dim = "sequence"
    batch: Dim = "batch"
    layout: str = "bnsd"
    rows: int = ROWS


class _Build(Graph):
    def __init__(self, how: Shifted) -> None:
        super().__init__()
        self.how = how
        self.rng = np.random.default_rng(5)
        self.masks: dict[str, str] = {}
        self.axis = how.layout.index("s")

    def weight(self, *shape: int) -> str:
        return self.constant(self.rng.standard_normal(shape) / np.sqrt(shape[0]), np.float32)

    def cut(self, tensor: str, start: str | int, end: int = FAR) -> str:
        first = start if isinstance(start, str) else self.constant([start])
        return self.Slice(tensor, first, [end], [self.axis])

    def joined(self, *tensors: str, out: str = "") -> str:
        return self.node("Concat", tensors, out, axis=self.axis)

    @property
    def new(self) -> str:
        """S, ``[1]``."""
        return self.Shape("input_ids", start=1, end=2)

    @property
    def count(self) -> str:
        """Tokens before the step, for all sequences."""
        if all(value.name != "cur_len" for value in self.inputs):
            self.input("cur_len", TensorProto.INT64, [])
        return "cur_len"

    @property
    def steps(self) -> str:
        """``0 .. S - 1``."""
        return self.Range(self.constant(0), self.Squeeze(self.new), 1)

    def shape(self, rows: Dim) -> list[Dim]:
        dims: dict[str, Dim] = {"b": self.how.batch, "n": HEADS, "s": rows, "d": SIZE}
        return [dims[axis] for axis in self.how.layout]


def make_shifted(how: Shifted) -> onnx.ModelProto:
    """The decoder as a model."""
    g = _Build(how)
    tokens = g.input("input_ids", TensorProto.INT64, [how.batch, how.length])
    positions = g.input("position_ids", TensorProto.INT64, [how.batch, how.length])
    column = g.Unsqueeze(g.Cast(positions, to=TensorProto.FLOAT), [-1])
    signal = g.Sin(g.Mul(column, g.constant(np.linspace(0.1, 1.5, WIDTH), np.float32)))
    x = g.Add(g.Gather(g.weight(VOCABULARY, WIDTH), tokens, axis=0), signal)
    for layer, form in enumerate(how.layers):
        x = g.Add(x, _layer(g, x, layer, form))
    g.MatMul(x, g.weight(WIDTH, VOCABULARY), out="logits")
    g.output("logits", TensorProto.FLOAT, [how.batch, how.length, VOCABULARY])
    model = g.model(18)
    onnx.checker.check_model(model, full_check=True)
    return model


def _layer(g: _Build, x: str, layer: int, form: str) -> str:
    query, *news = (g.Reshape(g.MatMul(x, g.weight(WIDTH, WIDTH)), [0, 0, HEADS, SIZE]) for _ in range(3))
    read = []
    for part, new in zip(("key", "value"), news, strict=True):
        past, present = f"past_key_values.{layer}.{part}", f"present.{layer}.{part}"
        rows: Dim = {"full": LONG, "grows": "past"}.get(form, g.how.rows)
        g.input(past, TensorProto.FLOAT, g.shape(rows))
        if g.how.layout != "bsnd":
            new = g.Transpose(new, perm=[0, 2, 1, 3] if g.how.layout == "bnsd" else [0, 2, 3, 1])
        read.append(_written(g, form, past, new, present))
        g.output(present, TensorProto.FLOAT, g.shape("total" if form == "grows" else rows))
    if g.how.layout != "bnsd":
        perm = [0, 2, 1, 3] if g.how.layout == "bsnd" else [0, 1, 3, 2]
        read = [g.Transpose(tensor, perm=perm) for tensor in read]
    query = g.Transpose(query, perm=[0, 2, 1, 3])
    scores = g.MatMul(query, g.Transpose(read[0], perm=[0, 1, 3, 2]))
    scores = g.Mul(scores, g.constant(SIZE**-0.5, np.float32))
    scores = _masked(g, scores, form)
    out = g.MatMul(g.Softmax(scores, axis=-1), read[1])
    merged = g.Reshape(g.Transpose(out, perm=[0, 2, 1, 3]), [0, 0, WIDTH])
    return g.MatMul(merged, g.weight(WIDTH, WIDTH))


def _written(g: _Build, form: str, past: str, new: str, present: str) -> str:
    """Write to a cache; returns what attention reads."""
    if form == "grows":
        return g.joined(past, new, out=present)
    if form == "full":
        order = [2, 0, 1, 3] if g.axis == 2 else [1, 0, 2, 3]
        major, rows = (g.Transpose(t, perm=order) for t in (past, new))
        index = g.Unsqueeze(g.Add(g.count, g.steps), [1])
        written = g.ScatterND(major, index, rows)
        return g.Transpose(written, out=present, perm=[int(i) for i in np.argsort(order)])
    if form == "still":
        index = g.Expand(g.constant([[[[5]]]]), g.Shape(new))
        return g.ScatterElements(past, index, new, out=present, axis=g.axis)
    if form == "cat":
        return g.joined(g.cut(past, g.new), new, out=present)
    if form == "roll":
        order = [2, 0, 1, 3] if g.axis == 2 else [1, 0, 2, 3]
        rolled = g.joined(g.cut(past, 1), g.cut(past, 0, 1))
        major, rows = (g.Transpose(t, perm=order) for t in (rolled, new))
        written = g.ScatterND(major, [[g.how.rows - 1]], rows)
        back = g.Transpose(written, perm=[int(i) for i in np.argsort(order)])
        g.Identity(back, out=present)  # attention reads what lies before the output, as torch exports it
        return back
    if form == "front":
        return g.joined(new, g.cut(past, 0, -1), out=present)
    whole = g.joined(past, new)
    if form == "oldest":
        return g.Identity(g.cut(whole, 0, g.how.rows), out=present)
    cut = g.Identity(g.cut(whole, -g.how.rows), out=present)
    return whole if form == "whole" else cut


def _masked(g: _Build, scores: str, form: str) -> str:
    if form in ("full", "grows"):
        if form not in g.masks:
            g.masks[form] = _causal(g, form)
        return g.Where(g.masks[form], scores, g.constant(-1e4, np.float32))
    if g.how.mask == "none":
        return scores
    if g.how.mask in ("own", "added"):
        kind = TensorProto.BOOL if g.how.mask == "own" else TensorProto.FLOAT
        if "own" not in g.masks:
            g.masks["own"] = g.input("mask", kind, [g.how.batch, 1, g.how.length, g.how.rows])
        if g.how.mask == "added":
            return g.Add(scores, "mask")
    elif "own" not in g.masks:
        g.masks["own"] = g.constant(np.arange(g.how.rows) < 6, np.bool_) if g.how.mask == "still" else _counted(g)
    return g.Where(g.masks["own"], scores, g.constant(-1e4, np.float32))


def _causal(g: _Build, form: str) -> str:
    own = g.Unsqueeze("position_ids", [1, 3])
    if form == "full":
        return g.LessOrEqual(np.arange(LONG), own)
    past = next(value.name for value in g.inputs if "past" in [d.dim_param for d in value.type.tensor_type.shape.dim])
    total = g.Add(g.Shape(past, start=g.axis, end=g.axis + 1), g.new)
    scalar = g.Squeeze(total)
    return g.LessOrEqual(g.Range(0, scalar, 1), own)


def _counted(g: _Build) -> str:
    """The tokens in the last rows, up to each query's own."""
    own = g.Unsqueeze("position_ids", [1, 3])
    last = g.ReduceMax(own, [2])
    age = g.constant(np.arange(g.how.rows)[::-1].copy())
    tokens = g.Sub(last, age)
    least = g.constant(1 if g.how.mask == "late" else 0)
    return g.And(g.GreaterOrEqual(tokens, least), g.LessOrEqual(tokens, own))


FORMS: dict[str, dict[str, Any]] = {
    "cat": {"layers": ("cat", "cat")},
    "cat, one token": {"length": 1},
    "cat bsnd": {"layout": "bsnd"},
    "cat bnds": {"layout": "bnds"},
    "cut": {"layers": ("cut",)},
    "roll": {"layers": ("roll", "roll"), "length": 1},
    "roll bsnd, one sequence": {"layers": ("roll",), "length": 1, "layout": "bsnd", "batch": 1},
    "added": {"mask": "added"},
    "added, one token": {"mask": "added", "length": 1},
    "counted": {"mask": "counted"},
    "two sequences": {"batch": 2},
    "with full": {"layers": ("cat", "full", "cat")},
    "rolls with full": {"layers": ("full", "roll"), "length": 1},
    "roll with full, counted": {"layers": ("roll", "full"), "length": 1, "mask": "counted"},
    "front": {"layers": ("front",), "length": 1},
    "oldest": {"layers": ("oldest",)},
    "read whole": {"layers": ("whole",), "mask": "none", "length": 1},
    "late": {"mask": "late"},
    "no mask": {"mask": "none"},
    "still": {"layers": ("still",), "length": 1, "mask": "still"},
}
GROWING: dict[str, dict[str, Any]] = {
    "with growing": {"layers": ("grows", "cat")},
    "roll with growing": {"layers": ("roll", "grows"), "length": 1},
}


def entries() -> Iterator[Entry]:
    yield from built("shifted", _models(FORMS))
    yield from built("shifted", _models(GROWING), capacity=LONG)


def _models(forms: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    return {name: partial(make_shifted, Shifted(**how)) for name, how in forms.items()}

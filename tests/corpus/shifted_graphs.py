"""Decoders whose caches have a fixed number of rows: old ones are shifted out, or rows are written at a counter."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import onnx
from attention_forms import in_turn
from concat_graphs import Build, Decoder, _attend, decoders, joined, make_decoder
from graphs import Dim
from onnx import TensorProto
from update_graphs import CAPACITY

from corpus import Entry

ROWS, LONG = 8, 40
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

    def decoder(self) -> Decoder:
        return Decoder(
            heads=2, layers=len(self.layers), batch=self.batch, sequence=self.length, layout=self.layout, lowest=-1e4,
            mask="none", scores=self._masked, write=self._written, rows=self._rows,
        )  # fmt: skip

    def _rows(self, layer: int, kind: str) -> tuple[Dim, Dim]:
        fixed = LONG if self.layers[layer] == "full" else ROWS
        return ("past", "total") if self.layers[layer] == "grows" else (fixed, fixed)

    def _written(self, g: Build, past: str, new: str, present: str) -> str:
        """Write to a cache; returns what attention reads."""
        form = self.layers[g.layer]
        if form == "grows":
            return joined(g, past, new, present)
        if form == "full":
            return scattered(g, past, new, present, counted_rows(g))
        if form == "still":
            index = g.Expand(g.constant([[[[5]]]]), g.Shape(new))
            return g.ScatterElements(past, index, new, out=present, axis=g.axis)
        if form == "cat":
            return joined(g, _cut(g, past, g.Unsqueeze(g.length, [0])), new, present)
        if form == "roll":
            rolled = joined(g, _cut(g, past, 1), _cut(g, past, 0, 1))
            back = scattered(g, rolled, new, "", g.constant([ROWS - 1]))
            g.Identity(back, out=present)  # attention reads what lies before the output, as torch exports it
            return back
        if form == "front":
            return joined(g, new, _cut(g, past, 0, -1), present)
        whole = joined(g, past, new)
        cut = g.Identity(_cut(g, whole, 0, ROWS) if form == "oldest" else _cut(g, whole, -ROWS), out=present)
        return whole if form == "whole" else cut

    def _masked(self, g: Build, scores: str) -> str:
        form, lowest = self.layers[g.layer], g.number(g.decoder.lowest)
        if form in ("full", "grows"):
            return g.Where(g.once(form, lambda: self._causal(g)), scores, lowest)
        if self.mask == "none":
            return scores
        if self.mask == "added":
            return g.Add(scores, g.once("own", lambda: self._own(g, TensorProto.FLOAT)))
        return g.Where(g.once("own", lambda: self._own(g, TensorProto.BOOL)), scores, lowest)

    def _causal(self, g: Build) -> str:
        own = g.Unsqueeze(g.position_ids, [1, 3])
        if self.layers[g.layer] == "full":
            return g.LessOrEqual(np.arange(LONG), own)
        total = g.Add(g.size_of(g.pasts[2 * g.layer], g.axis), g.length)
        return g.LessOrEqual(g.Range(0, total, 1), own)

    def _own(self, g: Build, kind: int) -> str:
        if self.mask == "still":
            return g.constant(np.arange(ROWS) < 6, np.bool_)
        if self.mask in ("own", "added"):
            return g.input("mask", kind, [self.batch, 1, self.length, ROWS])
        own = g.Unsqueeze(g.position_ids, [1, 3])  # the tokens in the last rows, up to each query's own
        tokens = g.Sub(g.ReduceMax(own, [2]), np.arange(ROWS)[::-1].copy())
        least = g.constant(1 if self.mask == "late" else 0)
        return g.And(g.GreaterOrEqual(tokens, least), g.LessOrEqual(tokens, own))


def _cut(g: Build, tensor: str, start: str | int, end: int = FAR) -> str:
    return g.Slice(tensor, start if isinstance(start, str) else [start], [end], [g.axis])


def counted_rows(g: Build) -> str:
    """``[S]`` from a counter on, the tokens before the step of all sequences."""
    count = g.once("cur_len", lambda: g.input("cur_len", TensorProto.INT64, []))
    return g.once("rows", lambda: g.Add(g.Range(0, g.length, 1), count))


def scattered(g: Build, past: str, new: str, present: str, rows: str) -> str:
    """Write new rows to places ``[S]``, which are the same for all sequences."""
    order = [g.axis, *(axis for axis in range(4) if axis != g.axis)]
    first = [g.Transpose(tensor, perm=order) for tensor in (past, new)]
    written = g.ScatterND(first[0], g.Unsqueeze(rows, [1]), first[1])
    return g.Transpose(written, out=present, perm=[order.index(axis) for axis in range(4)])


def make_shifted(how: Shifted) -> onnx.ModelProto:
    """The decoder as a model."""
    return make_decoder(how.decoder())


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


# Caches that are written at a counter.

FIXED: dict[str, Any] = {
    "kv_heads": 4, "embedded": True, "apply": "where", "lowest": -1e9, "positions": "none",
    "rows": lambda layer, kind: (CAPACITY, CAPACITY),
}  # fmt: skip


def decoder(mask: Callable[[Build], str] | str, **how: Any) -> Decoder:
    """Caches ``[B, L, N, D]`` that are written at a counter; `mask` makes a bool ``[S, L]`` or ``[L]``."""

    def write(g: Build, past: str, new: str, present: str) -> str:
        return scattered(g, past, new, present, counted_rows(g))

    return Decoder(**FIXED | {"mask": mask, "layout": "bsnd", "write": write} | how)


def compared(g: Build, op: str, by: int = 0) -> str:
    """Keys compared with the rows of the queries minus `by`."""
    query = g.Sub(g.Unsqueeze(counted_rows(g), [1]), by)
    return g.node(op, [g.constant(np.arange(CAPACITY)), query])


def causal(g: Build) -> str:
    return compared(g, "LessOrEqual")


def window(g: Build) -> str:
    return g.And(causal(g), compared(g, "Greater", 5))


def written(g: Build) -> str:
    """Every token sees every other."""
    return g.Less(g.constant(np.arange(CAPACITY)), g.Add("cur_len", g.length))


def one_row_more(g: Build) -> str:
    return g.LessOrEqual(g.constant(np.arange(CAPACITY)), g.Add("cur_len", g.length))


# Rings: ``cache[:, :, pos % L] = new``.


def rows_up_to_own(g: Build, rows: str, own: str) -> str:
    """torch's ``arange(L) <= pos[:, None]``: after the end all rows, those of later tokens too."""
    return g.LessOrEqual(rows, own)


def newest_of_row(g: Build, rows: str, own: str) -> str:
    """Tokens between a row and a query, if no later token of the step was written there."""
    return g.Mod(g.Sub(own, rows), CAPACITY)


def rows_by_age(g: Build, rows: str, own: str) -> str:
    """A window by what rows hold: right in every step of one token."""
    age = newest_of_row(g, rows, own)
    near = g.Less(age, 5)
    return g.And(near, g.LessOrEqual(age, own))


def rows_by_number(g: Build, rows: str, own: str) -> str:
    """A window by the numbers of rows, which sees none after the end."""
    near = g.Greater(rows, g.Sub(own, 5))
    return g.And(rows_up_to_own(g, rows, own), near)


def no_later_token(g: Build, rows: str, own: str) -> str:
    """After the end all rows but those of later tokens of the step."""
    later = g.Greater(rows, g.Mod(own, CAPACITY))
    last = g.ReduceMax(own, keepdims=1)
    newer = g.LessOrEqual(rows, g.Mod(last, CAPACITY))
    hidden = g.And(later, newer)
    return g.And(rows_up_to_own(g, rows, own), g.Not(hidden))


def ring(mask: Callable[[Build, str, str], str], length: int | str = "S", *, guard: bool = False) -> Decoder:
    """Circular caches; `guard`: zeros for queries that see no key, as torch writes it."""

    def places(g: Build) -> str:
        return g.once("pos", lambda: g.input("pos", TensorProto.INT64, [length]))

    def write(g: Build, past: str, new: str, present: str) -> str:
        return scattered(g, past, new, present, g.Mod(places(g), CAPACITY))

    def visible(g: Build) -> str:
        return mask(g, g.constant(np.arange(CAPACITY)), g.Unsqueeze(places(g), [1]))

    def attend(g: Build, query: str, keys: str, values: str) -> str:
        output = _attend(g, query, keys, values)
        seen = g.ReduceSum(g.Cast(visible(g), to=TensorProto.FLOAT), [-1], keepdims=1)
        return g.Where(g.Less(seen, g.number(1)), g.number(0), output)

    return Decoder(**FIXED, sequence=length, mask=visible, write=write, attend=attend if guard else _attend)


def entries() -> Iterator[Entry]:
    for forms, capacity in ((FORMS, None), (GROWING, LONG)):
        yield from decoders("shifted", {name: Shifted(**how).decoder() for name, how in forms.items()}, capacity)
    models = {f.__name__: decoder(f) for f in (causal, window, written, one_row_more)} | {"nothing": decoder("none")}
    turns = partial(in_turn, by="Gather")
    models["heads in_turn"] = decoder(causal, kv_heads=2, repeat="none", keys=turns, values=turns)
    yield from decoders("fixed cache", models, None)
    rings = (rows_up_to_own, rows_by_age, rows_by_number, no_later_token)
    models = {f"{f.__name__}, {n}": ring(f, n) for f in rings for n in ("S", 1)}
    yield from decoders("ring", models | {"guard": ring(rows_up_to_own, guard=True)}, None)

"""Attention over caches of a fixed length that a scatter writes at a counter: linear and around a ring."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
from attention_forms import in_turn
from concat_graphs import Build, Decoder, _attend, decoders
from onnx import TensorProto
from shifted_graphs import counted_rows, scattered
from update_graphs import CAPACITY

from corpus import Entry

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
    models = {f.__name__: decoder(f) for f in (causal, window, written, one_row_more)} | {"nothing": decoder("none")}
    turns = partial(in_turn, by="Gather")
    models["heads in_turn"] = decoder(causal, kv_heads=2, repeat="none", keys=turns, values=turns)
    yield from decoders("fixed cache", models, None)
    rings = (rows_up_to_own, rows_by_age, rows_by_number, no_later_token)
    models = {f"{f.__name__}, {n}": ring(f, n) for f in rings for n in ("S", 1)}
    yield from decoders("ring", models | {"guard": ring(rows_up_to_own, guard=True)}, None)

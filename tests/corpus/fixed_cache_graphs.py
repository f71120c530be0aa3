"""Attention over caches of a fixed length that a scatter writes at a counter: linear and around a ring."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import onnx
from graphs import Graph
from onnx import TensorProto
from update_graphs import CAPACITY, column, transpose

from corpus import Entry, built

FLOAT = TensorProto.FLOAT
HEADS, SIZE = 4, 4
WIDTH = HEADS * SIZE
Mask = Callable[[Graph, str, str], str]


def decoder(
    mask: Mask,
    repeat: Callable[[Graph, str], str] | None = None,
) -> onnx.ModelProto:
    """One layer; `mask` makes a bool ``[S, L]`` or ``[L]`` from the rows of the new tokens and their number.

    `repeat` is given a cache of half as many heads.
    """
    g = Graph()
    rng = np.random.default_rng(3)
    x = g.input("inputs_embeds", FLOAT, ["batch", "sequence", WIDTH])
    count = g.input("cur_len", TensorProto.INT64, [])
    new_tokens = g.Gather(g.Shape(x), 1, axis=0)
    rows = g.Add(g.Range(0, new_tokens, 1), count)

    def heads(count: int = HEADS) -> str:
        weight = g.constant(rng.standard_normal((WIDTH, count * SIZE)) / 4, np.float32)
        return g.Reshape(g.MatMul(x, weight), [0, 0, count, SIZE])

    presents = []
    few = HEADS // 2 if repeat else HEADS
    for kind in ("key", "value"):
        past = g.input(f"past_{kind}", FLOAT, ["batch", CAPACITY, few, SIZE])
        first = [g.Transpose(t, perm=[1, 0, 2, 3]) for t in (past, heads(few))]
        written = g.ScatterND(first[0], g.Unsqueeze(rows, [1]), first[1])
        present = g.Transpose(written, out=f"present_{kind}", perm=[1, 0, 2, 3])
        g.output(present, FLOAT, ["batch", CAPACITY, few, SIZE])
        presents.append(repeat(g, present) if repeat else present)
    query = g.Transpose(heads(), perm=[0, 2, 1, 3])
    scores = g.MatMul(query, g.Transpose(presents[0], perm=[0, 2, 3, 1]))
    scores = g.Mul(scores, g.constant(0.5, np.float32))
    if visible := mask(g, rows, new_tokens):
        scores = g.Where(visible, scores, g.constant(-1e9, np.float32))
    values = g.Transpose(presents[1], perm=[0, 2, 1, 3])
    output = g.MatMul(g.Softmax(scores, axis=-1), values)
    merged = g.Reshape(g.Transpose(output, perm=[0, 2, 1, 3]), [0, 0, WIDTH])
    g.MatMul(merged, g.constant(rng.standard_normal((WIDTH, 8)), np.float32), out="logits")
    g.output("logits", FLOAT, ["batch", "sequence", 8])
    model = g.model(18)
    onnx.checker.check_model(model, full_check=True)
    return model


def compared(g: Graph, rows: str, op: str, by: int = 0) -> str:
    """Keys compared with the rows of the queries minus `by`."""
    query = g.Sub(g.Unsqueeze(rows, [1]), by)
    return g.node(op, [g.constant(np.arange(CAPACITY)), query])


def causal(g: Graph, rows: str, new: str) -> str:
    return compared(g, rows, "LessOrEqual")


def window(g: Graph, rows: str, new: str) -> str:
    return g.And(causal(g, rows, new), compared(g, rows, "Greater", 5))


def written(g: Graph, rows: str, new: str) -> str:
    """Every token sees every other."""
    return g.Less(g.constant(np.arange(CAPACITY)), g.Add("cur_len", new))


def one_row_more(g: Graph, rows: str, new: str) -> str:
    return g.LessOrEqual(g.constant(np.arange(CAPACITY)), g.Add("cur_len", new))


def nothing(g: Graph, rows: str, new: str) -> str:
    return ""


def in_turn(g: Graph, present: str) -> str:
    return g.Gather(present, [0, 1, 0, 1], axis=2)


# Rings: ``cache[:, :, pos % L] = new``.


def rows_up_to_own(g: Graph, rows: str, own: str) -> str:
    """torch's ``arange(L) <= pos[:, None]``: after the end all rows, those of later tokens too."""
    return g.LessOrEqual(rows, own)


def newest_of_row(g: Graph, rows: str, own: str) -> str:
    """Tokens between a row and a query, if no later token of the step was written there."""
    return g.Mod(g.Sub(own, rows), CAPACITY)


def rows_by_age(g: Graph, rows: str, own: str) -> str:
    """A window by what rows hold: right in every step of one token."""
    age = newest_of_row(g, rows, own)
    near = g.Less(age, 5)
    return g.And(near, g.LessOrEqual(age, own))


def rows_by_number(g: Graph, rows: str, own: str) -> str:
    """A window by the numbers of rows, which sees none after the end."""
    near = g.Greater(rows, g.Sub(own, 5))
    return g.And(rows_up_to_own(g, rows, own), near)


def no_later_token(g: Graph, rows: str, own: str) -> str:
    """After the end all rows but those of later tokens of the step."""
    later = g.Greater(rows, g.Mod(own, CAPACITY))
    last = g.ReduceMax(own, keepdims=1)
    newer = g.LessOrEqual(rows, g.Mod(last, CAPACITY))
    hidden = g.And(later, newer)
    return g.And(rows_up_to_own(g, rows, own), g.Not(hidden))


def ring(mask: Mask, length: int | str = "S", *, guard: bool = False) -> onnx.ModelProto:
    """One attention block over a circular cache; `guard`: zeros for queries that see no key, as torch writes it."""
    g, rng = Graph(), np.random.default_rng(3)
    hidden = g.input("hidden", TensorProto.FLOAT, ["B", length, WIDTH])
    pos = g.input("pos", TensorProto.INT64, [length])
    target = column(g, g.Mod(pos, CAPACITY))
    heads: dict[str, str] = {}
    for kind in ("query", "key", "value"):
        weight = g.constant(rng.standard_normal((WIDTH, WIDTH)) / 2, np.float32)
        projected = g.MatMul(hidden, weight)
        heads[kind] = g.Reshape(projected, [0, 0, HEADS, SIZE])
    for kind in ("key", "value"):
        past = g.input(f"past_{kind}", TensorProto.FLOAT, ["B", HEADS, CAPACITY, SIZE])
        written = g.ScatterND(transpose(g, past, 2, 0, 1, 3), target, transpose(g, heads[kind], 1, 0, 2, 3))
        heads[kind] = transpose(g, written, 1, 2, 0, 3)
    scores = g.MatMul(transpose(g, heads["query"], 0, 2, 1, 3), transpose(g, heads["key"], 0, 1, 3, 2))
    visible = mask(g, g.constant(np.arange(CAPACITY)), g.Unsqueeze(pos, [1]))
    scores = g.Where(visible, scores, g.constant(-1e9, np.float32))
    mixed = g.MatMul(g.Softmax(scores, axis=-1), heads["value"])
    if guard:
        seen = g.ReduceSum(g.Cast(visible, to=TensorProto.FLOAT), [-1], keepdims=1)
        blind = g.Less(seen, g.constant(1, np.float32))
        mixed = g.Where(blind, g.constant(0, np.float32), mixed)
    flat = g.Reshape(transpose(g, mixed, 0, 2, 1, 3), [0, 0, WIDTH])
    g.Identity(flat, out="out")
    g.output("out", TensorProto.FLOAT, ["B", length, WIDTH])
    for kind in ("key", "value"):
        g.Identity(heads[kind], out=f"present_{kind}")
        g.output(f"present_{kind}", TensorProto.FLOAT, ["B", HEADS, CAPACITY, SIZE])
    return g.model(18)


def entries() -> Iterator[Entry]:
    masks = (causal, window, written, nothing, one_row_more)
    models = {f.__name__: partial(decoder, f) for f in masks}
    yield from built("fixed cache", models | {"heads in_turn": partial(decoder, causal, repeat=in_turn)})
    rings = (rows_up_to_own, rows_by_age, rows_by_number, no_later_token)
    models = {f"{f.__name__}, {n}": partial(ring, f, n) for f in rings for n in ("S", 1)}
    yield from built("ring", models | {"guard": partial(ring, rows_up_to_own, guard=True)})

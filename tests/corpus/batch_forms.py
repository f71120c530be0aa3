"""Sequences of a batch that depend on each other are refused; dependence within each sequence is not."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import onnx
from concat_graphs import Build, Decoder, decoders
from graphs import Graph
from onnx import TensorProto
from stored import edited

from corpus import Entry

SWITCH = 9


FAR = 1 << 40


def _scaled(g: Build, x: str, positions: str) -> str:
    """Another factor in long texts."""
    long = g.Greater(positions, SWITCH)
    return g.Mul(x, g.Where(long, g.number(3), g.number(1)))


def by_the_longest(g: Build, x: str) -> str:
    """As LongRoPE chooses its factors."""
    return _scaled(g, x, g.ReduceMax(g.position_ids, keepdims=0))


def by_the_shortest(g: Build, x: str) -> str:
    return _scaled(g, x, g.ReduceMin(g.position_ids, keepdims=0))


def by_a_row_of_a_table(g: Build, x: str) -> str:
    """Weights are looked up at an offset: no value shows, only which rows are taken."""
    long = g.Greater(g.ReduceMax(g.position_ids, keepdims=0), SWITCH)
    offset = g.Mul(g.Cast(long, to=TensorProto.INT64), 64)
    table = g.Mul(g.weight(128, 1), g.Cast(g.ReduceMax(g.tokens), to=TensorProto.FLOAT))
    return g.Mul(x, g.Gather(table, g.Add(g.position_ids, offset), axis=0))


def each_by_itself(g: Build, x: str) -> str:
    rows = g.Unsqueeze(g.position_ids, [2])
    return _scaled(g, x, rows)


def by_a_table_cut_to_the_longest(g: Build, x: str) -> str:
    """Only the longest sequence reads the tokens that are cut off."""
    longest = g.ReduceMax(g.position_ids, keepdims=0)
    end = g.Reshape(g.Add(longest, 1), [1])
    cut = g.Slice(g.weight(64, 1), [0], end)
    rows = g.Add(g.position_ids, g.Mul(g.tokens, 0))
    return g.Mul(x, g.Gather(cut, rows, axis=0))


def _beside(g: Build, *rows: str) -> str:
    return g.node("Concat", list(rows), axis=0)


def _rows(g: Build, x: str, *bounds: int) -> str:
    """A Slice of the batch."""
    start, end, *step = (g.constant([n]) for n in bounds)
    return g.Slice(x, start, end, [0], *step)


MIXES = {
    "roll": lambda g, x: _beside(g, _rows(g, x, 1, FAR), _rows(g, x, 0, 1)),
    "mean": lambda g, x: g.Sub(x, g.ReduceMean(x, [0])),
    "softmax": lambda g, x: g.Softmax(x, axis=0),
    "sum": lambda g, x: g.CumSum(x, 0),
    "reshape": lambda g, x: g.Reshape(g.Transpose(g.Reshape(x, g.node("Concat", [
            g.Unsqueeze(n, [0]) for n in (g.size_of(x, 1), g.size_of(x, 0), g.constant(16))
        ], axis=0)), perm=[1, 0, 2]), [0, -1, 16]),
}  # fmt: skip


def whole(g: Build, x: str) -> str:
    """Such operators applied to no sequence, or to one."""
    batch = g.size_of(g.tokens, 0)
    x = _rows(g, g.Gather(x, g.Range(0, batch, 1), axis=0), 0, FAR)
    one = g.Reshape(x, [1, -1, 16])
    return g.Reshape(g.LayerNormalization(one, g.weight(16), axis=2), g.Shape(x))


def static_decoder(folder: Path, switch: int = SWITCH, batch: int | None = None, *, each: bool = False) -> Path:
    """A decoder with TensorScatter caches by mobius-onnx, with rotary factors chosen as by its LongRoPE."""
    g = Graph()
    long = g.GreaterOrEqual(g.ReduceMax("position_ids", [1] if each else [0, 1]), switch)
    g.Add("position_ids", g.Mul(g.Cast(long, to=TensorProto.INT64), switch), out="chosen")

    def choose(model: onnx.ModelProto) -> None:
        nodes = list(model.graph.node)
        for node in nodes:
            node.input[:] = ["chosen" if name == "position_ids" else name for name in node.input]
        del model.graph.node[:]
        model.graph.node.extend([*g.nodes, *nodes])
        model.graph.initializer.extend(g.initializers)
        for value in (*model.graph.input, *model.graph.output) if batch else ():
            value.type.tensor_type.shape.dim[0].dim_value = batch or 0

    return edited("mobius/llama_static_f32", folder, choose)


def one_sequence(g: Build, x: str) -> str:
    length = g.Unsqueeze(g.size_of(x, 1), [0])
    return g.Reshape(x, g.Concat([1], length, [16], axis=0))


def entries() -> Iterator[Entry]:
    by = (by_the_longest, by_the_shortest, by_a_row_of_a_table, each_by_itself,
          by_a_table_cut_to_the_longest, whole, one_sequence)  # fmt: skip
    forms: dict[str, dict[str, Any]] = {f.__name__: {"after": f} for f in by}
    forms |= {f"{f.__name__}, one": {"after": f, "batch": 1} for f in (by_the_longest, one_sequence)}
    yield from decoders("batch", forms | {name: {"after": mix} for name, mix in MIXES.items()})
    below = {f"{f.__name__}, short": Decoder(after=f) for f in (by_the_longest, by_the_shortest)}
    yield from decoders("batch", below, capacity=SWITCH)
    cases: tuple[dict[str, Any], ...] = ({}, {"batch": 2}, {"each": True}, {"batch": 1}, {"switch": 64})
    for how in cases:
        yield f"batch, static/{how}", partial(static_decoder, **how), {}

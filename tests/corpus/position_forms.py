"""Positions that a decoder counts from its past or takes from its caller, and lengths that reach the hidden states."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import onnx
from concat_graphs import Build, Decoder, _attend, decoders, signal
from graphs import Dim, Graph
from onnx import TensorProto

from corpus import Entry, built

FLOAT = TensorProto.FLOAT
Index = Callable[[Build], str]


ROWS = 60  # of a table, unless it is to be too short


PAD = 1


def add(g: Build, *terms: str) -> str:
    result = terms[0]
    for term in terms[1:]:
        result = g.Add(result, term)
    return result


def counted(g: Build, first: int = 0) -> str:
    """``[S]``: P + first and so on."""
    bounds = [add(g, n, g.constant(first)) if first else n for n in (g.past, g.all)]
    return g.Range(*bounds, 1)


def front(g: Build, tensor: str) -> str:
    return g.Unsqueeze(tensor, [0])


def real(g: Build, dtype: int = TensorProto.INT32) -> str:
    """``[B, S]``: 1 where a token is no pad."""
    return g.Cast(g.Not(g.Equal(g.tokens, PAD)), to=dtype)


def beside_pads(g: Build, past: str, axis: int = 1, offset: int = PAD) -> str:
    """As M2M-100 counts: pads have the position of the pad."""
    tokens = real(g)
    summed = g.CumSum(tokens, axis)
    all_in = g.Add(summed, g.Cast(past, to=TensorProto.INT32))
    positions = g.Cast(g.Mul(all_in, tokens), to=TensorProto.INT64)
    return add(g, positions, g.constant(offset)) if offset else positions


def looked_up(index: Index, rows: int = ROWS, *, flat: bool = False, cast: bool = False) -> Callable[[Build, str], str]:
    """Rows of a table added to the hidden states."""

    def after(g: Build, x: str) -> str:
        width = g.decoder.heads * g.decoder.size
        places = index(g)
        if flat:
            places = g.Reshape(places, [-1])
        found = g.Gather(g.weight(rows, width), places, out="found", axis=0)
        if flat:
            found = g.Reshape(found, g.Shape(x))
        if cast:
            found = g.Cast(g.Cast(found, to=TensorProto.DOUBLE), to=TensorProto.FLOAT)
        return g.Add(x, found)

    return after


def if_long(g: Build, limit: int = 9) -> str:
    return g.Cast(g.Greater(g.past, limit), to=TensorProto.INT64)


def tenth(g: Build) -> str:
    return g.Div(g.past, 10)


FOUND: dict[str, Index] = {
    "one for all": counted,
    "one for all, from 2": lambda g: counted(g, 2),
    "in front": lambda g: front(g, counted(g)),
    "2 more": lambda g: add(g, front(g, counted(g)), g.constant(2)),
    "2 more before": lambda g: front(g, add(g, counted(g), g.constant([2]))),
    "3 more, and 1 less": lambda g: g.Sub(add(g, front(g, counted(g)), g.constant(3)), 1),
    "in int32": lambda g: add(g, g.Cast(front(g, counted(g)), to=TensorProto.INT32), g.constant(2, np.int32)),
    "beside pads": lambda g: beside_pads(g, g.past),
    "beside pads, from 3": lambda g: beside_pads(g, add(g, g.past, g.constant(3)), offset=0),
    "pads taken off": lambda g: g.Sub(add(g, g.past, g.CumSum(real(g, TensorProto.INT64), 1)), 1),
    "given, from 2": lambda g: add(g, g.position_ids, g.constant(2)),
}


LOOK_ALIKES: dict[str, Index] = {
    "an offset that grows": lambda g: add(g, front(g, counted(g)), tenth(g)),
    "an offset in long texts": lambda g: add(g, front(g, counted(g)), if_long(g)),
    "an offset by the batch": lambda g: add(g, counted(g), g.size_of(g.tokens, 0)),
    "one before": lambda g: counted(g, -1),
    "beside pads, with the new tokens": lambda g: beside_pads(g, g.all),
    "pads of the whole batch": lambda g: beside_pads(g, g.past, axis=0),
}


def times(g: Build, x: str, found: str) -> str:
    return g.Mul(x, found)


def summed(g: Build, x: str, found: str) -> str:
    return g.Add(x, g.ReduceSum(found, [0], keepdims=0))


def of_heads(g: Build, x: str, found: str) -> str:
    """``[B, H, S, D] + [S, D]``: with rows for each sequence, those would meet the heads."""
    heads = g.Transpose(g.Reshape(x, [0, 0, 2, -1]), perm=[0, 2, 1, 3])
    half = g.Slice(found, [0], [8], [1])
    back = g.Transpose(g.Add(heads, half), perm=[0, 2, 1, 3])
    return g.Reshape(back, [0, 0, -1])


def of_steps(g: Build, x: str, found: str) -> str:
    """``[S, B, H] + [S, 1, H]``."""
    turned = g.Transpose(x, perm=[1, 0, 2])
    more = g.Unsqueeze(found, [1])
    return g.Transpose(g.Add(turned, more), perm=[1, 0, 2])


def with_rows(read: Callable[[Build, str, str], str]) -> Callable[[Build, str], str]:
    return lambda g, x: read(g, x, g.Gather(g.weight(ROWS, 16), counted(g), axis=0))


def as_large_as_masks(g: Build, x: str) -> str:
    """Numbers as large as those of masks, which are no positions."""
    large = g.Mul(g.Cast(front(g, counted(g, 1)), to=FLOAT), g.number(-1e30))
    return g.Add(x, g.Unsqueeze(g.Mul(large, g.number(1e-31)), [2]))


def total(g: Build) -> str:
    return g.Cast(g.all, to=TensorProto.FLOAT)


def by_length(g: Build, x: str) -> str:
    return g.Mul(x, g.Log(g.Add(total(g), g.number(1))))


def by_length_of_present(g: Build, x: str) -> str:
    return g.Mul(x, g.Cast(g.size_of(g.presents[0], 2), to=TensorProto.FLOAT))


def other_frequencies_in_long_texts(g: Build, x: str) -> str:
    """Phi-3's long factors."""
    long = g.Greater(g.all, 16)
    return g.Mul(x, g.Where(long, g.number(3), g.number(1)))


def by_sum_of_padding(g: Build, x: str) -> str:
    return g.Mul(x, g.Cast(g.ReduceSum(g.padding, keepdims=0), to=TensorProto.FLOAT))


def by_padding_of_the_update(g: Build, x: str) -> str:
    first = g.Unsqueeze(g.Neg(g.length), [0])
    new = g.Slice(g.padding, first, [2**31], [1])
    return g.Mul(x, g.Unsqueeze(g.Cast(new, to=TensorProto.FLOAT), [2]))


def debug(what: Callable[[Build], str], rank: int, kind: int = TensorProto.INT64) -> Callable[[Build, str], str]:
    """An output beside the logits."""

    def after(g: Build, x: str) -> str:
        g.Identity(what(g), out="debug")
        g.output("debug", kind, [f"d{axis}" for axis in range(rank)])
        return x

    return after


def rows_added(g: Build) -> str:
    return g.Sub(g.size_of(g.presents[0], 2), g.size_of(g.pasts[0], 2))


def in_both(g: Build) -> str:
    """0 in the model as exported, wherever the text ends."""
    return g.Sub(g.size_of(g.presents[0], 2), g.Add(g.size_of(g.pasts[0], 2), g.length))


def _along_heads(g: Build, x: str) -> str:
    """Halves of the hidden states as heads [B, 2, S, W / 2], times factors [1, S, 1]."""
    heads = g.Transpose(g.Reshape(x, [0, 0, 2, 8]), perm=[0, 2, 1, 3])
    rows = g.Transpose(g.query_rows, perm=[1, 0])
    factor = g.Cos(g.Cast(g.Unsqueeze(rows, [2]), to=TensorProto.FLOAT))
    turned = g.Transpose(g.Mul(heads, factor), perm=[0, 2, 1, 3])
    return g.Reshape(turned, [0, 0, 16])


def times_number(count: Callable[[Build], str], op: str = "Add") -> Callable[[Build, str], str]:
    return lambda g, x: g.node(op, [x, g.Cast(count(g), to=FLOAT)])


def when_far(g: Build, x: str) -> str:
    long = g.Greater(g.ReduceMax(g.position_ids, keepdims=0), 9)
    return g.Mul(x, g.Where(long, g.number(3), g.number(1)))


AFTER: dict[str, dict[str, Any]] = {
    "times rows": {"after": with_rows(times)},
    "rows of heads": {"after": with_rows(of_heads)},
    "rows summed": {"after": with_rows(summed)},
    "rows of steps": {"after": with_rows(of_steps)},
    "as large as masks": {"after": as_large_as_masks},
    "past added": {"after": times_number(lambda g: g.past)},
}
LENGTHS: dict[str, dict[str, Any]] = {
    "in the hidden states": {"mask": "padding", "after": by_length},
    "of the present": {"mask": "padding", "after": by_length_of_present},
    "long factors": {"mask": "padding", "after": other_frequencies_in_long_texts},
    "sum of padding": {"mask": "padding", "after": by_sum_of_padding},
    "padding of the update": {"mask": "padding", "after": by_padding_of_the_update},
    "count shown": {"after": debug(lambda g: g.all, 0)},
    "count of the present shown": {"after": debug(lambda g: g.size_of(g.presents[0], 2), 0)},
    "count of padding shown": {"after": debug(lambda g: g.ReduceSum(g.padding, [1], keepdims=0), 1)},
    "positions shown": {"after": debug(lambda g: g.query_rows, 2)},
    "mask shown": {"after": debug(lambda g: g.to_scores(g.causal()), 4, TensorProto.BOOL)},
    "new tokens shown": {"after": debug(lambda g: g.length, 0)},
    "new tokens": {"after": times_number(lambda g: g.length, "Mul")},
    "far positions, one sequence": {"after": when_far, "batch": 1},
    "rows added": {"after": times_number(rows_added)},
    "present less past and new": {"after": times_number(in_both)},
    "at most 1": {"after": times_number(lambda g: g.Min(g.size_of(g.presents[0], 2), 1), "Mul")},
    "as many heads as rows": {"after": _along_heads},
    "as many heads as rows, two sequences": {"after": _along_heads, "batch": 2},
    **{
        f"{p}, {lay}": {"positions": p, "layout": lay}
        for p in ("past", "padding", "present")
        for lay in ("bsnd", "flat")
    },
}

# Several planes for each token (M-RoPE).

PLANES = 3


def planar(shape: list[Dim], axis: int = 0, name: str = "position_ids") -> Any:
    """Each plane has its own share of the hidden state."""

    def after(g: Build, x: str) -> str:
        positions = g.input(name, TensorProto.INT64, shape)
        planes = [g.Gather(positions, k, axis=axis) for k in range(PLANES)]
        widths = [6, 5, 5]
        signals = [signal(g, p, w) for p, w in zip(planes, widths, strict=True)]
        return g.Add(x, g.node("Concat", signals, axis=-1))

    return after


def _looked_up(g: Build, x: str) -> str:
    positions = g.input("position_ids", TensorProto.INT64, [PLANES, "batch", "sequence"])
    for k in range(PLANES):
        rows = g.Gather(g.weight(20 - k, 16), g.Gather(positions, k, axis=0), axis=0)
        x = g.Add(x, rows)
    return x


def mask_by_the_last_plane(g: Build) -> str:
    """For text all planes are equal; for images such a mask is not causal."""
    positions = g.input("position_ids", TensorProto.INT64, [PLANES, "batch", "sequence"])
    queries = g.Unsqueeze(g.Gather(positions, 2, axis=0), [1, 3])
    return g.LessOrEqual(g.key_rows, queries)


MROPE: dict[str, dict[str, Any]] = {
    "planes first": {"after": planar([PLANES, "batch", "sequence"])},
    "any number of planes": {"after": planar(["planes", "batch", "sequence"])},
    "rows first": {"after": planar(["batch", PLANES, "sequence"], axis=1)},
    **{f"batch of {n}": {"after": planar([PLANES, n, "sequence"]), "batch": n} for n in (1, 2, 3)},
    "rows first, batch of 2": {"after": planar([2, PLANES, "sequence"], axis=1), "batch": 2},
    "one token": {"after": planar([PLANES, "batch", 1]), "sequence": 1},
    "tables": {"after": _looked_up},
    "a mask by the last": {"mask": mask_by_the_last_plane},
}

# Rows of a table from the length of the past on, added to embedded tokens of one Attention with a past.

HEADS, SIZE, TOKENS = 2, 8, 32
WIDTH = HEADS * SIZE


def sliced(first: int = 0, last: int = 0, use: str = "Add") -> onnx.ModelProto:
    """One Attention with a past over ``embed(ids) + table[P + first : P + S + last]``."""
    rng = np.random.default_rng(0)
    graph = Graph()
    graph.input("input_ids", TensorProto.INT64, ["B", "S"])
    for name in ("key", "value"):
        graph.input(f"past.{name}", TensorProto.FLOAT, ["B", HEADS, "P", SIZE])
        graph.output(f"present.{name}", TensorProto.FLOAT, ["B", HEADS, "T", SIZE])
    embedded = graph.Gather(graph.constant(rng.standard_normal((TOKENS, WIDTH)), np.float32), "input_ids")
    past = graph.Shape("past.key", start=2, end=3)
    new = graph.Shape("input_ids", start=1, end=2)
    start = graph.Add(past, [first])
    end = graph.Add(graph.Add(past, new), [last])
    table = graph.constant(rng.standard_normal((40, WIDTH)), np.float32)
    rows = graph.Slice(table, start, end, [0], out="rows")
    if use == "Add":
        x = graph.Add(embedded, rows, out="x")
    else:
        product = graph.MatMul(rows, graph.constant(np.ones((WIDTH, 1)), np.float32))
        x = graph.Add(embedded, product, out="x")
    inputs = [x, x, x, "", "past.key", "past.value"]
    graph.node("Attention", inputs, ["y", "present.key", "present.value"], is_causal=1, q_num_heads=HEADS,
               kv_num_heads=HEADS)  # fmt: skip
    graph.MatMul("y", graph.constant(rng.standard_normal((WIDTH, TOKENS)), np.float32), out="logits")
    graph.output("logits", TensorProto.FLOAT, ["B", "S", TOKENS])
    return graph.model(24)


def _temperature(g: Build, rows: str) -> str:
    """Llama 4's: it grows with every 8 tokens."""
    steps = g.Floor(g.Div(g.Add(g.Cast(rows, to=FLOAT), g.number(1.0)), g.number(8.0)))
    return g.Add(g.Log(g.Add(steps, g.number(1.0))), g.number(1.0))


STEPS: dict[str, Callable[[Build, str], str]] = {
    "Floor": _temperature,
    "Where": lambda g, rows: g.Where(g.Greater(rows, 15), g.number(2.0), g.number(1.0)),
    "integers divided": lambda g, rows: g.Add(g.Cast(g.Div(rows, 8), to=FLOAT), g.number(1.0)),
    "Mod": lambda g, rows: g.Add(g.Cast(g.Mod(rows, 4), to=FLOAT), g.number(1.0)),
}


def scaled_by(factor: Callable[[Build, str], str]) -> Callable[[Build, str, str, str], str]:
    """Queries times a function of their positions that is the same for several of these."""

    def attend(g: Build, query: str, keys: str, values: str) -> str:
        return _attend(g, g.Mul(query, factor(g, g.query_rows)), keys, values)

    return attend


def entries() -> Iterator[Entry]:
    yield from decoders("steps of positions", {n: {"attend": scaled_by(how)} for n, how in STEPS.items()})
    found = {n: {"positions": "none", "after": looked_up(i)} for n, i in FOUND.items()}
    found |= {f"{n}, batch of {b}": {**found[n], "batch": b} for n in ("one for all", "beside pads") for b in (1, 2)}
    found |= {f"{n}, one token": {**found[n], "sequence": 1} for n in ("one for all", "beside pads")}
    flat = looked_up(FOUND["beside pads"], flat=True)
    cast, twice = looked_up(counted, cast=True), looked_up(lambda g: add(g, counted(g), counted(g)), 200)
    found |= {n: {"positions": "none", "after": a} for n, a in (("flat", flat), ("cast", cast), ("doubled", twice))}
    for rows in (25, 26, 23):
        ends = {n: {"positions": "none", "after": looked_up(FOUND[n], rows)} for n in ("2 more", "beside pads")}
        found |= {f"{n}, {rows} rows": how for n, how in ends.items()}
    found |= {n: {"positions": "none", "after": looked_up(i, 200)} for n, i in LOOK_ALIKES.items()}
    yield from decoders("positions", found | {n: {"positions": "none", **how} for n, how in AFTER.items()})
    yield from decoders("lengths", LENGTHS)
    for positions in ("past", "present"):
        decoder = Decoder(positions=positions)
        for capacity in (1, 2, 3, 11):
            yield from decoders("lengths", {f"{positions}, capacity {capacity}": decoder}, capacity=capacity)
    yield from decoders("lengths", {"eight tokens at capacity 8": {"positions": "past", "sequence": 8}}, capacity=8)
    yield from decoders("planes", {n: {"positions": "none", **how} for n, how in MROPE.items()})
    tables: dict[str, tuple[Any, ...]] = {
        "rows": (), "rows from 2": (2, 2), "product": (0, 0, "MatMul"), "shifted": (-1, -1), "one more": (-1, 0),
    }  # fmt: skip
    yield from built("table", {n: partial(sliced, *how) for n, how in tables.items()}, capacity=12)
    yield from built("table", {"too short": sliced}, capacity=41)
    yield from built("table", {"too short from 2": partial(sliced, 2, 2)}, capacity=39)

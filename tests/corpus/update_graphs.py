"""Models with one cache update each, as exporters write it, and what only looks like one.

hidden [B, S, N * D] -- MatMul, Reshape --> new [B, S, N, D]
past, new, pos -- the idiom --> present
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import onnx
from graphs import Dim, Graph
from onnx import TensorProto

from corpus import Entry, built

FLOAT, INT = TensorProto.FLOAT, TensorProto.INT64
HEADS, SIZE, CAPACITY = 2, 4, 16
BNSD: tuple[Dim, ...] = ("B", HEADS, CAPACITY, SIZE)
BSND: tuple[Dim, ...] = ("B", CAPACITY, HEADS, SIZE)
FLAT: tuple[Dim, ...] = ("B", CAPACITY, HEADS * SIZE)
PAST, PRESENT = ("B", HEADS, "P", SIZE), ("B", HEADS, "T", SIZE)
FAR = 1 << 40
TURNED = (0, 2, 1, 3)

Idiom = Callable[[Graph, str, str], str]
Case = tuple[Idiom, dict[str, Any]]


def update_model(
    idiom: Idiom,
    shape: Sequence[Dim] = BNSD,
    pos: Sequence[Dim] | None = (),
    length: Dim = "S",
    batch: Dim = "B",
    dtype: int = TensorProto.FLOAT,
    present: Sequence[Dim] | None = None,
) -> onnx.ModelProto:
    """A model whose cache `past` of this shape is updated by `idiom`.

    Args:
        idiom: is given the graph, ``past`` and ``new`` ``[B, S, N, D]``; returns the tensor that becomes `present`.
        shape: of the past.
        pos: shape of the int64 input ``pos``; None: there is none.
        length: S.
        batch: B.
        dtype: of hidden, past and present.
        present: shape of the present, if it is not that of the past.
    """
    graph = Graph()
    hidden = graph.input("hidden", dtype, [batch, length, HEADS * SIZE])
    if pos is not None:
        graph.input("pos", TensorProto.INT64, pos)
    past = graph.input("past", dtype, shape)
    weight = np.random.default_rng(7).standard_normal((HEADS * SIZE, HEADS * SIZE))
    projected = graph.MatMul(hidden, graph.constant(weight, onnx.helper.tensor_dtype_to_np_dtype(dtype)))
    new = graph.Reshape(projected, [0, 0, HEADS, SIZE], out="new")
    result = idiom(graph, past, new)
    graph.Identity(result, out="present")
    graph.output("present", dtype, list(present or shape))
    return graph.model(24)


def transpose(graph: Graph, tensor: str, *perm: int) -> str:
    """A Transpose."""
    return graph.Transpose(tensor, perm=list(perm))


def new_tokens(graph: Graph) -> str:
    """S, a scalar, from the shape of `hidden`."""
    return graph.Gather(graph.Shape("hidden"), 1)


def positions(graph: Graph, start: str = "pos") -> str:
    """``start + 0 .. S - 1``, ``[S]``."""
    steps = graph.Range(graph.constant(0), new_tokens(graph), 1)
    return graph.Add(steps, start)


def column(graph: Graph, rows: str) -> str:
    """Rows as ScatterND takes them, ``[.., 1]``."""
    return graph.Unsqueeze(rows, [-1])


def joined(graph: Graph, *rows: str) -> str:
    """Numbers for several axes, each broadcast to the shape of all, as an index ``[.., k]``."""
    shape = graph.Shape(rows[0])
    for other in rows[1:]:
        shape = graph.Max(shape, graph.Shape(other))
    parts = [column(graph, graph.Expand(r, shape)) for r in rows]
    return graph.node("Concat", parts, axis=-1)


def count(graph: Graph, size: int | str) -> str:
    """0, 1, 2 .. below a constant, or below the batch."""
    size = graph.Gather(graph.Shape("hidden"), 0) if size == "B" else graph.constant(size)
    return graph.Range(0, size, 1)


def along(graph: Graph, vector: str, axis: int, rank: int) -> str:
    """A vector as one axis among `rank`."""
    return graph.Unsqueeze(vector, [a for a in range(rank) if a != axis])


def index_copy(rows: Callable[[Graph], str] = positions) -> Idiom:
    """torch's index_copy on the sequence axis of ``[B, N, L, D]``: ScatterND between Transposes."""

    def idiom(graph: Graph, past: str, new: str) -> str:
        data, update = transpose(graph, past, 2, 0, 1, 3), transpose(graph, new, 1, 0, 2, 3)
        written = graph.ScatterND(data, column(graph, rows(graph)), update, out="written")
        return transpose(graph, written, 1, 2, 0, 3)

    return idiom


def heads_first(g: Graph, new: str) -> str:
    return transpose(g, new, 0, 2, 1, 3)


def flat(g: Graph, tensor: str) -> str:
    return g.Reshape(tensor, [0, 0, -1])


def cut(g: Graph, tensor: str, *numbers: int) -> str:
    """A Slice from start to end along an axis, by a step."""
    return g.Slice(tensor, *(g.constant([n]) for n in numbers))


def concat(axis: int, *perm: int) -> Idiom:
    def idiom(g: Graph, past: str, new: str) -> str:
        return g.Concat(past, transpose(g, new, *perm) if perm else new, axis=axis)

    return idiom


def concat_flat(g: Graph, past: str, new: str) -> str:
    return g.Concat(past, flat(g, new), axis=1)


def concat_between_transposes(g: Graph, past: str, new: str) -> str:
    whole = g.Concat(transpose(g, past, 2, 0, 1, 3), transpose(g, new, 1, 0, 2, 3), axis=0)
    return transpose(g, whole, 1, 2, 0, 3)


def concat_with_heads_in_batch(g: Graph, past: str, new: str) -> str:
    """``[B * N, P, D]`` in between, as older models keep their heads."""

    def merged(tensor: str) -> str:
        rows = g.Shape(tensor, start=2, end=3)
        return g.Reshape(tensor, g.Concat([-1], rows, [SIZE], axis=0))

    whole = g.Concat(merged(past), merged(heads_first(g, new)), axis=1)
    rows = g.Shape(whole, start=1, end=2)
    return g.Reshape(whole, g.Concat([-1, HEADS], rows, [SIZE], axis=0))


def index_put(g: Graph, past: str, new: str) -> str:
    """``past[:, pos] = new``."""
    data, update = transpose(g, past, 1, 0, 2, 3), transpose(g, new, 1, 0, 2, 3)
    return transpose(g, g.ScatterND(data, column(g, "pos"), update), 1, 0, 2, 3)


def index_put_batch(g: Graph, past: str, new: str) -> str:
    """``past[arange(B)[:, None], :, pos] = new`` with ``pos [B, S]``."""
    index = joined(g, along(g, count(g, "B"), 0, 2), "pos")
    return heads_first(g, g.ScatterND(heads_first(g, past), index, new))


def every_number(g: Graph, past: str, new: str) -> str:
    """A number for each of ``B, N, L, D``."""
    parts = [count(g, "B"), count(g, HEADS), positions(g), count(g, SIZE)]
    index = joined(g, *(along(g, part, axis, 4) for axis, part in enumerate(parts)))
    return g.ScatterND(past, index, heads_first(g, new))


def slice_assign(g: Graph, past: str, new: str) -> str:
    """``past[:, :, pos : pos + S] = new``, as torch writes it: a Slice of all rows' numbers."""
    end = g.Add("pos", new_tokens(g))
    first, last = (g.Unsqueeze(t, [0]) for t in ("pos", end))
    rows = g.Slice(count(g, CAPACITY), first, last, [0])
    data, update = transpose(g, past, 2, 1, 0, 3), transpose(g, new, 1, 2, 0, 3)
    return transpose(g, g.ScatterND(data, column(g, rows), update), 2, 1, 0, 3)


def scatter_flat(g: Graph, past: str, new: str) -> str:
    data, update = transpose(g, past, 1, 0, 2), transpose(g, flat(g, new), 1, 0, 2)
    return transpose(g, g.ScatterND(data, column(g, positions(g)), update), 1, 0, 2)


def scatter_elements(rows: Callable[[Graph], str]) -> Idiom:
    """`rows` makes them, as they broadcast to ``[B, N, S, D]``."""

    def idiom(g: Graph, past: str, new: str) -> str:
        update = heads_first(g, new)
        index = g.Expand(rows(g), g.Shape(update))
        return g.ScatterElements(past, index, update, axis=-2)

    return idiom


def in_a_row(g: Graph) -> str:
    return along(g, positions(g), 2, 4)


def by_sequence(g: Graph, first: str = "pos") -> str:
    steps = g.Range(g.constant(0), new_tokens(g), 1)
    return g.Add(along(g, first, 0, 4), along(g, steps, 2, 4))


def at(g: Graph, axis: int = 2, rank: int = 4, pos: str = "pos") -> str:
    """Which row is written, bool ``[B, 1, L, 1]``."""
    rows = np.arange(CAPACITY).reshape([CAPACITY if a == axis else 1 for a in range(rank)])
    return g.Equal(g.constant(rows), g.Reshape(pos, [-1] + [1] * (rank - 1)))


def where(g: Graph, past: str, new: str) -> str:
    return g.Where(at(g), heads_first(g, new), past)


def where_not(g: Graph, past: str, new: str) -> str:
    return g.Where(g.Not(at(g)), past, heads_first(g, new))


def where_expanded(g: Graph, past: str, new: str) -> str:
    return g.Where(g.Expand(at(g), g.Shape(past)), heads_first(g, new), past)


def where_between_transposes(g: Graph, past: str, new: str) -> str:
    return heads_first(g, g.Where(at(g, 1), new, heads_first(g, past)))


def where_flat(g: Graph, past: str, new: str) -> str:
    return g.Where(at(g, 1, 3), flat(g, new), past)


def blend(kept: float = 1.0, gain: float = 1.0, erased: float = 1.0) -> Idiom:
    """``past * (kept - erased * h) + new * (gain * h)``: an update for 1, 1, 1 alone."""

    def idiom(g: Graph, past: str, new: str) -> str:
        hot = g.Cast(at(g), to=FLOAT)
        gone = g.Mul(hot, g.constant(erased, np.float32))
        cold = g.Sub(g.constant(kept, np.float32), gone)
        fresh = g.Mul(heads_first(g, new), g.Mul(hot, g.constant(gain, np.float32)))
        return g.Add(g.Mul(past, cold), fresh)

    return idiom


def one_hot_operator(g: Graph, past: str, new: str) -> str:
    hot = g.OneHot("pos", g.constant(CAPACITY), g.constant([0, 1], np.float32))
    hot = g.Unsqueeze(hot, [1, 3])
    cold = g.Sub(g.constant(1, np.float32), hot)
    fresh = g.Mul(hot, heads_first(g, new))
    return g.Add(fresh, g.Mul(cold, past))


def around(modulus: int, stride: int = 1, step: int = 1, offset: int = 0) -> Callable[[Graph], str]:
    """``(pos * stride + offset + step * (0 .. S - 1)) mod modulus``; 0: without."""

    def rows(g: Graph) -> str:
        steps = g.Range(g.constant(0), new_tokens(g), 1)
        start = g.Add(g.Mul("pos", stride), offset)
        found = g.Add(g.Mul(steps, step), start)
        return g.Mod(found, modulus) if modulus else found

    return rows


def odd_after(tokens: int) -> Idiom:
    """A circular cache whose new rows are doubled after so many tokens, by how many numbers a NonZero finds."""

    def update(g: Graph, past: str, new: str) -> str:
        far = g.Cast(g.Greater("pos", tokens), to=INT)
        size = g.Unsqueeze(g.Add(far, 1), [0])
        found = g.Shape(g.NonZero(g.Expand(1, size)), start=1)
        scaled = g.Mul(new, g.Cast(found, to=FLOAT))
        return index_copy(around(CAPACITY))(g, past, scaled)

    return update


def clamped(g: Graph) -> str:
    return g.Min(positions(g), CAPACITY - 1)


def growing(idiom: Idiom, shape: Sequence[Dim] = PAST, present: Sequence[Dim] = PRESENT) -> Case:
    return idiom, {"shape": shape, "pos": None, "present": present}


def fixed(idiom: Idiom, shape: Sequence[Dim] = BNSD, pos: Sequence[Dim] = (), length: Dim = "S") -> Case:
    return idiom, {"shape": shape, "pos": pos, "length": length}


def of_the_mask(g: Graph, past: str, new: str) -> str:
    """The length of a mask says positions."""
    mask = g.input("attention_mask", INT, ["B", "T"])
    total = g.Gather(g.Shape(mask), 1)
    return index_copy(lambda g: positions(g, g.Sub(total, new_tokens(g))))(g, past, new)


def rounded(g: Graph, past: str, new: str) -> str:
    return index_copy()(g, past, g.Cast(g.Cast(new, to=TensorProto.FLOAT16), to=FLOAT))


def channels_turned(g: Graph, past: str, new: str) -> str:
    return index_copy()(g, past, g.Slice(new, *(g.constant([v]) for v in (-1, -FAR, -1, -1))))


def aliased(g: Graph, past: str, new: str) -> str:
    whole = g.Identity(index_copy()(g, past, new), out="whole")
    heads_first(g, heads_first(g, whole))
    return whole


def crossed(length: Dim) -> Idiom:
    """Keys of an encoder go through unchanged; those of the shape of the written ones have lost their write."""

    def idiom(g: Graph, past: str, new: str) -> str:
        g.Identity(g.input("cross", FLOAT, ["B", HEADS, length, SIZE]), out="present_cross")
        g.output("present_cross", FLOAT, ["B", HEADS, length, SIZE])
        return index_copy()(g, past, new)

    return idiom


def in_double(g: Graph, past: str, new: str) -> str:
    past, new = (g.Cast(t, to=TensorProto.DOUBLE) for t in (past, new))
    return g.Cast(index_copy()(g, past, new), to=FLOAT)


FORMS: dict[str, Case] = {
    "concat": growing(concat(-2, *TURNED)),
    "concat, sequence first": growing(concat(1), ("B", "P", HEADS, SIZE), ("B", "T", HEADS, SIZE)),
    "concat, flat": growing(concat_flat, ("B", "P", HEADS * SIZE), ("B", "T", HEADS * SIZE)),
    "concat, keys transposed": growing(concat(3, 0, 2, 3, 1), ("B", HEADS, SIZE, "P"), ("B", HEADS, SIZE, "T")),
    "concat between transposes": growing(concat_between_transposes),
    "concat, heads in batch": growing(concat_with_heads_in_batch),
    "index_copy": fixed(index_copy()),
    "index_copy, given rows": fixed(index_copy(lambda g: "pos"), pos=("S",)),
    "index_put": fixed(index_put, BSND, ("S",)),
    "index_put by sequence": fixed(index_put_batch, pos=("B", "S")),
    "every number": fixed(every_number),
    "slice assignment": fixed(slice_assign),
    "scatter, flat": fixed(scatter_flat, FLAT),
    "scatter of elements": fixed(scatter_elements(in_a_row)),
    "scatter by sequence": fixed(scatter_elements(by_sequence), pos=("B",)),
    "a ring": fixed(index_copy(around(CAPACITY))),
    "clamped": fixed(index_copy(clamped)),
    "where": fixed(where, pos=("B",), length=1),
    "where not": fixed(where_not, pos=("B",), length=1),
    "where, expanded": fixed(where_expanded, pos=("B",), length=1),
    "where between transposes": fixed(where_between_transposes, pos=("B",), length=1),
    "where, flat": fixed(where_flat, FLAT, ("B",), 1),
    "one-hot": fixed(blend(), pos=("B",), length=1),
    "OneHot": fixed(one_hot_operator, pos=("B",), length=1),
    "lengths of a mask": (of_the_mask, {"shape": ("B", HEADS, "L", SIZE), "pos": None}),
    "rounded": (rounded, {}),
    "channels turned": (channels_turned, {}),
    "aliased": (aliased, {}),
    "beside an encoder": (crossed("E"), {}),
    "beside a lost write": (crossed(CAPACITY), {}),
    "in double": (in_double, {}),
    "float16": (index_copy(), {"dtype": TensorProto.FLOAT16}),
}

# Models that do something else.


def first_then_past(g: Graph, past: str, new: str) -> str:
    return g.Concat(heads_first(g, new), past, axis=2)


def twice(g: Graph, past: str, new: str) -> str:
    rows = heads_first(g, new)
    return g.Concat(past, g.Concat(rows, rows, axis=2), axis=2)


def turned_back(g: Graph, past: str, new: str) -> str:
    return heads_first(g, concat(2, *TURNED)(g, past, new))


def by_beams(g: Graph, past: str, new: str) -> str:
    return concat(2, *TURNED)(g, g.Gather(past, g.input("beams", INT, ["B"]), axis=0), new)


def reads_past(g: Graph, past: str, new: str) -> str:
    g.ReduceMax(past, out="largest", keepdims=0)
    g.output("largest", FLOAT, [])
    return concat(2, *TURNED)(g, past, new)


def two_results(g: Graph, past: str, new: str) -> str:
    g.Identity(concat(2, *TURNED)(g, past, new), out="other")
    g.output("other", FLOAT, list(PRESENT))
    return concat(2, *TURNED)(g, past, new)


def one_head(g: Graph, past: str, new: str) -> str:
    update = cut(g, heads_first(g, new), 0, 1, 1)
    return g.ScatterElements(past, g.Expand(in_a_row(g), g.Shape(update)), update, axis=2)


def reduced(idiom: Idiom, reduction: str) -> Idiom:
    def made(g: Graph, past: str, new: str) -> str:
        result = idiom(g, past, new)
        node = next(n for n in g.nodes if n.op_type.startswith("Scatter"))
        node.attribute.append(onnx.helper.make_attribute("reduction", reduction))
        return result

    return made


def held_inside(g: Graph, past: str, new: str) -> str:
    buffer = g.constant(np.zeros((CAPACITY, 1, HEADS, SIZE)), np.float32)
    written = g.ScatterND(buffer, column(g, positions(g)), transpose(g, new, 1, 0, 2, 3))
    g.ReduceMax(written, out="logits", keepdims=0)
    g.output("logits", FLOAT, [])
    return index_copy()(g, past, new)


def lost(g: Graph, past: str, new: str) -> str:
    g.ReduceMax(index_copy()(g, g.input("lost", FLOAT, BNSD), new), out="logits", keepdims=0)
    g.output("logits", FLOAT, [])
    return scatter_elements(in_a_row)(g, past, new)


def rolled(g: Graph, past: str, new: str) -> str:
    whole = g.Concat(cut(g, past, 1, FAR, 2), cut(g, past, 0, 1, 2), axis=2)
    return index_copy(lambda g: g.constant([CAPACITY - 1]))(g, whole, new)


def last_token(g: Graph, past: str, new: str) -> str:
    return where(g, past, g.Gather(new, [-1], axis=1))


def from_a_row_on(g: Graph, past: str, new: str) -> str:
    start = g.Reshape("pos", [-1, 1, 1, 1])
    chosen = g.GreaterOrEqual(np.arange(CAPACITY).reshape(1, 1, -1, 1), start)
    return g.Where(chosen, heads_first(g, new), past)


def backwards(g: Graph) -> str:
    return g.Slice("pos", *(g.constant([v]) for v in (-1, -FAR, 0, -1)))


def where_backwards(g: Graph, past: str, new: str) -> str:
    return g.Where(at(g, pos=backwards(g)), heads_first(g, new), past)


def by_a_mask(g: Graph, past: str, new: str) -> str:
    return g.Where(g.input("chosen", TensorProto.BOOL, ["B", 1, CAPACITY, 1]), heads_first(g, new), past)


def reversed_rows(g: Graph) -> str:
    return g.Slice(positions(g), *(g.constant([v]) for v in (-1, -FAR, 0, -1)))


def from_a_mask(g: Graph) -> str:
    sums = g.CumSum(g.input("attention_mask", INT, ["B", CAPACITY]), 1)
    last = g.ReduceMax(sums, [0, 1], keepdims=0)
    return positions(g, g.Sub(last, new_tokens(g)))


GROWS = {"shape": PAST, "pos": None, "present": PRESENT}
ONE = {"pos": ("B",), "length": 1}
MISSES: dict[str, Case] = {
    "unchanged": (lambda g, past, new: past, {"pos": None}),
    "new rows first": (first_then_past, GROWS),
    "more heads": (concat(1, *TURNED), {"shape": ("B", "P", "S", SIZE), "pos": None, "present": ("B", "T", "S", SIZE)}),
    "a past of one length": (
        concat(2, *TURNED),
        {"shape": ("B", HEADS, 15, SIZE), "pos": None, "present": BNSD, "length": 1},
    ),
    "rolled": (rolled, {"pos": None, "length": 1}),
    "beams": (by_beams, GROWS),
    "a second reader": (reads_past, GROWS),
    "two results": (two_results, GROWS),
    "another layout": (turned_back, GROWS | {"present": ("B", "T", HEADS, SIZE)}),
    "one head": (one_head, {}),
    **{
        f"{reduction}, {op}": (reduced(idiom, reduction), {})
        for op, idiom in (("ScatterND", index_copy()), ("ScatterElements", scatter_elements(in_a_row)))
        for reduction in ("add", "max")
    },
    "held inside": (held_inside, {"shape": (1, HEADS, CAPACITY, SIZE), "batch": 1}),
    "lost": (lost, {}),
    "one row for many tokens": (last_token, ONE | {"length": "S"}),
    "the row after the next": (index_copy(around(0, offset=1)), {}),
    "from a row on": (from_a_row_on, ONE),
    "swapped sequences": (where_backwards, ONE),
    "odd after 100 tokens": (odd_after(100), {}),
    "a mask": (by_a_mask, {"pos": None, "length": 1}),
    "reversed": (index_copy(reversed_rows), {}),
    "sums of a mask": (index_copy(from_a_mask), {"pos": None}),
}

ROWS = {
    str(how): (index_copy(around(*how)), {})
    for modulus in (0, CAPACITY, CAPACITY - 1, 2 * CAPACITY)
    for how in ((modulus, 2), (modulus, -1), (modulus, 0), (modulus, 1, 2), (modulus, 1, 0), (modulus, 1, 1, -1))
}
"""Rows P .. P + S - 1 in their order alone are an update."""
BLENDS = {str(how): (blend(*how), ONE) for how in ((0.5, 1.0, 1.0), (1.0, 2.0, 1.0), (1.0, -1.0, 1.0), (1.0, 1.0, 0.5))}


def entries() -> Iterator[Entry]:
    cases = FORMS | MISSES | ROWS | BLENDS
    open_, closed = {}, {}
    for name, (idiom, how) in cases.items():
        made = partial(update_model, idiom, **how)
        (open_ if {"P", "L", "S"} & set(how.get("shape", BNSD)) else closed)[name] = made
    yield from built("one update", closed)
    yield from built("one update", open_, capacity=CAPACITY)

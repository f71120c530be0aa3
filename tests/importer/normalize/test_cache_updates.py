"""Cache updates as exporters write them: what is read off each form, and what the nearest misses are called."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from itertools import permutations
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_graphsurgeon as gs
import pytest
from cache_updates import (
    BNSD,
    CAPACITY,
    HEADS,
    SIZE,
    Idiom,
    along,
    assert_same_update,
    candidates,
    column,
    count,
    index_copy,
    joined,
    new_tokens,
    positions,
    prove_updates,
    transpose,
    update_model,
)
from graphs import Graph
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto

from trt_kvcache.errors import UnsupportedModelError
from trt_kvcache.importer import import_model
from trt_kvcache.importer.interface.exported import Interface
from trt_kvcache.importer.normalize.evidence.blueprint import Blueprint
from trt_kvcache.importer.normalize.evidence.samples import Samples
from trt_kvcache.importer.normalize.idioms.cache_updates import find_candidates
from trt_kvcache.importer.normalize.idioms.read_updates import read_update
from trt_kvcache.importer.prepare import detach_weights, fix_digit_dims, infer_shapes
from trt_kvcache.importer.simplify import name_nodes, raise_opset

FLOAT, INT = TensorProto.FLOAT, TensorProto.INT64
MODELS = Path(__file__).parents[2] / "models"
BSND = ("B", CAPACITY, HEADS, SIZE)
FLAT = ("B", CAPACITY, HEADS * SIZE)
PAST, PRESENT = ("B", HEADS, "P", SIZE), ("B", HEADS, "T", SIZE)
FAR = 1 << 40

# Forms: of the past with some rows more, each with what is read off it.


def heads_first(g: Graph, new: str) -> str:
    return transpose(g, new, 0, 2, 1, 3)


def flat(g: Graph, tensor: str) -> str:
    return g.node("Reshape", [tensor, g.constant([0, 0, -1])])


def cut(g: Graph, tensor: str, *numbers: int) -> str:
    """A Slice from start to end along an axis, by a step."""
    return g.node("Slice", [tensor, *(g.constant([n]) for n in numbers)])


def concat(axis: int, *perm: int) -> Idiom:
    def idiom(g: Graph, past: str, new: str) -> str:
        return g.node("Concat", [past, transpose(g, new, *perm) if perm else new], axis=axis)

    return idiom


def concat_flat(g: Graph, past: str, new: str) -> str:
    return g.node("Concat", [past, flat(g, new)], axis=1)


def concat_between_transposes(g: Graph, past: str, new: str) -> str:
    whole = g.node("Concat", [transpose(g, past, 2, 0, 1, 3), transpose(g, new, 1, 0, 2, 3)], axis=0)
    return transpose(g, whole, 1, 2, 0, 3)


def concat_with_heads_in_batch(g: Graph, past: str, new: str) -> str:
    """``[B * N, P, D]`` in between, as older models keep their heads."""

    def merged(tensor: str) -> str:
        rows = g.node("Shape", [tensor], start=2, end=3)
        return g.node("Reshape", [tensor, g.node("Concat", [g.constant([-1]), rows, g.constant([SIZE])], axis=0)])

    whole = g.node("Concat", [merged(past), merged(heads_first(g, new))], axis=1)
    rows = g.node("Shape", [whole], start=1, end=2)
    return g.node("Reshape", [whole, g.node("Concat", [g.constant([-1, HEADS]), rows, g.constant([SIZE])], axis=0)])


def index_put(g: Graph, past: str, new: str) -> str:
    """``past[:, pos] = new``."""
    data, update = transpose(g, past, 1, 0, 2, 3), transpose(g, new, 1, 0, 2, 3)
    return transpose(g, g.node("ScatterND", [data, column(g, "pos"), update]), 1, 0, 2, 3)


def index_put_batch(g: Graph, past: str, new: str) -> str:
    """``past[arange(B)[:, None], :, pos] = new`` with ``pos [B, S]``."""
    index = joined(g, along(g, count(g, "B"), 0, 2), "pos")
    return heads_first(g, g.node("ScatterND", [heads_first(g, past), index, new]))


def every_number(g: Graph, past: str, new: str) -> str:
    """A number for each of ``B, N, L, D``."""
    parts = [count(g, "B"), count(g, HEADS), positions(g), count(g, SIZE)]
    index = joined(g, *(along(g, part, axis, 4) for axis, part in enumerate(parts)))
    return g.node("ScatterND", [past, index, heads_first(g, new)])


def slice_assign(g: Graph, past: str, new: str) -> str:
    """``past[:, :, pos : pos + S] = new``, as torch writes it: a Slice of all rows' numbers."""
    end = g.node("Add", ["pos", new_tokens(g)])
    first, last = (g.node("Unsqueeze", [t, g.constant([0])]) for t in ("pos", end))
    rows = g.node("Slice", [count(g, CAPACITY), first, last, g.constant([0])])
    data, update = transpose(g, past, 2, 1, 0, 3), transpose(g, new, 1, 2, 0, 3)
    return transpose(g, g.node("ScatterND", [data, column(g, rows), update]), 2, 1, 0, 3)


def scatter_flat(g: Graph, past: str, new: str) -> str:
    data, update = transpose(g, past, 1, 0, 2), transpose(g, flat(g, new), 1, 0, 2)
    return transpose(g, g.node("ScatterND", [data, column(g, positions(g)), update]), 1, 0, 2)


def scatter_elements(rows: Callable[[Graph], str]) -> Idiom:
    """`rows` makes them, as they broadcast to ``[B, N, S, D]``."""

    def idiom(g: Graph, past: str, new: str) -> str:
        update = heads_first(g, new)
        index = g.node("Expand", [rows(g), g.node("Shape", [update])])
        return g.node("ScatterElements", [past, index, update], axis=-2)

    return idiom


def in_a_row(g: Graph) -> str:
    return along(g, positions(g), 2, 4)


def by_sequence(g: Graph, first: str = "pos") -> str:
    steps = g.node("Range", [g.constant(0), new_tokens(g), g.constant(1)])
    return g.node("Add", [along(g, first, 0, 4), along(g, steps, 2, 4)])


def at(g: Graph, axis: int = 2, rank: int = 4, pos: str = "pos") -> str:
    """Which row is written, bool ``[B, 1, L, 1]``."""
    rows = np.arange(CAPACITY).reshape([CAPACITY if a == axis else 1 for a in range(rank)])
    return g.node("Equal", [g.constant(rows), g.node("Reshape", [pos, g.constant([-1] + [1] * (rank - 1))])])


def where(g: Graph, past: str, new: str) -> str:
    return g.node("Where", [at(g), heads_first(g, new), past])


def where_not(g: Graph, past: str, new: str) -> str:
    return g.node("Where", [g.node("Not", [at(g)]), past, heads_first(g, new)])


def where_expanded(g: Graph, past: str, new: str) -> str:
    return g.node("Where", [g.node("Expand", [at(g), g.node("Shape", [past])]), heads_first(g, new), past])


def where_between_transposes(g: Graph, past: str, new: str) -> str:
    return heads_first(g, g.node("Where", [at(g, 1), new, heads_first(g, past)]))


def where_flat(g: Graph, past: str, new: str) -> str:
    return g.node("Where", [at(g, 1, 3), flat(g, new), past])


def blend(kept: float = 1.0, gain: float = 1.0, erased: float = 1.0) -> Idiom:
    """``past * (kept - erased * h) + new * (gain * h)``: an update for 1, 1, 1 alone."""

    def idiom(g: Graph, past: str, new: str) -> str:
        hot = g.node("Cast", [at(g)], to=FLOAT)
        gone = g.node("Mul", [hot, g.constant(erased, np.float32)])
        cold = g.node("Sub", [g.constant(kept, np.float32), gone])
        fresh = g.node("Mul", [heads_first(g, new), g.node("Mul", [hot, g.constant(gain, np.float32)])])
        return g.node("Add", [g.node("Mul", [past, cold]), fresh])

    return idiom


def one_hot_operator(g: Graph, past: str, new: str) -> str:
    hot = g.node("OneHot", ["pos", g.constant(CAPACITY), g.constant([0, 1], np.float32)])
    hot = g.node("Unsqueeze", [hot, g.constant([1, 3])])
    cold = g.node("Sub", [g.constant(1, np.float32), hot])
    fresh = g.node("Mul", [hot, heads_first(g, new)])
    return g.node("Add", [fresh, g.node("Mul", [cold, past])])


def around(modulus: int, stride: int = 1, step: int = 1, offset: int = 0) -> Callable[[Graph], str]:
    """``(pos * stride + offset + step * (0 .. S - 1)) mod modulus``; 0: without."""

    def rows(g: Graph) -> str:
        steps = g.node("Range", [g.constant(0), new_tokens(g), g.constant(1)])
        start = g.node("Add", [g.node("Mul", ["pos", g.constant(stride)]), g.constant(offset)])
        found = g.node("Add", [g.node("Mul", [steps, g.constant(step)]), start])
        return g.node("Mod", [found, g.constant(modulus)]) if modulus else found

    return rows


def clamped(g: Graph) -> str:
    return g.node("Min", [positions(g), g.constant(CAPACITY - 1)])


def growing(idiom: Idiom, shape: tuple = PAST, present: tuple = PRESENT, **facts: Any) -> tuple:
    return idiom, {"shape": shape, "pos": None, "present": present}, {"idiom": "Concat", "growing": True} | facts


def fixed(
    idiom: Idiom, name: str, shape: tuple = BNSD, pos: tuple = (), length: int | str = "S", **facts: Any
) -> tuple:
    return idiom, {"shape": shape, "pos": pos, "length": length}, {"idiom": name, "growing": False} | facts


TURNED = (0, 2, 1, 3)
FORMS: dict[str, tuple] = {
    "concat": growing(concat(-2, *TURNED), axis=2, perm=TURNED),
    "concat, sequence first": growing(concat(1), ("B", "P", HEADS, SIZE), ("B", "T", HEADS, SIZE), axis=1, perm=None),
    "concat, flat": growing(concat_flat, ("B", "P", HEADS * SIZE), ("B", "T", HEADS * SIZE), axis=1, perm=None),
    "concat between transposes": growing(concat_between_transposes, axis=2, perm=TURNED),
    "concat, heads in batch": growing(concat_with_heads_in_batch, axis=2, perm=TURNED),
    "index_copy": fixed(index_copy(), "ScatterND", axis=2, perm=TURNED),
    "index_copy, given rows": fixed(index_copy(lambda g: "pos"), "ScatterND", pos=("S",), axis=2, perm=TURNED),
    "index_put": fixed(index_put, "ScatterND", BSND, ("S",), axis=1, perm=None),
    "index_put by sequence": fixed(index_put_batch, "ScatterND", pos=("B", "S"), axis=2, perm=TURNED),
    "every number": fixed(every_number, "ScatterND", axis=2, perm=TURNED),
    "slice assignment": fixed(slice_assign, "ScatterND", axis=2, perm=TURNED),
    "scatter, flat": fixed(scatter_flat, "ScatterND", FLAT, axis=1, perm=None),
    "scatter of elements": fixed(scatter_elements(in_a_row), "ScatterElements", axis=2, perm=TURNED),
    "scatter by sequence": fixed(scatter_elements(by_sequence), "ScatterElements", pos=("B",), axis=2, perm=TURNED),
    "a ring": fixed(index_copy(around(CAPACITY)), "ScatterND", axis=2, perm=TURNED, circular=True),
    "clamped": fixed(index_copy(clamped), "ScatterND", axis=2, perm=TURNED),
    "where": fixed(where, "Where", pos=("B",), length=1, axis=2, perm=TURNED),
    "where not": fixed(where_not, "Where", pos=("B",), length=1, axis=2, perm=TURNED),
    "where, expanded": fixed(where_expanded, "Where", pos=("B",), length=1, axis=2, perm=TURNED),
    "where between transposes": fixed(where_between_transposes, "Where", pos=("B",), length=1, axis=2, perm=TURNED),
    "where, flat": fixed(where_flat, "Where", FLAT, ("B",), 1, axis=1, perm=None),
    "one-hot": fixed(blend(), "one-hot", pos=("B",), length=1, axis=2, perm=TURNED),
    "OneHot": fixed(one_hot_operator, "one-hot", pos=("B",), length=1, axis=2, perm=TURNED),
}


@pytest.mark.few(24)
@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize(("start", "batch", "length"), [(5, 3, 2), (0, 1, 3), (12, 2, 4)])
def test_forms(name: str, start: int, batch: int, length: int) -> None:
    idiom, how, facts = FORMS[name]
    length = 1 if how.get("length") == 1 else length
    if "heads in batch" in name:
        start = max(start, 1)  # ONNX does not say what -1 in a Reshape of nothing is
    write = assert_same_update(update_model(idiom, **how), start, batch, length, CAPACITY if facts["growing"] else None)
    assert {fact: getattr(write, fact) for fact in facts} == facts
    assert write.circular == facts.get("circular", False)
    assert write.positions == (() if facts["growing"] else ("pos",))


@pytest.mark.parametrize("start", [CAPACITY - 1, CAPACITY, 3 * CAPACITY + 2])
def test_rings_go_on(start: int) -> None:
    assert assert_same_update(update_model(index_copy(around(CAPACITY))), start, 2, 3).circular


@pytest.mark.parametrize("dtype", [TensorProto.FLOAT16, TensorProto.BFLOAT16])
def test_other_types(dtype: int) -> None:
    """A Cast to the type of the cache changes nothing."""

    def idiom(g: Graph, past: str, new: str) -> str:
        return index_copy()(g, g.node("Cast", [past], to=dtype), g.node("Cast", [new], to=dtype))

    (write,) = prove_updates(update_model(idiom, dtype=dtype))
    assert (write.idiom, write.update.name) == ("ScatterND", "new")


@given(data=st.permutations(range(4)), indexed=st.integers(1, 4), seed=st.integers(0, 23))
@settings(max_examples=20, deadline=None)
def test_any_order_of_axes(data: list[int], indexed: int, seed: int) -> None:
    """ScatterND on any axis order of the past, with any number of axes indexed, in any order of the index."""
    indexed = max(indexed, data.index(2) + 1)
    orders = list(permutations(range(indexed)))
    order = orders[seed % len(orders)]

    def idiom(g: Graph, past: str, new: str) -> str:
        sizes = {0: "B", 1: HEADS, 3: SIZE}
        vectors = [positions(g) if axis == 2 else count(g, sizes[axis]) for axis in data[:indexed]]
        index = joined(g, *(along(g, vector, order.index(place), indexed) for place, vector in enumerate(vectors)))
        axes = [data[place] for place in order] + data[indexed:]
        update = transpose(g, new, *({0: 0, 1: 2, 2: 1, 3: 3}[axis] for axis in axes))
        written = g.node("ScatterND", [transpose(g, past, *data), index, update])
        return transpose(g, written, *np.argsort(data).tolist())

    write = assert_same_update(update_model(idiom), 5, 2, 3)
    assert (write.axis, write.perm, write.update.name) == (2, TURNED, "new")


def test_lengths_of_masks_say_positions() -> None:
    def idiom(g: Graph, past: str, new: str) -> str:
        mask = g.input("attention_mask", INT, ["B", "T"])
        total = g.node("Gather", [g.node("Shape", [mask]), g.constant(1)])
        return index_copy(lambda g: positions(g, g.node("Sub", [total, new_tokens(g)])))(g, past, new)

    (write,) = prove_updates(update_model(idiom, ("B", HEADS, "L", SIZE), None), 20)
    assert (write.positions, write.axis) == ((), 2)


@pytest.mark.parametrize(("op", "name"), [("Cast", "rounded"), ("Expand", "spread"), ("Slice", "turned")])
def test_new_rows_are_read_after_what_changes_them(op: str, name: str) -> None:
    def idiom(g: Graph, past: str, new: str) -> str:
        if op == "Cast":
            new = g.node("Cast", [g.node("Cast", [new], to=TensorProto.FLOAT16)], name, to=FLOAT)
        elif op == "Expand":  # the rows of the first sequence, for all
            new = g.node("Expand", [cut(g, new, 0, 1, 0), g.node("Shape", [new])], name)
        else:
            new = g.node("Slice", [new, *(g.constant([v]) for v in (-1, -FAR, -1, -1))], name)
        return index_copy()(g, past, new)

    assert assert_same_update(update_model(idiom), 5, 2, 3).update.name == name


def test_tensors_that_are_the_cache_as_well() -> None:
    def idiom(g: Graph, past: str, new: str) -> str:
        whole = g.node("Identity", [index_copy()(g, past, new)], "whole")
        heads_first(g, heads_first(g, whole))
        return whole

    (write,) = prove_updates(update_model(idiom))
    assert {"whole"} < {t.name for t in write.aliases}
    assert len(write.aliases) == 3


@pytest.mark.parametrize("blended", [False, True])
def test_long_caches_are_not_allocated(blended: bool) -> None:
    capacity, heads = 131072, 8
    shape = ("B", heads, capacity, 64)

    def idiom(g: Graph, past: str, new: str) -> str:
        new = g.node("Expand", [new, g.constant([1, 1, 1, 1])])
        new = g.node("Tile", [new, g.constant([1, 1, heads // HEADS, 64 // SIZE])])
        if not blended:
            return index_copy()(g, past, new)
        rows = g.constant(np.arange(capacity).reshape(1, 1, -1, 1))
        chosen = g.node("Equal", [rows, g.node("Reshape", ["pos", g.constant([-1, 1, 1, 1])])])
        return g.node("Where", [chosen, heads_first(g, new), past])

    model = update_model(idiom, shape, ("B",) if blended else (), length=1 if blended else "S")
    tracemalloc.start()
    (write,) = prove_updates(model)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert (write.axis, write.circular) == (2, False)
    assert peak < 1 << 28  # where the cache has 1 << 30 bytes in the samples of two sequences


# What does something else.


def first_then_past(g: Graph, past: str, new: str) -> str:
    return g.node("Concat", [heads_first(g, new), past], axis=2)


def three_parts(g: Graph, past: str, new: str) -> str:
    return g.node("Concat", [past, heads_first(g, new), heads_first(g, g.node("Neg", [new]))], axis=2)


def twice(g: Graph, past: str, new: str) -> str:
    rows = heads_first(g, new)
    return g.node("Concat", [past, g.node("Concat", [rows, rows], axis=2)], axis=2)


def turned_back(g: Graph, past: str, new: str) -> str:
    return heads_first(g, concat(2, *TURNED)(g, past, new))


def by_beams(g: Graph, past: str, new: str) -> str:
    return concat(2, *TURNED)(g, g.node("Gather", [past, g.input("beams", INT, ["B"])], axis=0), new)


def reads_past(g: Graph, past: str, new: str) -> str:
    g.node("ReduceMax", [past], "largest", keepdims=0)
    g.output("largest", FLOAT, [])
    return concat(2, *TURNED)(g, past, new)


def two_results(g: Graph, past: str, new: str) -> str:
    g.node("Identity", [concat(2, *TURNED)(g, past, new)], "other")
    g.output("other", FLOAT, list(PRESENT))
    return concat(2, *TURNED)(g, past, new)


def cut_first(g: Graph, past: str, new: str) -> str:
    return concat(2, *TURNED)(g, cut(g, past, 1, FAR, 2), new)


def cut_last(g: Graph, past: str, new: str) -> str:
    return cut(g, concat(2, *TURNED)(g, past, new), -CAPACITY, FAR, 2)


def one_head(g: Graph, past: str, new: str) -> str:
    update = cut(g, heads_first(g, new), 0, 1, 1)
    return g.node("ScatterElements", [past, g.node("Expand", [in_a_row(g), g.node("Shape", [update])]), update], axis=2)


def one_sequence(g: Graph, past: str, new: str) -> str:
    rows = positions(g)
    slot = g.node("Expand", [g.constant([1]), g.node("Shape", [rows])])
    update = g.node("Gather", [new, g.constant(0)], axis=0)
    return heads_first(g, g.node("ScatterND", [heads_first(g, past), joined(g, slot, rows), update]))


def reduced(idiom: Idiom, reduction: str) -> Idiom:
    def made(g: Graph, past: str, new: str) -> str:
        result = idiom(g, past, new)
        node = next(n for n in g.nodes if n.op_type.startswith("Scatter"))
        node.attribute.append(onnx.helper.make_attribute("reduction", reduction))
        return result

    return made


def held_inside(g: Graph, past: str, new: str) -> str:
    buffer = g.constant(np.zeros((CAPACITY, 1, HEADS, SIZE)), np.float32)
    written = g.node("ScatterND", [buffer, column(g, positions(g)), transpose(g, new, 1, 0, 2, 3)])
    g.node("ReduceMax", [written], "logits", keepdims=0)
    g.output("logits", FLOAT, [])
    return index_copy()(g, past, new)


def lost(g: Graph, past: str, new: str) -> str:
    g.node("ReduceMax", [index_copy()(g, g.input("lost", FLOAT, BNSD), new)], "logits", keepdims=0)
    g.output("logits", FLOAT, [])
    return scatter_elements(in_a_row)(g, past, new)


def written_twice(g: Graph, past: str, new: str) -> str:
    return index_copy()(g, scatter_elements(in_a_row)(g, past, new), new)


def rolled(g: Graph, past: str, new: str) -> str:
    whole = g.node("Concat", [cut(g, past, 1, FAR, 2), cut(g, past, 0, 1, 2)], axis=2)
    return index_copy(lambda g: g.constant([CAPACITY - 1]))(g, whole, new)


def slots(g: Graph, past: str, new: str) -> str:
    return g.node("ScatterND", [past, column(g, positions(g)), transpose(g, new, 1, 2, 0, 3)])


def last_token(g: Graph, past: str, new: str) -> str:
    return where(g, past, g.node("Gather", [new, g.constant([-1])], axis=1))


def from_a_row_on(g: Graph, past: str, new: str) -> str:
    start = g.node("Reshape", ["pos", g.constant([-1, 1, 1, 1])])
    chosen = g.node("GreaterOrEqual", [g.constant(np.arange(CAPACITY).reshape(1, 1, -1, 1)), start])
    return g.node("Where", [chosen, heads_first(g, new), past])


def others(g: Graph, past: str, new: str) -> str:
    return g.node("Where", [at(g), past, heads_first(g, new)])


def backwards(g: Graph) -> str:
    return g.node("Slice", ["pos", *(g.constant([v]) for v in (-1, -FAR, 0, -1))])


def where_backwards(g: Graph, past: str, new: str) -> str:
    return g.node("Where", [at(g, pos=backwards(g)), heads_first(g, new), past])


def by_a_mask(g: Graph, past: str, new: str) -> str:
    return g.node("Where", [g.input("chosen", TensorProto.BOOL, ["B", 1, CAPACITY, 1]), heads_first(g, new), past])


def by_two_positions(g: Graph, past: str, new: str) -> str:
    chosen = g.node("Or", [at(g), at(g, pos=g.input("other", INT, ["B"]))])
    return g.node("Where", [chosen, heads_first(g, new), past])


def by_heads(g: Graph, past: str, new: str) -> str:
    row = g.node("Reshape", ["pos", g.constant([-1, 1, 1, 1])])
    chosen = g.node("Equal", [g.constant(np.arange(HEADS).reshape(1, -1, 1, 1)), row])
    return g.node("Where", [chosen, heads_first(g, new), past])


def reversed_rows(g: Graph) -> str:
    return g.node("Slice", [positions(g), *(g.constant([v]) for v in (-1, -FAR, 0, -1))])


def from_the_end(g: Graph) -> str:
    return g.node("Neg", [g.node("Add", [positions(g), g.constant(1)])])


def from_tokens(g: Graph) -> str:
    largest = g.node("ArgMax", [g.node("ReduceMax", ["hidden", g.constant([0, 1])], keepdims=0)])
    return positions(g, g.node("Squeeze", [largest]))


def from_a_mask(g: Graph) -> str:
    sums = g.node("CumSum", [g.input("attention_mask", INT, ["B", CAPACITY]), g.constant(1)])
    last = g.node("ReduceMax", [sums, g.constant([0, 1])], keepdims=0)
    return positions(g, g.node("Sub", [last, new_tokens(g)]))


def from_a_table(g: Graph) -> str:
    return g.node("Gather", [g.input("slots", INT, [CAPACITY]), positions(g)])


def no_batch(g: Graph, past: str, new: str) -> str:
    update = g.node("Reshape", [heads_first(g, new), g.constant([HEADS, -1, SIZE])])
    return g.node("Concat", [past, update], axis=1)


def more_sequences(g: Graph, past: str, new: str) -> str:
    return g.node("Concat", [past, new], axis=0)


GROWS = {"shape": PAST, "pos": None, "present": PRESENT}
WHOLE = {"shape": BNSD, "pos": None, "present": BNSD}
ONE = {"pos": ("B",), "length": 1}
DATA = "its positions depend on data: "
MISSES: dict[str, tuple[Idiom, dict[str, Any], str]] = {
    "unchanged": (lambda g, past, new: past, {"pos": None}, "comes out as it went in, .* the exporter has lost the wr"),
    "unchanged, turned": (
        lambda g, past, new: heads_first(g, past), {"pos": None, "present": BSND}, "comes out as it went in"
    ),
    "new rows first": (first_then_past, GROWS, "writes rows 0, 1, 2 of axis 2 when 5 rows hold tokens and 3 are new"),
    "three parts": (three_parts, GROWS, "takes new rows from 2 tensors"),
    "twice the new rows": (twice, GROWS, r"\[2, 2, 6, 4\] is not as large as 3 rows of \[2, 2, 5, 4\]"),
    "more sequences": (
        more_sequences,
        {"shape": ("B", "S", HEADS, SIZE), "pos": None, "present": ("T", "S", HEADS, SIZE)},
        "is not the batch",
    ),
    "no batch": (
        no_batch,
        {"shape": (HEADS, "P", SIZE), "pos": None, "present": (HEADS, "T", SIZE), "batch": 1},
        "its first axis, '2', is not the batch",
    ),
    "more heads": (
        concat(1, *TURNED),
        {"shape": ("B", "P", "S", SIZE), "pos": None, "present": ("B", "T", "S", SIZE)},
        "is not as large as 3 rows",
    ),
    "a past of one length": (
        concat(2, *TURNED),
        {"shape": ("B", HEADS, 15, SIZE), "pos": None, "present": BNSD, "length": 1},
        "its axis 2 has a fixed size, so that a step's result is no input of the next",
    ),
    "rolled by a cut past": (cut_first, WHOLE | {"length": 1}, "Slice '.*' moves its rows in every step"),
    "rolled by a cut result": (cut_last, WHOLE, "Slice '.*' moves its rows in every step"),
    "rolled": (rolled, {"pos": None, "length": 1}, "Slice '.*' moves its rows in every step"),
    "beams": (by_beams, GROWS, "Gather '.*' moves its rows in every step"),
    "a second reader": (reads_past, GROWS, "ReduceMax 'node_largest' reads its past as well"),
    "two results": (two_results, GROWS, "it has two results, 'other' and 'present'"),
    "another layout": (turned_back, GROWS | {"present": ("B", "T", HEADS, SIZE)}, "is not the past .* with all of"),
    "one head": (one_head, {}, r"\[2, 1, 3, 4\] is not as large as 3 rows"),
    "one sequence": (one_sequence, {}, "do not have one axis for each axis of the cache"),
    **{
        f"{reduction}, {op}": (reduced(idiom, reduction), {}, why)
        for op, idiom in (("ScatterND", index_copy()), ("ScatterElements", scatter_elements(in_a_row)))
        for reduction, why in (("add", "neither those of past nor those of new rows"), ("max", "is not the past"))
    },
    "held inside": (held_inside, {"shape": (1, HEADS, CAPACITY, SIZE), "batch": 1}, "a cache that the model holds in"),
    "lost": (lost, {}, "the result is no output of the model, so that the new rows are lost"),
    "written twice": (written_twice, {}, r"it is written more than once \("),
    "slots": (slots, {"shape": ("L", HEADS, "B", SIZE)}, "its first axis|cannot be computed"),
    "one row for many tokens": (last_token, ONE | {"length": "S"}, "is not as large as 3 rows"),
    "the row after the next": (
        index_copy(around(0, offset=1)), {}, "writes rows 6, 7, 8 of axis 2 when 5 rows hold tokens and 3 are new"
    ),
    "from a row on": (from_a_row_on, ONE, "writes rows 5, 6, 7"),
    "all other rows": (others, ONE, "writes rows 0, 1, 2, 3, 4, 6"),
    "swapped sequences": (where_backwards, ONE, "writes a sequence at the position of another"),
    "swapped sequences, many tokens": (
        scatter_elements(lambda g: by_sequence(g, backwards(g))), {"pos": ("B",)}, "at the position of another"
    ),
    "a mask": (by_a_mask, {"pos": None, "length": 1}, f"{DATA}they are computed from the contents of 'chosen'"),
    "two masks": (by_two_positions, ONE, f"{DATA}two inputs take part in them"),
    "heads": (by_heads, ONE, "writes no rows"),
    "reversed": (index_copy(reversed_rows), {}, "is not the past .* with all of 'transpose_.' there"),
    "counted from the end": (index_copy(from_the_end), {}, "writes rows 8, 9, 10 of axis 2"),
    "always the same": (index_copy(lambda g: positions(g, g.constant(0))), {"pos": None}, "writes rows 0, 1, 2"),
    "from tokens": (index_copy(from_tokens), {}, f"{DATA}ArgMax '.*' computes them from the contents of 'hidden'"),
    "sums of a mask": (index_copy(from_a_mask), {"pos": None}, "CumSum '.*' computes them from the contents"),
    "a table": (index_copy(from_a_table), {}, f"{DATA}two inputs take part in them, '(slots, pos|pos, slots)'"),
}  # fmt: skip


@pytest.mark.parametrize("name", MISSES)
def test_misses_are_named(name: str) -> None:
    idiom, how, words = MISSES[name]
    is_open = bool({"P", "L", "S"} & set(how.get("shape", BNSD)))
    with pytest.raises(UnsupportedModelError, match=words) as caught:
        prove_updates(update_model(idiom, **how), CAPACITY if is_open else None)
    if name != "held inside":
        assert "Supported are updates that write the S new rows of a step" in str(caught.value)


def is_taken(model: onnx.ModelProto, folder: Path) -> bool:
    onnx.save(model, folder / "model.onnx")
    try:
        import_model(folder / "model.onnx")
    except UnsupportedModelError:
        return False
    return True


@pytest.mark.few(20)
@pytest.mark.parametrize("modulus", [0, CAPACITY, CAPACITY // 2, CAPACITY - 1, CAPACITY + 1, 2 * CAPACITY])
@pytest.mark.parametrize(
    ("stride", "step", "offset"),
    [(1, 1, 0), (2, 1, 0), (-1, 1, 0), (0, 1, 0), (1, 2, 0), (1, 0, 0), (1, 1, 1), (1, 1, -1)],
)
def test_only_rows_in_order_are_taken(modulus: int, stride: int, step: int, offset: int, tmp_path: Path) -> None:
    """Reading and the check together: rows P .. P + S - 1, from the first to the last."""
    model = update_model(index_copy(around(modulus, stride, step, offset)))
    rows = [[(p * stride + offset + step * s) for s in range(3)] for p in range(CAPACITY - 2)]
    found = [[r % modulus if modulus else r for r in step] for step in rows]
    assert is_taken(model, tmp_path) == (found == [[p, p + 1, p + 2] for p in range(CAPACITY - 2)])


@pytest.mark.few(4)
@pytest.mark.parametrize("kept", [1.0, 0.5, 0.0])
@pytest.mark.parametrize("gain", [1.0, 2.0, -1.0])
@pytest.mark.parametrize("erased", [1.0, 0.0, 0.5])
def test_only_exact_blends_are_taken(kept: float, gain: float, erased: float, tmp_path: Path) -> None:
    model = update_model(blend(kept, gain, erased), pos=("B",), length=1)
    assert is_taken(model, tmp_path) == ((kept, gain, erased) == (1.0, 1.0, 1.0))


# What is no update.


def residual(g: Graph, x: str) -> str:
    mask = g.node("Cast", [g.input("attention_mask", INT, ["B", "S"])], to=FLOAT)
    added = g.node("MatMul", [x, g.constant(np.eye(8), np.float32)])
    return g.node("Add", [x, g.node("Mul", [added, g.node("Unsqueeze", [mask, g.constant([2])])])])


def decayed(g: Graph, x: str) -> str:
    decay = g.node("Sigmoid", [g.node("MatMul", [x, g.constant(np.eye(8), np.float32)])])
    return g.node("Add", [g.node("Mul", [g.input("state", FLOAT, ["B", "S", 8]), decay]), x])


def image_first(g: Graph, x: str) -> str:
    embedded = g.node("Gather", [g.constant([[1.0] * 8] * 4, np.float32), g.input("input_ids", INT, ["B", "S"])])
    whole = g.node("Concat", [x, embedded], axis=1)
    return g.node("Sigmoid", [g.node("Concat", [g.node("Neg", [whole]), whole], axis=-1)])


@pytest.mark.parametrize("made", [residual, decayed, image_first])
def test_other_outputs_are_none(made: Callable[[Graph, str], str]) -> None:
    g = Graph()
    g.node("Identity", [made(g, g.input("hidden", FLOAT, ["B", "S", 8]))], "out")
    g.output("out", FLOAT, ["B", "T", "D"])
    assert candidates(g.model(24)) == ()


def test_caches_that_are_written_in_a_wider_type_are_refused() -> None:
    def idiom(g: Graph, past: str, new: str) -> str:
        past, new = (g.node("Cast", [t], to=TensorProto.DOUBLE) for t in (past, new))
        return g.node("Cast", [index_copy()(g, past, new)], to=FLOAT)

    (found,) = candidates(update_model(idiom))
    assert "it comes as float and goes as float" in found.reason


@pytest.mark.parametrize("length", ["E", CAPACITY])
def test_keys_of_an_encoder_go_through(length: str | int) -> None:
    """Unchanged, a cross-attention cache is none to write; one of the shape of those written has lost its write."""

    def idiom(g: Graph, past: str, new: str) -> str:
        g.node("Identity", [g.input("cross", FLOAT, ["B", HEADS, length, SIZE])], "present_cross")
        g.output("present_cross", FLOAT, ["B", HEADS, length, SIZE])
        return index_copy()(g, past, new)

    if length == "E":
        assert [w.past.name for w in prove_updates(update_model(idiom))] == ["past"]
    else:
        with pytest.raises(UnsupportedModelError, match="'cross' .* the exporter has lost the write"):
            prove_updates(update_model(idiom))


@pytest.mark.parametrize("inputs", [1, 2])
def test_hidden_states_go_through(inputs: int) -> None:
    """Hidden states of an encoder come alone; caches with merged heads come in pairs."""
    g = Graph()
    for name in [f"states_{i}" for i in range(inputs)]:
        g.node("Identity", [g.input(name, FLOAT, ["B", "L", 8])], f"{name}_out")
        g.output(f"{name}_out", FLOAT, ["B", "L", 8])
    assert [c.idiom for c in candidates(g.model(24))] == ["unchanged"] * (inputs if inputs > 1 else 0)


def test_tokens_and_positions_are_told_apart_with_the_smallest_weights() -> None:
    """Both are integer inputs; what an embedding and a projection make of tokens is no mask."""
    g = Graph()
    tokens = g.input("input_ids", INT, ["B", 1])
    g.input("pos", INT, ["B"])
    past = g.input("past", FLOAT, BNSD)
    table = g.constant(np.arange(5 * HEADS * SIZE).reshape(5, -1), np.float32)
    projected = g.node("MatMul", [g.node("Gather", [table, tokens]), g.constant(np.eye(8), np.float32)])
    new = g.node("Reshape", [projected, g.constant([0, 0, HEADS, SIZE])], "new")
    g.node("Identity", [blend()(g, past, new)], "present")
    g.output("present", FLOAT, BNSD)
    (write,) = prove_updates(g.model(24))
    assert (write.idiom, write.update.name, write.positions) == ("one-hot", "new", ("pos",))


def test_the_graph_is_not_changed() -> None:
    graph = gs.import_onnx(onnx.shape_inference.infer_shapes(update_model(index_copy())))
    before = gs.export_onnx(graph).SerializeToString(deterministic=True)
    assert [c.past.name for c in find_candidates(graph)] == ["past"]
    assert gs.export_onnx(graph).SerializeToString(deterministic=True) == before


# Stored exports.


def exported(name: str) -> tuple[Any, ...]:
    """The updates of a stored model."""
    model, weights = detach_weights(onnx.load(MODELS / name / "model.onnx", load_external_data=False))
    fix_digit_dims(model.graph)
    name_nodes(model.graph)
    model = infer_shapes(raise_opset(model))
    found = find_candidates(gs.import_onnx(model))
    for candidate in found:
        if candidate.reason:
            raise candidate.refusal(candidate.reason)
    interface = Interface(model, found, None)
    capacity = interface.capacity(48 if found[0].growing or isinstance(found[0].past.shape[2], str) else None)
    samples = Samples(Blueprint(model, weights), interface, capacity)
    return tuple(read_update(candidate, samples) for candidate in found)


def names(kind: str) -> list[str]:
    return sorted(str(p.parent.relative_to(MODELS)) for p in MODELS.glob(kind))


@pytest.mark.parametrize("name", names("optimum/*/model.onnx") + names("t*/*dyn*/model.onnx"))
def test_growing_caches_of_exporters(name: str) -> None:
    writes = exported(name)
    assert len(writes) == 4
    for write in writes:
        assert (write.idiom, write.growing, write.circular, write.axis) == ("Concat", True, False, 2)
        is_value = "value" in write.past.name.rsplit(".", 1)[-1]
        assert write.perm == (TURNED if is_value else None)  # values from the projection, keys from the rotation
        assert write.update.inputs[0].op == ("Reshape" if is_value else "Add")


@pytest.mark.parametrize("name", names("t*/*static*/model.onnx"))
def test_static_caches_of_exporters(name: str) -> None:
    writes = exported(name)
    assert len(writes) == 4
    for layer, write in enumerate(writes):
        assert (write.idiom, write.growing, write.circular, write.axis) == ("ScatterND", False, False, 2)
        assert write.perm == (None if layer % 2 == 0 else TURNED)
        counter = f"input.past_key_values.layers.{layer // 2}.cumulative_length"
        assert write.positions in [("cur_len",), (counter,)]


@pytest.mark.parametrize(
    ("name", "idiom", "axis"),
    [
        ("bshd_index_put_dynamo_op18", "ScatterND", 1),
        ("index_copy_dynamo_op18", "ScatterND", 2),
        ("index_copy_legacy_op17", "ScatterElements", 2),
        ("index_put_batch_dynamo_op18", "ScatterND", 2),
        ("mod_index_put_dynamo_op18", "ScatterND", 2),
        ("onehot_mul_dynamo_op24", "one-hot", 2),
        ("scatter_dynamo_op18", "ScatterElements", 2),
        ("slice_assign_dynamo_op18", "ScatterND", 2),
        ("where_dynamo_op18", "Where", 2),
    ],
)
def test_own_torch_code(name: str, idiom: str, axis: int) -> None:
    writes = exported(f"plain-torch/{name}")
    assert [w.past.name for w in writes] == ["k_cache", "v_cache"]
    for write in writes:
        assert (write.idiom, write.axis, write.growing) == (idiom, axis, False)
        assert write.circular == name.startswith("mod_")
        assert (write.perm, write.positions) == (None if axis == 1 else TURNED, ("pos",))
    if name.startswith("slice"):
        assert [[t.name for t in w.aliases] for w in writes] == [["slice_scatter"], ["slice_scatter_2"]]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("narrow_copy_legacy_op17", "comes out as it went in, as 'k_cache_out', and the exporter has lost the write"),
        ("roll_dynamo_op18", "Slice '.*' moves its rows in every step"),
    ],
)
def test_dead_ends(name: str, words: str) -> None:
    with pytest.raises(UnsupportedModelError, match=words):
        exported(f"plain-torch/{name}")


@pytest.mark.parametrize("name", names("mobius/*/model.onnx") + names("ort-genai/*/model.onnx"))
def test_caches_in_operators_are_none(name: str) -> None:
    assert find_candidates(gs.import_onnx(onnx.load(MODELS / name / "model.onnx", load_external_data=False))) == ()

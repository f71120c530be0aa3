"""Caches that are written by ScatterND and ScatterElements."""

from __future__ import annotations

from itertools import permutations

import numpy as np
import pytest
from cache_updates import (
    BNSD,
    CAPACITY,
    HEADS,
    SIZE,
    along,
    assert_same_update,
    check_refused,
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

BSND = ("B", CAPACITY, HEADS, SIZE)


def index_put_bsnd(graph: Graph, past: str, new: str) -> str:
    """``past[:, pos] = new``."""
    data, update = transpose(graph, past, 1, 0, 2, 3), transpose(graph, new, 1, 0, 2, 3)
    return transpose(graph, graph.node("ScatterND", [data, column(graph, "pos"), update]), 1, 0, 2, 3)


def index_put_batch(graph: Graph, past: str, new: str) -> str:
    """``past[arange(B)[:, None], :, pos] = new`` with ``pos [B, S]``."""
    index = joined(graph, along(graph, count(graph, "B"), 0, 2), "pos")
    written = graph.node("ScatterND", [transpose(graph, past, 0, 2, 1, 3), index, new])
    return transpose(graph, written, 0, 2, 1, 3)


def every_axis(graph: Graph, past: str, new: str) -> str:
    """A number for each of ``B, N, L, D``."""
    parts = [count(graph, "B"), count(graph, HEADS), positions(graph), count(graph, SIZE)]
    index = joined(graph, *(along(graph, part, axis, 4) for axis, part in enumerate(parts)))
    return graph.node("ScatterND", [past, index, transpose(graph, new, 0, 2, 1, 3)])


def slice_assign(graph: Graph, past: str, new: str) -> str:
    """``past[:, :, pos : pos + S] = new``, as torch writes it: a Slice of all rows' numbers."""
    end = graph.node("Add", ["pos", new_tokens(graph)])
    first, last = (graph.node("Unsqueeze", [t, graph.constant([0])]) for t in ("pos", end))
    rows = graph.node("Slice", [count(graph, CAPACITY), first, last, graph.constant([0])])
    data, update = transpose(graph, past, 2, 1, 0, 3), transpose(graph, new, 1, 2, 0, 3)
    return transpose(graph, graph.node("ScatterND", [data, column(graph, rows), update]), 2, 1, 0, 3)


def merged_heads(graph: Graph, past: str, new: str) -> str:
    """``[B, L, N * D]``."""
    update = graph.node("Reshape", [new, graph.constant([0, 0, -1])])
    data, update = transpose(graph, past, 1, 0, 2), transpose(graph, update, 1, 0, 2)
    return transpose(graph, graph.node("ScatterND", [data, column(graph, positions(graph)), update]), 1, 0, 2)


def heads_in_batch(graph: Graph, past: str, new: str) -> str:
    """``[B * N, L, D]`` in between, with a number for each of its rows."""
    data = graph.node("Reshape", [past, graph.constant([-1, CAPACITY, SIZE])])
    update = transpose(graph, new, 0, 2, 1, 3)
    length = graph.node("Slice", [graph.node("Shape", [new]), graph.constant([1]), graph.constant([2])])
    shape = graph.node("Concat", [graph.constant([-1]), length, graph.constant([SIZE])], axis=0)
    update = graph.node("Reshape", [update, shape])
    heads = graph.node("Gather", [graph.node("Shape", [data]), graph.constant(0)])
    heads = graph.node("Range", [graph.constant(0), heads, graph.constant(1)])
    index = joined(graph, along(graph, heads, 0, 2), along(graph, positions(graph), 1, 2))
    written = graph.node("ScatterND", [data, index, update])
    return graph.node("Reshape", [written, graph.constant([-1, HEADS, CAPACITY, SIZE])])


def scatter_elements(rows: str | None = None):
    def idiom(graph: Graph, past: str, new: str) -> str:
        update = transpose(graph, new, 0, 2, 1, 3)
        index = along(graph, rows or positions(graph), 2, 4)
        index = graph.node("Expand", [index, graph.node("Shape", [update])])
        return graph.node("ScatterElements", [past, index, update], axis=-2)

    return idiom


def row_wise(graph: Graph, past: str, new: str) -> str:
    """``pos [B]``: every sequence at its own position."""
    update = transpose(graph, new, 0, 2, 1, 3)
    steps = graph.node("Range", [graph.constant(0), new_tokens(graph), graph.constant(1)])
    rows = graph.node("Add", [along(graph, "pos", 0, 4), along(graph, steps, 2, 4)])
    index = graph.node("Expand", [rows, graph.node("Shape", [update])])
    return graph.node("ScatterElements", [past, index, update], axis=2)


@pytest.mark.few(17)
@pytest.mark.parametrize(
    ("idiom", "shape", "pos", "axis", "perm"),
    [
        (index_copy(), BNSD, (), 2, (0, 2, 1, 3)),
        (index_copy(lambda graph: "pos"), BNSD, ("S",), 2, (0, 2, 1, 3)),
        (index_put_bsnd, BSND, ("S",), 1, None),
        (index_put_batch, BNSD, ("B", "S"), 2, (0, 2, 1, 3)),
        (every_axis, BNSD, (), 2, (0, 2, 1, 3)),
        (slice_assign, BNSD, (), 2, (0, 2, 1, 3)),
        (merged_heads, ("B", CAPACITY, HEADS * SIZE), (), 1, None),
        (heads_in_batch, BNSD, (), 2, (0, 2, 1, 3)),
        (scatter_elements(), BNSD, (), 2, (0, 2, 1, 3)),
        (scatter_elements("pos"), BNSD, ("S",), 2, (0, 2, 1, 3)),
        (row_wise, BNSD, ("B",), 2, (0, 2, 1, 3)),
    ],
)
@pytest.mark.parametrize(("start", "batch", "length"), [(0, 1, 3), (5, 2, 1), (12, 3, 4)])
def test_layouts(idiom, shape, pos, axis, perm, start, batch, length):
    write = assert_same_update(update_model(idiom, shape, pos), start, batch, length)
    assert (write.growing, write.circular, write.axis, write.perm) == (False, False, axis, perm)
    assert write.positions == ("pos",)


def test_one_sequence():
    """A batch of one, which exporters fix."""
    model = update_model(index_copy(), (1, HEADS, CAPACITY, SIZE), (), batch=1)
    assert assert_same_update(model, 5, 1, 3).perm == (0, 2, 1, 3)


def test_one_row_a_step():
    def rows(graph: Graph) -> str:
        return graph.node("Unsqueeze", ["pos", graph.constant([0])])

    assert_same_update(update_model(index_copy(rows), BNSD, (), length=1), 5, 2, 1)


def test_symbolic_capacity():
    model = update_model(index_copy(), ("B", HEADS, "L", SIZE), ())
    assert assert_same_update(model, 5, 2, 3, capacity=20).axis == 2


def test_half_precision():
    assert_same_update(update_model(slice_assign, BNSD, (), dtype=TensorProto.FLOAT16), 3, 2, 2)


def test_position_by_the_length_of_a_mask():
    """No value decides: the mask is as long as the text."""

    def idiom(graph: Graph, past: str, new: str) -> str:
        mask = graph.input("attention_mask", TensorProto.INT64, ["B", "T"])
        total = graph.node("Gather", [graph.node("Shape", [mask]), graph.constant(1)])
        return index_copy(lambda g: positions(g, g.node("Sub", [total, new_tokens(g)])))(graph, past, new)

    (write,) = prove_updates(update_model(idiom, ("B", HEADS, "L", SIZE), None), 20)
    assert write.positions == ()
    assert write.axis == 2


@given(
    data=st.permutations(range(4)),
    indexed=st.integers(1, 4),
    seed=st.integers(0, 23),
)
@settings(max_examples=25, deadline=None)
def test_any_order_of_axes(data, indexed, seed):
    """ScatterND on any axis order of the past, with any number of axes indexed, in any order of the index."""
    where = data.index(2)
    indexed = max(indexed, where + 1)
    order = list(permutations(range(indexed)))[seed % len(list(permutations(range(indexed))))]

    def idiom(graph: Graph, past: str, new: str) -> str:
        sizes = {0: "B", 1: HEADS, 3: SIZE}
        parts = []
        for place in range(indexed):
            axis = data[place]
            vector = positions(graph) if axis == 2 else count(graph, sizes[axis])
            parts.append(along(graph, vector, order.index(place), indexed))
        index = joined(graph, *parts)
        axes = [data[place] for place in order] + [data[place] for place in range(indexed, 4)]
        update = transpose(graph, new, *({0: 0, 1: 2, 2: 1, 3: 3}[axis] for axis in axes))
        written = graph.node("ScatterND", [transpose(graph, past, *data), index, update])
        return transpose(graph, written, *np.argsort(data).tolist())

    write = assert_same_update(update_model(idiom), 5, 2, 3)
    assert (write.axis, write.perm, write.update.name) == (2, (0, 2, 1, 3), "new")


def test_only_one_head():
    def idiom(graph: Graph, past: str, new: str) -> str:
        update = graph.node("Slice", [transpose(graph, new, 0, 2, 1, 3), *(graph.constant([v]) for v in (0, 1, 1))])
        index = graph.node("Expand", [along(graph, positions(graph), 2, 4), graph.node("Shape", [update])])
        return graph.node("ScatterElements", [past, index, update], axis=2)

    check_refused(idiom, "which rows it writes cannot be computed|writes only a part")


def test_only_one_sequence():
    """One slot of the batch is written."""

    def idiom(graph: Graph, past: str, new: str) -> str:
        rows = positions(graph)
        slot = graph.node("Expand", [graph.constant([1]), graph.node("Shape", [rows])])
        update = graph.node("Gather", [new, graph.constant(0)], axis=0)
        written = graph.node("ScatterND", [transpose(graph, past, 0, 2, 1, 3), joined(graph, slot, rows), update])
        return transpose(graph, written, 0, 2, 1, 3)

    check_refused(idiom, "its indices are")


@pytest.mark.parametrize("op", ["ScatterND", "ScatterElements"])
@pytest.mark.parametrize("reduction", ["add", "max"])
def test_reductions(op, reduction):
    def idiom(graph: Graph, past: str, new: str) -> str:
        result = (index_copy() if op == "ScatterND" else scatter_elements())(graph, past, new)
        node = next(n for n in graph.nodes if n.op_type == op)
        node.attribute.add(name="reduction", s=reduction.encode(), type=3)
        return result

    check_refused(idiom, f"its reduction '{reduction}' combines new rows with old ones")


def test_cache_inside_the_model():
    def idiom(graph: Graph, past: str, new: str) -> str:
        buffer = graph.constant(np.zeros((CAPACITY, 1, HEADS, SIZE)), np.float32)
        written = graph.node("ScatterND", [buffer, column(graph, positions(graph)), transpose(graph, new, 1, 0, 2, 3)])
        graph.node("ReduceMax", [written], "logits", keepdims=0)
        graph.output("logits", TensorProto.FLOAT, [])
        return index_copy()(graph, past, new)

    check_refused(idiom, "a cache that the model holds in itself", (1, HEADS, CAPACITY, SIZE), batch=1)


def test_result_that_is_no_output():
    def idiom(graph: Graph, past: str, new: str) -> str:
        lost = graph.input("lost", TensorProto.FLOAT, BNSD)
        graph.node("ReduceMax", [index_copy()(graph, lost, new)], "logits", keepdims=0)
        graph.output("logits", TensorProto.FLOAT, [])
        return scatter_elements()(graph, past, new)

    check_refused(
        idiom, "'lost' by ScatterND '.*': the result is no output of the model|the result is no output of the model"
    )


def test_written_twice():
    def idiom(graph: Graph, past: str, new: str) -> str:
        once = graph.node("Identity", [scatter_elements()(graph, past, new)])
        return index_copy()(graph, once, new)

    check_refused(idiom, r"it is written more than once \(")


def test_rolled():
    def idiom(graph: Graph, past: str, new: str) -> str:
        first, rest = (
            graph.node("Slice", [past, *(graph.constant([v]) for v in (*ends, 2))]) for ends in ((0, 1), (1, 1 << 40))
        )
        rolled = graph.node("Concat", [rest, first], axis=2)
        last = graph.node("Reshape", [graph.constant(CAPACITY - 1), graph.constant([1])])
        return index_copy(lambda g: last)(graph, rolled, new)

    check_refused(idiom, "Slice '.*' moves its rows in every step", pos=None, length=1)


def test_wrong_axis():
    """Rows of the batch are written: the positions are those of a slot."""

    def idiom(graph: Graph, past: str, new: str) -> str:
        update = transpose(graph, new, 1, 2, 0, 3)
        return graph.node("ScatterND", [past, column(graph, positions(graph)), update])

    check_refused(idiom, "is not the sequence axis|its first axis", ("L", HEADS, "B", SIZE))

"""Which rows an update writes: contiguous ones behind the past, in a line or around a ring, and nothing else."""

from __future__ import annotations

import pytest
from cache_updates import (
    CAPACITY,
    along,
    assert_same_update,
    check_refused,
    index_copy,
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


def affine(graph: Graph, stride: int, step: int, offset: int, modulus: int | None) -> str:
    """``(pos * stride + offset + step * (0 .. S - 1)) mod modulus``."""
    steps = graph.node("Range", [graph.constant(0), new_tokens(graph), graph.constant(1)])
    start = graph.node("Add", [graph.node("Mul", ["pos", graph.constant(stride)]), graph.constant(offset)])
    rows = graph.node("Add", [graph.node("Mul", [steps, graph.constant(step)]), start])
    return rows if modulus is None else graph.node("Mod", [rows, graph.constant(modulus)])


@given(
    stride=st.sampled_from([1, 1, 1, 2, -1, 0]),
    step=st.sampled_from([1, 1, 1, 2, 0, -1]),
    offset=st.sampled_from([0, 0, 0, 1, -1, CAPACITY]),
    modulus=st.sampled_from([None, None, CAPACITY, CAPACITY // 2, CAPACITY - 1, CAPACITY + 1, 2 * CAPACITY]),
)
@settings(max_examples=60, deadline=None)
def test_only_contiguous_rows(stride, step, offset, modulus):
    model = update_model(index_copy(lambda graph: affine(graph, stride, step, offset, modulus)))
    straight = (stride, step) == (1, 1)
    if straight and offset % CAPACITY == 0 and modulus == CAPACITY:
        assert prove_updates(model)[0].circular
    elif straight and offset == 0 and modulus is None:
        assert not prove_updates(model)[0].circular
    else:
        with pytest.raises(UnsupportedModelError, match="cannot be done in place"):
            prove_updates(model)


def test_circular():
    model = update_model(index_copy(lambda graph: affine(graph, 1, 1, 0, CAPACITY)))
    for start in (0, 5, CAPACITY - 1, CAPACITY, 3 * CAPACITY + 2):
        assert assert_same_update(model, start, 2, 3).circular


@pytest.mark.parametrize("limit", ["last row", "last place"])
def test_clamped_positions_are_linear(limit):
    def rows(graph: Graph) -> str:
        if limit == "last row":
            return graph.node("Min", [positions(graph), graph.constant(CAPACITY - 1)])
        most = graph.node("Sub", [graph.constant(CAPACITY), new_tokens(graph)])
        return positions(graph, graph.node("Min", ["pos", most]))

    assert not assert_same_update(update_model(index_copy(rows)), 5, 2, 3).circular


def test_the_clamped_position_of_one_token_is_linear():
    """As JAX' dynamic_update_slice has it; at position 2 L - 1 a ring writes the last row, too."""

    def rows(graph: Graph) -> str:
        return positions(graph, graph.node("Min", ["pos", graph.constant(CAPACITY - 1)]))

    assert not assert_same_update(update_model(index_copy(rows), length=1), 5, 2, 1).circular


def test_attention_sink():
    """The first two rows stay, the others go around: right within the capacity, no ring beyond it."""

    def rows(graph: Graph) -> str:
        wrapped = graph.node("Mod", [graph.node("Sub", [positions(graph), graph.constant(2)]), graph.constant(14)])
        wrapped = graph.node("Add", [wrapped, graph.constant(2)])
        within = graph.node("Less", [positions(graph), graph.constant(2)])
        return graph.node("Where", [within, positions(graph), wrapped])

    check_refused(index_copy(rows), "beyond its capacity of 16 it writes rows .*, which is no ring")


def test_reversed_rows():
    def rows(graph: Graph) -> str:
        ends = [graph.constant([v]) for v in (-1, -(1 << 40), 0, -1)]
        return graph.node("Slice", [positions(graph), *ends])

    check_refused(index_copy(rows), r"indices are \[\[7\], \[6\], \[5\]\] when 5 rows hold tokens and 3 are new")


def test_rows_in_another_order():
    def rows(graph: Graph) -> str:
        return graph.node("BitwiseXor", [positions(graph), graph.constant(1)])

    check_refused(index_copy(rows), "its indices are")


def test_last_rows():
    """The same rows at every step, counted from the end."""

    def rows(graph: Graph) -> str:
        return graph.node("Neg", [graph.node("Add", [positions(graph), graph.constant(1)])])

    check_refused(index_copy(rows), r"counts rows from the end \(row -8\)")


def test_rows_that_never_move():
    check_refused(index_copy(lambda graph: positions(graph, graph.constant(0))), "indices are .* when 5 rows", pos=None)


def test_one_position_for_many_tokens():
    def idiom(graph: Graph, past: str, new: str) -> str:
        last = graph.node("Gather", [new, graph.constant([-1])], axis=1)
        data, update = transpose(graph, past, 2, 0, 1, 3), transpose(graph, last, 1, 0, 2, 3)
        index = graph.node("Reshape", ["pos", graph.constant([1, 1])])
        return transpose(graph, graph.node("ScatterND", [data, index, update]), 1, 2, 0, 3)

    check_refused(idiom, "writes one row although a step may bring 3 tokens")


def test_positions_from_tokens():
    def rows(graph: Graph) -> str:
        largest = graph.node("ArgMax", [graph.node("ReduceMax", ["hidden", graph.constant([0, 1])], keepdims=0)])
        return positions(graph, graph.node("Squeeze", [largest]))

    check_refused(index_copy(rows), "positions depend on data: ArgMax '.*' computes them from the contents of 'hidden'")


def test_positions_from_a_mask():
    def rows(graph: Graph) -> str:
        mask = graph.input("attention_mask", TensorProto.INT64, ["B", CAPACITY])
        sums = graph.node("CumSum", [mask, graph.constant(1)])
        last = graph.node("ReduceMax", [sums, graph.constant([0, 1])], keepdims=0)
        return positions(graph, graph.node("Sub", [last, new_tokens(graph)]))

    check_refused(index_copy(rows), "CumSum '.*' computes them from the contents of 'attention_mask'", pos=None)


def test_positions_from_a_table():
    """A paged cache: a second input says where a position lies."""

    def rows(graph: Graph) -> str:
        table = graph.input("slots", TensorProto.INT64, [CAPACITY])
        return graph.node("Gather", [table, positions(graph)])

    check_refused(index_copy(rows), "two inputs take part in them, '(slots, pos|pos, slots)'")


def test_two_positions():
    def rows(graph: Graph) -> str:
        offset = graph.input("offset", TensorProto.INT64, [])
        return graph.node("Add", [positions(graph), offset])

    check_refused(index_copy(rows), "two inputs take part in them")


def test_sequences_that_swap_positions():
    """Right while all sequences are equally long, wrong when they are not."""

    def idiom(graph: Graph, past: str, new: str) -> str:
        backwards = graph.node("Slice", ["pos", *(graph.constant([v]) for v in (-1, -(1 << 40), 0, -1))], "backwards")
        update = transpose(graph, new, 0, 2, 1, 3)
        steps = graph.node("Range", [graph.constant(0), new_tokens(graph), graph.constant(1)])
        rows = graph.node("Add", [along(graph, backwards, 0, 4), along(graph, steps, 2, 4)])
        index = graph.node("Expand", [rows, graph.node("Shape", [update])])
        return graph.node("ScatterElements", [past, index, update], axis=2)

    check_refused(idiom, "at the position of another", pos=("B",))

"""Caches whose rows are selected element by element."""

from __future__ import annotations

import numpy as np
import pytest
from cache_updates import BNSD, CAPACITY, HEADS, SIZE, assert_same_update, candidates, prove_updates, update_model
from cache_updates import transpose as permute
from graphs import Graph
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto

from trt_kvcache.errors import UnsupportedModelError

BSND = ("B", CAPACITY, HEADS, SIZE)
ROWS = np.arange(CAPACITY)


def at(graph: Graph, axis: int = 2, rank: int = 4, pos: str = "pos", per_row: bool = True) -> str:
    """Which row is written: bool ``[B, 1, L, 1]``, or ``[1, 1, L, 1]`` for a scalar position."""
    shape = [1] * rank
    shape[axis] = CAPACITY
    if per_row:
        pos = graph.node("Reshape", [pos, graph.constant([-1] + [1] * (rank - 1))])
    return graph.node("Equal", [graph.constant(ROWS.reshape(shape)), pos])


def where(graph: Graph, past: str, new: str) -> str:
    return graph.node("Where", [at(graph), permute(graph, new, 0, 2, 1, 3), past])


def where_not(graph: Graph, past: str, new: str) -> str:
    return graph.node("Where", [graph.node("Not", [at(graph)]), past, permute(graph, new, 0, 2, 1, 3)])


def where_scalar(graph: Graph, past: str, new: str) -> str:
    return graph.node("Where", [at(graph, per_row=False), permute(graph, new, 0, 2, 1, 3), past])


def where_expanded(graph: Graph, past: str, new: str) -> str:
    mask = graph.node("Expand", [at(graph), graph.node("Shape", [past])])
    return graph.node("Where", [mask, permute(graph, new, 0, 2, 1, 3), past])


def where_bsnd(graph: Graph, past: str, new: str) -> str:
    return graph.node("Where", [at(graph, 1), new, past])


def where_between_transposes(graph: Graph, past: str, new: str) -> str:
    written = graph.node("Where", [at(graph, 1), new, permute(graph, past, 0, 2, 1, 3)])
    return permute(graph, written, 0, 2, 1, 3)


def where_range(graph: Graph, past: str, new: str) -> str:
    """Rows from pos on, before pos + 1."""
    rows = graph.constant(ROWS.reshape(1, 1, -1, 1))
    start = graph.node("Reshape", ["pos", graph.constant([-1, 1, 1, 1])])
    end = graph.node("Add", [start, graph.constant(1)])
    mask = graph.node("And", [graph.node("GreaterOrEqual", [rows, start]), graph.node("Less", [rows, end])])
    return graph.node("Where", [mask, permute(graph, new, 0, 2, 1, 3), past])


def one_hot(graph: Graph, past: str, new: str) -> str:
    hot = graph.node("Cast", [at(graph)], to=TensorProto.FLOAT)
    cold = graph.node("Sub", [graph.constant(1, np.float32), hot])
    kept = graph.node("Mul", [past, cold])
    return graph.node("Add", [kept, graph.node("Mul", [permute(graph, new, 0, 2, 1, 3), hot])])


def one_hot_difference(graph: Graph, past: str, new: str) -> str:
    """past + h * (new - past)."""
    hot = graph.node("Cast", [at(graph)], to=TensorProto.FLOAT)
    change = graph.node("Sub", [permute(graph, new, 0, 2, 1, 3), past])
    return graph.node("Add", [past, graph.node("Mul", [hot, change])])


def one_hot_operator(graph: Graph, past: str, new: str) -> str:
    values = graph.constant([0, 1], np.float32)
    hot = graph.node("OneHot", ["pos", graph.constant(CAPACITY), values])
    hot = graph.node("Unsqueeze", [hot, graph.constant([1, 3])])
    cold = graph.node("Sub", [graph.constant(1, np.float32), hot])
    fresh = graph.node("Mul", [hot, permute(graph, new, 0, 2, 1, 3)])
    return graph.node("Add", [fresh, graph.node("Mul", [cold, past])])


def merged_heads(graph: Graph, past: str, new: str) -> str:
    return graph.node("Where", [at(graph, 1, 3), graph.node("Reshape", [new, graph.constant([0, 0, -1])]), past])


@pytest.mark.few(28)
@pytest.mark.parametrize(
    ("idiom", "shape", "pos", "name", "axis", "perm"),
    [
        (where, BNSD, ("B",), "Where", 2, (0, 2, 1, 3)),
        (where_not, BNSD, ("B",), "Where", 2, (0, 2, 1, 3)),
        (where_scalar, BNSD, (), "Where", 2, (0, 2, 1, 3)),
        (where_expanded, BNSD, ("B",), "Where", 2, (0, 2, 1, 3)),
        (where_bsnd, BSND, ("B",), "Where", 1, None),
        (where_between_transposes, BNSD, ("B",), "Where", 2, (0, 2, 1, 3)),
        (where_range, BNSD, ("B",), "Where", 2, (0, 2, 1, 3)),
        (one_hot, BNSD, ("B",), "one-hot", 2, (0, 2, 1, 3)),
        (one_hot_difference, BNSD, ("B",), "one-hot", 2, (0, 2, 1, 3)),
        (one_hot_operator, BNSD, ("B",), "one-hot", 2, (0, 2, 1, 3)),
        (merged_heads, ("B", CAPACITY, HEADS * SIZE), ("B",), "Where", 1, None),
    ],
)
@pytest.mark.parametrize(("start", "batch"), [(0, 1), (5, 3), (CAPACITY - 1, 2)])
def test_forms(idiom, shape, pos, name, axis, perm, start, batch):
    if idiom is one_hot_difference:
        start = 0  # past + (new - past) rounds where the numbers are not
    write = prove_updates(update_model(idiom, shape, pos, length=1))[0]
    if idiom is not one_hot_difference:
        write = assert_same_update(update_model(idiom, shape, pos, length=1), start, batch, 1)
    assert (write.idiom, write.growing, write.circular) == (name, False, False)
    assert (write.axis, write.perm, write.positions) == (axis, perm, ("pos",))


def test_circular():
    def idiom(graph: Graph, past: str, new: str) -> str:
        row = graph.node("Mod", ["pos", graph.constant(CAPACITY)])
        return graph.node("Where", [at(graph, pos=row), permute(graph, new, 0, 2, 1, 3), past])

    model = update_model(idiom, pos=("B",), length=1)
    for start in (0, CAPACITY - 1, CAPACITY, 2 * CAPACITY + 3):
        assert assert_same_update(model, start, 2, 1).circular


@given(
    kept=st.sampled_from([1.0, 1.0, 0.5, 0.0]),
    gain=st.sampled_from([1.0, 1.0, 2.0, -1.0]),
    erased=st.sampled_from([1.0, 1.0, 0.0, 0.5]),
)
@settings(max_examples=30, deadline=None)
def test_only_exact_blends(kept, gain, erased):
    """past * (kept - erased * h) + new * (gain * h) is an update for 1, 1, 1 alone."""

    def idiom(graph: Graph, past: str, new: str) -> str:
        hot = graph.node("Cast", [at(graph)], to=TensorProto.FLOAT)
        gone = graph.node("Mul", [hot, graph.constant(erased, np.float32)])
        cold = graph.node("Sub", [graph.constant(kept, np.float32), gone])
        scaled = graph.node("Mul", [hot, graph.constant(gain, np.float32)])
        fresh = graph.node("Mul", [permute(graph, new, 0, 2, 1, 3), scaled])
        return graph.node("Add", [graph.node("Mul", [past, cold]), fresh])

    model = update_model(idiom, pos=("B",), length=1)
    if (kept, gain, erased) == (1.0, 1.0, 1.0):
        assert prove_updates(model)[0].idiom == "one-hot"
    else:
        with pytest.raises(UnsupportedModelError, match="cannot be done in place"):
            prove_updates(model)


def check_refused(idiom, match, shape=BNSD, pos=("B",), length=1):
    with pytest.raises(UnsupportedModelError, match=match):
        prove_updates(update_model(idiom, shape, pos, length))


def test_many_tokens():
    """The row of the last token is written; those of the others are lost."""

    def idiom(graph: Graph, past: str, new: str) -> str:
        last = graph.node("Gather", [new, graph.constant([-1])], axis=1)
        return graph.node("Where", [at(graph), permute(graph, last, 0, 2, 1, 3), past])

    check_refused(idiom, "writes one row although a step may bring 3 tokens", length="S")


def test_row_after_the_next():
    def idiom(graph: Graph, past: str, new: str) -> str:
        row = graph.node("Add", ["pos", graph.constant(1)])
        return graph.node("Where", [at(graph, pos=row), permute(graph, new, 0, 2, 1, 3), past])

    check_refused(idiom, "writes rows 6 when 5 rows hold tokens and 1 are new")


def test_all_rows_from_a_position_on():
    def idiom(graph: Graph, past: str, new: str) -> str:
        start = graph.node("Reshape", ["pos", graph.constant([-1, 1, 1, 1])])
        mask = graph.node("GreaterOrEqual", [graph.constant(ROWS.reshape(1, 1, -1, 1)), start])
        return graph.node("Where", [mask, permute(graph, new, 0, 2, 1, 3), past])

    check_refused(idiom, "writes rows 5, 6, 7")


def test_the_other_way_round():
    """All rows but one are new."""

    def idiom(graph: Graph, past: str, new: str) -> str:
        return graph.node("Where", [at(graph), past, permute(graph, new, 0, 2, 1, 3)])

    check_refused(idiom, "writes rows 0, 1, 2")


def test_sequences_that_swap_positions():
    def idiom(graph: Graph, past: str, new: str) -> str:
        backwards = graph.node("Slice", ["pos", *(graph.constant([v]) for v in (-1, -(1 << 40), 0, -1))])
        return graph.node("Where", [at(graph, pos=backwards), permute(graph, new, 0, 2, 1, 3), past])

    check_refused(idiom, "at the position of another")


def test_rows_chosen_by_a_mask():
    def idiom(graph: Graph, past: str, new: str) -> str:
        mask = graph.input("write_mask", TensorProto.BOOL, ["B", 1, CAPACITY, 1])
        return graph.node("Where", [mask, permute(graph, new, 0, 2, 1, 3), past])

    check_refused(idiom, "positions depend on data: they are computed from the contents of 'write_mask'", pos=None)


def test_rows_chosen_by_two_positions():
    def idiom(graph: Graph, past: str, new: str) -> str:
        other = graph.input("other", TensorProto.INT64, ["B"])
        mask = graph.node("Or", [at(graph), at(graph, pos=other)])
        return graph.node("Where", [mask, permute(graph, new, 0, 2, 1, 3), past])

    check_refused(idiom, "two inputs take part in them")


def test_heads_are_no_rows():
    def idiom(graph: Graph, past: str, new: str) -> str:
        row = graph.node("Reshape", ["pos", graph.constant([-1, 1, 1, 1])])
        mask = graph.node("Equal", [graph.constant(np.arange(HEADS).reshape(1, -1, 1, 1)), row])
        return graph.node("Where", [mask, permute(graph, new, 0, 2, 1, 3), past])

    check_refused(idiom, "where one new row has")


def test_past_that_is_read_as_well():
    def idiom(graph: Graph, past: str, new: str) -> str:
        graph.node("ReduceMax", [past], "largest", keepdims=0)
        graph.output("largest", TensorProto.FLOAT, [])
        return one_hot(graph, past, new)

    check_refused(idiom, "ReduceMax 'node_largest' reads its past as well")


def test_tokens_and_positions_are_told_apart_with_the_smallest_weights():
    """Both are integer inputs; what an embedding and a projection make of tokens is no mask."""
    graph = Graph()
    tokens = graph.input("input_ids", TensorProto.INT64, ["B", 1])
    graph.input("pos", TensorProto.INT64, ["B"])
    past = graph.input("past", TensorProto.FLOAT, BNSD)
    table = graph.constant(np.arange(5 * HEADS * SIZE).reshape(5, -1), np.float32)
    projected = graph.node("MatMul", [graph.node("Gather", [table, tokens]), graph.constant(np.eye(8), np.float32)])
    new = graph.node("Reshape", [projected, graph.constant([0, 0, HEADS, SIZE])], "new")
    graph.node("Identity", [one_hot(graph, past, new)], "present")
    graph.output("present", TensorProto.FLOAT, BNSD)
    (write,) = prove_updates(graph.model(24))
    assert (write.idiom, write.update.name, write.positions) == ("one-hot", "new", ("pos",))


@pytest.mark.parametrize("masked", [False, True])
def test_a_residual_is_no_cache(masked):
    """hidden + f(hidden), also where f's tokens are masked: 3-D input and output of one shape, but nothing selected."""
    graph = Graph()
    hidden = graph.input("hidden", TensorProto.FLOAT, ["B", "S", 8])
    mask = graph.input("attention_mask", TensorProto.INT64, ["B", "S"])
    weight = graph.constant(np.eye(8), np.float32)
    added = graph.node("MatMul", [hidden, weight])
    if masked:
        seen = graph.node("Unsqueeze", [graph.node("Cast", [mask], to=TensorProto.FLOAT), graph.constant([2])])
        added = graph.node("Mul", [added, seen])
    graph.node("Add", [hidden, added], "out")
    graph.output("out", TensorProto.FLOAT, ["B", "S", 8])
    assert candidates(graph.model(24)) == ()


def test_a_decaying_state_is_no_cache():
    """state * decay + new, as linear attention keeps it."""
    graph = Graph()
    hidden = graph.input("hidden", TensorProto.FLOAT, ["B", 2, 8])
    state = graph.input("state", TensorProto.FLOAT, ["B", 2, 8])
    decay = graph.node("Sigmoid", [graph.node("MatMul", [hidden, graph.constant(np.eye(8), np.float32)])])
    graph.node("Add", [graph.node("Mul", [state, decay]), hidden], "new_state")
    graph.output("new_state", TensorProto.FLOAT, ["B", 2, 8])
    assert candidates(graph.model(24)) == ()

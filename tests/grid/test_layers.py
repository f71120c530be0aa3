"""Several layers in one graph, caches in unusual places: each keeps its numbers and builds, or is refused by name."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from cases import BF16, BOOL, FLOAT, HALF
from harness import imported
from layers import CAPACITY, Layers, check, feeds_of
from onnx import helper

from trt_kvcache.errors import ModelError, UnsupportedModelError
from trt_kvcache.importer.plan import AttentionKind, Fallback, PhysicalLayout, PlanOptions, Route


@pytest.mark.slow
def test_layers_share_one_mask_and_one_span(tmp_path: Path) -> None:
    graph = Layers()
    for i in range(3):
        graph.attend(graph.query(f"query_{i}"), graph.cache(f"k{i}"), graph.cache(f"v{i}"), f"y{i}", is_causal=1)
    plan = check(graph.model(), tmp_path).plan
    assert (len(plan.masks), len(plan.spans)) == (1, 1)
    assert {a.mask for a in plan.attention} == {plan.masks[0].name}


@pytest.mark.slow
def test_layers_of_different_capacities(tmp_path: Path) -> None:
    """A mask and a span per capacity."""
    graph = Layers()
    for i, capacity in enumerate((CAPACITY, 24)):
        key, value = (graph.cache(f"{kind}{i}", capacity=capacity) for kind in "kv")
        graph.attend(graph.query(f"query_{i}"), key, value, f"y{i}", is_causal=1)
    plan = check(graph.model(), tmp_path).plan
    assert sorted(s.capacity for s in plan.spans) == [CAPACITY, 24]
    assert len(plan.masks) == 2


@pytest.mark.slow
def test_layers_of_different_geometry(tmp_path: Path) -> None:
    """One causal, one not, one with a window."""
    graph = Layers()
    for i, attrs in enumerate(({"is_causal": 1}, {}, {"is_causal": 1, "left_window_size": 3})):
        graph.attend(graph.query(f"query_{i}"), graph.cache(f"k{i}"), graph.cache(f"v{i}"), f"y{i}", **attrs)
    plan = check(graph.model(opset=25), tmp_path).plan
    assert (len(plan.masks), len(plan.spans)) == (3, 1)


@pytest.mark.parametrize("sequence_major", [False, True])
def test_key_and_value_of_different_head_sizes(sequence_major: bool, tmp_path: Path) -> None:
    graph = Layers()
    key = graph.cache("k", size=16, sequence_major=sequence_major)
    value = graph.cache("v", size=32, sequence_major=sequence_major)
    query = graph.query()
    if sequence_major:
        swapped = graph.Transpose(query, perm=[0, 2, 1, 3])
        query = graph.Reshape(swapped, [0, 0, 64])
        graph.Attention(query, key, value, "", "", "", "valid", out="y", is_causal=1, q_num_heads=4, kv_num_heads=2)
        graph.output("y", HALF, ["B", "S", 128])
    else:
        graph.attend(query, key, value, "y", is_causal=1)
    plan = check(graph.model(), tmp_path).plan
    assert plan.attention[0].kind is AttentionKind.LOWERED
    assert {c.physical_shape[3] for c in plan.caches} == {16, 32}


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("shared", "readers"), [("caches", 2), ("caches", 16), ("query", 2), ("query", 5), ("both", 5)]
)
@pytest.mark.parametrize("span", [True, False])
@pytest.mark.parametrize("dtype", [HALF, FLOAT, BF16])
def test_one_cache_read_by_several_attentions(
    dtype: int, span: bool, readers: int, shared: str, tmp_path: Path
) -> None:
    """Layers that share their caches, their query, or both: forms on which TensorRT's own build crashes."""
    graph = Layers(dtype)
    caches = [(graph.cache(f"k{i}"), graph.cache(f"v{i}")) for i in range(readers if shared == "query" else 1)]
    queries = [graph.query(f"query_{i}") for i in range(readers if shared == "caches" else 1)]
    for i in range(readers):
        graph.attend(queries[i % len(queries)], *caches[i % len(caches)], f"y{i}", is_causal=1)
    plan = check(graph.model(), tmp_path, options=PlanOptions(attention_span=span)).plan
    assert {len(c.readers) for c in plan.caches} == {1 if shared == "query" else readers}
    assert {c.route for c in plan.caches} == {Route.NATIVE}


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("span", [True, False])
def test_parts_of_one_projection_are_many_queries(span: bool, shared: bool, tmp_path: Path) -> None:
    """One attention per group of heads, over slices of one wide query: not the same query several times."""
    graph = Layers()
    wide = graph.query(heads=32)
    one = (graph.cache("k"), graph.cache("v")) if shared else None
    for i in range(8):
        bounds = [graph.constant([4 * i]), graph.constant([4 * i + 4]), graph.constant([1])]
        part = graph.Slice(wide, *bounds)
        graph.attend(part, *(one or (graph.cache(f"k{i}"), graph.cache(f"v{i}"))), f"y{i}", is_causal=1)
    check(graph.model(), tmp_path, options=PlanOptions(attention_span=span))


def test_more_readers_of_one_query_are_refused(tmp_path: Path) -> None:
    graph = Layers()
    query = graph.query()
    for i in range(6):
        graph.attend(query, graph.cache(f"k{i}"), graph.cache(f"v{i}"), f"y{i}", is_causal=1)
    with pytest.raises(UnsupportedModelError, match=r"'node_y5' is one more than 5 over the query 'query'"):
        imported(graph.model(), tmp_path)


@pytest.mark.few(2)
@pytest.mark.parametrize("one_query", [True, False])
@pytest.mark.parametrize("span", [True, False])
@pytest.mark.parametrize("dtype", [HALF, FLOAT, BF16])
def test_one_cache_read_in_two_ways(dtype: int, span: bool, one_query: bool, tmp_path: Path) -> None:
    """Readers of which some are lowered to plain operators."""
    graph = Layers(dtype)
    key, value = graph.cache("k"), graph.cache("v")
    queries = [graph.query(f"query_{i}") for i in range(1 if one_query else 3)]
    for i, attrs in enumerate(({}, {"softcap": 5.0}, {})):
        graph.attend(queries[i % len(queries)], key, value, f"y{i}", is_causal=1, **attrs)
    plan = check(graph.model(), tmp_path, options=PlanOptions(attention_span=span)).plan
    assert plan.attention[1].kind is AttentionKind.LOWERED


def test_one_cache_sequence_major_with_attentions_of_different_head_counts(tmp_path: Path) -> None:
    """No heads-major layout serves both: the cache keeps its bytes."""
    graph = Layers()
    key, value = (graph.cache(name, sequence_major=True) for name in "kv")
    query = graph.input("query", HALF, ["B", "S", 64])
    for i, heads in enumerate((2, 1)):
        attrs = {"q_num_heads": 2, "kv_num_heads": heads, "is_causal": 1}
        q = query if heads == 1 else graph.Slice(query, *(graph.constant([x]) for x in (0, 32, 2)))
        graph.Attention(q, key, value, "", "", "", "valid", out=f"y{i}", **attrs)
        graph.output(f"y{i}", HALF, ["B", "S", 64 if heads == 1 else 32])
    plan = check(graph.model(), tmp_path).plan
    assert {c.layout for c in plan.caches} == {PhysicalLayout.VIEW}


def test_sequence_major_cache_with_another_reader(tmp_path: Path) -> None:
    graph = Layers()
    key, value = (graph.cache(name, sequence_major=True) for name in "kv")
    query = graph.input("query", HALF, ["B", "S", 64])
    graph.Attention(query, key, value, "", "", "", "valid", out="y", q_num_heads=4, kv_num_heads=2)
    graph.output("y", HALF, ["B", "S", 64])
    graph.ReduceMax(key, [2], out="peak", keepdims=0)
    graph.output("peak", HALF, ["B", CAPACITY])
    plan = check(graph.model(), tmp_path).plan
    assert [c.layout for c in plan.caches] == [PhysicalLayout.VIEW, PhysicalLayout.HEADS_MAJOR]


def test_last_query_only(tmp_path: Path) -> None:
    """Two nodes with different numbers of queries do not share a causal mask."""
    graph = Layers()
    key, value, query = graph.cache("k"), graph.cache("v"), graph.query()
    graph.attend(query, key, value, "all_rows", is_causal=1)
    last = graph.Slice(query, [-1], [2**31], [2])
    graph.Attention(last, key, value, "", "", "", "valid", out="last_row", is_causal=1)
    graph.output("last_row", HALF, ["B", 4, 1, 16])
    assert len(check(graph.model(), tmp_path).plan.masks) == 2


# Caches in unusual places: each arrangement keeps ONNX's numbers and builds, or is refused by name.


def test_lengths_computed_in_the_graph(tmp_path: Path) -> None:
    """Valid lengths that no input bounds: all rows are read, and the plan says so."""
    graph = Layers()
    key, value, query = graph.cache("k"), graph.cache("v"), graph.query()
    computed = graph.Add("write_indices", graph.Shape(query, start=2, end=3))
    graph.attend(query, key, value, "y", computed, is_causal=1)
    feeds = feeds_of(graph.model())
    plan = check(graph.model(), tmp_path, feeds).plan
    assert plan.attention[0].keys == "all"
    assert any("reads the whole capacity" in warning for warning in plan.warnings)


@pytest.mark.parametrize("starts", [(2, 9), (13, 30), (45, 17)], ids=str)
def test_circular_single_tokens_under_attention(starts: tuple[int, int], tmp_path: Path) -> None:
    """A sliding window as a ring: positions in the ring have no order, so lengths alone say what is valid."""
    graph = Layers(length=1)
    key, value = (graph.cache(name, mode="circular") for name in "kv")
    graph.attend(graph.query(), key, value, "y")
    model = graph.model()
    feeds = feeds_of(model, np.array(starts), 1)
    feeds["valid"] = np.minimum(np.array(starts) + 1, CAPACITY)
    plan = check(model, tmp_path, feeds).plan
    assert {(c.route, c.contract) for c in plan.caches} == {(Route.NATIVE, None)}


@pytest.mark.parametrize("fallback", [Fallback.AUTO, Fallback.FUNCTIONAL])
def test_circular_chunks_under_attention(fallback: Fallback, tmp_path: Path) -> None:
    graph = Layers()
    key, value = (graph.cache(name, mode="circular") for name in "kv")
    graph.attend(graph.query(), key, value, "y")
    model = graph.model()
    starts = np.array([16, 29]) if fallback is Fallback.AUTO else np.array([15, 30])
    feeds = feeds_of(model, starts)
    feeds["valid"] = np.array([CAPACITY, CAPACITY])
    plan = check(model, tmp_path, feeds, PlanOptions(fallback=fallback)).plan
    contract = fallback is Fallback.AUTO
    assert {c.route for c in plan.caches} == {Route.NATIVE if contract else Route.FUNCTIONAL}
    assert all((c.contract is not None) == contract for c in plan.caches)


def test_cache_inside_the_graph_under_attention(tmp_path: Path) -> None:
    """Neither an input nor an output: plain operators, and attention still reads it."""
    graph = Layers()
    read = []
    for name in "kv":
        update = graph.input(f"new_{name}", HALF, ["B", 2, "S", 16])
        batch = graph.Shape(update, start=0, end=1)
        shape = graph.Concat(batch, [2, CAPACITY, 16], axis=0)
        empty = graph.ConstantOfShape(shape, value=helper.make_tensor("zero", HALF, [1], [0.0]))
        read.append(graph.TensorScatter(empty, update, "write_indices", out=f"inner_{name}"))
    graph.attend(graph.query(), *read, "y", is_causal=1)
    plan = check(graph.model(), tmp_path).plan
    assert {(c.route, c.carried) for c in plan.caches} == {(Route.FUNCTIONAL, False)}


def _function(graph: Layers) -> onnx.ModelProto:
    graph.input("past_k", HALF, ["B", 2, CAPACITY, 16])
    graph.input("new_k", HALF, ["B", 2, "S", 16])
    graph.Update("past_k", "new_k", "write_indices", out="present_k", domain="own")
    graph.output("present_k", HALF, ["B", 2, CAPACITY, 16])
    body = [helper.make_node("TensorScatter", ["p", "u", "w"], ["o"])]
    function = helper.make_function("own", "Update", ["p", "u", "w"], ["o"], body, [helper.make_opsetid("", 24)])
    return graph.model(domains=["own"], functions=[function])


def _branch(graph: Layers) -> onnx.ModelProto:
    graph.input("past_k", HALF, ["B", 2, CAPACITY, 16])
    graph.input("new_k", HALF, ["B", 2, "S", 16])

    def body(name: str, op: str, inputs: list[str]) -> onnx.GraphProto:
        out = helper.make_tensor_value_info(name, HALF, ["B", 2, CAPACITY, 16])
        return helper.make_graph([helper.make_node(op, inputs, [name], name=name)], name, [], [out])

    branches = {
        "then_branch": body("written", "TensorScatter", ["past_k", "new_k", "write_indices"]),
        "else_branch": body("kept", "Identity", ["past_k"]),
    }
    graph.If(graph.input("write", BOOL, []), out="present_k", **branches)
    graph.output("present_k", HALF, ["B", 2, CAPACITY, 16])
    return graph.model()


def test_update_in_a_function(tmp_path: Path) -> None:
    plan = check(_function(Layers()), tmp_path).plan
    assert plan.caches[0].route is Route.NATIVE
    assert plan.inlined


def test_update_in_a_branch_is_named(tmp_path: Path) -> None:
    """A branch that an input decides cannot be inlined."""
    with pytest.raises(ModelError, match="If"):
        imported(_branch(Layers()), tmp_path)

"""Several layers in one graph: masks and spans are shared where they may be, and caches by several readers."""

from __future__ import annotations

from pathlib import Path

import pytest
from cases import BF16, FLOAT, HALF
from harness import imported
from layers import CAPACITY, Layers, check

from trt_kvcache.errors import UnsupportedModelError
from trt_kvcache.importer.plan import AttentionKind, PhysicalLayout, PlanOptions, Route


def test_layers_share_one_mask_and_one_span(tmp_path: Path) -> None:
    graph = Layers()
    for i in range(3):
        graph.attend(graph.query(f"query_{i}"), graph.cache(f"k{i}"), graph.cache(f"v{i}"), f"y{i}", is_causal=1)
    plan = check(graph.model(), tmp_path).plan
    assert (len(plan.masks), len(plan.spans)) == (1, 1)
    assert {a.mask for a in plan.attention} == {plan.masks[0].name}


def test_layers_of_different_capacities(tmp_path: Path) -> None:
    """A mask and a span per capacity."""
    graph = Layers()
    for i, capacity in enumerate((CAPACITY, 24)):
        key, value = (graph.cache(f"{kind}{i}", capacity=capacity) for kind in "kv")
        graph.attend(graph.query(f"query_{i}"), key, value, f"y{i}", is_causal=1)
    plan = check(graph.model(), tmp_path).plan
    assert sorted(s.capacity for s in plan.spans) == [CAPACITY, 24]
    assert len(plan.masks) == 2


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
        swapped = graph.node("Transpose", [query], perm=[0, 2, 1, 3])
        query = graph.node("Reshape", [swapped, graph.constant([0, 0, 64])])
        graph.node(
            "Attention", [query, key, value, "", "", "", "valid"], "y", is_causal=1, q_num_heads=4, kv_num_heads=2
        )
        graph.output("y", HALF, ["B", "S", 128])
    else:
        graph.attend(query, key, value, "y", is_causal=1)
    plan = check(graph.model(), tmp_path).plan
    assert plan.attention[0].kind is AttentionKind.LOWERED
    assert {c.physical_shape[3] for c in plan.caches} == {16, 32}


@pytest.mark.few(5)
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
        part = graph.node("Slice", [wide, *bounds])
        graph.attend(part, *(one or (graph.cache(f"k{i}"), graph.cache(f"v{i}"))), f"y{i}", is_causal=1)
    check(graph.model(), tmp_path, options=PlanOptions(attention_span=span))


def test_more_readers_of_one_query_are_refused(tmp_path: Path) -> None:
    graph = Layers()
    query = graph.query()
    for i in range(6):
        graph.attend(query, graph.cache(f"k{i}"), graph.cache(f"v{i}"), f"y{i}", is_causal=1)
    with pytest.raises(UnsupportedModelError, match=r"'node_y5' is one more than 5 over the query 'query'"):
        imported(graph.model(), tmp_path)


@pytest.mark.few(3)
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
        q = query if heads == 1 else graph.node("Slice", [query, *(graph.constant([x]) for x in (0, 32, 2))])
        graph.node("Attention", [q, key, value, "", "", "", "valid"], f"y{i}", **attrs)
        graph.output(f"y{i}", HALF, ["B", "S", 64 if heads == 1 else 32])
    plan = check(graph.model(), tmp_path).plan
    assert {c.layout for c in plan.caches} == {PhysicalLayout.VIEW}


def test_sequence_major_cache_with_another_reader(tmp_path: Path) -> None:
    graph = Layers()
    key, value = (graph.cache(name, sequence_major=True) for name in "kv")
    query = graph.input("query", HALF, ["B", "S", 64])
    graph.node("Attention", [query, key, value, "", "", "", "valid"], "y", q_num_heads=4, kv_num_heads=2)
    graph.output("y", HALF, ["B", "S", 64])
    graph.node("ReduceMax", [key, graph.constant([2])], "peak", keepdims=0)
    graph.output("peak", HALF, ["B", CAPACITY])
    plan = check(graph.model(), tmp_path).plan
    assert [c.layout for c in plan.caches] == [PhysicalLayout.VIEW, PhysicalLayout.HEADS_MAJOR]


def test_last_query_only(tmp_path: Path) -> None:
    """Two nodes with different numbers of queries do not share a causal mask."""
    graph = Layers()
    key, value, query = graph.cache("k"), graph.cache("v"), graph.query()
    graph.attend(query, key, value, "all_rows", is_causal=1)
    last = graph.node("Slice", [query, graph.constant([-1]), graph.constant([2**31]), graph.constant([2])])
    graph.node("Attention", [last, key, value, "", "", "", "valid"], "last_row", is_causal=1)
    graph.output("last_row", HALF, ["B", 4, 1, 16])
    assert len(check(graph.model(), tmp_path).plan.masks) == 2

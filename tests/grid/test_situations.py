"""Caches in unusual places: each arrangement keeps ONNX's numbers and builds, or is refused by name."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from cases import BOOL, FLOAT, HALF, INT64
from graphs import Dim, Graph
from harness import Feeds, imported, random_feeds
from layers import BATCH, CAPACITY, STARTS, STEP, Layers, check, feeds_of
from onnx import TensorProto, helper

from trt_kvcache.errors import ModelError
from trt_kvcache.importer.plan import AttentionKind, Fallback, PlanOptions, Role, Route


@pytest.mark.parametrize("layout", ["bnsh", "bsnh", "bsd"])
def test_attention_spelled_out(layout: str, tmp_path: Path) -> None:
    """Attention in plain operators reads the caches in the model's own layout."""
    graph = Graph()
    indices = graph.input("write_indices", INT64, ["B"])
    read = []
    for name in ("k", "v"):
        shape: list[Dim] = {"bnsh": ["B", 2, "", 16], "bsnh": ["B", "", 2, 16], "bsd": ["B", "", 32]}[layout]
        axis = shape.index("")
        past = graph.input(f"past_{name}", HALF, [CAPACITY if dim == "" else dim for dim in shape])
        new = graph.input(f"new_{name}", HALF, ["S" if dim == "" else dim for dim in shape])
        present = graph.node("TensorScatter", [past, new, indices], f"present_{name}", axis=axis)
        graph.output(present, HALF, [CAPACITY if dim == "" else dim for dim in shape])
        if layout == "bsd":
            present = graph.node("Reshape", [present, graph.constant([0, 0, 2, 16])])
        read.append(present if layout == "bnsh" else graph.node("Transpose", [present], perm=[0, 2, 1, 3]))
    turned = graph.node("Transpose", [read[0]], perm=[0, 1, 3, 2])
    scores = graph.node("MatMul", [graph.input("query", HALF, ["B", 2, "S", 16]), turned])
    weights = graph.node("Softmax", [graph.node("Mul", [scores, graph.constant(0.1, np.float16)])])
    graph.node("MatMul", [weights, read[1]], "y")
    graph.output("y", HALF, ["B", 2, "S", 16])
    model = graph.model()
    feeds = random_feeds(model, {"B": BATCH, "S": STEP}, np.random.default_rng(3))
    feeds["write_indices"] = STARTS
    plan = check(model, tmp_path, feeds).plan
    assert {c.route for c in plan.caches} == {Route.NATIVE}
    assert {c.physical_shape for c in plan.caches} == {("B", 2, CAPACITY, 16)}


def test_lengths_computed_in_the_graph(tmp_path: Path) -> None:
    """Valid lengths that no input bounds: all rows are read, and the plan says so."""
    graph = Layers()
    key, value, query = graph.cache("k"), graph.cache("v"), graph.query()
    computed = graph.node("Add", ["write_indices", graph.node("Shape", [query], start=2, end=3)])
    graph.attend(query, key, value, "y", computed, is_causal=1)
    feeds = feeds_of(graph.model())
    plan = check(graph.model(), tmp_path, feeds).plan
    assert plan.attention[0].keys == "all"
    assert any("reads the whole capacity" in warning for warning in plan.warnings)


def test_model_that_slices_its_own_keys(tmp_path: Path) -> None:
    graph = Layers()
    bounds = [graph.constant([x]) for x in (0, 12, 2)]
    key, value = (graph.node("Slice", [graph.cache(name), *bounds]) for name in "kv")
    graph.attend(graph.query(), key, value, "y", is_causal=1)
    check(graph.model(), tmp_path)


def test_keys_repeated_for_every_query_head(tmp_path: Path) -> None:
    """Grouped heads spelled out, as some exporters do."""
    graph = Layers()
    repeated = []
    for name in "kv":
        lifted = graph.node("Unsqueeze", [graph.cache(name), graph.constant([2])])
        tiled = graph.node("Expand", [lifted, graph.constant([1, 1, 2, 1, 1])])
        repeated.append(graph.node("Reshape", [tiled, graph.constant([0, 4, CAPACITY, 16])]))
    graph.attend(graph.query(), *repeated, "y", is_causal=1)
    check(graph.model(), tmp_path)


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


def test_quantized_cache(tmp_path: Path) -> None:
    """An int8 cache is copied, and dequantized before attention."""
    graph = Layers(TensorProto.INT8)
    scale = graph.constant(0.02, np.float32)
    key, value = (graph.node("DequantizeLinear", [graph.cache(name), scale]) for name in "kv")
    query = graph.input("query", FLOAT, ["B", 4, "S", 16])
    graph.node("Attention", [query, key, value, "", "", "", "valid"], "y", is_causal=1)
    graph.output("y", FLOAT, ["B", 4, "S", 16])
    model = graph.model()
    feeds = feeds_of_int8(model)
    plan = check(model, tmp_path, feeds).plan
    assert {c.route for c in plan.caches} == {Route.FUNCTIONAL}
    assert any("not updated in place" in warning for warning in plan.warnings)


def feeds_of_int8(model: onnx.ModelProto) -> Feeds:
    feeds = random_feeds(model, {"B": BATCH, "S": STEP}, np.random.default_rng(7))
    feeds["write_indices"], feeds["valid"] = STARTS, STARTS + STEP
    return feeds


def test_cache_inside_the_graph_under_attention(tmp_path: Path) -> None:
    """Neither an input nor an output: plain operators, and attention still reads it."""
    graph = Layers()
    read = []
    for name in "kv":
        update = graph.input(f"new_{name}", HALF, ["B", 2, "S", 16])
        batch = graph.node("Shape", [update], start=0, end=1)
        shape = graph.node("Concat", [batch, graph.constant([2, CAPACITY, 16])], axis=0)
        empty = graph.node("ConstantOfShape", [shape], value=helper.make_tensor("zero", HALF, [1], [0.0]))
        read.append(graph.node("TensorScatter", [empty, update, "write_indices"], f"inner_{name}"))
    graph.attend(graph.query(), *read, "y", is_causal=1)
    plan = check(graph.model(), tmp_path).plan
    assert {(c.route, c.carried) for c in plan.caches} == {(Route.FUNCTIONAL, False)}


def test_chained_updates_under_attention(tmp_path: Path) -> None:
    """Two updates of one cache, one after the other: only the last leaves the graph."""
    graph = Layers()
    read = []
    for name in "kv":
        past = graph.input(f"past_{name}", HALF, ["B", 2, CAPACITY, 16])
        first = graph.input(f"new_{name}", HALF, ["B", 2, "S", 16])
        second = graph.input(f"extra_{name}", HALF, ["B", 2, 1, 16])
        middle = graph.node("TensorScatter", [past, first, "write_indices"], f"middle_{name}")
        read.append(graph.node("TensorScatter", [middle, second, "write_indices"], f"present_{name}"))
        graph.output(f"present_{name}", HALF, ["B", 2, CAPACITY, 16])
    graph.attend(graph.query(), *read, "y", is_causal=1)
    assert {c.route for c in check(graph.model(), tmp_path).plan.caches} == {Route.FUNCTIONAL}


def test_past_read_before_its_update(tmp_path: Path) -> None:
    """An attention over the cache as it was: not in place, for the write may come first."""
    graph = Layers()
    key, value, query = graph.cache("k"), graph.cache("v"), graph.query()
    graph.attend(query, key, value, "y", is_causal=1)
    graph.attend(query, "past_k", "past_v", "before", "write_indices")
    assert {c.route for c in check(graph.model(), tmp_path).plan.caches} == {Route.FUNCTIONAL}


def test_only_keys_are_cached(tmp_path: Path) -> None:
    graph = Layers()
    key = graph.cache("k")
    graph.attend(graph.query(), key, graph.input("value", HALF, ["B", 2, CAPACITY, 16]), "y", is_causal=1)
    check(graph.model(), tmp_path)


def test_cache_cast_before_attention(tmp_path: Path) -> None:
    """A half cache under float attention."""
    graph = Layers()
    key, value = (graph.node("Cast", [graph.cache(name)], to=FLOAT) for name in "kv")
    query = graph.input("query", FLOAT, ["B", 4, "S", 16])
    graph.node("Attention", [query, key, value, "", "", "", "valid"], "y", is_causal=1)
    graph.output("y", FLOAT, ["B", 4, "S", 16])
    assert check(graph.model(), tmp_path).plan.attention[0].kind is AttentionKind.DECOMPOSED


def _function(graph: Layers) -> onnx.ModelProto:
    graph.input("past_k", HALF, ["B", 2, CAPACITY, 16])
    graph.input("new_k", HALF, ["B", 2, "S", 16])
    graph.node("Update", ["past_k", "new_k", "write_indices"], "present_k", domain="own")
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
    graph.node("If", [graph.input("write", BOOL, [])], "present_k", **branches)
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


def test_every_input_of_a_decoder_has_a_role(tmp_path: Path) -> None:
    """What profiles and runtimes fill in: caches, indices, lengths and the span are found from the graph."""
    graph = Layers()
    graph.attend(graph.query(), graph.cache("k"), graph.cache("v"), "y", is_causal=1)
    plan = imported(graph.model(), tmp_path).plan
    found = {t.name: t.role for t in plan.tensors if t.io == "input"}
    assert found["write_indices"] is Role.WRITE_INDICES
    assert found["valid"] is Role.VALID_LENGTHS
    assert {name for name, role in found.items() if role is Role.CACHE} == {"past_k", "past_v"}
    assert [name for name, role in found.items() if role is Role.SPAN] == [s.name for s in plan.spans]

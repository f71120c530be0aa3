"""Caches in unusual places: each arrangement keeps ONNX's numbers and builds, or is refused by name."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from cases import BOOL, HALF
from harness import imported
from layers import CAPACITY, Layers, check, feeds_of
from onnx import helper

from trt_kvcache.errors import ModelError
from trt_kvcache.importer.plan import Fallback, PlanOptions, Route


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
        batch = graph.node("Shape", [update], start=0, end=1)
        shape = graph.node("Concat", [batch, graph.constant([2, CAPACITY, 16])], axis=0)
        empty = graph.node("ConstantOfShape", [shape], value=helper.make_tensor("zero", HALF, [1], [0.0]))
        read.append(graph.node("TensorScatter", [empty, update, "write_indices"], f"inner_{name}"))
    graph.attend(graph.query(), *read, "y", is_causal=1)
    plan = check(graph.model(), tmp_path).plan
    assert {(c.route, c.carried) for c in plan.caches} == {(Route.FUNCTIONAL, False)}


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

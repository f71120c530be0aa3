"""Several caches and readers in one graph: each arrangement keeps ONNX's numbers and builds, or is refused by name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
from cases import BF16, BOOL, FLOAT, HALF, INT64
from graphs import Dim, Graph
from harness import Feeds, build, imported, random_feeds, run_rewritten
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator

from trt_kvcache.errors import ModelError
from trt_kvcache.importer import ImportedModel
from trt_kvcache.importer.plan import AttentionKind, Fallback, PhysicalLayout, PlanOptions, Role, Route

BATCH, STEP, CAPACITY = 2, 3, 16
STARTS = np.array([2, 9])


class Layers(Graph):
    """A graph with the inputs that all layers of a decoder share."""

    def __init__(self, dtype: int = HALF, length: Dim = "S") -> None:
        super().__init__()
        self.dtype, self.length = dtype, length
        self.input("write_indices", INT64, ["B"])
        self.input("valid", INT64, ["B"])

    def cache(
        self,
        name: str,
        heads: int = 2,
        size: int = 16,
        capacity: int = CAPACITY,
        mode: str = "linear",
        sequence_major: bool = False,
    ) -> str:
        """Update one cache, 4-D heads-major or 3-D sequence-major; returns present."""

        def shape(tokens: Dim) -> list[Dim]:
            return ["B", tokens, heads * size] if sequence_major else ["B", heads, tokens, size]

        inputs = [self.input(f"past_{name}", self.dtype, shape(capacity))]
        inputs.append(self.input(f"new_{name}", self.dtype, shape(self.length)))
        axis = 1 if sequence_major else 2
        self.node("TensorScatter", [*inputs, "write_indices"], f"present_{name}", axis=axis, mode=mode)
        self.output(f"present_{name}", self.dtype, shape(capacity))
        return f"present_{name}"

    def query(self, name: str = "query", heads: int = 4, size: int = 16) -> str:
        """A query input."""
        return self.input(name, self.dtype, ["B", heads, self.length, size])

    def attend(self, query: str, key: str, value: str, out: str, lengths: str = "valid", **attrs: Any) -> None:
        """One Attention with a graph output `[B, N, S, H]`."""
        self.node("Attention", [query, key, value, "", "", "", lengths], out, **attrs)
        self.output(out, self.dtype, ["B", "N", self.length, "H"])


def feeds_of(model: onnx.ModelProto, starts: np.ndarray = STARTS, step: int = STEP) -> Feeds:
    """Random inputs; write indices and valid lengths of a step; large garbage beyond the valid rows."""
    rng = np.random.default_rng(7)
    feeds = random_feeds(model, {"B": BATCH, "S": step}, rng)
    feeds["write_indices"] = starts
    if "valid" in feeds:
        feeds["valid"] = starts + step
    for name, array in feeds.items():
        if name.startswith("past") and array.ndim == 4:
            for b, start in enumerate(starts):
                array[b, :, int(start) + step :] = 300
    return feeds


def check(
    model: onnx.ModelProto, folder: Path, feeds: Feeds | None = None, options: PlanOptions | None = None
) -> ImportedModel:
    """The numbers of the original by ONNX's reference, at full and at the smallest span; then a build."""
    result = imported(model, folder, options)
    feeds = feeds_of(model) if feeds is None else feeds
    with np.errstate(invalid="ignore"):
        values = ReferenceEvaluator(model).run(None, feeds)
    want = dict(zip((value.name for value in model.graph.output), values, strict=True))
    longest = int(feeds["valid"].max()) if "valid" in feeds else CAPACITY
    for span in {longest, CAPACITY}:
        spans = {s.name: min(span, s.capacity) for s in result.plan.spans}
        got = run_rewritten(result, feeds, spans)
        assert set(got) == set(want)
        for name, array in want.items():
            bits = 0 if name.startswith("present") else 6e-2 if array.dtype == ml_dtypes.bfloat16 else 1e-2
            np.testing.assert_allclose(
                got[name].astype(np.float64), array.astype(np.float64), rtol=bits, atol=bits, err_msg=name
            )
    outcome = build(result)
    assert outcome.stage == "built", str(outcome)
    return result


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


def test_layers_of_different_heads(tmp_path: Path) -> None:
    graph = Layers()
    for i, (heads, kv_heads, size) in enumerate(((4, 2, 16), (8, 1, 32), (6, 3, 24))):
        key, value = (graph.cache(f"{kind}{i}", kv_heads, size) for kind in "kv")
        graph.attend(graph.query(f"query_{i}", heads, size), key, value, f"y{i}", is_causal=1)
    assert {a.kind for a in check(graph.model(), tmp_path).plan.attention} == {AttentionKind.FUSED}


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


@pytest.mark.parametrize("shared", ["caches", "query", "both"])
@pytest.mark.parametrize("readers", [2, 5])
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


def test_one_cache_as_key_and_value(tmp_path: Path) -> None:
    graph = Layers()
    present = graph.cache("kv")
    graph.attend(graph.query(), present, present, "y", is_causal=1)
    assert check(graph.model(), tmp_path).plan.caches[0].readers == ("node_y",)


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


@pytest.mark.parametrize("make", [_branch], ids=["if"])
def test_update_in_a_branch_is_handled_or_named(make: Callable[[Layers], onnx.ModelProto], tmp_path: Path) -> None:
    """A branch that an input decides cannot be inlined."""
    with pytest.raises(ModelError, match="If"):
        imported(make(Layers()), tmp_path)


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

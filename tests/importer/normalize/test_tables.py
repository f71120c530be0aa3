"""Rows of a table by the length of the past, and what only looks like them."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from graphs import Graph
from onnx import TensorProto

from trt_kvcache.errors import OptionError, UnsupportedModelError
from trt_kvcache.importer.normalize import normalize
from trt_kvcache.importer.plan import PlanOptions

HEADS, SIZE, TOKENS, CAPACITY = 2, 8, 32, 12
WIDTH = HEADS * SIZE


def decoder(first: int = 0, last: int = 0, use: str = "Add") -> onnx.ModelProto:
    """One Attention with a past over ``embed(ids) + table[P + first : P + S + last]``."""
    rng = np.random.default_rng(0)
    graph = Graph()
    graph.input("input_ids", TensorProto.INT64, ["B", "S"])
    for name in ("key", "value"):
        graph.input(f"past.{name}", TensorProto.FLOAT, ["B", HEADS, "P", SIZE])
        graph.output(f"present.{name}", TensorProto.FLOAT, ["B", HEADS, "T", SIZE])
    embedded = graph.node("Gather", [graph.constant(rng.standard_normal((TOKENS, WIDTH)), np.float32), "input_ids"])
    past = graph.node("Shape", ["past.key"], start=2, end=3)
    new = graph.node("Shape", ["input_ids"], start=1, end=2)
    start = graph.node("Add", [past, graph.constant([first])])
    end = graph.node("Add", [graph.node("Add", [past, new]), graph.constant([last])])
    table = graph.constant(rng.standard_normal((40, WIDTH)), np.float32)
    rows = graph.node("Slice", [table, start, end, graph.constant([0])], "rows")
    if use == "Add":
        x = graph.node("Add", [embedded, rows], "x")
    else:
        product = graph.node("MatMul", [rows, graph.constant(np.ones((WIDTH, 1)), np.float32)])
        x = graph.node("Add", [embedded, product], "x")
    inputs = [x, x, x, "", "past.key", "past.value"]
    graph.node("Attention", inputs, ["y", "present.key", "present.value"], is_causal=1, q_num_heads=HEADS,
               kv_num_heads=HEADS)  # fmt: skip
    graph.node("MatMul", ["y", graph.constant(rng.standard_normal((WIDTH, TOKENS)), np.float32)], "logits")
    graph.output("logits", TensorProto.FLOAT, ["B", "S", TOKENS])
    return graph.model(24)


def run(model: onnx.ModelProto, feeds: dict[str, Any]) -> dict[str, Any]:
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return dict(zip([o.name for o in session.get_outputs()], session.run(None, feeds), strict=True))


@pytest.mark.parametrize(("offset", "use"), [(0, "Add"), (2, "Add"), (2, "MatMul")])
def test_rows_of_the_new_tokens(offset: int, use: str) -> None:
    model = decoder(offset, offset, use)
    result = normalize(model, {}, PlanOptions(capacity=CAPACITY)).model
    assert "Slice" not in {node.op_type for node in result.graph.node}
    past = {f"past.{n}": np.zeros((1, HEADS, 0, SIZE), np.float32) for n in ("key", "value")}
    cache = {f"past.{n}": np.full((1, HEADS, CAPACITY, SIZE), 50, np.float32) for n in ("key", "value")}
    tokens = 0
    for new in (3, 1, 2, 1):
        ids = np.arange(tokens, tokens + new)[None] % TOKENS
        before = run(model, {"input_ids": ids, **past})
        lengths = {"write_indices": np.array([tokens]), "nonpad_kv_seqlen": np.array([tokens + new])}
        after = run(result, {"input_ids": ids, **cache, **lengths})
        np.testing.assert_allclose(after["logits"], before["logits"], atol=1e-5)
        past, cache = ({f"past.{n}": made[f"present.{n}"] for n in ("key", "value")} for made in (before, after))
        tokens += new


def test_a_table_shorter_than_the_capacity_says_the_most() -> None:
    with pytest.raises(OptionError, match=r"--capacity is 41, but the model has 40 positions.* at most --capacity 40"):
        normalize(decoder(), {}, PlanOptions(capacity=41))
    normalize(decoder(), {}, PlanOptions(capacity=40))
    with pytest.raises(OptionError, match=r"--capacity is 39, but the model has 38 positions.* at most --capacity 38"):
        normalize(decoder(2, 2), {}, PlanOptions(capacity=39))
    normalize(decoder(2, 2), {}, PlanOptions(capacity=38))


def test_each_sequence_has_rows_of_its_own() -> None:
    result = normalize(decoder(), {}, PlanOptions(capacity=CAPACITY)).model
    rng = np.random.default_rng(1)
    cache = {f"past.{n}": rng.standard_normal((2, HEADS, CAPACITY, SIZE), np.float32) for n in ("key", "value")}
    ids, starts = np.array([[4, 5], [6, 7]]), np.array([3, 8])
    both = run(result, {"input_ids": ids, **cache, "write_indices": starts, "nonpad_kv_seqlen": starts + 2})["logits"]
    for row in range(2):
        pick = slice(row, row + 1)
        feeds = {"input_ids": ids[pick], "write_indices": starts[pick], "nonpad_kv_seqlen": starts[pick] + 2}
        alone = run(result, feeds | {n: v[pick] for n, v in cache.items()})["logits"]
        np.testing.assert_allclose(both[pick], alone, atol=1e-5)


@pytest.mark.parametrize(
    "options",
    [{"first": -1, "last": -1}, {"first": -1, "last": 0}],
    ids=["shifted to the front", "one row more"],
)
def test_look_alikes_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedModelError, match="from the length of the cache together with weights"):
        normalize(decoder(**options), {}, PlanOptions(capacity=CAPACITY))


@pytest.mark.parametrize(
    ("op", "rows", "refused"), [("Gather", 40, False), ("Gather", 39, True), ("GatherND", 39, True)]
)
def test_positions_counted_in_the_graph_stay_within_their_table(op: str, rows: int, refused: bool) -> None:
    """Learned positions looked up at Shape(past) + arange(S), as torch writes Whisper's."""
    model = decoder()
    cut = next(n for n in model.graph.node if n.op_type == "Slice" and n.output[0] == "rows")
    table = next(t for t in model.graph.initializer if t.name == cut.input[0])
    table.CopyFrom(onnx.numpy_helper.from_array(np.ones((rows, table.dims[1]), np.float32), table.name))
    past, total = cut.input[1], cut.input[2]
    graph = model.graph
    scalars = [onnx.helper.make_node("Squeeze", [name], [f"{name}_scalar"]) for name in (past, total)]
    for name, value in (("step", np.array(1)), ("front", np.array([0])), ("last", np.array([-1]))):
        graph.initializer.append(onnx.numpy_helper.from_array(value, name))
    count = onnx.helper.make_node("Range", [f"{past}_scalar", f"{total}_scalar", "step"], ["counted"])
    row = onnx.helper.make_node("Unsqueeze", ["counted", "front"], ["position"])
    index = ["position"]
    extra = []
    if op == "GatherND":
        extra = [onnx.helper.make_node("Unsqueeze", ["position", "last"], ["pairs"])]
        index = ["pairs"]
    look = onnx.helper.make_node(op, [table.name, *index], list(cut.output), name="lookup")
    place = list(graph.node).index(cut)
    nodes = [*graph.node[:place], *scalars, count, row, *extra, look, *graph.node[place + 1 :]]
    del graph.node[:]
    graph.node.extend(nodes)
    if refused:
        with pytest.raises(OptionError, match=f"the model has {rows} positions: 'lookup' .* at most --capacity {rows}"):
            normalize(model, {}, PlanOptions(capacity=40))
    else:
        normalize(model, {}, PlanOptions(capacity=40))


@pytest.mark.parametrize("place", [1, 2])
def test_a_bound_that_is_a_scalar_is_refused(place: int) -> None:
    model = decoder(use="MatMul")
    cut = next(n for n in model.graph.node if n.name == "node_rows")
    number = onnx.helper.make_node("Squeeze", [cut.input[place]], ["number"], "number")
    model.graph.node.insert(list(model.graph.node).index(cut), number)
    cut.input[place] = "number"
    with pytest.raises(UnsupportedModelError, match="computes 'x' from the length of the cache together with"):
        normalize(model, {}, PlanOptions(capacity=CAPACITY))

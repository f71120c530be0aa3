"""Rows of a table by the length of the past, and what only looks like them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from graphs import Graph
from onnx import TensorProto

from trt_kvcache import PlanOptions, VerifyOptions, plan_model, verify_model
from trt_kvcache.errors import OptionError, UnsupportedModelError

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


def plan(model: onnx.ModelProto, folder: Path, capacity: int = CAPACITY) -> Path:
    onnx.save(model, folder / "model.onnx")
    plan_model(folder / "model.onnx", PlanOptions(capacity=capacity))
    return folder / "model.onnx"


@pytest.mark.parametrize(("offset", "use"), [(0, "Add"), (2, "Add"), (0, "MatMul")])
def test_rows_of_the_new_tokens(tmp_path: Path, offset: int, use: str) -> None:
    path = plan(decoder(offset, offset, use), tmp_path)
    verify_model(path, PlanOptions(capacity=CAPACITY), VerifyOptions(tokens=8)).check()


def test_a_table_shorter_than_the_capacity_says_the_most(tmp_path: Path) -> None:
    for rows, model in ((40, decoder()), (38, decoder(2, 2))):
        plan(model, tmp_path, rows)
        with pytest.raises(OptionError, match=f"--capacity is {rows + 1}, but .* at most --capacity {rows}"):
            plan(model, tmp_path, rows + 1)


@pytest.mark.parametrize(("first", "last"), [(-1, -1), (-1, 0)], ids=["shifted to the front", "one row more"])
def test_look_alikes_are_refused(tmp_path: Path, first: int, last: int) -> None:
    with pytest.raises(UnsupportedModelError, match="from the length of the cache together with weights"):
        plan(decoder(first, last), tmp_path)


@pytest.mark.parametrize(
    ("op", "rows", "refused"), [("Gather", 40, False), ("Gather", 39, True), ("GatherND", 39, True)]
)
def test_positions_counted_in_the_graph_stay_within_their_table(
    op: str, rows: int, refused: bool, tmp_path: Path
) -> None:
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
        with pytest.raises(OptionError, match=f"takes no more than {rows} tokens: .* at most --capacity {rows}"):
            plan(model, tmp_path, 40)
    else:
        plan(model, tmp_path, 40)

"""Merged exports: the branch with a past is taken, with the same numbers, and reported."""

from __future__ import annotations

from pathlib import Path

import harness
import numpy as np
import onnx
import pytest
from decoders import DecoderConfig
from foreign_decoders import make_foreign
from onnx import TensorProto, helper, numpy_helper

from trt_kvcache.errors import ModelError
from trt_kvcache.importer.plan import OriginalRole, PlanOptions
from trt_kvcache.verify import VerifyOptions, verify_model

CONFIG = DecoderConfig(layers=2, hidden=32, head_size=8, vocab=64)
CAPACITY = PlanOptions(capacity=16)


def body_of(model: onnx.ModelProto, prefix: str, dropped: tuple[str, ...] = ()) -> onnx.GraphProto:
    """A model's graph as a branch: initializers inside, its own names prefixed, inputs taken from outside."""
    graph = model.graph
    own = {n for node in graph.node for n in node.output} | {t.name for t in graph.initializer}
    body = onnx.GraphProto(name=prefix)
    for node in graph.node:
        copy = body.node.add()
        copy.CopyFrom(node)
        copy.input[:] = [prefix + n if n in own else n for n in node.input]
        copy.output[:] = [prefix + n for n in node.output]
    for tensor in graph.initializer:
        body.initializer.add().CopyFrom(tensor)
        body.initializer[-1].name = prefix + tensor.name
    for value in graph.output:
        output = body.output.add()
        output.CopyFrom(value)
        output.name = prefix + value.name
    return body


def without_past(model: onnx.ModelProto) -> onnx.ModelProto:
    """The first step alone: every past becomes a constant of no tokens; `extra` is added to the logits."""
    first = onnx.ModelProto()
    first.CopyFrom(model)
    for value in model.graph.input:
        if value.name.startswith("past_key_values"):
            shape = (1, CONFIG.kv_heads, 0, CONFIG.head_size)
            first.graph.initializer.append(numpy_helper.from_array(np.zeros(shape, np.float32), value.name))
    last = first.graph.node[-1]
    assert last.output[0] == "logits"
    last.output[0] = "logits_alone"
    first.graph.node.append(helper.make_node("Add", ["logits_alone", "extra"], ["logits"]))
    return first


def merged(*, swapped: bool = False, both_cached: bool = False) -> onnx.ModelProto:
    """As optimum merges: one If in the main graph, both branches with their weights inside."""
    model = make_foreign("concat", CONFIG)
    cached, first = body_of(model, "c."), body_of(without_past(model), "f.")
    if both_cached:
        first = body_of(model, "f.")
    shape = ["batch", CONFIG.kv_heads, "encoder", CONFIG.head_size]
    for body, source in ((cached, numpy_helper.from_array(np.zeros((0, 2, 1, 8), np.float32))), (first, None)):
        name = f"{body.name}cross"
        made = (
            helper.make_node("Constant", [], [name], value=source)
            if source is not None
            else helper.make_node("Unsqueeze", ["extra", "axes"], [name])
        )
        body.node.append(made)
        body.output.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, None))
    outputs = [o.name for o in model.graph.output] + ["present.0.cross"]
    branches = {"then_branch": cached, "else_branch": first}
    if swapped:
        branches = {"then_branch": first, "else_branch": cached}
    node = helper.make_node("If", ["use_cache_branch"], outputs, name="branches", **branches)
    switch = helper.make_tensor_value_info("use_cache_branch", TensorProto.BOOL, [1])
    extra = helper.make_tensor_value_info("extra", TensorProto.FLOAT, [1, 1, 1])
    cross = helper.make_tensor_value_info("present.0.cross", TensorProto.FLOAT, shape)
    graph = helper.make_graph(
        [node], "merged", [*model.graph.input, extra, switch], [*model.graph.output, cross],
        [numpy_helper.from_array(np.array([0]), "axes")],
    )  # fmt: skip
    return helper.make_model(graph, opset_imports=model.opset_import, ir_version=10)


@pytest.mark.parametrize("swapped", [False, True])
def test_the_branch_with_a_past_is_taken(tmp_path: Path, swapped: bool) -> None:
    original = merged(swapped=swapped)
    onnx.checker.check_model(original)
    result = harness.imported(original, tmp_path, CAPACITY)
    plan = result.plan
    assert "If 'branches'" in plan.inlined
    assert [c.idiom for c in plan.caches] == ["Concat"] * 4
    gone = {change.old.partition(" ")[0]: change.why for change in plan.changes if not change.new}
    assert gone["use_cache_branch"].startswith(f"always {str(not swapped).lower()}")
    assert gone["extra"] == "only the branch without a past reads it"
    assert "run the export as it is once" in gone["present.0.cross"]
    assert {t.name for t in plan.original if t.role is OriginalRole.SWITCH} == {"use_cache_branch", "extra"}
    assert not any(node.op_type == "If" for node in result.model.graph.node)
    names = {v.name for v in (*result.model.graph.input, *result.model.graph.output)}
    assert not names & {"use_cache_branch", "extra", "present.0.cross"}
    onnx.checker.check_model(result.model, full_check=True)


@pytest.mark.parametrize("swapped", [False, True])
def test_verification_runs_the_merged_model_itself(swapped: bool, tmp_path: Path) -> None:
    """Found in its folder by its name."""
    onnx.save(merged(swapped=swapped), tmp_path / "decoder_model_merged.onnx")
    report = verify_model(tmp_path, CAPACITY, VerifyOptions(tokens=4))
    report.check()
    assert any("present.0.cross" in note for note in report.notes)


def test_branches_that_both_read_caches_are_not_merged_exports(tmp_path: Path) -> None:
    with pytest.raises(ModelError):
        harness.imported(merged(both_cached=True), tmp_path, CAPACITY)

"""Repeats and attention in front of a Scan: what TensorRT does not build, and the forms that it builds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import harness
import numpy as np
import onnx
import onnx_graphsurgeon as gs
import onnxruntime as ort
import pytest
import trt
from graphs import Graph
from onnx import TensorProto, helper
from scan_graphs import HEADS, REPEATS, SIZE, STEPS, decoder, scan

from trt_kvcache import BuildError, BuildOptions, build_engine
from trt_kvcache.importer.graph import Emitter, export_inferred
from trt_kvcache.importer.plan import AttentionKind
from trt_kvcache.importer.planning import attention
from trt_kvcache.importer.rewrite.repeats import copy_repeats
from trt_kvcache.verify import verify_model


def copied(model: onnx.ModelProto) -> onnx.ModelProto:
    graph = gs.import_onnx(onnx.shape_inference.infer_shapes(model))
    copy_repeats(graph, Emitter(graph))
    return export_inferred(graph.cleanup().toposort())


@pytest.mark.parametrize("repeat", [name for name in REPEATS if name != "Tile of nothing"])
def test_a_repeat_before_a_scan_of_any_length(repeat: str) -> None:
    outcome = trt.build(scan(repeat), STEPS)
    assert (outcome.stage, "CHECK(is_const()) failed" in outcome.words) == ("build", True)
    assert trt.build(copied(scan(repeat)), STEPS).stage == "built"


def test_no_repeat_and_a_fixed_length() -> None:
    assert trt.build(scan(""), STEPS).stage == "built"
    assert trt.build(copied(scan("Tile of nothing")), STEPS).stage == "built"
    assert trt.build(scan("Tile", 4), STEPS).stage == "built"
    assert trt.build(scan("Tile"), STEPS | {"S": (4, 4, 4)}).stage == "built"


@pytest.mark.parametrize("repeat", REPEATS)
@pytest.mark.parametrize("length", [1, 5])
def test_copies_are_the_same(repeat: str, length: int) -> None:
    model = scan(repeat)
    result = copied(model)
    onnx.checker.check_model(result, full_check=True)
    assert not {"Tile", "Expand"} & {node.op_type for node in result.graph.node}
    rng = np.random.default_rng(0)
    heads = model.graph.input[0].type.tensor_type.shape.dim[1].dim_value
    feeds = {"state": rng.standard_normal((3, heads, SIZE, SIZE)), "x": rng.standard_normal((3, length, HEADS * SIZE))}
    feeds = {name: value.astype(np.float32) for name, value in feeds.items()}
    for before, after in zip(_run(model, feeds), _run(result, feeds), strict=True):
        np.testing.assert_array_equal(after, before)


def _run(model: onnx.ModelProto, feeds: dict[str, Any]) -> list[Any]:
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return list(session.run(None, feeds))


def test_repeats_that_no_scan_depends_on_stay() -> None:
    graph = Graph()
    graph.input("x", TensorProto.FLOAT, ["B", "S", 4])
    graph.node("Tile", ["x", graph.constant([1, 1, 2])], "y")
    graph.output("y", TensorProto.FLOAT, ["B", "S", 8])
    assert [node.op_type for node in copied(graph.model()).graph.node] == ["Tile"]


def test_repeats_by_what_is_computed_stay() -> None:
    model = scan("Tile")
    tile = next(n for n in model.graph.node if n.op_type == "Tile")
    model.graph.input.append(helper.make_tensor_value_info("counts", TensorProto.INT64, [5]))
    tile.input[1] = "counts"
    assert "Tile" in {node.op_type for node in copied(model).graph.node}


@pytest.mark.parametrize("dtype", [TensorProto.FLOAT16, TensorProto.FLOAT])
def test_attention_before_a_scan(dtype: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = harness.imported(decoder(dtype), tmp_path)
    assert [item.kind is AttentionKind.LOWERED for item in result.plan.attention] == [True, False]
    assert result.plan.attention[0].reason == "a Scan over a dynamic number of steps depends on it"
    verify_model(tmp_path / "model.onnx").check()
    assert harness.build(result).stage == "built"
    monkeypatch.setattr(attention, "nodes_before_scans", lambda graph: ())
    result = harness.imported(decoder(dtype), tmp_path)
    assert AttentionKind.LOWERED not in {item.kind for item in result.plan.attention}
    assert harness.build(result).stage == "crash"


def test_attention_before_a_scan_of_a_fixed_length(tmp_path: Path) -> None:
    result = harness.imported(decoder(length=4), tmp_path)
    assert AttentionKind.LOWERED not in {item.kind for item in result.plan.attention}
    assert harness.build(result).stage == "built"


def test_what_still_fails_before_a_scan_is_named(tmp_path: Path) -> None:
    onnx.save(decoder(computed=True), tmp_path / "model.onnx")
    words = r"the model has a Scan over the tokens of an update \('node_new_state'\).*try --max-chunk 1"
    with pytest.raises(BuildError, match=words):
        build_engine(tmp_path / "model.onnx", tmp_path / "model.engine", build=BuildOptions(max_chunk=8))
    build_engine(tmp_path / "model.onnx", tmp_path / "model.engine", build=BuildOptions(max_chunk=1))

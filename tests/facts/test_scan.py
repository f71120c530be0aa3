"""Repeats and attention in front of a Scan: what TensorRT does not build, and the forms that it builds."""

from pathlib import Path

import harness
import onnx
import onnx_graphsurgeon as gs
import pytest
import trt
from onnx import TensorProto
from scan_graphs import REPEATS, STEPS, decoder, scan

from trt_kvcache import BuildOptions, build_engine, verify_model
from trt_kvcache.errors import BuildError
from trt_kvcache.importer.cache_plan import AttentionKind
from trt_kvcache.importer.graph import Emitter, export_inferred
from trt_kvcache.importer.planning import attention_plans
from trt_kvcache.importer.rewrite import copy_repeats


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


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize("dtype", [TensorProto.FLOAT16, TensorProto.FLOAT])
def test_attention_before_a_scan(dtype: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = harness.imported(decoder(dtype), tmp_path)
    assert [item.kind is AttentionKind.LOWERED for item in result.plan.attention] == [True, False]
    assert result.plan.attention[0].reason == "a Scan with a dynamic number of steps depends on this attention"
    verify_model(tmp_path / "model.onnx").check()
    assert harness.build(result).stage == "built"
    monkeypatch.setattr(attention_plans, "nodes_before_scans", lambda graph: ())
    result = harness.imported(decoder(dtype), tmp_path)
    assert AttentionKind.LOWERED not in {item.kind for item in result.plan.attention}
    assert harness.build(result).stage == "crash"


def test_attention_before_a_scan_of_a_fixed_length(tmp_path: Path) -> None:
    result = harness.imported(decoder(length=4), tmp_path)
    assert AttentionKind.LOWERED not in {item.kind for item in result.plan.attention}
    assert harness.build(result).stage == "built"


@pytest.mark.slow
def test_what_still_fails_before_a_scan_is_named(tmp_path: Path) -> None:
    onnx.save(decoder(computed=True), tmp_path / "model.onnx")
    words = r"the model has a Scan over the tokens of an update \('node_new_state'\).*try max_chunk=1"
    with pytest.raises(BuildError, match=words):
        build_engine(tmp_path / "model.onnx", tmp_path / "model.engine", build=BuildOptions(max_chunk=8))
    build_engine(tmp_path / "model.onnx", tmp_path / "model.engine", build=BuildOptions(max_chunk=1))

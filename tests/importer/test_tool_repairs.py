"""Repairs of what tools write and ONNX forbids: nodes in any order, a missing import, scalars for lists."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from decoders import DecoderConfig
from foreign_decoders import make_foreign
from graphs import Graph
from onnx import TensorProto, helper, numpy_helper
from stored import MODELS

from trt_kvcache import PlanOptions, plan_model, verify_model
from trt_kvcache.errors import InvalidModelError
from trt_kvcache.importer import import_model
from trt_kvcache.importer.files.source import load_source
from trt_kvcache.verify import verify_import

SMALL = DecoderConfig(layers=1, hidden=32, vocab=32, query_heads=2, kv_heads=1, head_size=16, capacity=16, positions=32)


def written(folder: Path, model: onnx.ModelProto) -> Path:
    path = folder / "model.onnx"
    path.write_bytes(model.SerializeToString())
    return path


def shuffled(model: onnx.ModelProto, seed: int) -> list[str]:
    """Shuffle the nodes in place; returns what they write, in the new order."""
    nodes = list(model.graph.node)
    random.Random(seed).shuffle(nodes)
    copies = [onnx.NodeProto.FromString(node.SerializeToString()) for node in nodes]
    del model.graph.node[:]
    model.graph.node.extend(copies)
    return [node.output[0] for node in copies]


@pytest.mark.few(2)
@pytest.mark.parametrize("seed", range(3))
def test_a_decoder_with_nodes_in_any_order_is_the_same_decoder(tmp_path: Path, seed: int) -> None:
    model = make_foreign("concat", SMALL)
    sorted_plan = plan_model(written(tmp_path, model), PlanOptions(capacity=16))
    shuffled(model, seed)
    with pytest.raises(onnx.checker.ValidationError, match="topologically"):
        onnx.checker.check_model(model)
    found = import_model(written(tmp_path, model), PlanOptions(capacity=16))
    assert found.plan.caches == sorted_plan.caches
    assert found.plan.tensors == sorted_plan.tensors
    verify_import(found).check()


def test_sorted_nodes_stay_where_they_are(tmp_path: Path) -> None:
    model = make_foreign("concat", SMALL)
    assert list(load_source(written(tmp_path, model)).proto.graph.node) == list(model.graph.node)


def test_a_body_reads_what_comes_later(tmp_path: Path) -> None:
    """What an If reads is named in its bodies only, those nested in these too."""
    graph = Graph()
    graph.input("x", TensorProto.FLOAT, ["B", 4])
    graph.input("choice", TensorProto.BOOL, [])
    inner = branch([helper.make_node("Neg", ["late"], ["minus"])], "minus")
    outer = branch([helper.make_node("If", ["choice"], ["picked"], then_branch=inner, else_branch=inner)], "picked")
    plain = branch([helper.make_node("Abs", ["x"], ["kept"])], "kept")
    graph.node("If", ["choice"], "y", then_branch=outer, else_branch=plain)
    graph.node("Relu", ["x"], "late")
    graph.output("y", TensorProto.FLOAT, ["B", 4])
    proto = load_source(written(tmp_path, graph.model())).proto
    assert [node.output[0] for node in proto.graph.node] == ["late", "y"]


def branch(nodes: list[onnx.NodeProto], output: str) -> onnx.GraphProto:
    return helper.make_graph(nodes, "body", [], [helper.make_tensor_value_info(output, TensorProto.FLOAT, ["B", 4])])


def test_a_cycle_is_refused_by_name(tmp_path: Path) -> None:
    graph = Graph()
    graph.input("x", TensorProto.FLOAT, [4])
    graph.node("Add", ["x", "b"], "a")
    graph.node("Relu", ["a"], "b")
    graph.output("b", TensorProto.FLOAT, [4])
    with pytest.raises(InvalidModelError, match="topologically sorted, however input 'b'"):
        load_source(written(tmp_path, graph.model()))


def test_the_import_of_com_microsoft_is_added(tmp_path: Path) -> None:
    model = make_foreign("gqa", SMALL)
    imports = [entry for entry in model.opset_import if entry.domain != "com.microsoft"]
    assert len(imports) < len(model.opset_import)
    del model.opset_import[:]
    model.opset_import.extend(imports)
    verify_model(written(tmp_path, model), PlanOptions(capacity=16)).check()


def test_other_domains_need_their_import(tmp_path: Path) -> None:
    graph = Graph()
    graph.input("x", TensorProto.FLOAT, [4])
    graph.node("Own", ["x"], "y", domain="com.own")
    graph.output("y", TensorProto.FLOAT, [4])
    with pytest.raises(InvalidModelError, match=r"com\.own"):
        load_source(written(tmp_path, graph.model()))


def scalars_for_lists(model: onnx.ModelProto) -> set[str]:
    """Let, in place, operators read a scalar where they read a list of one number; which operators."""
    lists = {t.name: t for t in model.graph.initializer if t.data_type == TensorProto.INT64 and t.dims == [1]}
    found = set()
    for node in model.graph.node:
        for place, name in enumerate(node.input):
            if place and name in lists and node.op_type not in ("Gather", "Equal", "Where"):
                node.input[place] = f"{name}/scalar"
                found.add(node.op_type)
    for name, tensor in lists.items():
        values = numpy_helper.to_array(tensor)
        model.graph.initializer.append(numpy_helper.from_array(values.reshape(()), f"{name}/scalar"))
    return found


def test_scalars_stand_for_lists_of_one_number(tmp_path: Path) -> None:
    """As onnxsim 0.8.1 leaves them, of a model by onnxruntime-genai: ONNX Runtime does not reduce so."""
    model = make_foreign("concat", SMALL)
    assert {"Concat", "ReduceMean", "Slice", "Unsqueeze"} <= scalars_for_lists(model)
    source = load_source(written(tmp_path, model))
    assert source.is_edited
    onnx.checker.check_model(source.proto, full_check=True)
    verify_model(tmp_path / "model.onnx", PlanOptions(capacity=16)).check()


def test_a_body_reads_scalars_from_outside(tmp_path: Path) -> None:
    graph = Graph()
    graph.input("x", TensorProto.FLOAT, ["B", 4])
    graph.input("choice", TensorProto.BOOL, [])
    inputs = ["x", graph.constant(0)]
    most, total = (
        branch([helper.make_node(op, inputs, ["made"], keepdims=1)], "made") for op in ("ReduceMax", "ReduceSum")
    )
    graph.node("If", ["choice"], "y", then_branch=most, else_branch=total)
    graph.output("y", TensorProto.FLOAT, ["B", 4])
    source = load_source(written(tmp_path, graph.model()))
    run = ort.InferenceSession(source.proto.SerializeToString(), providers=["CPUExecutionProvider"])
    x = np.arange(8, dtype=np.float32).reshape(2, 4)
    for choice, wanted in ((True, x.max(0)), (False, x.sum(0))):
        assert np.array_equal(run.run(None, {"x": x, "choice": np.array(choice)})[0], [wanted])


def test_what_is_stated_of_an_initializer_does_not_count(tmp_path: Path) -> None:
    """onnxruntime-genai states a wrong rank of constants, which ONNX Runtime's optimizer makes initializers."""
    model = make_foreign("concat", SMALL)
    name = next(t.name for t in model.graph.initializer if t.data_type == TensorProto.INT64 and t.dims == [1])
    model.graph.value_info.append(helper.make_tensor_value_info(name, TensorProto.INT64, []))
    with pytest.raises(onnx.shape_inference.InferenceError, match="differ in rank"):
        onnx.shape_inference.infer_shapes(model)
    verify_model(written(tmp_path, model), PlanOptions(capacity=16)).check()


def test_casts_that_onnxruntime_saved_do_not_meet_its_own(tmp_path: Path) -> None:
    """On a model of float16, of which it computes most in float32 on a CPU."""
    optimized = tmp_path / "model.onnx"
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_BASIC
    options.optimized_model_filepath = str(optimized)
    ort.InferenceSession(MODELS / "transformers" / "llama_dyn_op24" / "model.onnx", options)

    def casts(model: onnx.ModelProto) -> int:
        return sum(name.startswith("InsertedPrecisionFreeCast_") for node in model.graph.node for name in node.output)

    assert casts(onnx.load(optimized))
    assert not casts(load_source(optimized).proto)
    verify_model(optimized, PlanOptions(capacity=16)).check()

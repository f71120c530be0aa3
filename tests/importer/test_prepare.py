"""Capacity, digit dimensions and detached weights."""

from __future__ import annotations

import harness
import numpy as np
import onnx
import pytest
import reference
from graphs import Graph, scatter_model
from onnx import TensorProto, numpy_helper

from trt_kvcache.errors import InvalidModelError, OptionError, UnsupportedModelError
from trt_kvcache.importer.plan import LogitPositions, PlanOptions, Sliding
from trt_kvcache.importer.prepare import attach_weights, detach_weights

F32, I64 = TensorProto.FLOAT, TensorProto.INT64


def shapes(values) -> dict[str, list[int | str]]:
    return {v.name: [d.dim_param or d.dim_value for d in v.type.tensor_type.shape.dim] for v in values}


def test_symbolic_capacity_needs_the_option(tmp_path):
    with pytest.raises(OptionError, match=r"cache 'past' has a symbolic length \('L'\).*--capacity N"):
        harness.imported(scatter_model(shape=("B", 2, "L", 8)), tmp_path)


@pytest.mark.parametrize("capacity", [0, -3])
def test_capacity_must_be_positive(capacity, tmp_path):
    with pytest.raises(OptionError, match=f"--capacity is {capacity}"):
        harness.imported(scatter_model(), tmp_path, PlanOptions(capacity=capacity))


def test_capacity_that_contradicts_the_model_is_refused(tmp_path):
    with pytest.raises(OptionError, match="--capacity is 32, but the model fixes its cache length at 16"):
        harness.imported(scatter_model(), tmp_path, PlanOptions(capacity=32))
    assert harness.imported(scatter_model(), tmp_path, PlanOptions(capacity=16)).plan.caches[0].capacity == 16


def test_capacity_is_bound_wherever_its_symbol_stands(tmp_path):
    graph = Graph()
    past = graph.input("past", F32, ["B", "L", 8])
    update = graph.input("update", F32, ["B", "S", 8])
    graph.node("TensorScatter", [past, update], "present", axis=1)
    graph.output("present", F32, ["B", "L", 8])
    same = graph.input("beside", F32, ["B", "L"])
    graph.node("Neg", [same], "beside_out")
    graph.output("beside_out", F32, ["B", "L"])
    result = harness.imported(graph.model(), tmp_path, PlanOptions(capacity=16))
    assert shapes(result.model.graph.input)["beside"] == ["B", 16]
    assert shapes(result.model.graph.output)["beside_out"] == ["B", 16]
    rng = np.random.default_rng(0)
    feeds = harness.random_feeds(graph.model(), {"B": 2, "L": 16, "S": 3}, rng)
    want = reference.tensor_scatter(feeds["past"], feeds["update"], axis=1)
    np.testing.assert_array_equal(harness.run_rewritten(result, feeds)["present"], want)


def test_unnamed_capacity_is_bound_on_both_sides(tmp_path):
    model = scatter_model(shape=("B", 2, "L", 8))
    for value in (model.graph.input[0], model.graph.output[0]):
        value.type.tensor_type.shape.dim[2].Clear()
    result = harness.imported(model, tmp_path, PlanOptions(capacity=16))
    assert shapes(result.model.graph.input)["past"] == ["B", 2, 16, 8]
    assert shapes(result.model.graph.output)["present"] == ["B", 2, 16, 8]


def test_capacity_smaller_than_a_fixed_update_is_refused(tmp_path):
    with pytest.raises(Exception, match=r"writes 6 tokens into cache 'past', which holds 4"):
        harness.imported(scatter_model(shape=("B", 2, "L", 8), length=6), tmp_path, PlanOptions(capacity=4))


def test_cache_computed_with_open_length_is_refused(tmp_path):
    graph = Graph()
    raw = graph.input("raw", F32, ["B", 2, "L", 8])
    update = graph.input("update", F32, ["B", 2, "S", 8])
    graph.node("TensorScatter", [graph.node("Neg", [raw]), update], "present")
    graph.output("present", F32, ["B", 2, None, 8])
    with pytest.raises(UnsupportedModelError, match="no fixed length on axis 2"):
        harness.imported(graph.model(), tmp_path, PlanOptions(capacity=16))


def test_digit_dimensions_become_numbers(tmp_path):
    model = scatter_model(shape=("3", "2", "16", "8"))
    result = harness.imported(model, tmp_path)
    assert result.plan.caches[0].logical_shape == (3, 2, 16, 8)
    assert shapes(result.model.graph.input)["past"] == [3, 2, 16, 8]
    assert harness.build(result).stage == "built"


def test_large_weights_are_detached_not_copied_and_put_back(tmp_path):
    graph = Graph()
    past, update = graph.input("past", F32, ["B", 2, 16, 8]), graph.input("update", F32, ["B", 2, "S", 8])
    weight = np.random.default_rng(0).standard_normal((256, 8, 8)).astype(np.float32)
    graph.initializers.append(numpy_helper.from_array(weight, "weight"))
    one = graph.node("Gather", ["weight", graph.constant(7)])
    graph.node("TensorScatter", [past, graph.node("MatMul", [update, one]), ""], "present")
    graph.output("present", F32, ["B", 2, 16, 8])
    source = graph.model()
    before = source.SerializeToString()
    copy, detached = detach_weights(source)
    assert list(detached) == ["weight"]
    assert detached["weight"] is source.graph.initializer[0]
    assert copy.ByteSize() < 4096
    attach_weights(copy, detached)
    assert copy == source
    result = harness.imported(source, tmp_path)
    stored = {t.name: t for t in result.model.graph.initializer}["weight"]
    np.testing.assert_array_equal(numpy_helper.to_array(stored), weight)
    assert result.source.proto.SerializeToString() == before, "the source model is left as it was"


def test_external_weights_stay_references(tmp_path):
    graph = Graph()
    past, update = graph.input("past", F32, ["B", 2, 16, 8]), graph.input("update", F32, ["B", 2, "S", 8])
    graph.initializers.append(numpy_helper.from_array(np.eye(8, dtype=np.float32) * 3, "weight"))
    graph.node("TensorScatter", [past, graph.node("MatMul", [update, "weight"])], "present")
    graph.output("present", F32, ["B", 2, 16, 8])
    path = tmp_path / "m.onnx"
    onnx.save(graph.model(), path, save_as_external_data=True, location="m.data", size_threshold=0)
    from trt_kvcache.importer import import_model

    result = import_model(path)
    tensor = {t.name: t for t in result.model.graph.initializer}["weight"]
    assert tensor.data_location == TensorProto.EXTERNAL
    assert not tensor.raw_data
    assert {e.key: e.value for e in tensor.external_data}["location"] == "m.data"


def test_unused_attention_outputs(tmp_path):
    graph = Graph()
    hidden = graph.input("hidden", F32, ["B", "S", 32])
    lengths = graph.input("lengths", I64, ["B"])
    indices = graph.input("write_indices", I64, ["B"])
    for i in range(2):
        caches = []
        for kind in "kv":
            past = graph.input(f"past_{kind}{i}", F32, ["B", 16, 16])
            weight = graph.constant(np.random.default_rng(i).standard_normal((32, 16)) / 6, np.float32)
            update = graph.node("MatMul", [hidden, weight])
            caches.append(graph.node("TensorScatter", [past, update, indices], f"present_{kind}{i}", axis=1))
            graph.output(f"present_{kind}{i}", F32, ["B", 16, 16])
        inputs = [hidden, *caches, "", "", "", lengths]
        hidden = graph.node("Attention", inputs, [f"y{i}", f"unused_k{i}", f"unused_v{i}"],
                            q_num_heads=4, kv_num_heads=2, is_causal=1)  # fmt: skip
    graph.output(hidden, F32, ["B", "S", 32])
    result = harness.imported(graph.model(24), tmp_path)
    assert [(a.query_heads, a.head_size) for a in result.plan.attention] == [(4, 8)] * 2
    assert len(result.plan.masks) == 1
    rng = np.random.default_rng(3)
    feeds = harness.random_feeds(graph.model(24), {"B": 2, "S": 3}, rng)
    feeds |= {"write_indices": np.array([0, 5]), "lengths": np.array([3, 8])}
    plain = graph.model(24)
    for node in plain.graph.node:
        del node.output[1:]
    want = harness.run(plain, feeds)
    got = harness.run_rewritten(result, feeds, {"attention_span": 8})
    for name, array in want.items():
        np.testing.assert_allclose(got[name], array, rtol=1e-5, atol=1e-5)
    with pytest.raises(InvalidModelError, match="nonpad_kv_seqlen cannot be combined with past or present"):
        harness.imported(graph.model(25), tmp_path)  # ONNX forbids the outputs there


def test_unused_outputs_of_a_norm_are_dropped(tmp_path):
    # TensorRT refuses a LayerNormalization that lists mean and deviation, read or not.
    model = scatter_model()
    graph = Graph()
    graph.input("hidden", F32, ["B", 8])
    scale = graph.constant(np.ones(8), np.float32)
    for name, outputs in (("plain", ["plain", "mean", "deviation"]), ("kept", ["kept", "kept_mean"])):
        graph.node("LayerNormalization", ["hidden", scale], outputs, epsilon=1e-3)
        graph.output(name, F32, ["B", 8])
    graph.output("kept_mean", F32, ["B", 1])
    for field in ("node", "initializer", "input", "output"):
        getattr(model.graph, field).extend(getattr(graph.model().graph, field))
    result = harness.imported(model, tmp_path)
    norms = [node for node in result.model.graph.node if node.op_type == "LayerNormalization"]
    assert sorted(len(node.output) for node in norms) == [1, 2]


def test_options_given_as_text_are_those_of_their_enums():
    """They were taken, and did nothing."""
    options = PlanOptions(sliding="circular", logits="all")
    assert options.sliding is Sliding.CIRCULAR
    assert options.logits is LogitPositions.ALL


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"sliding": "round"}, "sliding is 'round'; it must be one of linear, circular"),
        ({"target": None}, "target is None; it must be one of tensorrt, tensorrt-rtx"),
        ({"capacity": "64"}, "capacity is '64'; it must be a whole number of tokens"),
    ],
)
def test_options_that_are_none(options, said):
    with pytest.raises(OptionError, match=said):
        PlanOptions(**options)

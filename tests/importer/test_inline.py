"""Functions and control flow around caches: inlined with the same numbers, or refused by name."""

from __future__ import annotations

import harness
import numpy as np
import onnx
import pytest
import reference
import trt
from graphs import Graph
from onnx import TensorProto, helper, numpy_helper

from trt_kvcache.errors import InvalidModelError, UnsupportedModelError
from trt_kvcache.importer.plan import Route
from trt_kvcache.importer.simplify import simplify

F32, I64 = TensorProto.FLOAT, TensorProto.INT64
SHAPE = ["B", 2, 8, 4]


def feeds(rng: np.random.Generator) -> harness.Feeds:
    return {
        "past": (rng.standard_normal((3, 2, 8, 4)) * 1e4).astype(np.float32),
        "update": rng.standard_normal((3, 2, 2, 4)).astype(np.float32),
        "write_indices": np.array([0, 3, 6], np.int64),
    }


def cache_graph() -> tuple[Graph, list[str]]:
    graph = Graph()
    inputs = [graph.input("past", F32, SHAPE), graph.input("update", F32, ["B", 2, "S", 4])]
    inputs.append(graph.input("write_indices", I64, ["B"]))
    graph.output("present", F32, SHAPE)
    return graph, inputs


def check_native(model: onnx.ModelProto, tmp_path, name: str) -> None:
    """The model's one cache is native, its numbers are those of the original, and TensorRT builds it."""
    given = feeds(np.random.default_rng(0))
    result = harness.imported(model, tmp_path)
    assert [cache.route for cache in result.plan.caches] == [Route.NATIVE]
    assert any(name in text for text in result.plan.inlined), result.plan.inlined
    want = reference.tensor_scatter(given["past"], given["update"], given["write_indices"])
    np.testing.assert_array_equal(harness.run(model, given)["present"], want)
    np.testing.assert_array_equal(harness.run_rewritten(result, given)["present"], want)
    assert harness.build(result).stage == "built"


def scatter_function(name: str = "Write", inner: str | None = None) -> onnx.FunctionProto:
    op = helper.make_node("TensorScatter", ["p", "u", "w"], ["r"], axis=2)
    if inner:
        op = helper.make_node(inner, ["p", "u", "w"], ["r"], domain="local")
    opsets = [helper.make_opsetid("", 24), helper.make_opsetid("local", 1)]
    return helper.make_function("local", name, ["p", "u", "w"], ["r"], [op], opsets)


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_update_in_nested_functions_is_native(depth, tmp_path):
    graph, inputs = cache_graph()
    names = [f"Write{i}" for i in range(depth)]
    functions = [scatter_function(name, names[i + 1] if i + 1 < depth else None) for i, name in enumerate(names)]
    graph.node("Write0", inputs, "present", domain="local")
    check_native(graph.model(domains=["local"], functions=functions), tmp_path, "local::Write0")


def test_function_with_the_name_of_an_operator_keeps_its_meaning(tmp_path):
    # TensorRT's parser takes its own Relu for my::Relu; inlined, it cannot.
    graph, inputs = cache_graph()
    graph.node("TensorScatter", [inputs[0], graph.node("Relu", ["update"], domain="my"), inputs[2]], "present", axis=2)
    square = helper.make_function("my", "Relu", ["x"], ["y"], [helper.make_node("Mul", ["x", "x"], ["y"])],
                                  [helper.make_opsetid("", 24)])  # fmt: skip
    model = graph.model(domains=["my"], functions=[square])
    given = feeds(np.random.default_rng(1))
    result = harness.imported(model, tmp_path)
    want = reference.tensor_scatter(given["past"], given["update"] ** 2, given["write_indices"])
    np.testing.assert_allclose(harness.run_rewritten(result, given)["present"], want, rtol=1e-6)
    parsed = trt.parse(result.model)
    layers = [parsed.network.get_layer(i) for i in range(parsed.network.num_layers)]
    assert not any(layer.type == trt.trt.LayerType.ACTIVATION for layer in layers)


def test_an_input_that_a_call_leaves_out_is_left_out(tmp_path):
    graph, inputs = cache_graph()
    scale = graph.constant(np.ones(4), np.float32)
    normed = graph.node("Norm", [inputs[1], scale], domain="my")
    graph.node("TensorScatter", [inputs[0], normed, inputs[2]], "present", axis=2)
    node = helper.make_node("LayerNormalization", ["x", "scale", "bias"], ["y"])
    norm = helper.make_function("my", "Norm", ["x", "scale", "bias"], ["y"], [node], [helper.make_opsetid("", 24)])
    result = harness.imported(graph.model(domains=["my"], functions=[norm]), tmp_path)
    assert [len(n.input) for n in result.model.graph.node if n.op_type == "LayerNormalization"] == [2]


@pytest.mark.parametrize("domain", ["", "local"])
def test_functions_of_another_opset_are_refused(domain, tmp_path):
    graph, inputs = cache_graph()
    graph.node("Write", inputs, "present", domain="local")
    function = scatter_function("Write", None)
    next(o for o in function.opset_import if o.domain == domain).version = 25
    with pytest.raises(UnsupportedModelError, match=r"function local::Write is of opset 25 of '.*'.* the model of"):
        harness.imported(graph.model(domains=["local"], functions=[function]), tmp_path)


def test_functions_that_stay_may_be_of_another_opset():
    """Those that only say what an update means are not inlined."""
    graph, inputs = cache_graph()
    graph.node("TRT_KVCacheUpdate", inputs, "present", domain="local")
    function = scatter_function("TRT_KVCacheUpdate")
    function.opset_import[0].version = 25
    model = graph.model(domains=["local"], functions=[function])
    simplified, inlined = simplify(model)
    assert [f.name for f in simplified.functions] == ["TRT_KVCacheUpdate"]
    assert inlined == ()


def test_recursive_functions_are_refused(tmp_path):
    graph, inputs = cache_graph()
    graph.node("Write", inputs, "present", domain="local")
    model = graph.model(domains=["local"], functions=[scatter_function("Write", "Write")])
    with pytest.raises(InvalidModelError, match="must not be recursive"):
        harness.imported(model, tmp_path)


def branch(inputs: list[str], *, written: bool) -> onnx.GraphProto:
    """A branch that captures the cache from outside; its inner names repeat those of the other branch."""
    if written:
        nodes = [
            helper.make_node("Identity", [inputs[1]], ["row"]),
            helper.make_node("TensorScatter", [inputs[0], "row", inputs[2]], ["out"], axis=2),
        ]
    else:
        nodes = [helper.make_node("Identity", [inputs[0]], ["row"]), helper.make_node("Identity", ["row"], ["out"])]
    return helper.make_graph(nodes, "branch", [], [helper.make_tensor_value_info("out", F32, SHAPE)])


@pytest.mark.parametrize("taken", ["then_branch", "else_branch"])
def test_if_with_a_constant_condition_is_inlined(taken, tmp_path):
    graph, inputs = cache_graph()
    condition = graph.constant(taken == "then_branch", np.bool_)
    other = "else_branch" if taken == "then_branch" else "then_branch"
    branches = {taken: branch(inputs, written=True), other: branch(inputs, written=False)}
    graph.node("If", [condition], "present", **branches)
    check_native(graph.model(), tmp_path, "If")


def test_nested_if_is_inlined(tmp_path):
    graph, inputs = cache_graph()
    condition = graph.constant(True, np.bool_)
    inner = helper.make_node("If", [condition], ["inner"], then_branch=branch(inputs, written=True),
                             else_branch=branch(inputs, written=False))  # fmt: skip
    outer = helper.make_graph([inner], "outer", [], [helper.make_tensor_value_info("inner", F32, SHAPE)])
    graph.node("If", [condition], "present", then_branch=outer, else_branch=branch(inputs, written=False))
    check_native(graph.model(), tmp_path, "If")


def test_if_with_a_computed_condition_is_refused(tmp_path):
    graph, inputs = cache_graph()
    condition = graph.input("condition", TensorProto.BOOL, [])
    graph.node("If", [condition], "present", then_branch=branch(inputs, written=True),
               else_branch=branch(inputs, written=False))  # fmt: skip
    with pytest.raises(UnsupportedModelError, match=r"If 'node_present' holds TensorScatter.*not a constant"):
        harness.imported(graph.model(), tmp_path)


def loop_body(inputs: list[str]) -> onnx.GraphProto:
    """(iteration, condition, cache) -> (condition, updated cache); iteration 0 adds nothing to the write index."""
    info = helper.make_tensor_value_info
    nodes = [
        helper.make_node("Add", [inputs[2], "i"], ["where"]),
        helper.make_node("TensorScatter", ["carried", inputs[1], "where"], ["written"], axis=2),
        helper.make_node("Identity", ["go"], ["still"]),
    ]
    return helper.make_graph(
        nodes, "body", [info("i", I64, []), info("go", TensorProto.BOOL, []), info("carried", F32, SHAPE)],
        [info("still", TensorProto.BOOL, []), info("written", F32, SHAPE)],
    )  # fmt: skip


@pytest.mark.parametrize("trips", [1, 2, None])
def test_loops_are_refused(trips, tmp_path):
    graph, inputs = cache_graph()
    count = graph.input("trips", I64, []) if trips is None else graph.constant(trips)
    graph.node("Loop", [count, "", inputs[0]], "present", body=loop_body(inputs))
    with pytest.raises(UnsupportedModelError, match=r"Loop 'node_present' holds TensorScatter.*unroll it"):
        harness.imported(graph.model(), tmp_path)


def test_scan_is_refused(tmp_path):
    graph, inputs = cache_graph()
    info = helper.make_tensor_value_info
    nodes = [
        helper.make_node("TensorScatter", ["carried", inputs[1]], ["written"], axis=2),
        helper.make_node("Identity", ["x"], ["y"]),
    ]
    body = helper.make_graph(
        nodes,
        "body",
        [info("carried", F32, SHAPE), info("x", F32, [])],
        [info("written", F32, SHAPE), info("y", F32, [])],
    )
    xs = graph.input("xs", F32, [4])
    graph.node("Scan", [inputs[0], xs], ["present", "ys"], body=body, num_scan_inputs=1)
    graph.output("ys", F32, [4])
    with pytest.raises(UnsupportedModelError, match=r"holds TensorScatter.*inside a Scan body"):
        harness.imported(graph.model(), tmp_path)


def test_control_flow_without_caches_stays(tmp_path):
    graph, inputs = cache_graph()
    flag = graph.input("flag", TensorProto.BOOL, [])
    shape = ["B", 2, "S", 4]

    def body(factor: float) -> onnx.GraphProto:
        value = numpy_helper.from_array(np.array(factor, np.float32), "factor")
        nodes = [helper.make_node("Mul", ["update", "factor"], ["scaled"])]
        return helper.make_graph(nodes, "b", [], [helper.make_tensor_value_info("scaled", F32, shape)], [value])

    scaled = graph.node("If", [flag], "chosen", then_branch=body(2.0), else_branch=body(3.0))
    graph.node("TensorScatter", [inputs[0], scaled, inputs[2]], "present", axis=2)
    result = harness.imported(graph.model(), tmp_path)
    assert [node.op_type for node in result.model.graph.node].count("If") == 1
    for flag_value, factor in ((True, 2.0), (False, 3.0)):
        given = {**feeds(np.random.default_rng(2)), "flag": np.array(flag_value)}
        want = reference.tensor_scatter(given["past"], given["update"] * np.float32(factor), given["write_indices"])
        np.testing.assert_array_equal(harness.run_rewritten(result, given)["present"], want)

"""Updates that go to the plugin: the rewritten model is valid, runs in ONNX Runtime, with TensorScatter's numbers."""

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from cases import decoder_attention, packed_model
from graphs import Graph, scatter_model
from harness import Feeds, imported, random_array, run, run_rewritten
from onnx import TensorProto, helper
from plugin_reference import CAPACITY, feeds_of, reference
from reference import tensor_scatter

from trt_kvcache.errors import UnsupportedModelError
from trt_kvcache.importer import ImportedModel, plan_model
from trt_kvcache.importer.cache_plan import PlanOptions, Route, Target
from trt_kvcache.importer.families.plugin_route import operator_function
from trt_kvcache.plugins.operators import NAMESPACE, OPERATORS, Operator

FULL = PlanOptions(target=Target.TENSORRT)


def operators_of(result: ImportedModel) -> list[str]:
    return [node.op_type for node in result.model.graph.node if node.domain == NAMESPACE]


# The function bodies: every operator against a reference in a few lines of numpy, refusals and wraps included.


def function_model(operator: Operator, feeds: Feeds) -> onnx.ModelProto:
    graph = Graph()
    for name in operator.inputs:
        dims: list[Any] = [f"{name}_{i}" for i in range(feeds[name].ndim)]
        graph.input(name, helper.np_dtype_to_tensor_dtype(feeds[name].dtype), dims)
    graph.node(operator.name, operator.inputs, operator.outputs, NAMESPACE, plugin_namespace=NAMESPACE, aot=1)
    for name in operator.outputs:
        graph.output(name, TensorProto.INT8, [f"{name}_{i}" for i in range(4)])
    return graph.model(24, [NAMESPACE], [operator_function(operator, 24)])


def test_a_model_that_has_the_node_already_is_refused(tmp_path: Path) -> None:
    graph = Graph()
    for name, dims in (("cache_0", ["B", 2, 6, 4]), ("update_0", ["B", 2, "S", 4]), ("write_indices", ["B"])):
        graph.input(name, TensorProto.INT64 if name == "write_indices" else TensorProto.INT8, dims)
    graph.node("KVCacheUpdate", ["cache_0", "update_0", "write_indices"], ["present_0"], NAMESPACE)
    graph.output("present_0", TensorProto.INT8, ["B", 2, 6, 4])
    onnx.save(graph.model(24, [NAMESPACE]), tmp_path / "model.onnx")
    with pytest.raises(
        UnsupportedModelError, match=r"node of this project's plugin \(KVCacheUpdate\).*before its rewrite"
    ):
        plan_model(tmp_path / "model.onnx")


@pytest.mark.few(29)
@pytest.mark.parametrize("name", OPERATORS)
def test_the_function_is_the_operator(name: str) -> None:
    operator = OPERATORS[name]
    rng = np.random.default_rng(list(name.encode()))
    for trial in range(24):
        feeds = feeds_of(operator, rng, trial)
        model = function_model(operator, feeds)
        if trial < 2:
            onnx.checker.check_model(model, full_check=True)
        got, expected = run(model, feeds), reference(operator, feeds)
        assert list(got) == list(operator.outputs)
        for output, value in expected.items():
            np.testing.assert_array_equal(got[output], value, err_msg=f"{output} of trial {trial}")


# The emission: models with TensorScatter, planned for full TensorRT.


Case = tuple[str, str, int, tuple[int, ...], int, bool]
"""Type, mode, axis, the dimensions besides batch and sequence, update length, whether there are write indices."""


def grid() -> Iterator[Case]:
    """Circular updates of several tokens, and caches of other types, over ranks, axes and lengths."""
    places = [(1, (4,)), (-1, (4,)), (1, (2, 4)), (-2, (2, 4)), (3, (2, 4)), (2, (2, 3, 2)), (-1, (2, 1, 3, 2))]
    lengths = itertools.cycle(range(1, CAPACITY + 1))
    for dtype, mode in itertools.product(("FLOAT", "FLOAT16", "BFLOAT16", "INT8", "INT32", "INT64"),
                                         ("linear", "circular")):  # fmt: skip
        if mode == "linear" and dtype.removeprefix("B").startswith("FLOAT"):
            continue
        for (axis, other), indices in itertools.product(places, (True, False)):
            if indices or mode == "linear" or not dtype.removeprefix("B").startswith("FLOAT"):
                yield dtype, mode, axis, other, next(lengths), indices
    for dtype in ("FLOAT8E4M3FN", "INT4", "FLOAT4E2M1"):
        yield dtype, "circular", -2, (2, 4), 4, True


@pytest.mark.few(12)
@pytest.mark.parametrize("case", list(grid()), ids=str)
def test_plugin_nodes_equal_tensor_scatter(
    case: tuple[str, str, int, tuple[int, ...], int, bool], tmp_path: Path
) -> None:
    name, mode, axis, other, length, indices = case
    dtype, rank = TensorProto.DataType.Value(name), len(other) + 2
    shape: list[Any] = list(other)
    shape.insert(axis % rank - 1, CAPACITY)
    result = imported(scatter_model(["B", *shape], axis, "S", dtype, mode, indices), tmp_path, FULL)
    (cache,) = result.plan.caches
    assert cache.route is Route.PLUGIN
    assert operators_of(result) == ["KVCacheUpdateCircular" if mode == "circular" else "KVCacheUpdate"]
    rng = np.random.default_rng(list(str(case).encode()))
    update_shape = [2, *shape]
    update_shape[axis % rank] = length
    past = random_array(rng, dtype, [2, *shape], scale=10.0)
    for _ in range(3):
        feeds: Feeds = {"past": past, "update": random_array(rng, dtype, update_shape)}
        if indices:
            top = 3 * CAPACITY if mode == "circular" else CAPACITY - length + 1
            feeds["write_indices"] = rng.integers(0, top, 2)
        expected = tensor_scatter(past, feeds["update"], feeds.get("write_indices"), axis, mode)
        (got,) = run_rewritten(result, feeds).values()
        np.testing.assert_array_equal(got, expected)
        past = expected


def test_rows_of_four_bits_must_end_on_a_byte(tmp_path: Path) -> None:
    model = scatter_model(("B", 2, 16, 3), dtype=TensorProto.INT4, mode="circular")
    with pytest.raises(
        UnsupportedModelError, match=r"'past' of 'node_present' is int4 with rows of 3 elements.*even size"
    ):
        imported(model, tmp_path, FULL)


# K and V of a layer in one node.

LAYOUTS = {"bnsh": (2, 6, 4), "bsnh": (6, 2, 4), "bsd": (6, 8)}


def layer_feeds(layout: str, rng: np.random.Generator, length: int) -> Feeds:
    dims = LAYOUTS[layout]
    update = tuple(length if d == CAPACITY else d for d in dims)
    query = (2, 4, length, 4) if layout != "bsd" else (2, length, 16)
    feeds = {"query": random_array(rng, TensorProto.FLOAT16, query), "write_indices": rng.integers(0, 20, 2)}
    for name in ("key", "value"):
        feeds[f"past_{name}"] = random_array(rng, TensorProto.FLOAT16, (2, *dims))
        feeds[f"new_{name}"] = random_array(rng, TensorProto.FLOAT16, (2, *update))
    feeds["nonpad_kv_seqlen"] = np.array([6, 5])
    return feeds


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layer_is_one_node(layout: str, tmp_path: Path) -> None:
    """The same caches and the same attention as the model that was given, in every layout."""
    model = decoder_attention(head_size=4, layout=layout, mode="circular", capacity=CAPACITY)
    result = imported(model, tmp_path, FULL)
    assert operators_of(result) == ["KVCacheUpdateCircularPair"]
    (node,) = [n for n in result.model.graph.node if n.domain == NAMESPACE]
    assert list(node.input[:2]) == ["past_key", "past_value"]
    assert list(node.output) == ["present_key", "present_value"]
    assert {a.name: helper.get_attribute_value(a) for a in node.attribute} == {
        "plugin_namespace": b"trt_kvcache", "plugin_version": b"1", "aot": 1
    }  # fmt: skip
    assert {c.present: c.past for c in result.plan.caches if c.in_place} == {
        "present_key": "past_key", "present_value": "past_value"
    }  # fmt: skip
    rng = np.random.default_rng(7)
    for length in (1, 3, 5):
        feeds = layer_feeds(layout, rng, length)
        expected, got = run(model, feeds), run_rewritten(result, feeds)
        for name, value in expected.items():
            if name.startswith("present"):
                np.testing.assert_array_equal(got[name], value)
            else:
                np.testing.assert_allclose(got[name], value, rtol=2e-3, atol=2e-3)


def test_different_write_indices_are_two_nodes(tmp_path: Path) -> None:
    model = decoder_attention(head_size=4, mode="circular", capacity=CAPACITY)
    model.graph.input.append(helper.make_tensor_value_info("other_indices", TensorProto.INT64, ["B"]))
    next(n for n in model.graph.node if "present_value" in n.output).input[2] = "other_indices"
    assert operators_of(imported(model, tmp_path, FULL)) == ["KVCacheUpdateCircular"] * 2


def quantized_model(
    scales: int = 1,
    cache: int = TensorProto.INT8,
    source: int = TensorProto.FLOAT16,
    scale_type: Any = np.float32,
    zero: int | None = 0,
    axis: int = 1,
    packed: bool = False,
    extra_output: bool = False,
) -> onnx.ModelProto:
    """A cache of 8 bits `[B, 2, 6, 4]` that takes quantized updates; its values are floats to whoever reads it."""
    graph = Graph()
    past = graph.input("past", cache, ["B", 2, CAPACITY, 4])
    update = graph.input("update", source, ["T", 2, 4] if packed else ["B", 2, "S", 4])
    indices = graph.input("write_indices", TensorProto.INT64, ["B"])
    scale = graph.constant(0.37 * (1 + np.arange(scales)) if scales else 0.37, scale_type)
    inputs = [update, scale]
    if zero is not None:
        points = np.full((scales,) if scales else (), zero)
        inputs.append(graph.constant(points, helper.tensor_dtype_to_np_dtype(cache)))
    attrs: dict[str, Any] = {"axis": axis} if zero is not None else {"axis": axis, "output_dtype": cache}
    quantized = graph.node("QuantizeLinear", inputs, "quantized", **attrs)
    if packed:
        lengths = graph.input("lengths", TensorProto.INT64, ["B_plus_1"])
        graph.node("TRT_KVCacheUpdate", [past, quantized, indices, lengths], "present", update_form="packed_nhd")
    else:
        graph.node("TensorScatter", [past, quantized, indices], "present", mode="circular")
    graph.output("present", cache, ["B", 2, CAPACITY, 4])
    if extra_output:
        graph.output("quantized", cache, ["B", 2, "S", 4])
    return graph.model()


def quantized_layer(scales: dict[str, float | list[float]]) -> onnx.ModelProto:
    """A layer whose attention reads int8 caches through DequantizeLinear; a scale for all heads, or one for each."""
    graph = Graph()
    query = graph.input("query", TensorProto.FLOAT, ["B", 4, "S", 4])
    indices, read = graph.input("write_indices", TensorProto.INT64, ["B"]), []
    for name, value in scales.items():
        past = graph.input(f"past_{name}", TensorProto.INT8, ["B", 2, CAPACITY, 4])
        update = graph.input(f"new_{name}", TensorProto.FLOAT, ["B", 2, "S", 4])
        scale = graph.constant(value, np.float32)
        zero = graph.constant(np.zeros_like(value, np.int8), np.int8)
        quantized = graph.node("QuantizeLinear", [update, scale, zero], f"quantized_{name}", axis=1)
        present = graph.node("TensorScatter", [past, quantized, indices], f"present_{name}", mode="circular")
        graph.output(present, TensorProto.INT8, ["B", 2, CAPACITY, 4])
        read.append(graph.node("DequantizeLinear", [present, scale, zero], f"read_{name}", axis=1))
    lengths = graph.input("nonpad_kv_seqlen", TensorProto.INT64, ["B"])
    graph.node("Attention", [query, *read, "", "", "", lengths], "output")
    graph.output("output", TensorProto.FLOAT, ["B", 4, "S", 4])
    return graph.model()


PAIR = ["KVCacheUpdateCircularPairQuantized"]


@pytest.mark.parametrize(
    ("key", "value", "nodes"),
    [(0.5, 0.3, PAIR), ([0.5, 0.1], [0.3, 0.2], PAIR), (0.5, [0.3, 0.2], ["KVCacheUpdateCircularQuantized"] * 2)],
    ids=["per tensor", "per head", "one of each"],
)
def test_a_quantized_layer_is_one_node_if_its_scales_are_as_many(
    key: Any, value: Any, nodes: list[str], tmp_path: Path
) -> None:
    model = quantized_layer({"key": key, "value": value})
    result = imported(model, tmp_path, FULL)
    assert operators_of(result) == nodes
    rng = np.random.default_rng(3)
    feeds: Feeds = {"query": random_array(rng, TensorProto.FLOAT, (2, 4, 3, 4)), "write_indices": np.array([4, 13])}
    for name in ("key", "value"):
        feeds[f"past_{name}"] = rng.integers(-100, 100, (2, 2, CAPACITY, 4)).astype(np.int8)
        feeds[f"new_{name}"] = random_array(rng, TensorProto.FLOAT, (2, 2, 3, 4), 20.0)
    feeds["nonpad_kv_seqlen"] = np.array([6, 6])
    expected, got = run(model, feeds), run_rewritten(result, feeds)
    for name in ("present_key", "present_value"):
        np.testing.assert_array_equal(got[name], expected[name])
    np.testing.assert_allclose(got["output"], expected["output"], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("source", ["FLOAT16", "FLOAT"])
@pytest.mark.parametrize("scales", [0, 1, 2])
def test_quantization_on_write_is_quantize_linear(scales: int, source: str, tmp_path: Path) -> None:
    """Halves, ties and saturation: the node alone gives what QuantizeLinear and TensorScatter give."""
    kind = TensorProto.DataType.Value(source)
    result = imported(quantized_model(scales, source=kind), tmp_path, FULL)
    assert operators_of(result) == ["KVCacheUpdateCircularQuantized"]
    assert "QuantizeLinear" not in {n.op_type for n in result.model.graph.node}
    rng = np.random.default_rng(scales)
    ties = (np.arange(-40, 40).reshape(2, 2, 5, 4) + 0.5) * 0.37
    scale = np.full((2,), 0.37, np.float32) if scales < 2 else np.array([0.37, 0.74], np.float32)
    for values in (ties, rng.standard_normal((2, 2, 5, 4)) * 40):
        update = values.astype(helper.tensor_dtype_to_np_dtype(kind))
        past = rng.integers(-100, 100, (2, 2, CAPACITY, 4)).astype(np.int8)
        feeds: Feeds = {"past": past, "update": update, "write_indices": np.array([4, 13])}
        rounded = np.clip(np.rint(update.astype(np.float32) / scale.reshape(1, 2, 1, 1)), -128, 127).astype(np.int8)
        expected = tensor_scatter(past, rounded, feeds["write_indices"], 2, "circular")
        np.testing.assert_array_equal(run_rewritten(result, feeds)["present"], expected)


@pytest.mark.parametrize("zero", [0, None])
def test_float8_quantization_on_write(zero: int | None, tmp_path: Path) -> None:
    model = quantized_model(2, cache=TensorProto.FLOAT8E4M3FN, zero=zero)
    result = imported(model, tmp_path, FULL)
    assert operators_of(result) == ["KVCacheUpdateCircularQuantized"]
    rng = np.random.default_rng(1)
    feeds: Feeds = {
        "past": random_array(rng, TensorProto.FLOAT8E4M3FN, (2, 2, CAPACITY, 4)),
        "update": (rng.standard_normal((2, 2, 5, 4)) * 90).astype(np.float16),
        "write_indices": np.array([4, 13]),
    }
    got, expected = run_rewritten(result, feeds)["present"], run(model, feeds)["present"]
    np.testing.assert_array_equal(got.astype(np.float32), expected.astype(np.float32))


OTHERS: dict[str, dict[str, Any]] = {
    "scales of another axis": {"scales": 4, "axis": 3, "source": TensorProto.FLOAT},
    "division in float16": {"scale_type": np.float16},
    "somebody else reads the quantized update": {"extra_output": True, "source": TensorProto.FLOAT},
}


@pytest.mark.parametrize("what", OTHERS)
def test_other_quantization_stays_a_node(what: str, tmp_path: Path) -> None:
    model = quantized_model(**OTHERS[what])
    result = imported(model, tmp_path, FULL)
    assert operators_of(result) == ["KVCacheUpdateCircular"]
    assert "QuantizeLinear" in {n.op_type for n in result.model.graph.node}
    rng = np.random.default_rng(2)
    feeds: Feeds = {
        "past": rng.integers(-100, 100, (2, 2, CAPACITY, 4)).astype(np.int8),
        "update": random_array(rng, OTHERS[what].get("source", TensorProto.FLOAT16), (2, 2, 3, 4), 20.0),
        "write_indices": np.array([4, 13]),
    }
    np.testing.assert_array_equal(run_rewritten(result, feeds)["present"], run(model, feeds)["present"])


BEFORE_11 = PlanOptions(target=Target.TENSORRT, packed_native=False)


@pytest.mark.parametrize("integer", [TensorProto.INT32, TensorProto.INT64])
@pytest.mark.parametrize("mode", [None, "circular"])
@pytest.mark.parametrize("indices", [True, False])
def test_packed_updates(indices: bool, mode: str | None, integer: int, tmp_path: Path) -> None:
    model = packed_model(indices=indices, mode=mode, integer=integer)
    result = imported(model, tmp_path, BEFORE_11 if mode is None else FULL)
    assert operators_of(result) == ["KVCacheUpdatePackedCircular" if mode else "KVCacheUpdatePacked"]
    assert [c.route for c in result.plan.caches] == [Route.PLUGIN]
    rng = np.random.default_rng(3)
    past = random_array(rng, TensorProto.FLOAT16, (2, 2, 16, 8))
    lengths = np.array([0, 3, 7])
    kind = helper.tensor_dtype_to_np_dtype(integer)
    feeds: Feeds = {"past": past, "update": random_array(rng, TensorProto.FLOAT16, (9, 2, 8)),
                    "lengths": lengths.astype(kind)}  # fmt: skip
    first = np.array([14, 37] if mode else [4, 11])
    if indices:
        feeds["write_indices"] = first.astype(kind)
    expected = past.copy()
    for b, t in [(0, 0), (0, 1), (0, 2), (1, 3), (1, 4), (1, 5), (1, 6)]:
        expected[b, :, ((first[b] if indices else 0) + t - lengths[b]) % 16] = feeds["update"][t]
    np.testing.assert_array_equal(run_rewritten(result, feeds)["present"], expected)


def test_packed_circular_needs_the_plugin(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match=r"'node_present' is circular, .* plan for TensorRT"):
        imported(packed_model(mode="circular"), tmp_path)

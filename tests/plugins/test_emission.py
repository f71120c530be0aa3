"""Updates that go to the plugin: the rewritten model is valid, runs in ONNX Runtime, with TensorScatter's numbers."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from graphs import Graph, scatter_model
from harness import Array, Feeds, imported, random_array, run, run_rewritten
from onnx import TensorProto, helper
from reference import tensor_scatter

from trt_kvcache.errors import UnsupportedModelError
from trt_kvcache.importer import ImportedModel
from trt_kvcache.importer.plan import Fallback, PlanOptions, Route, Target, UpdateForm, UpdateMode
from trt_kvcache.importer.rewrite.plugin_functions import operator_function
from trt_kvcache.plugins.operators import NAMESPACE, OPERATORS, Operator

FULL = PlanOptions(target=Target.TENSORRT)
CAPACITY = 6


def operators_of(result: ImportedModel) -> list[str]:
    return [node.op_type for node in result.model.graph.node if node.domain == NAMESPACE]


# The function bodies: every operator against a reference in a few lines of numpy, refusals and wraps included.


def reference(operator: Operator, feeds: Feeds) -> Feeds:
    """What an operator does, token by token."""
    packed, circular = operator.form is UpdateForm.PACKED_NHD, operator.mode is UpdateMode.CIRCULAR
    batch, _, capacity, _ = feeds["cache_0"].shape
    presents = [feeds[f"cache_{i}"].copy() for i in range(operator.caches)]
    updates = [quantized(feeds, i) if operator.quantized else feeds[f"update_{i}"] for i in range(operator.caches)]
    length = feeds["update_0"].shape[0 if packed else 2]
    errors = np.zeros(batch, np.int32)
    bounds = feeds.get("lengths")
    ascending = not packed or bool((np.diff(bounds) >= 0).all())
    for b in range(batch):
        start, end = (bounds[b], bounds[b + 1]) if packed else (0, length if bounds is None else bounds[b])
        first, count = int(feeds["write_indices"][b]), int(end) - int(start)
        fits = circular or count == 0 or (first >= 0 and first + count <= capacity)
        if not (ascending and 0 <= start <= end <= length and fits):
            errors[b] = 1
            continue
        for t, (update, present) in itertools.product(range(count), zip(updates, presents, strict=True)):
            token = update[start + t] if packed else update[b, :, start + t]
            present[b, :, (first + t) % capacity if circular else first + t] = token
    outputs = {f"present_{i}": p for i, p in enumerate(presents)}
    return outputs | ({"errors": errors} if operator.errors else {})


def quantized(feeds: Feeds, i: int) -> Array:
    """QuantizeLinear in float32: rounded half to even, saturated."""
    scale = feeds[f"scale_{i}"]
    aligned = scale.reshape(-1, *([1] * 2)) if feeds[f"update_{i}"].ndim == 4 else scale.reshape(-1, 1)
    return np.clip(np.rint(feeds[f"update_{i}"].astype(np.float32) / aligned), -128, 127).astype(np.int8)


def feeds_of(operator: Operator, rng: np.random.Generator, trial: int) -> Feeds:
    """Inputs of batch 3, 2 heads; write indices and lengths in range, then beyond, then anything."""
    batch, heads, capacity, length = 3, 2, CAPACITY, int(rng.integers(1, 2 * CAPACITY))
    packed, circular = operator.form is UpdateForm.PACKED_NHD, operator.mode is UpdateMode.CIRCULAR
    source = np.float16 if operator.quantized else np.int8
    index = (np.int32, np.int64)[trial % 2]
    feeds: Feeds = {}
    for i in range(operator.caches):
        size = (4, 2)[i]
        shape = (length, heads, size) if packed else (batch, heads, length, size)
        feeds[f"cache_{i}"] = rng.integers(-100, 100, (batch, heads, capacity, size)).astype(np.int8)
        feeds[f"update_{i}"] = (rng.standard_normal(shape) * 60).astype(source)
        feeds[f"scale_{i}"] = rng.uniform(0.2, 2, (1, heads)[trial % 2]).astype(np.float32)
    reach = 3 * capacity if circular else max(1, capacity - length + 1)
    feeds["write_indices"] = rng.integers(0, reach, batch).astype(index)
    feeds["lengths"] = rng.integers(0, length + 1, batch).astype(index)
    if packed:
        feeds["lengths"] = np.sort(rng.integers(0, length + 1, batch + 1)).astype(index)
    if trial % 3 == 1:
        feeds["write_indices"] = rng.integers(-2, 2 * capacity, batch).astype(index)
    if trial % 3 == 2:
        feeds["lengths"] = rng.integers(-1, length + 2, len(feeds["lengths"])).astype(index)
    return {name: feeds[name] for name in operator.inputs}


def function_model(operator: Operator, feeds: Feeds) -> onnx.ModelProto:
    graph = Graph()
    for name in operator.inputs:
        dims: list[Any] = [f"{name}_{i}" for i in range(feeds[name].ndim)]
        graph.input(name, helper.np_dtype_to_tensor_dtype(feeds[name].dtype), dims)
    graph.node(operator.name, operator.inputs, operator.outputs, NAMESPACE, plugin_namespace=NAMESPACE, aot=1)
    for name in operator.outputs:
        rank = 1 if name == "errors" else 4
        graph.output(name, TensorProto.INT32 if rank == 1 else TensorProto.INT8, [f"{name}_{i}" for i in range(rank)])
    return graph.model(24, [NAMESPACE], [operator_function(operator, 24)])


@pytest.mark.parametrize("name", OPERATORS)
def test_the_function_is_the_operator(name: str) -> None:
    operator = OPERATORS[name]
    rng = np.random.default_rng(list(name.encode()))
    refused = 0
    for trial in range(24):
        feeds = feeds_of(operator, rng, trial)
        model = function_model(operator, feeds)
        if trial < 2:
            onnx.checker.check_model(model, full_check=True)
        got, expected = run(model, feeds), reference(operator, feeds)
        assert list(got) == list(operator.outputs)
        for output, value in expected.items():
            np.testing.assert_array_equal(got[output], value, err_msg=f"{output} of trial {trial}")
        refused += int(expected.get("errors", np.zeros(1)).sum())
    can_refuse = operator.errors and (operator.lengths or operator.mode is UpdateMode.LINEAR)
    assert (refused > 0) == can_refuse


# The emission: models with TensorScatter, planned for full TensorRT.


Case = tuple[str, str, int, tuple[int, ...], int, bool]
"""Type, mode, axis, the dimensions besides batch and sequence, update length, whether there are write indices."""


def grid() -> Iterator[Case]:
    """Circular updates of several tokens, and caches of other types, over ranks, axes and lengths."""
    places = [(1, (4,)), (-1, (4,)), (1, (2, 4)), (-2, (2, 4)), (3, (2, 4)), (2, (2, 3, 2)), (-1, (2, 1, 3, 2))]
    lengths = itertools.cycle(range(1, CAPACITY + 1))
    for dtype, mode in itertools.product(("FLOAT", "FLOAT16", "BFLOAT16", "INT8", "INT32", "BOOL", "UINT8"),
                                         ("linear", "circular")):  # fmt: skip
        if mode == "linear" and dtype.removeprefix("B").startswith("FLOAT"):
            continue
        for (axis, other), indices in itertools.product(places, (True, False)):
            if indices or mode == "linear" or not dtype.removeprefix("B").startswith("FLOAT"):
                yield dtype, mode, axis, other, next(lengths), indices
    for dtype in ("FLOAT8E4M3FN", "INT4", "FLOAT4E2M1", "INT64"):
        yield dtype, "circular", -2, (2, 4), 4, True


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


@pytest.mark.parametrize("options", [PlanOptions(), PlanOptions(target=Target.TENSORRT, fallback=Fallback.FUNCTIONAL)])
def test_no_plugin_where_none_is_wanted(options: PlanOptions, tmp_path: Path) -> None:
    result = imported(scatter_model(mode="circular"), tmp_path, options)
    assert operators_of(result) == []
    assert not result.model.functions

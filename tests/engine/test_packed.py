"""Packed updates, TensorRT's own operator, from a model to an engine."""

from pathlib import Path

import numpy as np
import onnx
import pytest
import reference
from graphs import Graph
from harness import imported, run
from onnx import TensorProto
from runtime.families import turned

from trt_kvcache.importer.cache_plan import CacheDtype, PlanOptions, Route, Target

HALF, I32, I64 = TensorProto.FLOAT16, TensorProto.INT32, TensorProto.INT64


def packed_model(domain: str = "trt", indices: int | None = I64) -> onnx.ModelProto:
    graph = Graph()
    inputs = [
        graph.input("past", HALF, ["B", 2, 16, 8]),
        graph.input("update", HALF, ["T", 2, 8]),
        graph.input("where", indices, ["B"]) if indices else "",
        graph.input("lengths", I32, ["B1"]),
    ]
    graph.node("TRT_KVCacheUpdate", inputs, "present", domain=domain, update_form="packed_nhd")
    graph.output("present", HALF, ["B", 2, 16, 8])
    return graph.model(domains=[domain] if domain else [])


@pytest.mark.parametrize("domain", ["", "trt"])
@pytest.mark.parametrize("indices", [I64, I32, None])
def test_function_body_gives_the_numbers(domain, indices, tmp_path: Path):
    result = imported(packed_model(domain, indices), tmp_path)
    onnx.checker.check_model(result.model, full_check=True)
    rng = np.random.default_rng(0)
    feeds = {
        "past": (rng.standard_normal((3, 2, 16, 8)) * 1e4).astype(np.float16),
        "update": rng.standard_normal((7, 2, 8)).astype(np.float16),
        "lengths": np.array([0, 2, 2, 6], np.int32),  # the last token is padding
    }
    where = np.array([3, 0, 12])
    if indices:
        feeds["where"] = where.astype(np.int32 if indices == I32 else np.int64)
    want = reference.packed_scatter(feeds["past"], feeds["update"], where if indices else None, feeds["lengths"])
    np.testing.assert_array_equal(run(result.model, feeds)["present"], want)


def test_rows_are_quantized_where_they_are_written(tmp_path: Path):
    """Two codes of 4 bits in each int8, and a scale for each row, in caches of one shape but for the last axis."""
    options = PlanOptions(cache_dtype=CacheDtype.INT4, target=Target.TENSORRT)
    result = imported(packed_model(), tmp_path, options)
    assert [(c.past, c.route) for c in result.plan.caches] == [("past", Route.PLUGIN), ("past_scale", Route.NATIVE)]
    rng = np.random.default_rng(0)
    past = {
        "past": rng.integers(-128, 128, (3, 2, 16, 4), np.int8),
        "past_scale": rng.random((3, 2, 16, 1), np.float32),
    }
    update = rng.standard_normal((7, 2, 8)).astype(np.float16)
    where, lengths = np.array([3, 0, 12]), np.array([0, 2, 2, 6], np.int32)
    found = run(result.model, {**past, "update": update, "where": where, "lengths": lengths})
    rotated = turned(update).astype(np.float32)
    scale = np.abs(rotated).max(-1, keepdims=True) / np.float32(7)
    codes = np.round(rotated / scale).astype(np.int64) + 8
    rows = {"past": (codes[..., :4] + 16 * codes[..., 4:] - 128).astype(np.int8), "past_scale": scale}
    for name, written in rows.items():
        want = reference.packed_scatter(past[name], written, where, lengths)
        np.testing.assert_allclose(found[name.replace("past", "present")], want, rtol=1e-6)

"""What quantizers write beside products: biases of int32."""

from __future__ import annotations

from typing import Any

import harness
import numpy as np
import pytest
import trt
from graphs import Graph
from onnx import ModelProto, TensorProto, helper

from trt_kvcache.importer.extensions.quantizers import read

SIZE = 16


def biased(dtype: Any, scales: tuple[int, ...] = (SIZE,), kind: Any = np.int32) -> ModelProto:
    """``x + bias``, as onnxruntime's quantize_static leaves a bias."""
    rng, g = np.random.default_rng(0), Graph()
    of = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    x = g.input("x", of, ["batch", SIZE])
    bias = g.constant(rng.integers(-100, 100, SIZE) * (1 if kind is np.int8 else 1000), kind)
    scale = g.constant(rng.random(scales) * 1e-5 + 1e-5, dtype)
    zero = g.constant(np.zeros(scales), kind)
    g.node("Add", [x, g.node("DequantizeLinear", [bias, scale, zero], axis=0)], "y")
    g.output("y", of, ["batch", SIZE])
    return g.model(opset=21)


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("scales", [(), (SIZE,)])
def test_biases_of_int32_build_and_are_the_same(dtype: Any, scales: tuple[int, ...]) -> None:
    model = biased(dtype, scales)
    feeds = {"x": np.random.default_rng(1).standard_normal((3, SIZE)).astype(dtype)}
    wanted = harness.run(model, feeds)["y"]
    assert "must have type FP8, FP4, Int4, Int8" in trt.parse(model).words
    assert read(model)
    np.testing.assert_allclose(harness.run(model, feeds)["y"], wanted, atol=1e-6 if dtype is np.float32 else 2e-3)
    assert trt.build(model).stage == "built"


def test_weights_of_int8_stay() -> None:
    model = biased(np.float32, kind=np.int8)
    before = model.SerializeToString()
    assert not read(model)
    assert model.SerializeToString() == before
    assert {t.data_type for t in model.graph.initializer} == {TensorProto.FLOAT, TensorProto.INT8}

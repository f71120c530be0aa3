"""Products with quantized weights and zero points in DequantizeLinear, against themselves without, and numpy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnx_graphsurgeon as gs
import onnxruntime as ort
import pytest
from builder import build_in_child
from graphs import Graph
from onnx import TensorProto, helper

from trt_kvcache.importer.normalize.fused.zero_points import shift_zero_points
from trt_kvcache.importer.quantized.signed import sign_weights

Array = np.ndarray[Any, Any]
K, N, BLOCK = 64, 24, 16
KINDS = {4: ml_dtypes.uint4, 8: np.uint8}


def product(
    bits: int = 4, zeros: bool = True, dtype: Any = np.float32, rank: int = 3, readers: int = 1, **attrs: int
) -> tuple[onnx.ModelProto, Array, Array]:
    """A model, its input, and the sum of its products as numpy computes it."""
    rng, top = np.random.default_rng(bits), 2**bits
    numbers, zero = rng.integers(0, top, (K, N)), rng.integers(0, top, (K // BLOCK, N))
    scales = (rng.uniform(0.005, 0.02, zero.shape) / top * 16).astype(dtype)
    x = rng.standard_normal((2, 5, K)[3 - rank :]).astype(dtype)
    graph, kind = Graph(), helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    graph.input("x", kind, x.shape)
    names = [graph.constant(numbers, KINDS[bits]), graph.constant(scales, dtype)]
    names += [graph.constant(zero, KINDS[bits])] if zeros else []
    weight = graph.node("DequantizeLinear", names, **({"axis": 0, "block_size": BLOCK} | attrs))
    outs = [graph.node("MatMul", ["x", weight]) for _ in range(readers)]
    graph.node("Sum", outs, "y")
    graph.output("y", kind, (*x.shape[:-1], N))
    dense = (numbers.reshape(-1, BLOCK, N) - (zero if zeros else 0 * zero)[:, None]) * scales.astype(float)[:, None]
    return graph.model(), x, readers * (x.astype(float) @ dense.reshape(K, N))


def shifted(model: onnx.ModelProto) -> onnx.ModelProto:
    graph = gs.import_onnx(model)
    shift_zero_points(graph)
    result: onnx.ModelProto = gs.export_onnx(graph)
    return result


def run(model: onnx.ModelProto, x: Array) -> Array:
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    result: Array = session.run(None, {"x": x})[0]
    return result


@pytest.mark.few(11)
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize(("rank", "readers"), [(3, 1), (2, 1), (3, 2)])
@pytest.mark.parametrize("zeros", [True, False])
@pytest.mark.parametrize("bits", [4, 8])
def test_zero_points_become_a_product(bits: int, zeros: bool, rank: int, readers: int, dtype: Any) -> None:
    model, x, expected = product(bits, zeros, dtype, rank, readers)
    result = shifted(model)
    onnx.checker.check_model(result, full_check=True)
    share = (2e-6 if dtype == np.float32 else 4e-3) * np.abs(expected).max()
    np.testing.assert_allclose(run(model, x), expected, rtol=0, atol=share)
    np.testing.assert_allclose(run(result, x), expected, rtol=0, atol=share)
    before = run(result, x)
    assert sign_weights(result, Path()) == ()
    assert not {t.data_type for t in result.graph.initializer} & {TensorProto.UINT4, TensorProto.UINT8}
    np.testing.assert_array_equal(run(result, x), before)
    assert build_in_child(result.SerializeToString(), [{}]).stage == "built"


def test_another_reader_keeps_the_zero_points() -> None:
    model, _, _ = product()
    weight = model.graph.node[0].output[0]
    model.graph.output.append(helper.make_tensor_value_info(weight, TensorProto.FLOAT, [K, N]))
    assert list(shifted(model).graph.node) == list(model.graph.node)


def test_weights_along_the_other_axis_keep_their_zero_points() -> None:
    model, _, _ = product()
    for attribute in model.graph.node[0].attribute:
        attribute.i = 1 if attribute.name == "axis" else attribute.i
    assert list(shifted(model).graph.node) == list(model.graph.node)

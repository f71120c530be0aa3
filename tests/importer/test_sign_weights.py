"""Weights whose zero point moves to 0 for TensorRT."""

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from graphs import Graph
from lowering import run
from onnx import TensorProto, helper

from trt_kvcache.errors import UnsupportedModelError
from trt_kvcache.importer.files.signed_weights import for_tensorrt as sign_weights

UINT8, UINT4, INT4, INT8 = TensorProto.UINT8, TensorProto.UINT4, TensorProto.INT4, TensorProto.INT8
HERE = Path()


@pytest.mark.parametrize("scale", [[0.5, -0.5], [0.5, 0.0], [0.5, 0.25]])
def test_signed_8_bits_as_nncf_writes_them(scale: list[float]) -> None:
    g = Graph()
    g.input("x", TensorProto.FLOAT, ["B", 2])
    inputs = [g.constant([[1, -2], [3, -128]], np.int8), g.constant(scale, np.float32)]
    g.MatMul("x", g.node("DequantizeLinear", inputs, axis=1), out="y")
    g.output("y", TensorProto.FLOAT, ["B", 2])
    model = g.model()
    if min(scale) > 0:
        assert sign_weights(model, HERE) == ()
    else:
        with pytest.raises(UnsupportedModelError, match="8-bit weights .* with scales that are not positive"):
            sign_weights(model, HERE)


@pytest.mark.parametrize("zero", [7, 0, None])
def test_other_zero_points_are_refused(zero: int | None) -> None:
    graph = Graph()
    names = [graph.constant(np.arange(16), ml_dtypes.uint4), graph.constant(0.5, np.float32)]
    names += [] if zero is None else [graph.constant(zero, ml_dtypes.uint4)]
    graph.node("DequantizeLinear", names, "y")
    graph.output("y", TensorProto.FLOAT, [16])
    with pytest.raises(UnsupportedModelError, match="'node_y' has uint4 weights .* zero points other than 8"):
        sign_weights(graph.model(), HERE)


def test_weights_that_others_read_stay() -> None:
    graph = Graph()
    weight = graph.constant(np.arange(16), np.uint8)
    graph.DequantizeLinear(weight, graph.constant(0.5, np.float32), graph.constant(128, np.uint8), out="y")
    graph.Cast(weight, out="z", to=TensorProto.INT32)
    graph.output("y", TensorProto.FLOAT, [16])
    graph.output("z", TensorProto.INT32, [16])
    model = graph.model()
    assert sign_weights(model, HERE) == ()
    assert model.graph.initializer[0].data_type == UINT8


@pytest.mark.parametrize("bits", [4, 8])
def test_typed_fields_are_read(bits: int) -> None:
    kind, top = (UINT4, 16) if bits == 4 else (UINT8, 256)
    numbers = np.arange(top)
    graph = Graph()
    scale, zero = graph.constant(0.5, np.float32), helper.make_tensor("zero", kind, [], [top // 2])
    graph.initializers += [helper.make_tensor("w", kind, [top], numbers), zero]
    assert not graph.initializers[-2].HasField("raw_data")
    graph.DequantizeLinear("w", scale, "zero", out="y")
    graph.output("y", TensorProto.FLOAT, [top])
    model = graph.model()
    assert sign_weights(model, HERE) == ()
    assert [t.data_type for t in model.graph.initializer if t.name == "w"] == [INT4 if bits == 4 else INT8]
    np.testing.assert_array_equal(run(model, {})[0], (numbers - top // 2) * 0.5)

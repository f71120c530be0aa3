"""The copy with rounding of a model: whatever shape a weight has, all numbers that it makes move, and by little."""

import numpy as np
import onnxruntime as ort
import pytest
from onnx import ModelProto, TensorProto, helper, numpy_helper

from trt_kvcache.compare.rounding import with_rounding

B, S, H = 2, 5, 6
KINDS = {
    "a matrix on the right": ("MatMul", ["x", "w"], [H, 8], {}),
    "W times the text": ("MatMul", ["w", "x"], [B, 3, S], {}),
    "a matrix on the left": ("MatMul", ["w", "x"], [3, S], {}),
    "the text times a vector": ("MatMul", ["x", "w"], [H], {}),
    "a weight for each sequence": ("MatMul", ["x", "w"], [B, H, 8], {}),
    "embeddings": ("Gather", ["w", "ids"], [9, H], {}),
    "embeddings gathered on axis 1": ("Gather", ["w", "ids"], [H, 9], {"axis": 1}),
    "a table looked up by position, one row for all": ("Gather", ["w", "ids"], [9, 1], {}),
    "a table of vectors of one number": ("Gather", ["w", "ids"], [9], {}),
    "a gain for each token": ("LayerNormalization", ["x", "w"], [S, 1], {"axis": -2}),
    "a norm of several axes": ("LayerNormalization", ["x", "w"], [S, H], {"axis": 1}),
    "an RMS norm": ("RMSNormalization", ["x", "w"], [H], {}),
    "a transposed matrix": ("Gemm", ["row", "w"], [8, H], {"transB": 1}),
    "a convolution": ("Conv", ["x", "w"], [4, S, 3], {"pads": [1, 1]}),
}

WITHOUT_KERNEL = {
    (TensorProto.FLOAT16, "an RMS norm"), (TensorProto.DOUBLE, "an RMS norm"), (TensorProto.DOUBLE, "a convolution"),
}  # fmt: skip


def _model(kind: str, dtype: int) -> ModelProto:
    op, inputs, shape, attributes = KINDS[kind]
    rng, numpy_dtype = np.random.default_rng(0), helper.tensor_dtype_to_np_dtype(dtype)
    weight = numpy_helper.from_array(rng.normal(size=shape).astype(numpy_dtype), "w")
    given = [
        helper.make_tensor_value_info("x", dtype, [B, S, H]),
        helper.make_tensor_value_info("row", dtype, [B, H]),
        helper.make_tensor_value_info("ids", TensorProto.INT64, [B, S]),
    ]
    graph = helper.make_graph(
        [helper.make_node(op, inputs, ["y"], "node", **attributes)], "g", [v for v in given if v.name in inputs],
        [helper.make_tensor_value_info("y", dtype, None)], [weight],
    )  # fmt: skip
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)], ir_version=10)


def _run(model: ModelProto, dtype: int) -> np.ndarray:
    rng, numpy_dtype = np.random.default_rng(1), helper.tensor_dtype_to_np_dtype(dtype)
    feeds = {
        "x": rng.normal(size=(B, S, H)).astype(numpy_dtype), "row": rng.normal(size=(B, H)).astype(numpy_dtype),
        "ids": rng.integers(0, 9, (B, S)),
    }  # fmt: skip
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    (found,) = session.run(None, {i.name: feeds[i.name] for i in session.get_inputs()})
    return np.asarray(found)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.DOUBLE])
def test_every_number_moves_by_no_more_than_its_rounding(kind: str, dtype: int) -> None:
    if (dtype, kind) in WITHOUT_KERNEL:
        pytest.skip("ONNX Runtime has no kernel")
    model, unit = _model(kind, dtype), 2.0**-8
    exact, moved = _run(model, dtype), _run(with_rounding(model, unit, 0), dtype)
    assert exact.shape == moved.shape
    assert exact.dtype == moved.dtype
    own = 2.0**-10 if dtype == TensorProto.FLOAT16 else 0  # of float16 itself, twice
    apart = np.abs(moved.astype(np.float64) - exact) / np.abs(exact)
    assert apart.max() <= 1.01 * unit + own
    assert np.sqrt((apart**2).mean()) > unit / 8
    assert not np.array_equal(moved, _run(with_rounding(model, unit, 1), dtype)), "another seed, other numbers"


def test_numbers_that_no_weight_makes_stay() -> None:
    node = helper.make_node("MatMul", ["x", "other"], ["y"])
    given = [helper.make_tensor_value_info(n, TensorProto.FLOAT, [3, 3]) for n in ("x", "other")]
    graph = helper.make_graph([node], "g", given, [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)])
    model = helper.make_model(graph)
    assert with_rounding(model, 2.0**-8, 0).SerializeToString() == model.SerializeToString()

"""Float32 copies: numbers, shared weights, and transposed matrices."""

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from trt_kvcache.compare.float32_copy import Float32Copies
from trt_kvcache.compare.rewritten_model import Float32Session


@pytest.mark.parametrize("perm", [None, [1, 0], [0, 1]])
@pytest.mark.parametrize("external", [False, True])
def test_a_transposed_matrix_is_stored_once(tmp_path, perm, external):
    """Two copies of a model share both forms of a matrix, and compute what NumPy computes."""
    table = np.random.default_rng(1).normal(size=(70, 70)).astype(np.float16)
    attributes = {} if perm is None else {"perm": perm}
    graph = helper.make_graph(
        [
            helper.make_node("Gather", ["table", "ids"], ["x"]),
            helper.make_node("Transpose", ["table"], ["head"], **attributes),
            helper.make_node("MatMul", ["x", "head"], ["logits"]),
        ],
        "tied",
        [helper.make_tensor_value_info("ids", TensorProto.INT64, [3])],
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT16, [3, 70])],
        [numpy_helper.from_array(table, "table")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
    if external:
        onnx.save(model, tmp_path / "model.onnx", save_as_external_data=True, location="data", size_threshold=0)
        model = onnx.load(tmp_path / "model.onnx", load_external_data=False)
    (tmp_path / "copies").mkdir()
    copies, ids = Float32Copies(tmp_path / "copies"), np.array([5, 0, 69])
    wide = table.astype(np.float32)
    for _ in range(2):
        copy, folder = copies.copy(model, tmp_path)
        had = Float32Session(copy, folder).run({"ids": ids})["logits"]
        np.testing.assert_allclose(had, wide[ids] @ (wide if perm == [0, 1] else wide.T), rtol=1e-5, atol=1e-5)
    folded = perm != [0, 1]
    assert [n.op_type for n in copy.graph.node] == ["Gather", *([] if folded else ["Transpose"]), "MatMul"]
    assert (folder / "float32.data").stat().st_size == wide.nbytes + folded * (-wide.nbytes % 4096 + wide.nbytes)


def test_packed_numbers_stay_as_they_are(tmp_path):
    """Two numbers of 4 bits lie in a byte: reading them one by one would mix them up."""
    codes = np.random.default_rng(2).integers(-8, 8, (64, 64)).astype(ml_dtypes.int4)
    graph = helper.make_graph(
        [
            helper.make_node("Transpose", ["codes"], ["turned"]),
            helper.make_node("DequantizeLinear", ["turned", "scale"], ["weights"]),
            helper.make_node("MatMul", ["x", "weights"], ["y"]),
        ],
        "quantized",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT16, [3, 64])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT16, [3, 64])],
        [numpy_helper.from_array(codes, "codes"), numpy_helper.from_array(np.array(0.5, np.float16), "scale")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    onnx.save(model, tmp_path / "model.onnx", save_as_external_data=True, location="data", size_threshold=0)
    (tmp_path / "copies").mkdir()
    copy, folder = Float32Copies(tmp_path / "copies").copy(
        onnx.load(tmp_path / "model.onnx", load_external_data=False), tmp_path
    )
    assert [n.op_type for n in copy.graph.node] == ["Transpose", "DequantizeLinear", "MatMul"]
    onnx.load_external_data_for_model(copy, str(folder))
    np.testing.assert_array_equal(numpy_helper.to_array(copy.graph.initializer[0]), codes)

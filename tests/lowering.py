"""Operators in bodies of their own, and both run by ONNX Runtime."""

from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from graphs import Graph
from onnx import TensorProto, helper

from trt_kvcache.importer.lower import CONTRIB
from trt_kvcache.importer.simplify import simplify

Array = np.ndarray[Any, Any]


def lowered(model: onnx.ModelProto) -> onnx.ModelProto:
    """A copy with bodies, in operators of ONNX alone."""
    copy = onnx.ModelProto.FromString(model.SerializeToString())
    result = onnx.shape_inference.infer_shapes(simplify(copy)[0], data_prop=True)
    assert all(node.domain in ("", "ai.onnx") for node in result.graph.node)
    assert all(onnx.defs.has(node.op_type, 24, "") for node in result.graph.node)
    if not any(tensor.external_data for tensor in result.graph.initializer):
        onnx.checker.check_model(result, full_check=True)
    return result


def run(model: onnx.ModelProto, feeds: dict[str, Array]) -> list[Array]:
    """The outputs by ONNX Runtime, without optimization."""
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return list(session.run(None, {i.name: feeds[i.name] for i in session.get_inputs()}))


def close(got: Array, expected: Array, share: float) -> None:
    """Both differ by no more than this share of the largest number."""
    assert got.shape == expected.shape
    np.testing.assert_allclose(got.astype(np.float64), expected, rtol=0, atol=share * np.abs(expected).max())


def one_operator(
    op: str,
    feeds: dict[str, Array],
    inputs: list[str],
    outputs: list[str],
    weights: dict[str, Array] | None = None,
    domain: str = CONTRIB,
    kind: int = 0,
    **attrs: Any,
) -> onnx.ModelProto:
    """A model of one node.

    Args:
        op: the operator.
        feeds: inputs of the model.
        inputs: names of the node's inputs; empty: left out.
        outputs: names of its outputs.
        weights: initializers.
        domain: of the operator.
        kind: element type of the outputs; 0: that of the first input.
        attrs: attributes.
    """
    graph = Graph()
    for name, value in feeds.items():
        graph.input(name, helper.np_dtype_to_tensor_dtype(value.dtype), value.shape)
    for name, value in (weights or {}).items():
        graph.initializers.append(onnx.numpy_helper.from_array(value, name))
    graph.node(op, inputs, outputs, domain=domain, **attrs)
    kind = kind or int(helper.np_dtype_to_tensor_dtype(feeds[inputs[0]].dtype))
    for name in filter(None, outputs):
        graph.outputs.append(helper.make_tensor_value_info(name, kind or TensorProto.FLOAT, None))
    return graph.model(24, [CONTRIB])

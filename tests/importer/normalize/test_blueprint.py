"""One operator at a time, by ONNX's reference implementation: as ONNX Runtime computes it."""

from __future__ import annotations

import numpy as np
import onnxruntime as ort
from hypothesis import given
from hypothesis import strategies as st
from onnx import helper

from trt_kvcache.importer.normalize.evidence.blueprint import Array, Blueprint


@st.composite
def paddings(draw: st.DrawFn) -> dict[str, Array]:
    """Inputs of Pad: as much is taken away at each end of an axis, or added there, as leaves something."""
    sizes = draw(st.lists(st.integers(1, 5), min_size=1, max_size=4))
    every = range(len(sizes))
    named = draw(st.booleans())
    axes = draw(st.lists(st.sampled_from(every), min_size=1, unique=True)) if named else list(every)
    begins, ends = [], []
    for axis in axes:
        begin = draw(st.integers(-sizes[axis], 3))
        begins.append(begin)
        ends.append(draw(st.integers(-(sizes[axis] + min(begin, 0)), 3)))
    dtype = draw(st.sampled_from([np.bool_, np.int64, np.float32]))
    data = np.random.default_rng(draw(st.integers(0, 99))).integers(0, 2, sizes).astype(dtype)
    inputs = {"data": data, "pads": np.array(begins + ends, np.int64), "value": np.ones((), dtype)}
    return inputs | ({"axes": np.array(axes, np.int64)} if named else {})


@given(inputs=paddings())
def test_padding_may_take_away(inputs: dict[str, Array]) -> None:
    node = helper.make_node("Pad", list(inputs), ["padded"])
    values = [
        helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(array.dtype), array.shape)
        for name, array in inputs.items()
    ]
    output = helper.make_tensor_value_info("padded", helper.np_dtype_to_tensor_dtype(inputs["data"].dtype), None)
    graph = helper.make_graph([node], "pad", values, [output])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    (expected,) = session.run(None, inputs)
    (found,) = Blueprint(model, {}).evaluate(node, list(inputs.values()))
    np.testing.assert_array_equal(found, expected)
    assert found is not None
    assert found.dtype == expected.dtype

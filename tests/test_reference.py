"""The numpy references that the grids compare against give the outputs that ONNX stores with its node tests."""

import ml_dtypes
import numpy as np
import pytest
from onnx_cases import NodeCase, node_cases
from reference import attention, packed_scatter, tensor_scatter

CASES, LEFT_OUT = node_cases()
SCATTERS = [case for case in CASES if case.node.op_type == "TensorScatter"]
ATTENTIONS = [case for case in CASES if case.node.op_type == "Attention" and not case.has_in_op_cache]


def inputs_by_position(case: NodeCase) -> list[np.ndarray | None]:
    return [case.inputs[name] if name else None for name in case.node.input]


@pytest.mark.parametrize("case", SCATTERS, ids=lambda case: case.name)
def test_tensor_scatter(case: NodeCase) -> None:
    attrs = {k: v.decode() if isinstance(v, bytes) else v for k, v in case.attrs.items()}
    np.testing.assert_array_equal(tensor_scatter(*inputs_by_position(case), **attrs), case.outputs[case.node.output[0]])


@pytest.mark.parametrize("case", ATTENTIONS, ids=lambda case: case.name)
def test_attention(case: NodeCase) -> None:
    inputs = [*inputs_by_position(case), *[None] * 7]
    got, scores = attention(*inputs[:4], inputs[6], **case.attrs)
    bits = {np.dtype(np.float16): 2e-3, np.dtype(ml_dtypes.bfloat16): 2e-2}.get(got.dtype, 1e-5)
    expected = dict(zip(("Y", "", "", "qk"), (case.outputs.get(name) for name in case.node.output), strict=False))
    np.testing.assert_allclose(got.astype(np.float32), expected["Y"].astype(np.float32), rtol=bits, atol=bits)
    if expected.get("qk") is not None:
        np.testing.assert_allclose(scores.astype(np.float32), expected["qk"].astype(np.float32), rtol=bits, atol=bits)


def test_every_operator_is_collected() -> None:
    """Guards against a changed collector that finds nothing."""
    assert len(SCATTERS) >= 3
    assert len(ATTENTIONS) >= 60
    assert all("expanded" in name for name in LEFT_OUT)


def test_packed_scatter_is_a_scatter_per_row() -> None:
    rng = np.random.default_rng(0)
    past = rng.standard_normal((3, 2, 8, 4)).astype(np.float32)
    lengths, indices = np.array([0, 3, 3, 5]), np.array([1, 0, 6])
    update = rng.standard_normal((5, 2, 4)).astype(np.float32)
    got = packed_scatter(past, update, indices, lengths)
    for row in range(3):
        rows = update[lengths[row] : lengths[row + 1]].transpose(1, 0, 2)[None]
        np.testing.assert_array_equal(got[row : row + 1], tensor_scatter(past[row : row + 1], rows, indices[row:]))

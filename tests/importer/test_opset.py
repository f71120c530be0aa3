"""Raising a model to opset 24: the same numbers, and nothing lost on the way."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from harness import imported
from inlined_graphs import input_left_out
from lowering import run
from onnx import parser, version_converter

from trt_kvcache.errors import UnsupportedModelError
from trt_kvcache.importer.protos import opset_version
from trt_kvcache.importer.simplify import OPSET, raise_opset

OLD = """
<ir_version: 8, opset_import: ["" : 17, "my" : 3]>
decoder (float[N,4] x, bool c) => (float[N,1] y, float[N,2] z) {
   [first] mean = If (c) <
      then_branch = a () => (float[N,1] ya) { ya = ReduceMean <axes = [-1]> (x) },
      else_branch = b () => (float[N,1] yb) { yb = ReduceMax <axes = [-1]> (x) }>
   y = Identity (mean)
   z, rest = Split <axis = 1> (x)
}
"""


@pytest.mark.parametrize("taken", [False, True])
def test_same_numbers_bodies_included(taken: bool) -> None:
    model = parser.parse_model(OLD)
    raised = raise_opset(model)
    onnx.checker.check_model(raised, full_check=True)
    assert opset_version(raised) == OPSET
    feeds = {"x": np.arange(12, dtype=np.float32).reshape(3, 4) ** 2, "c": np.array(taken)}
    for before, after in zip(run(model, feeds), run(raised, feeds), strict=True):
        np.testing.assert_array_equal(before, after)


def test_operators_of_later_versions_pass() -> None:
    model = parser.parse_model("""
        <ir_version: 8, opset_import: ["" : 17]>
        g (float[N,4] x, float[4] w) => (float[N,4] y) { n = RMSNormalization (x, w)  y = Gelu (n) }""")
    raised = raise_opset(model)
    onnx.checker.check_model(raised, full_check=True)
    assert [(n.domain, n.op_type) for n in raised.graph.node] == [("", "RMSNormalization"), ("", "Gelu")]


def test_an_old_model_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="opset 10; supported are 11 and later"):
        raise_opset(parser.parse_model(OLD.replace(": 17", ": 10")))


def softmax(axis: str, opset: int = 11) -> onnx.ModelProto:
    """A softmax of scores, whose rank follows from a Reshape as TorchScript wrote it."""
    return parser.parse_model(f"""
        <ir_version: 8, opset_import: ["" : {opset}]>
        g (float[N,S,6] x) => (float[A,B,C,D] y)
        <int64 zero = {{0}}, int64 one = {{1}}, int64[1] heads = {{2}}, int64[1] size = {{3}}> {{
            shape = Shape (x)  n = Gather (shape, zero)  s = Gather (shape, one)
            ns = Unsqueeze <axes = [0]> (n)  ss = Unsqueeze <axes = [0]> (s)
            target = Concat <axis = 0> (ns, ss, heads, size)
            scores = Reshape (x, target)
            rates = Softmax {axis} (scores)
            y = Relu (rates)
        }}""")


@pytest.mark.parametrize("axis", ["<axis = 3>", "<axis = -1>"])
@pytest.mark.parametrize("opset", [11, 12])
def test_softmax_of_old_opsets_stays_along_the_last_axis(axis: str, opset: int) -> None:
    model = softmax(axis, opset)
    raised = raise_opset(model)
    onnx.checker.check_model(raised, full_check=True)
    assert [n.op_type for n in raised.graph.node if n.op_type in ("Flatten", "Softmax", "Relu")] == ["Softmax", "Relu"]
    feeds = {"x": np.random.default_rng(1).standard_normal((2, 5, 6)).astype(np.float32)}
    np.testing.assert_allclose(run(raised, feeds)[0], run(model, feeds)[0], rtol=1e-6)


@pytest.mark.parametrize("axis", ["", "<axis = 2>", "<axis = -2>"])
def test_softmax_of_old_opsets_over_several_axes_is_refused(axis: str) -> None:
    with pytest.raises(UnsupportedModelError, match=r"Softmax '.*' of opset 11 goes over axis -?\d and all after it"):
        raise_opset(softmax(axis))


def test_softmax_of_old_opsets_over_axes_of_unknown_number_is_refused() -> None:
    model = parser.parse_model("""
        <ir_version: 8, opset_import: ["" : 11, "my" : 1]>
        g (float[N,4] x) => (float[N,4] y) {
            z = my.Op (x)  s = Softmax <axis = 1> (z)  w = my.Op (s)  y = Relu (x)
        }""")
    with pytest.raises(UnsupportedModelError, match="of an unknown number; supported is the last axis alone"):
        raise_opset(model)


def test_what_the_converter_cannot_raise_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(model: onnx.ModelProto, version: int) -> onnx.ModelProto:
        raise RuntimeError(
            "/onnx/version_converter/BaseConverter.h:66: adapter_lookup: Assertion `false` failed: "
            "No Adapter From Version $19 for Split"
        )

    monkeypatch.setattr(version_converter, "convert_version", refuse)
    words = r"opset 17 to 24 \(Split writing 'z, rest': No Adapter From Version \$19 for Split\): export it"
    with pytest.raises(UnsupportedModelError, match=words):
        raise_opset(parser.parse_model(OLD))


def test_an_input_that_a_call_leaves_out_is_left_out(tmp_path: Path) -> None:
    result = imported(input_left_out(), tmp_path)
    assert [len(n.input) for n in result.model.graph.node if n.op_type == "LayerNormalization"] == [2]

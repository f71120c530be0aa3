"""Raising a model to opset 24: the same numbers, and nothing lost on the way."""

from pathlib import Path

import numpy as np
import onnx
import pytest
from harness import imported
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
    with pytest.raises(UnsupportedModelError, match="opset 12; the importer supports 13 and later"):
        raise_opset(parser.parse_model(OLD.replace(": 17", ": 12")))


def test_what_the_converter_cannot_raise_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(model: onnx.ModelProto, version: int) -> onnx.ModelProto:
        raise RuntimeError(
            "/onnx/version_converter/BaseConverter.h:66: adapter_lookup: Assertion `false` failed: "
            "No Adapter From Version $19 for Split"
        )

    monkeypatch.setattr(version_converter, "convert_version", refuse)
    words = r"opset 17 to 24 \(Split writing 'z, rest': No Adapter From Version \$19 for Split\): export the"
    with pytest.raises(UnsupportedModelError, match=words):
        raise_opset(parser.parse_model(OLD))


def test_an_input_that_a_call_leaves_out_is_left_out(tmp_path: Path) -> None:
    model = parser.parse_model("""
        <ir_version: 11, opset_import: ["" : 24, "my" : 1]>
        graph (float[B,2,8,4] past, float[B,2,S,4] update, int64[B] write_indices) => (float[B,2,8,4] present)
        <float[4] scale = {1, 1, 1, 1}> {
            new = my.Norm (update, scale)
            present = TensorScatter <axis = 2> (past, new, write_indices)
        }
        <domain: "my", opset_import: ["" : 24]>
        Norm (x, scale, bias) => (y) { y = LayerNormalization (x, scale, bias) }""")
    result = imported(model, tmp_path)
    assert [len(n.input) for n in result.model.graph.node if n.op_type == "LayerNormalization"] == [2]

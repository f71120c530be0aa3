"""IKVCacheUpdateLayer: what the routes of this package build on, beyond the rows of the support matrix."""

from __future__ import annotations

import onnx
import pytest
import tensorrt_rtx
import trt
from cases import BF16, BOOL, FLOAT, HALF, INT64, packed_model, updated
from graphs import Graph, scatter_model
from onnx import TensorProto, helper

NO_ONNX_TYPE = "Failed to convert ONNX date type to TensorRT data type"
NOT_A_CACHE_TYPE = "but must have type Float, Half, or BFloat16"
PACKED = {"B_plus_1": (2, 3, 5)}


@pytest.mark.parametrize("opset", [24, 25, 26, 27, 28])
def test_opsets(opset: int) -> None:
    assert trt.build(scatter_model(opset=opset)).stage == "built"


def test_layer_of_a_padded_update() -> None:
    (layer,) = trt.parse(scatter_model()).updates()
    assert layer.cache_mode == tensorrt_rtx.KVCacheMode.LINEAR
    assert layer.update_form == tensorrt_rtx.AttentionIOForm.PADDED_BHND
    assert [layer.get_input(i).name for i in range(2)] == ["past", "update"]
    assert list(tensorrt_rtx.KVCacheMode.__members__) == ["LINEAR"]


@pytest.mark.parametrize(
    ("dtype", "words"),
    [
        *((name, NO_ONNX_TYPE) for name in ("INT16", "UINT16", "UINT32", "UINT64", "STRING", "COMPLEX64")),
        *((name, NO_ONNX_TYPE) for name in ("FLOAT8E4M3FNUZ", "FLOAT8E5M2", "FLOAT8E5M2FNUZ", "UINT4", "FLOAT8E8M0")),
        ("COMPLEX128", NO_ONNX_TYPE),
        *((name, NOT_A_CACHE_TYPE) for name in ("INT8", "UINT8", "INT32", "INT64", "BOOL")),
        *((name, NOT_A_CACHE_TYPE) for name in ("FLOAT8E4M3FN", "INT4", "FLOAT4E2M1")),
        *((name, "") for name in ("FLOAT", "FLOAT16", "BFLOAT16", "DOUBLE")),
    ],
)
def test_every_dtype_of_the_operator(dtype: str, words: str) -> None:
    outcome = trt.build(scatter_model(dtype=TensorProto.DataType.Value(dtype)))
    assert outcome.stage == ("parse" if words else "built")
    assert words in outcome.words


@pytest.mark.parametrize(
    ("dtype", "stage", "words"),
    [
        *((name, "built", "") for name in ("FLOAT", "FLOAT16", "BFLOAT16", "INT8", "INT32", "INT64", "BOOL", "DOUBLE")),
        *((name, "build", "is not consumed by") for name in ("FLOAT8E4M3FN", "INT4", "FLOAT4E2M1")),
        ("UINT8", "parse", "Found unsupported input type of UINT8"),
        ("INT16", "parse", NO_ONNX_TYPE),
    ],
)
@pytest.mark.parametrize("operator", ["ScatterElements", "Where"])
def test_dtypes_of_plain_operators(operator: str, dtype: str, stage: str, words: str) -> None:
    """The dtypes that a cache can have on the route of plain operators."""
    graph, kind = Graph(), TensorProto.DataType.Value(dtype)
    graph.input("past", kind, ["B", 2, 16, 8])
    if operator == "Where":
        graph.input("update", kind, ["B", 2, 16, 8])
        graph.node("Where", [graph.input("written", BOOL, ["B", 1, 16, 1]), "update", "past"], "present")
    else:
        graph.input("update", kind, ["B", 2, "S", 8])
        indices = graph.input("indices", INT64, ["B", 2, "S", 8])
        graph.node("ScatterElements", ["past", indices, "update"], "present", axis=2)
    graph.output("present", kind, ["B", 2, 16, 8])
    outcome = trt.build(graph.model())
    assert outcome.stage == stage
    assert words in outcome.words


def test_update_longer_than_the_capacity() -> None:
    """Refused where the length is fixed; a profile that allows it is not noticed."""
    fixed = trt.build(scatter_model(length=17))
    assert fixed.stage == "build"
    assert "must be less than or equal to `cache` batch size and max sequence length" in fixed.words
    assert trt.build(scatter_model(), {"S": (1, 2, 17)}).stage == "built"


@pytest.mark.parametrize("options", [{"past_output": True}, {"reader": True}], ids=str)
def test_past_beside_its_update(options: dict[str, bool]) -> None:
    """The past tensor may leave the graph, or be read, although the update overwrites it: nothing warns."""
    assert trt.build(updated(**options)).stage == "built"


@pytest.mark.parametrize("where", ["before", "after"])
def test_identity_hides_the_cache(where: str) -> None:
    """Even a no-op between the update and the graph's input or output fails the build."""
    graph = Graph()
    past = graph.input("past", HALF, ["B", 2, 16, 8])
    update = graph.input("update", HALF, ["B", 2, "S", 8])
    past = graph.node("Identity", [past]) if where == "before" else past
    inner = graph.node("TensorScatter", [past, update], "present" if where == "before" else "inner")
    if where == "after":
        graph.node("Identity", [inner], "present")
    graph.output("present", HALF, ["B", 2, 16, 8])
    outcome = trt.build(graph.model())
    assert outcome.stage == "build"
    assert f"must be a network {'input' if where == 'before' else 'output'}" in outcome.words


def test_update_in_a_function_and_in_an_if() -> None:
    """A function is inlined by the parser; a branch is not a network input's place."""
    body = [helper.make_node("TensorScatter", ["p", "u"], ["o"])]
    function = helper.make_function("own", "Update", ["p", "u"], ["o"], body, [helper.make_opsetid("", 24)])
    graph = Graph()
    graph.input("past", HALF, ["B", 2, 16, 8])
    graph.input("update", HALF, ["B", 2, "S", 8])
    graph.node("Update", ["past", "update"], "present", domain="own")
    graph.output("present", HALF, ["B", 2, 16, 8])
    assert trt.build(graph.model(domains=["own"], functions=[function])).stage == "built"

    def branch(name: str, op: str, inputs: list[str]) -> onnx.GraphProto:
        out = helper.make_tensor_value_info(name, HALF, ["B", 2, 16, 8])
        return helper.make_graph([helper.make_node(op, inputs, [name])], name, [], [out])

    graph = Graph()
    graph.input("past", HALF, ["B", 2, 16, 8])
    graph.input("update", HALF, ["B", 2, "S", 8])
    branches = {
        "then_branch": branch("written", "TensorScatter", ["past", "update"]),
        "else_branch": branch("kept", "Identity", ["past"]),
    }
    graph.node("If", [graph.input("write", BOOL, [])], "present", **branches)
    graph.output("present", HALF, ["B", 2, 16, 8])
    outcome = trt.build(graph.model())
    assert outcome.stage == "build"
    assert "The cache tensor must be a network input" in outcome.words


class TestPacked:
    @pytest.mark.parametrize("domain", ["", "trt.plugins", "any.domain"])
    def test_any_domain(self, domain: str) -> None:
        parsed = trt.parse(packed_model(domain=domain))
        (layer,) = parsed.updates()
        assert layer.update_form == tensorrt_rtx.AttentionIOForm.PACKED_NHD
        assert layer.num_inputs == 4
        assert trt.build_parsed(parsed, PACKED).stage == "built"

    @pytest.mark.parametrize("dtype", [FLOAT, HALF, BF16])
    @pytest.mark.parametrize("integer", [TensorProto.INT32, INT64])
    def test_dtypes(self, dtype: int, integer: int) -> None:
        assert trt.build(packed_model(dtype=dtype, integer=integer), PACKED).stage == "built"

    def test_write_indices_may_be_absent(self) -> None:
        assert trt.build(packed_model(indices=False), PACKED).stage == "built"

    def test_lengths_may_not(self) -> None:
        outcome = trt.build(packed_model(lengths=False))
        assert outcome.stage == "build"
        assert "When update form is kPACKED_NHD, the update lengths tensor must be set" in outcome.words

    @pytest.mark.parametrize(
        ("form", "words"),
        [
            (None, "The update tensor is required to be 4D for padded form, got 3D"),
            ("padded_bhnd", "The update tensor is required to be 4D for padded form, got 3D"),
            ("padded", "Unsupported IO form: padded"),
            ("PACKED_NHD", "Unsupported IO form: PACKED_NHD"),
        ],
    )
    def test_other_forms(self, form: str | None, words: str) -> None:
        outcome = trt.build(packed_model(form), PACKED)
        assert outcome.stage == "parse"
        assert words in outcome.words

    def test_circular(self) -> None:
        outcome = trt.build(packed_model(mode="circular"), PACKED)
        assert outcome.stage == "parse"
        assert "Only linear mode is supported" in outcome.words

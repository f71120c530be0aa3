"""IAttention as the ONNX parser makes it: the silent losses, the head sizes with a kernel, masks and spans."""

from __future__ import annotations

from typing import Any

import onnx
import pytest
import tensorrt_rtx
import trt
from cases import BF16, BOOL, FLOAT, HALF, NO_KERNEL
from graphs import Graph, attention_model
from onnx import TensorProto, helper

NOT_A_MULTIPLE = "CHECK(op->input_layouts().size() > idx) failed"


def parsed_attention(**options: Any) -> tuple[trt.Parsed, Any]:
    """The parsed network, which has to be kept, and its only attention."""
    parsed = trt.parse(attention_model(**options))
    (attention,) = parsed.attentions()
    return parsed, attention


class TestSilentLosses:
    def test_nonpad_kv_seqlen_is_dropped(self) -> None:
        parsed, attention = parsed_attention(nonpad=True)
        assert attention.key_value_lengths is None
        assert attention.mask is None
        assert "nonpad" in [parsed.network.get_input(i).name for i in range(parsed.network.num_inputs)]
        assert trt.build_parsed(parsed).stage == "built"

    @pytest.mark.parametrize("nonpad", [False, True])
    def test_causal_is_upper_left(self, nonpad: bool) -> None:
        parsed, attention = parsed_attention(nonpad=nonpad, is_causal=1)
        assert attention.causal_kind == tensorrt_rtx.CausalMaskKind.UPPER_LEFT
        assert trt.build_parsed(parsed).stage == "built"

    @pytest.mark.parametrize("window", [{"left_window_size": 4}, {"right_window_size": 0}], ids=str)
    def test_windows_are_dropped(self, window: dict[str, int]) -> None:
        parsed, attention = parsed_attention(opset=25, **window)
        assert attention.causal_kind == tensorrt_rtx.CausalMaskKind.NONE
        assert attention.mask is None
        assert trt.build_parsed(parsed).stage == "built"

    def test_short_mask_of_symbolic_length_is_not_padded(self) -> None:
        """A profile in which the mask can never be as long as the keys builds."""
        parsed, attention = parsed_attention(mask=("B", 1, "S", "M"))
        assert tuple(attention.mask.shape) == (-1, 1, -1, -1)
        assert trt.build_parsed(parsed, {"M": (1, 8, 12)}).stage == "built"


@pytest.mark.parametrize("outputs", [2, 3, 4])
def test_surplus_outputs(outputs: int) -> None:
    outcome = trt.build(attention_model(outputs=outputs))
    assert (outcome.stage, "only supports Attention nodes with one output" in outcome.words) == ("parse", True)


@pytest.mark.parametrize("outputs", [1, 3])
def test_in_op_cache(outputs: int) -> None:
    outcome = trt.build(attention_model(past=8, outputs=outputs))
    words = "Setting past_key" if outputs == 1 else "only supports Attention nodes with one output"
    assert (outcome.stage, words in outcome.words) == ("parse", True)


@pytest.mark.parametrize("precision", [1, 10, 11, 16])
def test_softmax_precision(precision: int) -> None:
    outcome = trt.build(attention_model(softmax_precision=precision))
    assert (outcome.stage, "Setting softmax precision is not supported" in outcome.words) == ("parse", True)


def test_unequal_head_sizes_even_decomposable() -> None:
    outcome = trt.build(attention_model(value_head_size=32), patch=trt.decomposable)
    assert (outcome.stage, "Key and Value must have the same shape" in outcome.words) == ("parse", True)


class TestKernels:
    """Which tensors a fused kernel covers, and what `decomposable` adds."""

    @pytest.mark.few(8)
    @pytest.mark.parametrize("mask_dtype", [None, BOOL, HALF])
    @pytest.mark.parametrize("head_size", [4, 8, 9, 12, 16, 24, 100, 128, 255, 256, 257, 260, 320, 512])
    def test_half(self, head_size: int, mask_dtype: int | None) -> None:
        mask = {} if mask_dtype is None else {"mask": ("B", 1, "S", 16), "mask_dtype": mask_dtype}
        model = attention_model(head_size=head_size, **mask)
        bare, split = trt.build(model), trt.build(model, patch=trt.decomposable)
        fused = 9 <= head_size <= 256
        if fused and mask_dtype == BOOL and head_size % 8:
            # The fused kernel is chosen, then fails: allowing it to be split does not help.
            assert {bare.stage, split.stage} == {"build"}
            assert NOT_A_MULTIPLE in split.words
            return
        assert bare.stage == ("built" if fused else "build")
        assert fused or NO_KERNEL in bare.words
        assert split.stage == "built"

    @pytest.mark.parametrize("head_size", [8, 16, 100, 128, 256, 264, 512])
    def test_bfloat16(self, head_size: int) -> None:
        model = attention_model(dtype=BF16, head_size=head_size, mask=("B", 1, "S", 16))
        bare = trt.build(model)
        if head_size == 100:
            assert NOT_A_MULTIPLE in bare.words
            return
        assert bare.stage == ("built" if 16 <= head_size <= 256 else "build")
        assert trt.build(model, patch=trt.decomposable).stage == "built"

    @pytest.mark.few(7)
    @pytest.mark.parametrize("head_size", [4, 7, 16, 100, 256, 320])
    @pytest.mark.parametrize("mask", [None, ("B", 1, "S", 16)], ids=str)
    def test_float(self, head_size: int, mask: tuple[int | str, ...] | None) -> None:
        model = attention_model(dtype=FLOAT, head_size=head_size, mask=mask)
        bare = trt.build(model)
        assert (bare.stage, NO_KERNEL in bare.words) == ("build", True)
        assert trt.build(model, patch=trt.decomposable).stage == "built"

    @pytest.mark.parametrize("dtype", [HALF, BF16])
    @pytest.mark.parametrize("mask_dtype", [None, BOOL, HALF])
    def test_one_query_head(self, dtype: int, mask_dtype: int | None) -> None:
        """With a mask, one head has no fused kernel; without, it has."""
        mask = (
            {}
            if mask_dtype is None
            else {"mask": ("B", 1, "S", 16), "mask_dtype": dtype if mask_dtype != BOOL else BOOL}
        )
        model = attention_model(heads=1, kv_heads=1, dtype=dtype, **mask)
        bare = trt.build(model)
        assert (bare.stage, NO_KERNEL in bare.words) == (("build", True) if mask else ("built", False))
        assert trt.build(model, patch=trt.decomposable).stage == "built"

    @pytest.mark.few(6)
    @pytest.mark.parametrize(("heads", "kv_heads"), [(2, 1), (2, 2), (3, 1), (3, 3), (4, 1), (4, 2), (4, 4), (5, 1)])
    @pytest.mark.parametrize("queries", [1, "S"])
    @pytest.mark.parametrize("mask", [None, ("B", 1, 1, 16)], ids=str)
    def test_one_query_of_few_heads(
        self, mask: tuple[int | str, ...] | None, queries: int | str, heads: int, kv_heads: int
    ) -> None:
        """With one query, fewer than four heads have no fused kernel; a profile that fixes it counts as well."""
        model = attention_model(heads=heads, kv_heads=kv_heads, queries=queries, mask=mask)
        bare = trt.build(model, {"S": (1, 1, 1)})
        assert bare.stage == ("built" if heads >= 4 else "build")
        assert heads >= 4 or NO_KERNEL in bare.words
        assert trt.build(model, {"S": (1, 1, 1)}, patch=trt.decomposable).stage == "built"
        if queries == "S":
            assert trt.build(model).stage == "built"


class TestMasks:
    @pytest.mark.parametrize("shape", [("B", 1, "S", 12), ("S", 12), ("B", 2, "S", 16)], ids=str)
    def test_shapes_that_do_not_broadcast(self, shape: tuple[int | str, ...]) -> None:
        outcome = trt.build(attention_model(mask=shape))
        assert (outcome.stage, "mask must be broadcastable" in outcome.words) == ("parse", True)

    @pytest.mark.parametrize("patch", [None, trt.decomposable])
    def test_float_mask_beside_half(self, patch: Any) -> None:
        outcome = trt.build(attention_model(mask=("B", 1, "S", 16), mask_dtype=FLOAT), patch=patch)
        assert outcome.stage == "build"
        assert "element type (half) differs from input 1's element type (float)" in outcome.words


def test_trt_decomposable_attribute_is_not_onnx() -> None:
    """The parser knows it; the checker does not. That is why it is set on the parsed network."""
    model = attention_model(dtype=FLOAT, TRT_decomposable=1)
    assert trt.build(model).stage == "built"
    with pytest.raises(onnx.checker.ValidationError, match="Unrecognized attribute: TRT_decomposable"):
        onnx.checker.check_model(model)


def test_trt_attention_is_lower_right() -> None:
    """The parser's own operator has lengths and a lower-right causal kind."""
    graph = Graph()
    shapes = {"Q": ("B", 4, "S", 16), "K": ("B", 2, 16, 16), "V": ("B", 2, 16, 16)}
    inputs = [graph.input(name, HALF, shape) for name, shape in shapes.items()]
    lengths = [graph.input(name, TensorProto.INT32, ["B"]) for name in ("q_lens", "kv_lens")]
    graph.node("TRT_Attention", [*inputs, "", *lengths], "Y", causal_kind="lower_right")
    graph.output("Y", HALF, shapes["Q"])
    parsed = trt.parse(graph.model())
    (attention,) = parsed.attentions()
    assert attention.causal_kind == tensorrt_rtx.CausalMaskKind.LOWER_RIGHT
    assert attention.key_value_lengths is not None


def test_function_is_taken_for_the_operator_of_its_name() -> None:
    # The parser looks operators up by name alone: my::Relu, which squares, is built as a ReLU.
    graph = Graph()
    graph.node("Relu", [graph.input("x", TensorProto.FLOAT, ["B", 3])], "y", domain="my")
    graph.output("y", TensorProto.FLOAT, ["B", 3])
    square = helper.make_node("Mul", ["x", "x"], ["y"])
    function = helper.make_function("my", "Relu", ["x"], ["y"], [square], [helper.make_opsetid("", 24)])
    parsed = trt.parse(graph.model(domains=["my"], functions=[function]))
    assert parsed.ok
    assert [parsed.network.get_layer(i).type for i in range(parsed.network.num_layers)] == [
        trt.trt.LayerType.ACTIVATION
    ]

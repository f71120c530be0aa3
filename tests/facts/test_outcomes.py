"""Caches and attention in TensorRT: the rows of the support matrix, and more.

A failure here means that TensorRT changed: what this package does about it is to be looked at again.
"""

from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import onnx
import pytest
import tensorrt_rtx
import trt
from builder import build_in_child
from cases import ALL_CASES, BF16, BOOL, FLOAT, HALF, INT64, NO_KERNEL, Case, packed_model, updated
from graphs import Graph, attention_model, scatter_model
from onnx import TensorProto, helper

Make = Callable[[], onnx.ModelProto]
NO_ONNX_TYPE = "Failed to convert ONNX date type to TensorRT data type"
NOT_A_MULTIPLE = "CHECK(op->input_layouts().size() > idx) failed"
PACKED = {"B_plus_1": (2, 3, 5)}


def moved(operator: str, dtype: str) -> onnx.ModelProto:
    """An update by plain operators."""
    graph, kind = Graph(), TensorProto.DataType.Value(dtype)
    graph.input("past", kind, ["B", 2, 16, 8])
    if operator == "Where":
        graph.input("update", kind, ["B", 2, 16, 8])
        graph.Where(graph.input("written", BOOL, ["B", 1, 16, 1]), "update", "past", out="present")
    else:
        graph.input("update", kind, ["B", 2, "S", 8])
        indices = graph.input("indices", INT64, ["B", 2, "S", 8])
        graph.ScatterElements("past", indices, "update", out="present", axis=2)
    graph.output("present", kind, ["B", 2, 16, 8])
    return graph.model()


def hidden() -> onnx.ModelProto:
    """Even a no-op between the update and the graph's output."""
    graph = Graph()
    inputs = [graph.input("past", HALF, ["B", 2, 16, 8]), graph.input("update", HALF, ["B", 2, "S", 8])]
    graph.Identity(graph.node("TensorScatter", inputs, "inner"), out="present")
    graph.output("present", HALF, ["B", 2, 16, 8])
    return graph.model()


def outcomes() -> Iterator[tuple[str, Make, dict[str, tuple[int, int, int]], str, str]]:
    """A name, a model, ranges of its symbols, the stage at which it fails, and the words."""

    def scatter(**options: Any) -> Make:
        return lambda: scatter_model(**options)

    def packed(*given: Any, **options: Any) -> Make:
        return lambda: packed_model(*given, **options)

    def attention(**options: Any) -> Make:
        return lambda: attention_model(**options)

    for opset in (24, 25, 26, 27, 28):
        yield f"opset {opset}", scatter(opset=opset), {}, "built", ""
    for operator in ("ScatterElements", "Where"):  # types of a cache on the route of plain operators
        for name, stage, words in (
            *((name, "built", "") for name in ("FLOAT", "FLOAT16", "BFLOAT16", "INT8", "INT32", "INT64", "BOOL")),
            *((name, "build", "is not consumed by") for name in ("FLOAT8E4M3FN", "INT4", "FLOAT4E2M1")),
            ("DOUBLE", "built", ""), ("UINT8", "parse", "Found unsupported input type of UINT8"),
            ("INT16", "parse", NO_ONNX_TYPE),
        ):  # fmt: skip
            yield f"{operator} of {name}", lambda o=operator, n=name: moved(o, n), {}, stage, words
    words = "must be less than or equal to `cache` batch size and max sequence length"
    yield "an update longer than the capacity", scatter(length=17), {}, "build", words
    yield "which only a profile allows", scatter(), {"S": (1, 2, 17)}, "built", ""
    yield "past is an output, too", lambda: updated(past_output=True), {}, "built", ""  # and nothing warns
    yield "Identity before", lambda: updated(before="Identity"), {}, "build", "must be a network input"
    yield "Identity after", hidden, {}, "build", "must be a network output"
    for dtype, integer in product((FLOAT, HALF, BF16), (TensorProto.INT32, INT64)):
        yield f"packed {dtype} {integer}", packed(dtype=dtype, integer=integer), PACKED, "built", ""
    yield "packed, no indices", packed(indices=False), PACKED, "built", ""
    words = "When update form is kPACKED_NHD, the update lengths tensor must be set"
    yield "packed, no lengths", packed(lengths=False), {}, "build", words
    yield "packed, circular", packed(mode="circular"), PACKED, "parse", "Only linear mode is supported"
    yield "TRT_decomposable", attention(dtype=FLOAT, TRT_decomposable=1), {}, "built", ""  # which the checker refuses


OUTCOMES = list(outcomes())


@pytest.mark.few(30)
@pytest.mark.parametrize(("make", "ranges", "stage", "words"), [o[1:] for o in OUTCOMES], ids=[o[0] for o in OUTCOMES])
def test_outcome(make: Make, ranges: dict[str, tuple[int, int, int]], stage: str, words: str) -> None:
    outcome = trt.build(make(), ranges)
    assert outcome.stage == stage, str(outcome)
    assert words in outcome.words


def kernels() -> Iterator[tuple[dict[str, Any], dict[str, tuple[int, int, int]], str, bool]]:
    """An attention, ranges, the words where no fused kernel covers it, and whether it builds where it may be split."""

    def masked(mask_dtype: int | None) -> dict[str, Any]:
        return {} if mask_dtype is None else {"mask": ("B", 1, "S", 16), "mask_dtype": mask_dtype}

    for size, kind in product((4, 8, 9, 12, 16, 24, 100, 128, 255, 256, 257, 260, 320, 512), (None, BOOL, HALF)):
        # The fused kernel is chosen, then fails: allowing it to be split does not help.
        odd = 9 <= size <= 256 and kind == BOOL and size % 8
        words = NOT_A_MULTIPLE if odd else "" if 9 <= size <= 256 else NO_KERNEL
        yield {"head_size": size, **masked(kind)}, {}, words, not odd
    for size in (8, 16, 100, 128, 256, 264, 512):
        words = NOT_A_MULTIPLE if size == 100 else "" if 16 <= size <= 256 else NO_KERNEL
        yield {"dtype": BF16, "head_size": size, **masked(BOOL)}, {}, words, size != 100
    for size, kind in product((4, 7, 16, 100, 256, 320), (None, BOOL)):
        yield {"dtype": FLOAT, "head_size": size, **masked(kind)}, {}, NO_KERNEL, True
    for dtype in (HALF, BF16):  # one head: with a mask, it has no fused kernel
        for mask in ({}, masked(BOOL), masked(dtype)):
            yield {"dtype": dtype, "heads": 1, "kv_heads": 1, **mask}, {}, NO_KERNEL if mask else "", True
    for heads, kv_heads in ((2, 1), (2, 2), (3, 1), (3, 3), (4, 1), (4, 2), (4, 4), (5, 1)):
        # One query of few heads; a profile that fixes it counts as well.
        for queries, more in product((1, "S"), ({}, {"mask": ("B", 1, 1, 16)})):
            options = {"heads": heads, "kv_heads": kv_heads, "queries": queries, **more}
            yield options, {"S": (1, 1, 1)}, "" if heads >= 4 else NO_KERNEL, True
            if queries == "S":
                yield options, {}, "", True


@pytest.mark.few(8)
@pytest.mark.parametrize(("options", "ranges", "words", "splits"), list(kernels()), ids=str)
def test_which_attentions_have_a_kernel(
    options: dict[str, Any], ranges: dict[str, tuple[int, int, int]], words: str, splits: bool
) -> None:
    model = attention_model(**options)
    bare, split = trt.build(model, ranges), trt.build(model, ranges, patch=trt.decomposable)
    assert (bare.stage, words in bare.words) == ("build" if words else "built", True)
    assert split.stage == ("built" if splits else "build")


KINDS = tensorrt_rtx.CausalMaskKind


@pytest.mark.parametrize(("options", "expected"), [
    ({"nonpad": True}, {"key_value_lengths": None, "mask": None}),
    ({"is_causal": 1}, {"causal_kind": KINDS.UPPER_LEFT}),
    ({"is_causal": 1, "nonpad": True}, {"causal_kind": KINDS.UPPER_LEFT, "key_value_lengths": None}),
    ({"opset": 25, "left_window_size": 4}, {"causal_kind": KINDS.NONE, "mask": None}),
    ({"opset": 25, "right_window_size": 0}, {"causal_kind": KINDS.NONE, "mask": None}),
], ids=str)  # fmt: skip
def test_silent_losses(options: dict[str, Any], expected: dict[str, Any]) -> None:
    """Lengths and windows are dropped, a causal mask is aligned to the upper left; all builds."""
    parsed = trt.parse(attention_model(**options))
    (attention,) = parsed.attentions()
    assert {name: getattr(attention, name) for name in expected} == expected
    assert trt.build_parsed(parsed).stage == "built"


@pytest.mark.parametrize("patch", [None, trt.decomposable])
def test_float_mask_beside_half(patch: Any) -> None:
    outcome = trt.build(attention_model(mask=("B", 1, "S", 16), mask_dtype=FLOAT), patch=patch)
    assert outcome.stage == "build"
    assert "element type (half) differs from input 1's element type (float)" in outcome.words


def test_function_is_taken_for_the_operator_of_its_name() -> None:
    """The parser looks operators up by name alone: my::Relu, which squares, is built as a ReLU."""
    graph = Graph()
    graph.Relu(graph.input("x", TensorProto.FLOAT, ["B", 3]), out="y", domain="my")
    graph.output("y", TensorProto.FLOAT, ["B", 3])
    square = helper.make_node("Mul", ["x", "x"], ["y"])
    function = helper.make_function("my", "Relu", ["x"], ["y"], [square], [helper.make_opsetid("", 24)])
    parsed = trt.parse(graph.model(domains=["my"], functions=[function]))
    layers = [parsed.network.get_layer(i).type for i in range(parsed.network.num_layers)]
    assert (parsed.ok, layers) == (True, [trt.trt.LayerType.ACTIVATION])


def sharing(shared: str, dtype: int, scales: tuple[float, float]) -> bytes:
    """Two attentions; `shared` names the inputs that they have in common."""
    graph = Graph()
    shapes = {"q": ["B", 4, "S", 16], "k": ["B", 2, 16, 16], "v": ["B", 2, 16, 16]}
    for i, scale in enumerate(scales):
        inputs = []
        for name, shape in shapes.items():
            full = name if name in shared else f"{name}{i}"
            known = full in [value.name for value in graph.inputs]
            inputs.append(full if known else graph.input(full, dtype, shape))
        graph.node("Attention", inputs, f"y{i}", scale=scale)
        graph.output(f"y{i}", dtype, shapes["q"])
    return graph.model().SerializeToString()


SHARED = [(shared, dtype, (0.25, 0.25), False) for shared in ("q", "k", "kv", "qkv") for dtype in (HALF, BF16)]
SHARED += [("q", FLOAT, (0.25, 0.25), False)]
SHARED += [(shared, HALF, scales, True)
           for shared, scales in (("v", (0.25, 0.25)), ("", (0.25, 0.25)), ("qkv", (0.25, 0.5)))]  # fmt: skip


@pytest.mark.few(5)
@pytest.mark.parametrize(("shared", "dtype", "scales", "well"), SHARED, ids=str)
def test_attentions_that_share_a_tensor(shared: str, dtype: int, scales: tuple[float, float], well: bool) -> None:
    """The parser scales Q and K of each node; where two get the same product, the builder dies, or fails.

    A shared V is harmless, and so is anything shared under different scales. The process that builds is a child.
    """
    found = build_in_child(sharing(shared, dtype, scales), [{}]).stage
    assert found == "built" if well else found in ("crash", "build")


# Every row of the support matrix in the native ONNX parser and builder.


@pytest.mark.few(36)
@pytest.mark.parametrize("case", ALL_CASES, ids=lambda case: case.key)
def test_native_outcome(case: Case) -> None:
    """Stage and words of the failure, or none."""
    if case.native.stage == "crash":
        assert build_in_child(case.model().SerializeToString(), [dict(case.ranges)]).stage == "crash"
        return
    outcome = trt.build(case.model(), case.ranges)
    assert outcome.stage == case.native.stage, str(outcome)
    assert case.native.words in outcome.words

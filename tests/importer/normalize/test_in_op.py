"""Attention with a past against its canonical form, over decodes on ONNX Runtime."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import harness
import numpy as np
import onnx
import onnx_graphsurgeon as gs
import pytest
from graphs import Graph
from held_models import (
    CAPACITY,
    TYPES,
    Layer,
    attention_attrs,
    cache_inputs,
    check_decode,
    finish,
    mask_feeds,
    normalized,
    op_types,
    projected,
    session,
    windows_as_masks,
)
from onnx import TensorProto, helper

from trt_kvcache.errors import InvalidModelError, UnsupportedModelError
from trt_kvcache.importer.normalize.fused.in_op import lower_presents
from trt_kvcache.importer.plan import PlanOptions, Route

HEADS, KV_HEADS, SIZE, WIDTH = 4, 2, 16, 24
CHUNKS = [5, 1, 1, 4, 1, 3]


def layer(
    dtype: Any = np.float32,
    rank: int = 3,
    value_size: int = SIZE,
    mask: str = "",
    opset: int = 24,
    cache_heads: int | str = KV_HEADS,
    outputs: int = 3,
    **attrs: Any,
) -> Layer:
    """One Attention with a past; `mask` names a maker below."""
    graph = Graph()
    code = TYPES[dtype]
    graph.input("x", code, ["B", "S", WIDTH])
    sizes = {"q": HEADS * SIZE, "k": KV_HEADS * SIZE, "v": KV_HEADS * value_size}
    inputs = projected(graph, dtype, WIDTH, sizes)
    if rank == 4:
        for i, (heads, size) in enumerate(((HEADS, SIZE), (KV_HEADS, SIZE), (KV_HEADS, value_size))):
            split = graph.node("Reshape", [inputs[i], graph.constant([0, 0, heads, size])])
            inputs[i] = graph.node("Transpose", [split], perm=[0, 2, 1, 3])
    else:
        attrs |= {"q_num_heads": HEADS, "kv_num_heads": KV_HEADS}
    cache_inputs(graph, code, KV_HEADS, SIZE, value_size)
    graph.input("attention_mask", TensorProto.INT64, ["B", "T"])
    inputs += [MASKS[mask](graph) if mask else "", "past_k", "past_v"]
    names = ["attended", "present_k", "present_v", "qk"][:outputs]
    graph.node("Attention", inputs, names, **attrs)
    y = "attended"
    if rank == 4:
        rows = graph.node("Transpose", [y], perm=[0, 2, 1, 3])
        y = graph.node("Reshape", [rows, graph.constant([0, 0, HEADS * value_size])])
    graph.node("Identity", [y], "y")
    graph.output("y", code, ["B", "S", HEADS * value_size])
    if outputs > 3:
        graph.output("qk", code, ["B", HEADS, "S", "T"])
    return Layer(finish(graph, opset), dtype, KV_HEADS, SIZE, value_size, WIDTH, mask_feeds)


def padding(graph: Graph) -> str:
    """mobius: attention_mask as bool [B, 1, S, T]."""
    shown = graph.node("Cast", ["attention_mask"], to=TensorProto.BOOL)
    ones = [graph.node("Shape", ["x"], start=0, end=2), graph.node("Shape", ["attention_mask"], start=1)]
    shape = graph.node("Concat", ones, axis=0)
    expanded = graph.node("Expand", [graph.node("Unsqueeze", [shown, graph.constant([1])]), shape])
    return graph.node("Unsqueeze", [expanded, graph.constant([1])])


def _rows(graph: Graph) -> tuple[str, str]:
    total = graph.node("Squeeze", [graph.node("Shape", ["attention_mask"], start=1)])
    new = graph.node("Squeeze", [graph.node("Shape", ["x"], start=1, end=2)])
    keys = graph.node("Range", [graph.constant(0), total, graph.constant(1)])
    queries = graph.node("Range", [graph.node("Sub", [total, new]), total, graph.constant(1)])
    return keys, graph.node("Unsqueeze", [queries, graph.constant([1])])


def causal(graph: Graph) -> str:
    return graph.node("Unsqueeze", [graph.node("LessOrEqual", _rows(graph)), graph.constant([0, 1])])


def window(graph: Graph) -> str:
    keys, queries = _rows(graph)
    near = graph.node("Greater", [keys, graph.node("Sub", [queries, graph.constant(3)])])
    both = graph.node("And", [near, graph.node("LessOrEqual", [keys, queries])])
    return graph.node("And", [graph.node("Unsqueeze", [both, graph.constant([0, 1])]), padding(graph)])


def additive(graph: Graph) -> str:
    return graph.node("Where", [causal(graph), graph.constant(0, np.float32), graph.constant(-3.4e38, np.float32)])


def near(graph: Graph) -> str:
    """mobius-onnx, GPT-Neo: a window alone; that nothing behind the query is seen is left to is_causal."""
    keys, queries = _rows(graph)
    shown = graph.node("Less", [graph.node("Sub", [queries, keys]), graph.constant(3)])
    return graph.node("And", [graph.node("Unsqueeze", [shown, graph.constant([0, 1])]), padding(graph)])


def near_added(graph: Graph) -> str:
    return graph.node("Where", [near(graph), graph.constant(0, np.float32), graph.constant(-3.4e38, np.float32)])


def odd(graph: Graph) -> str:
    """Every third key."""
    keys, queries = _rows(graph)
    third = graph.node("Equal", [graph.node("Mod", [keys, graph.constant(3)]), graph.constant(0)])
    return graph.node("And", [third, graph.node("GreaterOrEqual", [queries, graph.constant([[0]])])])


def short(graph: Graph) -> str:
    """Over the first key only; ONNX hides the rest."""
    return graph.node("Slice", [causal(graph), *(graph.constant([n]) for n in (0, 1, 3))])


MASKS = {f.__name__: f for f in (padding, causal, window, additive, near, near_added, odd, short)}


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("rank", [3, 4])
@pytest.mark.parametrize("opset", [23, 24, 25])
def test_decode(dtype: Any, rank: int, opset: int) -> None:
    check_decode(layer(dtype, rank, opset=opset, is_causal=1), CHUNKS, batch=2)


@pytest.mark.parametrize(
    ("options", "attrs"),
    [
        ({"is_causal": 1, "mask": "padding"}, {"is_causal": 1}),
        ({"is_causal": 0, "mask": "padding"}, {"is_causal": 0}),
        ({"is_causal": 0}, {"is_causal": 0}),
        ({"is_causal": 0, "mask": "causal"}, {"is_causal": 1}),
        ({"is_causal": 1, "mask": "causal"}, {"is_causal": 1}),
        ({"is_causal": 0, "mask": "additive"}, {"is_causal": 1}),
        ({"is_causal": 1, "scale": 0.4, "softcap": 1.5}, {"softcap": pytest.approx(1.5), "scale": pytest.approx(0.4)}),
        ({"is_causal": 1, "softmax_precision": 1}, {"softmax_precision": 1}),
        ({"is_causal": 1, "value_size": 8}, {"is_causal": 1}),
        ({"is_causal": 1, "value_size": 8, "rank": 4}, {"is_causal": 1}),
    ],
    ids=str,
)
def test_options(options: dict[str, Any], attrs: dict[str, Any]) -> None:
    case = layer(**options)
    result = normalized(case.model)
    assert attrs.items() <= attention_attrs(result).items()
    check_decode(case, CHUNKS, 2, result)


def test_canonical_form() -> None:
    result = normalized(layer(is_causal=1, mask="padding").model)
    assert op_types(result).count("TensorScatter") == 2
    node = next(n for n in result.graph.node if n.op_type == "Attention")
    assert list(node.input[1:]) == ["present_k", "present_v", "", "", "", "nonpad_kv_seqlen"]
    assert list(node.output[1:]) == []


@pytest.mark.parametrize("attrs", [{}, {"mask": "padding"}])
def test_window_attribute_is_kept(attrs: dict[str, Any]) -> None:
    """Left windows count the keys before the query's own, with and without a past. ONNX Runtime lacks them."""
    case = layer(opset=25, is_causal=1, left_window_size=2, **attrs)
    assert attention_attrs(normalized(case.model))["left_window_size"] == 2
    masked = layer(is_causal=1, mask="window")
    assert attention_attrs(normalized(masked.model))["left_window_size"] == 2
    check_decode(masked, CHUNKS, 2, windows_as_masks(normalized(case.model)))


@pytest.mark.parametrize("mask", ["near", "near_added"])
def test_a_window_beside_is_causal(mask: str) -> None:
    case = layer(is_causal=1, mask=mask)
    result = normalized(case.model)
    assert {"is_causal": 1, "left_window_size": 2}.items() <= attention_attrs(result).items()
    check_decode(case, CHUNKS, 2, windows_as_masks(result))


def test_a_window_without_is_causal() -> None:
    """It lets a query see keys behind it."""
    with pytest.raises(UnsupportedModelError, match=r"the mask of 'node_attended' .* sees .* keys, from \d+ to"):
        normalized(layer(is_causal=0, mask="near").model)


def test_windows_meet() -> None:
    """A window as a mask beside a wider one as an attribute: the narrower one holds."""
    case = layer(opset=25, is_causal=1, left_window_size=9, mask="window")
    assert attention_attrs(normalized(case.model))["left_window_size"] == 2


def test_right_window_of_none_is_causal() -> None:
    result = normalized(layer(opset=25, left_window_size=3, right_window_size=0).model)
    assert {"is_causal": 1, "left_window_size": 3}.items() <= attention_attrs(result).items()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"mask": "odd", "is_causal": 1}, "the mask of 'node_attended' is none of the supported ones"),
        ({"mask": "short"}, "supported are masks over all of them"),
        ({"opset": 25, "right_window_size": 2}, "lets a query see 2 keys after its own"),
        ({"outputs": 4}, "gives its scores as an output"),
    ],
    ids=str,
)
def test_refusals(options: dict[str, Any], words: str) -> None:
    with pytest.raises(UnsupportedModelError, match=words):
        normalized(layer(**options).model)


def test_one_past_only() -> None:
    case = layer(is_causal=1)
    next(n for n in case.model.graph.node if n.op_type == "Attention").input[5] = ""
    with pytest.raises(InvalidModelError, match="has only one of past_key and past_value"):
        normalized(case.model)


def test_a_past_that_is_computed() -> None:
    case = layer(is_causal=1)
    node = next(n for n in case.model.graph.node if n.op_type == "Attention")
    case.model.graph.node.insert(0, helper.make_node("Abs", ["past_k"], ["made"], name="make"))
    node.input[4] = "made"
    with pytest.raises(UnsupportedModelError, match="the past 'made' of Attention 'node_attended' is no graph input"):
        normalized(case.model)


def test_lengths_beside_a_past() -> None:
    case = layer(is_causal=1)
    node = next(n for n in case.model.graph.node if n.op_type == "Attention")
    node.input.append("lengths")
    case.model.graph.input.append(helper.make_tensor_value_info("lengths", TensorProto.INT64, ["B"]))
    with pytest.raises(InvalidModelError, match="both a past and nonpad_kv_seqlen"):
        normalized(case.model)


def test_mask_of_the_caller() -> None:
    """A bool mask over all keys stays the caller's, now over the rows of the cache."""
    case = layer(is_causal=1)
    node = next(n for n in case.model.graph.node if n.op_type == "Attention")
    node.input[3] = "mask"
    case.model.graph.input.append(helper.make_tensor_value_info("mask", TensorProto.BOOL, ["B", 1, "S", "T"]))
    result = normalized(case.model)
    attention = next(n for n in result.graph.node if n.op_type == "Attention")
    assert attention.input[3] == "mask"
    assert attention_attrs(result)["is_causal"] == 1


@pytest.mark.few(2)
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("options", [{"is_causal": 1, "mask": "padding"}, {"rank": 4, "is_causal": 1}], ids=str)
def test_builds_with_one_cache_layer_each(dtype: Any, options: dict[str, Any], tmp_path: Path) -> None:
    result = harness.imported(layer(dtype, **options).model, tmp_path, PlanOptions(capacity=CAPACITY))
    assert [(c.route, c.idiom) for c in result.plan.caches] == [(Route.NATIVE, "Attention")] * 2
    outcome = harness.build(result)
    assert outcome.stage == "built", outcome.words


@pytest.mark.parametrize("rank", [3, 4])
@pytest.mark.parametrize(
    "outputs", [["y", "present_k", "present_v"], ["y", "", "present_v"], ["y", "present_k", "", "qk"]]
)
def test_presents_without_a_past(rank: int, outputs: list[str]) -> None:
    graph = Graph()
    rng = np.random.default_rng(8)
    feeds = {}
    for name, heads, length in (("q", HEADS, 3), ("k", KV_HEADS, 5), ("v", KV_HEADS, 5)):
        shape = [2, length, heads * SIZE] if rank == 3 else [2, heads, length, SIZE]
        graph.input(name, TensorProto.FLOAT, shape)
        feeds[name] = rng.standard_normal(shape).astype(np.float32)
    attrs = {"q_num_heads": HEADS, "kv_num_heads": KV_HEADS} if rank == 3 else {}
    graph.node("Attention", ["q", "k", "v"], outputs, **attrs)
    for name in filter(None, outputs):
        size = {"y": 3 if rank == 3 else 4}.get(name, 4)
        graph.output(name, TensorProto.FLOAT, [f"{name}{i}" for i in range(size)])
    model = graph.model(24)
    lowered = gs.import_onnx(model)
    lower_presents(lowered)
    result = gs.export_onnx(lowered)
    onnx.checker.check_model(result, full_check=True)
    attention = next(n for n in result.graph.node if n.op_type == "Attention")
    assert not any(attention.output[1:3])
    names = [name for name in outputs if name]
    for before, after in zip(session(model).run(names, feeds), session(result).run(names, feeds), strict=True):
        np.testing.assert_array_equal(after, before)


def test_attention_without_presents_stays() -> None:
    model = layer(is_causal=1).model
    graph = gs.import_onnx(model)
    lower_presents(graph)
    assert list(gs.export_onnx(graph).graph.node) == list(model.graph.node)

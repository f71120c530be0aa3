"""MultiHeadAttention against its canonical form, over decodes on ONNX Runtime."""

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
from trt_kvcache.importer.normalize.fused.contrib import CONTRIB
from trt_kvcache.importer.normalize.fused.mha import lower_mha
from trt_kvcache.importer.normalize.fused.operators import find_held
from trt_kvcache.importer.plan import PlanOptions, Route
from trt_kvcache.importer.simplify import raise_opset

HEADS, SIZE, WIDTH = 4, 16, 24
CHUNKS = [5, 1, 1, 4, 1, 3]


def layer(
    dtype: Any = np.float32,
    bias: bool = False,
    padding: str = "",
    score_bias: str = "",
    op: str = "MultiHeadAttention",
    extra: dict[int, str] | None = None,
    outputs: int = 3,
    **attrs: Any,
) -> Layer:
    graph = Graph()
    code = TYPES[dtype]
    graph.input("x", code, ["B", "S", WIDTH])
    inputs = projected(graph, dtype, WIDTH, dict.fromkeys(("q", "k", "v"), HEADS * SIZE))
    cache_inputs(graph, code, HEADS, "head_size", "head_size")
    graph.input("attention_mask", TensorProto.INT64, ["B", "T"])
    own = np.random.default_rng(4).standard_normal(3 * HEADS * SIZE)
    inputs.append(graph.constant(own, dtype) if bias else "")
    mask = graph.node("Cast", ["attention_mask"], to=TensorProto.INT32)
    if padding == "other":
        mask = graph.node("Sub", [mask, graph.constant(1, np.int32)])
    inputs += [mask if padding else "", _BIASES[score_bias](graph, dtype) if score_bias else "", "past_k", "past_v"]
    given = dict(extra or {})
    for index in range(len(inputs), max(given, default=0) + 1):
        inputs.append(graph.input(given[index], TensorProto.INT32, [1]) if index in given else "")
    names = ["y", "present_k", "present_v", "qk"][:outputs]
    graph.node(op, inputs, names, domain=CONTRIB, num_heads=HEADS, **attrs)
    graph.output("y", code, ["B", "S", HEADS * SIZE])
    if outputs > 3:
        graph.output("qk", code, ["B", HEADS, "S", "T"])
    return Layer(finish(graph, 20), dtype, HEADS, SIZE, SIZE, WIDTH, mask_feeds)


def _causal_bias(graph: Graph, dtype: Any) -> str:
    total = graph.node("Squeeze", [graph.node("Shape", ["attention_mask"], start=1)])
    new = graph.node("Squeeze", [graph.node("Shape", ["x"], start=1, end=2)])
    keys = graph.node("Range", [graph.constant(0), total, graph.constant(1)])
    queries = graph.node("Range", [graph.node("Sub", [total, new]), total, graph.constant(1)])
    shown = graph.node("LessOrEqual", [keys, graph.node("Unsqueeze", [queries, graph.constant([1])])])
    return _added(graph, shown, dtype)


def _window_bias(graph: Graph, dtype: Any) -> str:
    """All but three keys up to the query's own, and none behind it: that is left to `unidirectional`."""
    total = graph.node("Squeeze", [graph.node("Shape", ["attention_mask"], start=1)])
    new = graph.node("Squeeze", [graph.node("Shape", ["x"], start=1, end=2)])
    keys = graph.node("Range", [graph.constant(0), total, graph.constant(1)])
    queries = graph.node("Range", [graph.node("Sub", [total, new]), total, graph.constant(1)])
    ages = graph.node("Sub", [graph.node("Unsqueeze", [queries, graph.constant([1])]), keys])
    return _added(graph, graph.node("Less", [ages, graph.constant(3)]), dtype)


def _added(graph: Graph, shown: str, dtype: Any) -> str:
    values = [graph.constant(v, dtype) for v in (0, np.finfo(dtype).min)]
    return graph.node("Unsqueeze", [graph.node("Where", [shown, *values]), graph.constant([0, 1])])


_BIASES = {"causal": _causal_bias, "window": _window_bias}


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("unidirectional", [0, 1])
def test_decode(dtype: Any, bias: bool, unidirectional: int) -> None:
    case = layer(dtype, bias, unidirectional=unidirectional)
    result = normalized(case.model)
    assert attention_attrs(result)["is_causal"] == unidirectional
    check_decode(case, CHUNKS, 2, result)


@pytest.mark.parametrize(
    ("options", "causal"),
    [
        ({"padding": "given", "unidirectional": 1}, 1),
        ({"padding": "given"}, 0),
        ({"score_bias": "causal"}, 1),
        ({"score_bias": "causal", "dtype": np.float16, "padding": "given", "bias": True}, 1),
        ({"scale": 0.3, "unidirectional": 1}, 1),
    ],
    ids=str,
)
def test_options(options: dict[str, Any], causal: int) -> None:
    case = layer(**options)
    result = normalized(case.model)
    assert attention_attrs(result)["is_causal"] == causal
    check_decode(case, CHUNKS, 2, result)


def test_a_window_beside_unidirectional() -> None:
    case = layer(score_bias="window", unidirectional=1)
    result = normalized(case.model)
    assert {"is_causal": 1, "left_window_size": 2}.items() <= attention_attrs(result).items()
    check_decode(case, CHUNKS, 2, windows_as_masks(result))
    with pytest.raises(UnsupportedModelError, match="is none of the supported ones"):
        normalized(layer(score_bias="window").model)


def test_canonical_form() -> None:
    result = normalized(layer(unidirectional=1, padding="given", bias=True).model)
    ops = op_types(result)
    assert ops.count("TensorScatter") == 2
    assert ops.count("Attention") == 1
    assert "MultiHeadAttention" not in ops


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"padding": "other"}, "hides something else than the padding mask"),
        ({"extra": {8: "past_length"}}, "takes past_sequence_length or cache_indirection"),
        ({"outputs": 4}, "gives its scores as an output"),
        ({"op": "DecoderMaskedMultiHeadAttention"}, "keeps its keys in one shared, reordered buffer"),
    ],
    ids=str,
)
def test_refusals(options: dict[str, Any], words: str) -> None:
    with pytest.raises(UnsupportedModelError, match=words):
        normalized(layer(**options).model)


def test_packed_inputs_are_refused() -> None:
    case = layer()
    node = next(n for n in case.model.graph.node if n.op_type == "MultiHeadAttention")
    node.input[1] = node.input[2] = ""
    with pytest.raises(UnsupportedModelError, match="has packed inputs"):
        normalized(case.model)


@pytest.mark.parametrize("missing", [6, 7])
def test_one_past_only(missing: int) -> None:
    case = layer()
    next(n for n in case.model.graph.node if n.op_type == "MultiHeadAttention").input[missing] = ""
    with pytest.raises(InvalidModelError, match="has only one of past_key and past_value"):
        normalized(case.model)


def cross(rank: int, value_size: int = SIZE, bias: bool = False, **attrs: Any) -> onnx.ModelProto:
    graph = Graph()
    graph.input("q", TensorProto.FLOAT, ["B", "S", HEADS * SIZE])
    for name, size in (("k", SIZE), ("v", value_size)):
        shape = ["B", "L", HEADS * size] if rank == 3 else ["B", HEADS, "L", size]
        graph.input(name, TensorProto.FLOAT, shape)
    own = np.random.default_rng(4).standard_normal(HEADS * (2 * SIZE + value_size))
    inputs = ["q", "k", "v", graph.constant(own, np.float32) if bias else "", "", "b"]
    graph.input("b", TensorProto.FLOAT, [1, 1, "S", "L"])
    graph.node("MultiHeadAttention", inputs, "y", domain=CONTRIB, num_heads=HEADS, **attrs)
    graph.output("y", TensorProto.FLOAT, ["B", "S", HEADS * value_size])
    return graph.model(20, [CONTRIB])


@pytest.mark.parametrize(
    ("rank", "options"),
    [(3, {}), (3, {"bias": True}), (3, {"value_size": 8, "bias": True}), (4, {}), (3, {"scale": 0.2})],
    ids=str,
)
def test_without_a_past(rank: int, options: dict[str, Any]) -> None:
    model = cross(rank, **options)
    graph = gs.import_onnx(raise_opset(model))
    lower_mha(graph)
    assert find_held(graph) == []
    result = gs.export_onnx(graph)
    onnx.checker.check_model(result, full_check=True)
    assert "MultiHeadAttention" not in op_types(result)
    rng = np.random.default_rng(6)
    value_size = options.get("value_size", SIZE)
    sizes = {"k": SIZE, "v": value_size}
    feeds = {"q": rng.standard_normal((2, 3, HEADS * SIZE)), "b": rng.standard_normal((1, 1, 3, 7))}
    feeds |= {n: rng.standard_normal((2, 7, HEADS * s) if rank == 3 else (2, HEADS, 7, s)) for n, s in sizes.items()}
    floats = {name: value.astype(np.float32) for name, value in feeds.items()}
    (before,), (after,) = (session(m).run(["y"], floats) for m in (model, result))
    np.testing.assert_allclose(after, before, atol=1e-5)


def test_a_present_without_a_past_is_refused() -> None:
    model = cross(3)
    node = model.graph.node[0]
    node.output.extend(["present_k", "present_v"])
    model.graph.output.append(helper.make_tensor_value_info("present_k", TensorProto.FLOAT, ["B", HEADS, "L", SIZE]))
    graph = gs.import_onnx(raise_opset(model))
    with pytest.raises(UnsupportedModelError, match="gives a present 'present_k' and takes no past"):
        lower_mha(graph)


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("options", [{"unidirectional": 1, "bias": True}, {"score_bias": "causal"}], ids=str)
def test_builds_with_one_cache_layer_each(dtype: Any, options: dict[str, Any], tmp_path: Path) -> None:
    result = harness.imported(layer(dtype, **options).model, tmp_path, PlanOptions(capacity=CAPACITY))
    assert [(c.route, c.idiom) for c in result.plan.caches] == [(Route.NATIVE, "MultiHeadAttention")] * 2
    outcome = harness.build(result)
    assert outcome.stage == "built", outcome.words

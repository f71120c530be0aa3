"""Fused operators against what they are lowered to, both run by ONNX Runtime."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_graphsurgeon as gs
import onnxruntime as ort
import pytest
from builder import build_in_child
from graphs import Graph
from onnx import TensorProto, helper
from stored import MODELS

from trt_kvcache.errors import InvalidModelError, UnsupportedModelError
from trt_kvcache.importer import import_model
from trt_kvcache.importer.normalize.fused.contrib import CONTRIB, lower_contrib
from trt_kvcache.verify import verify_import

Array = np.ndarray[Any, Any]
HALF, FLOAT, INT64 = TensorProto.FLOAT16, TensorProto.FLOAT, TensorProto.INT64
DTYPES = [np.float32, np.float16]
RANDOM = np.random.default_rng(7)


def random(dtype: Any, *shape: int, scale: float = 3.0) -> Array:
    return (RANDOM.standard_normal(shape) * scale).astype(dtype)


def run(model: onnx.ModelProto, feeds: dict[str, Array]) -> list[Array]:
    options = ort.SessionOptions()
    options.log_severity_level = 4
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return list(session.run(None, feeds))


def make(
    op: str, feeds: dict[str, Array], inputs: list[str], outputs: list[str], domain: str = CONTRIB, **attrs: Any
) -> onnx.ModelProto:
    graph = Graph()
    for name, value in feeds.items():
        graph.input(name, helper.np_dtype_to_tensor_dtype(value.dtype), value.shape)
    graph.node(op, inputs, outputs, domain=domain, **attrs)
    main = helper.np_dtype_to_tensor_dtype(feeds[inputs[0]].dtype)
    for name in outputs:
        if name:
            graph.outputs.append(helper.make_tensor_value_info(name, FLOAT if name in ("mean", "inv") else main, None))
    return graph.model(24, [CONTRIB])


def lowered(model: onnx.ModelProto) -> onnx.ModelProto:
    graph = gs.import_onnx(model)
    lower_contrib(graph)
    nodes = {id(node) for node in graph.nodes}
    assert {id(reader) for tensor in graph.tensors().values() for reader in tensor.outputs} <= nodes
    result: onnx.ModelProto = gs.export_onnx(graph)
    assert all(node.domain in ("", "ai.onnx") for node in result.graph.node)
    assert all(onnx.defs.has(node.op_type, 24, "") for node in result.graph.node)
    assert [o.name for o in result.graph.output] == [o.name for o in model.graph.output]
    return result


def check_same(model: onnx.ModelProto, feeds: dict[str, Array], exact: bool = True) -> onnx.ModelProto:
    result = lowered(model)
    for expected, got in zip(run(model, feeds), run(result, feeds), strict=True):
        assert expected.dtype == got.dtype
        assert expected.shape == got.shape
        if exact:
            np.testing.assert_array_equal(got, expected)
        else:  # two roundings of fp16 at values up to 16; a few of fp32
            tolerance = 4e-3 if expected.dtype == np.float16 else 4e-6
            np.testing.assert_allclose(got, expected, rtol=tolerance, atol=tolerance)
    return result


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("axis", [-1, 2, 1])
@pytest.mark.parametrize("epsilon", [1e-6, 1e-2])
def test_simplified_layer_norm(dtype: Any, axis: int, epsilon: float) -> None:
    x = random(dtype, 2, 5, 64)
    feeds = {"x": x, "g": random(dtype, *x.shape[axis:])}
    model = make("SimplifiedLayerNormalization", feeds, ["x", "g"], ["y"], "", axis=axis, epsilon=epsilon, stash_type=1)
    result = check_same(model, feeds)
    assert [node.op_type for node in result.graph.node] == ["RMSNormalization"]


def test_simplified_layer_norm_with_scale_of_another_type() -> None:
    feeds = {"x": random(np.float16, 2, 5, 64), "g": random(np.float32, 64)}
    model = make("SimplifiedLayerNormalization", feeds, ["x", "g"], ["y"], "")
    model.graph.output[0].type.tensor_type.elem_type = FLOAT
    check_same(model, feeds)


def test_simplified_layer_norm_in_the_contrib_domain_is_the_same_operator() -> None:
    feeds = {"x": random(np.float32, 2, 5, 64), "g": random(np.float32, 64)}
    default = lowered(make("SimplifiedLayerNormalization", feeds, ["x", "g"], ["y"], "", epsilon=1e-3))
    contrib = lowered(make("SimplifiedLayerNormalization", feeds, ["x", "g"], ["y"], epsilon=1e-3))
    assert list(default.graph.node[0].attribute) == list(contrib.graph.node[0].attribute)
    np.testing.assert_array_equal(run(default, feeds)[0], run(contrib, feeds)[0])


@pytest.mark.parametrize("axis", [-1, 1])
def test_simplified_layer_norm_gives_the_inverse_deviation(axis: int) -> None:
    x = random(np.float32, 2, 5, 64)
    feeds = {"x": x, "g": random(np.float32, *x.shape[axis:])}
    check_same(make("SimplifiedLayerNormalization", feeds, ["x", "g"], ["y", "inv"], "", axis=axis), feeds, exact=False)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("outputs", [["y"], ["y", "", "", "sum"], ["y", "", "inv", "sum"]])
@pytest.mark.parametrize("shape", [(2, 5, 64), (10, 64)])
def test_skip_simplified_layer_norm(dtype: Any, bias: bool, outputs: list[str], shape: tuple[int, ...]) -> None:
    feeds = {"x": random(dtype, *shape), "skip": random(dtype, *shape), "g": random(dtype, 64)}
    if bias:
        feeds["b"] = random(dtype, 64)
    inputs = ["x", "skip", "g", "b"][: len(feeds)]
    op = "SkipSimplifiedLayerNormalization"
    check_same(make(op, feeds, inputs, outputs, epsilon=1e-5), feeds, exact=False)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("beta", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("skip", [(2, 5, 64), (1, 5, 64), (5, 64)])
@pytest.mark.parametrize("outputs", [["y"], ["y", "", "", "sum"]])
def test_skip_layer_norm(dtype: Any, beta: bool, bias: bool, skip: tuple[int, ...], outputs: list[str]) -> None:
    feeds = {"x": random(dtype, 2, 5, 64), "skip": random(dtype, *skip), "g": random(dtype, 64)}
    if beta:
        feeds["beta"] = random(dtype, 64)
    if bias:
        feeds["b"] = random(dtype, 64)
    inputs = ["x", "skip", "g", "beta" if beta else "", "b" if bias else ""]
    while not inputs[-1]:
        inputs.pop()
    check_same(make("SkipLayerNormalization", feeds, inputs, outputs, epsilon=1e-5), feeds, exact=False)


def test_skip_layer_norm_gives_mean_and_deviation() -> None:
    feeds = {"x": random(np.float32, 2, 5, 64), "skip": random(np.float32, 2, 5, 64), "g": random(np.float32, 64)}
    model = make("SkipLayerNormalization", feeds, ["x", "skip", "g"], ["y", "mean", "inv", "sum"], epsilon=1e-3)
    _, mean, inverse, total = run(lowered(model), feeds)
    np.testing.assert_allclose(mean, total.mean(-1, keepdims=True), atol=1e-5)
    np.testing.assert_allclose(inverse, 1 / np.sqrt(total.var(-1, keepdims=True) + 1e-3), rtol=1e-5)


def embedded(dtype: Any, segments: bool, positions: bool = True, mask: bool = False) -> tuple[onnx.ModelProto, Any]:
    tables = {name: random(dtype, 20, 32, scale=1.0) for name in ("w", "p", "t")}
    rows = {name: RANDOM.integers(0, 20, (2, 5)).astype(np.int32) for name in ("ids", "kinds", "places")}
    feeds = rows | tables | {"g": random(dtype, 32), "beta": random(dtype, 32), "mask": np.ones((2, 5), np.int32)}
    names = ["ids", "kinds" if segments else "", "w", "p", "t" if segments else "", "g", "beta", "mask" if mask else ""]
    names += ["places"] if positions else []
    feeds = {name: value for name, value in feeds.items() if name in names}
    model = make("EmbedLayerNormalization", feeds, names, ["y", "counts", "sum"], epsilon=1e-5)
    kind = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    del model.graph.output[:]
    model.graph.output.extend(helper.make_tensor_value_info(name, kind, None) for name in ("y", "sum"))
    return model, feeds


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("segments", [False, True])
def test_embeddings(dtype: Any, segments: bool) -> None:
    model, feeds = embedded(dtype, segments)
    check_same(model, feeds, exact=False)


@pytest.mark.parametrize(("given", "words"), [({"positions": False}, "no position_ids"), ({"mask": True}, "a mask")])
def test_embeddings_refuse(given: dict[str, bool], words: str) -> None:
    with pytest.raises(UnsupportedModelError, match=f"has {words}.*enable_embed_layer_norm"):
        lowered(embedded(np.float32, False, **given)[0])


def test_mean_of_an_rms_norm_is_refused() -> None:
    feeds = {"x": random(np.float32, 2, 5, 64), "skip": random(np.float32, 2, 5, 64), "g": random(np.float32, 64)}
    model = make("SkipSimplifiedLayerNormalization", feeds, ["x", "skip", "g"], ["y", "mean"])
    with pytest.raises(
        UnsupportedModelError, match="'mean' of com.microsoft::SkipSimplifiedLayerNormalization 'node_y'"
    ):
        lowered(model)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("op", "bias"), [("Gelu", False), ("FastGelu", False), ("FastGelu", True), ("BiasGelu", True)])
def test_gelu(dtype: Any, op: str, bias: bool) -> None:
    feeds = {"x": random(dtype, 2, 5, 64)} | ({"b": random(dtype, 64)} if bias else {})
    check_same(make(op, feeds, list(feeds), ["y"]), feeds, exact=dtype == np.float32)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("attrs", [{}, {"alpha": 1.0}, {"alpha": 0.5}])
def test_quick_gelu(dtype: Any, attrs: dict[str, float]) -> None:
    feeds = {"x": random(dtype, 2, 5, 64)}
    check_same(make("QuickGelu", feeds, ["x"], ["y"], **attrs), feeds, exact=False)


def test_quick_gelu_of_a_tensor_without_a_type() -> None:
    graph = Graph()
    graph.input("x", HALF, [4, 8])
    graph.node("FusedMatMul", ["x", "x"], "z", domain=CONTRIB, transB=1, alpha=0.25)
    graph.node("QuickGelu", ["z"], "y", domain=CONTRIB)
    graph.output("y", HALF, [4, 4])
    check_same(graph.model(24, [CONTRIB]), {"x": random(np.float16, 4, 8)}, exact=False)


@pytest.mark.parametrize("activation", ["Relu", "Tanh", "Sigmoid", "LeakyRelu"])
@pytest.mark.parametrize("bias", [True, False])
def test_fused_gemm(activation: str, bias: bool) -> None:
    feeds = {"a": random(np.float32, 5, 4), "b": random(np.float32, 6, 5)}
    feeds |= {"c": random(np.float32, 6)} if bias else {}
    attrs: dict[str, Any] = {"activation": activation, "alpha": 0.5, "beta": 2.0, "transA": 1, "transB": 1}
    attrs |= {"activation_alpha": 0.25} if activation == "LeakyRelu" else {}
    check_same(make("FusedGemm", feeds, list(feeds), ["y"], **attrs), feeds, exact=False)


def test_a_gemm_fused_with_another_activation_is_refused() -> None:
    feeds = {"a": random(np.float32, 4, 5), "b": random(np.float32, 5, 6)}
    model = make("FusedGemm", feeds, ["a", "b"], ["y"], activation="HardSigmoid", activation_alpha=0.1)
    with pytest.raises(UnsupportedModelError, match="activation 'HardSigmoid' with activation_alpha"):
        lower_contrib(gs.import_onnx(model))


@pytest.mark.parametrize("activation", ["none", "silu", "swish"])
@pytest.mark.parametrize("bias", [True, False])
def test_causal_conv_with_state(activation: str, bias: bool) -> None:
    feeds = {"x": random(np.float32, 2, 6, 5), "w": random(np.float32, 6, 1, 4), "past": random(np.float32, 2, 6, 3)}
    feeds |= {"b": random(np.float32, 6)} if bias else {}
    names = ["x", "w", "b" if bias else "", "past"]
    check_same(make("CausalConvWithState", feeds, names, ["y", "s"], activation=activation, ndim=1), feeds, exact=False)


def test_a_causal_conv_without_a_past_is_refused() -> None:
    feeds = {"x": random(np.float32, 2, 6, 5), "w": random(np.float32, 6, 1, 4)}
    with pytest.raises(UnsupportedModelError, match="CausalConvWithState.* no past"):
        lower_contrib(gs.import_onnx(make("CausalConvWithState", feeds, ["x", "w"], ["y"])))


def _raw(effective: Array, swap: int, batch: int) -> Array:
    """The input that FusedMatMul turns into `effective`."""
    value = np.swapaxes(effective, -1, -2) if swap else effective
    return np.ascontiguousarray(np.moveaxis(value, -2, 0) if batch else value)


@pytest.mark.parametrize(("ta", "tb", "tba", "tbb"), list(itertools.product((0, 1), repeat=4)))
def test_fused_matmul(ta: int, tb: int, tba: int, tbb: int) -> None:
    a, b = random(np.float32, 2, 3, 4, 5), random(np.float32, 2, 3, 5, 6)
    feeds = {"a": _raw(a, ta, tba), "b": _raw(b, tb, tbb)}
    attrs = {"alpha": 1.5, "transA": ta, "transB": tb, "transBatchA": tba, "transBatchB": tbb}
    result = check_same(make("FusedMatMul", feeds, ["a", "b"], ["y"], **attrs), feeds, exact=False)
    np.testing.assert_allclose(run(result, feeds)[0], 1.5 * np.matmul(a, b), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("a", "b"), [((4,), (4, 3)), ((2, 4), (4,))])
def test_fused_matmul_does_not_transpose_vectors(a: tuple[int, ...], b: tuple[int, ...]) -> None:
    feeds = {"a": random(np.float32, *a), "b": random(np.float32, *b)}
    attrs = {"transA": int(len(a) == 1), "transB": int(len(b) == 1)}
    check_same(make("FusedMatMul", feeds, ["a", "b"], ["y"], **attrs), feeds, exact=False)


def test_fused_matmul_of_unknown_rank_is_refused() -> None:
    feeds = {"a": random(np.float32, 4, 4), "b": random(np.float32, 4, 4)}
    model = make("FusedMatMul", feeds, ["a", "b"], ["y"], transA=1)
    model.graph.input[0].type.tensor_type.ClearField("shape")
    with pytest.raises(UnsupportedModelError, match="rank is not in the model"):
        lowered(model)


@pytest.mark.parametrize("op", ["MatMulBnb4", "MatMulInteger16"])
def test_quantized_weights_are_refused_by_name(op: str) -> None:
    feeds = {"x": random(np.float32, 2, 64)}
    with pytest.raises(UnsupportedModelError, match=f"com.microsoft::{op} 'node_y' computes on quantized weights"):
        lowered(make(op, feeds, ["x", "x"], ["y"]))


def test_other_operators_stay_as_they_are() -> None:
    feeds = {"x": random(np.float32, 2, 3, 8), "g": random(np.float32, 8)}
    model = make("LayerNormalization", feeds, ["x", "g"], ["y", "mean", "inv"], "", axis=-1)
    graph = gs.import_onnx(model)
    lower_contrib(graph)
    assert list(gs.export_onnx(graph).graph.node) == list(model.graph.node)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rank", [3, 4])
@pytest.mark.parametrize("offset", [False, True])
@pytest.mark.parametrize("interleaved", [0, 1])
@pytest.mark.parametrize("attrs", [{}, {"num_heads": 4}, {"num_heads": 4, "rotary_embedding_dim": 8}])
def test_rotary_embedding(dtype: Any, rank: int, offset: bool, interleaved: int, attrs: dict[str, int]) -> None:
    half = attrs.get("rotary_embedding_dim", 16) // 2
    feeds = {
        "x": random(dtype, 2, 3, 64) if rank == 3 else random(dtype, 2, 4, 3, 16),
        "p": np.array([2]) if offset else np.array([[1, 0, 5], [4, 9, 2]]),
        "cos": random(dtype, 10, half),
        "sin": random(dtype, 10, half),
    }
    model = make("RotaryEmbedding", feeds, list(feeds), ["y"], interleaved=interleaved, **attrs)
    result = check_same(model, feeds)
    rotary = next(node for node in result.graph.node if node.op_type == "RotaryEmbedding")
    heads = [a.i for a in rotary.attribute if a.name == "num_heads"]
    assert heads == ([4] if rank == 3 else [])  # TensorRT for RTX dies on a 3-D input without


ROTARY = {
    "x": np.zeros((2, 3, 64), np.float32),
    "p": np.zeros((2, 3), np.int64),
    "cos": np.zeros((10, 8), np.float32),
    "sin": np.zeros((10, 8), np.float32),
}


@pytest.mark.parametrize(
    ("attrs", "words"), [({"scale": 2.0}, "has scale=2.0"), ({"is_packed_batching": 1}, "is_packed_batching=1")]
)
def test_rotary_embedding_refuses(attrs: dict[str, Any], words: str) -> None:
    with pytest.raises(UnsupportedModelError, match=words):
        lowered(make("RotaryEmbedding", ROTARY, list(ROTARY), ["y"], **attrs))


def test_rotary_embedding_needs_shapes() -> None:
    model = make("RotaryEmbedding", ROTARY, list(ROTARY), ["y"])
    model.graph.input[2].type.tensor_type.shape.dim[1].dim_param = "half"
    with pytest.raises(UnsupportedModelError, match="has no num_heads"):
        lowered(model)
    model.graph.input[0].type.tensor_type.ClearField("shape")
    with pytest.raises(UnsupportedModelError, match="of known rank 3 or 4"):
        lowered(model)


def test_rotary_embedding_with_caches_that_do_not_fit() -> None:
    feeds = ROTARY | {"cos": np.zeros((10, 9), np.float32)}
    with pytest.raises(InvalidModelError, match="rotates 64 values by caches for heads of 18"):
        lowered(make("RotaryEmbedding", feeds, list(feeds), ["y"]))


@pytest.mark.few(13)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rank", [3, 4])
@pytest.mark.parametrize("part", [0, 16])
@pytest.mark.parametrize("interleaved", [0, 1])
@pytest.mark.parametrize("layout", [0, 1])
def test_rotary_embedding_by_planes(dtype: Any, rank: int, part: int, interleaved: int, layout: int) -> None:
    size = part + 4 if part else 16
    for sections in ([2, 3, 3], [4, 2, 2], [1, 1, 6], [8, 0, 0], [0, 8, 0], [0, 0, 8], [0, 1, 7]):
        feeds = {
            "x": random(dtype, 2, 3, 4 * size) if rank == 3 else random(dtype, 2, 4, 3, size),
            "p": RANDOM.integers(0, 10, (3, 2, 3)),
            "cos": random(dtype, 10, 8),
            "sin": random(dtype, 10, 8),
        }
        attrs = {"mrope_section": sections, "mrope_layout": layout, "num_heads": 4, "rotary_embedding_dim": part}
        check_same(make("MRotaryEmbedding", feeds, list(feeds), ["y"], interleaved=interleaved, **attrs), feeds)


def test_queries_and_keys_take_their_columns_from_one_place() -> None:
    planes = PLANES | {"p": RANDOM.integers(0, 10, (3, 2, 3)), "k": random(np.float32, 2, 3, 32)}
    model = make("MRotaryEmbedding", planes, ["x", "p", "cos", "sin"], ["y"], **SECTIONED)
    node = helper.make_node("MRotaryEmbedding", ["k", "p", "cos", "sin"], ["z"], domain=CONTRIB, **SECTIONED)
    next(a for a in node.attribute if a.name == "num_heads").i = 2
    model.graph.node.append(node)
    model.graph.output.append(helper.make_tensor_value_info("z", FLOAT, None))
    result = check_same(model, planes)
    assert sum(n.op_type == "Where" for n in result.graph.node) == 4  # two planes beside the first, of cos and of sin


PLANES = ROTARY | {"p": np.zeros((3, 2, 3), np.int64)}
SECTIONED = {"mrope_section": [2, 3, 3], "mrope_layout": 1, "num_heads": 4}


@pytest.mark.parametrize(
    ("attrs", "words"),
    [
        ({"scale": 2.0}, "has scale=2.0"),
        ({"is_packed_batching": 1}, "is_packed_batching=1"),
        ({"mrope_layout": 2}, "mrope_layout=2.*; supported are sections of three planes"),
        ({"mrope_section": [4, 4]}, r"mrope_section=\[4, 4\]"),
        ({"mrope_section": [9, -4, 3]}, r"mrope_section=\[9, -4, 3\]"),
        ({"num_heads": 0}, "num_heads for rank 3"),
    ],
)
def test_rotary_embedding_by_planes_refuses(attrs: dict[str, Any], words: str) -> None:
    with pytest.raises(UnsupportedModelError, match=words):
        lowered(make("MRotaryEmbedding", PLANES, list(PLANES), ["y"], **SECTIONED | attrs))


def test_rotary_embedding_by_planes_that_do_not_fit() -> None:
    with pytest.raises(InvalidModelError, match="has sections of 7 columns, and caches of 8"):
        lowered(make("MRotaryEmbedding", PLANES, list(PLANES), ["y"], **SECTIONED | {"mrope_section": [2, 2, 3]}))
    feeds = PLANES | {"p": np.zeros((2, 2, 3), np.int64)}
    with pytest.raises(UnsupportedModelError, match=r"positions \[2, 2, 3\]"):
        lowered(make("MRotaryEmbedding", feeds, list(feeds), ["y"], **SECTIONED))


def _buildable() -> dict[str, tuple[str, dict[str, Array], list[str], dict[str, Any]]]:
    """Every lowered operator once, in the forms that TensorRT might take differently."""
    half = np.float16
    x, g = random(half, 2, 3, 64), random(half, 64)
    rope = {"cos": random(half, 10, 8), "sin": random(half, 10, 8)}
    full = {"p": np.array([[1, 0, 5], [4, 9, 2]])}
    partial = {n: random(half, 10, 4) for n in ("cos", "sin")}
    heads = random(half, 2, 4, 3, 16)
    return {
        "simplified": ("SimplifiedLayerNormalization", {"x": x, "g": g}, [], {}),
        "mixed": ("SimplifiedLayerNormalization", {"x": x, "g": g.astype(np.float32)}, [], {}),
        "rms": ("SkipSimplifiedLayerNormalization", {"x": x, "s": x, "g": g, "b": g}, ["", "inv", "sum"], {}),
        "skip": ("SkipLayerNormalization", {"x": x, "s": x, "g": g, "beta": g, "b": g}, ["", "", "sum"], {}),
        "gelu": ("BiasGelu", {"x": x, "b": g}, [], {}),
        "fast gelu": ("FastGelu", {"x": x, "b": g}, [], {}),
        "quick gelu": ("QuickGelu", {"x": x}, [], {}),
        "matmul": ("FusedMatMul", {"a": heads, "b": heads}, [], {"transB": 1, "alpha": 0.5}),
        "rotary, first position": ("RotaryEmbedding", {"x": x, "p": np.array([2]), **rope}, [], {}),
        "rotary, positions": ("RotaryEmbedding", {"x": x, **full, **rope}, [], {"interleaved": 1}),
        "rotary, heads": ("RotaryEmbedding", {"x": heads, **full, **rope}, [], {}),
        "rotary, part": ("RotaryEmbedding", {"x": x, **full, **partial}, [],
                         {"num_heads": 4, "rotary_embedding_dim": 8}),
        "rotary, planes": ("MRotaryEmbedding", {"x": x, "p": np.ones((3, 2, 3), np.int64), **rope}, [], SECTIONED),
    }  # fmt: skip


@pytest.mark.few(8)
@pytest.mark.parametrize("name", list(_buildable()))
def test_builds(name: str) -> None:
    op, feeds, more, attrs = _buildable()[name]
    domain = "" if op == "SimplifiedLayerNormalization" else CONTRIB
    model = make(op, feeds, list(feeds), ["y", *more], domain, **attrs)
    if name == "mixed":
        model.graph.output[0].type.tensor_type.elem_type = FLOAT
    outcome = build_in_child(lowered(model).SerializeToString(), [{}])
    assert outcome.stage == "built", outcome.words


def test_what_onnxruntime_fuses_around_canonical_caches(tmp_path: Path) -> None:
    """TensorRT parses some of its operators in some forms."""
    path = tmp_path / "model.onnx"
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
    options.optimized_model_filepath = str(path)
    model = onnx.load(MODELS / "mobius" / "llama_static_f32" / "model.onnx")
    ort.InferenceSession(model.SerializeToString(), options)
    assert "SkipSimplifiedLayerNormalization" in {node.op_type for node in onnx.load(path).graph.node}
    imported = import_model(path)
    assert {node.domain for node in imported.model.graph.node} == {""}
    verify_import(imported).check()

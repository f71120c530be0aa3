"""Shapes and types behind ONNX Runtime's own operators against those that it computes."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from graphs import Graph
from onnx import TensorProto, helper, numpy_helper

from trt_kvcache.importer.contrib_shapes import infer_shapes
from trt_kvcache.importer.normalize.fused.contrib import CONTRIB
from trt_kvcache.importer.protos import elem_type_of, shape_of

Array = np.ndarray[Any, Any]
B, S, T, D = 2, 3, 5, 32
HEADS, SIZE = 2, 16
AXES = {B: "B", S: "S", T: "T"}
RANDOM = np.random.default_rng(3)


def random(*shape: int, dtype: Any = np.float32) -> Array:
    return RANDOM.standard_normal(shape).astype(dtype)


X = random(B, S, D)
PAST = random(B, HEADS, T, SIZE)
QUANTIZED = {
    "w": RANDOM.integers(0, 255, (24, 2, 8), np.uint8),
    "s": random(24 * 2),
    "t": RANDOM.integers(0, 255, (24, 16), np.uint8),
    "ts": random(24, 2),
}
ONE = random(B, 1, D)
LENGTHS = {"seqlens": np.full(B, T, np.int32), "total": np.array(T + 1, np.int32)}
# What an operator reads: inputs with symbolic axes, then weights; "" is left out. Names of outputs, and attributes.
Case = tuple[str, dict[str, Array], dict[str, Array], list[str], int, dict[str, Any]]
CASES: dict[str, Case] = {
    "norm": ("SimplifiedLayerNormalization", {"x": X}, {"g": random(D)}, ["x", "g"], 1, {}),
    "norm of another type": (
        "SimplifiedLayerNormalization", {"x": X.astype(np.float16)}, {"g": random(D)}, ["x", "g"], 1, {},
    ),
    "skip": ("SkipLayerNormalization", {"x": X, "y": X}, {"g": random(D)}, ["x", "y", "g"], 4, {}),
    "skip rms": ("SkipSimplifiedLayerNormalization", {"x": X, "y": X}, {"g": random(D)}, ["x", "y", "g"], 4, {}),
    "gelu": ("BiasGelu", {"x": X}, {"b": random(D)}, ["x", "b"], 1, {}),
    "quick gelu": ("QuickGelu", {"x": X.astype(np.float16)}, {}, ["x"], 1, {}),
    "rotary": (
        "RotaryEmbedding", {"x": X, "p": np.tile(np.arange(S), (B, 1))},
        {"c": random(8, SIZE // 2), "s": random(8, SIZE // 2)}, ["x", "p", "c", "s"], 1, {"num_heads": HEADS},
    ),
    "matmul": ("FusedMatMul", {"x": X}, {"w": random(D, 24)}, ["x", "w"], 1, {"alpha": 0.5}),
    "matmul, b transposed": ("FusedMatMul", {"x": X, "y": random(B, T, D)}, {}, ["x", "y"], 1, {"transB": 1}),
    "matmul, a transposed": ("FusedMatMul", {"x": X, "y": random(B, S, T)}, {}, ["x", "y"], 1, {"transA": 1}),
    "gemm": (
        "FusedGemm", {"x": random(B, D)}, {"w": random(24, D)}, ["x", "w"], 1, {"transB": 1, "activation": "Relu"},
    ),
    "nbits": (
        "MatMulNBits", {"x": X}, QUANTIZED, ["x", "w", "s"], 1, {"K": D, "N": 24, "bits": 4, "block_size": 16},
    ),
    "gathered nbits": (
        "GatherBlockQuantized", {"i": np.zeros((B, S), np.int64)}, QUANTIZED, ["t", "i", "ts"], 1,
        {"bits": 4, "block_size": 16, "quantize_axis": 1},
    ),
    "embeddings": (
        "EmbedLayerNormalization", {"i": np.zeros((B, S), np.int32), "p": np.zeros((B, S), np.int32)},
        {"w": random(9, 24), "e": random(9, 24), "g": random(24), "b": random(24)},
        ["i", "", "w", "e", "", "g", "b", "", "p"], 3, {},
    ),
    "grouped": (
        "GroupQueryAttention", {"x": ONE, "y": ONE, "z": ONE, "pk": PAST, "pv": PAST, **LENGTHS}, {},
        ["x", "y", "z", "pk", "pv", "seqlens", "total"], 1, {"num_heads": HEADS, "kv_num_heads": HEADS},
    ),
    "grouped, packed": (
        "GroupQueryAttention", {"x": random(B, 1, 4 * SIZE), "pk": PAST[:, :1], "pv": PAST[:, :1], **LENGTHS}, {},
        ["x", "", "", "pk", "pv", "seqlens", "total"], 1, {"num_heads": HEADS, "kv_num_heads": 1},
    ),
    "heads": (
        "MultiHeadAttention", {"x": X, "y": random(B, T, D), "z": random(B, T, 24)}, {}, ["x", "y", "z"], 1,
        {"num_heads": HEADS},
    ),
    "heads of an encoder": (
        "MultiHeadAttention", {"x": X, "y": PAST, "z": PAST}, {}, ["x", "y", "z"], 1, {"num_heads": HEADS},
    ),
    "attention": (
        "Attention", {"x": X}, {"w": random(D, 3 * 24), "b": random(3 * 24)}, ["x", "w", "b"], 1, {"num_heads": HEADS},
    ),
}  # fmt: skip


def model_of(case: Case, hidden: bool) -> tuple[onnx.ModelProto, list[str]]:
    """The operator, and something behind each of its results; `hidden`: what it reads has no shape that ONNX infers."""
    op, feeds, weights, inputs, outputs, attrs = case
    graph = Graph()
    for name, value in feeds.items():
        graph.input(name, helper.np_dtype_to_tensor_dtype(value.dtype), [AXES.get(d, d) for d in value.shape])
    graph.initializers += [numpy_helper.from_array(value, name) for name, value in weights.items() if name in inputs]
    hides = [name for name in feeds if hidden and feeds[name].ndim == 3]
    for name in hides:  # another operator of ONNX Runtime
        graph.node("QuickGelu", [name], f"{name}_behind", domain=CONTRIB)
    names = ["y_0", "", "", "y_3"][:outputs]
    domain = "" if op == "SimplifiedLayerNormalization" else CONTRIB
    read = [f"{name}_behind" if name in hides else name for name in inputs]
    graph.node(op, read, names, domain=domain, **attrs)
    results = [graph.node("Relu", [name], f"relu_{name}") for name in names if name]
    for name in results:
        graph.outputs.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, None))
        if any(value.dtype == np.float16 for value in feeds.values()) and op == "QuickGelu":
            graph.outputs[-1].type.tensor_type.elem_type = TensorProto.FLOAT16
    return graph.model(24, [CONTRIB]), [name for name in names if name]


@pytest.mark.parametrize("hidden", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_shapes_are_those_of_the_results(name: str, hidden: bool) -> None:
    model, names = model_of(CASES[name], hidden)
    inferred = infer_shapes(model)
    assert list(inferred.graph.node) == list(model.graph.node)
    assert list(inferred.graph.initializer) == list(model.graph.initializer)
    infos = {info.name: info for info in inferred.graph.value_info}
    own = {output for node in model.graph.node for output in node.output}
    assert set(infos) <= own
    shown = onnx.ModelProto()
    shown.CopyFrom(model)
    shown.graph.output.extend(onnx.ValueInfoProto(name=name) for name in names)
    options = ort.SessionOptions()
    options.log_severity_level = 4
    session = ort.InferenceSession(shown.SerializeToString(), options, providers=["CPUExecutionProvider"])
    for result, value in zip(names, session.run(names, CASES[name][1]), strict=True):
        shape = shape_of(infos[result])
        assert shape is not None
        assert elem_type_of(infos[result]) == helper.np_dtype_to_tensor_dtype(value.dtype)
        assert len(shape) == value.ndim
        for known, size in zip(shape, value.shape, strict=True):
            assert known in (size, AXES.get(size)) or (not isinstance(known, int) and size not in (D, 24))


def test_what_inference_finds_already_stays() -> None:
    model, _ = model_of(CASES["gelu"], hidden=False)
    stated = helper.make_tensor_value_info("y_0", TensorProto.FLOAT, ["B", "S", D])
    model.graph.value_info.append(stated)
    assert list(infer_shapes(model).graph.value_info) == [stated]


def test_operators_of_which_nothing_is_known_stay_unknown() -> None:
    graph = Graph()
    graph.input("x", TensorProto.FLOAT, ["B", D])
    graph.node("Unheard", ["x"], "y", domain=CONTRIB)
    graph.node("BiasGelu", ["x", "x"], "z", domain=CONTRIB)
    graph.node("Relu", ["y"], "out")
    graph.output("out", TensorProto.FLOAT, ["B", D])
    graph.outputs.append(helper.make_tensor_value_info("z", TensorProto.FLOAT, None))
    assert [info.name for info in infer_shapes(graph.model(24, [CONTRIB])).graph.value_info] == []

"""Element types that contradict each other, as converters to float16 leave them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from graphs import Graph
from onnx import TensorProto, helper

from trt_kvcache.errors import InvalidModelError
from trt_kvcache.importer.files.source import load_source

FLOAT, HALF = TensorProto.FLOAT, TensorProto.FLOAT16


def graph(out: int = FLOAT) -> Graph:
    made = Graph()
    made.input("half", HALF, ["B", 4])
    made.input("float", FLOAT, ["B", 4])
    made.output("y", out, ["B", 4])
    return made


def stated_otherwise() -> onnx.ModelProto:
    """onnxconverter-common: the result of a Cast that stayed, stated as what the rest became."""
    made = graph(HALF)
    made.node("Cast", ["half"], "cast", to=FLOAT)
    made.node("Add", ["cast", "half"], "y")
    model = made.model()
    model.graph.value_info.append(helper.make_tensor_value_info("cast", HALF, ["B", 4]))
    return model


def stated_output() -> onnx.ModelProto:
    made = graph(HALF)
    made.node("Cast", ["half"], "y", to=FLOAT)
    return made.model()


def mixed() -> onnx.ModelProto:
    made = graph(HALF)
    made.node("Add", ["half", "float"], "y")
    return made.model()


def mixed_far() -> onnx.ModelProto:
    """Operands of a Concat, behind operators that keep the type."""
    made = graph(HALF)
    made.node("Neg", [made.node("Cast", ["half"], to=FLOAT)], "negative")
    made.node("Concat", ["half", "half", "negative"], "y", axis=0)
    return made.model()


def quantized() -> onnx.ModelProto:
    """NVIDIA ModelOpt's PTQ of a file that was float16 already."""
    made = graph(HALF)
    small = made.node("QuantizeLinear", ["float", made.constant(0.1, np.float32), made.constant(0, np.int8)])
    made.node("Add", ["half", made.node("DequantizeLinear", [small, made.constant(0.1, np.float32)])], "y")
    return made.model()


def fused() -> onnx.ModelProto:
    """onnxruntime.transformers.optimizer over optimum-onnx' Llama in float16."""
    made = Graph()
    made.input("x", HALF, ["B", 2, "S", 8])
    made.input("positions", TensorProto.INT64, ["B", "S"])
    tables = [made.constant(np.ones((4, 4)), np.float32) for _ in range(2)]
    made.node("RotaryEmbedding", ["x", "positions", *tables], "y", domain="com.microsoft")
    made.output("y", HALF, ["B", 2, "S", 8])
    return made.model(21, ["com.microsoft"])


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (stated_otherwise, "Cast 'node_cast' casts to float, and the model states float16"),
        (stated_output, "Cast 'node_y' casts to float, and the model states float16"),
        (mixed, "Add 'node_y' reads 'half' of float16 and 'float' of float, where ONNX demands one type"),
        (
            quantized,
            "Add 'node_y' reads 'half' .*quantize the export in float32: .*ModelOpt quantizes ONNX files of",
        ),
        (fused, "RotaryEmbedding 'node_y' reads 'x' of float16 .* of float, where ONNX Runtime demands one type"),
        (mixed_far, "Concat 'node_y' reads 'half' of float16 and 'negative' of float"),
    ],
)
def test_what_contradicts_itself_is_refused_by_name(tmp_path: Path, make: object, words: str) -> None:
    assert callable(make)
    path = tmp_path / "model.onnx"
    path.write_bytes(make().SerializeToString())
    with pytest.raises(InvalidModelError, match=words):
        load_source(path)
    with pytest.raises(onnxruntime.capi.onnxruntime_pybind11_state.Fail, match="Type Error"):
        onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])


def test_operands_of_types_of_their_own_pass(tmp_path: Path) -> None:
    """Where has a bool, Pow and CastLike two types, LayerNormalization may have two."""
    made = graph()
    positive = made.node("Greater", ["float", "float"])
    power = made.node("Pow", ["float", "half"])
    like = made.node("CastLike", ["half", "float"])
    made.node("Where", [positive, power, like], "y")
    path = tmp_path / "model.onnx"
    model = made.model()
    path.write_bytes(model.SerializeToString())
    assert load_source(path).proto == model
    onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])

"""What ONNX Runtime's quantizers write for CPUs is refused by name; rounding to int8 and float8 around 0 stays.

`test_block_quantizers` has the operators of NVIDIA ModelOpt.
"""

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
from decoders import DecoderConfig, make_decoder
from graphs import Graph
from onnx import TensorProto, helper, numpy_helper

from trt_kvcache import plan_model, verify_model
from trt_kvcache.errors import UnsupportedModelError
from trt_kvcache.importer.families.quantizers import refuse_integers

FLOAT = TensorProto.FLOAT
SMALL = DecoderConfig(layers=1, hidden=32, vocab=32, query_heads=2, kv_heads=1, head_size=16, capacity=16, positions=32)
ADVICE = "TensorRT does not support ONNX Runtime's int8 for CPUs: export in float16, or with int4 weights"


@pytest.mark.parametrize(
    ("op", "domain"),
    [
        ("MatMulInteger", ""), ("QLinearMatMul", ""), ("ConvInteger", ""), ("QLinearAdd", "com.microsoft"),
        ("QAttention", "com.microsoft"), ("DynamicQuantizeMatMul", "com.microsoft"),
    ],
)  # fmt: skip
def test_integers_are_refused_by_name(op: str, domain: str) -> None:
    graph = Graph()
    graph.input("x", FLOAT, [24])
    graph.node(op, ["x"], "y", domain=domain)
    graph.output("y", FLOAT, [24])
    with pytest.raises(UnsupportedModelError, match=rf"{op} 'node_y' computes with integers of 8 bits. {ADVICE}"):
        refuse_integers(graph.model(21))


def decoder(scale: Any, zero: Any) -> onnx.ModelProto:
    """A decoder whose products with weights read activations that are rounded."""
    model = make_decoder(SMALL)
    weights = {t.name for t in model.graph.initializer if len(t.dims) == 2}
    nodes = []
    for node in model.graph.node:
        if node.op_type == "MatMul" and node.input[1] in weights:
            pair = [f"{node.output[0]}_{part}" for part in ("q", "dq")]
            for i, op in enumerate(("QuantizeLinear", "DequantizeLinear")):
                names = [[node.input[0], pair[0]][i], "scale", *([] if zero is None else ["zero"])]
                nodes.append(helper.make_node(op, names, pair[i : i + 1], f"n_{pair[i]}"))
            node.input[0] = pair[1]
        nodes.append(onnx.NodeProto.FromString(node.SerializeToString()))
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    model.graph.initializer.append(numpy_helper.from_array(scale, "scale"))
    if zero is not None:
        model.graph.initializer.append(numpy_helper.from_array(zero, "zero"))
    return model


@pytest.mark.parametrize(
    ("zero", "what"),
    [
        (None, "rounds to uint8"), (np.uint8(128), "rounds to uint8"), (np.uint16(7), "rounds to uint16"),
        (np.int16(0), "rounds to int16"), (np.int8(-5), "quantizes to int8 with a zero point other than 0"),
    ],
)  # fmt: skip
def test_rounding_for_cpus_is_refused_by_name(zero: Any, what: str, tmp_path: Path) -> None:
    onnx.save(decoder(np.float32(0.01), None if zero is None else np.asarray(zero)), tmp_path / "model.onnx")
    with pytest.raises(UnsupportedModelError, match=rf"QuantizeLinear 'n_[^']+_q' {what}. {ADVICE}"):
        plan_model(tmp_path / "model.onnx")


@pytest.mark.parametrize("kind", [np.int8, ml_dtypes.float8_e4m3fn])
def test_rounding_around_0_stays(kind: Any, tmp_path: Path) -> None:
    onnx.save(decoder(np.float32(0.01), np.zeros((), kind)), tmp_path / "model.onnx")
    verify_model(tmp_path / "model.onnx").check()


def test_tables_and_biases_of_integers_are_refused_by_name() -> None:
    graph = Graph()
    graph.input("ids", TensorProto.INT64, ["S"])
    rows = graph.Gather(graph.constant(np.ones((8, 4)), np.int8), "ids")
    graph.DequantizeLinear(rows, graph.constant(0.5, np.float32), out="y")
    graph.output("y", FLOAT, ["S", 4])
    with pytest.raises(UnsupportedModelError, match="Gather .* gathers rows of a quantized table. TensorRT does not"):
        refuse_integers(graph.model(21))
    graph = Graph()
    bias = graph.DequantizeLinear(graph.constant(np.ones(4), np.int32), graph.constant(0.5, np.float32))
    graph.Identity(bias, out="y")
    graph.output("y", FLOAT, [4])
    with pytest.raises(UnsupportedModelError, match="DequantizeLinear .* dequantizes int32. TensorRT does not"):
        refuse_integers(graph.model(21))

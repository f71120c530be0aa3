"""Rounding that TensorRT has no operator for, in arithmetic with the same numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import trt
from decoders import DecoderConfig, make_decoder
from graphs import Graph
from onnx import TensorProto, helper, numpy_helper

from trt_kvcache import BuildOptions, build_engine, plan_model, rewrite_model, verify_model
from trt_kvcache.errors import UnsupportedModelError
from trt_kvcache.importer.extensions.quantizers.static import note_roundings, spell_roundings

Array = np.ndarray[Any, Any]
SMALL = DecoderConfig(layers=1, hidden=32, vocab=32, query_heads=2, kv_heads=1, head_size=16, capacity=16, positions=32)
FLOATS = {np.float32: TensorProto.FLOAT, np.float16: TensorProto.FLOAT16}


def rounding(zero: Any, dtype: Any = np.float32, scale: Any = 0.05, readers: int = 1) -> onnx.ModelProto:
    """``zero`` None: no zero point, so uint8 around 0."""
    graph = Graph()
    graph.input("x", FLOATS[dtype], ["B", 8])
    numbers = [graph.constant(scale, dtype), *([] if zero is None else [graph.constant(zero, zero.dtype)])]
    small = graph.node("QuantizeLinear", ["x", *numbers])
    made = [graph.node("DequantizeLinear", [small, *numbers]) for _ in range(readers)]
    graph.node("Relu" if readers == 1 else "Sum", made, "y")
    graph.output("y", FLOATS[dtype], ["B", 8])
    return graph.model(21)


def run(model: onnx.ModelProto, x: Array) -> Array:
    onnx.checker.check_model(model, full_check=True)
    (y,) = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"]).run(None, {"x": x})
    return np.asarray(y)


def spelled(model: onnx.ModelProto) -> onnx.ModelProto:
    copy = onnx.ModelProto.FromString(model.SerializeToString())
    spell_roundings(copy, Path())
    return copy


ZEROS = [None, *(np.uint8(n) for n in (0, 3, 127, 128, 255)), np.int8(-5), np.uint16(0), np.uint16(31571), np.int16(0)]


@pytest.mark.few(9)
@pytest.mark.parametrize("dtype", FLOATS, ids=["float32", "float16"])
@pytest.mark.parametrize("zero", ZEROS, ids=repr)
def test_numbers_are_the_same(zero: Any, dtype: Any) -> None:
    """Halves and what lies beyond the limits, too."""
    scale = dtype(0.25)
    model = rounding(zero, dtype, scale, readers=2)
    x = np.concatenate([np.arange(-256, 256) * scale / 2, np.linspace(-300, 300, 512) * 30 * scale]).astype(dtype)
    made = spelled(model)
    assert np.array_equal(run(made, x.reshape(-1, 8)), run(model, x.reshape(-1, 8)))
    is_signed = zero is not None and zero.dtype == np.uint8 and zero == 128
    assert ("QuantizeLinear" in {n.op_type for n in made.graph.node}) == is_signed
    assert bool(note_roundings(model, Path())) != is_signed
    assert trt.build(made).stage == "built"


@pytest.mark.parametrize("zero", [np.int8(0), np.uint8(128)], ids=repr)
def test_products_of_8_bits_stay(zero: Any) -> None:
    made = spelled(rounding(zero))
    assert [n.op_type for n in made.graph.node] == ["QuantizeLinear", "DequantizeLinear", "Relu"]
    kinds = {t.name: t.data_type for t in made.graph.initializer}
    assert {kinds[n.input[2]] for n in made.graph.node[:2]} == {TensorProto.INT8}


def test_what_nothing_reads_any_more_is_gone() -> None:
    """TensorRT imports every initializer, and none of 16 bits."""
    kinds = {t.data_type for t in spelled(rounding(np.uint16(5))).graph.initializer}
    assert kinds == {TensorProto.FLOAT}


def test_other_readers_are_refused_by_name() -> None:
    model = rounding(np.uint8(0))
    model.graph.node[1].input[0] = "moved"
    model.graph.node.insert(1, helper.make_node("Identity", [model.graph.node[0].output[0]], ["moved"]))
    with pytest.raises(
        UnsupportedModelError, match="'node_quantizelinear_0' rounds to uint8, and something else than De"
    ):
        spelled(model)
    assert not note_roundings(model, Path())


def test_scales_for_each_channel_are_refused_by_name() -> None:
    with pytest.raises(UnsupportedModelError, match="rounds to uint8, with a scale for each channel"):
        spelled(rounding(np.full(8, 3, np.uint8), scale=np.full(8, 0.1)))
    assert len(spelled(rounding(np.full(8, 128, np.uint8), scale=np.full(8, 0.1))).graph.node) == 3


def test_a_decoder_with_activations_around_other_numbers(tmp_path: Path) -> None:
    """As quantize_static writes it by default: planned, with a note, verified, rewritten and built."""
    model = make_decoder(SMALL)
    weights = {t.name for t in model.graph.initializer}
    nodes = []
    for node in model.graph.node:
        if node.op_type == "MatMul" and node.input[1] in weights:
            pair = [f"{node.output[0]}_{part}" for part in ("q", "dq")]
            nodes.append(helper.make_node("QuantizeLinear", [node.input[0], "scale", "zero"], pair[:1], f"n_{pair[0]}"))
            nodes.append(helper.make_node("DequantizeLinear", [pair[0], "scale", "zero"], pair[1:], f"n_{pair[1]}"))
            node.input[0] = pair[1]
        nodes.append(onnx.NodeProto.FromString(node.SerializeToString()))
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    for name, value in (("scale", np.float32(0.01)), ("zero", np.uint8(120))):
        model.graph.initializer.append(numpy_helper.from_array(np.asarray(value), name))
    path = tmp_path / "model.onnx"
    onnx.save(model, path)
    assert any("QuantizeLinear round to 16 bits, to uint8" in note for note in plan_model(path).notes)
    verify_model(path).check()
    rewrite_model(path, tmp_path / "rewritten.onnx")
    assert "QuantizeLinear" not in {n.op_type for n in onnx.load(tmp_path / "rewritten.onnx").graph.node}
    build_engine(path, tmp_path / "model.engine", build=BuildOptions(max_batch=2))

"""Decoders with quantized weights end to end: where their bytes go, and what builds and comparisons make of them."""

import shutil
from collections import Counter
from pathlib import Path

import numpy as np
import onnx
import pytest
from decoders import DecoderConfig, make_decoder
from onnx import TensorProto, helper, numpy_helper

from trt_kvcache import PlanOptions, build_engine, rewrite_model, verify_model
from trt_kvcache.errors import OutputError
from trt_kvcache.importer import import_model

GENAI = Path(__file__).parents[1] / "models" / "ort-genai" / "llama_cpu_int4"
OPTIONS = PlanOptions(capacity=64)
CONFIG = DecoderConfig(hidden=64, capacity=32)


def quantized(model: onnx.ModelProto, block: int = 16) -> onnx.ModelProto:
    """Every MatMul with a weight as MatMulNBits of 4 bits, rounded to nearest, without zero points."""
    weights = {t.name: t for t in model.graph.initializer}
    for node in model.graph.node:
        if node.op_type != "MatMul" or node.input[1] not in weights:
            continue
        values = numpy_helper.to_array(weights[node.input[1]])
        blocks = values.T.reshape(values.shape[1], -1, block)
        scales = np.abs(blocks).max(-1) / 7
        numbers = np.clip(np.round(blocks / scales[..., None]) + 8, 0, 15).astype(np.uint8)
        name = f"{node.input[1]}_{node.name}"
        packed = numbers[..., ::2] | numbers[..., 1::2] << 4
        model.graph.initializer.extend(
            [numpy_helper.from_array(packed, f"{name}_Q4"), numpy_helper.from_array(scales.astype(values.dtype), name)]
        )
        node.op_type, node.domain = "MatMulNBits", "com.microsoft"
        node.input[1:] = [f"{name}_Q4", name]
        sizes = {"K": values.shape[0], "N": values.shape[1], "bits": 4, "block_size": block, "accuracy_level": 4}
        node.attribute.extend(helper.make_attribute(key, value) for key, value in sizes.items())
    used = {name for node in model.graph.node for name in node.input}
    kept = [t for t in model.graph.initializer if t.name in used]
    del model.graph.initializer[:]
    model.graph.initializer.extend(kept)
    model.opset_import.add(domain="com.microsoft", version=1)
    return model


def write(folder: Path, external: bool) -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / "model.onnx"
    options = {"save_as_external_data": True, "location": "model.data", "size_threshold": 0} if external else {}
    onnx.save(quantized(make_decoder(CONFIG)), path, **options)
    return path


def types(model: onnx.ModelProto) -> Counter[int]:
    return Counter(t.data_type for t in model.graph.initializer)


@pytest.mark.slow
@pytest.mark.parametrize("external", [False, True])
def test_a_model_with_canonical_caches(external: bool, tmp_path: Path) -> None:
    path = write(tmp_path / "in", external)
    report = verify_model(path)
    report.check()
    assert any("ran with activations of float32" in note for note in report.notes)
    operators = Counter(node.op_type for node in import_model(path).model.graph.node)
    assert not operators["MatMulNBits"]
    assert operators["DequantizeLinear"] == 15  # seven in each layer, and the head
    build_engine(path, tmp_path / "model.engine")


@pytest.mark.few(1)
@pytest.mark.parametrize("elsewhere", [False, True])
def test_a_rewritten_model_has_signed_weights_in_a_file_of_their_own(elsewhere: bool, tmp_path: Path) -> None:
    source = tmp_path / "in"
    shutil.copytree(GENAI, source)
    before = {f.name: f.read_bytes() for f in source.iterdir()}
    target = (tmp_path if elsewhere else source) / "out.onnx"
    rewrite_model(source / "model.onnx", target, OPTIONS)
    assert {name: (source / name).read_bytes() for name in before} == before
    model = onnx.load(target, load_external_data=False)
    onnx.checker.check_model(str(target), full_check=True)
    assert not types(model).keys() & {TensorProto.UINT4, TensorProto.UINT8}
    signed = [t for t in model.graph.initializer if any(e.value == "out.onnx.signed" for e in t.external_data)]
    assert len(signed) == 23  # 11 weights, their zero points, and those of the embedding
    assert {t.data_type for t in signed} == {TensorProto.INT4}
    numbers = sum(int(np.prod(t.dims)) for t in signed)
    assert numbers / 2 <= (target.parent / "out.onnx.signed").stat().st_size < numbers / 2 + 4096 * len(signed)


@pytest.mark.slow
def test_a_file_that_stands_in_the_way_is_named(tmp_path: Path) -> None:
    source = tmp_path / "in"
    path = write(source, external=True)
    (source / "model.data").rename(source / "out.onnx.signed")
    model = onnx.load(path, load_external_data=False)
    for tensor in model.graph.initializer:
        for entry in tensor.external_data:
            entry.value = entry.value.replace("model.data", "out.onnx.signed")
    onnx.save(model, path)
    for target in (source / "out.onnx", tmp_path / "out.onnx"):
        with pytest.raises(OutputError, match="out.onnx.signed: .*write to another path"):
            rewrite_model(path, target)
        assert not target.exists()

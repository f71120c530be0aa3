"""Bytes that were put together by hand are the model."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from decoders import DecoderConfig, make_decoder, write_decoder

from trt_kvcache.importer.serialize import serialize_model


def sorted_model(model: onnx.ModelProto) -> bytes:
    tensors = sorted(model.graph.initializer, key=lambda tensor: tensor.name)
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    del copy.graph.initializer[:]
    copy.graph.initializer.extend(tensors)
    return copy.SerializeToString(deterministic=True)


@pytest.mark.parametrize("size", [1, 127, 128, 20_000, 3_000_000])
def test_the_bytes_are_the_model(size: int) -> None:
    model = make_decoder(DecoderConfig())
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.arange(size, dtype=np.uint8), "weights"))
    model.metadata_props.add(key="a", value="b")
    before = sorted_model(model)
    assert sorted_model(onnx.load_from_string(serialize_model(model))) == before == sorted_model(model)


def test_weights_in_files_stay_references(tmp_path: Path) -> None:
    path = write_decoder(tmp_path / "model.onnx", DecoderConfig(), external_threshold=64)
    model = onnx.load(path, load_external_data=False)
    assert sorted_model(onnx.load_from_string(serialize_model(model))) == sorted_model(model)

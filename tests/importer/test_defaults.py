"""Inputs with a default: weights stay constants, what a step brings is asked for."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from concat_graphs import Decoder, make_decoder
from onnx import helper, numpy_helper

from trt_kvcache import PlanOptions, plan_model
from trt_kvcache.errors import InvalidModelError
from trt_kvcache.importer.files.source import load_source
from trt_kvcache.verify import VerifyOptions, verify_model

OPTIONS = PlanOptions(capacity=24)
STEPS = VerifyOptions(batch=2, chunks=(3,), tokens=2)


def with_default(folder: Path, name: str, value: Any, shape: Any = None) -> Path:
    model = make_decoder(Decoder())
    model.graph.initializer.append(numpy_helper.from_array(value, name))
    info = next(v for v in model.graph.input if v.name == name)
    if shape is not None:
        info.CopyFrom(helper.make_tensor_value_info(name, info.type.tensor_type.elem_type, shape))
    onnx.save(model, folder / "model.onnx")
    return folder / "model.onnx"


@pytest.mark.parametrize("io", [0, -1], ids=["tokens", "cache"])
def test_what_has_an_open_shape_is_asked_for(io: int, tmp_path: Path) -> None:
    info = make_decoder(Decoder()).graph.input[io]
    sizes = [d.dim_value for d in info.type.tensor_type.shape.dim]
    kind = helper.tensor_dtype_to_np_dtype(info.type.tensor_type.elem_type)
    assert 0 in sizes
    source = load_source(with_default(tmp_path, info.name, np.zeros(sizes, kind)))
    assert source.is_edited
    assert info.name not in {t.name for t in source.proto.graph.initializer}
    named = load_source(with_default(tmp_path, "position_ids", np.zeros((1, 1), np.int64), [1, 1]))
    assert named.is_edited  # at a fixed shape, too
    assert "position_ids" not in {t.name for t in named.proto.graph.initializer}


def test_positions_are_asked_for(tmp_path: Path) -> None:
    plain = tmp_path / "plain"
    plain.mkdir()
    onnx.save(make_decoder(Decoder()), plain / "model.onnx")
    model = with_default(tmp_path, "position_ids", np.zeros((1, 1), np.int64))
    assert plan_model(model, OPTIONS).tensors == plan_model(plain / "model.onnx", OPTIONS).tensors
    verify_model(model, OPTIONS, STEPS).check()


@pytest.mark.parametrize(
    ("value", "shape", "said"),
    [
        (np.zeros((1, 1), np.int64), [1, 2], r"int64 \[1, 2\], but its initializer is int64 \[1, 1\]"),
        (np.zeros((1, 1), np.int64), ["b", "s", 1], r"int64 \['b', 's', 1\], but its initializer is int64 \[1, 1\]"),
        (np.zeros((1, 1), np.int32), [1, 1], r"int64 \[1, 1\], but its initializer is int32 \[1, 1\]"),
    ],
)  # fmt: skip
def test_a_default_that_is_no_value_of_its_input_is_named(value: Any, shape: Any, said: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidModelError, match=f"input 'position_ids' is declared {said}; export the model again"):
        load_source(with_default(tmp_path, "position_ids", value, shape))


@pytest.mark.parametrize("shaped", [True, False])
def test_weights_that_are_listed_as_inputs_stay_constants(shaped: bool, tmp_path: Path) -> None:
    model = make_decoder(Decoder())
    wanted = {v.name for v in model.graph.input}
    for tensor in model.graph.initializer:
        shape = tensor.dims if shaped else None
        model.graph.input.append(helper.make_tensor_value_info(tensor.name, tensor.data_type, shape))
    onnx.save(model, tmp_path / "model.onnx")
    source = load_source(tmp_path / "model.onnx")
    assert source.is_edited is not shaped  # a shape is added where there is none
    inputs = {t.name for t in plan_model(tmp_path / "model.onnx", OPTIONS).tensors if t.io == "input"}
    assert inputs <= wanted | {"write_indices", "nonpad_kv_seqlen", "attention_span", "logits_span"}
    verify_model(tmp_path / "model.onnx", OPTIONS, STEPS).check()

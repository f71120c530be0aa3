"""Numbers that lie outside of the model: what is proven of a model does not depend on where they lie."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from concat_graphs import Decoder, make_decoder
from outside import as_constants, save_outside
from slope_graphs import added, counted, table
from stored import MODELS

from trt_kvcache import (
    BuildOptions,
    CachePlan,
    PlanOptions,
    UnsupportedModelError,
    build_engine,
    plan_model,
)
from trt_kvcache.importer import import_model
from trt_kvcache.verify import verify_import

CAPACITY = 24
FORMS: dict[str, Callable[[onnx.ModelProto], onnx.ModelProto]] = {
    "initializers": lambda model: model,
    "constants": as_constants,
}
DECODERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "positions": {"mask": "positions", "positions": "past"},
    "padding": {"mask": "padding", "positions": "padding"},
    "a mask as a buffer": {"mask": "buffer"},
    "a window": {"window": 5},
    "ALiBi, counted": {"scores": added(counted)},
    "ALiBi, as a table": {"scores": added(table)},
    "sinks": {"sinks": "weight"},
    "float16": {"dtype": np.float16, "upcast": True, "guard": True},
}


def essence(plan: CachePlan) -> tuple[Any, ...]:
    return plan.caches, plan.attention, plan.masks, plan.tensors, plan.original


@pytest.mark.few(5)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", DECODERS)
def test_decoders(tmp_path: Path, name: str, form: str) -> None:
    model, options = FORMS[form](make_decoder(Decoder(**DECODERS[name]))), PlanOptions(capacity=CAPACITY)
    onnx.save(model, tmp_path / "inside.onnx")
    outside = save_outside(model, tmp_path / "outside.onnx")
    found = import_model(outside, options)
    assert essence(found.plan) == essence(plan_model(tmp_path / "inside.onnx", options))
    verify_import(found).check()


@pytest.mark.few(1)
@pytest.mark.parametrize("form", FORMS)
def test_an_export(tmp_path: Path, form: str) -> None:
    """Inverse frequencies of the rotary embedding are a Constant of optimum-onnx: 256 bytes for heads of 128."""
    model, options = FORMS[form](onnx.load(MODELS / "optimum" / "llama" / "model.onnx")), PlanOptions(capacity=CAPACITY)
    onnx.save(model, tmp_path / "inside.onnx")
    outside = save_outside(model, tmp_path / "outside.onnx")
    found = import_model(outside, options)
    assert essence(found.plan) == essence(plan_model(tmp_path / "inside.onnx", options))
    verify_import(found).check()
    build_engine(outside, tmp_path / "model.engine", options=options, build=BuildOptions(max_batch=2))


def put(model: onnx.ModelProto, path: Path, where: str) -> Path:
    if where == "outside":
        return save_outside(model, path)
    onnx.save(model, path)
    return path


@pytest.mark.few(2)
@pytest.mark.parametrize("where", ["inside", "outside"])
@pytest.mark.parametrize("form", FORMS)
def test_a_large_table_of_slopes(tmp_path: Path, form: str, where: str) -> None:
    """More numbers than what an initializer may have to be read for what it is. MPT-7B's has 32 heads of 2048."""
    capacity = 300
    model = FORMS[form](make_decoder(Decoder(scores=added(table), capacity=capacity)))
    path, options = put(model, tmp_path / "model.onnx", where), PlanOptions(capacity=capacity)
    imported = import_model(path, options)
    assert [bool(mask.slopes) for mask in imported.plan.masks] == [True]
    assert not any(capacity in tensor.dims for tensor in imported.model.graph.initializer)
    verify_import(imported).check()


@pytest.mark.parametrize("where", ["inside", "outside"])
@pytest.mark.parametrize("form", FORMS)
def test_a_table_that_is_odd_in_one_place_is_refused(tmp_path: Path, form: str, where: str) -> None:
    model = make_decoder(Decoder(scores=added(table), capacity=300))
    (numbers,) = [t for t in model.graph.initializer if list(t.dims) == [4, 1, 300]]
    value = onnx.numpy_helper.to_array(numbers).copy()
    value[2, 0, 100] += 0.01
    numbers.CopyFrom(onnx.numpy_helper.from_array(value, numbers.name))
    path = put(FORMS[form](model), tmp_path / "model.onnx", where)
    with pytest.raises(UnsupportedModelError, match="'.*', which is added to the scores|other than 0 and the lowest"):
        plan_model(path, PlanOptions(capacity=300))

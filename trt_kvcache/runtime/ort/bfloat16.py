"""bfloat16 models in float32, for ONNX Runtime on the CPU: it has no bfloat16 kernels for most operators (1.32.0).

    y = MatMul(x, W)    bfloat16
becomes
    y = MatMul(x, Cast(W))    float32, W as it was

ONNX Runtime computes a Cast of a weight while it opens a model, and frees the bfloat16 weight. So weights stay in their
file, are read once, and are held in memory once.
"""

from __future__ import annotations

from collections.abc import Container, Iterator
from dataclasses import fields, is_dataclass, replace
from typing import Any

import numpy as np
from onnx import GraphProto, TensorProto, helper, numpy_helper

from trt_kvcache.importer import ImportedModel
from trt_kvcache.importer.protos import byte_size, copied, iter_scopes, iter_tensors, replace_field
from trt_kvcache.importer.steps.element_types import has_bfloat16, state_type

__all__ = ["NOTE", "in_float32"]

NOTE = (
    "bfloat16 runs in float32 on the CPU, where ONNX Runtime has no bfloat16 arithmetic: caches take twice the memory, "
    "and numbers are closer to the model's in float32 than those of its engine"
)
_SMALL = 1024  # bytes; smaller tensors are converted here, so that shape inference can read their values


def in_float32(imported: ImportedModel) -> ImportedModel:
    """Return a bfloat16 model in float32, with a note in its plan; the same object if nothing in it is bfloat16.

    Args:
        imported: the model, with its own caches or quantized ones; not changed.
    """
    if not has_bfloat16(imported.model):
        return imported
    model = copied(imported.model)
    state_type(model, (TensorProto.BFLOAT16,), TensorProto.FLOAT)
    large = {name for scope in iter_scopes(model) if isinstance(scope, GraphProto) for name in _large(scope)}
    for tensor in iter_tensors(model):
        if tensor.data_type == TensorProto.BFLOAT16 and tensor.name not in large:
            values = numpy_helper.to_array(tensor).astype(np.float32)
            tensor.CopyFrom(numpy_helper.from_array(values, tensor.name))
    for scope in iter_scopes(model):
        if isinstance(scope, GraphProto):
            _cast(scope, large)
    plan = _widened(imported.plan)
    return replace(imported, model=model, plan=replace(plan, notes=(NOTE, *plan.notes)))


def _large(graph: GraphProto) -> Iterator[str]:
    """Yield the bfloat16 weights that keep their type."""
    for tensor in graph.initializer:
        inside = tensor.data_location != TensorProto.EXTERNAL
        if tensor.data_type == TensorProto.BFLOAT16 and not (inside and (byte_size(tensor) or 0) <= _SMALL):
            yield tensor.name


def _cast(graph: GraphProto, large: Container[str]) -> None:
    """Insert a Cast after each large weight."""
    casts = []
    for tensor in graph.initializer:
        if tensor.name in large:
            name, tensor.name = tensor.name, f"{tensor.name}/bfloat16"
            casts.append(helper.make_node("Cast", [tensor.name], [name], f"{name}/Cast", to=TensorProto.FLOAT))
    replace_field(graph.node, [*casts, *graph.node])


def _widened(value: Any) -> Any:
    """Return a plan, or a part of one, with float32 instead of bfloat16."""
    if isinstance(value, tuple):
        return tuple(map(_widened, value))
    if not is_dataclass(value) or isinstance(value, type):
        return value
    parts = {f.name: _widened(getattr(value, f.name)) for f in fields(value)}
    if parts.get("dtype") == "bfloat16":
        parts["dtype"] = "float"
    return replace(value, **parts)

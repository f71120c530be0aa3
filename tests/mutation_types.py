"""Types of the tensors of a model, as far as shape inference knows them."""

from __future__ import annotations

import onnx
from onnx import ModelProto

Type = tuple[int, tuple[int | str, ...] | None]
"""Element type, and the shape where it is known."""


def alike(one: Type | None, two: Type | None) -> bool:
    """Same element type and rank."""
    return one is not None and two is not None and (one[0], _rank(one)) == (two[0], _rank(two)) and _rank(one) >= 0


def _rank(kind: Type) -> int:
    return -1 if kind[1] is None else len(kind[1])


def types_of(model: ModelProto) -> dict[str, Type]:
    """Of every named tensor."""
    graph = onnx.shape_inference.infer_shapes(model).graph
    types: dict[str, Type] = {}
    for value in (*graph.value_info, *graph.input, *graph.output):
        tensor = value.type.tensor_type
        shape = tuple(d.dim_param or d.dim_value for d in tensor.shape.dim) if tensor.HasField("shape") else None
        types[value.name] = (tensor.elem_type, shape)
    return types | {t.name: (t.data_type, tuple(t.dims)) for t in graph.initializer}

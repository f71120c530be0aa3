"""Inputs that have a default: an initializer of the same name.

ONNX lets the caller leave such an input out. Old exporters list weights so, which stay constants. What changes from
step to step may be written so, too, such as positions: as a constant, every token would have the default position.
"""

from __future__ import annotations

from collections.abc import Iterable

from onnx import GraphProto, TensorProto, TensorShapeProto

from trt_kvcache.importer.protos import shape_of
from trt_kvcache.importer.roles.config import NamePattern, shipped_patterns


def drop_defaults(graph: GraphProto, named: Iterable[NamePattern] = ()) -> bool:
    """Let, in place, whatever a step brings have no default: inputs with an open dimension, or a name that has a role.

    Args:
        graph: edited.
        named: the caller's own names of roles, beside the shipped ones.

    Returns:
        Whether anything was changed.
    """
    patterns = (*named, *shipped_patterns())
    inputs = {value.name: shape_of(value) for value in graph.input}
    given = {
        tensor.name
        for tensor in graph.initializer
        if tensor.name in inputs
        and (
            any(not isinstance(dim, int) for dim in inputs[tensor.name] or ())
            or any(pattern.matches(tensor.name, "input") for pattern in patterns)
        )
    }
    kept = [tensor for tensor in graph.initializer if tensor.name not in given]
    if given:
        del graph.initializer[:]
        graph.initializer.extend(kept)
    return _shape_constants(graph, kept) or bool(given)


def _shape_constants(graph: GraphProto, kept: Iterable[TensorProto]) -> bool:
    """Let inputs that are listed without a shape have that of their default: what reads them asks for one."""
    shapes = {tensor.name: tensor.dims for tensor in kept}
    bare = [value for value in graph.input if value.name in shapes and shape_of(value) is None]
    for value in bare:
        shape = value.type.tensor_type.shape
        shape.SetInParent()  # of no axes, too
        shape.dim.extend(TensorShapeProto.Dimension(dim_value=size) for size in shapes[value.name])
    return bool(bare)

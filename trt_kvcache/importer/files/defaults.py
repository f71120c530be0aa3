"""Defaults of inputs: an initializer of the same name.

Old exporters list weights in this form; these stay constants. Positions or a past must not become constants.
"""

from __future__ import annotations

from collections.abc import Iterable

from onnx import GraphProto, TensorProto, TensorShapeProto

from trt_kvcache.importer.interface.config import NamePattern, shipped_patterns
from trt_kvcache.importer.protos import DEFAULT_DOMAINS, replace_field, shape_of

__all__ = ["drop_defaults"]

_BROUGHT = {"TensorScatter": (0, 2), "Attention": (4, 5, 6)}
"""Inputs of operators that no default can stand for: a cache, where it is written, how much of it is valid."""


def drop_defaults(graph: GraphProto, named: Iterable[NamePattern] = ()) -> bool:
    """Remove, in place, defaults of inputs that each step provides.

    These are inputs with an open dimension, with a name that has a role, and caches, their indices and lengths.

    Args:
        graph: edited.
        named: the caller's own names of roles, beside the shipped ones.

    Returns:
        True if anything was changed.
    """
    patterns = (*named, *shipped_patterns())
    brought = {
        name
        for node in graph.node
        for place, name in enumerate(node.input)
        if node.domain in DEFAULT_DOMAINS and place in _BROUGHT.get(node.op_type, ())
    }
    inputs = {value.name: shape_of(value) for value in graph.input}
    dropped = {
        tensor.name
        for tensor in graph.initializer
        if tensor.name in inputs
        and (
            tensor.name in brought
            or any(not isinstance(dim, int) for dim in inputs[tensor.name] or ())
            or any(pattern.matches(tensor.name, "input") for pattern in patterns)
        )
    }
    constants = [tensor for tensor in graph.initializer if tensor.name not in dropped]
    if dropped:
        replace_field(graph.initializer, constants)
    return _shape_constants(graph, constants) or bool(dropped)


def _shape_constants(graph: GraphProto, constants: Iterable[TensorProto]) -> bool:
    """Give inputs without a shape the shape of their default, since readers need one."""
    shapes = {tensor.name: tensor.dims for tensor in constants}
    bare = [value for value in graph.input if value.name in shapes and shape_of(value) is None]
    for value in bare:
        shape = value.type.tensor_type.shape
        shape.SetInParent()  # of no axes, too
        shape.dim.extend(TensorShapeProto.Dimension(dim_value=size) for size in shapes[value.name])
    return bool(bare)

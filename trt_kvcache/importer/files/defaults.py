"""Inputs that have a default: an initializer of the same name.

ONNX lets the caller leave such an input out. Old exporters list weights so, which stay constants. What changes from
step to step may be written so, too, such as positions: as a constant, every token would have the default position.
"""

from __future__ import annotations

from collections.abc import Iterable

from onnx import GraphProto

from trt_kvcache.importer.protos import shape_of
from trt_kvcache.importer.roles.config import NamePattern, shipped_patterns


def drop_defaults(graph: GraphProto, named: Iterable[NamePattern] = ()) -> bool:
    """Let, in place, whatever a step brings have no default: inputs with an open dimension, or a name that has a role.

    Args:
        graph: edited.
        named: the caller's own names of roles, beside the shipped ones.

    Returns:
        Whether there were any.
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
    return bool(given)

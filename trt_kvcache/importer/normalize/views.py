"""Operators that only rearrange the numbers of a tensor, or round them to another type."""

from __future__ import annotations

import onnx_graphsurgeon as gs

from trt_kvcache.importer.graph import FLOATS, elem_type, input_or_none, is_op, producer
from trt_kvcache.importer.operators import MOVES as MOVES

_VIEWS = ("Identity", "Transpose", "Reshape", "Squeeze", "Unsqueeze")


def is_float_cast(node: gs.Node) -> bool:
    """True if a node changes nothing but how exact numbers are: casts to integers cut them."""
    return is_op(node, "Cast") and node.attrs.get("to") in FLOATS


def trace_back(tensor: gs.Tensor) -> gs.Tensor:
    """The tensor that `tensor` is a view of."""
    while (node := producer(tensor)) is not None and input_or_none(node, 0) is not None:
        is_cast = is_float_cast(node) and elem_type(node.inputs[0]) in FLOATS
        if not is_cast and not is_op(node, *_VIEWS):
            break
        tensor = node.inputs[0]
    return tensor

"""Layouts: the order of the axes of a cache after operators that only rearrange it.

    past [B, N, L, D] -- Transpose(2, 0, 1, 3) -> [L, B, N, D] -- Reshape -> [L, B*N, D]
    ((0,), (1,), (2,), (3,))   ((2,), (0,), (1,), (3,))            ((2,), (0, 1), (3,))

A layout names, for every axis of a tensor, the axes of the cache that it is made of, outermost first.
"""

from __future__ import annotations

from collections.abc import Sequence

import onnx_graphsurgeon as gs

from trt_kvcache.importer.graph import FLOATS, dims, elem_type, input_or_none, is_op, producer
from trt_kvcache.importer.operators import MOVES as MOVES

_RESHAPES = ("Reshape", "Squeeze", "Unsqueeze")


def is_view(node: gs.Node) -> bool:
    """True if a node only rearranges its first input, whatever its shape is, or rounds it to another type."""
    if is_op(node, "Identity", "Transpose", *_RESHAPES):
        return True
    return is_float_cast(node) and elem_type(node.inputs[0]) in FLOATS


def is_float_cast(node: gs.Node) -> bool:
    """True if a node changes nothing but how exact numbers are: casts to integers cut them."""
    return is_op(node, "Cast") and node.attrs.get("to") in FLOATS


def trace_back(tensor: gs.Tensor, *, cut: bool = False) -> tuple[gs.Tensor, tuple[gs.Node, ...]]:
    """The tensor that `tensor` is a view of, and the nodes from there to `tensor`, in order of execution.

    Args:
        tensor: any.
        cut: look through Slice as well.
    """
    nodes: list[gs.Node] = []
    while (node := producer(tensor)) is not None and input_or_none(node, 0) is not None:
        if not is_view(node) and not (cut and is_op(node, "Slice")):
            break
        nodes.append(node)
        tensor = node.inputs[0]
    return tensor, tuple(reversed(nodes))


def static_layout(nodes: Sequence[gs.Node], rank: int) -> tuple[int, ...] | None:
    """The axes of a tensor in their order after `nodes`; None where one may be split or merged."""
    layout = tuple(range(rank))
    for node in nodes:
        if is_op(node, "Transpose"):
            layout = tuple(layout[axis] for axis in node.attrs.get("perm") or reversed(range(rank)))
        elif is_op(node, *_RESHAPES):
            return None
    return layout


def cache_axis(past: gs.Tensor, nodes: Sequence[gs.Node], place: int) -> int | None:
    """The axis of the cache that is axis `place` of the tensor after `nodes`, as far as it is known without samples.

    After reshapes it is the one with the same name or size, if there is one only.
    """
    layout = static_layout(nodes, len(past.shape))
    if layout is not None:
        return layout[place] if -len(layout) <= place < len(layout) else None
    shape = dims(nodes[-1].outputs[0]) or ()
    size = shape[place] if -len(shape) <= place < len(shape) else "?"
    same = [axis for axis, d in enumerate(dims(past) or ()) if d == size != "?"]
    return same[0] if len(same) == 1 else None

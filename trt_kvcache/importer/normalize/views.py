"""Which axes of a cache lie where, after operators that only rearrange it.

    past [B, N, L, D] -- Transpose(2, 0, 1, 3) -> [L, B, N, D] -- Reshape -> [L, B*N, D]
    ((0,), (1,), (2,), (3,))   ((2,), (0,), (1,), (3,))            ((2,), (0, 1), (3,))

A layout names, for every axis of a tensor, the axes of the cache that it is made of, outermost first.
"""

from __future__ import annotations

from collections.abc import Sequence

import onnx_graphsurgeon as gs

from trt_kvcache.importer.graph import FLOATS, dims, elem_type, input_or_none, is_op, producer
from trt_kvcache.importer.normalize.evidence.probe import Probe

Layout = tuple[tuple[int, ...], ...]
Shape = tuple[int, ...]

_RESHAPES = ("Reshape", "Squeeze", "Unsqueeze")


def is_view(node: gs.Node) -> bool:
    """Whether a node only rearranges its first input, whatever its shape is."""
    if is_op(node, "Identity", "Transpose", *_RESHAPES):
        return True
    return is_op(node, "Cast") and node.attrs.get("to") == elem_type(node.inputs[0])


def is_float_cast(node: gs.Node) -> bool:
    """Whether a node changes nothing but how exact numbers are: casts to integers cut them."""
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


def own_layout(rank: int) -> Layout:
    """The layout of the cache itself."""
    return tuple((axis,) for axis in range(rank))


def permutation(node: gs.Node, rank: int) -> tuple[int, ...]:
    """The permutation of a Transpose."""
    return tuple(node.attrs.get("perm") or reversed(range(rank)))


def static_layout(nodes: Sequence[gs.Node], rank: int) -> Layout | None:
    """The layout behind `nodes` as far as it is known without shapes: None where an axis may be split or merged."""
    layout = own_layout(rank)
    for node in nodes:
        if is_op(node, "Transpose"):
            layout = tuple(layout[axis] for axis in permutation(node, rank))
        elif is_op(node, *_RESHAPES):
            return None
    return layout


def cache_axis(past: gs.Tensor, nodes: Sequence[gs.Node], place: int) -> int | None:
    """The axis of the cache that is axis `place` of the tensor behind `nodes`, as far as it is known without samples.

    Behind reshapes it is the one with the same name or size, if there is one only.
    """
    layout = static_layout(nodes, len(past.shape))
    if layout is not None:
        return layout[place][0] if -len(layout) <= place < len(layout) else None
    shape = dims(nodes[-1].outputs[0]) or ()
    size = shape[place] if -len(shape) <= place < len(shape) else "?"
    same = [axis for axis, d in enumerate(dims(past) or ()) if d == size != "?"]
    return same[0] if len(same) == 1 else None


def layout_after(nodes: Sequence[gs.Node], layout: Layout, sizes: Shape, probe: Probe) -> Layout | None:
    """The layout behind `nodes`.

    Args:
        nodes: views, in order of execution.
        layout: in front of them.
        sizes: of the axes of the cache, in this sample.
        probe: knows the shapes.

    Returns:
        None where an axis of the cache is split, or a shape is unknown.
    """
    known: Layout | None = layout
    for node in nodes:
        if known is not None:
            known = step(node, known, sizes, probe)
    return known


def step(node: gs.Node, layout: Layout, sizes: Shape, probe: Probe) -> Layout | None:
    """The layout behind one node."""
    if is_op(node, "Transpose"):
        return tuple(layout[axis] for axis in permutation(node, len(layout)))
    if is_op(node, *_RESHAPES):
        shape = probe.shape(node.outputs[0].name)
        return None if shape is None else regroup(flat(layout), sizes, shape)
    return layout


def step_back(node: gs.Node, layout: Layout, sizes: Shape, probe: Probe) -> Layout | None:
    """The layout in front of one node, which may also be an Expand that changes nothing in this sample."""
    shape = probe.shape(node.inputs[0].name)
    if is_op(node, "Transpose"):
        before: list[tuple[int, ...]] = [()] * len(layout)
        for position, axis in enumerate(permutation(node, len(layout))):
            before[axis] = layout[position]
        return tuple(before)
    if is_op(node, *_RESHAPES):
        return None if shape is None else regroup(flat(layout), sizes, shape)
    if is_op(node, "Expand"):
        return layout if shape == shape_of(layout, sizes) else None
    return layout if is_view(node) else None


def flat(layout: Layout) -> tuple[int, ...]:
    """The axes of the cache in the order in which they lie in memory."""
    return tuple(axis for group in layout for axis in group)


def shape_of(layout: Layout, sizes: Shape) -> Shape:
    """The shape of a tensor with this layout."""
    shape = []
    for group in layout:
        size = 1
        for axis in group:
            size *= sizes[axis]
        shape.append(size)
    return tuple(shape)


def regroup(axes: Sequence[int], sizes: Shape, shape: Shape) -> Layout | None:
    """Share out `axes`, in order, among the axes of a tensor of this shape; None where one would have to be split."""
    pending = list(axes)
    groups: list[tuple[int, ...]] = []
    for size in shape:
        group: list[int] = []
        product = 1
        if size == 1:
            group = [pending.pop(0)] if pending and sizes[pending[0]] == 1 else []
        while product < size and pending:
            group.append(pending.pop(0))
            product *= sizes[group[-1]]
        if product != size:
            return None
        groups.append(tuple(group))
    if any(sizes[axis] != 1 for axis in pending):
        return None
    if pending and groups:
        groups[-1] += tuple(pending)
    return tuple(groups)


def axis_order(layout: Layout, sizes: Shape) -> tuple[int, ...] | None:
    """Which axis of the cache each axis of a tensor is; None unless each is one. Axes of size 1 may lie anywhere."""
    if len(layout) != len(sizes):
        return None
    if all(len(group) == 1 for group in layout):
        return flat(layout)
    long = [[axis for axis in group if sizes[axis] != 1] for group in layout]
    if any(len(group) > 1 for group in long):
        return None
    taken = {axis for group in long for axis in group}
    rest = iter([axis for axis in range(len(sizes)) if axis not in taken])
    return tuple(group[0] if group else next(rest) for group in long)

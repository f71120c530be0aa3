"""A model as exported whose tensors hold several caches, with an input and an output for each of them.

past.0, past.1 -- Unsqueeze, Concat -> past -- (the model) -> present -- Gather -> present.0, present.1

Caches that lie in another order of axes, or with sequences and heads in one axis, get `[B, ...]` by a Transpose and a
Reshape more.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import onnx
from onnx import ModelProto, NodeProto, TensorProto, helper

from trt_kvcache.importer.plan import Stack
from trt_kvcache.importer.protos import all_nodes, copied, opset_version, replace_field

_AXES_AS_INPUT = 13  # the opset from which on Unsqueeze has them so


def unstacked(model: ModelProto, stacks: Sequence[Stack]) -> ModelProto:
    """The model with an input or output for each part of its stacks, as `CachePlan.original` has them."""
    copy = copied(model)
    before: list[NodeProto] = []
    after: list[NodeProto] = []
    for stack in stacks:
        whole = f"{stack.name}/whole"
        values = copy.graph.input if stack.io == "input" else copy.graph.output
        place, value = next((i, v) for i, v in enumerate(values) if v.name == stack.name)
        kind, rank = value.type.tensor_type.elem_type, stack.parts[0].place.count(None) + (stack.heads is not None)
        del values[place]
        values.extend(helper.make_tensor_value_info(part.name, kind, [None] * rank) for part in stack.parts)
        for node in all_nodes(copy.graph):
            for names in (node.input, node.output):
                names[:] = [whole if name == stack.name else name for name in names]
        if stack.io == "input":
            before += _whole(copy.graph, stack, whole, opset_version(model) or 1)
        else:
            after += _parts(copy.graph, stack, whole)
    replace_field(copy.graph.node, [*before, *copy.graph.node, *after])
    return copy


def _whole(graph: onnx.GraphProto, stack: Stack, whole: str, opset: int) -> list[NodeProto]:
    """Nodes that make the tensor as exported."""
    turned, stacked = f"{whole}/turned", f"{whole}/stacked"
    turned = whole if stack.heads is None else turned
    stacked = turned if stack.order is None else stacked
    names = [part.name for part in stack.parts]
    if stack.beside is not None:
        nodes = [helper.make_node("Concat", names, [stacked], stacked, axis=stack.beside)]
    elif all(at is None for at in stack.parts[0].place):  # turned alone, not stacked
        nodes = [helper.make_node("Identity", names, [stacked], stacked)]
    else:
        nodes = _joined(stack, stacked, opset)
    if stack.order is not None:
        nodes.append(helper.make_node("Transpose", [stacked], [turned], turned, perm=stack.order))
    if stack.heads is not None:
        nodes += _merged(graph, turned, whole, stack.heads, split=False)
    return nodes


def _parts(graph: onnx.GraphProto, stack: Stack, whole: str) -> list[NodeProto]:
    """Nodes that split a tensor as exported."""
    nodes, name = [], whole
    if stack.heads is not None:
        nodes += _merged(graph, name, f"{whole}/heads", stack.heads, split=True)
        name = f"{whole}/heads"
    if stack.order is not None:
        perm = sorted(range(len(stack.order)), key=stack.order.__getitem__)
        nodes.append(helper.make_node("Transpose", [name], [f"{whole}/ordered"], f"{whole}/ordered", perm=perm))
        name = f"{whole}/ordered"
    if stack.beside is not None:
        names, size = [part.name for part in stack.parts], stack.shape[stack.beside]
        assert isinstance(size, int)
        sizes = helper.make_tensor(f"{whole}/sizes", TensorProto.INT64, [len(names)], [size // len(names)] * len(names))
        graph.initializer.append(sizes)
        return [*nodes, helper.make_node("Split", [name, sizes.name], names, f"{whole}/split", axis=stack.beside)]
    return [*nodes, *take_parts(graph, stack, name)]


def _merged(graph: onnx.GraphProto, source: str, result: str, heads: int, *, split: bool) -> list[NodeProto]:
    """Nodes that make ``[B * heads, ...]`` of ``[B, heads, ...]``, or the other way."""
    names = {n: f"{result}/{n}" for n in ("shape", "zero", "first", "end", "heads", "count", "rows", "rest", "sizes")}
    for name, value in (("zero", 0), ("first", 1 if split else 2), ("end", 1 << 31), ("heads", heads)):
        graph.initializer.append(helper.make_tensor(names[name], TensorProto.INT64, [1], [value]))

    def node(op: str, inputs: list[str], output: str, **attributes: Any) -> NodeProto:
        return helper.make_node(op, [names[n] for n in inputs], [names[output]], names[output], **attributes)

    counted = ["count", "heads"] if split else ["count"]
    return [
        helper.make_node("Shape", [source], [names["shape"]], names["shape"]),
        node("Slice", ["shape", "zero", "first"], "rows"),
        node("Slice", ["shape", "first", "end"], "rest"),
        node("Div", ["rows", "heads"], "count") if split else node("ReduceProd", ["rows"], "count", keepdims=1),
        node("Concat", [*counted, "rest"], "sizes", axis=0),
        # A past may have no rows, and 0 is a size here.
        helper.make_node("Reshape", [source, names["sizes"]], [result], result, allowzero=1),
    ]


def _joined(stack: Stack, whole: str, opset: int) -> list[NodeProto]:
    """Nodes that make the tensor of its parts, the innermost of the axes that they are stacked along first."""
    axes = [axis for axis, at in enumerate(stack.parts[0].place) if at is not None]
    nodes = []
    names: dict[tuple[int, ...], str] = {}
    for part in stack.parts:
        name = f"{part.name}/unsqueezed"
        if opset < _AXES_AS_INPUT:
            nodes.append(helper.make_node("Unsqueeze", [part.name], [name], name, axes=axes))
        else:
            nodes.append(helper.make_node("Constant", [], [f"{name}/axes"], value_ints=axes))
            nodes.append(helper.make_node("Unsqueeze", [part.name, f"{name}/axes"], [name], name))
        names[tuple(at for at in part.place if at is not None)] = name
    for axis in reversed(axes):
        rows: dict[tuple[int, ...], list[str]] = {}
        for at in sorted(names):
            rows.setdefault(at[:-1], []).append(names[at])
        names = {at: "/".join((whole, *map(str, at))) for at in rows}
        nodes += [helper.make_node("Concat", rows[at], [name], name, axis=axis) for at, name in names.items()]
    return nodes


def take_parts(graph: onnx.GraphProto, stack: Stack, whole: str) -> list[NodeProto]:
    """Nodes that take parts out of the tensor `whole`, along the last axis first: axes before it keep their numbers."""
    nodes = []
    for part in stack.parts:
        name = whole
        for axis, at in reversed([*enumerate(part.place)]):
            if at is not None:
                index, taken = f"{part.name}/place_{axis}", f"{part.name}/along_{axis}"
                graph.initializer.append(helper.make_tensor(index, TensorProto.INT64, [], [at]))
                nodes.append(helper.make_node("Gather", [name, index], [taken], taken, axis=axis))
                name = taken
        nodes.append(helper.make_node("Identity", [name], [part.name], f"{part.name}/part"))
    return nodes

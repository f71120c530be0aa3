"""A model as exported whose tensors hold several caches, with an input and an output for each of them.

past.0, past.1 -- Unsqueeze, Concat -> past -- (the model) -> present -- Gather -> present.0, present.1
"""

from __future__ import annotations

import onnx
from onnx import ModelProto, NodeProto, TensorProto, helper

from trt_kvcache.importer.plan import CachePlan, Stack
from trt_kvcache.importer.protos import all_nodes, copied, opset_version, replace_field

_AXES_AS_INPUT = 13  # the opset from which on Unsqueeze has them so


def apart(model: ModelProto, plan: CachePlan) -> ModelProto:
    """The model with the interface that `plan.original` has; see `trt_kvcache.importer.extensions`."""
    made = copied(model)
    before: list[NodeProto] = []
    after: list[NodeProto] = []
    for stack in plan.stacks:
        whole = f"{stack.name}/whole"
        values = made.graph.input if stack.io == "input" else made.graph.output
        place, value = next((i, v) for i, v in enumerate(values) if v.name == stack.name)
        kind, rank = value.type.tensor_type.elem_type, stack.parts[0].place.count(None)
        del values[place]
        values.extend(helper.make_tensor_value_info(part.name, kind, [None] * rank) for part in stack.parts)
        for node in all_nodes(made.graph):
            for names in (node.input, node.output):
                names[:] = [whole if name == stack.name else name for name in names]
        if stack.io == "input":
            before += _joined(stack, whole, opset_version(model) or 1)
        else:
            after += take_parts(made.graph, stack, whole)
    replace_field(made.graph.node, [*before, *made.graph.node, *after])
    return made


def _joined(stack: Stack, whole: str, opset: int) -> list[NodeProto]:
    """Nodes that make the tensor of its parts, the innermost of the axes that they are stacked along first."""
    axes = [axis for axis, at in enumerate(stack.parts[0].place) if at is not None]
    nodes = []
    held: dict[tuple[int, ...], str] = {}
    for part in stack.parts:
        name = f"{part.name}/unsqueezed"
        if opset < _AXES_AS_INPUT:
            nodes.append(helper.make_node("Unsqueeze", [part.name], [name], name, axes=axes))
        else:
            nodes.append(helper.make_node("Constant", [], [f"{name}/axes"], value_ints=axes))
            nodes.append(helper.make_node("Unsqueeze", [part.name, f"{name}/axes"], [name], name))
        held[tuple(at for at in part.place if at is not None)] = name
    for axis in reversed(axes):
        rows: dict[tuple[int, ...], list[str]] = {}
        for at in sorted(held):
            rows.setdefault(at[:-1], []).append(held[at])
        held = {at: "/".join((whole, *map(str, at))) for at in rows}
        nodes += [helper.make_node("Concat", rows[at], [name], name, axis=axis) for at, name in held.items()]
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

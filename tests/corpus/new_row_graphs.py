"""Decoders that give back the new rows of their caches only: what models that grow by Concat become if edited so."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import onnx
from foreign_tools import foreign
from onnx import TensorProto, helper

from corpus import Entry, built

Nodes = list[onnx.NodeProto]
Form = Callable[[str, str], Nodes]


def as_joined(rows: str, output: str) -> Nodes:
    return [helper.make_node("Identity", [rows], [output], name=f"{output}/given")]


def transposed(*perm: int) -> Form:
    return lambda rows, output: [helper.make_node("Transpose", [rows], [output], name=f"{output}/given", perm=perm)]


def flat(rows: str, output: str) -> Nodes:
    """``[B, S, N * D]`` of ``[B, N, S, D]``."""
    shape = helper.make_tensor("shape", TensorProto.INT64, [3], [0, 0, -1])
    return [
        helper.make_node("Transpose", [rows], [f"{output}/rows"], name=f"{output}/moved", perm=(0, 2, 1, 3)),
        helper.make_node("Constant", [], [f"{output}/shape"], name=f"{output}/sizes", value=shape),
        helper.make_node("Reshape", [f"{output}/rows", f"{output}/shape"], [output], name=f"{output}/given"),
    ]


def changed(op: str) -> Form:
    """Something else than what is joined."""
    return lambda rows, output: [helper.make_node(op, [rows], [output], name=f"{output}/given")]


def give_new_rows(model: onnx.ModelProto, *forms: Form) -> onnx.ModelProto:
    """The same decoder, whose outputs are what its Concats join with the past.

    Args:
        model: each of its caches is the output of a Concat. Not changed.
        forms: how the outputs are made of the new rows, taken in turn.
    """
    made = onnx.ModelProto()
    made.CopyFrom(model)
    makers = {name: node for node in made.graph.node for name in node.output}
    inputs = {value.name for value in made.graph.input}
    turn = 0
    for value in made.graph.output:
        node = makers[value.name]
        if node.op_type != "Concat" or not inputs & set(node.input):
            continue
        whole = f"{value.name}/whole"
        for reader in made.graph.node:
            reader.input[:] = [whole if name == value.name else name for name in reader.input]
        node.output[0] = whole
        made.graph.node.extend(forms[turn % len(forms)](node.input[1], value.name))
        value.type.tensor_type.ClearField("shape")
        turn += 1
    return onnx.shape_inference.infer_shapes(made, data_prop=True)


def lay_caches(model: onnx.ModelProto, *orders: tuple[int, ...]) -> onnx.ModelProto:
    """The same decoder with caches in other layouts.

    Args:
        model: each of its caches is the output of a Concat. Not changed.
        orders: the axes of caches in the order in which they shall lie, taken in turn.
    """
    made = onnx.ModelProto()
    made.CopyFrom(model)
    outputs = {value.name: value for value in made.graph.output}
    inputs = {value.name: value for value in made.graph.input}
    nodes: Nodes = []
    turn = 0
    for node in made.graph.node:
        nodes.append(node)
        if node.op_type != "Concat" or node.input[0] not in inputs or node.output[0] not in outputs:
            continue
        order, (past, new), whole = orders[turn % len(orders)], node.input, node.output[0]
        turn += 1
        for value in (inputs[past], outputs[whole]):
            shape = value.type.tensor_type.shape
            dims = [shape.dim[axis] for axis in order]
            moved = onnx.TensorShapeProto(dim=dims)
            shape.CopyFrom(moved)
        nodes[-1:] = [
            helper.make_node("Transpose", [new], [f"{new}/laid"], name=f"{new}/lay", perm=order),
            node,
            helper.make_node("Transpose", [whole], [f"{whole}/read"], name=f"{whole}/read", perm=_inverse(order)),
        ]
        rank = len(order)
        node.input[1] = f"{new}/laid"
        axis = next(a for a in node.attribute if a.name == "axis")
        axis.i = order.index(axis.i % rank)
        for reader in made.graph.node:
            if reader is node:
                continue
            for old, other in ((past, f"{past}/read"), (whole, f"{whole}/read")):
                reader.input[:] = [other if name == old else name for name in reader.input]
        nodes.insert(
            0, helper.make_node("Transpose", [past], [f"{past}/read"], name=f"{past}/read", perm=_inverse(order))
        )
    del made.graph.node[:]
    made.graph.node.extend(nodes)
    return made


def turn_within(model: onnx.ModelProto, order: tuple[int, ...]) -> onnx.ModelProto:
    """The same decoder, whose caches come and go in another layout than it joins them in.

    Args:
        model: each of its caches is the output of a Concat. Not changed.
        order: the axes of caches as the Concat has them, in the order in which they shall lie outside.
    """
    made = onnx.ModelProto()
    made.CopyFrom(model)
    nodes: Nodes = []
    for value in (*made.graph.input, *made.graph.output):
        if not value.name.startswith(("past", "present")):
            continue
        shape = value.type.tensor_type.shape
        shape.CopyFrom(onnx.TensorShapeProto(dim=[shape.dim[axis] for axis in order]))
        inner = f"{value.name}/inner"
        for node in made.graph.node:
            node.input[:] = [inner if name == value.name else name for name in node.input]
            node.output[:] = [inner if name == value.name else name for name in node.output]
        ends, perm = ([value.name], [inner]), _inverse(order)
        if value.name.startswith("present"):
            ends, perm = ([inner], [value.name]), list(order)
        nodes.append(helper.make_node("Transpose", *ends, name=f"{value.name}/turn", perm=perm))
    pasts = [n for n in nodes if n.output[0].endswith("/inner")]
    kept = [*pasts, *made.graph.node, *(n for n in nodes if n not in pasts)]
    del made.graph.node[:]
    made.graph.node.extend(kept)
    return made


def _inverse(order: tuple[int, ...]) -> list[int]:
    return [order.index(axis) for axis in range(len(order))]


def entries() -> Iterator[Entry]:
    models = {
        "joined": lambda: give_new_rows(foreign("concat"), as_joined),
        "flat": lambda: give_new_rows(foreign("concat"), flat),
        "relu": lambda: give_new_rows(foreign("concat"), changed("Relu")),
        "laid 0213": lambda: lay_caches(foreign("concat"), (0, 2, 1, 3), (0, 1, 3, 2)),
        "turned": lambda: turn_within(foreign("concat"), (0, 2, 1, 3)),
    }
    yield from built("new rows", models, capacity=32)

"""Scalars where operators take a list of numbers: onnxsim 0.8.1 keeps one constant for both ``1`` and ``[1]``.

ONNX asks for lists there. ONNX Runtime runs few of these operators with a scalar, and nothing could be compared.
"""

from __future__ import annotations

from collections.abc import Mapping

from onnx import GraphProto, ModelProto, TensorProto

from trt_kvcache.importer.protos import attribute_graphs, is_op

_REDUCTIONS = ("L1", "L2", "LogSum", "LogSumExp", "Max", "Mean", "Min", "Prod", "Sum", "SumSquare")
_LISTS: dict[str, tuple[int, ...]] = {
    **dict.fromkeys((f"Reduce{name}" for name in _REDUCTIONS), (1,)),
    **dict.fromkeys(("Squeeze", "Unsqueeze", "Reshape", "Expand", "Tile", "Split"), (1,)),
    "Slice": (1, 2, 3, 4), "Pad": (1, 3), "ConstantOfShape": (0,), "Concat": tuple(range(64)),
}  # fmt: skip


def list_scalars(model: ModelProto) -> bool:
    """Give, in place, operators a list of one number where a constant scalar stands for it.

    Returns:
        Whether there were any.
    """
    return _list(model.graph, {})


def _list(graph: GraphProto, outer: Mapping[str, TensorProto]) -> bool:
    """A graph and the bodies in it, which may read what `outer` has."""
    constants = [
        (n.output[0], a.t) for n in graph.node if is_op(n, "Constant") for a in n.attribute if a.name == "value"
    ]
    tensors = {**outer, **dict(constants), **{t.name: t for t in graph.initializer}}
    scalars = {name: t for name, t in tensors.items() if t.data_type == TensorProto.INT64 and not t.dims}
    made: dict[str, TensorProto] = {}
    is_edited = False
    for node in graph.node:
        for place in _LISTS.get(node.op_type, ()) if is_op(node, node.op_type) else ():
            name = node.input[place] if place < len(node.input) else ""
            if name in scalars:
                made.setdefault(name, _listed(scalars[name], f"{name}/list"))
                node.input[place] = made[name].name
        for attribute in node.attribute:
            for body in attribute_graphs(attribute):
                is_edited |= _list(body, tensors)
    graph.initializer.extend(made.values())
    return is_edited or bool(made)


def _listed(scalar: TensorProto, name: str) -> TensorProto:
    tensor = TensorProto()
    tensor.CopyFrom(scalar)
    tensor.name, tensor.dims[:] = name, [1]
    return tensor

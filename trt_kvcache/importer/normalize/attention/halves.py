"""Sizes that ONNX's shape inference loses at a division: TorchScript's chunk computes its bounds from a known width.

    Shape(x [B, N, S, 8]) -- Gather 3 -- Add 1 -- Div 2 -- Mul 1        the end of Slice, 4

Behind a Slice with an unknown end no size is known (onnx 1.23.2).
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from math import prod

from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper

from trt_kvcache.importer.protos import elem_type_of, is_op, shape_of

_INT64 = int(TensorProto.INT64)
_DEPTH = 12
_ARITHMETIC: dict[str, Callable[[int, int], int]] = {
    "Add": operator.add, "Sub": operator.sub, "Mul": operator.mul, "Div": operator.floordiv,
}  # fmt: skip
Sizes = list[int | None] | None


def fold_divisions(model: ModelProto) -> bool:
    """Put constants in the place of divisions of sizes that are known, and of what is computed with these.

    Args:
        model: with the shapes that ONNX infers; edited in place.

    Returns:
        Whether there were any.
    """
    if not any(is_op(node, "Div") for node in model.graph.node):
        return False
    known = _Known(model)
    made: list[tuple[NodeProto, NodeProto]] = []
    for node in (node for node in model.graph.node if node.op_type in _ARITHMETIC and known.is_integer(node.input[0])):
        sizes = [size for size in known.sizes(node.output[0]) or [None] if size is not None]
        shape = known.shape(node.output[0])
        if shape is not None and len(sizes) == prod(shape):
            tensor = helper.make_tensor(node.output[0], _INT64, shape, sizes)
            made.append((node, helper.make_node("Constant", [], [node.output[0]], node.name, value=tensor)))
    for node, constant in made:
        node.CopyFrom(constant)
    return bool(made)


class _Known:
    """What follows from the shapes of a model."""

    def __init__(self, model: ModelProto) -> None:
        graph = model.graph
        self._infos = {info.name: info for info in (*graph.value_info, *graph.input, *graph.output)}
        self._makers = {name: node for node in graph.node for name in node.output}
        constants = [
            (n.output[0], a.t) for n in graph.node if is_op(n, "Constant") for a in n.attribute if a.HasField("t")
        ]
        tensors = {t.name: t for t in graph.initializer} | dict(constants)
        here = {name: t for name, t in tensors.items() if t.data_location != TensorProto.EXTERNAL}
        self._tensors = {name: t for name, t in here.items() if t.data_type == _INT64 and len(t.dims) < 2}

    def is_integer(self, name: str) -> bool:
        return name in self._tensors or elem_type_of(self._infos.get(name)) == _INT64

    def shape(self, name: str) -> list[int] | None:
        shape = shape_of(self._infos.get(name))
        return None if shape is None else [dim for dim in shape if isinstance(dim, int)]

    def sizes(self, name: str, depth: int = _DEPTH) -> Sizes:
        """The numbers of a tensor of one axis at most; None in place of those that are open, or of all."""
        if name in self._tensors:
            return [int(n) for n in numpy_helper.to_array(self._tensors[name]).reshape(-1)]
        node = self._makers.get(name)
        if node is None or not depth:
            return None
        if is_op(node, "Shape"):
            shape, bounds = shape_of(self._infos.get(node.input[0])), {a.name: a.i for a in node.attribute}
            found = None if shape is None else [d if isinstance(d, int) else None for d in shape]
            return None if found is None else found[bounds.get("start", 0) : bounds.get("end")]
        if node.op_type not in (*_ARITHMETIC, "Gather", "Unsqueeze", "Squeeze", "Identity"):
            return None
        given = [self.sizes(operand, depth - 1) for operand in node.input]
        return None if any(sizes is None for sizes in given) else _made(node, [sizes or [] for sizes in given])


def _made(node: NodeProto, given: Sequence[Sequence[int | None]]) -> Sizes:
    if is_op(node, "Gather"):
        places = [n for n in given[1] if n is not None and -len(given[0]) <= n < len(given[0])]
        return [given[0][n] for n in places] if len(places) == len(given[1]) else None
    if node.op_type not in _ARITHMETIC:
        return list(given[0])
    one, other = given
    count = max(len(one), len(other))
    if len(one) not in (1, count) or len(other) not in (1, count):
        return None
    return [_result(node.op_type, one[i % len(one)], other[i % len(other)]) for i in range(count)]


def _result(op: str, one: int | None, other: int | None) -> int | None:
    if one is None or other is None or (op == "Div" and (one < 0 or other < 1)):
        return None
    return _ARITHMETIC[op](one, other)

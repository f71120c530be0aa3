"""Transpose and Slice whose operands are none, which ONNX's checker and its shape inference let pass.

    Transpose(x [B, N, P, H]; perm=[0, -1, 1, 3])        Slice(x, starts [0], ends [4], axes [])

No engine runs them. Whoever follows a cache through such an operator would find no axis for one of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy.typing as npt
from onnx import GraphProto, NodeProto, TensorProto, numpy_helper

from trt_kvcache.errors import InvalidModelError
from trt_kvcache.importer.protos import describe, is_op, shape_of

__all__ = ["check_moves"]

Array = npt.NDArray[Any]

_BOUNDS, _AXES = slice(1, 5), 3  # operands of a Slice: starts, ends, axes, steps


def check_moves(graph: GraphProto, source: str) -> None:
    """Check every Transpose and Slice of a graph, as far as constants and shapes say what they do.

    Args:
        graph: with inferred shapes and without functions; bodies of control flow are left out.
        source: the file's name, for messages.

    Raises:
        InvalidModelError: naming the node.
    """
    infos = {value.name: value for value in (*graph.value_info, *graph.output, *graph.input)}
    ranks = {name: len(shape) for name, value in infos.items() if (shape := shape_of(value)) is not None}
    ranks |= {tensor.name: len(tensor.dims) for tensor in graph.initializer}
    known = _constants(graph)
    for node in graph.node:
        rank = ranks.get(node.input[0]) if node.input else None
        wrong = ""
        if is_op(node, "Transpose"):
            wrong = _wrong_perm(node, rank)
        elif is_op(node, "Slice"):
            wrong = _wrong_bounds(node, rank, known)
        if wrong:
            of = "" if rank is None else f" of '{node.input[0]}', which has {rank} axes,"
            raise InvalidModelError(f"{source}: {describe(node)}{of} has {wrong}; export the model again")


def _constants(graph: GraphProto) -> dict[str, Array]:
    """Integer constants by name."""
    found = {tensor.name: tensor for tensor in graph.initializer}
    for node in graph.node:
        if is_op(node, "Constant"):
            found.update((node.output[0], a.t) for a in node.attribute if a.name == "value")
    integers = {n: t for n, t in found.items() if t.data_type in (TensorProto.INT64, TensorProto.INT32)}
    return {n: numpy_helper.to_array(t) for n, t in integers.items() if t.data_location != TensorProto.EXTERNAL}


def _wrong_perm(node: NodeProto, rank: int | None) -> str:
    perm = next((list(a.ints) for a in node.attribute if a.name == "perm"), [])
    is_legal = sorted(perm) == list(range(len(perm) if rank is None else rank))
    return "" if not perm or is_legal else f"the perm {perm}, which is none"


def _wrong_bounds(node: NodeProto, rank: int | None, known: Mapping[str, Array]) -> str:
    names = [name for name in node.input[_BOUNDS] if name]
    bounds = [known[name] for name in names if name in known]
    if any(numbers.ndim != 1 for numbers in bounds) or len({numbers.size for numbers in bounds}) > 1:
        return f"operands of the shapes {', '.join(str(list(n.shape)) for n in bounds)}; they are one list of as many"
    axes = known.get(node.input[_AXES]) if len(node.input) > _AXES else None
    if axes is not None and rank is not None and any(not -rank <= axis < rank for axis in axes.tolist()):
        return f"the axes {axes.tolist()}"
    return ""

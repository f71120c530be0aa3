"""Repairs of what exporters and optimizers write and ONNX forbids, or ONNX Runtime trips over later.

nodes in any order              ONNX Runtime's float16 converter appends the Casts of inputs and of operators in float32
the domain ai.onnx              another name of ONNX's own, which is empty; ONNX's checker finds no operator there
no import of com.microsoft      its quantizers add operators of it
shapes stated for initializers  onnxruntime-genai states [] for a constant [1], which its optimizer makes an initializer
names of its own casts          its optimizer saves them, and gives them again when it loads what became of the model:
                                "Duplicate definition of name" (1.32)
scalars for lists               onnxsim 0.8.1 keeps one constant for both ``1`` and ``[1]``; ONNX asks for lists
defaults of inputs              an initializer of the same name. Old exporters list weights so, which stay constants; as
                                a constant, positions would be the same for every token
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping

from onnx import GraphProto, ModelProto, OperatorSetIdProto, TensorProto, TensorShapeProto

from trt_kvcache.importer.protos import (
    DEFAULT_DOMAINS,
    Scope,
    attribute_graphs,
    is_op,
    iter_scopes,
    names_read,
    nested_scopes,
    shape_of,
)
from trt_kvcache.importer.roles.config import NamePattern, shipped_patterns

__all__ = ["drop_defaults", "list_scalars", "make_strict", "rename_casts"]

_CONTRIB = "com.microsoft"
_LONG = "ai.onnx"
_CASTS = "InsertedPrecisionFreeCast_"
_REDUCTIONS = ("L1", "L2", "LogSum", "LogSumExp", "Max", "Mean", "Min", "Prod", "Sum", "SumSquare")
_BROUGHT = {"TensorScatter": (0, 2), "Attention": (4, 5, 6)}
"""Inputs of operators that no default can stand for: a cache, where it is written, how much of it is valid."""
_LISTS: dict[str, tuple[int, ...]] = {
    **dict.fromkeys((f"Reduce{name}" for name in _REDUCTIONS), (1,)),
    **dict.fromkeys(("Squeeze", "Unsqueeze", "Reshape", "Expand", "Tile", "Split"), (1,)),
    "Slice": (1, 2, 3, 4), "Pad": (1, 3), "ConstantOfShape": (0,), "Concat": tuple(range(64)),
}  # fmt: skip


def make_strict(model: ModelProto) -> None:
    """Make, in place, strict ONNX of the above. Other faults stay for ONNX's checker to name."""
    _unalias(model)
    for scope in iter_scopes(model):
        _sort(scope)
        _unstate(scope)
    used = {node.domain for scope in iter_scopes(model) for node in scope.node}
    if _CONTRIB in used - {entry.domain for entry in model.opset_import}:
        model.opset_import.add(domain=_CONTRIB, version=1)


def _unalias(model: ModelProto) -> None:
    """Write ONNX's own domain in its short form. Two versions of it stay for the checker."""
    for owner in (model, *model.functions):
        versions = {entry.version for entry in owner.opset_import if entry.domain in DEFAULT_DOMAINS}
        if len(versions) != 1 or all(entry.domain != _LONG for entry in owner.opset_import):
            continue
        others = [entry for entry in owner.opset_import if entry.domain not in DEFAULT_DOMAINS]
        kept = [OperatorSetIdProto(domain="", version=versions.pop()), *map(_copied, others)]
        del owner.opset_import[:]
        owner.opset_import.extend(kept)
    for scope in iter_scopes(model):
        for node in scope.node:
            if node.domain == _LONG:
                node.domain = ""


def _copied(entry: OperatorSetIdProto) -> OperatorSetIdProto:
    return OperatorSetIdProto(domain=entry.domain, version=entry.version)


def rename_casts(graph: GraphProto) -> None:
    """Give, in place, what has the name of ONNX Runtime's own casts another one; inputs and outputs keep theirs."""
    kept = {value.name for value in (*graph.input, *graph.output)}

    def other(name: str) -> str:
        return f"trt_kvcache/{name}" if str(name).startswith(_CASTS) and name not in kept else name

    for scope in nested_scopes(graph):
        for node in scope.node:
            for names in (node.input, node.output):
                if any(other(name) != name for name in names):
                    names[:] = [other(name) for name in names]
        if isinstance(scope, GraphProto):
            for value in (*scope.initializer, *scope.value_info, *scope.input, *scope.output):
                if other(value.name) != value.name:
                    value.name = other(value.name)


def _unstate(scope: Scope) -> None:
    """Drop what is stated of the shapes of initializers, which have their own."""
    known = {tensor.name for tensor in scope.initializer} if isinstance(scope, GraphProto) else set()
    kept = [value for value in scope.value_info if value.name not in known]
    if len(kept) < len(scope.value_info):
        del scope.value_info[:]
        scope.value_info.extend(kept)


def _sort(scope: Scope) -> None:
    """Sort topologically; of the nodes that could come next, the one that came first does."""
    makers: dict[str, int] = {}
    for index, node in enumerate(scope.node):
        for name in node.output:
            makers.setdefault(name, index)
    needs = [{makers[name] for name in names_read(node) if name in makers} for node in scope.node]
    if all(not before or max(before) < index for index, before in enumerate(needs)):
        return
    readers: list[list[int]] = [[] for _ in needs]
    for index, before in enumerate(needs):
        for maker in before:
            readers[maker].append(index)
    missing = [len(before) for before in needs]
    ready = [index for index, count in enumerate(missing) if not count]
    order = []
    while ready:
        index = heapq.heappop(ready)
        order.append(index)
        for reader in readers[index]:
            missing[reader] -= 1
            if not missing[reader]:
                heapq.heappush(ready, reader)
    if len(order) == len(needs):  # else: a cycle
        places = {index: place for place, index in enumerate(order)}
        indices = iter(range(len(order)))
        scope.node.sort(key=lambda _: places[next(indices)])


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


def drop_defaults(graph: GraphProto, named: Iterable[NamePattern] = ()) -> bool:
    """Let, in place, whatever a step brings have no default.

    That are inputs with an open dimension, or a name that has a role, or that are a cache, its indices or its lengths.

    Args:
        graph: edited.
        named: the caller's own names of roles, beside the shipped ones.

    Returns:
        Whether anything was changed.
    """
    patterns = (*named, *shipped_patterns())
    brought = {
        name
        for node in graph.node
        for place, name in enumerate(node.input)
        if node.domain in DEFAULT_DOMAINS and place in _BROUGHT.get(node.op_type, ())
    }
    inputs = {value.name: shape_of(value) for value in graph.input}
    given = {
        tensor.name
        for tensor in graph.initializer
        if tensor.name in inputs
        and (
            tensor.name in brought
            or any(not isinstance(dim, int) for dim in inputs[tensor.name] or ())
            or any(pattern.matches(tensor.name, "input") for pattern in patterns)
        )
    }
    kept = [tensor for tensor in graph.initializer if tensor.name not in given]
    if given:
        del graph.initializer[:]
        graph.initializer.extend(kept)
    return _shape_constants(graph, kept) or bool(given)


def _shape_constants(graph: GraphProto, kept: Iterable[TensorProto]) -> bool:
    """Let inputs that are listed without a shape have that of their default: what reads them asks for one."""
    shapes = {tensor.name: tensor.dims for tensor in kept}
    bare = [value for value in graph.input if value.name in shapes and shape_of(value) is None]
    for value in bare:
        shape = value.type.tensor_type.shape
        shape.SetInParent()  # of no axes, too
        shape.dim.extend(TensorShapeProto.Dimension(dim_value=size) for size in shapes[value.name])
    return bool(bare)

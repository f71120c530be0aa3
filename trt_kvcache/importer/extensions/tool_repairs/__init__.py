"""Repair models of exporters and optimizers that break rules of ONNX, or that ONNX Runtime cannot load later.

nodes in any order              ONNX Runtime's float16 converter appends the Casts of inputs and of operators in float32
the domain ai.onnx              another name of ONNX's own, which is empty; ONNX's checker finds no operator there
no import of com.microsoft      its quantizers add operators of it
shapes stated for initializers  onnxruntime-genai states [] for a constant [1], which its optimizer makes an initializer
values that are stated twice    ONNX Runtime's float16 converter states outputs once more, without their shapes
names of its own casts          its optimizer saves them, and gives them again when it loads what became of the model:
                                "Duplicate definition of name" (1.32)
scalars for lists               onnxsim 0.8.1 keeps one constant for both ``1`` and ``[1]``; ONNX asks for lists
two steps in one model          `merged`: optimum joins the first step and all others
slices that are assigned to     `assigned_slices`: torch.onnx writes parts of keys into zeros by ScatterND
"""

from __future__ import annotations

from collections.abc import Mapping
from graphlib import CycleError, TopologicalSorter

from onnx import GraphProto, ModelProto, OperatorSetIdProto, TensorProto, TypeProto

from trt_kvcache.importer.extensions.tool_repairs import assigned_slices
from trt_kvcache.importer.extensions.tool_repairs.merged import choose as choose
from trt_kvcache.importer.protos import (
    DEFAULT_DOMAINS,
    Scope,
    attribute_graphs,
    copied,
    is_op,
    iter_scopes,
    names_read,
    nested_scopes,
    replace_field,
)

__all__ = ["choose", "read", "rewrite"]

_CONTRIB = "com.microsoft"
_LONG = "ai.onnx"
_CASTS = "InsertedPrecisionFreeCast_"
_REDUCTIONS = ("L1", "L2", "LogSum", "LogSumExp", "Max", "Mean", "Min", "Prod", "Sum", "SumSquare")
_LISTS: dict[str, tuple[int, ...]] = {
    **dict.fromkeys((f"Reduce{name}" for name in _REDUCTIONS), (1,)),
    **dict.fromkeys(("Squeeze", "Unsqueeze", "Reshape", "Expand", "Tile", "Split"), (1,)),
    "Slice": (1, 2, 3, 4), "Pad": (1, 3), "ConstantOfShape": (0,), "Concat": tuple(range(64)),
}  # fmt: skip


def rewrite(model: ModelProto) -> tuple[ModelProto, None]:
    """Replace assignments to slices with one Concat. This is a guess, which the check tests."""
    return assigned_slices.rewrite(model), None


def read(model: ModelProto) -> bool:
    """Repair a model in place; True if operators now read other tensors than those of the file.

    Other faults stay for ONNX's checker to name.
    """
    _unalias(model)
    for scope in iter_scopes(model):
        _sort(scope)
        _unstate(scope)
    used = {node.domain for scope in iter_scopes(model) for node in scope.node}
    if _CONTRIB in used - {entry.domain for entry in model.opset_import}:
        model.opset_import.add(domain=_CONTRIB, version=1)
    _rename_casts(model.graph)
    return _list(model.graph, {})


def _unalias(model: ModelProto) -> None:
    """Write ONNX's own domain in its short form. Two versions of it stay for the checker."""
    for owner in (model, *model.functions):
        versions = {entry.version for entry in owner.opset_import if entry.domain in DEFAULT_DOMAINS}
        if len(versions) != 1 or all(entry.domain != _LONG for entry in owner.opset_import):
            continue
        others = [entry for entry in owner.opset_import if entry.domain not in DEFAULT_DOMAINS]
        replace_field(owner.opset_import, [OperatorSetIdProto(domain="", version=versions.pop()), *others])
    for scope in iter_scopes(model):
        for node in scope.node:
            if node.domain == _LONG:
                node.domain = ""


def _rename_casts(graph: GraphProto) -> None:
    """Rename, in place, tensors and nodes named like ONNX Runtime's own casts, except inputs and outputs."""
    fixed = {value.name for value in (*graph.input, *graph.output)}

    def other(name: str) -> str:
        return f"trt_kvcache/{name}" if str(name).startswith(_CASTS) and name not in fixed else name

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
    """Drop stated shapes of initializers, and merge values that are stated twice."""
    is_graph = isinstance(scope, GraphProto)
    known = {tensor.name for tensor in scope.initializer} if is_graph else set()
    first = {value.name: value for value in ((*scope.output, *scope.input) if is_graph else ())}
    stated = []
    for value in (value for value in scope.value_info if value.name not in known):
        if value.name in first:
            _add_stated(first[value.name].type, value.type)
        else:
            first[value.name] = value
            stated.append(value)
    if len(stated) < len(scope.value_info):
        replace_field(scope.value_info, stated)


def _add_stated(known: TypeProto, other: TypeProto) -> None:
    """Add facts of `other` to `known`, in place. If both contradict each other, `known` stays."""
    if other.WhichOneof("value") != "tensor_type" or known.WhichOneof("value") not in (None, "tensor_type"):
        return
    one, two = known.tensor_type, other.tensor_type
    one.elem_type = one.elem_type or two.elem_type
    if not two.HasField("shape") or (one.HasField("shape") and len(one.shape.dim) != len(two.shape.dim)):
        return
    if not one.HasField("shape"):
        one.shape.CopyFrom(two.shape)
    for dim, more in zip(one.shape.dim, two.shape.dim, strict=True):
        if more.HasField("dim_value") and not dim.HasField("dim_value"):
            dim.dim_value = more.dim_value
        elif dim.WhichOneof("value") is None:
            dim.CopyFrom(more)


def _sort(scope: Scope) -> None:
    """Sort nodes topologically, in place; a graph with a cycle stays unchanged."""
    makers = {name: index for index, node in reversed([*enumerate(scope.node)]) for name in node.output}
    needs = {i: {makers[name] for name in names_read(n) if name in makers} for i, n in enumerate(scope.node)}
    if all(max(before, default=-1) < index for index, before in needs.items()):
        return
    try:
        order = [*TopologicalSorter(needs).static_order()]
    except CycleError:
        return
    places = {index: place for place, index in enumerate(order)}
    indices = iter(range(len(order)))
    scope.node.sort(key=lambda _: places[next(indices)])


def _list(graph: GraphProto, outer: Mapping[str, TensorProto]) -> bool:
    """A graph and the bodies in it, which may read what `outer` has."""
    constants = [
        (n.output[0], a.t) for n in graph.node if is_op(n, "Constant") for a in n.attribute if a.name == "value"
    ]
    tensors = {**outer, **dict(constants), **{t.name: t for t in graph.initializer}}
    scalars = {name: t for name, t in tensors.items() if t.data_type == TensorProto.INT64 and not t.dims}
    lists: dict[str, TensorProto] = {}
    is_edited = False
    for node in graph.node:
        for place in _LISTS.get(node.op_type, ()) if is_op(node, node.op_type) else ():
            name = node.input[place] if place < len(node.input) else ""
            if name in scalars:
                lists.setdefault(name, _listed(scalars[name], f"{name}/list"))
                node.input[place] = lists[name].name
        for attribute in node.attribute:
            for body in attribute_graphs(attribute):
                is_edited |= _list(body, tensors)
    graph.initializer.extend(lists.values())
    return is_edited or bool(lists)


def _listed(scalar: TensorProto, name: str) -> TensorProto:
    tensor = copied(scalar)
    tensor.name, tensor.dims[:] = name, [1]
    return tensor

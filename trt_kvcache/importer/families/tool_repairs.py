"""Repairs models that some tools write: they break rules of ONNX, or ONNX Runtime cannot load them later.

    nodes in any order              ONNX Runtime's float16 converter appends Casts of inputs and of float32 operators
    the domain ai.onnx              another name of ONNX's own domain ""; ONNX's checker finds no operator there
    no import of com.microsoft      ONNX Runtime's quantizers add operators of this domain without the import
    shapes stated for initializers  onnxruntime-genai states [] for a constant [1], which becomes an initializer
    values that are stated twice    ONNX Runtime's float16 converter lists outputs again, as values without shapes
    names of saved Casts            ONNX Runtime's optimizer saves the Casts that it adds. When it loads the model, it
                                    adds Casts of the same names: "Duplicate definition of name" (1.32)
    two steps in one model          optimum merges the first step and all later steps
    slices that are assigned to     torch.onnx writes parts of keys into a tensor of zeros, with ScatterND

Merged exports: with a past of no tokens, the branch with a past (the one that reads caches: inputs of rank 4) also
computes the first step. So the condition becomes a constant, and inputs and outputs that only the other branch needs
disappear, such as keys and values of an encoder.

    use_cache_branch ── If(then: with past, else: without) -> present      becomes      with past -> present

Assignments to slices (``k[..., :16] = a; k[..., 16:] = b``, as in transformers' latent attention) become one Concat if
the parts cover the whole tensor:

    zeros [B, H, T, 24] -- Transpose -> ScatterND(rows 0..15 of axis 0: Transpose(a)) -> Transpose, Transpose ->
        ScatterND(rows 16..23: Transpose(b))                      becomes           Transpose(Concat(a, b, axis=-1))
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from graphlib import CycleError, TopologicalSorter

import numpy as np
import onnx
from onnx import GraphProto, ModelProto, NodeProto, OperatorSetIdProto, TensorProto, helper, numpy_helper

from trt_kvcache.importer.cache_plan import CachePlan, InterfaceChange, OriginalRole, OriginalTensor
from trt_kvcache.importer.families import Finish
from trt_kvcache.importer.interface.exported_interface import in_words
from trt_kvcache.importer.protos import (
    DEFAULT_DOMAINS,
    FLOATS,
    Scope,
    captured_names,
    copied,
    dtype_name,
    elem_type_of,
    is_op,
    iter_scopes,
    names_read,
    nested_scopes,
    replace_field,
    shape_of,
)
from trt_kvcache.importer.simplify import take_branches

_CONTRIB = "com.microsoft"
_LONG = "ai.onnx"
_CASTS = "InsertedPrecisionFreeCast_"


def read(model: ModelProto) -> None:
    """Repair, in place, the order of nodes, names of domains and Casts, and wrong or repeated shapes."""
    _unalias(model)
    for scope in iter_scopes(model):
        _sort(scope)
        _unstate(scope)
    used = {node.domain for scope in iter_scopes(model) for node in scope.node}
    if _CONTRIB in used - {entry.domain for entry in model.opset_import}:
        model.opset_import.add(domain=_CONTRIB, version=1)
    _rename_casts(model.graph)


def _unalias(model: ModelProto) -> None:
    """Replace the domain "ai.onnx" with "", ONNX's own name, unless a model imports both in different versions."""
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
    """Rename inner tensors, in place, if their names begin like those that ONNX Runtime gives to Casts that it adds."""
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
    """Drop shapes of initializers, and shapes that are stated twice, in place. Shape inference restores them."""
    is_graph = isinstance(scope, GraphProto)
    known = {value.name for value in (*scope.initializer, *scope.output, *scope.input)} if is_graph else set[str]()
    counts = Counter(value.name for value in scope.value_info)
    stated = [value for value in scope.value_info if value.name not in known and counts[value.name] == 1]
    if len(stated) < len(scope.value_info):
        replace_field(scope.value_info, stated)


def _sort(scope: Scope) -> None:
    """Sort nodes topologically, in place. A graph with a cycle stays unchanged."""
    makers = {name: index for index, node in reversed([*enumerate(scope.node)]) for name in node.output}
    needs = {i: {makers[name] for name in names_read(n) if name in makers} for i, n in enumerate(scope.node)}
    if all(max(before, default=-1) < index for index, before in needs.items()):
        return
    try:
        order = [*TopologicalSorter(needs).static_order()]
    except CycleError:
        return
    replace_field(scope.node, [scope.node[index] for index in order])


_CACHE_RANK = 4
_FIRST_ONLY = "only the branch without a past computes it; to get it, run the original export once"


def choose(model: onnx.ModelProto) -> tuple[onnx.ModelProto, Finish | None]:
    """Replace each If of a merged export by the branch that reads caches. `model` is edited in place."""
    graph = model.graph
    inputs = {v.name: v for v in graph.input}
    chosen = _choices(graph)
    if not chosen:
        return model, None
    before = captured_names(graph)
    inlined = _take(graph, chosen)
    read = captured_names(graph)
    changes = [_gone(inputs[name], "input", f"always {str(value).lower()}: the branch with a past computes every step")
               for name, value in chosen.items()]  # fmt: skip
    dead = [n for n in inputs if n in before - read - {*chosen}]
    changes += [_gone(inputs[n], "input", "only the branch without a past reads it") for n in dead]
    tensors = [replace(_tensor(inputs[n], "input", OriginalRole.SWITCH), on=on) for n, on in chosen.items()]
    tensors += [_tensor(inputs[n], "input", OriginalRole.SWITCH) for n in dead]
    empty = [v for v in graph.output if _is_empty(graph, v.name)]
    changes += [_gone(v, "output", _FIRST_ONLY) for v in empty]
    tensors += [_tensor(v, "output", OriginalRole.OTHER) for v in empty]
    replace_field(graph.input, [v for v in graph.input if v.name not in (*chosen, *dead)])
    replace_field(graph.output, [v for v in graph.output if v not in empty])
    return model, partial(_finish, inlined, changes, tensors)


def _finish(
    inlined: Sequence[str], changes: Sequence[InterfaceChange], tensors: Sequence[OriginalTensor], plan: CachePlan
) -> CachePlan:
    original = (*plan.original, *tensors) if plan.original else ()
    return replace(plan, inlined=(*inlined, *plan.inlined), changes=(*changes, *plan.changes), original=original)


def take_first_branch(graph: onnx.GraphProto) -> None:
    """Replace each If of a merged export by the branch for the first step, in place. Inputs and outputs stay."""
    _take(graph, {name: not value for name, value in _choices(graph).items()})


def _choices(graph: onnx.GraphProto) -> dict[str, bool]:
    inputs = {v.name: v for v in graph.input}
    return {name: value for node in graph.node if (choice := _choice(node, inputs)) for name, value in [choice]}


def _take(graph: onnx.GraphProto, chosen: dict[str, bool]) -> list[str]:
    sizes = {v.name: [d if isinstance(d, int) else 1 for d in shape_of(v) or ()] for v in graph.input}
    values = {name: np.full(sizes[name], value) for name, value in chosen.items()}
    inlined = take_branches(graph, values)
    graph.initializer.extend(onnx.numpy_helper.from_array(value, name) for name, value in values.items())
    return inlined


def _choice(node: onnx.NodeProto, inputs: dict[str, onnx.ValueInfoProto]) -> tuple[str, bool] | None:
    """Return the input that is an If's condition, and its value for the branch that reads caches; None for others."""
    if node.op_type != "If" or node.input[0] not in inputs:
        return None
    caches = {n for n, v in inputs.items() if elem_type_of(v) in FLOATS and len(shape_of(v) or ()) == _CACHE_RANK}
    reads = {a.name: bool(caches & captured_names(a.g)) for a in node.attribute}
    with_past = reads["then_branch"]
    return (node.input[0], with_past) if with_past != reads["else_branch"] else None


def _is_empty(graph: onnx.GraphProto, name: str) -> bool:
    for node in graph.node:
        if name in node.output:
            if node.op_type == "Identity":
                return _is_empty(graph, node.input[0])
            return node.op_type == "Constant" and any(0 in a.t.dims for a in node.attribute if a.name == "value")
    return any(t.name == name and 0 in t.dims for t in graph.initializer)


def _gone(value: onnx.ValueInfoProto, io: str, why: str) -> InterfaceChange:
    return InterfaceChange(io, in_words(value.name, shape_of(value) or ()), "", why)


def _tensor(value: onnx.ValueInfoProto, io: str, role: OriginalRole) -> OriginalTensor:
    shape = tuple(shape_of(value) or ())
    axes = tuple("" if isinstance(d, int) else "?" for d in shape)
    return OriginalTensor(value.name, io, role, dtype_name(elem_type_of(value)), shape, axes)


_Part = tuple[int, int, str, list[int]]
"""One part: its first row, its end row (exclusive), the name of the written tensor, and its permutation."""


def join_slices(model: ModelProto) -> ModelProto:
    """Replace a chain of ScatterND that fills a zero tensor by one Concat. The later check refuses a wrong Concat."""
    edited = copied(model)
    makers = {name: node for node in model.graph.node for name in node.output}
    tensors = {tensor.name: tensor for tensor in model.graph.initializer}
    del edited.graph.node[:]
    for node in model.graph.node:
        parts = sorted(_parts(node, makers, tensors))
        ends = [part[1] for part in parts]
        perms = [part[3] for part in parts]
        if len(parts) < 2 or [part[0] for part in parts] != [0, *ends[:-1]] or perms != perms[:1] * len(perms):
            edited.graph.node.append(node)
            continue
        whole, axis = f"{node.output[0]}/whole", perms[0][0]
        edited.graph.node.append(helper.make_node("Concat", [part[2] for part in parts], [whole], whole, axis=axis))
        edited.graph.node.append(helper.make_node("Transpose", [whole], node.output, node.name, perm=perms[0]))
    return edited


def _parts(node: NodeProto, makers: Mapping[str, NodeProto], tensors: Mapping[str, TensorProto]) -> list[_Part]:
    """Return the tensors that a chain of ScatterND, up to `node`, writes into zeros; empty without such a chain."""
    parts: list[_Part] = []
    perm: list[int] = []
    current: NodeProto | None = node
    while current is not None and not is_op(current, "ConstantOfShape"):
        attributes = {a.name: helper.get_attribute_value(a) for a in current.attribute}
        turned = makers.get(current.input[2]) if is_op(current, "ScatterND") and current.input[1] in tensors else None
        if (
            turned is not None
            and is_op(turned, "Transpose")
            and turned.attribute
            and attributes.get("reduction", b"none") == b"none"
        ):
            rows = numpy_helper.to_array(tensors[current.input[1]])
            turn = list(turned.attribute[0].ints)
            if rows.ndim != 2 or rows.shape[1] != 1 or not np.array_equal(rows[:, 0], rows[0] + np.arange(len(rows))):
                return []
            perm = perm or list(range(len(turn)))
            parts.append((int(rows[0, 0]), int(rows[-1, 0]) + 1, turned.input[0], [turn[axis] for axis in perm]))
        elif parts and is_op(current, "Transpose") and "perm" in attributes:
            perm = [attributes["perm"][axis] for axis in perm]
        elif not (parts and is_op(current, "Cast")):
            return []
        current = makers.get(current.input[0])
    return parts if current is not None else []

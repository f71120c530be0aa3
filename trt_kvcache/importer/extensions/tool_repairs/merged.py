"""Merged exports: one model contains the first step and all other steps, and an input chooses.

    use_cache_branch ── If(then: with past, else: without) -> present      becomes      with past -> present

A past of no tokens makes the branch with a past the first step, too, so it is the only one that decodes. The condition
becomes a constant and its input disappears, with the inputs that only the other branch reads, and the outputs that the
branch with a past leaves empty: an encoder's keys and values, which optimum's other branch computes once.

The branch with a past is the one that reads inputs of rank 4, as caches are, where the other reads none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import onnx

from trt_kvcache.importer.extensions import Finish
from trt_kvcache.importer.plan import CachePlan, InterfaceChange, OriginalRole, OriginalTensor
from trt_kvcache.importer.protos import FLOATS, captured_names, dtype_name, elem_type_of, replace_field, shape_of
from trt_kvcache.importer.simplify import take_branches

_CACHE_RANK = 4
_FIRST_ONLY = "only the branch without a past computes it: run the export as it is once for it"


def choose(model: onnx.ModelProto) -> tuple[onnx.ModelProto, Finish | None]:
    """Replace the branches of a merged export with the branch with a past. `model` is changed."""
    graph = model.graph
    inputs = {v.name: v for v in graph.input}
    chosen = _choices(graph)
    if not chosen:
        return model, None
    before = captured_names(graph)
    inlined = _take(graph, chosen)
    read = captured_names(graph)
    changes = [_gone(inputs[name], "input", f"always {str(value).lower()}: the branch with a past does every step")
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
    """Add inputs and outputs that only the other branch has to the plan."""
    original = (*plan.original, *tensors) if plan.original else ()
    return replace(plan, inlined=(*inlined, *plan.inlined), changes=(*changes, *plan.changes), original=original)


def take_first_branch(graph: onnx.GraphProto) -> None:
    """Replace the branches of a merged export with the branch without a past, in place; the interface stays."""
    _take(graph, {name: not value for name, value in _choices(graph).items()})


def _choices(graph: onnx.GraphProto) -> dict[str, bool]:
    """The inputs that choose, and the values that take the branches with a past."""
    inputs = {v.name: v for v in graph.input}
    return {name: value for node in graph.node if (choice := _choice(node, inputs)) for name, value in [choice]}


def _take(graph: onnx.GraphProto, chosen: dict[str, bool]) -> list[str]:
    """Put the chosen branches in place; returns what they replaced."""
    inputs = {v.name: v for v in graph.input}
    values = {name: np.full(_size(inputs[name]), value) for name, value in chosen.items()}
    inlined = take_branches(graph, values)
    graph.initializer.extend(onnx.numpy_helper.from_array(value, name) for name, value in values.items())
    return inlined


def _choice(node: onnx.NodeProto, inputs: dict[str, onnx.ValueInfoProto]) -> tuple[str, bool] | None:
    """The input that decides between a branch with and one without a past, and the value that takes the former."""
    if node.op_type != "If" or node.input[0] not in inputs:
        return None
    caches = {n for n, v in inputs.items() if elem_type_of(v) in FLOATS and len(shape_of(v) or ()) == _CACHE_RANK}
    reads = {a.name: bool(caches & captured_names(a.g)) for a in node.attribute}
    with_past = reads["then_branch"]
    return (node.input[0], with_past) if with_past != reads["else_branch"] else None


def _size(value: onnx.ValueInfoProto) -> tuple[int, ...]:
    return tuple(d if isinstance(d, int) else 1 for d in shape_of(value) or ())


def _is_empty(graph: onnx.GraphProto, name: str) -> bool:
    """True for a constant without elements."""
    for node in graph.node:
        if name in node.output:
            if node.op_type == "Identity":
                return _is_empty(graph, node.input[0])
            return node.op_type == "Constant" and any(0 in a.t.dims for a in node.attribute if a.name == "value")
    return any(t.name == name and 0 in t.dims for t in graph.initializer)


def _gone(value: onnx.ValueInfoProto, io: str, why: str) -> InterfaceChange:
    return InterfaceChange(io, f"{value.name} [{', '.join(map(str, shape_of(value) or ()))}]", "", why)


def _tensor(value: onnx.ValueInfoProto, io: str, role: OriginalRole) -> OriginalTensor:
    shape = tuple(shape_of(value) or ())
    axes = tuple("" if isinstance(d, int) else "?" for d in shape)
    return OriginalTensor(value.name, io, role, dtype_name(elem_type_of(value)), shape, axes)

"""Edits forms of torch.onnx and optimum: merged steps, assignments to slices, and the input ``logits_to_keep``.

optimum merges the first step and all later steps. With a past of no tokens, the branch with a past (the one that reads
caches: inputs of rank 4) also computes the first step. So the condition becomes a constant, and inputs and outputs that
only the other branch needs disappear, such as keys and values of an encoder.

    use_cache_branch ── If(then: with past, else: without) -> present      becomes      with past -> present

torch.onnx writes parts of keys into a tensor of zeros, with ScatterND (``k[..., :16] = a; k[..., 16:] = b``, as in
transformers' latent attention). The assignments become one Concat if the parts cover the whole tensor:

    zeros [B, H, T, 24] -- Transpose -> ScatterND(rows 0..15 of axis 0: Transpose(a)) -> Transpose, Transpose ->
        ScatterND(rows 16..23: Transpose(b))                      becomes           Transpose(Concat(a, b, axis=-1))

``logits_to_keep`` says for how many last positions to return logits. It becomes 0 (in transformers: all positions). The
rewrite adds its own input (`LogitsSpan`), because TensorRT cannot build a shape that depends on an input's values:

    logits_to_keep -- Neg --.
    hidden states ------- Slice(.., -K, end) -- MatMul -- logits [B, K, V]
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import onnx
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper

from trt_kvcache.importer.cache_plan import CachePlan, InterfaceChange, OriginalRole, OriginalTensor
from trt_kvcache.importer.families import Finish
from trt_kvcache.importer.interface.exported_interface import in_words
from trt_kvcache.importer.protos import (
    FLOATS,
    captured_names,
    constants_of,
    copied,
    dtype_name,
    elem_type_of,
    is_op,
    replace_field,
    shape_of,
)
from trt_kvcache.importer.simplify import simplify, take_branches

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
    """Replace ScatterND nodes that fill a tensor of zeros with one Concat. A later check refuses a wrong Concat."""
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
    """Return the tensors that a chain of ScatterND ending at `node` writes into zeros; empty if there is no chain."""
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


_END = (1 << 31) - 1  # a Slice to the end of an axis has an end of at least this


def drop_kept_logits(model: ModelProto) -> tuple[ModelProto, Finish | None]:
    """Replace the input ``logits_to_keep`` with the constant 0 (all positions). Drop Slices that then cut nothing."""
    edited = copied(model)
    graph = edited.graph
    value = next(v for v in graph.input if v.name.endswith("logits_to_keep"))
    shape = tuple(shape_of(value) or ())
    if shape not in ((), (1,)):
        return model, None
    replace_field(graph.input, [v for v in graph.input if v.name != value.name])
    graph.initializer.append(helper.make_tensor(value.name, elem_type_of(value), shape, [0]))
    edited, _ = simplify(edited)
    constants = constants_of(edited.graph)
    slices = [n for n in edited.graph.node if is_op(n, "Slice") and _takes_all(n, constants)]
    for node in slices:
        node.op_type = "Identity"
        del node.input[1:]
    if not slices:
        return model, None
    exported = OriginalTensor(
        value.name, "input", OriginalRole.OTHER, dtype_name(elem_type_of(value)), shape, ("",) * len(shape)
    )
    return edited, partial(_with_all_logits, exported)


def _takes_all(node: NodeProto, constants: Mapping[str, TensorProto]) -> bool:
    bounds = [
        numpy_helper.to_array(constants[n]) if n in constants else None for n in (*node.input[1:3], *node.input[4:])
    ]
    wanted = ((0, 0), (_END, np.inf), (1, 1))
    return all(b is not None and bool(((b >= low) & (b <= high)).all())
               for b, (low, high) in zip(bounds, wanted, strict=False))  # fmt: skip


def _with_all_logits(exported: OriginalTensor, plan: CachePlan) -> CachePlan:
    old = f"{exported.name} [{', '.join(map(str, exported.shape))}]"
    why = (
        f"the length of {plan.logits_span.name} replaces it"
        if plan.logits_span is not None
        else "the model returns all logits"
    )
    change = InterfaceChange("input", old, "", why)
    return replace(plan, original=(exported, *plan.original), changes=(*plan.changes, change))

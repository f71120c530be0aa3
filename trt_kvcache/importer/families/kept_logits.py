"""Models with an input for the number of last positions with logits: transformers' ``logits_to_keep``.

    logits_to_keep -- Neg --.
    hidden states ------- Slice(.., -K, end) -- MatMul -- logits [B, K, V]

0 keeps all positions, as in transformers. So this module replaces the input by the constant 0. The rewrite adds its own
input (`LogitsSpan`) for the number of positions: TensorRT cannot build a shape that depends on an input's values.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

import onnx
from onnx import numpy_helper

from trt_kvcache.importer.families import Finish
from trt_kvcache.importer.operators import VIEWS
from trt_kvcache.importer.plan import CachePlan, InterfaceChange, OriginalRole, OriginalTensor
from trt_kvcache.importer.protos import (
    constants_of,
    dtype_name,
    elem_type_of,
    is_op,
    readers_of,
    replace_field,
    shape_of,
)
from trt_kvcache.importer.simplify import drop_dead, infer_shapes

__all__ = ["rewrite"]

_END = (1 << 31) - 1  # a Slice that goes to the end has at least this end


def rewrite(model: onnx.ModelProto) -> tuple[onnx.ModelProto, Finish | None]:
    """Make the model return logits of all positions; see `trt_kvcache.importer.families`.

    The model stays unchanged if it uses the input in another way: a tensor of indices may have the same name.
    """
    graph = model.graph
    value = next(v for v in graph.input if v.name.endswith("logits_to_keep"))
    slices = _slices(graph, value.name)
    if not slices:
        return model, None
    for node in slices:
        node.op_type = "Identity"
        del node.input[1:]
    replace_field(graph.input, [v for v in graph.input if v.name != value.name])
    drop_dead(graph)
    del graph.value_info[:]
    shape = tuple(shape_of(value) or ())
    exported = OriginalTensor(
        value.name, "input", OriginalRole.OTHER, dtype_name(elem_type_of(value)), shape, ("",) * len(shape)
    )
    return infer_shapes(model), partial(_finish, exported)


def _slices(graph: onnx.GraphProto, name: str) -> list[onnx.NodeProto]:
    """The Slices that start at minus the input and go to the end; empty if another node reads the input."""
    readers, constants = readers_of(graph.node), constants_of(graph)
    slices: list[onnx.NodeProto] = []
    pending = [(name, False)]
    while pending:
        tensor, negated = pending.pop()
        for node in readers.get(tensor, ()):
            if node.op_type in ("Cast", *VIEWS) and node.input[0] == tensor:
                pending.append((node.output[0], negated))
            elif is_op(node, "Neg") and not negated:
                pending.append((node.output[0], True))
            elif is_op(node, "Slice") and negated and node.input[1] == tensor and _to_end(node, constants):
                slices.append(node)
            else:
                return []
    return slices


def _to_end(node: onnx.NodeProto, constants: Mapping[str, onnx.TensorProto]) -> bool:
    """True if a Slice goes to the end with step 1."""
    bounds = [
        numpy_helper.to_array(constants[n]) if n in constants else None for n in (*node.input[2:3], *node.input[4:])
    ]
    end, *steps = bounds
    return end is not None and bool((end >= _END).all()) and all(s is not None and bool((s == 1).all()) for s in steps)


def _finish(exported: OriginalTensor, plan: CachePlan) -> CachePlan:
    """Add the exported model's input, which gets the value 0, to the plan."""
    old = f"{exported.name} [{', '.join(map(str, exported.shape))}]"
    why = f"{plan.logits_span.name} says it" if plan.logits_span is not None else "the logits are of all positions"
    change = InterfaceChange("input", old, "", why)
    return replace(plan, original=(exported, *plan.original), changes=(*plan.changes, change))

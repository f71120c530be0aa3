"""Supports models with an input that says for how many last positions to return logits (``logits_to_keep``).

    logits_to_keep -- Neg --.
    hidden states ------- Slice(.., -K, end) -- MatMul -- logits [B, K, V]

This module replaces the input with 0 (in transformers: all positions). The rewrite adds its own input (`LogitsSpan`),
because TensorRT cannot build a shape that depends on an input's values.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

import numpy as np
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper

from trt_kvcache.importer.cache_plan import CachePlan, InterfaceChange, OriginalRole, OriginalTensor
from trt_kvcache.importer.families import Finish
from trt_kvcache.importer.protos import constants_of, copied, dtype_name, elem_type_of, is_op, replace_field, shape_of
from trt_kvcache.importer.simplify import simplify

_END = (1 << 31) - 1  # a Slice to the end of an axis has an end of at least this


def rewrite(model: ModelProto) -> tuple[ModelProto, Finish | None]:
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
    return edited, partial(_finish, exported)


def _takes_all(node: NodeProto, constants: Mapping[str, TensorProto]) -> bool:
    bounds = [
        numpy_helper.to_array(constants[n]) if n in constants else None for n in (*node.input[1:3], *node.input[4:])
    ]
    wanted = ((0, 0), (_END, np.inf), (1, 1))
    return all(b is not None and bool(((b >= low) & (b <= high)).all())
               for b, (low, high) in zip(bounds, wanted, strict=False))  # fmt: skip


def _finish(exported: OriginalTensor, plan: CachePlan) -> CachePlan:
    old = f"{exported.name} [{', '.join(map(str, exported.shape))}]"
    why = (
        f"the length of {plan.logits_span.name} replaces it"
        if plan.logits_span is not None
        else "the model returns all logits"
    )
    change = InterfaceChange("input", old, "", why)
    return replace(plan, original=(exported, *plan.original), changes=(*plan.changes, change))

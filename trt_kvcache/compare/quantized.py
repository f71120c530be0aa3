"""The reference for quantized caches: a model in which standard ONNX operators round the rows to codes.

The model follows `docs/quantized-caches.md`, with R the rotation (symmetric, so R R = I) and M the largest code. It
shares no code with the edit that quantizes caches (`trt_kvcache.importer.families.quantized_caches`):

    turned = row R,   scale = max(|turned|) / M,   row' = round(turned / scale) scale R
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper

from trt_kvcache.errors import UnsupportedModelError
from trt_kvcache.importer.cache_plan import CacheDtype, CachePlan, PlanOptions
from trt_kvcache.importer.protos import copied, replace_field

__all__ = ["hadamard", "with_numbers", "with_quantized_rows"]

_MOST = {CacheDtype.INT8: 127.0, CacheDtype.INT4: 7.0, CacheDtype.FP8: 448.0}


def hadamard(size: int) -> npt.NDArray[np.float32]:
    """Return Sylvester's orthonormal matrix, in diagonal blocks of the largest power of 2 that divides `size`."""
    block = np.ones((1, 1))
    while size % (2 * len(block)) == 0:
        block = np.block([[block, block], [block, -block]]) / np.sqrt(2)
    return np.kron(np.eye(size // len(block)), block).astype(np.float32)


def with_quantized_rows(model: ModelProto, plan: CachePlan, options: PlanOptions) -> ModelProto:
    """Return a copy of a rewritten float32 model that rounds new cache rows as `options.cache_dtype` does."""
    assert options.cache_dtype is not None
    copy, most = copied(model), _MOST[options.cache_dtype]
    writers = {name: node for node in copy.graph.node for name in node.output}
    before: dict[str, list[NodeProto]] = {}
    for cache in plan.caches:
        node = writers.get(cache.present)
        if node is None or node.op_type != "TensorScatter":
            raise UnsupportedModelError(
                f"the new rows of '{cache.past}' cannot be rounded, because no TensorScatter writes this cache"
            )
        size = cache.physical_shape[-1]
        assert isinstance(size, int)
        value = None if options.cache_ranges is None else options.cache_ranges[cache.past] / most
        nodes, rounded = _rounded(copy, node.input[1], cache.past, size, most, value, options.cache_dtype)
        before.setdefault(node.name, []).extend(nodes)
        node.input[1] = rounded
    order = [n for node in copy.graph.node for n in (*before.get(node.name, ()), node)]
    replace_field(copy.graph.node, order)
    return copy


def _rounded(
    model: ModelProto, rows: str, name: str, size: int, most: float, scale: float | None, kind: CacheDtype
) -> tuple[list[NodeProto], str]:
    """Return the nodes that quantize and dequantize rows ``[..., size]``, and the name of their result."""
    prefix = f"trt_kvcache.compare/{name}"
    low = -most if scale is None or kind is CacheDtype.FP8 else -most - 1
    numbers = {"R": hadamard(size), "most": most, "low": low, "least": float(np.finfo(np.float32).tiny)}
    if scale is not None:
        numbers["scale"] = scale
    model.graph.initializer.extend(
        numpy_helper.from_array(np.asarray(v, np.float32), f"{prefix}/{key}") for key, v in numbers.items()
    )
    nodes: list[NodeProto] = []

    def op(operator: str, inputs: list[str], result: str, **attributes: int) -> str:
        names = [n if n == rows else f"{prefix}/{n}" for n in inputs]
        nodes.append(helper.make_node(operator, names, [f"{prefix}/{result}"]))
        nodes[-1].attribute.extend(helper.make_attribute(key, value) for key, value in attributes.items())
        return result

    op("MatMul", [rows, "R"], "turned")
    if scale is None:
        model.graph.initializer.append(numpy_helper.from_array(np.array([-1]), f"{prefix}/last"))
        op("Abs", ["turned"], "sizes")
        op("ReduceMax", ["sizes", "last"], "largest", keepdims=1)
        op("Div", ["largest", "most"], "part")
        op("Max", ["part", "least"], "scale")
    op("Div", ["turned", "scale"], "numbers")
    op("Clip", ["numbers", "low", "most"], "bounded")
    if kind is CacheDtype.FP8:
        op("Cast", ["bounded"], "narrow", to=TensorProto.FLOAT8E4M3FN)
        op("Cast", ["narrow"], "codes", to=TensorProto.FLOAT)
    else:
        op("Round", ["bounded"], "codes")
    op("Mul", ["codes", "scale"], "back")
    op("MatMul", ["back", "R"], "row")
    return nodes, f"{prefix}/row"


def with_numbers(plan: CachePlan, model: ModelProto) -> tuple[CachePlan, ModelProto]:
    """Return a plan and its model with float32 inputs and outputs instead of float8, because NumPy has no float8."""
    values = [*model.graph.input, *model.graph.output]
    narrow = {v.name for v in values if v.type.tensor_type.elem_type == TensorProto.FLOAT8E4M3FN}
    if not narrow:
        return plan, model
    wide, before, after = copied(model), list[NodeProto](), list[NodeProto]()
    for node in wide.graph.node:
        for names in (node.input, node.output):
            names[:] = [f"{name}/float8" if name in narrow else name for name in names]
    for values, casts in ((wide.graph.input, before), (wide.graph.output, after)):
        for value in (v for v in values if v.name in narrow):
            value.type.tensor_type.elem_type = TensorProto.FLOAT
            ends, kind = (value.name, f"{value.name}/float8"), TensorProto.FLOAT8E4M3FN
            if casts is after:
                ends, kind = ends[::-1], TensorProto.FLOAT
            casts.append(helper.make_node("Cast", ends[:1], ends[1:], value.name, to=kind))
    replace_field(wide.graph.node, [*before, *wide.graph.node, *after])
    tensors = tuple(replace(t, dtype="float") if t.name in narrow else t for t in plan.tensors)
    caches = tuple(replace(c, dtype="float") if c.past in narrow else c for c in plan.caches)
    return replace(plan, tensors=tensors, caches=caches), wide

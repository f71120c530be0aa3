"""The reference for quantized caches: a model in which standard ONNX operators round the rows to codes.

The model follows `docs/quantized-caches.md`, with R the rotation (symmetric, so R R = I) and M the largest code. It
shares no code with the edit that quantizes caches (`trt_kvcache.importer.families.quantized_caches`):

    turned = row R,   scale = max(|turned|) / M,   row' = round(turned / scale) scale R
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt
from onnx import ModelProto, NodeProto, TensorProto, compose, helper, numpy_helper, parser

from trt_kvcache.errors import UnsupportedModelError
from trt_kvcache.importer.cache_plan import CacheDtype, CachePlan, PlanOptions
from trt_kvcache.importer.protos import copied, replace_field

_SCALE = """last = Constant <value_ints = [-1]> ()
        sizes = Abs (turned)
        largest = ReduceMax <keepdims = 1> (sizes, last)
        part = Div (largest, most)
        scale = Max (part, least)"""
_FLOAT8 = f"""narrow = Cast <to = {TensorProto.FLOAT8E4M3FN}> (bounded)
        codes = Cast <to = {TensorProto.FLOAT}> (narrow)"""
_MOST = {CacheDtype.INT8: 127.0, CacheDtype.INT4: 7.0, CacheDtype.FP8: 448.0}


def hadamard(size: int) -> npt.NDArray[np.float32]:
    """Return a rotation: orthonormal Sylvester matrices as diagonal blocks, of the largest 2^n that divides `size`."""
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
        size = int(cache.physical_shape[-1])
        value = None if options.cache_ranges is None else options.cache_ranges[cache.past] / most
        nodes, rounded = _rounded(copy, node.input[1], cache.past, size, most, value, options.cache_dtype)
        before.setdefault(node.name, []).extend(nodes)
        node.input[1] = rounded
    replace_field(copy.graph.node, [n for node in copy.graph.node for n in (*before.get(node.name, ()), node)])
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
    inputs = ", ".join(f"float {name}" for name in ("rows", *numbers))
    graph = compose.add_prefix_graph(parser.parse_graph(f"""rounded ({inputs}) => (float row) {{
        turned = MatMul (rows, R)
        {"" if scale is not None else _SCALE}
        numbers = Div (turned, scale)
        bounded = Clip (numbers, low, most)
        {_FLOAT8 if kind is CacheDtype.FP8 else "codes = Round (bounded)"}
        back = Mul (codes, scale)
        row = MatMul (back, R)
    }}"""), f"{prefix}/")  # fmt: skip
    graph.node[0].input[0] = rows
    return [*graph.node], f"{prefix}/row"


def with_numbers(plan: CachePlan, model: ModelProto) -> tuple[CachePlan, ModelProto]:
    """Return a plan and its model with float32 inputs and outputs instead of float8, because NumPy has no float8."""
    wide, float8 = copied(model), TensorProto.FLOAT8E4M3FN
    both = wide.graph.input, wide.graph.output
    inputs, outputs = ([v for v in values if v.type.tensor_type.elem_type == float8] for values in both)
    narrow = {v.name: f"{v.name}/float8" for v in (*inputs, *outputs)}
    for names in (names for node in wide.graph.node for names in (node.input, node.output)):
        names[:] = [narrow.get(name, name) for name in names]
    before = [helper.make_node("Cast", [v.name], [narrow[v.name]], v.name, to=float8) for v in inputs]
    after = [helper.make_node("Cast", [narrow[v.name]], [v.name], v.name, to=TensorProto.FLOAT) for v in outputs]
    replace_field(wide.graph.node, [*before, *wide.graph.node, *after])
    for value in (*inputs, *outputs):
        value.type.tensor_type.elem_type = TensorProto.FLOAT
    tensors = tuple(replace(t, dtype="float") if t.name in narrow else t for t in plan.tensors)
    caches = tuple(replace(c, dtype="float") if c.past in narrow else c for c in plan.caches)
    return replace(plan, tensors=tensors, caches=caches), wide

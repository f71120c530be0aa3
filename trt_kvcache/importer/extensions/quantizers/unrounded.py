"""Models that round what they compute to 8 bits: how they round, and the same without.

    x -- QuantizeLinear(scale) -- DequantizeLinear(scale)        becomes        x -- Clip(lowest, highest)

One number that sums in another order move over the middle between two neighbours comes out a whole step away, in
float8 up to an eighth of itself. Without these steps, what two models compute must agree as closely as ever.
"""

from __future__ import annotations

from collections import Counter

import numpy as np
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, numpy_helper

from trt_kvcache.importer.protos import constants_of, copied, int_attribute, is_op, readers_of, replace_field

_FLOAT8 = 448.0  # the largest of float8e4m3fn
_LIMITS: dict[int, tuple[float, float]] = {
    TensorProto.INT8: (-128.0, 127.0), TensorProto.UINT8: (0.0, 255.0), TensorProto.FLOAT8E4M3FN: (-_FLOAT8, _FLOAT8),
}  # fmt: skip

Step = tuple[float, float, int]
"""The rounding of a tensor: scale, zero point, element type."""


def unround(model: ModelProto) -> tuple[ModelProto, Counter[Step]]:
    """The model without rounding to 8 bits of what it computes: numbers are clipped to the limits of their type.

    Args:
        model: of float32, if it is to run.

    Returns:
        The model, a copy if anything was rounded, and how tensors that are no weights are rounded, and by how many
        nodes. DequantizeLinear counts: several may read one QuantizeLinear, or each its own.
    """
    copy = copied(model)
    pairs = _pairs(copy.graph)
    steps = Counter(step for step, _, dequantize in pairs for _ in dequantize)
    if not steps:
        return model, steps
    for number, (step, quantize, dequantize) in enumerate(pairs):
        scale, zero, kind = step
        limits = [f"trt_kvcache.verify/rounded/{number}/{end}" for end in ("lowest", "highest")]
        for name, limit in zip(limits, _LIMITS[kind], strict=True):
            value = np.asarray((limit - zero) * scale, np.float32)
            copy.graph.initializer.append(numpy_helper.from_array(value, name))
        quantize.op_type = "Clip"
        quantize.input[1:] = limits
        del quantize.attribute[:]
        for node in dequantize:
            node.op_type = "Identity"
            del node.input[1:], node.attribute[:]
    clipped = {node.output[0] for node in copy.graph.node if node.op_type == "Clip"}
    replace_field(copy.graph.value_info, [v for v in copy.graph.value_info if v.name not in clipped])
    return copy, steps


def _pairs(graph: GraphProto) -> list[tuple[Step, NodeProto, list[NodeProto]]]:
    """QuantizeLinear of tensors that are no weights, with one scale, and all its readers: DequantizeLinear."""
    weights, readers = constants_of(graph), readers_of(graph.node)
    outputs = {value.name for value in graph.output}
    pairs = []
    for node in graph.node:
        if not is_op(node, "QuantizeLinear") or node.input[0] in weights or node.output[0] in outputs:
            continue
        users = readers.get(node.output[0], [])
        step = _step(node, weights)
        if step is not None and all(is_op(n, "DequantizeLinear") and _step(n, weights, step) == step for n in users):
            pairs.append((step, node, users))
    return pairs


def _step(node: NodeProto, weights: dict[str, TensorProto], like: Step | None = None) -> Step | None:
    """The step of a node; of DequantizeLinear without a zero point, its type is that of its QuantizeLinear."""
    numbers = [_number(weights.get(name)) for name in node.input[1:] if name]
    zero = weights.get(node.input[2]) if len(node.input) > 2 else None
    asked = int_attribute(node, "output_dtype") or TensorProto.UINT8
    kind = zero.data_type if zero is not None else like[2] if like is not None else asked
    if None in numbers or kind not in _LIMITS:
        return None
    return float(numbers[0] or 0), float(numbers[1] or 0) if len(numbers) > 1 else 0.0, int(kind)


def _number(tensor: TensorProto | None) -> float | None:
    if tensor is None or tensor.data_location == TensorProto.EXTERNAL or int(np.prod(tensor.dims)) != 1:
        return None
    return float(np.asarray(numpy_helper.to_array(tensor)).astype(np.float32).reshape(()))

"""Moves the zero point of quantized weights from the middle of their range to 0, as TensorRT requires.

    DequantizeLinear(uint4 W, scale, 8)      ->    DequantizeLinear(int4 W - 8, scale)
    DequantizeLinear(uint8 W, scale, 128)    ->    DequantizeLinear(int8 W - 128, scale)

In two's complement, this flips one bit of each number. TensorRT for RTX 1.7.1 imports no uint4 weights, and no signed
weights with a zero point other than 0. For ONNX Runtime, weights stay unsigned, and in the source's files.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
from onnx import numpy_helper

from trt_kvcache.errors import UnsupportedModelError
from trt_kvcache.importer.files.flipped import Flipped, flip
from trt_kvcache.importer.protos import all_nodes, byte_size, is_op, readers_of
from trt_kvcache.importer.simplify import drop_dead
from trt_kvcache.importer.weights import held, raw_bytes

_SIGNED: dict[int, tuple[int, int, int]] = {  # unsigned type -> signed type, middle, mask of the highest bits in a byte
    onnx.TensorProto.UINT4: (onnx.TensorProto.INT4, 8, 0x88),
    onnx.TensorProto.UINT8: (onnx.TensorProto.INT8, 128, 0x80),
}


def for_tensorrt(model: onnx.ModelProto, folder: Path) -> tuple[Flipped, ...]:
    """Turn unsigned weights into signed ones, in place, as TensorRT needs them, if only DequantizeLinear reads them.

    Return external weights that the model now declares signed, but whose bytes in `folder` are still unsigned. Raises
    `UnsupportedModelError` if a scale of 8-bit weights is not positive, or a zero point is not the middle of the range.
    """
    weights = {t.name: t for t in model.graph.initializer}
    readers = readers_of(all_nodes(model.graph))
    outputs = {value.name for value in model.graph.output}
    flipped, edited = [], False
    for name, weight in weights.items():
        nodes = readers.get(name, [])
        if weight.data_type == onnx.TensorProto.INT8:
            for node in (n for n in nodes if is_op(n, "DequantizeLinear") and n.input[0] == name):
                _check_zero_points(node, weights, folder)
                _check_scales(node, weights, folder)
        if weight.data_type not in _SIGNED or name in outputs or not nodes:
            continue
        if not all(is_op(n, "DequantizeLinear") and n.input[0] == name not in n.input[1:] for n in nodes):
            continue
        for node in nodes:
            _check_zero_points(node, weights, folder)
            if weight.data_type == onnx.TensorProto.UINT8:
                _check_scales(node, weights, folder)
            del node.input[2:]
        edited = True
        weight.data_type, _, mask = _SIGNED[weight.data_type]
        if weight.data_location == onnx.TensorProto.EXTERNAL:
            entries = {e.key: e.value for e in weight.external_data}
            place, size = int(entries.get("offset") or 0), byte_size(weight) or 0
            flipped.append(Flipped(name, entries["location"], place, size, mask))
        else:
            weight.raw_data = flip(raw_bytes(weight), mask)
    if edited:
        drop_dead(model.graph)  # removes the zero points
    return tuple(flipped)


def _check_zero_points(node: onnx.NodeProto, weights: dict[str, onnx.TensorProto], folder: Path) -> None:
    """Refuse zero points other than the middle of the range, which `lower.matmul_nbits` did not correct."""
    weight = weights[node.input[0]]
    zero = weights.get(node.input[2]) if len(node.input) > 2 else None
    middle = _SIGNED[weight.data_type][1] if weight.data_type in _SIGNED else 0
    if not middle and len(node.input) < 3:
        return
    if zero is not None:
        values = np.asarray(numpy_helper.to_array(held(zero, folder))).astype(np.int64)
        if np.all(values == middle):
            return
    kind = onnx.TensorProto.DataType.Name(weight.data_type).lower()
    raise UnsupportedModelError(
        f"DequantizeLinear '{node.name}' has {kind} weights '{weight.name}' with zero points other than {middle}, "
        "which TensorRT does not support. The importer supports such zero points only in MatMulNBits, and in blocks "
        "of rows [K, N] that only MatMul reads: quantize symmetrically with positive scales, or to 4 bits (NNCF: "
        "INT4_SYM with backup_mode=NONE)"
    )


def _check_scales(node: onnx.NodeProto, weights: dict[str, onnx.TensorProto], folder: Path) -> None:
    """Refuse scales of 8-bit weights that are not positive: TensorRT for RTX 1.7.1 accepts them only for 4 bits."""
    scales = weights.get(node.input[1])
    if scales is None or bool(np.all(numpy_helper.to_array(held(scales, folder)) > 0)):
        return
    raise UnsupportedModelError(
        f"DequantizeLinear '{node.name}' has 8-bit weights '{node.input[0]}' with scales that are not positive, which "
        "TensorRT does not support. TensorRT supports any scales with 4 bits, and positive scales with 8 bits: "
        "quantize to 4 bits (NNCF: INT4_SYM with backup_mode=NONE), or use asymmetric MatMulNBits (onnxruntime-genai: "
        "extra option is_symmetric=false)"
    )

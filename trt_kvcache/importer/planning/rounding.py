"""Numbers that an attention rounds on its way: QuantizeLinear and DequantizeLinear with one scale, as calibration adds.

Quantized models round scores, or what the softmax makes of them. ONNX's Attention cannot say so; one that only the
importer makes has it in two attributes, which the plain operators that replace it follow.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import onnx
import onnx_graphsurgeon as gs

from trt_kvcache.importer.graph import Emitter

SCORES, WEIGHTS = "rounded_scores", "rounded_weights"
"""Attributes of an Attention: see `Rounding.numbers`. None is left in a rewritten model."""


@dataclass(frozen=True)
class Rounding:
    """One QuantizeLinear and DequantizeLinear.

    Attributes:
        scale: of both.
        elem_type: the ONNX element type that is rounded to; its zero point is 0.
        factor: multiplies the rounded numbers.
    """

    scale: float
    elem_type: int
    factor: float = 1.0

    @property
    def numbers(self) -> list[float]:
        """The same as an attribute."""
        return [self.scale, float(self.elem_type), self.factor]

    def is_stable(self, dtype: int | None) -> bool:
        """True if numbers of type `dtype` that are rounded already stay as they are."""
        if dtype is None:
            return False
        wide, kind = (onnx.helper.tensor_dtype_to_np_dtype(t) for t in (dtype, self.elem_type))
        unsigned = np.dtype(f"u{kind.itemsize}")
        codes = np.arange(np.iinfo(unsigned).max + 1).astype(unsigned).view(kind)
        codes = codes[np.isfinite(codes.astype(np.float32))]
        scale = np.asarray(self.scale, wide)
        numbers = codes.astype(wide) * scale
        again = numbers.astype(np.float32) / scale.astype(np.float32)
        if kind.kind in "iu":
            again = np.rint(again)
        return bool((again.astype(kind) == codes).all())

    @property
    def type_name(self) -> str:
        """The type of the numbers that are rounded to."""
        return str(onnx.TensorProto.DataType.Name(self.elem_type)).lower()

    def emit(self, emitter: Emitter, tensor: gs.Tensor, dtype: int, hint: str) -> gs.Variable:
        """The rounded numbers, of the type `dtype` as `tensor` has it."""
        scale = emitter.scalar(self.scale, dtype)
        zero = emitter.tensor(onnx.helper.make_tensor("", self.elem_type, [], [0]))
        small = emitter.op("QuantizeLinear", [tensor, scale, zero], f"{hint}_quantized", self.elem_type)
        rounded = emitter.op("DequantizeLinear", [small, scale, zero], f"{hint}_rounded", dtype)
        if self.factor != 1:
            rounded = emitter.op("Mul", [rounded, emitter.scalar(self.factor, dtype)], f"{hint}_scaled", dtype)
        return rounded


def read_rounding(node: gs.Node, attribute: str) -> Rounding | None:
    """The rounding that an attribute of an Attention states."""
    numbers: Sequence[float] | None = node.attrs.get(attribute)
    return None if numbers is None else Rounding(float(numbers[0]), int(numbers[1]), float(numbers[2]))

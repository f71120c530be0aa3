"""Converts names of ONNX dtypes to NumPy dtypes."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

PLAIN = (
    "float", "float16", "double", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64", "bool",
)  # fmt: skip
"""Names of dtypes that NumPy itself has; ONNX Runtime takes these from Python."""

_NAMES = {
    "float": "float32", "double": "float64", "float8e4m3fn": "float8_e4m3fn", "float8e4m3fnuz": "float8_e4m3fnuz",
    "float8e5m2": "float8_e5m2", "float8e5m2fnuz": "float8_e5m2fnuz", "float8e8m0": "float8_e8m0fnu",
    "float4e2m1": "float4_e2m1fn",
}  # fmt: skip


def array_dtype(name: str) -> np.dtype[Any]:
    """Return the NumPy dtype for an ONNX dtype name such as ``"bfloat16"``."""
    name = _NAMES.get(name, name)
    return np.dtype(getattr(ml_dtypes, name, name))

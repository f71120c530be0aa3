"""ONNX Runtime as the runtime calls it: memory that it is given, and what it raises."""

from __future__ import annotations

from typing import Any

import numpy as np
from onnx import helper
from onnxruntime.capi import onnxruntime_pybind11_state as ort_errors

__all__ = ["ORT_ERRORS", "bind", "one_line"]

Array = np.ndarray[Any, np.dtype[Any]]

ORT_ERRORS = (
    ort_errors.EPFail, ort_errors.Fail, ort_errors.InvalidArgument, ort_errors.InvalidGraph,
    ort_errors.InvalidProtobuf, ort_errors.NoSuchFile, ort_errors.NotImplemented, ort_errors.RuntimeException,
)  # fmt: skip


def one_line(error: Exception) -> str:
    """The message of an error, shortened in its middle where it is long."""
    text = " ".join(str(error).split()) or type(error).__name__
    # ONNX Runtime names the node first, then its own source file and C++ signature, then what is wrong.
    return text if len(text) <= 400 else f"{text[:160]} ... {text[-240:]}"


def bind(side: Any, name: str, array: Array) -> None:
    """Give ONNX Runtime the memory of an array.

    Args:
        side: ``bind_input`` or ``bind_output`` of an IOBinding.
        name: of the tensor.
        array: C-contiguous; the caller keeps it.
    """
    side(name, "cpu", 0, helper.np_dtype_to_tensor_dtype(array.dtype), list(array.shape), array.ctypes.data)

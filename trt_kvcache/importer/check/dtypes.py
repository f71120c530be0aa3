"""ONNX dtype names as numpy dtypes, and the tolerance that each is compared with."""

from __future__ import annotations

from typing import Any

import numpy as np

from trt_kvcache.errors import UnsupportedModelError

_NUMPY = {
    "float": np.float32, "float16": np.float16, "double": np.float64, "int8": np.int8, "uint8": np.uint8,
    "int16": np.int16, "uint16": np.uint16, "int32": np.int32, "uint32": np.uint32, "int64": np.int64,
    "uint64": np.uint64, "bool": np.bool_,
}  # fmt: skip

# Both sides compute in the same dtype, in a different order of operations. float16 rounds at 2**-11; a decoder's few
# dozen roundings on the way to its logits stay an order of magnitude below these, a wrong mask is far above.
# A float32 twin holds the constants of the bfloat16 model, such as attention scales, rounded at 2**-9. No cache is
# float64, so that float64 outputs are made of float32 numbers, too.
_TWIN_TOLERANCE = 1e-2
_TOLERANCES = {"float16": 2e-2, "float": 1e-4, "double": 1e-4, "int8": 2e-2, "uint8": 2e-2}

# Magnitudes of garbage, largest first: the original must hide it on ONNX Runtime, which computes masked scores too and
# adds the lowest finite value to them.
_GARBAGE = {"float16": (1e4, 1e3, 30.0, 1.0)}
_WIDE_GARBAGE = (1e30, 1e9, 1e4, 1.0)


def numpy_dtype(name: str, *, twin: bool) -> np.dtype[Any]:
    """The numpy dtype of an ONNX dtype name such as ``"float16"``; bfloat16 is float32 in a float32 twin.

    Raises:
        UnsupportedModelError: ONNX Runtime takes no such inputs.
    """
    if twin and name == "bfloat16":
        return np.dtype(np.float32)
    if name not in _NUMPY:
        raise UnsupportedModelError(
            f"verification runs on ONNX Runtime, which computes nothing in {name}; it can run {', '.join(_NUMPY)}, and "
            "bfloat16 as float32: verify a float16 or float32 export of the same model"
        )
    return np.dtype(_NUMPY[name])


def tolerance(dtype: np.dtype[Any], *, twin: bool) -> float:
    """Largest difference allowed, as a share of the output's scale; 0 for integers other than quantized values."""
    if twin and dtype.kind == "f":
        return max(_TWIN_TOLERANCE, _TOLERANCES.get(dtype.name, 0.0))
    name = {"float32": "float", "float64": "double"}.get(dtype.name, dtype.name)
    return _TOLERANCES.get(name, 0.0)


def garbage_magnitudes(names: set[str]) -> tuple[float, ...]:
    """Magnitudes to try, largest first, for caches of these dtypes; integer caches take any value."""
    integers = [float(np.iinfo(_NUMPY[name]).max) for name in names if "int" in name]
    if len(integers) == len(names):
        return (min(integers),)
    return next((_GARBAGE[name] for name in names if name in _GARBAGE), _WIDE_GARBAGE)

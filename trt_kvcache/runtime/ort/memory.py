"""Estimates the memory that a model's weights take in ONNX Runtime, before it is opened.

Measured with 1.32, in addition to the files that the system maps:

    float32, 1.67 GB    1.4 GB: weights of products are copied, packed
    float16, 0.83 GB    2.1 GB while it opens, then 1.8 GB: products are computed in float32
    float16, 3.56 GB    11.7 GB while it opens, then 6.4 GB: the same with transposed weights
"""

from __future__ import annotations

from onnx import ModelProto, TensorProto

from trt_kvcache.errors import SessionError
from trt_kvcache.importer.protos import byte_size, iter_tensors
from trt_kvcache.machine import free_memory, memory

_CONVERTED = 2.5  # times the bytes of float16 and bfloat16 weights, at least
_PACKED = 0.8  # times the bytes of other weights: tables are not packed


def admit_weights(model: ModelProto) -> None:
    """Refuse a model whose weights do not fit; the system would otherwise kill a process without a message.

    Raises:
        SessionError: too little memory is free.
    """
    narrow = (TensorProto.FLOAT16, TensorProto.BFLOAT16)
    sizes = [(byte_size(t) or 0, t.data_type in narrow) for t in iter_tensors(model)]
    half, rest = (sum(size for size, is_half in sizes if is_half is wanted) for wanted in (True, False))
    need, free = int(_CONVERTED * half + _PACKED * rest), free_memory(swap=True)
    if need > free:
        why = "computes 16-bit floats in float32" if half > rest else "packs them for products"
        raise SessionError(
            f"on the CPU the weights of this model, {(half + rest) / 1e9:.1f} GB, take at least {need / 1e9:.1f} GB of "
            f"memory (ONNX Runtime {why}), and {free / 1e9:.1f} of this machine's {memory() / 1e9:.1f} GB are to be "
            "had; free memory that other programs hold, use weights of 4 or 8 bits or a larger machine, or build an "
            "engine and run that on a GPU"
        )

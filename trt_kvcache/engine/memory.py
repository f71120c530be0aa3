"""The memory that a build needs, checked before TensorRT starts.

Measured with TensorRT for RTX 1.7.1: the peak of memory that the system cannot reclaim, over all processes:

    float16, 0.70 GB of weights    1.23 GB; 2.36 GB if decode steps have their own copy of the weights
    float16, 1.35 GB               2.39 GB
    float16, 4.02 GB               6.59 GB
    float32, 0.92 GB               1.58 GB
    int4, 0.64 GB                  1.84 GB, with copies of the weights whose signs change

The system also keeps mapped weights and the new engine in memory while some is free.
"""

from __future__ import annotations

from trt_kvcache.errors import OptionError
from trt_kvcache.machine import free_memory, memory

_FACTOR = 1.65  # times the bytes of all weights
_FIXED = 500_000_000  # bytes


def build_memory(weights: int) -> int:
    """Return the bytes of memory that TensorRT takes to build an engine with `weights` bytes of weights."""
    return int(_FACTOR * weights) + _FIXED


def check_memory(weights: int, flipped: int = 0, *, twice: bool = False) -> None:
    """Refuse a build that would run out of memory.

    Args:
        weights: size of the rewritten model's weights, in bytes.
        flipped: size of the weights whose bytes change for TensorRT.
        twice: the engine holds most weights twice.

    Raises:
        OptionError: too little memory is free.
    """
    need = build_memory(weights * (2 if twice else 1)) + flipped
    free = free_memory(swap=True)
    if need > free:
        raise OptionError(
            f"this build takes about {need / 1e9:.1f} GB of memory ({weights / 1e9:.1f} GB of weights, and TensorRT's "
            f"copies of most of them), and {free / 1e9:.1f} of this machine's {memory() / 1e9:.1f} GB are free; "
            "close other programs, add swap space, or build on a larger machine (TensorRT for RTX needs no GPU to "
            "build); --no-memory-check skips this check"
        )

"""What a build takes of the machine's memory, asked before TensorRT is started.

Measured with TensorRT for RTX 1.7.1: what cannot be given back for other uses, of all processes, at the most:

    float16, 0.70 GB of weights    1.23 GB, where decode steps have weights of their own 2.36 GB
    float16, 1.35 GB               2.39 GB
    float16, 4.02 GB               6.59 GB
    float32, 0.92 GB               1.58 GB
    int4, 0.64 GB                  1.84 GB, with copies of the weights whose signs change on the way

Weights that the operating system maps, and the engine that is being written, come on top where there is room.
"""

from __future__ import annotations

from trt_kvcache.errors import OptionError
from trt_kvcache.machine import free_memory, memory

_FACTOR = 1.65  # of the bytes of all weights
_FIXED = 500_000_000  # bytes


def check_memory(weights: int, flipped: int = 0, *, twice: bool = False) -> None:
    """Refuse a build that would run out of memory, or take the whole machine down.

    Args:
        weights: of the rewritten model, in bytes.
        flipped: bytes of those that change on the way to TensorRT.
        twice: the engine has most of them twice.

    Raises:
        OptionError: too little is free.
    """
    need = int(_FACTOR * weights * (2 if twice else 1)) + flipped + _FIXED
    free = free_memory(swap=True)
    if need > free:
        raise OptionError(
            f"this build takes about {need / 1e9:.1f} GB of memory ({weights / 1e9:.1f} GB of weights, and TensorRT's "
            f"copies of most of them), and {free / 1e9:.1f} of this machine's {memory() / 1e9:.1f} GB are to be had; "
            "free memory that other programs hold, add swap space, or build on a larger machine: engines of TensorRT "
            "for RTX need no GPU to build. --no-memory-check builds all the same"
        )

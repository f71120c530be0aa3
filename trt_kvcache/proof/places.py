"""Names and places that recording and replay share."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from trt_kvcache.importer.plan import CachePlan
from trt_kvcache.runtime.buffers import carried_buffers
from trt_kvcache.runtime.trt.cuda import ALIGNMENT

LOGITS = "logits"
"""In place of the name of the logits' output, beside the names of caches."""


def rows_aligned(plan: CachePlan) -> bool:
    """True if each row of the caches lies at an address that TensorRT takes: else an engine runs one sequence alone."""
    return not any(
        math.prod(b.row_shape(b.capacity)) * b.array_dtype.itemsize % ALIGNMENT for b in carried_buffers(plan)
    )


def places(size: int, width: int) -> npt.NDArray[Any]:
    """The numbers of a cache row that are kept: at most `width`, evenly spread, so that each head has some."""
    width = min(size, width)
    step = size // width
    return np.arange(width) * size // width + np.arange(width) * 7 % max(step, 1)

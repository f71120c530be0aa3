"""Names and places that recording and replay share."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

LOGITS = "logits"
"""In place of the name of the logits' output, beside the names of caches."""


def places(size: int, width: int) -> npt.NDArray[Any]:
    """The numbers of a cache row that are kept: at most `width`, evenly spread, so that each head has some."""
    width = min(size, width)
    step = size // width
    return np.arange(width) * size // width + np.arange(width) * 7 % max(step, 1)

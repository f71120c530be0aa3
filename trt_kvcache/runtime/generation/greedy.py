"""The token with the highest score, in whatever type the model gives its scores.

A step of a batch has a row of scores for each sequence, easily 128,000 numbers. NumPy converts float16 one number at a
time, 0.1 to 0.2 ms for such a row: of a batch, more than the step takes on a GPU. Ordered as integers, they need no
conversion.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["CHOICE", "as_scores", "best"]

Logits = npt.NDArray[Any]

CHOICE = np.dtype([("token", np.int64), ("score", np.float32)])
"""One of the scores of a position, where a runner gives the highest of them alone; ``[N]`` stands for ``[V]``."""

_LOWEST = -0x7C01  # the key of float16's -inf; below it there is only NaN


def best(logits: Logits) -> tuple[int, float]:
    """The first of the tokens with the highest score, and that score.

    Args:
        logits: ``[V]``, V at least 1, of any float dtype; or a `CHOICE` of them, ascending.

    Returns:
        The token and its score, as of ``as_scores(logits)``. The score is NaN if any is.
    """
    if logits.dtype == CHOICE:
        at = int(logits["score"].argmax()) if logits.size > 1 else 0
        return int(logits["token"][at]), float(logits["score"][at])
    if logits.dtype != np.float16:
        scores = as_scores(logits)
        token = int(scores.argmax())  # NaN counts as the highest
        return token, float(scores[token])
    bits = np.ascontiguousarray(logits).view(np.int16)
    keys = bits ^ ((bits >> 15) & 0x7FFF)  # negative numbers are ordered backwards: all of their bits but the sign turn
    token = int(keys.argmax())
    top = float(logits[token])
    if keys.min() < _LOWEST or top == 0:  # NaN with a sign; -0 counts as less than 0 here
        scores = as_scores(logits)
        token = int(scores.argmax())
        top = float(scores[token])
    return token, top


def as_scores(logits: Logits) -> npt.NDArray[np.float32]:
    """Logits as float32: themselves if they are."""
    return logits.astype(np.float32, copy=False)

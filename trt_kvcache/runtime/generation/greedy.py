"""Finds the token with the highest score, in the model's own float type.

A step has a row of scores for each sequence, often 128,000 numbers. NumPy converts float16 one number at a time, which
takes 0.1 to 0.2 ms for such a row: for a batch, longer than the step takes on a GPU. Compared as integers, the numbers
need no conversion.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Logits = npt.NDArray[Any]

CHOICE = np.dtype([("token", np.int64), ("score", np.float32)])
"""One of the highest scores of a position, from a runner that returns only these; ``[N]`` replaces ``[V]``."""

_LOWEST = -0x7C01  # the key of float16's -inf; lower keys are NaN


def best(logits: Logits) -> tuple[int, float]:
    """Return the first token with the highest score, and this score.

    Args:
        logits: ``[V]``, V at least 1, of any float dtype; or a `CHOICE` of the logits, tokens ascending.

    Returns:
        The token, and its score as float32. The score is NaN if any score is NaN.
    """
    if logits.dtype == CHOICE:
        at = int(logits["score"].argmax()) if logits.size > 1 else 0
        return int(logits["token"][at]), float(logits["score"][at])
    if logits.dtype != np.float16:
        scores = as_scores(logits)
        token = int(scores.argmax())  # NaN counts as the highest
        return token, float(scores[token])
    bits = np.ascontiguousarray(logits).view(np.int16)
    # flip the bits of negative numbers except the sign, because their order is reversed
    keys = bits ^ ((bits >> 15) & 0x7FFF)
    token = int(keys.argmax())
    top = float(logits[token])
    if keys.min() < _LOWEST or top == 0:  # NaN with a sign bit; and -0, which the keys order below 0
        scores = as_scores(logits)
        token = int(scores.argmax())
        top = float(scores[token])
    return token, top


def as_scores(logits: Logits) -> npt.NDArray[np.float32]:
    """Return logits as float32, without a copy if possible."""
    return logits.astype(np.float32, copy=False)

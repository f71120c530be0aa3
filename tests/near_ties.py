"""Generated tokens against scores of another machine: where two are nearly best, rounding decides between them."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

__all__ = ["check_greedy"]


def check_greedy(
    prompt: Sequence[int], tokens: Sequence[int], scores: Callable[[list[int]], Any], tolerance: float
) -> None:
    """Make sure that each token has nearly the best score after the text before it.

    Args:
        prompt: what the tokens continue.
        tokens: what was generated.
        scores: float ``[V]`` after a text.
        tolerance: how far the scores of both machines may be apart, as a share of the largest.
    """
    text = list(prompt)
    for token in tokens:
        found = np.asarray(scores(text), np.float64)
        behind = (found.max() - found[token]) / np.abs(found).max()
        assert behind <= 2 * tolerance, f"{token} after {text} is {behind:.3g} behind {found.argmax()}"
        text.append(token)

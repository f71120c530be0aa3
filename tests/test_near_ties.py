"""`near_ties.check_greedy` takes what rounding decides, and nothing else."""

from functools import partial
from typing import Any

import numpy as np
import pytest
from hybrids import cross_logits, greedy
from near_ties import check_greedy

SCORES = partial(cross_logits, mask="none", length=1, seed=2)
PROMPT = [60]


def rounded(text: list[int]) -> Any:
    """The best score a little less: as far as products in TF32 may be from the exact ones."""
    scores = SCORES(text)
    scores[scores.argmax()] -= 5e-3 * np.abs(scores).max()
    return scores


def test_near_ties_pass_and_other_tokens_do_not() -> None:
    exact, found = greedy(SCORES, PROMPT, 10), greedy(rounded, PROMPT, 10)
    assert exact != found
    check_greedy(PROMPT, exact, SCORES, 0)
    check_greedy(PROMPT, found, SCORES, 5e-3)
    with pytest.raises(AssertionError, match=r"\d+ after \[60.*\] is 0.0\d+ behind \d+"):
        check_greedy(PROMPT, found, SCORES, 0)
    for i in range(10):
        worst = [*exact[:i], int(SCORES([*PROMPT, *exact[:i]]).argmin())]
        with pytest.raises(AssertionError, match="behind"):
            check_greedy(PROMPT, worst, SCORES, 5e-3)

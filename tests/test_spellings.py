"""One attention over growing caches in many spellings: each is taken and right, or refused."""

from __future__ import annotations

import collections

import pytest
from spelling_judge import EQUAL, REFUSED, judge
from spellings import SPELLINGS, Spelling, all_single, spelled

SHARE = 25


def _check(spelling: Spelling) -> str:
    outcome = judge(spelling)
    assert outcome.kind in (EQUAL, REFUSED), (spelling.seed, spelling.unusual, outcome)
    return outcome.kind


@pytest.mark.few(12)
@pytest.mark.parametrize(("part", "how"), all_single())
def test_one_unusual_spelling(part: str, how: str) -> None:
    """Each by itself."""
    _check(spelled(1000 * list(SPELLINGS).index(part) + SPELLINGS[part].index(how), part, how))


def test_softmax_over_rows() -> None:
    """Scores in two dimensions: rows of all sequences, heads and tokens."""
    for seed in range(3):
        _check(spelled(seed, "softmax", "2-D rows"))


@pytest.mark.slow
@pytest.mark.parametrize("kept", [0.0, 0.83])
@pytest.mark.parametrize("first", range(0, 400, SHARE))
def test_everything_drawn(first: int, kept: float) -> None:
    kinds = collections.Counter(_check(spelled(seed, kept=kept)) for seed in range(first, first + SHARE))
    assert sum(kinds.values()) == SHARE

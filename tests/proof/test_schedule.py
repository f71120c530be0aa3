"""The steps of a proof: one decode from empty caches over each place at which an engine may go wrong."""

from __future__ import annotations

import numpy as np
import pytest

from trt_kvcache.importer.steps.step import Limits
from trt_kvcache.proof.contents import copies
from trt_kvcache.proof.schedule import DRAWN, Episode, plan_proof


def _limits(**given: object) -> Limits:
    usual = {
        "batch": 3, "length": None, "longest": 64, "linear": None, "circular": (), "no_straddle": (), "indexed": True,
        "ragged": True, "lengths": False,
    }  # fmt: skip
    return Limits(**(usual | given))  # type: ignore[arg-type]


def _crosses(episodes: tuple[Episode, ...], place: int) -> set[int]:
    """Lengths of the steps that begin before a place or at it, and end after it, in any row."""
    return {
        s.length for e in episodes for s in e.steps for a, b in zip(s.starts, s.valid, strict=True) if a <= place < b
    }


@pytest.mark.parametrize(
    ("limits", "windows", "names"),
    [
        (_limits(linear=40), set(), ["start", "full"]),
        (_limits(linear=320), set(), ["start", "decode", "span", "full"]),
        (_limits(linear=4096), {512}, ["start", "decode", "span", "window", "full"]),
        (_limits(circular=(24,), longest=24), set(), ["start", "wrap", "decode"]),
        (_limits(circular=(512,), linear=4096), {512}, ["start", "decode", "span", "wrap", "full"]),
        (_limits(circular=(4096,)), set(), ["start", "decode", "span", "wrap"]),
        (_limits(linear=40, ragged=False), set(), ["start", "full"]),
        (_limits(linear=64, length=1, longest=1), set(), ["start", "decode", "full"]),
        (_limits(linear=64, length=4, longest=4, batch=1), set(), ["start", "decode", "full"]),
    ],
)
def test_episodes_go_on_where_the_one_before_ended(limits: Limits, windows: set[int], names: list[str]) -> None:
    episodes = plan_proof(limits, windows, None)
    assert list(dict.fromkeys(e.name for e in episodes)) == [*names, *([] if limits.circular else [DRAWN])]
    episodes = tuple(e for e in episodes if e.name != DRAWN)
    ends = (0,) * limits.batch
    for episode in episodes:
        first = episode.steps[0].starts
        jumps = [start > end for start, end in zip(first, ends, strict=True)]
        assert all(start in (0, end) or start > end for start, end in zip(first, ends, strict=True))
        assert all(jumps) or not any(jumps)
        ends = episode.steps[-1].valid
    steps = [s for e in episodes for s in e.steps]
    assert {s.length for s in steps} <= ({limits.length} if limits.length else set(range(1, limits.longest + 1)))
    if limits.linear is not None:
        assert max(ends) == limits.linear
    if limits.ragged and limits.batch > 1:
        assert len(set(ends)) == limits.batch
    for place in limits.circular:
        assert (limits.length or 1) in _crosses(episodes, place)


def test_steps_that_are_asked_for() -> None:
    limits = _limits(linear=4096)
    for count in (1, 5, 12, 40):
        assert sum(len(e.steps) for e in plan_proof(limits, set(), count)) == count
    usual = plan_proof(limits, set(), None)
    assert plan_proof(limits, set(), 6)[:3] == usual[:3], "the first ones stay"
    small = plan_proof(_limits(linear=12, batch=1), set(), 100)
    assert max(max(s.valid) for e in small for s in e.steps) <= 12


@pytest.mark.parametrize(("capacity", "held", "start"), [(8, 5, 8), (100, 7, 40), (8, 5, 19), (8, 21, 30)])
def test_rows_up_to_a_jump_are_copies(capacity: int, held: int, start: int) -> None:
    """A ring, and the text that the original holds whole, get the same rows."""
    text = np.full(start + 3, -1.0)
    text[:held] = np.arange(held)
    ring = np.full(capacity, -1.0)
    for token in range(held):
        ring[token % capacity] = token
    copies(ring, capacity, held, start)
    assert set(ring[: min(start, capacity)]) <= set(range(held))
    if held <= capacity:
        assert ring[: min(held, capacity)].tolist() == list(range(held)), "what is there stays"
    copies(text, capacity, held, start)
    newest = np.arange(max(start - capacity, 0), start)
    assert text[newest].tolist() == ring[newest % capacity].tolist()

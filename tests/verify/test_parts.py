"""The parts of a verification that numbers go through, each against plain arithmetic."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trt_kvcache.importer.steps.schedule import Limits
from trt_kvcache.verify.report import VerifyOptions
from trt_kvcache.verify.schedule import plan_schedule, schedule_notes


@st.composite
def limits(draw: st.DrawFn) -> Limits:
    linear = draw(st.none() | st.integers(1, 70))
    circular = draw(st.lists(st.integers(1, 40), max_size=2, unique=True).map(sorted))
    if linear is None and not circular:
        linear = 64
    capacities = [c for c in (linear, *circular) if c is not None]
    return Limits(
        batch=draw(st.integers(1, 4)),
        length=draw(st.none() | st.integers(1, min(capacities))),
        longest=min(capacities),
        linear=linear,
        circular=tuple(circular),
        no_straddle=tuple(circular) if draw(st.booleans()) else (),
        indexed=draw(st.integers(0, 4)) > 0,
        ragged=draw(st.booleans()),
        lengths=draw(st.booleans()),
    )


@settings(deadline=None)  # machines differ
@given(limits(), st.lists(st.integers(1, 9), max_size=3), st.integers(1, 4))
def test_schedules_keep_to_the_limits(allowed: Limits, chunks: list[int], tokens: int) -> None:
    episodes = plan_schedule(allowed, VerifyOptions(chunks=tuple(chunks), tokens=tokens))
    assert episodes[0].steps
    for episode in episodes:
        for before, after in zip(episode.steps, episode.steps[1:], strict=False):
            if allowed.indexed:
                assert after.starts == before.valid
        for step in episode.steps:
            assert len(step.starts) == len(step.valid) == allowed.batch
            assert 1 <= step.length <= allowed.longest
            assert allowed.length in (None, step.length)
            assert min(step.starts) >= 0
            assert all(valid <= start + step.length for start, valid in zip(step.starts, step.valid, strict=True))
            if allowed.linear is not None:
                assert max(step.starts) + step.length <= allowed.linear
            for capacity in allowed.no_straddle:
                assert all(start % capacity + step.length <= capacity for start in step.starts)
            if not allowed.ragged:
                assert len(set(step.starts)) == 1
                assert len(set(step.valid)) == 1
            if not allowed.indexed:
                assert set(step.starts) == {0}


LONGER = "updates of 64 tokens instead of {}: the caches take no longer ones"


@pytest.mark.parametrize(
    ("chunks", "tokens", "notes"),
    [
        ((5, 3), 4, []),
        ((64,), 0, []),
        ((99,), 4, [LONGER.format(99), "1 of 5 updates: the caches hold 64 tokens"]),
        ((30, 30), 9, ["6 of 11 updates: the caches hold 64 tokens"]),
    ],
)
def test_updates_that_do_not_fit_are_said(chunks: tuple[int, ...], tokens: int, notes: list[str]) -> None:
    allowed = Limits(2, None, 64, 64, (), (), True, True, True)
    options = VerifyOptions(chunks=chunks, tokens=tokens)
    assert schedule_notes(allowed, options, plan_schedule(allowed, options)) == notes

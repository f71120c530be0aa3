"""The parts of a verification that numbers go through, each against plain arithmetic."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper

from trt_kvcache.importer.steps.step import Limits
from trt_kvcache.verify.compare import difference
from trt_kvcache.verify.memory import weigh
from trt_kvcache.verify.record import same_bits
from trt_kvcache.verify.report import VerifyOptions
from trt_kvcache.verify.schedule import plan_schedule, schedule_notes
from trt_kvcache.verify.sessions import OrtSession


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


@pytest.mark.parametrize("axes", [(0, 1, 2, 3), (0, 2, 1, 3), (0, 3, 2, 1), (1, 0, 3, 2)])
@pytest.mark.parametrize(("dtype", "width"), [("float16", 8), ("float16", 3), ("int8", 16), ("float32", 1)])
def test_rows_that_changed_are_found_in_any_layout(axes: tuple[int, ...], dtype: str, width: int) -> None:
    rng = np.random.default_rng(0)
    before = rng.integers(0, 100, (3, 5, 7, width)).astype(dtype)
    after = before.copy()
    places = rng.random(before.shape) < 0.02
    after[places] += 1
    a, b = before.transpose(axes), after.transpose(axes)
    assert (same_bits(a, b) == (a == b).all(axis=(2, 3))).all()
    assert same_bits(a, a).all()


LARGE = np.finfo(np.float32).max


@pytest.mark.parametrize(
    ("original", "rewritten", "found"),
    [
        ([1.0, -4.0], [1.5, -4.0], (0.5, 0.125)),
        ([1.0, np.inf, np.nan], [1.0, np.inf, np.nan], (0.0, 0.0)),
        ([1.0, 2.0, np.nan], [1.0, 2.5, np.nan], (0.5, 0.25)),
        ([1.0, np.inf], [1.0, -np.inf], (np.inf, np.inf)),
        ([1.0, 2.0], [1.0, np.nan], (np.inf, np.inf)),
        ([1.0, np.nan], [1.0, 2.0], (np.inf, np.inf)),
        ([0.0, 0.0], [0.0, 1.0], (1.0, np.inf)),
        ([LARGE], [-LARGE], (np.inf, np.inf)),
        ([], [], (0.0, 0.0)),
    ],
)
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_differences(original: list[float], rewritten: list[float], found: tuple[float, float], dtype: Any) -> None:
    if LARGE in original and dtype != np.float32:
        return  # float16 has no such number, and float64 larger ones
    assert difference(np.array(original, dtype), np.array(rewritten, dtype)) == found


def test_differences_of_integers_are_exact() -> None:
    large = 1 << 53
    assert difference(np.array([large], np.int64), np.array([large - 1], np.int64))[0] == 1
    assert difference(np.array([255, 0], np.uint8), np.array([0, 0], np.uint8)) == (255, 1)
    assert difference(np.array([-128], np.int8), np.array([127], np.int8)) == (255, 255 / 128)
    assert difference(np.array([True]), np.array([False])) == (1, 1)


def test_large_outputs_go_into_given_arrays_that_have_their_shape(tmp_path: Path) -> None:
    nodes = [helper.make_node("Add", ["x", "x"], ["twice"]), helper.make_node("ReduceSum", ["x"], ["sum"], keepdims=0)]
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT16, ["n", 2])
    outputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT16, None) for name in ("twice", "sum")]
    model = helper.make_model(
        helper.make_graph(nodes, "doubles", [x], outputs), opset_imports=[helper.make_opsetid("", 21)], ir_version=10
    )
    session = OrtSession(model, tmp_path, weigh(model), 0)
    values, into = np.ones((3, 2), np.float16), np.zeros((3, 2), np.float16)
    found = session.run({"x": values}, {"twice": into})
    assert found["twice"] is into
    assert (into == 2).all()
    assert found["sum"] == 6
    other = session.run({"x": values[:2]}, {"twice": into})["twice"]
    assert other.shape == (2, 2)
    assert (other == 2).all()

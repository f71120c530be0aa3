"""The parts of a verification that numbers go through, each against plain arithmetic."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from decoders import DecoderConfig, write_decoder
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

from trt_kvcache.importer.plan import CacheUpdate, PhysicalLayout, Role, Route, TensorRole, UpdateForm, UpdateMode
from trt_kvcache.importer.protos import iter_tensors
from trt_kvcache.importer.steps.contents import CacheTensor, first_contents
from trt_kvcache.importer.steps.schedule import Limits
from trt_kvcache.verify.compare import Comparison, difference
from trt_kvcache.verify.record import chosen_rows, same_bits, written_rows
from trt_kvcache.verify.report import VerifyOptions
from trt_kvcache.verify.schedule import plan_schedule, schedule_notes
from trt_kvcache.verify.twin import TwinFolder, has_bfloat16


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


def cache(
    logical: tuple[int | str, ...], axis: int, physical: tuple[int | str, ...], layout: PhysicalLayout
) -> CacheTensor:
    update = CacheUpdate(
        node="n", past="c", present="p", update="u", write_indices="w", update_lengths=None, dtype="float",
        logical_shape=logical, sequence_axis=axis, physical_shape=physical, physical_sequence_axis=2, layout=layout,
        mode=UpdateMode.LINEAR, form=UpdateForm.PADDED, update_length="S", capacity=6, route=Route.NATIVE, reason="",
    )  # fmt: skip
    role = TensorRole("c", "input", Role.CACHE, "float", physical, "graph", ())
    return CacheTensor(role, "p", update)


LAYOUTS = [
    cache(("B", 2, 6, 4), 2, ("B", 2, 6, 4), PhysicalLayout.AS_IS),
    cache(("B", 6, 8), 1, ("B", 1, 6, 8), PhysicalLayout.VIEW),
    cache(("B", 6, 8), 1, ("B", 2, 6, 4), PhysicalLayout.HEADS_MAJOR),
    cache(("B", 6, 2, 4), 1, ("B", 2, 6, 4), PhysicalLayout.HEADS_MAJOR),
    cache(("B", 2, 3, 6, 4), 3, ("B", 6, 6, 4), PhysicalLayout.VIEW),
]


@pytest.mark.parametrize("tensor", LAYOUTS, ids=lambda t: f"{t.update.layout.value}-{len(t.update.logical_shape)}")
def test_layouts_go_there_and_back(tensor: CacheTensor) -> None:
    logical = np.random.default_rng(0).random(tensor.logical_shape(3))
    physical = tensor.to_physical(logical)
    assert physical.shape == (3, *tensor.update.physical_shape[1:])
    np.testing.assert_array_equal(tensor.to_logical(physical), logical)
    flat = [rows.reshape(3, 6, -1) for rows in (tensor.rows(logical), tensor.physical_rows(physical))]
    np.testing.assert_array_equal(*flat)
    rows = tensor.rows(first_contents(tensor, [0, 4, 9], 1e30, np.random.default_rng(0), twin=False))
    garbage, zero = ((np.abs(rows) == np.float32(n)).all(axis=tuple(range(2, rows.ndim))) for n in (1e30, 0))
    np.testing.assert_array_equal(garbage | zero, np.arange(6) >= np.array([[0], [4], [6]]))
    assert garbage.any()
    assert zero.any()


@pytest.mark.parametrize(
    ("original", "rewritten", "expected"),
    [
        ([1.0, -4.0], [1.0, -4.0], (0, 0)),
        ([1.0, -4.0], [1.5, -4.0], (0.5, 0.125)),
        ([0.0, 0.0], [0.0, 1e-9], (1e-9, np.inf)),
        ([1.0, np.nan], [1.0, np.nan], (0, 0)),
        ([1.0, 2.0], [1.0, np.nan], (np.inf, np.inf)),
        ([1.0, np.inf], [1.0, -np.inf], (np.inf, np.inf)),
        ([1.0, 2.0], [1.0], (np.inf, np.inf)),
        ([], [], (0, 0)),
    ],
)
def test_difference(original: list[float], rewritten: list[float], expected: tuple[float, float]) -> None:
    assert difference(np.array(original), np.array(rewritten)) == pytest.approx(expected)


def test_other_dtypes_are_different() -> None:
    assert difference(np.zeros(2, np.float32), np.zeros(2, np.float16)) == (np.inf, np.inf)


def test_negative_zero_in_a_stale_row_counts() -> None:
    comparison = Comparison({"p": "cache"}, None)
    past = np.zeros((1, 2, 6, 4), np.float32)
    written = past.copy()
    written[:, :, 0] = 1
    changed = written.copy()
    changed[:, :, 3] = -0.0
    expected = written_rows(LAYOUTS[0], past, written)
    assert expected is not None
    comparison.cache(LAYOUTS[0], expected, past, changed, 7, 16)
    (found,) = comparison.results()
    assert (found.passed, found.stale_rows_changed, found.step, found.span) == (False, 1, 7, 16)
    assert found.max_absolute == 0


@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.int8])
@pytest.mark.parametrize("size", [3, 8])
def test_rows_of_the_same_bits(dtype: type, size: int) -> None:
    rng = np.random.default_rng(size)
    past = rng.integers(0, 100, (2, 3, 6, size)).astype(dtype)
    for trial in range(20):
        present, rows = past.copy(), np.zeros((2, 6), bool)
        for _ in range(trial % 4):
            b, n, row, at = (int(rng.integers(0, end)) for end in past.shape)
            present[b, n, row, at] += 1
            rows[b, row] = True
        np.testing.assert_array_equal(same_bits(*(np.moveaxis(a, 2, 1) for a in (past, present))), ~rows)
        strided = [np.repeat(a, 2, axis=-1)[..., ::2] for a in (past, present)]
        np.testing.assert_array_equal(same_bits(*(np.moveaxis(a, 2, 1) for a in strided)), ~rows)
        assert chosen_rows(np.moveaxis(present, 2, 1), rows).shape == (rows.sum(), 3 * size)


@pytest.mark.parametrize("external", [1024, None])
def test_twins_hold_the_same_numbers_in_float32(tmp_path: Path, external: int | None) -> None:
    config = DecoderConfig(dtype="bfloat16", softmax_precision="bfloat16")
    path = write_decoder(tmp_path / "m.onnx", config, external_threshold=external)
    model = onnx.load(path, load_external_data=False)
    model.graph.node.append(helper.make_node("Cast", ["logits"], ["narrow"], to=TensorProto.BFLOAT16))
    (tmp_path / "twin").mkdir()
    twin = TwinFolder(tmp_path / "twin", tmp_path).twin(model)
    assert has_bfloat16(model)  # the source is not changed
    assert not has_bfloat16(twin)
    onnx.load_external_data_for_model(model, str(tmp_path))
    onnx.load_external_data_for_model(twin, str(tmp_path / "twin"))
    pairs = list(zip(iter_tensors(model), iter_tensors(twin), strict=True))
    assert len(pairs) > 20
    for before, after in pairs:
        assert before.name == after.name
        numbers = [numpy_helper.to_array(tensor).astype(np.float64) for tensor in (before, after)]
        np.testing.assert_array_equal(*numbers)

"""The parts of a verification, each against plain arithmetic."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import pytest
from decoders import DecoderConfig, make_decoder, write_decoder
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

from trt_kvcache.errors import OptionError, UnsupportedModelError
from trt_kvcache.importer.check.caches import CacheTensor, first_contents
from trt_kvcache.importer.check.dtypes import garbage_magnitudes, numpy_dtype
from trt_kvcache.importer.check.inputs import arrange
from trt_kvcache.importer.check.lengths import Limits, check_carries
from trt_kvcache.importer.check.runnable import with_expanded_masks
from trt_kvcache.importer.plan import (
    CachePlan,
    CacheUpdate,
    PhysicalLayout,
    PlanOptions,
    Role,
    Route,
    TensorRole,
    UpdateForm,
    UpdateMode,
)
from trt_kvcache.importer.protos import iter_tensors
from trt_kvcache.verify.compare import Comparison, difference
from trt_kvcache.verify.record import chosen_rows, same_bits, written_rows
from trt_kvcache.verify.report import VerifyOptions
from trt_kvcache.verify.schedule import plan_schedule, schedule_notes
from trt_kvcache.verify.sessions import one_line
from trt_kvcache.verify.twin import TwinFolder, has_bfloat16


@st.composite
def limits(draw: st.DrawFn) -> Limits:
    linear = draw(st.none() | st.integers(1, 70))
    circular = draw(st.lists(st.integers(1, 40), max_size=2, unique=True).map(sorted))
    if linear is None and not circular:
        linear = 64
    capacities = [c for c in (linear, *circular) if c is not None]
    length = draw(st.none() | st.integers(1, min(capacities)))
    return Limits(
        batch=draw(st.integers(1, 4)),
        length=length,
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


def test_every_model_decodes_at_least_once() -> None:
    allowed = Limits(2, 4, 4, 4, (), (), True, True, True)
    assert [e.name for e in plan_schedule(allowed, VerifyOptions())] == ["decode", "short"]


@pytest.mark.parametrize(
    ("chunks", "tokens", "notes"),
    [
        ((5, 3), 4, []),
        ((60,), 4, []),
        ((64,), 0, []),
        (
            (99,),
            4,
            [
                "updates of 64 tokens instead of 99: the caches take no longer ones",
                "1 of 5 updates: the caches hold 64 tokens",
            ],
        ),
        ((30, 30), 9, ["6 of 11 updates: the caches hold 64 tokens"]),
        (
            (70, 99, 70),
            0,
            [
                "updates of 64 tokens instead of 70, 99: the caches take no longer ones",
                "1 of 3 updates: the caches hold 64 tokens",
            ],
        ),
    ],
)
def test_updates_that_do_not_fit_are_said(chunks: tuple[int, ...], tokens: int, notes: list[str]) -> None:
    allowed = Limits(2, None, 64, 64, (), (), True, True, True)
    options = VerifyOptions(chunks=chunks, tokens=tokens)
    assert schedule_notes(allowed, options, plan_schedule(allowed, options)) == notes


def test_a_fixed_length_is_no_cut() -> None:
    allowed = Limits(2, 4, 64, 64, (), (), True, True, True)
    options = VerifyOptions(chunks=(99,))
    assert schedule_notes(allowed, options, plan_schedule(allowed, options)) == []


VISIBLE = np.arange(2 * 3 * 5).reshape(2, 3, 5)
NAMES = ("batch", "sequence", "keys")


@pytest.mark.parametrize(
    ("shape", "axes", "expected"),
    [
        ((2, 1, 3, 5), ("batch", "", "sequence", "keys"), VISIBLE[:, None]),
        ((2, 4, 3, 5), ("batch", "", "sequence", ""), np.repeat(VISIBLE[:, None], 4, 1)),
        ((2, 3, 5), ("", "", ""), VISIBLE),
        ((3, 5), ("sequence", "keys"), VISIBLE[0]),
        ((2, 5), ("batch", "keys"), VISIBLE[:, -1]),
        ((1, 1, 1, 5), ("", "", "", ""), VISIBLE[:1, -1:, None]),
        ((3, 2, 5), ("sequence", "batch", "keys"), VISIBLE.transpose(1, 0, 2)),
    ],
)
def test_arrange_masks(shape: tuple[int, ...], axes: tuple[str, ...], expected: np.ndarray) -> None:
    np.testing.assert_array_equal(arrange(VISIBLE, NAMES, shape, axes), expected)


@pytest.mark.parametrize(
    ("shape", "axes", "expected"),
    [
        ((2, 3), ("batch", "sequence"), [[0, 1, 2], [7, 8, 9]]),
        ((3,), ("sequence",), [0, 1, 2]),
        ((3, 2, 3), ("", "batch", "sequence"), [[[0, 1, 2], [7, 8, 9]]] * 3),
        ((2, 1), ("batch", ""), [[2], [9]]),
        ((), (), 2),
    ],
)
def test_arrange_positions(shape: tuple[int, ...], axes: tuple[str, ...], expected: object) -> None:
    positions = np.array([[0, 1, 2], [7, 8, 9]])
    np.testing.assert_array_equal(arrange(positions, ("batch", "sequence"), shape, axes), expected)


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
    # Row 5 of the cache is the same numbers in both.
    for b in range(3):
        rows = sorted(np.take(physical[b], 5, axis=1).ravel())
        np.testing.assert_array_equal(rows, sorted(tensor.rows(logical)[b, 5].ravel()))
    # All rows, in the same order.
    flat = [rows.reshape(3, 6, -1) for rows in (tensor.rows(logical), tensor.physical_rows(physical))]
    np.testing.assert_array_equal(*flat)
    for view, whole in ((tensor.rows(logical), logical), (tensor.physical_rows(physical), physical)):
        assert np.shares_memory(view, whole)


def test_heads_stay_together() -> None:
    tensor = LAYOUTS[2]
    logical = np.arange(48.0).reshape(1, 6, 8)
    np.testing.assert_array_equal(tensor.to_physical(logical)[0, 1, 3], logical[0, 3, 4:])


@pytest.mark.parametrize("tensor", LAYOUTS, ids=lambda t: f"{t.update.layout.value}-{len(t.update.logical_shape)}")
def test_garbage_lies_exactly_where_no_token_was_written(tensor: CacheTensor) -> None:
    rows = tensor.rows(first_contents(tensor, [0, 4, 9], 1e30, np.random.default_rng(0), twin=False))
    garbage = (np.abs(rows) == np.float32(1e30)).all(axis=tuple(range(2, rows.ndim)))
    np.testing.assert_array_equal(garbage, np.arange(6) >= np.array([[0], [4], [6]]))
    assert (rows[garbage] > 0).any()
    assert (rows[garbage] < 0).any()


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


@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.int8, np.float64])
@pytest.mark.parametrize("size", [3, 4, 8])
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
        picked = chosen_rows(np.moveaxis(present, 2, 1), rows)
        assert picked.shape == (rows.sum(), 3 * size)


def test_outputs_that_were_never_compared_are_not_listed() -> None:
    assert Comparison({"logits": "logits"}, None).results() == ()


def test_the_tolerance_can_be_set() -> None:
    comparison = Comparison({"logits": "logits"}, 0.5)
    comparison.plain("logits", np.ones(2), np.array([1, 1.4]), 0, None)
    (found,) = comparison.results()
    assert found.passed
    assert not found.exact


def test_twins_hold_the_same_numbers_in_float32(tmp_path: Path) -> None:
    config = DecoderConfig(dtype="bfloat16", softmax_precision="bfloat16")
    path = write_decoder(tmp_path / "m.onnx", config, external_threshold=1024)
    model = onnx.load(path, load_external_data=False)
    cast = helper.make_node("Cast", ["logits"], ["narrow"], to=TensorProto.BFLOAT16)
    small = numpy_helper.from_array(np.array([1.5, -2], ml_dtypes.bfloat16), "small")
    model.graph.node.extend([cast, helper.make_node("Constant", [], ["small_out"], value=small)])
    assert has_bfloat16(model)
    (tmp_path / "twin").mkdir()
    folder = TwinFolder(tmp_path / "twin", tmp_path)
    twin = folder.twin(model)
    size = (tmp_path / "twin" / "twin.data").stat().st_size
    assert has_bfloat16(model)  # the source is not changed
    assert not has_bfloat16(twin)
    assert all(a.i != TensorProto.BFLOAT16 for n in twin.graph.node for a in n.attribute if a.type == a.INT)
    onnx.load_external_data_for_model(model, str(tmp_path))
    onnx.load_external_data_for_model(twin, str(tmp_path / "twin"))
    pairs = list(zip(iter_tensors(model), iter_tensors(twin), strict=True))
    assert len(pairs) > 20
    for before, after in pairs:
        assert before.name == after.name
        np.testing.assert_array_equal(
            numpy_helper.to_array(before).astype(np.float64), numpy_helper.to_array(after).astype(np.float64)
        )
    folder.twin(onnx.load(path, load_external_data=False))
    assert (tmp_path / "twin" / "twin.data").stat().st_size == size  # weights are converted once


def test_twins_of_inline_weights(tmp_path: Path) -> None:
    model = make_decoder(DecoderConfig(dtype="bfloat16"))
    twin = TwinFolder(tmp_path, tmp_path).twin(model)
    onnx.load_external_data_for_model(twin, str(tmp_path))
    for before, after in zip(iter_tensors(model), iter_tensors(twin), strict=True):
        np.testing.assert_array_equal(
            numpy_helper.to_array(before).astype(np.float64), numpy_helper.to_array(after).astype(np.float64)
        )


def test_models_without_masks_need_no_expansion() -> None:
    model = make_decoder(DecoderConfig())
    assert with_expanded_masks(model) is model
    masked = make_decoder(DecoderConfig(mask="bool"))
    expanded = with_expanded_masks(masked)
    onnx.checker.check_model(expanded, full_check=True)
    assert sum(n.op_type == "Expand" for n in expanded.graph.node) == 2
    assert not any(n.op_type == "Expand" for n in masked.graph.node)


def test_dtypes_that_nothing_computes_are_refused_by_name() -> None:
    with pytest.raises(UnsupportedModelError, match="computes nothing in float8e4m3fn"):
        numpy_dtype("float8e4m3fn", twin=False)
    with pytest.raises(UnsupportedModelError, match="bfloat16"):
        numpy_dtype("bfloat16", twin=False)
    assert numpy_dtype("bfloat16", twin=True) == np.float32


def test_garbage_fits_the_narrowest_dtype() -> None:
    assert garbage_magnitudes({"float"})[0] == 1e30
    assert garbage_magnitudes({"float", "float16"})[0] == 1e4
    assert garbage_magnitudes({"int8"}) == (127,)


def test_long_messages_keep_both_ends() -> None:
    text = one_line(ValueError("node X\n" + "path " * 200 + "is negative"))
    assert text.startswith("node X path")
    assert text.endswith("is negative")
    assert len(text) < 420


def test_model_without_a_cache_has_nothing_to_verify() -> None:
    plan = CachePlan(PlanOptions(), 24, (), (), (), (), ())
    with pytest.raises(OptionError, match="no decode to verify"):
        check_carries(plan)

"""Positions with several planes per token (M-RoPE): `[K, B, S]`, one plane each for time, height and width."""

from __future__ import annotations

import itertools
import random
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from concat_decode import CAPACITY, Decode, Feeds, normalized, rewritten, run
from concat_graphs import TYPES, Build, Decoder, make_decoder
from graphs import Dim
from onnx import TensorProto

from trt_kvcache import DecodeSession, GenerationConfig, PlanOptions, plan_model, verify_model
from trt_kvcache.errors import OptionError, UnsupportedModelError
from trt_kvcache.importer.interface.mrope import place_positions
from trt_kvcache.importer.plan import Role
from trt_kvcache.verify import verify_import

PLANES = 3


def _signal(g: Build, positions: str, width: int) -> str:
    column = g.node("Unsqueeze", [g.node("Cast", [positions], to=TensorProto.FLOAT), g.constant([-1])])
    angles = g.node("Mul", [column, g.constant(np.linspace(0.05, 1.5, width), np.float32)])
    return g.node("Cast", [g.node("Sin", [angles])], to=TYPES[g.decoder.dtype])


def planar(shape: list[Dim], axis: int = 0, name: str = "position_ids") -> Any:
    """Each plane has its own share of the hidden state."""

    def after(g: Build, x: str) -> str:
        positions = g.input(name, TensorProto.INT64, shape)
        planes = [g.node("Gather", [positions, g.constant(k)], axis=axis) for k in range(PLANES)]
        widths = [6, 5, 5]
        signals = [_signal(g, p, w) for p, w in zip(planes, widths, strict=True)]
        return g.node("Add", [x, g.node("Concat", signals, axis=-1)])

    return after


def decoder(after: Any, batch: Dim = "batch", sequence: Dim = "sequence") -> onnx.ModelProto:
    return make_decoder(Decoder(positions="none", after=after, batch=batch, sequence=sequence))


class PlanarDecode(Decode):
    """A decode with image tokens: every plane has values of its own."""

    axis = 0

    def _feeds(self, model: onnx.ModelProto, new: Any, rows: slice, past: int | None, caches: Feeds) -> Feeds:
        feeds = super()._feeds(model, new, rows, past, caches)
        text = feeds["position_ids"]
        feeds["position_ids"] = np.stack([text, text // 2 + 1, text * 3 % 7], self.axis)
        return feeds


class RowsFirst(PlanarDecode):
    axis = 1


def axes_of(model: Any) -> tuple[str, ...]:
    (found,) = [t for t in model.plan.tensors if t.role is Role.POSITIONS]
    return tuple(found.axes)


@pytest.mark.parametrize("planes", [PLANES, "planes"])
def test_each_plane_reaches_the_model(tmp_path: Path, planes: Dim) -> None:
    model = decoder(planar([planes, "batch", "sequence"]))
    result = rewritten(model, tmp_path)
    assert axes_of(result)[1:] == ("batch", "sequence")
    assert "tokens of images" in result.plan.notes[0]
    PlanarDecode(model, result.model).check()


def test_planes_behind_the_rows(tmp_path: Path) -> None:
    model = decoder(planar(["batch", PLANES, "sequence"], axis=1))
    result = rewritten(model, tmp_path)
    assert axes_of(result) == ("batch", "", "sequence")
    assert "tokens of images" in result.plan.notes[0]
    RowsFirst(model, result.model).check()


@pytest.mark.parametrize("batch", [1, 2])
def test_a_fixed_batch(tmp_path: Path, batch: int) -> None:
    model = decoder(planar([PLANES, batch, "sequence"]), batch=batch)
    result = rewritten(model, tmp_path)
    PlanarDecode(model, result.model).check()
    assert verify_import(result).passed


def test_as_many_planes_as_rows_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match=r"'position_ids' \[3, 3, .*which of its axes"):
        rewritten(decoder(planar([PLANES, 3, "sequence"]), batch=3), tmp_path)


def test_verification_gives_each_plane_values_of_its_own(tmp_path: Path) -> None:
    onnx.save(decoder(planar([PLANES, "batch", "sequence"])), tmp_path / "model.onnx")
    assert verify_model(tmp_path / "model.onnx", PlanOptions(capacity=CAPACITY)).passed
    rows = np.array([[4, 5], [9, 10]])
    found = place_positions(rows, (PLANES, 2, 2), ("", "batch", "sequence"))
    np.testing.assert_array_equal(found, [rows, rows // 2, rows // 3])
    np.testing.assert_array_equal(place_positions(rows, (2, 1, 2), ("", "batch", "sequence")), [[[4, 5]], [[2, 2]]])
    found = place_positions(rows, (2, PLANES, 2), ("batch", "", "sequence"))
    np.testing.assert_array_equal(found.swapaxes(0, 1), [rows, rows // 2, rows // 3])


def test_a_session_gives_all_planes_the_position_in_the_text(tmp_path: Path) -> None:
    """Ragged prompts in chunks: the tokens that a full recomputation chooses."""
    model = decoder(planar([PLANES, "batch", "sequence"]))
    onnx.save(model, tmp_path / "model.onnx")
    prompts = [[3, 1, 4, 1, 5, 9, 2], [6], [5, 3, 5]]
    with DecodeSession.open(str(tmp_path / "model.onnx"), capacity=CAPACITY, max_chunk=3) as session:
        results = session.generate(prompts, GenerationConfig(max_new_tokens=9))
    nothing = np.zeros((1, 2, 0, 4), np.float32)
    for prompt, result in zip(prompts, results, strict=True):
        text = np.array([[*prompt, *result.tokens][:-1]])
        feeds: Feeds = {v.name: nothing for v in model.graph.input}
        feeds |= {"input_ids": text, "position_ids": np.broadcast_to(np.arange(text.size), (PLANES, *text.shape))}
        logits = run(model, feeds)["logits"][0, len(prompt) - 1 :]
        assert result.tokens == logits.argmax(-1).tolist()


def _looked_up(g: Build, x: str) -> str:
    positions = g.input("position_ids", TensorProto.INT64, [PLANES, "batch", "sequence"])
    for k in range(PLANES):
        rows = g.node("Gather", [g.weight(20 - k, 16), g.node("Gather", [positions, g.constant(k)], axis=0)], axis=0)
        x = g.node("Add", [x, rows])
    return x


def test_a_table_that_a_plane_looks_up_bounds_the_text(tmp_path: Path) -> None:
    result = rewritten(decoder(_looked_up), tmp_path)
    assert "no text may be longer than 18" in result.plan.warnings[0]
    assert verify_import(result).passed


def test_a_mask_by_another_plane_than_the_first_is_refused(tmp_path: Path) -> None:
    """For text all planes are equal; for images such a mask is not causal."""

    def mask(g: Build) -> str:
        positions = g.input("position_ids", TensorProto.INT64, [PLANES, "batch", "sequence"])
        queries = g.node("Unsqueeze", [g.node("Gather", [positions, g.constant(2)], axis=0), g.constant([1, 3])])
        return g.node("LessOrEqual", [g.key_rows, queries])

    with pytest.raises(UnsupportedModelError, match="mask"):
        rewritten(make_decoder(Decoder(positions="none", mask=mask)), tmp_path)


def _summed(shape: list[Dim]) -> Any:
    def after(g: Build, x: str) -> str:
        positions = g.input("position_ids", TensorProto.INT64, shape)
        total = g.node("Cast", [g.node("ReduceSum", [positions], keepdims=0)], to=TensorProto.FLOAT)
        return g.node("Add", [x, g.node("Mul", [total, g.number(0.0)])])

    return after


SIZES: tuple[Dim, ...] = (1, 2, 3, "batch", "sequence", "other")
SHAPES: list[list[Dim]] = [list(s) for rank in range(5) for s in itertools.product(SIZES, repeat=rank)]
PLANAR: list[list[Dim]] = [[3, "batch", "sequence"], ["batch", 3, "sequence"], [3, 1, "sequence"], [3, 2, "sequence"]]


@pytest.mark.few(1)
@pytest.mark.parametrize("sequence", ["sequence", 1])
@pytest.mark.parametrize("batch", ["batch", 2, 3])
def test_positions_of_any_shape_are_taken_or_refused_by_name(tmp_path: Path, batch: Dim, sequence: Dim) -> None:
    draw = random.Random(f"{batch}{sequence}")
    for shape in [*PLANAR, *draw.sample(SHAPES[:43], 8), *draw.sample(SHAPES[43:], 4)]:
        try:
            result = rewritten(decoder(_summed(shape), batch, sequence), tmp_path)
            assert verify_import(result).passed, shape
        except (UnsupportedModelError, OptionError) as error:
            assert "position" in str(error), shape  # noqa: PT017


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("shape", "batch", "axes"),
    [
        ([PLANES, "batch", "sequence"], "batch", ("", "batch", "sequence")),
        (["batch", PLANES, "sequence"], "batch", ("batch", "", "sequence")),
        ([PLANES, 2, "sequence"], 2, ("", "batch", "sequence")),
        ([2, PLANES, "sequence"], 2, ("batch", "", "sequence")),
        ([PLANES, 1, "sequence"], 1, ("", "", "sequence")),
    ],
)
def test_planes_of_a_model_with_caches_in_place(tmp_path: Path, shape: list[Dim], batch: Dim, axes: Any) -> None:
    """As exported with TensorScatter: nothing is left to normalize, and the roles of the inputs say it all."""
    model = decoder(planar(shape, axis=0 if shape[0] == PLANES else 1), batch=batch)
    onnx.save(normalized(model), tmp_path / "static.onnx")
    plan = plan_model(tmp_path / "static.onnx")
    assert not plan.changes
    assert [t.axes for t in plan.tensors if t.role is Role.POSITIONS] == [axes]
    assert verify_model(tmp_path / "static.onnx").passed
    prompts, config = [[3, 1, 4, 1, 5], [6, 2]][: 2 if batch != 1 else 1], GenerationConfig(max_new_tokens=6)
    found = []
    onnx.save(model, tmp_path / "model.onnx")
    for name, capacity in (("static", None), ("model", CAPACITY)):
        with DecodeSession.open(str(tmp_path / f"{name}.onnx"), capacity=capacity) as session:
            found.append([r.tokens for r in session.generate(prompts, config)])
    assert found[0] == found[1]

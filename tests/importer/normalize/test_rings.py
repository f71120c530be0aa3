"""Circular caches by their writes, ``cache[:, :, pos % L] = new``: what queries see behind the end of the rows."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from cache_updates import CAPACITY, HEADS, SIZE, column, transpose
from graphs import Graph
from onnx import TensorProto

from trt_kvcache import PlanOptions, UnsupportedModelError, build_engine, plan_model, verify_model
from trt_kvcache.importer import import_model

WIDTH = HEADS * SIZE
Mask = Callable[[Graph, str, str], str]


def rows_up_to_own(g: Graph, rows: str, own: str) -> str:
    """torch's ``arange(L) <= pos[:, None]``: behind the end all rows, those of later tokens too."""
    return g.node("LessOrEqual", [rows, own])


def newest_of_row(g: Graph, rows: str, own: str) -> str:
    """How many tokens before a query the row was written, if no later token of the step has been there."""
    return g.node("Mod", [g.node("Sub", [own, rows]), g.constant(CAPACITY)])


def rows_by_age(g: Graph, rows: str, own: str) -> str:
    """A window by what rows hold: right in every step of one token."""
    age = newest_of_row(g, rows, own)
    near = g.node("Less", [age, g.constant(5)])
    return g.node("And", [near, g.node("LessOrEqual", [age, own])])


def rows_by_number(g: Graph, rows: str, own: str) -> str:
    """A window by the numbers of rows, which sees none behind the end."""
    near = g.node("Greater", [rows, g.node("Sub", [own, g.constant(5)])])
    return g.node("And", [rows_up_to_own(g, rows, own), near])


def no_later_token(g: Graph, rows: str, own: str) -> str:
    """Behind the end all rows but those of later tokens of the step."""
    later = g.node("Greater", [rows, g.node("Mod", [own, g.constant(CAPACITY)])])
    last = g.node("ReduceMax", [own], keepdims=1)
    newer = g.node("LessOrEqual", [rows, g.node("Mod", [last, g.constant(CAPACITY)])])
    hidden = g.node("And", [later, newer])
    return g.node("And", [rows_up_to_own(g, rows, own), g.node("Not", [hidden])])


def ring(folder: Path, mask: Mask, length: int | str = "S", *, guard: bool = False) -> Path:
    """One attention block over a circular cache; `guard`: zeros for queries that see no key, as torch writes it."""
    g, rng = Graph(), np.random.default_rng(3)
    hidden = g.input("hidden", TensorProto.FLOAT, ["B", length, WIDTH])
    pos = g.input("pos", TensorProto.INT64, [length])
    target = column(g, g.node("Mod", [pos, g.constant(CAPACITY)]))
    heads: dict[str, str] = {}
    for kind in ("query", "key", "value"):
        weight = g.constant(rng.standard_normal((WIDTH, WIDTH)) / 2, np.float32)
        projected = g.node("MatMul", [hidden, weight])
        heads[kind] = g.node("Reshape", [projected, g.constant([0, 0, HEADS, SIZE])])
    for kind in ("key", "value"):
        past = g.input(f"past_{kind}", TensorProto.FLOAT, ["B", HEADS, CAPACITY, SIZE])
        written = g.node("ScatterND", [transpose(g, past, 2, 0, 1, 3), target, transpose(g, heads[kind], 1, 0, 2, 3)])
        heads[kind] = transpose(g, written, 1, 2, 0, 3)
    scores = g.node("MatMul", [transpose(g, heads["query"], 0, 2, 1, 3), transpose(g, heads["key"], 0, 1, 3, 2)])
    visible = mask(g, g.constant(np.arange(CAPACITY)), g.node("Unsqueeze", [pos, g.constant([1])]))
    scores = g.node("Where", [visible, scores, g.constant(-1e9, np.float32)])
    mixed = g.node("MatMul", [g.node("Softmax", [scores], axis=-1), heads["value"]])
    if guard:
        seen = g.node("ReduceSum", [g.node("Cast", [visible], to=TensorProto.FLOAT), g.constant([-1])], keepdims=1)
        blind = g.node("Less", [seen, g.constant(1, np.float32)])
        mixed = g.node("Where", [blind, g.constant(0, np.float32), mixed])
    flat = g.node("Reshape", [transpose(g, mixed, 0, 2, 1, 3), g.constant([0, 0, WIDTH])])
    g.node("Identity", [flat], "out")
    g.output("out", TensorProto.FLOAT, ["B", length, WIDTH])
    for kind in ("key", "value"):
        g.node("Identity", [heads[kind]], f"present_{kind}")
        g.output(f"present_{kind}", TensorProto.FLOAT, ["B", HEADS, CAPACITY, SIZE])
    path = folder / "model.onnx"
    onnx.save(g.model(18), path)
    return path


def check_steps(path: Path, steps: list[tuple[int, int]]) -> None:
    """The numbers of the original, where the cache is full of other rows."""
    rng = np.random.default_rng(5)
    result = import_model(path, PlanOptions()).model
    original, ours = ort.InferenceSession(path), ort.InferenceSession(result.SerializeToString())
    for past, length in steps:
        feeds = {"hidden": rng.standard_normal((2, length, WIDTH)).astype(np.float32)}
        for kind in ("key", "value"):
            feeds[f"past_{kind}"] = rng.standard_normal((2, HEADS, CAPACITY, SIZE)).astype(np.float32)
        expected = original.run(None, feeds | {"pos": np.arange(past, past + length)})
        rows = min(past + length, CAPACITY)  # as sessions count them
        own = {
            "write_indices": np.full(2, past),
            "nonpad_kv_seqlen": np.full(2, rows),
            "attention_span": np.arange(rows),
        }
        found = ours.run(None, feeds | {i.name: own[i.name] for i in ours.get_inputs() if i.name in own})
        for before, after in zip(expected, found, strict=True):
            np.testing.assert_allclose(after, before, rtol=1e-4, atol=1e-5)


STEPS = [(0, 5), (CAPACITY - 3, 3), (CAPACITY, 1), (CAPACITY, 4), (CAPACITY + 3, 3), (5 * CAPACITY + 2, 6)]


@pytest.mark.parametrize("guard", [False, True])
def test_several_tokens_behind_the_end_see_every_row(tmp_path: Path, guard: bool) -> None:
    """They were masked as if the rows were still in order, and saw none of the last S - 1."""
    path = ring(tmp_path, rows_up_to_own, guard=guard)
    assert "ReduceSum" not in {node.op_type for node in import_model(path, PlanOptions()).model.graph.node}
    assert {c.mode for c in plan_model(path).caches} == {"circular"}
    check_steps(path, STEPS)
    verify_model(path).check()
    assert len(build_engine(path, tmp_path / "model.engine").aliases) == 2


def test_one_token_at_a_time_needs_no_mask_of_its_own(tmp_path: Path) -> None:
    path = ring(tmp_path, rows_up_to_own, length=1)
    check_steps(path, [(past, 1) for past, _ in STEPS])
    verify_model(path).check()
    assert {m.causal for m in plan_model(path).masks} == {True}


@pytest.mark.parametrize("length", ["S", 1])
@pytest.mark.parametrize("mask", [rows_by_age, rows_by_number, no_later_token])
def test_other_masks_are_refused(tmp_path: Path, mask: Mask, length: int | str) -> None:
    path = ring(tmp_path, mask, length)
    if (mask, length) == (no_later_token, 1):  # of one token there is none later
        check_steps(path, [(past, 1) for past, _ in STEPS])
        return
    with pytest.raises(UnsupportedModelError, match=r"past_key.*circular.*16 rows.*sees .* of 16 keys.*caller's own"):
        plan_model(path)

"""Rows of a proof: one of an episode may come where rounding is amplified, and engines of one sequence take turns."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from decoders import DecoderConfig, write_decoder
from proof_engines import recorded

from trt_kvcache.importer import import_model
from trt_kvcache.importer.plan import PlanOptions
from trt_kvcache.proof.file import Proof, Share
from trt_kvcache.proof.record import record_proof
from trt_kvcache.proof.replay import Replay, replay
from trt_kvcache.proof.schedule import Most
from trt_kvcache.proof.tolerance import _usual, spread
from trt_kvcache.runtime.ort.runner import OnnxRuntimeRunner
from trt_kvcache.runtime.runner import StepBatch


class Moved:
    """A runner that moves the logits of some rows in the last step of episodes, by so many times what is allowed."""

    def __init__(self, runner: OnnxRuntimeRunner, proof: Proof, where: set[tuple[str, int]], times: float) -> None:
        self._runner, self._where, self._facts, self._times = runner, where, proof.facts, times
        self._steps = [
            e.name if n == len(e.lengths) - 1 else "" for e in proof.facts.episodes for n in range(len(e.lengths))
        ]
        self._count = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def step(self, batch: StepBatch) -> Any:
        logits = np.array(self._runner.step(batch))
        turn, number = divmod(self._count, len(self._steps))
        self._count += 1
        for row in range(batch.rows):
            if (self._steps[number], turn + row) in self._where:
                allowed = self._facts.tolerances[self._steps[number]]["logits"]
                logits[row] *= 1 + self._times * min(allowed.largest, allowed.typical)
        return logits


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_decoder(tmp_path / "model.onnx", DecoderConfig(capacity=64))


def _replayed(model: Path, proof: Proof, where: set[tuple[str, int]], times: float, batch: int) -> Replay:
    runner = OnnxRuntimeRunner(model, max_batch=batch, max_chunk=8)
    try:
        return replay(Moved(runner, proof, where, times), proof)
    finally:
        runner.close()


def _uneven(proof: Proof) -> Proof:
    """The same, as if rounding made little in one episode: a proof of a model that amplifies it in others."""
    rounding = proof.facts.rounding | {"full": {"logits": Share(1e-9, 1e-9)}}
    return replace(proof, facts=replace(proof.facts, rounding=rounding))


@pytest.mark.parametrize(
    ("rows", "times", "passed"), [([0], 3.0, True), ([0, 1], 3.0, False), ([2], 5.0, False), ([0, 1, 2], 0.5, True)]
)
def test_one_row_may_differ_by_more_where_rounding_is_uneven(
    model: Path, rows: list[int], times: float, passed: bool
) -> None:
    where = {("decode", row) for row in rows}
    found = _replayed(model, _uneven(recorded(model)), where, times, 4)
    assert found.passed is passed
    assert (max(d.part for d in found.outputs) <= 1) is passed
    assert [(f.output, f.episode) for f in found.findings] == [("logits", "decode")] * (not passed)
    assert _replayed(model, recorded(model), where, times, 4).passed is (times < 1)


@pytest.mark.parametrize("row", [0, 1])
def test_an_engine_of_one_sequence_replays_each_row(model: Path, row: int) -> None:
    proof = recorded(model, batch=1)
    assert proof.facts.rows == 2
    found = _replayed(model, proof, set(), 0, 1)
    assert found.passed
    assert found.steps == 2 * proof.facts.steps
    wrong = _replayed(model, proof, {("decode", row)}, 5.0, 1)
    assert [(f.output, f.episode, f.row) for f in wrong.findings] == [("logits", "decode", row)]


def test_a_proof_of_one_row_allows_for_one_episode(model: Path) -> None:
    proof = _uneven(record_proof(import_model(model, PlanOptions()), Most(1, 8, 4), rows=1))
    assert proof.facts.rows == 1
    assert _replayed(model, proof, {("decode", 0)}, 3.0, 1).passed
    assert not _replayed(model, proof, {("decode", 0), ("start", 0)}, 3.0, 1).passed


def test_rounding_of_an_episode_is_half_of_that_of_the_others_at_least() -> None:
    one, seven, large, none = (Share(float(n), float(n)) for n in (1, 7, 100, 0))
    found = {"start": {"logits": one}, "decode": {"logits": seven}, "drawn": {"logits": large, "state": large}}
    assert _usual(found) == {"logits": Share(2.5, 2.5), "state": none}
    assert spread(found) == 4
    assert spread(found | {"start": {"logits": Share(5.0, 5.0)}}) == pytest.approx(1.4)

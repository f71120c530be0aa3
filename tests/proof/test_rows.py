"""Rows of a proof: one of a part may come where rounding is amplified, and engines of one text take turns."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from decoders import DecoderConfig, write_decoder
from proof_engines import recorded

from trt_kvcache.compare.decode import DRAWN
from trt_kvcache.compare.differences import Share
from trt_kvcache.compare.proof import Proof
from trt_kvcache.compare.rounding import _usual, uneven
from trt_kvcache.runtime.ort.ort_runner import OnnxRuntimeRunner
from trt_kvcache.runtime.replay import Replay, replay
from trt_kvcache.runtime.runner import StepBatch

PART = "decode 40"


class Moved:
    """A runner that moves the logits of some rows in the last step of parts, by so many times what is allowed."""

    def __init__(self, runner: OnnxRuntimeRunner, proof: Proof, where: set[tuple[str, int]], times: float) -> None:
        self._runner, self._where, self._facts, self._times = runner, where, proof.facts, times
        self._together = min(runner.max_batch, proof.facts.rows)
        # One row after the other: the steps that it takes part in.
        turns = range(0, proof.facts.rows, self._together)
        self._steps = [(turn, n) for turn in turns for n, piece in enumerate(proof.facts.pieces) if turn in piece.rows]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def step(self, batch: StepBatch) -> Any:
        logits = np.array(self._runner.step(batch))
        turn, number = self._steps.pop(0)
        part = self._facts.pieces[number].part if number in self._facts.lasts else ""
        for row in range(batch.rows):
            if (part, turn + row) in self._where:
                allowed = self._facts.allowed[part]["logits"]
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
    """The same, as if rounding made little in one part: a proof of a model that amplifies it in others."""
    return replace(proof, facts=replace(proof.facts, uneven=4.0))


@pytest.mark.parametrize(
    ("rows", "times", "passed"), [([0], 3.0, True), ([0, 1], 3.0, False), ([2], 5.0, False), ([0, 1, 2], 0.5, True)]
)
def test_one_row_may_differ_by_more_where_rounding_is_uneven(
    model: Path, rows: list[int], times: float, passed: bool
) -> None:
    where = {(PART, row) for row in rows}
    found = _replayed(model, _uneven(recorded(model)), where, times, 4)
    assert found.passed is passed
    assert (max(d.part for d in found.outputs) <= 1) is passed
    assert [(f.output, f.part) for f in found.findings] == [("logits", PART)] * (not passed)
    assert _replayed(model, recorded(model), where, times, 4).passed is (times < 1)


@pytest.mark.parametrize("row", [0, 1])
def test_an_engine_of_one_text_replays_each_row(model: Path, row: int) -> None:
    proof = recorded(model, batch=1)
    assert proof.facts.rows == 2
    found = _replayed(model, proof, set(), 0, 1)
    assert found.passed
    assert found.steps == sum(len(p.rows) for p in proof.facts.pieces)
    wrong = _replayed(model, proof, {(PART, row)}, 5.0, 1)
    assert [(f.output, f.part, f.row) for f in wrong.findings] == [("logits", PART, row)]


def test_rounding_of_a_part_is_half_of_that_of_the_others_at_least() -> None:
    one, seven, large, none = (Share(float(n), float(n)) for n in (1, 7, 100, 0))
    found = {"start": {"logits": one}, PART: {"logits": seven}, DRAWN: {"logits": large, "state": large}}
    assert _usual(found, "logits") == Share(2.5, 2.5)
    assert _usual(found, "state") == none
    assert uneven(found) == 4
    assert uneven(found | {"start": {"logits": Share(5.0, 5.0)}}) == pytest.approx(1.4)

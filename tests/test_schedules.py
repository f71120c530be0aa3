"""A share of the random schedules, and what they find: faults, and near ties for what they are."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from schedules import ARCHITECTURES, Choice, Line, Part, Report, Schedule, run_schedules

from trt_kvcache import GenerationConfig
from trt_kvcache.runtime import prefix
from trt_kvcache.runtime.continuation import Continuation
from trt_kvcache.runtime.generation.sampling import Sampler
from trt_kvcache.runtime.offload import HostRows
from trt_kvcache.runtime.ort.runner import OnnxRuntimeRunner


@pytest.mark.few(2)
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_sequence_gets_the_tokens_that_it_gets_alone(name: str, tmp_path: Path) -> None:
    report = run_schedules(range(8), [name], tmp_path)
    assert report.failures == []
    assert report.counts["tokens"] > 80


@pytest.mark.slow
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_many_schedules(name: str, tmp_path: Path) -> None:
    report = run_schedules(range(1000, 1040), [name], tmp_path)
    assert report.failures == []
    acts = {"turns", "forks", "saves", "loads", "moves", "exchanges", "preemptions", "leaves", "offloads", "restores"}
    assert report.counts.keys() >= acts | (set() if ARCHITECTURES[name].state else {"crops"})
    if not (ARCHITECTURES[name].state or name.startswith(("circular", "cross"))):
        assert report.counts["tokens from prefixes"] > 0
        assert report.counts["guesses accepted"] > 0 or ARCHITECTURES[name].max_chunk == 1


@pytest.mark.few(1)
@pytest.mark.parametrize("fault", ["offloaded rows", "prefix", "guesses"])
def test_faults_in_what_sequences_share_are_found(fault: str, tmp_path: Path) -> None:
    """Rows that come back empty, blocks that are found without those before them, and guesses that stay unchecked."""

    def names(tokens: list[int], blocks: int) -> list[bytes]:
        return [bytes(tokens[at * 4 : at * 4 + 4]) for at in range(blocks)]

    def believe(self: Any, draft: Any, logits: Any) -> Any:
        for position in range(len(draft) + 1):
            yield self.advance(logits[position])
            if self.finish_reason:
                break

    planted = {
        "offloaded rows": patch.object(HostRows, "fill", lambda self, row: None),
        "prefix": patch.object(prefix, "_names", names),
        "guesses": patch.object(Continuation, "verify", believe),
    }[fault]
    with planted:
        assert run_schedules(range(12), ["mobius"], tmp_path).failures


def test_numbers_drawn_for_another_position_are_found(tmp_path: Path) -> None:
    """Counted from where the call began, as a stream is."""

    def counted(self: Any, position: int) -> float:
        self._counter += 1
        return float(np.random.default_rng(self._counter).random())

    with patch.object(Sampler, "_number", counted):
        report = run_schedules(range(12), ["mobius"], tmp_path)
    assert any("token" in line and "position" in line for line in report.failures)


@pytest.mark.slow
def test_a_copy_that_lacks_its_last_row_is_found(tmp_path: Path) -> None:
    real = OnnxRuntimeRunner.copy_rows

    def short(self: Any, source: int, target: int, tokens: int) -> None:
        real(self, source, target, max(0, tokens - 1))

    with patch.object(OnnxRuntimeRunner, "copy_rows", short):
        report = run_schedules(range(12), ["mobius"], tmp_path)
    assert any("logits differ by" in line for line in report.failures)


def compared(here: Choice, there: Choice, config: GenerationConfig) -> Report:
    """One token of a schedule against the same alone."""
    report, alone = Report(), Part([1, 2], config, 0, [there], [there.token])
    bench = SimpleNamespace(name="a model", by_itself=lambda *_: alone)
    schedule = Schedule(bench, 7, report)  # type: ignore[arg-type]
    schedule._compare(Line("sequence 1", 0, [1, 2], Part([1, 2], config, 0, [here], [here.token])))
    return report


def logits(*values: float) -> Any:
    return np.array(values, np.float32)


def test_a_near_tie_is_one_only_if_each_side_follows_from_its_own_logits() -> None:
    greedy, drawn = GenerationConfig(), GenerationConfig(do_sample=True, seed=3, top_k=0)
    left, right = Choice(5, 2, logits(1, 1.000001, 0), 1), Choice(0, 2, logits(1.000001, 1, 0), 0)
    report = compared(left, right, greedy)
    assert report.failures == []
    assert report.ties == [
        "seed 7, a model, sequence 1, step 5, position 2: token 1, alone 0; logits differ by 9.5e-07 of the largest, "
        "the two tokens' by 9.5e-07"
    ]
    far = Choice(5, 2, logits(1, 1.01, 0), 1)
    assert "logits differ by 1.0e-02 of the largest" in compared(far, right, greedy).failures[0]
    assert compared(left, right, drawn).failures  # neither is what the position draws
    same = Choice(5, 3, right.logits, 0)
    assert "alone it is position 2" in compared(same, right, greedy).failures[0]
    assert compared(right, right, greedy).failures == []

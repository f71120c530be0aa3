"""The idiom benchmark runs, checks that both sides agree and ends with a line of JSON. No time is asserted."""

from __future__ import annotations

import json

import bench_idioms
import pytest


def test_prints_a_table_and_json(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = {
        "--capacity": 48,
        "--layers": 2,
        "--hidden": 64,
        "--query-heads": 4,
        "--vocab": 64,
        "--turns": 1,
        "--steps": 2,
        "--threads": 1,
    }
    words = [str(word) for pair in sizes.items() for word in pair]
    monkeypatch.setattr("sys.argv", ["bench_idioms.py", *words, "--position", "5", "--position", "1000"])
    bench_idioms.main()
    *table, line = capsys.readouterr().out.splitlines()
    result = json.loads(line)
    assert (result["benchmark"], result["capacity"]) == ("idioms", 48)
    assert result["positions"] == [5, 44]  # as many as leave room for the steps
    assert list(result["cases"]) == [label for label, _, _ in bench_idioms.CASES]
    for label, case in result["cases"].items():
        assert case["logits_difference"] < 1e-5, label
        assert case["ratio"] == [b / a for a, b in zip(case["original_ms"], case["rewritten_ms"], strict=True)]
        assert any(row.startswith(label) for row in table)


def test_a_difference_is_seen() -> None:
    class Constant:
        def __init__(self, value: float) -> None:
            self.value = value

        def start(self, position: int) -> None:
            pass

        def step(self, token: int) -> bench_idioms.np.ndarray:
            return bench_idioms.np.full((1, 1, 4), self.value)

    assert bench_idioms.difference((Constant(2.0), Constant(2.0)), 3, [1, 2]) == 0
    assert bench_idioms.difference((Constant(2.0), Constant(1.0)), 3, [1, 2]) == 0.5

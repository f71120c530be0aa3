"""The span benchmark runs, checks its own numbers and ends with a line of JSON."""

from __future__ import annotations

import json

import bench_span
import pytest


@pytest.mark.slow
def test_prints_a_table_and_json(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.argv", ["bench_span.py", "--small", "256", "--large", "512", "--repeats", "3"])
    bench_span.main()
    *table, line = capsys.readouterr().out.splitlines()
    result = json.loads(line)
    assert result["capacities"] == [256, 512]
    assert result["logits_difference"] < 1e-4
    assert result["ratio_with_span"] == pytest.approx(result["ms_with_span"][1] / result["ms_with_span"][0])
    assert any(row.startswith("without span") for row in table)

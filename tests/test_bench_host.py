"""The benchmark of the host's share of a step runs, every way and type, and ends with a line of JSON."""

from __future__ import annotations

import json

import bench_host
import pytest


def test_prints_a_table_and_json(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.argv", ["bench_host.py", "--vocab", "5000", "--batch", "1", "2", "--steps", "2"])
    bench_host.main()
    *table, line = capsys.readouterr().out.splitlines()
    result = json.loads(line)
    assert (result["benchmark"], result["vocab"]) == ("host", 5000)
    kinds = len(bench_host.WAYS) * len(bench_host.DTYPES)
    assert len(table) == 2 + kinds
    assert len(result["steps"]) == 2 * kinds
    assert all(row["us"] > 0 for row in result["steps"])

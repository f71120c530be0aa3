"""The benchmark of latent attention runs, checks that both forms agree and ends with a line of JSON."""

from __future__ import annotations

import json

import bench_latents
import pytest


def test_prints_a_table_and_json(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = {"--capacity": 512, "--layers": 1, "--hidden": 32, "--heads": 4, "--head-size": 8, "--turns": 1}
    monkeypatch.setattr("sys.argv", ["bench_latents.py", *(str(w) for pair in sizes.items() for w in pair)])
    bench_latents.main()
    *table, line = capsys.readouterr().out.splitlines()
    result = json.loads(line)
    assert (result["benchmark"], result["capacity"]) == ("latents", 512)
    assert [(step["tokens"], step["rows"]) for step in result["steps"]] == [(1, 512), (64, 512)]
    assert all(step["difference"] < 1e-4 for step in result["steps"])
    assert len(table) == 5

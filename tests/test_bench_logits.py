"""The benchmark of logits runs, checks that both sides agree and ends with a line of JSON."""

from __future__ import annotations

import json

import bench_logits
import pytest


@pytest.mark.slow
def test_prints_a_table_and_json(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = {"--tokens": 16, "--turns": 1, "--layers": 1, "--hidden": 256, "--vocab": 1000}
    monkeypatch.setattr("sys.argv", ["bench_logits.py", *(str(w) for pair in sizes.items() for w in pair)])
    bench_logits.main()
    *table, line = capsys.readouterr().out.splitlines()
    result = json.loads(line)
    assert (result["benchmark"], result["vocab"]) == ("logits", 1000)
    assert result["seconds"].keys() == result["peak_bytes"].keys() == {"last", "all"}
    assert result["difference"] < 1e-4
    assert 0 < result["head_share"] < 1
    assert [row.split(" ")[0] for row in table[3:5]] == ["last", "all"]

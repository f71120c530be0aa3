"""The decode benchmark runs, and stops where its ways disagree."""

from __future__ import annotations

import json
import sys

import bench_decode
import pytest

SMALL = ["--capacity", "96", "--prompt", "20", "--tokens", "40", "--layers", "1", "--hidden", "192", "--vocab", "64"]


def test_it_measures_every_way_that_is_installed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["bench_decode.py", *SMALL, "--threads", "1"])
    bench_decode.main()
    printed = capsys.readouterr()
    (result,) = json.loads(printed.out.strip().splitlines()[-1])["results"]
    ways = set(result["tokens_per_second"])
    assert {"session", "rewritten", "original"} <= ways
    assert "transformers" in ways or "transformers is left out" in printed.err


def test_other_tokens_are_no_benchmark() -> None:
    ways = {"session": iter([1, 2, 3]), "rewritten": iter([1, 2, 4])}
    with pytest.raises(SystemExit, match="rewritten gives other tokens than the session"):
        bench_decode.measure(ways, 3)

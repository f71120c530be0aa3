"""The build benchmark measures both sides and ends with one line of JSON."""

from __future__ import annotations

import json
from pathlib import Path

import bench_build
import pytest


@pytest.mark.slow
def test_it_prints_a_table_and_a_json_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bench_build.main(["--small", "--runs", "1", "--keep", str(tmp_path)])
    *table, last = capsys.readouterr().out.splitlines()
    assert any(line.startswith("ratio") for line in table)
    data = json.loads(last)
    assert data["benchmark"] == "build"
    assert data["model_bytes"] > 1e7
    for side in ("ours", "bare"):
        (seconds,), (peak,) = data[f"{side}_seconds"], data[f"{side}_peak_bytes"]
        assert 0.1 < seconds < 300
        assert peak > data["model_bytes"]
    assert data["time_ratio"] == pytest.approx(data["ours_seconds"][0] / data["bare_seconds"][0], rel=0.01)
    assert {p.name for p in tmp_path.iterdir()} == {"decoder.onnx", "decoder.onnx.data"}


def test_a_side_that_fails_is_told(tmp_path: Path) -> None:
    (tmp_path / "m.onnx").write_bytes(b"not a model")
    with pytest.raises(SystemExit, match=r"--bare .* failed:\n(?s:.*)refuses"):
        bench_build.main(["--model", str(tmp_path / "m.onnx"), "--runs", "1"])

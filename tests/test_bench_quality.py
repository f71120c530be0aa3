"""The benchmark of quality: its scores against known distributions, a small checkpoint from end to end, refusals."""

import json
from pathlib import Path

import bench
import numpy as np
import pytest
from benchmarks.quality import Scores
from small_checkpoint import write_checkpoint

TEXT = Path(__file__).parents[1] / "LICENSE"


def test_scores_of_known_distributions(tmp_path: Path) -> None:
    """p = (1/2, 1/2) everywhere; then q = (3/4, 1/4) and (1/4, 3/4), in two chunks, with a padded vocabulary."""
    scores = Scores([0, 1, 1], tmp_path)
    even = scores.compare(iter([np.zeros((3, 2), np.float16)]))
    assert even == pytest.approx({"perplexity": 2, "kl": 0, "greedy": 1}, abs=1e-6)
    rows = np.log(np.array([[3.0, 1, 1e-30], [1, 3, 1e-30], [3, 1, 1e-30]]))
    found = scores.compare(iter([rows[:2], rows[2:]]))
    assert found["kl"] == pytest.approx(np.log(4 / 3) / 2)
    assert found["greedy"] == pytest.approx(2 / 3)  # the first of equals
    assert found["perplexity"] == pytest.approx((4 / 1 * 4 / 3) ** 0.5)  # q gives 1/4, then 3/4, to what follows


def run(folder: Path, *more: str) -> None:
    words = ["--tokens", "60", "--calibration", "30", "--steps", "2", "--chunk", "25", "--exporter", "mobius"]
    bench.main(["quality", str(folder), str(TEXT), *words, *more])


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # other people's packages
def test_a_small_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for package in ("torch", "transformers", "mobius"):
        pytest.importorskip(package)
    write_checkpoint(tmp_path / "small")
    run(
        tmp_path / "small", "--exports", str(tmp_path), "--only", "float32,bfloat16,int8 caches, calibrated,int4 caches"
    )
    *table, last = capsys.readouterr().out.splitlines()
    ways = json.loads(last)["ways"]
    assert [*ways] == ["transformers", "float32", "bfloat16", "int8 caches, calibrated", "int4 caches"]
    assert ways["float32"]["kl"] < 1e-6
    assert ways["float32"]["perplexity"] == pytest.approx(ways["transformers"]["perplexity"], rel=1e-4)
    assert ways["float32"]["kl"] < ways["int8 caches, calibrated"]["kl"] < ways["int4 caches"]["kl"]
    assert [way["bytes"] for way in [*ways.values()][1:]] == [512, 512, 128, 128]
    assert len(table) == 7

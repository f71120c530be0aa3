"""A few attempts of each kind of attack; ``scripts/attack`` makes any number of them."""

import sys
from pathlib import Path

import attack
import pytest

pytest.importorskip("tokenizers", reason="the tokenizers library is not installed (extra: text)")
pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="the faults are those of Linux")


@pytest.mark.parametrize("kind", ["manifests", "caches", "configs", "models", "sessions"])
def test_attempts_hold(kind: str, tmp_path: Path) -> None:
    for seed in range({"manifests": 10, "caches": 3, "models": 2, "configs": 2}.get(kind, 1)):
        answer = attack.attempt(kind, seed, tmp_path)
        assert not answer.fell, f"{kind} {seed}: {answer.fell}"
        assert answer.word


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["kills", "full", "replaced"])
def test_faults_hold(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATTACK_SCRATCH", str(tmp_path))
    for seed in range(3):
        answer = attack.attempt(kind, seed, tmp_path)
        assert not answer.fell, f"{kind} {seed}: {answer.fell}"


def test_what_hangs_falls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attack, "SECONDS", 0.01)
    report = attack.attack(5, 0, ["manifests"], limit=1)
    assert report.failed
    assert report.fell["manifests"] == ["manifests 0: the process took more than 0.02 s"]  # twice, to start

"""Each model of the corpus is planned or refused as the record says; `net.py` compares all with one command."""

from __future__ import annotations

from pathlib import Path

import net
import pytest
from corpus import Entry, entries

ENTRIES = entries()
GENERATED = ("mutant/", "node/", "odd/", "case/")
RECORD = net.load()


@pytest.mark.parametrize("entry", [e for e in ENTRIES if not e[0].startswith(GENERATED)], ids=lambda entry: entry[0])
def test_the_plan_is_the_recorded_one(entry: Entry) -> None:
    """If this fails on purpose: ``python tests/net.py --write PATTERN``."""
    assert net.treat(entry, verify=False)[1] == RECORD["plans"][entry[0]]


@pytest.mark.few(60)
@pytest.mark.parametrize("entry", [e for e in ENTRIES if e[0].startswith(GENERATED)], ids=lambda entry: entry[0])
def test_the_plan_of_a_generated_model_is_the_recorded_one(entry: Entry) -> None:
    assert net.treat(entry, verify=False)[1] == RECORD["plans"][entry[0]]


def test_models_are_the_recorded_ones() -> None:
    keys = [entry[0] for entry in ENTRIES]
    assert len(keys) == len(set(keys))
    assert set(keys) == RECORD["plans"].keys()


def of(key: str) -> Entry:
    (found,) = [entry for entry in ENTRIES if entry[0] == key]
    return found


def test_a_difference_is_found(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    key, make, options = of("concat/plain")
    monkeypatch.setattr(net, "entries", lambda *_: [(key, make, options | {"capacity": 25})])
    monkeypatch.setattr("sys.argv", ["net.py", "--only", key])
    assert net.main() == 1
    said = capsys.readouterr().out
    assert "plans concat/plain:" in said
    assert "  -span attention_span attention_span 24\n" in said
    assert "  +span attention_span attention_span 25\n1 models, 1 differ" in said


def test_one_pattern_is_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(net, "RECORD", tmp_path / "net.json")
    before = {"plans": {"concat/plain": ["old"], "concat/gone": ["old"], "other/one": ["old"]}, "verdicts": {}}
    net.dump(before)
    monkeypatch.setattr(net, "entries", lambda *_: [of("concat/plain")])
    monkeypatch.setattr("sys.argv", ["net.py", "--write", "concat/*"])
    assert net.main() == 0
    found = net.load()["plans"]
    assert found.keys() == {"concat/plain", "other/one"}
    assert found["other/one"] == ["old"]
    assert "attention decomposed" in found["concat/plain"][2]

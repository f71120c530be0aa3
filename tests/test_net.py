"""The record of plans and refusals is up to date: a few models of `net.py`, which compares all of them."""

from __future__ import annotations

from pathlib import Path

import net
import pytest
from corpus import Entry, entries

KEYS = (
    "stored/optimum/llama", "stored/plain-torch/where_dynamo_op18", "stored/mobius/llama_static_f32", "concat/plain",
    "cut/{'kept': (0, 7), 'window': (0, 8)}", "canonical, tensorrt/mobius", "foreign/gqa", "mutant/optimum/llama/3",
    "stacked/scatter ('L', 0, 'gather', 'stack', True)",
)  # fmt: skip


def entry(key: str) -> Entry:
    (found,) = [e for e in entries() if e[0] == key]
    return found


@pytest.mark.parametrize("key", KEYS)
def test_the_record_is_up_to_date(key: str) -> None:
    """If this fails on purpose: ``python tests/net.py --write PATTERN``."""
    assert net.treat(entry(key), verify=False)[1] == net.load()["plans"][key]


def test_models_are_the_recorded_ones() -> None:
    assert {e[0] for e in entries()} == net.load()["plans"].keys()


def test_a_difference_is_found(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    key, make, options = entry("concat/plain")
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
    monkeypatch.setattr(net, "entries", lambda *_: [entry_of_plain])
    monkeypatch.setattr("sys.argv", ["net.py", "--write", "concat/*"])
    assert net.main() == 0
    found = net.load()["plans"]
    assert found.keys() == {"concat/plain", "other/one"}
    assert found["other/one"] == ["old"]
    assert "attention decomposed" in found["concat/plain"][2]


entry_of_plain = entry("concat/plain")

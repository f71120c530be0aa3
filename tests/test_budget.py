"""The budget counts statements, and only sinks."""

from pathlib import Path

import budget
import pytest


def test_neither_docstrings_nor_line_breaks_count() -> None:
    text = '"""Words."""\n\n# more\ndef f(\n    a,\n):\n    """Words."""\n    b = a; return b\n'
    assert budget.statements(text) == 3


def test_folders_and_root_files(tmp_path: Path) -> None:
    for name, text in {
        "trt_kvcache/a.py": "x = 1\ny = 2",
        "trt_kvcache/engine/b.py": "x = 1",
        "trt_kvcache/engine/deep/c.py": "x = 1",
        "tests/deep/d.py": "x = 1",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert budget.measure(tmp_path) == {"tests": 1, "trt_kvcache": 2, "trt_kvcache/engine": 2, "sum": 5}


def test_what_is_larger_is_named() -> None:
    assert budget.faults({"a": 3, "b": 1, "sum": 4}, {"a": 3, "b": 2, "sum": 5}) == []
    assert budget.faults({"a": 3, "sum": 3}, {"a": 2, "sum": 3}) == ["a: 3 statements, 1 more than budget.toml allows"]
    assert budget.faults({"new": 1, "sum": 1}, {"a": 2, "sum": 2}) == [
        "new: 1 statements, 1 more than budget.toml allows"
    ]
    (said,) = budget.faults({"a": 1, "sum": 1}, {"a": 3, "sum": 2})
    assert said == "budget.toml: its folders have 3 statements, more than its sum, 2"


def test_it_is_lowered_and_never_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budget, "BUDGET", tmp_path / "budget.toml")
    budget.write({"a": 5, "b": 5, "sum": 10})
    monkeypatch.setattr(budget, "measure", lambda: {"a": 2, "b": 6, "sum": 8})
    monkeypatch.setattr("sys.argv", ["budget.py", "--lower"])
    assert budget.main() == 1
    assert budget.read() == {"a": 2, "b": 5, "sum": 7}

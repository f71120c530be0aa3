"""The README shows what happens: its examples are run, and their output compared but for numbers."""

from __future__ import annotations

import difflib
from pathlib import Path

import pytest
from readme import README, comparable, run_examples


@pytest.mark.slow
def test_the_examples_give_what_is_shown(tmp_path: Path) -> None:
    text = README.read_text(encoding="utf-8")
    current = run_examples(text, tmp_path)
    difference = list(difflib.unified_diff(comparable(text), comparable(current), "README.md", "now", lineterm=""))
    assert not difference, "python scripts/readme.py --update:\n" + "\n".join(difference)
    assert (tmp_path / "model.engine").stat().st_size > 0


def test_output_that_differs_is_noticed() -> None:
    assert comparable("built in 1.4 s, 4.0 MiB\n") == comparable("built in 12 s, 311 MiB\n")
    assert comparable("a  │ native\n───── ──\n") == comparable("a │ native  \n── ─────────\n")
    assert comparable("route native\n") != comparable("route functional\n")


def test_a_command_that_fails_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="exit code 3"):
        run_examples("```console\n$ echo said; exit 3\n```\n", tmp_path)


def test_a_python_example_that_fails_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        run_examples("```python\n1 / 0\n```\n", tmp_path)


def test_output_is_put_under_its_command(tmp_path: Path) -> None:
    text = "before\n```console\n$ echo one\nold\n$ echo two\n```\nafter\n"
    assert run_examples(text, tmp_path) == "before\n```console\n$ echo one\none\n\n$ echo two\ntwo\n```\nafter\n"

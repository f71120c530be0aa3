from __future__ import annotations

import io
import sys

import pytest
from rich.console import Console
from rich.progress import Progress

from trt_kvcache.cli.build import ProgressBars, build_progress
from trt_kvcache.engine.protocol import ProgressEvent


def test_bars_come_nest_and_go() -> None:
    progress = Progress(console=Console(file=io.StringIO()))
    bars = ProgressBars(progress)

    def state() -> list[tuple[str, float | None, float]]:
        return [(task.description, task.total, task.completed) for task in progress.tasks]

    bars.show(ProgressEvent("building", None, 0, 6))
    bars.show(ProgressEvent("timing", "building", 0, 40))
    bars.show(ProgressEvent("timing", "building", 10, 40))
    bars.show(ProgressEvent("one tactic", "timing", 0, 1))
    assert state() == [("building", 6, 0), ("  timing", 40, 10), ("    one tactic", None, 0)]
    bars.show(ProgressEvent("one tactic", "timing", 1, 1, finished=True))
    bars.show(ProgressEvent("timing", "building", 20, 40, finished=True))
    bars.show(ProgressEvent("building", None, 1, 6))
    assert state() == [("building", 6, 1)]
    bars.show(ProgressEvent("building", None, 6, 6, finished=True))
    bars.show(ProgressEvent("never begun", None, 1, 1, finished=True))
    assert state() == []


def test_nothing_is_drawn_where_nobody_watches(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    with build_progress() as report:
        assert report is None
    assert stream.getvalue() == ""


def test_a_terminal_gets_bars_and_is_left_clean(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    stream = Terminal()
    monkeypatch.setattr(sys, "stderr", stream)
    with build_progress() as report:
        assert report is not None
        report(ProgressEvent("building the engine", None, 1, 2))
    assert "building the engine" in stream.getvalue()
    assert stream.getvalue().endswith("\x1b[2K")

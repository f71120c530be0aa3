"""Long work shows how far it is on a terminal, and nowhere else."""

import io
import sys
from contextvars import copy_context
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from decoders import DecoderConfig, write_decoder
from rich.console import Console

import trt_kvcache
from trt_kvcache import CachePlan, plan_model, verify_model
from trt_kvcache.cli.app import app
from trt_kvcache.cli.progress_bars import ProgressBars, show_progress
from trt_kvcache.progress import ProgressEvent, listener, listening, phase, tell

CLEAN = "\r\x1b[2K\x1b[?25h\r"  # the line is erased, the cursor shown


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def a_terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    stream = Terminal()
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setenv("TERM", "xterm")
    return stream


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_decoder(tmp_path / "model.onnx", DecoderConfig(layers=2))


def test_phases_nest_and_count() -> None:
    heard: list[ProgressEvent] = []
    with listening(heard.append), phase("outer", 2) as done:
        with phase("inner"):
            tell(ProgressEvent("of a child", None, 1, 3))
        done()
    assert listener() is None
    assert [(e.phase, e.parent, e.step, e.steps, e.finished) for e in heard] == [
        ("outer", None, 0, 2, False),
        ("inner", "outer", 0, 1, False),
        ("of a child", "inner", 1, 3, False),
        ("inner", "outer", 0, 1, True),
        ("outer", None, 1, 2, False),
        ("outer", None, 1, 2, True),
    ]


def test_nobody_hears_by_default() -> None:
    with phase("work", 3) as done:
        done()
    tell(ProgressEvent("work", None, 1, 3))


def test_a_thread_is_heard_in_a_copy_of_the_context() -> None:
    heard: list[ProgressEvent] = []

    def work() -> None:
        with phase("work"):
            pass

    with listening(heard.append):
        threads = [Thread(target=work), Thread(target=copy_context().run, args=(work,))]
        for thread in threads:
            thread.start()
            thread.join()
    assert [e.finished for e in heard] == [False, True]


def test_bars_come_nest_and_go() -> None:
    bars = ProgressBars(Console(file=io.StringIO()))

    def state() -> list[tuple[str, float | None, str]]:
        tasks = [] if bars.progress is None else bars.progress.tasks
        return [(task.description, task.total, task.fields["done"]) for task in tasks]

    bars.show(ProgressEvent("building", None, 0, 6))
    bars.show(ProgressEvent("timing", "building", 0, 40))
    bars.show(ProgressEvent("timing", "building", 10, 40))
    bars.show(ProgressEvent("one tactic", "timing", 0, 1))
    assert state() == [("building", 6, "0 of 6"), ("  timing", 40, "10 of 40"), ("    one tactic", None, "")]
    bars.show(ProgressEvent("one tactic", "timing", 1, 1, finished=True))
    bars.show(ProgressEvent("timing", "building", 20, 40, finished=True))
    bars.show(ProgressEvent("building", None, 1, 6))
    assert state() == [("building", 6, "1 of 6")]
    bars.show(ProgressEvent("building", None, 6, 6, finished=True))
    bars.show(ProgressEvent("never begun", None, 1, 1, finished=True))
    assert state() == []
    bars.show(ProgressEvent("cut off", None, 0, 1))
    bars.close()
    assert state() == []


def test_a_terminal_gets_bars_and_is_left_clean(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    terminal = a_terminal(monkeypatch)
    with show_progress():
        with phase("loading weights"):
            sys.stdout.write("a result\n")
        between = terminal.getvalue()
        with phase("decoding", 28) as done:
            for _ in range(14):
                done()
    assert "loading weights" in between
    assert between.endswith(CLEAN)
    assert "decoding" in terminal.getvalue()
    assert terminal.getvalue().endswith(CLEAN)
    assert capsys.readouterr().out == "a result\n"


@pytest.mark.parametrize("kind", ["a pipe", "dumb"])
def test_nothing_is_drawn_where_nothing_can_be_redrawn(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO() if kind == "a pipe" else Terminal()
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setenv("TERM", "dumb")
    with show_progress(), phase("work"):
        assert listener() is None
    assert stream.getvalue() == ""


def test_a_plan_says_what_it_does(model: Path) -> None:
    heard: list[ProgressEvent] = []
    with listening(heard.append):
        plan_model(model)
    phases = {e.phase: e for e in heard}
    assert list(phases) == ["reading the model", "planning", "comparing with the original", "regions"]
    assert all(event.finished for event in phases.values())
    regions = phases["regions"]
    assert regions.parent == "comparing with the original"
    assert regions.step == regions.steps > 1


def test_a_verification_says_what_it_does(model: Path) -> None:
    heard: list[ProgressEvent] = []
    with listening(heard.append):
        report = verify_model(model)
    phases = {e.phase: e for e in heard}
    stations = [f"station {at} of 4: {name}" for at, name in enumerate(("exported", "rewritten", "session"), 1)]
    assert [name for name in phases if name.startswith("station")] == [*stations, "station 4 of 4: network"]
    for name in stations:
        last = phases[name]
        assert (last.step, last.steps, last.finished) == (last.steps, report.stations[0].steps, True)


def test_a_generation_says_what_it_does(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = a_terminal(monkeypatch)
    app(["generate", str(model), "--tokens", "1,2", "--max-new-tokens", "2"], standalone_mode=False)
    shown = terminal.getvalue()
    places = [shown.index(text) for text in ("comparing with the original", "loading weights", "first token", " new ")]
    assert places == sorted(places)


@pytest.mark.parametrize(("flags", "shown"), [([], True), (["--json"], False)])
def test_commands_show_it_unless_they_print_json(
    flags: list[str], shown: bool, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal = a_terminal(monkeypatch)
    seen: list[bool] = []

    def planned(*given: Any) -> CachePlan:
        seen.append(listener() is not None)
        return plan_model(*given)

    monkeypatch.setattr(trt_kvcache, "plan_model", planned)
    app(["plan", str(model), *flags], standalone_mode=False)
    assert seen == [shown]
    assert ("reading the model" in terminal.getvalue()) == shown

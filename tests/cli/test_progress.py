"""Long work shows how far it is on a terminal, and nowhere else."""

import io
import sys
from pathlib import Path

import pytest
from decoders import DecoderConfig, write_decoder

from trt_kvcache import plan_model
from trt_kvcache.cli.progress_bars import show_progress
from trt_kvcache.progress import ProgressEvent, listener, listening, phase

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

"""Our own errors are one line and exit code 1; Ctrl-C is one line and 130; bugs keep their trace."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import numpy as np
import pytest
import typer
from decoders import DecoderConfig, write_decoder
from typer.testing import CliRunner

import trt_kvcache
from trt_kvcache.cli.app import app
from trt_kvcache.cli.signals import Ended
from trt_kvcache.errors import BuildError

run = CliRunner().invoke

COMMANDS = [
    ["plan", "missing.onnx"],
    ["rewrite", "missing.onnx", "-o", "out.onnx"],
    ["build", "missing.onnx", "-o", "out.engine"],
    ["verify", "missing.onnx"],
    ["inspect", "missing.engine"],
]


JSON_COMMANDS = [[*command, "--json"] for command in COMMANDS if command[0] != "rewrite"]


@pytest.mark.parametrize("command", COMMANDS + JSON_COMMANDS, ids=lambda command: f"{command[0]} {command[-1]}")
def test_a_missing_file_is_one_line(command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = run(app, command)
    assert result.exit_code == 1
    assert result.stdout == ""
    assert re.fullmatch(r"error: [^\n]*missing[^\n]*\n", result.stderr)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["x" * 300, "x" * 300 + "/m.onnx"], ids=["file", "folder"])
@pytest.mark.parametrize(
    "command", [*COMMANDS, ["generate", "missing.onnx", "--tokens", "1"], ["bench", "missing.onnx"]], ids=lambda c: c[0]
)
def test_a_path_that_cannot_be_looked_at_is_one_line(
    command: list[str], name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Longer than a name may be, which Python does not count as missing; as in a folder that is closed to us."""
    monkeypatch.chdir(tmp_path)
    result = run(app, [command[0], name, *command[2:]])
    assert result.exit_code == 1
    assert result.stdout == ""
    assert re.fullmatch(r"error: [^\n]*xxx[^\n]*: File name too long\n", result.stderr)


@pytest.mark.parametrize("content", [b"", b"PK", b"\x93NUMPY", b"text"], ids=["empty", "zip", "npy", "text"])
def test_inputs_that_are_none_are_one_line(content: bytes, tmp_path: Path) -> None:
    """Click takes an EOFError for a user who leaves, and says "Aborted"."""
    (tmp_path / "inputs.npz").write_bytes(content)
    model = write_decoder(tmp_path / "model.onnx", DecoderConfig(layers=1))
    result = run(app, ["verify", str(model), "--inputs", str(tmp_path / "inputs.npz")])
    assert result.exit_code == 1
    assert re.fullmatch(r"error: [^\n]*inputs.npz: cannot be read as an .npz file [^\n]*\n", result.stderr)
    assert "pickle" not in result.stderr


def test_one_array_where_names_are_needed_is_one_line(tmp_path: Path) -> None:
    np.save(tmp_path / "inputs.npy", np.zeros(3))
    model = write_decoder(tmp_path / "model.onnx", DecoderConfig(layers=1))
    result = run(app, ["verify", str(model), "--inputs", str(tmp_path / "inputs.npy")])
    assert result.exit_code == 1
    assert "one array without a name, as in an .npy file; np.savez writes names" in result.stderr


def test_more_threads_than_there_can_be_are_one_line(tmp_path: Path) -> None:
    model = write_decoder(tmp_path / "model.onnx", DecoderConfig(layers=1))
    result = run(app, ["bench", str(model), "--threads", "99999999999"])
    assert (result.exit_code, result.stderr) == (1, "error: threads is 99999999999; it must be at most 4096\n")


@pytest.mark.parametrize("command", COMMANDS[:4], ids=lambda command: command[0])
def test_a_file_that_is_not_onnx_is_one_line(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    model = tmp_path / "missing.onnx"
    model.write_bytes(b"this is no model")
    result = run(app, command)
    assert result.exit_code == 1
    assert re.fullmatch(r"error: [^\n]*missing.onnx[^\n]*\n", result.stderr)
    assert list(tmp_path.iterdir()) == [model]


def test_several_lines_become_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise BuildError("the build failed:\n  [E] first\n  [E] second")

    monkeypatch.setattr(trt_kvcache, "plan_model", fail)
    result = run(app, ["plan", "model.onnx"])
    assert (result.exit_code, result.stderr) == (1, "error: the build failed: [E] first [E] second\n")


def test_interrupt_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(trt_kvcache, "plan_model", interrupt)
    result = run(app, ["plan", "model.onnx"])
    assert (result.exit_code, result.stdout, result.stderr) == (130, "", "error: interrupted\n")


@pytest.mark.parametrize(("error", "status", "said"), [
    (KeyboardInterrupt(), 130, "interrupted"), (Ended(signal.SIGTERM), 143, "ended by SIGTERM"),
])  # fmt: skip
def test_interrupt_while_options_are_read(
    error: KeyboardInterrupt, status: int, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which takes most of the time of a short command: what reads them is loaded then."""

    def interrupt(*_: object) -> None:
        raise error

    monkeypatch.setattr(typer, "echo", interrupt)
    result = run(app, ["--version"])
    assert (result.exit_code, result.stdout, result.stderr) == (status, "", f"error: {said}\n")


def test_bugs_keep_their_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    def bug(*_: object) -> None:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(trt_kvcache, "plan_model", bug)
    with pytest.raises(ZeroDivisionError):
        run(app, ["plan", "model.onnx"], catch_exceptions=False)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["build", "m.onnx", "-o", "e", "--minShapes", "x"], "name:1x2x3"),
        (["build", "m.onnx", "-o", "e", "--workspace", "much"], "'much'"),
        (["build", "m.onnx", "-o", "e", "--compute-capabilities", "hopper"], "'hopper'"),
        (["verify", "m.onnx", "--chunks", "5,x"], "'5,x'"),
        (["verify", "m.onnx", "--batch", "0"], "batch is 0"),
        (["verify", "m.onnx", "--batch", "100000000000000000000"], "it must be at least 1, at most 65536"),
        (["verify", "m.onnx", "--tokens", "100000000000000000000"], "there must be 0 or more, at most 1048576"),
        (["verify", "m.onnx", "--chunks", "100000000000000000000"], "each must be at least 1 token, at most 1048576"),
        (["verify", "m.onnx", "--seed", "-1"], "the seed is -1; it must be 0 or more"),
        (["verify", "m.onnx", "--tokens", "-1"], "-1 single-token steps; there must be 0 or more"),
        (["verify", "m.onnx", "--chunks", "", "--tokens", "0"], "0 single-token steps and no chunk"),
    ],
)
def test_illegal_option_values_are_one_line(arguments: list[str], message: str) -> None:
    result = run(app, arguments)
    assert result.exit_code == 1
    assert re.fullmatch(rf"error: [^\n]*{re.escape(message)}[^\n]*\n", result.stderr)

"""Flags of other tools are answered with what to type; help is readable at 80 columns; full caches are said."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import typer.main
from decoders import DecoderConfig, write_decoder
from typer.testing import CliRunner

from trt_kvcache.cli.app import app
from trt_kvcache.cli.command import FOREIGN

COMMANDS: dict[str, Any] = typer.main.get_command(app).commands  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ("build m.onnx -o e --fp16", "there is no --fp16: an engine computes in the types of the model; export it in"),
        ("build m.onnx -o e --dtype=float16", "there is no --dtype: an engine computes in the types of the model"),
        ("build --onnx=m.onnx --saveEngine=e", "there is no --onnx: the model or engine is the argument"),
        ("build m.onnx --memPoolSize workspace:4", "there is no --memPoolSize: give --workspace SIZE, such as"),
        ("generate m.onnx --max-tokens 9", "there is no --max-tokens: give --max-new-tokens N"),
        ("generate m.onnx --max_tokens 9", "there is no --max_tokens: give --max-new-tokens N"),
        ("generate m.onnx --max_new_tokens 9", "--max_new_tokens is written --max-new-tokens"),
        ("chat m.onnx --max-model-len 9", "there is no --max-model-len: give --capacity TOKENS"),
        ("plan m.onnx --capacity 4k", "--capacity is 4k; write 4096"),
        ("plan m.onnx --capacity=1.5K", "--capacity is 1.5K; write 1536"),
    ],
)
def test_what_other_tools_call_it(typed: str, said: str) -> None:
    result = CliRunner().invoke(app, typed.split())
    assert result.exit_code == 1
    assert result.stderr.startswith(f"error: {said}")
    assert result.stderr.count("\n") == 1


def test_what_nobody_calls_it() -> None:
    for typed in ("plan m.onnx --xyzzy", "plan m.onnx --capacity many", "plan m.onnx --capacity 0", "plan"):
        result = CliRunner().invoke(app, typed.split())
        assert (result.exit_code, result.stdout) == (2, "")
        assert "Try 'trt-kvcache plan --help'" in result.stderr or "Try 'root plan --help'" in result.stderr


def test_hints_name_flags_that_exist() -> None:
    own = {name for command in COMMANDS.values() for p in command.params for name in (*p.opts, *p.secondary_opts)}
    named = {flag for hint in FOREIGN.values() for flag in re.findall(r"(?<!\w)--?[a-zA-Z][\w-]*", hint)}
    assert named <= own


@pytest.mark.parametrize("name", COMMANDS)
def test_help_is_80_columns_wide_and_cuts_no_name(name: str) -> None:
    text = CliRunner(env={"COLUMNS": "80", "TERMINAL_WIDTH": "80"}).invoke(app, [name, "--help"]).stdout
    assert max(map(len, text.splitlines())) <= 80
    for parameter in COMMANDS[name].params:
        for flag in (*parameter.opts, *parameter.secondary_opts) if parameter.param_type_name == "option" else ():
            assert re.search(rf"(?<![\w-]){flag}(?![\w-])", text)
    assert "…" not in text


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_decoder(tmp_path / "model.onnx", DecoderConfig(layers=1, capacity=16))


def test_a_text_that_ends_by_capacity_is_a_warning(model: Path) -> None:
    def said(*arguments: str) -> str:
        result = CliRunner().invoke(app, ["generate", str(model), "--tokens", "1,2,3", *arguments])
        assert result.exit_code == 0
        return result.stderr

    full = "full at 16 tokens; more need a larger --capacity\n"
    assert f"warning: 1 text ends because its cache is {full}" in said("--max-new-tokens", "99")
    twice = said("--tokens", "4", "--max-new-tokens", "99", "--json")
    assert twice == f"warning: 2 texts end because their caches are {full}"
    assert "warning" not in said("--max-new-tokens", "3")


def test_arguments_in_messages_are_flags(model: Path) -> None:
    result = CliRunner().invoke(app, ["generate", str(model), "--tokens", "1", "--temperature", "0"])
    assert result.stderr.startswith("error: --temperature is 0.0; supported: above 0")
    result = CliRunner().invoke(app, ["build", str(model), "-o", "never/", "--workspace", "4"])
    assert result.stderr.startswith("error: --workspace 4 is 4 bytes, and no kernel does with that; give a unit, as in")
    assert not Path("never").exists()

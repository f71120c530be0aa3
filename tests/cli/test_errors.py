"""Our own errors are one line and exit code 1; Ctrl-C is one line and 130; bugs keep their trace."""

import os
import re
import signal
import subprocess
import sys
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


QUICK = [*COMMANDS, ["generate", "missing.onnx", "--prompt", "hi"], ["generate", "missing.engine", "--prompt", "hi"],
         ["bench", "missing.onnx"], ["plugins", "missing.onnx"]]  # fmt: skip


def test_a_missing_model_is_an_error_before_slow_imports(tmp_path: Path) -> None:
    """And before its tokenizer is looked for."""
    code = f"""
import sys
from trt_kvcache.cli.app import app
for command in {QUICK}:
    try:
        app(command)
    except SystemExit as stop:
        assert stop.code == 1
print([name for name in ("numpy", "onnx", "onnxruntime", "tensorrt_rtx") if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "[]\n")
    hints = {"inspect": "check the path", "generate": "give the path of an engine or of an .onnx file"}
    for (command, name, *_), said in zip(QUICK, done.stderr.splitlines(), strict=True):
        hint = hints.get(command, "give the path of an .onnx file")
        assert said == f"error: {name}: no such file; {hint}"


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


PATHS = {
    "plan": ["--config"], "rewrite": ["--config", "-o"], "build": ["--config", "-o", "--timing-cache"],
    "verify": ["--config", "--inputs"], "bench": ["--compare"], "inspect": [],
    "generate": ["--prompt-file", "--tokenizer", "--constants", "--inputs-embeds", "--source-inputs", "--encoder",
                 "--generation-config"],
}  # fmt: skip


@pytest.mark.parametrize(("command", "option"), [(name, o) for name, given in PATHS.items() for o in ("", *given)])
def test_a_file_that_may_not_be_read_is_one_line(
    command: str, option: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Told by whoever reads it, as all that is wrong with files; not as an option that ``--help`` rules out."""
    (tmp_path / "closed").write_bytes(b"")
    monkeypatch.setattr(os, "access", lambda *_: False)  # what click asks
    needed = {"rewrite": ["-o", "o.onnx"], "build": ["-o", "o"], "generate": ["--tokens", "1"]}.get(command, [])
    closed = str(tmp_path / "closed")
    given = ["missing", option, closed] if option else [closed]
    result = run(app, [command, *given, *(needed if option != "-o" else [])])
    assert result.exit_code == 1, result.stderr
    assert re.fullmatch(r"error: [^\n]*\n", result.stderr)


@pytest.mark.parametrize("content", [b"", b"PK"], ids=["empty", "zip"])
def test_inputs_that_are_none_are_one_line(content: bytes, tmp_path: Path) -> None:
    """Click takes an EOFError for a user who leaves, and says "Aborted"."""
    (tmp_path / "inputs.npz").write_bytes(content)
    np.save(tmp_path / "inputs.npy", np.zeros(3))
    model = write_decoder(tmp_path / "model.onnx", DecoderConfig(layers=1))
    for name, words in (
        ("inputs.npz", "inputs.npz: cannot be read as an .npz file "),
        ("inputs.npy", "one array without a name, as in an .npy file; np.savez writes names"),
    ):
        result = run(app, ["verify", str(model), "--inputs", str(tmp_path / name)])
        assert result.exit_code == 1
        assert re.fullmatch(rf"error: [^\n]*{re.escape(words)}[^\n]*\n", result.stderr)
        assert "pickle" not in result.stderr


def test_several_lines_become_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise BuildError("the build failed:\n  [E] first\n  [E] second")

    monkeypatch.setattr(trt_kvcache, "plan_model", fail)
    (tmp_path / "model.onnx").touch()
    result = run(app, ["plan", str(tmp_path / "model.onnx")])
    assert (result.exit_code, result.stderr) == (1, "error: the build failed: [E] first [E] second\n")


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


def test_bugs_keep_their_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "model.onnx").touch()

    def bug(*_: object) -> None:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(trt_kvcache, "plan_model", bug)
    with pytest.raises(ZeroDivisionError):
        run(app, ["plan", str(tmp_path / "model.onnx")], catch_exceptions=False)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["build", "m.onnx", "-o", "e", "--minShapes", "x"], "name:1x2x3"),
        (
            ["build", "m.onnx", "-o", "e", "--workspace", "9999999999GiB"],
            "workspace is 10737418238926258176; it must be at m",
        ),
        (["verify", "m.onnx", "--batch", "100000000000000000000"], "it must be at most 65536"),
        (["verify", "m.onnx", "--tokens", "100000000000000000000"], "it must be at most 1048576"),
        (["verify", "m.onnx", "--chunks", "100000000000000000000"], "each must be at least 1 token, at most 1048576"),
        (["verify", "m.onnx", "--tolerance", "1"], "the --tolerance is 1.0; it is a share"),
        (["verify", "m.onnx", "--chunks", "", "--tokens", "0"], "0 single-token steps and no chunk"),
    ],
)
def test_illegal_option_values_are_one_line(
    arguments: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("m.onnx").touch()
    result = run(app, arguments)
    assert result.exit_code == 1
    assert re.fullmatch(rf"error: [^\n]*{re.escape(message)}[^\n]*\n", result.stderr)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("bench --window-chunk 9", "--window-chunk 9 has no effect without --sliding circular; add that"),
        ("generate --tokens 1 --seed 3", "--seed 3 is for sampling, and greedy decoding draws nothing; add --sample"),
        ("generate --tokens 1 --greedy --top-k 3", "--top-k 3 has no effect without --sample"),
        ("generate --tokens 1 --length-penalty 2", "--length-penalty 2.0 has no effect without --num-beams above 1"),
        ("generate --tokens 1 --early-stopping true", "--early-stopping True has no effect without --num-beams above"),
        ("generate --tokens 1 --chat", "--chat needs messages as text; give --prompt or --prompt-file"),
        ("generate --source-tokens 1 --chat", "--chat needs messages as text"),
        ("generate --source-tokens 1 --system x", "--system is a message of a chat; add --chat"),
        ("generate --tokens 1 --system x", "--system is a message of a chat; add --chat"),
        ("generate --tokens 1 --logprobs", "--logprobs are shown by --json; add it"),
        ("generate --tokens 1 --encoder x.onnx", "--encoder x.onnx has nothing to read"),
        ("generate --tokens 1 --embeddings x.npy", "embeddings are given, but the model takes token ids"),
        ("generate --tokens 1 --stop x", "need a tokenizer"),
        ("generate --tokens 1 --eos 7 --eos 500", "--eos is 500, which the model never gives: it has tokens 0 to 255"),
        ("build -o e --max-encoder 3", "--max-encoder is given, but no input of the model has the length"),
        ("build -o e --encoder x.onnx", "--encoder names an encoder, but"),
        ("build -o e --logits all --max-logits 3", "--max-logits is 3, but the plan leaves the model's logits as they"),
        ("build -o e --opt-batch 3", "--opt-batch is 3, more than the largest batch (1); raise --max-batch"),
        ("build -o e --max-batch 2 --decode-weights own", "--decode-weights own is for a batch of one, and --max-bat"),
        ("build -o e --timing-cache t", "--timing-cache"),
        ("bench --threads 99999999999", "threads is 99999999999; it must be at most 4096"),
    ],
)  # fmt: skip
def test_options_without_effect_are_refused(
    arguments: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever gave one took it for something that it is not."""
    monkeypatch.chdir(tmp_path)
    write_decoder(tmp_path / "m.onnx", DecoderConfig(layers=1))
    command, *more = arguments.split()
    result = run(app, [command, "m.onnx", *more])
    assert (result.exit_code, result.stdout) == (1, "")
    assert re.fullmatch(rf"error: [^\n]*{re.escape(message)}[^\n]*\n", result.stderr)
    assert list(tmp_path.iterdir()) == [tmp_path / "m.onnx"]

"""Stdout that takes nothing more, or not every character: one line on stderr and exit code 1, or an escape."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from decoders import DecoderConfig, write_decoder

FULL = Path("/dev/full")


@pytest.mark.few(1)
@pytest.mark.skipif(not FULL.exists(), reason="no /dev/full here")
@pytest.mark.parametrize(
    "arguments", [["plan", "MODEL"], ["plan", "MODEL", "--json"], ["--version"], ["--help"]], ids=" ".join
)
def test_a_full_disk_is_one_line(arguments: list[str], tmp_path: Path) -> None:
    model = write_decoder(tmp_path / "model.onnx", DecoderConfig(layers=1))
    command = [sys.executable, "-m", "trt_kvcache", *[str(model) if a == "MODEL" else a for a in arguments]]
    with FULL.open("wb") as out:
        done = subprocess.run(command, stdout=out, stderr=subprocess.PIPE, text=True)
    assert done.stderr == "error: the output cannot be written: No space left on device\n"
    assert done.returncode == 1


@pytest.mark.few(1)
@pytest.mark.parametrize("arguments", [["plan", "MODEL"], ["plan", "MODEL", "--json"], ["--help"]], ids=" ".join)
def test_a_closed_stdout_is_one_line(arguments: list[str], tmp_path: Path) -> None:
    model = write_decoder(tmp_path / "model.onnx", DecoderConfig(layers=1))
    command = [sys.executable, "-m", "trt_kvcache", *[str(model) if a == "MODEL" else a for a in arguments]]
    done = subprocess.run(["sh", "-c", 'exec "$@" >&-', "sh", *command], capture_output=True, text=True)
    assert done.stderr == "error: the output cannot be written: stdout is closed\n"
    assert done.returncode == 1


def test_a_closed_stderr_leaves_stdout_to_the_result(tmp_path: Path) -> None:
    """Where there is no stderr, `print(file=sys.stderr)` goes to stdout."""
    command = [sys.executable, "-m", "trt_kvcache", "plan", str(tmp_path / "missing.onnx")]
    done = subprocess.run(["sh", "-c", 'exec "$@" 2>&-', "sh", *command], capture_output=True, text=True)
    assert (done.stdout, done.returncode) == ("", 1)


@pytest.mark.slow
def test_a_reader_that_leaves_is_no_error(tmp_path: Path) -> None:
    model = write_decoder(tmp_path / "model.onnx", DecoderConfig(layers=1))
    command = [sys.executable, "-m", "trt_kvcache", "plan", str(model), "--json"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    assert process.stderr.read() == b""
    process.stderr.close()
    assert process.wait() == 1


@pytest.mark.slow
def test_characters_that_an_encoding_lacks_are_escaped(tmp_path: Path) -> None:
    model = write_decoder(tmp_path / "模型.onnx", DecoderConfig(layers=1))
    command = [sys.executable, "-m", "trt_kvcache", "plan", str(model)]
    done = subprocess.run(command, capture_output=True, env={**os.environ, "PYTHONIOENCODING": "cp1252"})
    assert (done.returncode, done.stderr) == (0, b"")
    assert rb"\u6a21\u578b.onnx" in done.stdout


PRINTS = """
import os, sys
from trt_kvcache.engine import diagnosis

def find_gpus(found=diagnosis.find_gpus):
    os.write(1, b"[TRT] [E] no such kernel\\n")
    return found()

diagnosis.find_gpus = find_gpus
from trt_kvcache.__main__ import main

sys.argv[1:] = ["doctor", "--json"]
main()
"""


def test_what_libraries_print_is_not_in_the_result() -> None:
    """TensorRT's own logger prints to stdout, past Python."""
    done = subprocess.run([sys.executable, "-W", "error", "-c", PRINTS], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "[TRT] [E] no such kernel\n")
    assert json.loads(done.stdout)["backends"]

"""Signals that end a command: soon, on one line, and without leaving anything behind."""

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import onnx
import pytest
from decoders import DecoderConfig, write_decoder
from hostile.models import SMALL, TRIGGER, endless_at

PAUSING = """
import importlib, sys, time

at, after, *arguments = sys.argv[1:]
module, _, name = at.partition(":")
place = importlib.import_module(module)
*path, name = name.split(".")
for part in path:
    place = getattr(place, part)
found = getattr(place, name)

def pause(*given, **named):
    done = found(*given, **named) if after == "after" else None
    print("here", flush=True)
    time.sleep(60)
    return found(*given, **named) if after == "at" else done

setattr(place, name, pause)
sys.argv[1:] = arguments
from trt_kvcache.__main__ import main
main()
"""
"""The command line, which says where it is and waits there: before or after a function, given as ``module:name``, in
its place, or ``at`` it: then it goes on."""

LONG = """
import sys
from pathlib import Path
import numpy as np
from onnx import TensorProto, helper
from trt_kvcache.cli.signals import end_by_unwinding
from trt_kvcache.compare.rewritten_model import Float32Session

value = helper.make_tensor_value_info
turns = helper.make_tensor("turns", TensorProto.INT64, [], [1 << 60])
on = helper.make_tensor("on", TensorProto.BOOL, [], [True])
body = helper.make_graph(
    [helper.make_node("Identity", ["go"], ["went"]), helper.make_node("Add", ["x", "x"], ["y"])], "body",
    [value("turn", TensorProto.INT64, []), value("go", TensorProto.BOOL, []), value("x", TensorProto.FLOAT, [])],
    [value("went", TensorProto.BOOL, []), value("y", TensorProto.FLOAT, [])],
)
graph = helper.make_graph(
    [helper.make_node("Loop", ["turns", "on", "a"], ["b"], body=body)], "long",
    [value("a", TensorProto.FLOAT, [])], [value("b", TensorProto.FLOAT, [])], [turns, on],
)
model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
session = Float32Session(model, Path.cwd())
feeds = {"a": np.array(1, np.float32)}
end_by_unwinding()
try:
    print("here", flush=True)
    session.run(feeds)
except KeyboardInterrupt:
    print("interrupted")
"""

DECODING = """
import sys, threading, time
from trt_kvcache import DecodeSession, GenerationConfig
from trt_kvcache.decoding import CpuOptions
session = DecodeSession.open(sys.argv[1], max_batch=1, cpu=CpuOptions(threads=1))
def decode():
    while True:
        for event in session.stream([[*map(int, sys.argv[2].split(","))]], GenerationConfig(max_new_tokens=9)):
            pass
threading.Thread(target=decode, daemon=True).start()
time.sleep(0.5)
print("ends")
"""
"""A program that ends while a thread of its still decodes."""


ENDING = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that `verify` needs temporary files for."""
    folder = tmp_path_factory.mktemp("model")
    return write_decoder(folder / "model.onnx", DecoderConfig(layers=1, dtype="bfloat16"), external_threshold=1024)


def start(command: Sequence[str], scratch: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"TMPDIR": str(scratch)},
        preexec_fn=lambda: [signal.signal(number, signal.SIG_DFL) for number in ENDING],  # not what the tests run with
    )


def wait_until_there(process: subprocess.Popen[str]) -> None:
    assert process.stdout is not None
    assert process.stdout.readline() == "here\n", process.communicate()


VERIFY = ["verify", "MODEL"]
REWRITE = ["rewrite", "MODEL", "-o", "OUT/model.onnx"]
BUILD = ["build", "MODEL", "-o", "OUT/model.engine"]
MOVED = "pathlib:Path.replace"
"""Gives files their names. A signal waits until all have them."""
FILES = {
    "rewrite": {"model.onnx", "model.onnx.data"},
    "build": {"model.engine", "model.engine.json", "model.engine.proof"},
}
MOMENTS = [
    (VERIFY, "trt_kvcache.importer.pipeline:load_source", "before"),
    (VERIFY, "trt_kvcache.compare.float32_copy:copied", "after"),
    (VERIFY, "trt_kvcache.compare.exported_model:Exported.step", "after"),
    (VERIFY, "trt_kvcache.compare.rewritten_model:Float32Session.run", "before"),
    (VERIFY, "trt_kvcache.engine.parsing:compare_parsed", "before"),
    (REWRITE, "trt_kvcache.importer.files.save:_copy", "before"),
    (REWRITE, "trt_kvcache.importer.files.save:_copy", "after"),
    (REWRITE, MOVED, "at"),
    (REWRITE, MOVED, "after"),
    (BUILD, "trt_kvcache.engine.engine_build:run_worker", "before"),
    (BUILD, "trt_kvcache.child:Child.keep", "before"),
    (BUILD, "trt_kvcache.engine.engine_build:_publish", "before"),
    (BUILD, MOVED, "at"),
    (BUILD, MOVED, "after"),
]


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("command", "at", "when", "number"),
    [
        pytest.param(*moment, number, id=f"{moment[0][0]} {moment[1].rpartition(':')[2]} {moment[2]} {number.name}")
        for moment in MOMENTS
        for number in (ENDING if moment in MOMENTS[1::5] else [signal.SIGTERM])
    ],
)
def test_all_is_left_or_nothing(
    command: list[str], at: str, when: str, number: signal.Signals, model: Path, tmp_path: Path
) -> None:
    scratch, out = tmp_path / "scratch", tmp_path / "out"
    scratch.mkdir()
    out.mkdir()
    arguments = [{"MODEL": str(model)}.get(part, part.replace("OUT", str(out))) for part in command]
    pausing = PAUSING.replace("sleep(60)", "sleep(1)") if at == MOVED else PAUSING
    process = start([pausing, at, when, *arguments], scratch)
    wait_until_there(process)
    process.send_signal(number)
    if number is not signal.SIGINT:
        process.send_signal(number)  # what cleans up is not disturbed
    stdout, stderr = process.communicate(timeout=30)
    said = "interrupted" if number is signal.SIGINT else f"ended by {number.name}"
    assert (process.returncode, stdout.replace("here\n", ""), stderr) == (128 + number, "", f"error: {said}\n")
    assert not list(scratch.glob("trt-kvcache*"))
    assert {file.name for file in out.iterdir()} == (FILES[command[0]] if at == MOVED else set())
    assert {file.name for file in model.parent.iterdir()} == {"model.onnx", "model.onnx.data"}


@pytest.mark.few(1)
@pytest.mark.parametrize("number", ENDING, ids=lambda s: s.name)
def test_a_long_run_ends_soon(number: signal.Signals, tmp_path: Path) -> None:
    process = start([LONG], tmp_path)
    wait_until_there(process)
    time.sleep(0.2)  # into the run
    process.send_signal(number)
    stdout, stderr = process.communicate(timeout=30)
    assert (process.returncode, stdout, stderr) == (0, "interrupted\n", "")


@pytest.fixture(scope="module")
def endless(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with one prompt after which it never ends."""
    path = write_decoder(tmp_path_factory.mktemp("endless") / "model.onnx", SMALL)
    proto = onnx.load(path)
    endless_at(proto, random.Random(0))
    onnx.save(proto, path)
    return path


@pytest.mark.few(1)
@pytest.mark.parametrize("number", ENDING, ids=lambda s: s.name)
def test_generate_ends_in_a_step_that_does_not(number: signal.Signals, endless: Path, tmp_path: Path) -> None:
    tokens = ",".join(map(str, TRIGGER))
    at = "trt_kvcache.runtime.ort.calls:CpuSession.run_bound"
    arguments = ["generate", str(endless), "--tokens", tokens, "--max-new-tokens", "2"]
    process = start([PAUSING.replace("sleep(60)", "sleep(0)"), at, "at", *arguments], tmp_path)
    wait_until_there(process)
    time.sleep(0.5)  # into the run
    process.send_signal(number)
    stdout, stderr = process.communicate(timeout=30)
    if number is signal.SIGINT:  # as in any other step: the tokens so far
        assert (process.returncode, stdout) == (130, "\n")
        assert stderr.startswith("7 prompt tokens, 0 new (cancelled)")
    else:
        assert (process.returncode, stdout, stderr) == (128 + number, "", f"error: ended by {number.name}\n")


@pytest.mark.few(1)
@pytest.mark.parametrize("tokens", [[1, 2], TRIGGER], ids=["short steps", "one that does not end"])
def test_a_thread_that_decodes_does_not_abort_the_process(tokens: list[int], endless: Path, tmp_path: Path) -> None:
    process = start([DECODING, str(endless), ",".join(map(str, tokens))], tmp_path)
    stdout, stderr = process.communicate(timeout=30)
    assert (process.returncode, stdout) == (0, "ends\n"), stderr


@pytest.mark.slow
def test_nohup_is_respected(model: Path, tmp_path: Path) -> None:
    """Who starts a command with SIGHUP ignored wants it to go on."""
    arguments = [
        PAUSING.replace("sleep(60)", "sleep(1)"),
        "trt_kvcache.cli.output:console",
        "before",
        "plan",
        str(model),
    ]
    process = subprocess.Popen(
        [sys.executable, "-c", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN),
    )
    wait_until_there(process)
    process.send_signal(signal.SIGHUP)
    process.communicate(timeout=30)
    assert process.returncode == 1  # of the pause, which gives no console

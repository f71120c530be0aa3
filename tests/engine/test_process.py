"""The build process dies in every way there is: an error that says how, and nothing left behind."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from decoders import DecoderConfig, write_decoder

from trt_kvcache.child import _ROOT
from trt_kvcache.engine import build_process as process
from trt_kvcache.engine.engine_build import build_engine
from trt_kvcache.errors import BuildError, OutputError
from trt_kvcache.progress import ProgressEvent

FAKE = """
import os, resource, signal, sys, time
from trt_kvcache.engine import builder
from trt_kvcache.engine.build_process import *
from trt_kvcache.errors import *

def build(job, model, send):
    with open(job.engine, "wb") as file:
        file.write(b"half an engine")
    send(Stage(STAGES[1]))
    send(Node("/layers.0/rope [RotaryEmbedding]"))
    {body}

builder._build = build
builder.main()
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_decoder(tmp_path_factory.mktemp("model") / "model.onnx", DecoderConfig(layers=1))


@pytest.fixture
def output(tmp_path: Path) -> Path:
    """Where to build; an engine and a manifest are there already."""
    (tmp_path / "model.engine").write_bytes(b"old engine")
    (tmp_path / "model.engine.json").write_bytes(b"old manifest")
    return tmp_path / "model.engine"


def unchanged(output: Path) -> bool:
    return {p.name: p.read_bytes() for p in output.parent.iterdir()} == {
        "model.engine": b"old engine",
        "model.engine.json": b"old manifest",
    }


@pytest.fixture
def child(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Makes builds run a child that does this instead of building."""

    def use(body: str) -> None:
        monkeypatch.setattr(process, "WORKER", ("-c", FAKE.format(body=body)))

    return use


def children() -> list[psutil.Process]:
    """Build processes. Those that check models stay; templates, tokenizers and pools may be those of other tests."""
    found = [p for p in psutil.Process().children() if p.status() != psutil.STATUS_ZOMBIE]
    return [p for p in found if not re.search("importer.check.checker|multiprocessing", " ".join(p.cmdline()))]


def wait_for(condition: Callable[[], bool], seconds: float = 20.0) -> bool:
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.01)
    return True


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("body", "message"),
    [
        (
            "os.kill(os.getpid(), signal.SIGFPE)",
            r"the process of TensorRT for RTX .* was killed by SIGFPE while parsing the model, at node /layers.0/rope "
            r"\[RotaryEmbedding\]; that is a crash inside TensorRT: change this part",
        ),
        ("os.kill(os.getpid(), signal.SIGKILL)", "killed by SIGKILL while parsing .*; it was probably out of memory"),
        (
            "send(Stage(STAGES[4])); send(Log(True, 'no kernel')); print('printed'); sys.stdout.flush(); os.abort()",
            r"killed by SIGABRT while building the engine; .* \(its last output: no kernel; printed\)",
        ),
        ("import sys; sys.exit('no python')", r"exit code 1 while loading TensorRT \(its last output: no python\)"),
        ("raise OutputError('disk full')", "^disk full$"),
        ("print('hello', flush=True)", "killed by SIGABRT while parsing the model"),
        ("sys.stderr.write('a\\nb\\nc\\n'); os._exit(3)", r"ended with exit code 3 .* \(its last output: b; c\)"),
    ],
)
def test_the_death_of_the_child_is_an_error(
    model: Path, output: Path, child: Callable[[str], None], body: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error of our own keeps its class."""
    child(body)
    if body.startswith("import"):  # a child that does not start
        monkeypatch.setattr(process, "WORKER", ("-c", body))
    elif body.startswith("print"):  # before it can divert that
        monkeypatch.setattr(process, "WORKER", ("-c", f"{body}\n{FAKE.format(body='os.abort()')}"))
    with pytest.raises(OutputError if "OutputError" in body else BuildError, match=message):
        build_engine(model, output)
    assert unchanged(output)
    assert not children()


def test_a_bug_in_the_child_keeps_its_trace(model: Path, output: Path, child: Callable[[str], None]) -> None:
    child("{}['missing']")
    with pytest.raises(RuntimeError, match=r"(?s)Traceback .*in build\n.*KeyError: 'missing'"):
        build_engine(model, output)
    assert unchanged(output)


@pytest.mark.parametrize("body", ["time.sleep(600)", "builder.os._exit = lambda status: None; time.sleep(600)"])
def test_an_interrupt_ends_the_child(
    model: Path, output: Path, child: Callable[[str], None], body: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also a child that does not end by itself."""
    monkeypatch.setattr(process, "_GRACE", 0.5)
    child(body)
    seen: list[psutil.Process] = []

    def interrupt(event: ProgressEvent) -> None:
        if event.phase == "parsing the model":
            seen.extend(children())
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build_engine(model, output, progress=interrupt)
    assert len(seen) == 1
    assert not children()
    assert unchanged(output)


PARENT = """
import sys
from trt_kvcache.engine import build_process as process
from trt_kvcache.engine.engine_build import build_engine

process.WORKER = ("-c", {fake!r})

def progress(event):
    if event.phase == "parsing the model":
        print("parsing", flush=True)

build_engine({model!r}, {output!r}, progress=progress)
"""


@pytest.mark.few(2)
@pytest.mark.parametrize("death", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL], ids=lambda s: s.name)
def test_the_death_of_the_caller_leaves_nothing(model: Path, output: Path, death: signal.Signals) -> None:
    script = PARENT.format(fake=FAKE.format(body="time.sleep(600)"), model=str(model), output=str(output))
    parent = subprocess.Popen(
        [sys.executable, "-c", script],
        cwd=_ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    assert parent.stdout is not None
    with parent.stdout:
        assert parent.stdout.readline() == b"parsing\n"
        children = psutil.Process(parent.pid).children()
        (worker,) = (child for child in children if "-c" in child.cmdline())  # the other one checks the rewrite
        assert not unchanged(output)  # the half-written engine is there
        # To the whole group, as a terminal does: only the caller may act on it.
        os.killpg(parent.pid, death)
        assert parent.wait(20) != 0
    assert wait_for(lambda: not worker.is_running() or worker.status() == psutil.STATUS_ZOMBIE)
    assert wait_for(lambda: unchanged(output))

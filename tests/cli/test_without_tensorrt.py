"""Without TensorRT a model is planned, verified and run on the CPU; what needs TensorRT names the extra."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from decoders import DecoderConfig, write_decoder

from trt_kvcache.errors import BackendError
from trt_kvcache.runtime.trt.load import load_tensorrt

BLOCKER = "import sys\nfor name in ('tensorrt', 'tensorrt_rtx'):\n    sys.modules[name] = None\n"


def run(folder: Path, *arguments: str, code: int = 0) -> str:
    paths = os.pathsep.join([str(folder / "blocked"), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": paths}
    command = [sys.executable, "-m", "trt_kvcache", *arguments]
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout if code == 0 else done.stderr


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bare")
    write_decoder(folder / "model.onnx", DecoderConfig(layers=1, capacity=16, vocab=64))
    (folder / "blocked").mkdir()
    (folder / "blocked" / "sitecustomize.py").write_text(BLOCKER)
    return folder


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        ("plan model.onnx", "2 of 2 caches in place"),
        ("verify model.onnx", "every station gives the numbers of the model as exported"),
        ("rewrite model.onnx -o out.onnx", "2 of 2 caches in place"),
        ("generate model.onnx --tokens 1,2 --max-new-tokens 3 --json", '"finish_reason": "length"'),
        ("doctor", "pip install 'trt-kvcache[rtx]': builds engines on any machine, with or without a GPU"),
    ],
)
def test_what_needs_no_tensorrt_works(folder: Path, arguments: str, shown: str) -> None:
    assert shown in run(folder, *arguments.split())


def test_a_build_names_the_extra(folder: Path) -> None:
    said = run(folder, "build", "model.onnx", "-o", "model.engine", code=1)
    assert said == "error: TensorRT for RTX is not installed; run: pip install 'trt-kvcache[rtx]'\n"


def test_an_engine_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorrt_rtx", None)
    with pytest.raises(BackendError, match=r"not installed; run: pip install 'trt-kvcache\[rtx\]'"):
        load_tensorrt("tensorrt-rtx")

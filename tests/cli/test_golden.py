"""Answers as they stand at 80 and at 120 columns, in ``golden/``.

To write them anew, and look at the difference: ``GOLDEN=write python -m pytest tests/cli/test_golden.py``.
"""

from __future__ import annotations

import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from sample_plans import sample_manifest, sample_plan
from typer.testing import CliRunner

import trt_kvcache
from trt_kvcache.cli.app import app
from trt_kvcache.engine.doctor import BackendStatus, Diagnosis, PackageStatus, RouteStatus
from trt_kvcache.engine.inspect import EngineReport
from trt_kvcache.files import FileIdentity
from trt_kvcache.importer.plan import Route
from trt_kvcache.verify import OutputDifference, VerifyReport, VerifyStep

GOLDEN = Path(__file__).parent / "golden"
LAYERS = 28
COMMANDS = {
    "plan": "plan model.onnx --max-batch 4",
    "verify": "verify model.onnx",
    "build": "build model.onnx -o my-engine/model.engine",
    "inspect": "inspect model.engine",
    "plugins": "plugins model.engine",
    "doctor": "doctor",
}


def report() -> VerifyReport:
    names = ["logits", *(f"updated_{kind}_cache.{n}" for n in range(LAYERS) for kind in ("key", "value"))]
    outputs = tuple(
        OutputDifference(
            name, "logits" if cut else "cache", "float16", 1e-3 * cut, 2e-4 * cut, 0.02, None, None, not cut, 0, True
        )
        for name in names
        for cut in [name == "logits"]
    )
    steps = (VerifyStep("decode", 5, (0, 5), (5, 10), (16,), (), 2e-4),) * 4
    return VerifyReport("model.onnx", True, "ONNX Runtime 1.32.0", "ONNX Runtime 1.32.0", False, 1e4, outputs, steps)


def diagnosis() -> Diagnosis:
    packages = (
        PackageStatus("onnxruntime", "1.32.0", "`verify`, and decoding on the CPU"),
        PackageStatus("tokenizers", None, "prompts as text"),
    )
    backends = (
        BackendStatus("tensorrt-rtx", "1.7.1.116", True, "", True, True, True),
        BackendStatus("tensorrt", None, False, "not installed", False, False, False),
    )
    routes = (
        RouteStatus(Route.NATIVE, "linear", True, "TensorRT's own layer, in tensorrt-rtx"),
        RouteStatus(Route.PLUGIN, "circular", False, "needs TensorRT, whose package is not installed here"),
    )
    return Diagnosis(
        "0.1.0", "3.12.1", "Linux", packages, backends, None, (), "no NVIDIA driver is installed", routes,
        ("pip install tokenizers: prompts as text",),
    )  # fmt: skip


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder with a model and an engine of 28 layers, of which plans and reports are known."""
    monkeypatch.chdir(tmp_path)
    for name in ("model.onnx", "model.engine"):
        Path(name).touch()
    plan = sample_plan(LAYERS)
    engine = FileIdentity("model.engine", 3 << 30, "5a" * 32)
    manifest = replace(sample_manifest(plan, engine), proof=FileIdentity("model.engine.proof", 1 << 20, "a5" * 32))
    answers: dict[str, Any] = {
        "plan_model": plan,
        "verify_model": report(),
        "build_engine": manifest,
        "inspect_engine": EngineReport("model.engine", manifest, None, "no NVIDIA driver is installed"),
        "load_manifest": manifest,
        "diagnose": diagnosis(),
    }
    for name, answer in answers.items():
        monkeypatch.setattr(trt_kvcache, name, lambda *_, _answer=answer, **__: _answer)


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize("name", COMMANDS)
@pytest.mark.usefixtures("made")
def test_answers_are_the_golden_ones(name: str, width: int) -> None:
    result = CliRunner(env={"COLUMNS": str(width)}).invoke(app, COMMANDS[name].split())
    assert (result.exit_code, result.stderr) == (0, ""), result.exception
    lines = [re.sub(r"built in [\d.]+ s", "built in T s", line.rstrip()) for line in result.stdout.splitlines()]
    assert max(map(len, lines)) <= width
    assert len(lines) <= (20 if name != "doctor" else 40)
    text = "".join(f"{line}\n" for line in lines)
    file = GOLDEN / f"{name}-{width}.txt"
    if os.environ.get("GOLDEN") == "write":
        file.parent.mkdir(exist_ok=True)
        file.write_text(text, encoding="utf-8", newline="\n")
    assert file.read_text(encoding="utf-8") == text


@pytest.mark.parametrize("name", ["plan", "verify", "inspect"])
@pytest.mark.usefixtures("made")
def test_a_page_is_written_beside_the_answer(name: str) -> None:
    result = CliRunner(env={"COLUMNS": "80"}).invoke(app, [*COMMANDS[name].split(), "--html", "page.html"])
    assert (result.exit_code, result.stderr) == (0, ""), result.exception
    assert result.stdout.splitlines()[-1] == (GOLDEN / f"{name}-80.txt").read_text(encoding="utf-8").splitlines()[-1]
    text = Path("page.html").read_text(encoding="utf-8").replace("<wbr>", "")
    assert text.startswith("<!doctype html>")
    assert "key_cache.0..27" in text

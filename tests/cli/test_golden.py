"""Answers as they stand at 80 and at 120 columns, in ``golden/``.

To write them anew, and look at the difference: ``GOLDEN=write python -m pytest tests/cli/test_golden.py``.
"""

import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from commands import invoke
from sample_plans import sample_manifest, sample_plan, with_contract
from typer.testing import CliRunner

import trt_kvcache
from trt_kvcache.cli.app import app
from trt_kvcache.compare.verify_report import Quality, Station, VerifyReport
from trt_kvcache.engine import backend
from trt_kvcache.engine.diagnosis import BackendStatus, Diagnosis, PackageStatus, RouteStatus
from trt_kvcache.engine.inspection import EngineReport
from trt_kvcache.files import FileIdentity
from trt_kvcache.importer.cache_plan import AttentionKind, CachePlan, InterfaceChange, Route, StateUpdate

GOLDEN = Path(__file__).parent / "golden"
LAYERS = 28
COMMANDS = {
    "plan": "plan model.onnx --max-batch 4",
    "plan-all": "plan model.onnx --max-batch 4 --all --bandwidth 300",
    "odd": "plan odd.onnx --max-batch 4",
    "odd-all": "plan odd.onnx --max-batch 4 --all",
    "verify": "verify model.onnx",
    "build": "build model.onnx -o my-engine/model.engine",
    "inspect": "inspect model.engine --bandwidth H100",
    "plugins": "plugins model.engine",
    "doctor": "doctor",
}


def odd_plan() -> CachePlan:
    """28 layers of all that can be said: kinds of caches with long names, states, changes, notes without end."""
    plan = sample_plan(28)
    prefix = "model/decoder/transformer/block_sparse_mixture/"
    caches = [replace(c, past=prefix + c.past, reason=f"reason {at % 5} " * 9) for at, c in enumerate(plan.caches)]
    caches[0] = replace(with_contract(caches[0]), route=Route.FUNCTIONAL)
    caches[2] = replace(caches[2], idiom="ScatterND")
    nodes = [
        replace(a, kind=list(AttentionKind)[at % 3], reason=f"why {at % 4}", value_head_size=32 * (1 + at % 2))
        for at, a in enumerate(plan.attention)
    ]
    changes = (
        InterfaceChange("input", "attention_mask [B, P + S]", "", "masks follow from lengths"),
        *(InterfaceChange("input", f"past.{i} [B, 2, P, 16]", f"past.{i} [B, 2, L, 16]", "a buffer") for i in range(2)),
        InterfaceChange("input", "", "write_indices [B]", "tokens before the step"),
        InterfaceChange("output", "count []", "", "the caller counts"),
    )
    states = (StateUpdate("conv.0", "new_conv.0", "float16", ("batch", 64, 4), "replaced whole"),)
    notes = tuple(f"note {number} of many, with words that fill more than one line " * 3 for number in range(9))
    return replace(
        plan,
        caches=tuple(caches),
        attention=tuple(nodes),
        states=states,
        notes=notes,
        changes=changes,
        inlined=("Function",),
    )


def report() -> VerifyReport:
    ort = "ONNX Runtime 1.32.0"
    stations = (
        Station("rewritten", f"{ort}, float32", "the model as exported", 22, 3.4e-6, 5e-5, 1.0),
        Station("quantized", f"{ort}, float32", "the rewritten model with rounded rows", 22, 4.1e-7, 5e-5, 1.0),
        Station("session", f"{ort}, CPU", "the model as exported", 22, 2.1e-3, 7.8e-3, 1.0),
        Station("network", note="not compared: TensorRT for RTX is not installed; run: pip install 'trt-kvcache[rtx]'"),
    )
    quality = Quality("int8", 238, 0.996, 0.0023, 0.0065)
    return VerifyReport("model.onnx", True, 3, 279, 96, f"{ort}, float32", stations, ("a note",), quality)


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
    """A folder with a model and an engine of 28 layers, of which plans and reports are known; there is a GPU."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(backend, "driver_present", lambda: True)
    for name in ("model.onnx", "odd.onnx", "model.engine"):
        Path(name).touch()
    plan = replace(sample_plan(LAYERS), weights=600 << 20)
    engine = FileIdentity("model.engine", 3 << 30, "5a" * 32)
    manifest = replace(sample_manifest(plan, engine), proof=FileIdentity("model.engine.proof", 1 << 20, "a5" * 32))
    monkeypatch.setattr(trt_kvcache, "plan_model", lambda path, *_: odd_plan() if path.stem == "odd" else plan)
    answers: dict[str, Any] = {
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
    assert max(len(line) for line in lines if not line.startswith("next ")) <= width
    assert len(lines) <= {"doctor": 40, "plan-all": 66, "odd-all": 200}.get(name, 20)
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
    assert ("rewritten" if name == "verify" else "key_cache.0..27") in text


@pytest.mark.usefixtures("made")
def test_a_bandwidth_that_is_none_is_refused() -> None:
    result = invoke("plan", "model.onnx", "--bandwidth", "fast", code=None)
    assert (result.exit_code, result.stdout) == (1, "")
    assert "--bandwidth 'fast' is neither a number of GB/s such as 3350 nor one of H200" in result.stderr

"""`build` records a proof beside the engine, or says why there is none."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from blake3 import blake3
from decoders import DecoderConfig, write_decoder

from trt_kvcache import BuildOptions, build_engine, load_manifest
from trt_kvcache.engine import recording
from trt_kvcache.engine.build import ProgressEvent
from trt_kvcache.engine.manifest import proof_path
from trt_kvcache.errors import OptionError, OutputError, UnsupportedModelError
from trt_kvcache.proof.file import load_proof

MODELS = Path(__file__).parents[1] / "models"
SIZES = {"max_batch": 4, "max_chunk": 8}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_decoder(tmp_path / "model.onnx", DecoderConfig())


@pytest.mark.slow
def test_a_proof_lies_beside_the_engine(model: Path) -> None:
    engine = model.with_name("model.engine")
    events: list[ProgressEvent] = []
    manifest = build_engine(model, engine, build=BuildOptions(**SIZES), progress=events.append)
    content = proof_path(engine).read_bytes()
    assert manifest.proof is not None
    assert (manifest.proof.name, manifest.proof.size) == ("model.engine.proof", len(content))
    assert manifest.proof.blake3 == blake3(content).hexdigest()
    assert len(content) < 1 << 20
    proof = load_proof(load_manifest(engine), engine)
    assert proof.facts.recorded_on.startswith("ONNX Runtime")
    assert 5 <= proof.facts.steps <= 24
    assert manifest.warnings == ()
    assert [e.finished for e in events if e.phase == recording.PHASE] == [False, True]
    assert "proof" in json.loads((engine.parent / "model.engine.json").read_text())


@pytest.mark.slow
def test_off_and_a_number_of_steps(model: Path) -> None:
    engine = model.with_name("model.engine")
    manifest = build_engine(model, engine, build=BuildOptions(proof="off"))
    assert manifest.proof is None
    assert not proof_path(engine).exists()
    manifest = build_engine(model, engine, build=BuildOptions(proof=4))
    assert load_proof(manifest, engine).facts.steps == 4


@pytest.mark.slow
def test_auto_leaves_out_what_takes_too_long_and_shows_the_estimate(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recording, "_BUDGET", 1e-9)
    manifest = build_engine(model, model.with_name("model.engine"))
    assert manifest.proof is None
    (note,) = manifest.warnings
    assert "take about 0 s here, more than 0; --proof 5 records them all the same" in note


@pytest.mark.slow
def test_auto_ends_a_recording_that_takes_too_long(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recording, "_START", 0.01)
    scratch = model.parent / "scratch"
    scratch.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(scratch))
    manifest = build_engine(model, model.with_name("model.engine"))
    assert manifest.proof is None
    assert "the original took more than 0" in manifest.warnings[0]
    assert not list(scratch.iterdir())


@pytest.mark.parametrize("beside", [True, False], ids=["beside TensorRT", "before TensorRT"])
def test_an_interrupt_ends_the_recording(model: Path, monkeypatch: pytest.MonkeyPatch, beside: bool) -> None:
    monkeypatch.setattr(recording, "build_memory", lambda _: 0 if beside else 1 << 60)
    scratch = model.parent / "scratch"
    scratch.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(scratch))

    def recorders() -> list[psutil.Process]:
        return [p for p in psutil.Process().children() if "trt_kvcache.proof.recorder" in p.cmdline()]

    def interrupt() -> None:
        while not recorders():
            time.sleep(0.01)
        time.sleep(0.5)  # the caller listens
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        build_engine(model, model.with_name("model.engine"))
    thread.join()
    assert not recorders()
    assert not list(scratch.iterdir())
    assert {p.name for p in model.parent.iterdir()} == {"model.onnx", "scratch"}


@pytest.mark.slow
def test_no_memory(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answer = recording.Answer(b"", "verification takes 9.0 GB of memory", "OptionError")
    monkeypatch.setattr(recording.Recording, "_ask", lambda *_: answer)
    manifest = build_engine(model, model.with_name("model.engine"))
    assert manifest.warnings == ("the engine has no proof: verification takes 9.0 GB of memory",)
    with pytest.raises(OptionError, match=r"the engine has no proof: verification takes 9\.0 GB"):
        build_engine(model, model.with_name("other.engine"), build=BuildOptions(proof=5))
    assert not list(model.parent.glob("other*"))


@pytest.mark.slow
def test_a_model_that_no_session_runs_has_no_proof(tmp_path: Path) -> None:
    source = MODELS / "plain-torch" / "index_copy_dynamo_op18" / "model.onnx"
    manifest = build_engine(source, tmp_path / "model.engine")
    assert manifest.proof is None
    assert "the engine has no proof: no output has the role 'logits'" in manifest.warnings[0]
    with pytest.raises(UnsupportedModelError, match="the engine has no proof"):
        build_engine(source, tmp_path / "other.engine", build=BuildOptions(proof=5))


def test_a_name_that_cannot_be_written(model: Path) -> None:
    (model.parent / "model.engine.proof").mkdir()
    with pytest.raises(OutputError, match="a directory"):
        build_engine(model, model.with_name("model.engine"))


@pytest.mark.parametrize("proof", ["on", 0, -1, 1000, 2.5, True, None, [5]])
def test_other_values_are_refused(proof: Any) -> None:
    with pytest.raises(OptionError, match="it must be auto, off or a number of steps"):
        BuildOptions(proof=proof)


def test_texts_are_numbers_of_steps() -> None:
    assert BuildOptions(proof="12").proof == 12

"""`build` records a proof beside the engine, or says why there is none."""

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from blake3 import blake3
from decoders import DecoderConfig, write_decoder

from trt_kvcache import BuildOptions, build_engine, load_manifest
from trt_kvcache.engine.build_process import STAGES
from trt_kvcache.engine.manifest import proof_path
from trt_kvcache.errors import OptionError, OutputError, UnsupportedModelError
from trt_kvcache.progress import ProgressEvent
from trt_kvcache.runtime.proof_check import load_proof

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
    assert 5 <= len(proof.facts.pieces) <= 30
    assert manifest.warnings == ()
    assert [e.finished for e in events if e.phase == STAGES[3]] == [False, True]
    assert "proof" in json.loads((engine.parent / "model.engine.json").read_text())


@pytest.mark.slow
def test_off_and_a_number_of_steps(model: Path) -> None:
    engine = model.with_name("model.engine")
    manifest = build_engine(model, engine, build=BuildOptions(proof="off"))
    assert manifest.proof is None
    assert not proof_path(engine).exists()
    manifest = build_engine(model, engine, build=BuildOptions(proof=4))
    assert len(load_proof(manifest, engine).facts.pieces) == 4


@pytest.mark.slow
def test_an_interrupt_ends_the_recording(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scratch = model.parent / "scratch"
    scratch.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(scratch))
    seen: list[Path] = []

    def interrupt(event: ProgressEvent) -> None:
        if event.phase == STAGES[3]:
            while not (found := [*scratch.glob("*/trt-kvcache-proof-*")]):
                time.sleep(0.01)
            seen.extend(found)
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        build_engine(model, model.with_name("model.engine"), progress=interrupt)
    assert not [p for p in psutil.Process().children() if "trt_kvcache.engine.builder" in p.cmdline()]
    assert seen
    assert not list(scratch.iterdir())
    assert {p.name for p in model.parent.iterdir()} == {"model.onnx", "scratch"}


@pytest.mark.slow
def test_a_model_that_no_session_runs_has_no_proof(tmp_path: Path) -> None:
    source = MODELS / "plain-torch" / "index_copy_dynamo_op18" / "model.onnx"
    manifest = build_engine(source, tmp_path / "model.engine")
    assert manifest.proof is None
    assert "the engine has no proof: a proof records a decode of texts, but no output" in manifest.warnings[0]
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

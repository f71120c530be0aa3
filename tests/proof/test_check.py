"""An engine is compared with its proof where it is opened first: on the stand-in for TensorRT and a GPU."""

import json
import shutil
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from commands import invoke
from decoders import DecoderConfig, write_decoder
from onnx import helper, numpy_helper
from proof_engines import bind, named, recorded, write_proved
from runtime.engines import edit
from runtime.fake_cuda import Machine
from runtime.fake_tensorrt import MAGIC, VERSIONS, fake_module

from trt_kvcache import DecodeSession
from trt_kvcache.cli.plan_view import manifest_lines
from trt_kvcache.compare.proof import draws_digest
from trt_kvcache.decoding import GpuOptions
from trt_kvcache.engine.build_process import Done, Job
from trt_kvcache.engine.manifest import load_manifest, manifest_path, proof_path
from trt_kvcache.errors import BackendError, ManifestError, OptionError, VerificationError
from trt_kvcache.files import identify
from trt_kvcache.runtime import locate
from trt_kvcache.runtime import proof_check as checking
from trt_kvcache.runtime.locate import with_layer
from trt_kvcache.runtime.proof_check import CheckReport, check_engine_on_gpu
from trt_kvcache.runtime.trt.trt_runner import Bindings


@pytest.fixture
def own(tmp_path: Path) -> Path:
    """A model, so that engines of other tests are elsewhere."""
    return write_decoder(tmp_path / "model.onnx", DecoderConfig())


class Gpu:
    """Opens engines for a session, and counts how often."""

    def __init__(self, machine: Machine | None = None, **faults: Any) -> None:
        self.machine = machine or Machine()
        self.module = fake_module(self.machine, **faults)
        self.opened = 0
        make = self.module.Runtime
        self.module.Runtime = lambda logger: self._counted(make(logger))

    def _counted(self, runtime: Any) -> Any:
        self.opened += 1
        return runtime

    def open(self, engine: Path, kernels: Path | None = None, **options: Any) -> DecodeSession:
        bindings = Bindings(self.module, self.machine.bindings())
        return DecodeSession.open(engine, gpu=GpuOptions(bindings=bindings, kernel_cache=kernels), **options)


def passed_checks(engine: Path) -> list[Path]:
    return list(engine.parent.glob("*.passed_check"))


def wrong_scale(model: onnx.ModelProto) -> None:
    node = next(n for n in model.graph.node if n.op_type == "Attention")
    for attribute in node.attribute:
        if attribute.name == "scale":
            attribute.f = 0.1


def one_row_late(model: onnx.ModelProto) -> None:
    model.graph.initializer.append(numpy_helper.from_array(np.int64(1), "one"))
    node = next(n for n in model.graph.node if n.op_type == "TensorScatter")
    at = list(model.graph.node).index(node)
    model.graph.node.insert(at, helper.make_node("Add", [node.input[2], "one"], ["late"], "late"))
    node.input[2] = "late"


@pytest.mark.slow
def test_the_first_open_replays_and_leaves_a_passed_check(own: Path) -> None:
    engine, gpu = write_proved(own), Gpu()
    with gpu.open(engine) as session:
        assert gpu.opened == 2, "once for the proof, once for the session"
        (text,) = session.generate([[1, 2, 3]])
        assert len(text.tokens) > 3
    (passed,) = passed_checks(engine)
    facts = json.loads(passed.read_text())
    assert facts["engine"] == load_manifest(engine).engine.blake3
    assert 0 <= facts["largest"] < 0.5
    with gpu.open(engine):
        assert gpu.opened == 3, "the passed check counts"
    with gpu.open(engine, check="always"):
        assert gpu.opened == 5
    with gpu.open(engine, check="off"):
        assert gpu.opened == 6
    assert gpu.machine.used == 0


@pytest.mark.parametrize("fault", [wrong_scale, one_row_late])
def test_a_wrong_engine_is_refused_by_output_step_row_and_size(own: Path, fault: Callable[..., None]) -> None:
    engine, gpu = write_proved(own, fault=fault), Gpu()
    with pytest.raises(VerificationError, match=r"output '\S+' at step \d+ \('[\w ]+'\), row \d: ") as refused:
        gpu.open(engine)
    assert "\n" not in str(refused.value)
    assert "differs by" in str(refused.value) or "no token went to" in str(refused.value)
    assert not passed_checks(engine)
    assert gpu.machine.used == 0
    with gpu.open(engine, check="off") as session:
        assert session.vocab


@pytest.mark.slow
def test_a_batch_of_one(own: Path) -> None:
    with Gpu().open(write_proved(own, batch=1), check="always") as session:
        assert session.max_batch == 1


def test_sizes_of_the_session_are_not_those_of_the_replay(own: Path) -> None:
    with Gpu().open(write_proved(own), max_batch=1, max_chunk=2, check="always") as session:
        assert (session.max_batch, session.max_chunk) == (1, 2)


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("what", "gpu"),
    [
        ("gpu was", lambda: Gpu(Machine(capability=(8, 9)))),
        ("backend was", lambda: Gpu(version="1.8.0")),
        ("driver was", lambda: Gpu(Machine(driver=13010))),
    ],
)
def test_a_passed_check_of_another_gpu_driver_or_tensorrt_does_not_count(
    own: Path, what: str, gpu: Callable[[], Gpu]
) -> None:
    engine = write_proved(own)
    Gpu().open(engine).close()
    other = gpu()
    report = checking.check_engine_on_gpu(engine, {"bindings": Bindings(other.module, other.machine.bindings())})
    assert report.passed
    assert what in report.notes[0]
    assert "\n" not in report.notes[0]
    now = other.opened
    other.open(engine).close()
    assert other.opened == now + 1, "the new one counts"


def test_a_damaged_passed_check_is_replaced(own: Path) -> None:
    engine, gpu = write_proved(own), Gpu()
    gpu.open(engine).close()
    (passed,) = passed_checks(engine)
    whole = passed.read_bytes()
    passed.write_bytes(whole[:20])
    gpu.open(engine).close()
    assert passed.read_bytes() == whole


def test_a_folder_that_takes_no_passed_check_is_worth_a_warning(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = write_proved(own)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        Gpu().open(engine, own.parent / "nowhere").close()
    assert any("the passed check was not stored" in str(w.message) for w in said)


def cut(engine: Path) -> None:
    proof_path(engine).write_bytes(proof_path(engine).read_bytes()[:-10])


def edited(engine: Path) -> None:
    content = bytearray(proof_path(engine).read_bytes())
    content[-1] ^= 1
    proof_path(engine).write_bytes(content)


def gone(engine: Path) -> None:
    proof_path(engine).unlink()


def of_another_engine(engine: Path) -> None:
    content = proof_path(engine).read_bytes()
    digest = load_manifest(engine).engine.blake3.encode()
    proof_path(engine).write_bytes(content.replace(digest, b"0" * 64))
    edit(engine, lambda m: named(m, proof_path(engine)))


def no_proof_at_all(engine: Path) -> None:
    proof_path(engine).write_bytes(b"\xff" * 100)
    edit(engine, lambda m: named(m, proof_path(engine)))


def of_another_format(engine: Path) -> None:
    content = proof_path(engine).read_bytes()
    proof_path(engine).write_bytes(content.replace(b"trt_kvcache.proof.4", b"trt_kvcache.proof.3"))
    edit(engine, lambda m: named(m, proof_path(engine)))


def of_another_vocabulary(engine: Path) -> None:
    proof = recorded(engine.with_suffix(".onnx"))
    arrays = {n: np.minimum(a, 99) if n.endswith("tokens") else a[..., :100] for n, a in proof.arrays.items()}
    bind(engine, replace(proof, facts=replace(proof.facts, vocab=100), arrays=arrays))


def of_other_caches(engine: Path) -> None:
    proof = recorded(engine.with_suffix(".onnx"))
    bind(engine, replace(proof, arrays={n: a for n, a in proof.arrays.items() if n.split("/")[0].isdigit()}))


def of_more_rows(engine: Path) -> None:
    proof = recorded(engine.with_suffix(".onnx"))
    rows = (0, 1, 2, 3, 4)
    pieces = tuple(replace(p, rows=rows) if len(p.rows) == 3 else p for p in proof.facts.pieces)
    steps = {n: a for n, a in proof.arrays.items() if n.split("/")[0].isdigit()}
    arrays = {n: np.concatenate([a, a[:2]]) if len(a) == 3 else a for n, a in steps.items()}
    bind(engine, replace(proof, facts=replace(proof.facts, pieces=pieces), arrays=arrays))


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (cut, "it was cut or changed"),
        (edited, "it was cut or changed"),
        (gone, "cannot be read"),
        (of_another_engine, "the proof of another engine"),
        (no_proof_at_all, "not a readable proof file"),
        (of_another_format, "of format trt_kvcache.proof.3"),
        (of_another_vocabulary, "vocabulary of 100 tokens"),
        (of_other_caches, "does not fit the engine"),
        (of_more_rows, "does not fit the engine"),
    ],
)
def test_what_is_no_proof_of_the_engine_is_refused_in_one_line(
    own: Path, damage: Callable[[Path], None], words: str
) -> None:
    engine, gpu = write_proved(own), Gpu()
    damage(engine)
    with pytest.raises(ManifestError, match=words) as refused:
        gpu.open(engine)
    assert "\n" not in str(refused.value)
    assert not passed_checks(engine)
    assert gpu.machine.used == 0


def test_another_numpy_that_draws_other_numbers(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = write_proved(own)
    monkeypatch.setattr("trt_kvcache.runtime.replay.draws_digest", lambda seed: draws_digest(seed + 1))
    with pytest.raises(ManifestError, match="draws other numbers from a seed"):
        Gpu().open(engine)


def test_no_memory_for_the_replay(own: Path) -> None:
    engine = write_proved(own)
    gpu = Gpu(Machine(total=2 << 20))
    with pytest.raises(BackendError, match='^the proof cannot be replayed: .*check="off"') as refused:
        gpu.open(engine)
    assert "\n" not in str(refused.value)
    assert gpu.machine.used == 0
    assert not passed_checks(engine)


def test_an_engine_without_a_proof(own: Path) -> None:
    engine = write_proved(own)
    cases = {
        ("the engine has no proof: 32 steps take 300 s",): "32 steps take 300 s",
        ("something else",): "it was built with --proof off",
    }
    for noted, why in cases.items():
        edit(engine, lambda m, said=noted: replace(m, proof=None, warnings=said))
        with Gpu().open(engine):
            pass
        said = f"{why}; 'build --proof STEPS' records a proof with this number of steps, however long they take"
        with pytest.raises(ManifestError) as refused:
            Gpu().open(engine, check="always")
        assert refused.value.message == f"{engine}: this engine was built without a proof: {said}"
        assert ("proof", f"none: {said}") in manifest_lines(load_manifest(engine))


@pytest.mark.parametrize("check", ["sometimes", None, 1])
def test_other_checks_are_refused(own: Path, check: Any) -> None:
    with pytest.raises(OptionError, match="it must be one of first, always, off"):
        DecodeSession.open(own, check=check)


def test_a_model_on_the_cpu_needs_no_proof(own: Path) -> None:
    with DecodeSession.open(own, check="always") as session:
        assert session.vocab == 256


@pytest.mark.slow
def test_the_command(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = Gpu()
    monkeypatch.setattr("trt_kvcache.runtime.trt.load.load_tensorrt", lambda _: gpu.module)
    monkeypatch.setattr("trt_kvcache.runtime.trt.cuda.cuda_bindings", gpu.machine.bindings)
    right = invoke("check", write_proved(own))
    assert "the engine gives the numbers of its proof: " in right.stdout
    assert "logits" in right.stdout
    wrong = invoke("check", write_proved(own, fault=wrong_scale), "--json", code=1)
    report = json.loads(wrong.stdout)
    assert report["passed"] is False
    assert report["findings"][0]["output"] == "logits"
    assert wrong.stderr.count("\n") == 1
    manifest_path(own.with_suffix(".engine")).unlink()
    lost = invoke("check", own.with_suffix(".engine"), code=None)
    assert (lost.exit_code, lost.stderr.count("\n")) == (1, 1)


# `check --locate` names the layer that goes wrong: on the stand-in, whose engines compute the model with a fault.


def doubled(model: onnx.ModelProto) -> None:
    """The output of the second layer's attention, twice as large."""
    node = [n for n in model.graph.node if n.op_type == "Attention"][1]
    at, name = list(model.graph.node).index(node), node.output[0]
    node.output[0] = "half"
    model.graph.initializer.append(numpy_helper.from_array(np.float32(2), "two"))
    model.graph.node.insert(at + 1, helper.make_node("Mul", ["half", "two"], [name], "doubled"))


def fused_apart(model: onnx.ModelProto) -> None:
    """The same, of an engine that gives nothing of its layers: there it is right."""
    if len(model.graph.output) < 10:
        doubled(model)


@pytest.fixture
def build(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[onnx.ModelProto], None]], None]:
    """Lets `build_with_outputs` write engines of the fake TensorRT with this fault."""

    def with_fault(fault: Callable[[onnx.ModelProto], None]) -> None:
        def run(job: Job, content: Callable[[], bytes]) -> tuple[Done, tuple[str, ...]]:
            model = onnx.load_from_string(content())
            fault(model)
            facts = {
                "profiles": [{n: [r.min, r.opt, r.max] for n, r in p.shapes.items()} for p in job.profiles],
                "aliases": {c.present: c.past for c in job.plan.caches if c.carried and c.in_place},
            }
            path = Path(job.engine)
            path.write_bytes(MAGIC + json.dumps(facts).encode() + b"\n" + model.SerializeToString())
            made = identify(path)
            return Done(VERSIONS["tensorrt-rtx"], made.size, made.blake3), ()

        monkeypatch.setattr(locate, "run_worker", run)

    return with_fault


def bindings() -> Bindings:
    machine = Machine()
    return Bindings(fake_module(machine), machine.bindings())


def refused(engine: Path) -> CheckReport:
    report = check_engine_on_gpu(engine, {"bindings": bindings()})
    assert not report.passed
    return report


def test_the_first_wrong_layer_is_named(own: Path, build: Callable[..., None]) -> None:
    engine = write_proved(own, fault=doubled)
    build(doubled)
    found = with_layer(refused(engine), engine, own, {"bindings": bindings()}).layer
    second = [n.name for n in onnx.load(own).graph.node if n.op_type == "Attention"][1]
    assert f"'{second}' (Attention)" in found
    assert "layers before it agree" in found
    assert "\n" not in found


@pytest.mark.slow
def test_layers_that_are_right_as_outputs(own: Path, build: Callable[..., None]) -> None:
    engine = write_proved(own, fault=fused_apart)
    build(fused_apart)
    found = with_layer(refused(engine), engine, own, {"bindings": bindings()}).layer
    assert found.startswith("none of the ")


@pytest.mark.slow
def test_another_model_is_refused(own: Path, tmp_path: Path) -> None:
    engine = write_proved(own, fault=doubled)
    other = tmp_path / "other"
    other.mkdir()
    write_decoder(other / "model.onnx", DecoderConfig(seed=5))
    with pytest.raises(ManifestError, match="not that of the model from which the engine was built"):
        with_layer(refused(engine), engine, other / "model.onnx")
    shutil.rmtree(other)

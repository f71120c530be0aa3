"""`check --locate` names the layer that goes wrong: on the stand-in, whose engines compute the model with a fault."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from decoders import DecoderConfig, write_decoder
from onnx import helper, numpy_helper
from proof_engines import write_proved
from runtime.fake_cuda import Machine
from runtime.fake_tensorrt import MAGIC, VERSIONS, fake_module

from trt_kvcache import ManifestError
from trt_kvcache.engine import marked
from trt_kvcache.engine.protocol import Done, Job
from trt_kvcache.files import identify
from trt_kvcache.proof.check import CheckReport, check_engine_on_gpu
from trt_kvcache.proof.locate import with_layer
from trt_kvcache.runtime.trt.runner import Bindings


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
    """Lets `build_marked` write engines of the fake TensorRT with this fault."""

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

        monkeypatch.setattr(marked, "run_worker", run)

    return with_fault


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_decoder(tmp_path / "model.onnx", DecoderConfig())


def bindings() -> Bindings:
    machine = Machine()
    return Bindings(fake_module(machine), machine.bindings())


def refused(engine: Path) -> CheckReport:
    report = check_engine_on_gpu(engine, {"bindings": bindings()})
    assert not report.passed
    return report


def test_the_first_wrong_layer_is_named(model: Path, build: Callable[..., None]) -> None:
    engine = write_proved(model, fault=doubled)
    build(doubled)
    found = with_layer(refused(engine), engine, model, {"bindings": bindings()}).layer
    second = [n.name for n in onnx.load(model).graph.node if n.op_type == "Attention"][1]
    assert f"'{second}' (Attention)" in found
    assert "layers before it agree" in found
    assert "\n" not in found


@pytest.mark.slow
def test_layers_that_are_right_as_outputs(model: Path, build: Callable[..., None]) -> None:
    engine = write_proved(model, fault=fused_apart)
    build(fused_apart)
    found = with_layer(refused(engine), engine, model, {"bindings": bindings()}).layer
    assert found.startswith("none of the ")


@pytest.mark.slow
def test_another_model_is_refused(model: Path, tmp_path: Path) -> None:
    engine = write_proved(model, fault=doubled)
    other = tmp_path / "other"
    other.mkdir()
    write_decoder(other / "model.onnx", DecoderConfig(seed=5))
    with pytest.raises(ManifestError, match="not the model that the engine was built from"):
        with_layer(refused(engine), engine, other / "model.onnx")
    shutil.rmtree(other)

"""MoE and QMoE back in place on the CPU: the same numbers as what TensorRT gets, and only where it is right."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from importer.test_experts import decoder
from mixtures import Mixture
from onnx import ModelProto

from trt_kvcache.importer import import_model
from trt_kvcache.importer.plan import PlanOptions
from trt_kvcache.runtime.ort import runner as ort_runner
from trt_kvcache.runtime.ort.experts import keep_experts
from trt_kvcache.runtime.ort.runner import OnnxRuntimeRunner
from trt_kvcache.runtime.runner import StepBatch

GENAI = Path(__file__).parents[1] / "models" / "ort-genai" / "gptoss_cpu_int4"
SMALL = Mixture(experts=6, k=2, hidden=64, inner=32)


def operators(path: Path, options: PlanOptions | None = None) -> Counter[str]:
    imported = import_model(path, options or PlanOptions())
    return Counter(node.op_type for node in keep_experts(imported.model, imported.source.proto).graph.node)


def lowered(path: Path, options: PlanOptions | None = None) -> OnnxRuntimeRunner:
    """A runner of the rewritten model as it is."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ort_runner, "keep_experts", lambda model, source: model)
        return OnnxRuntimeRunner(path, options, max_batch=2)


def agree(runner: OnnxRuntimeRunner, reference: OnnxRuntimeRunner) -> None:
    """Steps of several tokens and of one; the logits must be the same."""
    random, written = np.random.default_rng(0), 0
    for length in (5, 1, 3, 1):
        tokens = random.integers(0, runner.vocab, (2, length))
        batch = StepBatch(0, tokens, np.array([written, written]), keep=length)
        wanted = reference.step(batch)
        np.testing.assert_allclose(runner.step(batch), wanted, atol=2e-5 * float(np.abs(wanted).max()))
        written += length


@pytest.mark.few(2)
@pytest.mark.parametrize(
    "mixture",
    [
        SMALL,
        Mixture(experts=6, hidden=64, inner=32, activation="silu", bias=False),
        Mixture(experts=6, hidden=64, inner=32, bits=4, zeros=True),
        Mixture(experts=6, hidden=64, inner=32, bits=8),
        Mixture(experts=6, hidden=64, inner=32, bits=8, block=0),
    ],
    ids=["swiglu", "silu", "int4", "int8", "int8 by row"],
)
def test_the_same_numbers(tmp_path: Path, mixture: Mixture) -> None:
    path = decoder(tmp_path, mixture)
    found = operators(path)
    assert found[mixture.op] == 2
    assert not found.keys() & {"TopK", "CumSum", "ScatterElements"}  # of sorting tokens by expert
    agree(OnnxRuntimeRunner(path, max_batch=2), lowered(path))


def test_an_export_by_onnxruntime_genai() -> None:
    options = PlanOptions(capacity=64)
    assert operators(GENAI, options)["QMoE"] == 2
    agree(OnnxRuntimeRunner(GENAI, options, max_batch=2), lowered(GENAI, options))


def test_float16_stays(tmp_path: Path) -> None:
    assert not operators(decoder(tmp_path, SMALL, "float16"))["MoE"]


def test_shares_that_do_not_sum_to_one_stay(tmp_path: Path) -> None:
    assert not operators(decoder(tmp_path, replace(SMALL, normalized=False)))["MoE"]


@pytest.mark.few(2)
@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize("name", ["embed_tokens", "nowhere"])
def test_what_is_made_of_something_else_stays(tmp_path: Path, place: int, name: str) -> None:
    """A source whose first layer is another one than was rewritten."""
    imported = import_model(decoder(tmp_path, SMALL), PlanOptions())
    other = ModelProto()
    other.CopyFrom(imported.source.proto)
    node = next(n for n in other.graph.node if n.op_type == "MoE")
    node.input[place] = name
    kept = [n.name for n in keep_experts(imported.model, other).graph.node if n.op_type == "MoE"]
    assert kept == ["layers.1.experts"]


def test_weights_that_changed_stay(tmp_path: Path) -> None:
    imported = import_model(decoder(tmp_path, SMALL), PlanOptions())
    node = next(n for n in imported.source.proto.graph.node if n.op_type == "MoE")
    changed = ModelProto()
    changed.CopyFrom(imported.model)
    tensor = next(t for t in changed.graph.initializer if t.name == node.input[3])
    tensor.CopyFrom(onnx.numpy_helper.from_array(np.zeros((1, 1), np.float32), tensor.name))
    kept = [n.name for n in keep_experts(changed, imported.source.proto).graph.node if n.op_type == "MoE"]
    assert kept == ["layers.1.experts"]

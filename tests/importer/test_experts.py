"""Decoders with ONNX Runtime's mixtures of experts end to end: comparison, engine, and where their weights go."""

import os
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from decoders import DecoderConfig, make_decoder
from mixtures import DOMAIN, Mixture
from onnx import TensorProto, helper, numpy_helper

from trt_kvcache import (
    PlanOptions,
    build_engine,
    plan_model,
    rewrite_model,
    verify_model,
)
from trt_kvcache.importer import import_model
from trt_kvcache.importer.steps.sessions import ROUNDING, exact_experts

GENAI = Path(__file__).parents[1] / "models" / "ort-genai" / "gptoss_cpu_int4"
OPTIONS = PlanOptions(capacity=64)


def decoder(folder: Path, mixture: Mixture, dtype: str = "float32", layers: int = 2) -> Path:
    """A decoder with canonical caches, and with mixtures in the place of its MLPs."""
    model = make_decoder(DecoderConfig(hidden=mixture.hidden, capacity=32, layers=layers, dtype=dtype))
    rng = np.random.default_rng(0)
    kind = np.float16 if dtype == "float16" else np.float32
    for i in range(layers):
        alone = replace(mixture, seed=i, dtype=kind).model()
        node = alone.graph.node[0]
        names = {}
        for tensor in alone.graph.initializer:
            names[tensor.name] = tensor.name = f"layers.{i}.{tensor.name}"
            model.graph.initializer.append(tensor)
        router = (rng.standard_normal((mixture.hidden, mixture.experts)) * 0.3).astype(kind)
        model.graph.initializer.append(numpy_helper.from_array(router, f"layers.{i}.router"))
        model.graph.initializer.append(numpy_helper.from_array(np.array([-1, mixture.experts]), f"layers.{i}.shape"))
        names |= {"x": f"layers.{i}.mlp_norm", "logits": f"layers.{i}.logits"}
        added = [
            helper.make_node("MatMul", [names["x"], f"layers.{i}.router"], [f"layers.{i}.scores"]),
            helper.make_node("Reshape", [f"layers.{i}.scores", f"layers.{i}.shape"], [names["logits"]]),
        ]
        node.input[:] = [names.get(name, name) for name in node.input]
        node.output[0] = f"layers.{i}.down"
        node.name = f"layers.{i}.experts"
        nodes = list(model.graph.node)
        place = next(k for k, n in enumerate(nodes) if n.output[0] == node.output[0])
        del model.graph.node[:]
        model.graph.node.extend([*nodes[:place], *added, node, *nodes[place + 1 :]])
    model.opset_import.add(domain=DOMAIN, version=1)
    path = folder / "model.onnx"
    onnx.save(model, path)
    return path


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("bits", [0, 4, 8])
def test_a_model_with_canonical_caches(bits: int, dtype: str, tmp_path: Path) -> None:
    path = decoder(tmp_path, Mixture(bits=bits), dtype)
    operators = Counter(node.op_type for node in import_model(path).model.graph.node)
    assert not operators.keys() & {"MoE", "QMoE"}
    assert operators["DequantizeLinear"] == (4 if bits else 0)
    report = verify_model(path)
    report.check()
    assert any("experts in QMoE" in note for note in report.notes) == bool(bits)
    build_engine(path, tmp_path / "model.engine")


@pytest.mark.slow
def test_onnxruntime_genai(tmp_path: Path) -> None:
    """Its gpt-oss in 4 bits: QMoE beside MatMulNBits; weights are referred to where they are."""
    model = import_model(GENAI, OPTIONS).model
    source = onnx.load(GENAI / "model.onnx", load_external_data=False)
    places = {tuple(e.value for e in t.external_data) for t in source.graph.initializer if t.external_data}
    views = {t.name: t for t in model.graph.initializer if t.external_data}
    assert {tuple(e.value for e in t.external_data) for t in views.values()} <= places
    experts = [t for name, t in views.items() if "experts" in name and "qweight" in name]
    assert len(experts) == 4
    assert all(t.data_type == TensorProto.UINT4 and len(t.dims) == 3 for t in experts)

    rewrite_model(GENAI, tmp_path / "out.onnx", OPTIONS)
    onnx.checker.check_model(str(tmp_path / "out.onnx"), full_check=True)
    plan = plan_model(GENAI, OPTIONS)
    assert {c.idiom for c in plan.caches} == {"GroupQueryAttention"}
    verify_model(GENAI, OPTIONS).check()
    manifest = build_engine(GENAI, tmp_path / "model.engine", options=OPTIONS)
    assert len(manifest.aliases) == 4


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_shares_that_are_not_normalized(dtype: str, tmp_path: Path) -> None:
    """ONNX Runtime before 1.32 makes products of zero of these in float16; the model as exported runs in float32."""
    verify_model(decoder(tmp_path, Mixture(normalized=False), dtype)).check()


@pytest.mark.parametrize("before", [None, "int8"])
def test_sessions_of_several_threads_find_the_environment_as_it_was(
    before: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one that came first may leave first."""
    monkeypatch.delenv(ROUNDING, raising=False)
    if before is not None:
        monkeypatch.setenv(ROUNDING, before)
    first, second = exact_experts(), exact_experts()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert os.environ[ROUNDING] == "fp32"
    second.__exit__(None, None, None)
    assert os.environ.get(ROUNDING) == before

"""A plan lists caches as the graph lists its inputs, whatever order their updates are computed in."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest

from trt_kvcache.importer import plan_model
from trt_kvcache.importer.plan import PlanOptions

MODELS = Path(__file__).parents[1] / "models"
SOURCES = {
    "optimum/llama": 32,  # keys are rotated, so their updates lie deeper in the graph than those of the values
    "transformers/llama_dyn": 32,
    "ort-genai/llama_cpu_fp32": 32,
    "mobius/llama_static_f32": None,
    "torch/llama_static_wrap_op20": None,
}


@pytest.mark.few(2)
@pytest.mark.parametrize("source", SOURCES)
def test_caches_come_in_the_order_of_the_inputs(source: str) -> None:
    path = MODELS / source / "model.onnx"
    inputs = [v.name for v in onnx.load(path, load_external_data=False).graph.input]
    caches = [cache.past for cache in plan_model(path, PlanOptions(capacity=SOURCES[source])).caches]
    assert len(caches) == 4
    assert caches == [name for name in inputs if name in caches]

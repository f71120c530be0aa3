"""Fresh exports by mobius-onnx, end to end: planned, verified, built. Skipped where mobius-onnx is not installed."""

from __future__ import annotations

from importlib.util import find_spec

import mobius_export
import pytest

from trt_kvcache import (
    AttentionKind,
    BuildOptions,
    PhysicalLayout,
    PlanOptions,
    Route,
    build_engine,
    plan_model,
    verify_model,
)
from trt_kvcache.errors import UnsupportedModelError

pytestmark = [
    pytest.mark.skipif(
        find_spec("mobius") is None, reason="mobius-onnx is not installed: pip install -e '.[exporters]'"
    ),
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),  # mobius and torch warn of their own dependencies
]


@pytest.mark.parametrize("dtype", ["FLOAT", "FLOAT16", "BFLOAT16"])
@pytest.mark.parametrize("name", mobius_export.ARCHITECTURES)
def test_static_cache_export(name, dtype, tmp_path):
    path = mobius_export.export(name, tmp_path, dtype)
    plan = plan_model(path)
    assert len(plan.caches) == 4
    assert {c.route for c in plan.caches} == {Route.NATIVE}
    assert {c.layout for c in plan.caches} == {PhysicalLayout.HEADS_MAJOR}
    assert len(plan.masks) == len(plan.spans) == 1, "all layers share one mask and one span"
    assert {a.kind for a in plan.attention} == {AttentionKind.DECOMPOSED if dtype == "FLOAT" else AttentionKind.FUSED}
    verify_model(path).check()
    manifest = build_engine(path, tmp_path / "model.engine", build=BuildOptions(max_batch=2, max_chunk=16))
    assert manifest.aliases == {c.present: c.past for c in plan.caches}


@pytest.mark.parametrize(("provider", "dtype"), [("default", "FLOAT16"), ("cpu", "FLOAT"), ("trt-rtx", "FLOAT16")])
def test_layers_that_share_caches(provider, dtype, tmp_path):
    path = mobius_export.export_gemma4(tmp_path, provider, dtype)
    options = PlanOptions(capacity=40)
    plan = plan_model(path, options)
    assert [c.idiom for c in plan.caches] == 4 * ["Attention" if provider == "default" else "GroupQueryAttention"]
    assert {len(c.readers) for c in plan.caches} == {2}
    assert len(plan.masks) == 2
    verify_model(path, options).check()
    manifest = build_engine(path, tmp_path / "model.engine", options=options, build=BuildOptions(max_batch=2))
    assert manifest.aliases == {c.present: c.past for c in plan.caches}


def test_an_export_whose_longest_sequence_chooses_the_factors_of_all_is_refused(tmp_path):
    with pytest.raises(UnsupportedModelError, match="depends on the other sequences.*LongRoPE"):
        plan_model(mobius_export.export("dependent", tmp_path))

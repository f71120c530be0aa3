"""The stored decoders of real exporters, end to end: planned, verified, built with one cache layer per cache, run."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import onnx
import pytest

from trt_kvcache import (
    BuildOptions,
    DecodeSession,
    GenerationConfig,
    OptionError,
    PlanOptions,
    Role,
    Route,
    UnsupportedModelError,
    VerifyOptions,
    build_engine,
    plan_model,
    verify_model,
)
from trt_kvcache.importer import import_model

MODELS = Path(__file__).parents[1] / "models"
CAPACITY = 64

# by folder: what the plan calls the idiom
IDIOMS = {
    "mobius/llama_dynamic_f16_onnxstd": "Attention",
    "mobius/llama_dynamic_f32": "Attention",
    "mobius/llama_static_f16_onnxstd": "TensorScatter",
    "mobius/llama_static_f32": "TensorScatter",
    "optimum/llama": "Concat",
    "optimum/llama_fp16": "Concat",
    "ort-genai/gptoss_cpu_int4": "GroupQueryAttention",
    "ort-genai/llama_cpu_fp32": "GroupQueryAttention",
    "ort-genai/llama_cpu_int4": "GroupQueryAttention",
    "ort-genai/llama_trtrtx_fp16": "GroupQueryAttention",
    "ort-genai/qwen3vl_cpu_fp32": "GroupQueryAttention",
    "plain-torch/bshd_index_put_dynamo_op18": "ScatterND",
    "plain-torch/index_copy_dynamo_op18": "ScatterND",
    "plain-torch/index_copy_legacy_op17": "ScatterElements",
    "plain-torch/index_put_batch_dynamo_op18": "ScatterND",
    "plain-torch/mod_index_put_dynamo_op18": "ScatterND",
    "plain-torch/onehot_mul_dynamo_op24": "one-hot",
    "plain-torch/scatter_dynamo_op18": "ScatterElements",
    "plain-torch/slice_assign_dynamo_op18": "ScatterND",
    "plain-torch/where_dynamo_op18": "Where",
    "torch/llama_dynamic_float16_eager": "Concat",
    "torch/llama_dynamic_float16_sdpa": "Concat",
    "torch/llama_dynamic_float16_sdpa_op24": "Concat",
    "torch/llama_static_wrap_op20": "ScatterND",
    "torch/llama_static_wrap_op24": "ScatterND",
    "torch/qwen25vl_dynamic_float16_eager": "Concat",
    "transformers/llama_dyn": "Concat",
    "transformers/llama_dyn_op24": "Concat",
    "transformers/llama_static": "ScatterND",
    "transformers/llama_static_op24": "ScatterND",
}
REFUSED = {
    "plain-torch/narrow_copy_legacy_op17": "the exporter has lost the write",
    "plain-torch/roll_dynamo_op18": "moves its rows",
}
DECODERS = [name for name in IDIOMS if not name.startswith("plain-torch/")]  # the others are attention blocks


def _path(name: str) -> Path:
    return MODELS / name / "model.onnx"


def test_every_stored_model_is_covered():
    stored = {str(p.parent.relative_to(MODELS)) for p in MODELS.glob("*/*/model.onnx")}
    assert stored == IDIOMS.keys() | REFUSED.keys()


@pytest.mark.parametrize("name", IDIOMS)
def test_the_plan_names_the_idiom_and_every_cache_is_native(name):
    plan = plan_model(_path(name), PlanOptions(capacity=CAPACITY))
    assert {c.idiom for c in plan.caches} == {IDIOMS[name]}
    assert {c.route for c in plan.caches} == {Route.NATIVE}
    assert len(plan.caches) == (2 if name.startswith("plain-torch/") else 4)
    assert len(plan.attention) == len(plan.caches) // 2
    assert all(len(a.caches) == 2 for a in plan.attention)


@pytest.mark.few(6)
@pytest.mark.parametrize("name", IDIOMS)
def test_each_cache_is_read_once_for_all_heads_of_its_group(name):
    model = import_model(_path(name), PlanOptions(capacity=CAPACITY)).model
    operators = Counter(node.op_type for node in model.graph.node)
    attention = operators["Attention"] + operators["Softmax"] - operators["TopK"]  # routers of experts have both
    assert attention == operators["TensorScatter"] // 2
    kept = {"Slice", "Attention", "Shape", "MatMul", "Transpose"}  # the span, attention and its plain form
    presents = {node.output[0] for node in model.graph.node if node.op_type == "TensorScatter"}
    readers = {node.op_type for node in model.graph.node if presents & set(node.input)}
    assert readers <= kept


@pytest.mark.few(6)
@pytest.mark.parametrize("name", [n for n in IDIOMS if IDIOMS[n] != "TensorScatter"])
def test_the_plan_lists_every_input_that_changes(name):
    path = _path(name)
    plan = plan_model(path, PlanOptions(capacity=CAPACITY))
    before = {v.name for v in onnx.load(path, load_external_data=False).graph.input}
    after = {t.name for t in plan.tensors if t.io == "input" and t.role is not Role.SPAN}
    gone = {c.old.split(" ")[0] for c in plan.changes if c.io == "input" and not c.new}
    added = {c.new.split(" ")[0] for c in plan.changes if c.io == "input" and not c.old}
    assert gone == before - after
    assert added == after - before
    assert "write_indices" in added
    assert not {t.name for t in plan.tensors} & {"attention_mask"} or "static" in name


@pytest.mark.parametrize("name", IDIOMS)
def test_the_original_and_the_rewritten_model_agree_over_a_decode(name):
    report = verify_model(_path(name), PlanOptions(capacity=CAPACITY), VerifyOptions(chunks=(5, 3), tokens=24))
    report.check()


@pytest.mark.few(4)
@pytest.mark.parametrize("name", IDIOMS)
def test_tensorrt_builds_one_cache_layer_per_cache(name, tmp_path):
    options = PlanOptions(capacity=CAPACITY)
    plan = plan_model(_path(name), options)
    fixed = any(isinstance(d, int) for c in plan.caches for d in (c.logical_shape[0], c.update_length))
    build = BuildOptions() if fixed else BuildOptions(max_batch=2, max_chunk=8)
    manifest = build_engine(_path(name), tmp_path / "model.engine", options=options, build=build)
    assert manifest.aliases == {c.present: c.past for c in plan.caches}


@pytest.mark.few(8)
@pytest.mark.parametrize("name", DECODERS)
def test_a_session_generates_from_the_model_as_exported(name):
    """Ragged prompts, chunked prefill: the same tokens as each prompt alone."""
    prompts = [list(range(3, 20)), [5, 9, 200], list(range(40, 51))]
    config = GenerationConfig(max_new_tokens=12)
    with DecodeSession.open(str(_path(name)), capacity=CAPACITY, max_chunk=4) as session:
        alone = [session.generate([p], config)[0].tokens for p in prompts]
        together = [r.tokens for r in session.generate(prompts, config)]
    assert together == alone
    assert all(len(t) == 12 and np.all(np.asarray(t) < 256) for t in alone)


@pytest.mark.parametrize("name", REFUSED)
def test_a_dead_end_is_refused_with_its_reason(name):
    with pytest.raises(UnsupportedModelError, match=REFUSED[name]):
        plan_model(_path(name), PlanOptions(capacity=CAPACITY))


def test_a_canonical_model_passes_through_as_it_is():
    """Nothing that normalization could touch differs: the plan has no change, and the interface is the model's."""
    plan = plan_model(_path("mobius/llama_static_f32"))
    assert plan.changes == plan.original == plan.notes == ()


@pytest.mark.parametrize("name", REFUSED)
def test_a_dead_end_is_named_before_the_capacity_is_asked_for(name):
    with pytest.raises(UnsupportedModelError, match=REFUSED[name]):
        plan_model(_path(name))


def test_rotary_tables_bound_the_capacity():
    """What lies behind their end is not defined: ONNX Runtime's operator refuses it."""
    path = _path("ort-genai/llama_cpu_fp32")
    plan_model(path, PlanOptions(capacity=256))
    with pytest.raises(OptionError, match="257, but GroupQueryAttention .* rotary tables of 256 positions"):
        plan_model(path, PlanOptions(capacity=257))

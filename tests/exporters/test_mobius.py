"""Decoders exported by mobius-onnx itself, `--static-cache`; skipped where it is not installed (extra `exporters`)."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from trt_kvcache import BuildOptions, PhysicalLayout, Role, Route, build_engine, plan_model, verify_model

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("mobius") is None, reason="mobius-onnx is not installed"),
]

LLAMA = """
import sys, torch, transformers
torch.manual_seed(0)
config = transformers.LlamaConfig(
    vocab_size=128, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=int(sys.argv[2]), max_position_embeddings=64,
)
transformers.LlamaForCausalLM(config).save_pretrained(sys.argv[1])
"""


@pytest.fixture(scope="module", params=[2, 4], ids=["grouped-query", "multi-head"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int]:
    """A small Llama with random weights, and its number of key heads."""
    folder = tmp_path_factory.mktemp("llama")
    run("-c", LLAMA, str(folder), str(request.param))
    return folder, request.param


def run(*arguments: str) -> None:
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run([sys.executable, *arguments], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(("flag", "dtype"), [("f32", "float"), ("f16", "float16"), ("bf16", "bfloat16")])
def test_planned_verified_and_built(checkpoint: tuple[Path, int], flag: str, dtype: str, tmp_path: Path) -> None:
    source, kv_heads = checkpoint
    arguments = ["build", "--config", str(source), "--static-cache", "--max-seq-len", "48", "--dtype", flag]
    run("-m", "mobius", *arguments, str(tmp_path))
    model = tmp_path / "model.onnx"

    plan = plan_model(model)
    assert [cache.past for cache in plan.caches] == ["key_cache.0", "value_cache.0", "key_cache.1", "value_cache.1"]
    for cache in plan.caches:
        assert (cache.route, cache.layout, cache.dtype) == (Route.NATIVE, PhysicalLayout.HEADS_MAJOR, dtype)
        assert cache.present == f"updated_{cache.past}"
        assert cache.logical_shape == ("batch", 48, kv_heads * 16)
        assert cache.physical_shape == ("batch", kv_heads, 48, 16)
    roles = {tensor.role for tensor in plan.tensors}
    assert {Role.TOKENS, Role.WRITE_INDICES, Role.VALID_LENGTHS, Role.CACHE, Role.SPAN, Role.LOGITS} <= roles
    assert len(plan.masks) == 1

    verify_model(model).check()

    build = BuildOptions(backend="tensorrt-rtx", max_batch=2, max_chunk=8)
    manifest = build_engine(model, tmp_path / "model.engine", build=build)
    assert manifest.aliases == {cache.present: cache.past for cache in plan.caches}
    assert {file.name for file in manifest.model} == {"model.onnx", "model.onnx.data"}

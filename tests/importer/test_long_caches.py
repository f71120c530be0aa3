"""Caches longer than fused attention reaches: measured on TensorRT for RTX 1.7.1, where nothing documents it."""

from __future__ import annotations

from pathlib import Path

import pytest
import trt
from decoders import DecoderConfig, write_decoder

from trt_kvcache.importer import import_model
from trt_kvcache.importer.patch import patch_network
from trt_kvcache.importer.plan import AttentionKind

REACH = 24_576  # keys and head size together


@pytest.mark.parametrize("head_size", [64, 128])
@pytest.mark.parametrize("beyond", [0, 1])
def test_fused_attention_ends_at_48_kib(tmp_path: Path, head_size: int, beyond: int) -> None:
    capacity = REACH - head_size + beyond
    config = DecoderConfig(layers=1, dtype="float16", head_size=head_size, capacity=capacity, positions=64)
    imported = import_model(write_decoder(tmp_path / "model.onnx", config))
    ranges = {"batch": (1, 1, 1), "sequence_len": (1, 32, 64), "attention_span": (1, capacity // 2, capacity)}

    (attention,) = imported.plan.attention
    assert attention.kind is (AttentionKind.DECOMPOSED if beyond else AttentionKind.FUSED)
    plain = trt.build(imported.model, ranges)
    if beyond:
        assert plain.stage == "build"
        assert "not supported by a dedicated kernel" in plain.words
        assert f"more than {REACH - head_size} keys have no fused kernel" in attention.reason
    else:
        assert plain.stage == "built"
    import tensorrt_rtx

    patched = trt.build(imported.model, ranges, lambda network: patch_network(network, imported.plan, tensorrt_rtx))
    assert patched.stage == "built"

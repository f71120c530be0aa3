"""Caches longer than the fused kernel for one query reaches: measured on TensorRT for RTX 1.7.1, documented nowhere."""

from pathlib import Path

import pytest
import tensorrt_rtx
import trt
from decoders import DecoderConfig, write_decoder

from trt_kvcache.engine.builder import patch_network
from trt_kvcache.importer import import_model
from trt_kvcache.importer.cache_plan import AttentionKind

REACH = 24_576  # keys and head size together
DECODE, PREFILL = (1, 1, 1), (1, 32, 64)


@pytest.mark.slow
@pytest.mark.parametrize("head_size", [64, 128])
@pytest.mark.parametrize("beyond", [0, 1])
def test_fused_decoding_ends_at_48_kib(tmp_path: Path, head_size: int, beyond: int) -> None:
    capacity = REACH - head_size + beyond
    config = DecoderConfig(layers=1, dtype="float16", head_size=head_size, capacity=capacity, positions=64)
    imported = import_model(write_decoder(tmp_path / "model.onnx", config))

    def ranges(queries: tuple[int, int, int]) -> dict[str, tuple[int, int, int]]:
        return {"batch": (1, 1, 1), "sequence_len": queries, "attention_span": (1, capacity // 2, capacity)}

    (attention,) = imported.plan.attention
    assert attention.kind is (AttentionKind.DECOMPOSED if beyond else AttentionKind.FUSED)
    assert trt.build(imported.model, ranges(PREFILL)).stage == "built"
    plain = trt.build(imported.model, ranges(DECODE))
    if beyond:
        assert plain.stage == "build"
        assert "not supported by a dedicated kernel" in plain.words
        assert f"more than {REACH - head_size} keys have no fused kernel" in attention.reason
    else:
        assert plain.stage == "built"

    def patch(network: tensorrt_rtx.INetworkDefinition) -> None:
        patch_network(network, imported.plan, tensorrt_rtx)

    assert trt.build(imported.model, ranges(DECODE), patch).stage == "built"

"""A plan that counts on a fused kernel which TensorRT lacks: built all the same, with a warning."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from decoders import DecoderConfig, write_decoder

from trt_kvcache.engine import build as build_module
from trt_kvcache.engine.options import BuildOptions
from trt_kvcache.importer import pipeline
from trt_kvcache.importer.plan import AttentionKind


@pytest.mark.slow
def test_attention_is_decomposed_after_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = pipeline.import_unchecked

    def optimistic(*args, **kwargs):
        """float32 attention has no fused kernel; this plan says it has."""
        imported, verdict = real(*args, **kwargs)
        fused = tuple(dataclasses.replace(a, kind=AttentionKind.FUSED) for a in imported.plan.attention)
        assert imported.plan.attention != fused
        return dataclasses.replace(imported, plan=dataclasses.replace(imported.plan, attention=fused)), verdict

    monkeypatch.setattr(pipeline, "import_unchecked", optimistic)
    model = write_decoder(tmp_path / "model.onnx", DecoderConfig(layers=1, dtype="float32"))
    manifest = build_module.build_engine(model, tmp_path / "model.engine", build=BuildOptions(max_chunk=8))
    assert (tmp_path / "model.engine").stat().st_size == manifest.engine.size > 0
    assert any("lacks a fused kernel" in warning for warning in manifest.warnings)
    assert not (tmp_path / "model.engine").read_bytes().startswith(bytes(64))

"""Operators of others that hold caches, or a whole decoder, where no cache is seen: named."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest
from graphs import Graph
from onnx import TensorProto

from trt_kvcache import PlanOptions, plan_model
from trt_kvcache.errors import UnsupportedModelError


@pytest.mark.parametrize(
    ("domain", "op", "words"),
    [
        ("com.microsoft", "BeamSearch", "found: com.microsoft::BeamSearch 'node_y', which holds the decoder in itself"),
        (
            "com.microsoft",
            "WhisperBeamSearch",
            "holds the decoder in itself: give the decoder alone, without the search",
        ),
        ("LlmExporter", "FusedAttention", "LlmExporter::FusedAttention 'node_y', which holds its cache itself, if"),
        ("", "XlaDynamicUpdateSlice", "found: XlaDynamicUpdateSlice 'node_y', which is no operator of ONNX"),
        ("LlmExporter", "Other", "found: no cache that a step writes"),
    ],
)
def test_the_operator_is_named(domain: str, op: str, words: str, tmp_path: Path) -> None:
    g = Graph()
    g.input("input_ids", TensorProto.INT64, ["B", "S"])
    g.node(op, ["input_ids"], "y", domain)
    g.output("y", TensorProto.INT64, ["B", "S"])
    onnx.save(g.model(24, [domain]), tmp_path / "model.onnx")
    with pytest.raises(UnsupportedModelError, match=words):
        plan_model(tmp_path / "model.onnx", PlanOptions(capacity=8))

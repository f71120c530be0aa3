"""Tensors of a model may have the names that the importer gives: it takes others then."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest
from concat_graphs import Decoder, make_decoder

from trt_kvcache.importer.plan import PlanOptions
from trt_kvcache.verify import VerifyOptions, verify_model

NAMES = (
    "trt_kvcache/mask_0", "trt_kvcache/attention", "write_indices", "nonpad_kv_seqlen", "attention_span", "logits_span",
)  # fmt: skip


@pytest.mark.few(4)
@pytest.mark.parametrize("name", NAMES)
def test_names_that_are_taken(name: str, tmp_path: Path) -> None:
    model = make_decoder(Decoder())
    old = next(n for n in model.graph.node if n.op_type == "MatMul").output[0]
    for node in model.graph.node:
        node.input[:] = [name if n == old else n for n in node.input]
        node.output[:] = [name if n == old else n for n in node.output]
    onnx.save(model, tmp_path / "model.onnx")
    options = VerifyOptions(batch=2, chunks=(3,), tokens=1)
    verify_model(tmp_path / "model.onnx", PlanOptions(capacity=24), options).check()

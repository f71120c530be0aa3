"""Verification of models with state beside their caches, or with what cross-attention reads."""

from __future__ import annotations

from dataclasses import replace

import onnx
import pytest
from hybrids import cross_model, hybrid_model

from trt_kvcache import PlanOptions, VerifyOptions, verify_model
from trt_kvcache.importer import import_model
from trt_kvcache.verify import verify_import

OPTIONS = PlanOptions(capacity=32)  # of caches that grow


def _saved(model: onnx.ModelProto, folder) -> str:
    path = folder / "model.onnx"
    onnx.save(model, path)
    return str(path)


def test_state_is_carried_and_compared(tmp_path):
    report = verify_model(_saved(hybrid_model(), tmp_path))
    report.check()
    assert {o.name for o in report.outputs} >= {"present_conv.1", "present_recurrent.2"}


def test_state_that_the_rewritten_model_drops_shows(tmp_path):
    """A rewritten model that starts from zeros in every step is right in the first step of a sequence only."""
    imported = import_model(_saved(hybrid_model(), tmp_path))
    model = onnx.ModelProto()
    model.CopyFrom(imported.model)
    state = next(v for v in model.graph.input if v.name == imported.plan.states[0].past)
    nothing = onnx.helper.make_node("Sub", [state.name, state.name], ["nothing"])
    for node in model.graph.node:
        node.input[:] = ["nothing" if name == state.name else name for name in node.input]
    model.graph.node.insert(0, nothing)
    assert not verify_import(replace(imported, model=model), VerifyOptions()).passed


@pytest.mark.few(3)
@pytest.mark.parametrize("mask", ["none", "ones", "bool"])
@pytest.mark.parametrize("memory", ["keys", "hidden"])
@pytest.mark.parametrize("growing", [False, True])
def test_what_cross_attention_reads(memory, mask, growing, tmp_path):
    options = OPTIONS if growing else PlanOptions()
    verify_model(_saved(cross_model(memory, mask, growing=growing), tmp_path), options).check()

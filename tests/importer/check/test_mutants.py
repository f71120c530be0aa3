"""Faults at random, in rewritten models and in the check's own cutting: what the check takes has the same numbers."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import mutation_trials
import onnx
import pytest
from concat_graphs import Decoder, make_decoder
from mutation_cuts import CAPACITY, Pair, exposed, trial
from mutation_trials import VERIFY, judge
from onnx import ModelProto
from stored import MODELS, edited

from trt_kvcache.importer import import_model
from trt_kvcache.importer.plan import PlanOptions

QUICK = replace(VERIFY, batch=2, tokens=2)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    path = tmp_path_factory.mktemp("pair") / "model.onnx"
    onnx.save(make_decoder(Decoder(layers=2)), path)
    return Pair(path, PlanOptions(capacity=CAPACITY))


@pytest.mark.slow
def test_faults_of_a_rewritten_model(pair: Pair) -> None:
    """Whatever the check takes has the same numbers."""
    words = Counter(trial(pair, seed)[0] for seed in range(3))
    assert not words["wrong"]
    assert words["refused"]


@pytest.mark.slow
def test_faults_in_the_cutting(pair: Pair) -> None:
    """The whole models show faults that a wrong cut hides; faults that the right one takes are none."""
    found = Counter(exposed(pair, seed)[1] for seed in range(10))
    assert not found["missed"]
    assert found["whole models"]


@pytest.mark.slow
def test_other_numbers_are_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = "torch/llama_static_wrap_op24"
    rewritten = import_model(MODELS / source / "model.onnx")

    def scaled(model: ModelProto) -> None:
        attributes = (a for n in model.graph.node if n.op_type == "Attention" for a in n.attribute)
        next(a for a in attributes if a.name == "scale").f *= 2

    path = edited(source, tmp_path, scaled)
    assert judge(path, PlanOptions(), QUICK) == ("equal", "")
    monkeypatch.setattr(mutation_trials, "import_model", lambda *a: replace(import_model(*a), model=rewritten.model))
    assert judge(path, PlanOptions(), QUICK)[0] == "wrong"

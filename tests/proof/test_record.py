"""The recording of a proof: its text, and what it leaves out."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from decoders import DecoderConfig, write_decoder
from onnx import helper
from stored import MODELS

from trt_kvcache.compare import proof_recording, rounding
from trt_kvcache.compare.bounds import Bounds
from trt_kvcache.compare.decode import DRAWN
from trt_kvcache.compare.proof import Proof
from trt_kvcache.errors import OptionError, UnsupportedModelError
from trt_kvcache.importer import import_model
from trt_kvcache.importer.cache_plan import PlanOptions
from trt_kvcache.importer.protos import replace_field
from trt_kvcache.runtime.ort.ort_runner import OnnxRuntimeRunner
from trt_kvcache.runtime.replay import replay
from trt_kvcache.runtime.runner import StepBatch


def _recorded(path: Path) -> Proof:
    return proof_recording.record_proof(import_model(path, PlanOptions()), Bounds(3, 8, 4))


def test_a_model_continues_its_own_text(tmp_path: Path) -> None:
    """Where a text goes on token by token, each is the best one of the step before, and no pair comes again."""
    proof = _recorded(write_decoder(tmp_path / "model.onnx", DecoderConfig(capacity=64)))
    texts: list[list[int]] = [[], [], []]
    followed = 0
    for number, piece in enumerate(proof.facts.pieces):
        for row in piece.rows if piece.part != DRAWN else ():
            tokens = proof.arrays[f"{number}/tokens"][row].tolist()
            if number and row in proof.facts.pieces[number - 1].rows and len(texts[row]) >= 5:
                best = int(proof.arrays[f"{number - 1}/logits"][row, -1].argmax())
                followed += best == tokens[0]
                assert best == tokens[0] or (texts[row][-1], best) in set(pairwise(texts[row]))
            texts[row] += tokens
    assert followed > 10
    assert len({tuple(text[:5]) for text in texts}) == 3


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["optimum/llama", "mobius/llama_static_f32", "ort-genai/llama_cpu_fp32"])
def test_a_rewritten_model_that_is_another_one_gets_no_proof(name: str) -> None:
    """The model as exported decodes the beginning, too."""
    options = PlanOptions() if "static" in name else PlanOptions(capacity=40)
    imported = import_model(MODELS / name / "model.onnx", options)
    proof_recording.record_proof(imported, Bounds(4, 8))
    product = next(n for n in reversed(imported.model.graph.node) if n.op_type in ("Attention", "Softmax"))
    with_fault = imported.model.graph.node.add()
    with_fault.CopyFrom(helper.make_node("Neg", [product.output[0]], ["moved"]))
    for node in imported.model.graph.node:
        if node is not with_fault and node.op_type != "Neg":
            node.input[:] = ["moved" if n == product.output[0] else n for n in node.input]
    *nodes, moved = imported.model.graph.node
    nodes.insert(nodes.index(product) + 1, moved)
    replace_field(imported.model.graph.node, nodes)
    with pytest.raises(
        UnsupportedModelError, match="does not give the logits of the model as exported: they differ by"
    ):
        proof_recording.record_proof(imported, Bounds(4, 8))


def test_steps_that_are_asked_for(tmp_path: Path) -> None:
    imported = import_model(write_decoder(tmp_path / "model.onnx", DecoderConfig(capacity=4096)))
    usual = proof_recording.record_proof(imported, Bounds(3, 64, 4)).facts.pieces
    for count in (1, 5, len(usual) + 8):
        assert len(proof_recording.record_proof(imported, Bounds(3, 64, 4), steps=count).facts.pieces) == count
    assert proof_recording.record_proof(imported, Bounds(3, 64, 4), steps=5).facts.pieces == usual[:5], (
        "the first ones stay"
    )
    assert 10 < len(usual) < 40


def test_a_slow_machine_records_what_there_is_time_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    imported = import_model(write_decoder(tmp_path / "model.onnx", DecoderConfig(capacity=64)))
    with pytest.raises(
        OptionError, match="5 steps on the CPU take about 0 s here, more than 0; give proof=5 to record them"
    ):
        proof_recording.record_proof(imported, Bounds(3, 8, 4), seconds=0)
    clock = iter(range(10_000))
    monkeypatch.setattr(proof_recording.time, "monotonic", lambda: next(clock))
    proof = proof_recording.record_proof(imported, Bounds(3, 8, 4), seconds=6)
    assert len(proof.facts.pieces) == 7
    runner = OnnxRuntimeRunner(imported.source.path, max_batch=4, max_chunk=8)
    assert replay(runner, proof).passed
    runner.close()


class _Stray:
    """Writes a row that no token goes to."""

    def __init__(self, runner: OnnxRuntimeRunner) -> None:
        self._runner = runner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def step(self, batch: StepBatch) -> Any:
        name = self._runner.plan.caches[0].past
        row = self._runner.read_row(name, batch.first_row, 1 << 30)
        row[-1] += 1
        self._runner.write_row(name, batch.first_row, row)
        return self._runner.step(batch)


def test_where_rounding_decides_the_logits_the_rest_is_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_decoder(tmp_path / "model.onnx", DecoderConfig(capacity=64))
    monkeypatch.setattr(rounding, "_SHOWS", 1e-9)
    monkeypatch.setattr(rounding, "_FAINT", 0.0)
    proof = _recorded(path)
    assert proof.facts.note.startswith("rounding alone decides the logits of this model: ")
    assert "\n" not in proof.facts.note
    assert not any(proof.facts.allowed.values())
    runner = OnnxRuntimeRunner(path, max_batch=4, max_chunk=8)
    assert replay(runner, proof).passed
    (finding,) = replay(_Stray(runner), proof).findings
    assert "changed cache rows that no token went to" in str(finding)
    runner.close()


def test_logits_of_the_model_that_are_no_numbers_are_left_out(tmp_path: Path) -> None:
    """An engine that computes the same in a wider type has numbers there, and is right."""
    path = write_decoder(tmp_path / "model.onnx", DecoderConfig(capacity=64))
    model = onnx.load(path)
    last = next(node for node in model.graph.node if "logits" in node.output)
    last.output[0] = "before"
    model.graph.node.append(helper.make_node("Sqrt", ["before"], ["logits"]))
    onnx.save(model, tmp_path / "roots.onnx")
    proof = _recorded(tmp_path / "roots.onnx")
    assert proof.facts.note.startswith("some logits of the model are NaN")
    assert "\n" not in proof.facts.note
    assert not any("logits" in found for found in proof.facts.allowed.values())
    assert any(proof.facts.allowed.values())
    runner = OnnxRuntimeRunner(tmp_path / "roots.onnx", max_batch=4, max_chunk=8)
    assert np.isnan(runner.step(StepBatch(0, np.zeros((1, 1), np.int64), np.zeros(1, np.int64)))).any()
    assert replay(runner, proof).passed
    runner.close()

"""The recording of a proof: its text, and what it leaves out of the original."""

from __future__ import annotations

from concurrent.futures import Future
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from decoders import DecoderConfig, write_decoder
from onnx import helper
from stored import MODELS

from trt_kvcache.engine.recording import Answer, Recording
from trt_kvcache.errors import UnsupportedModelError
from trt_kvcache.importer import import_model
from trt_kvcache.importer.plan import PlanOptions
from trt_kvcache.importer.protos import replace_field
from trt_kvcache.proof import record, tolerance
from trt_kvcache.proof.file import Proof
from trt_kvcache.proof.replay import replay
from trt_kvcache.proof.schedule import Most
from trt_kvcache.runtime.ort.runner import OnnxRuntimeRunner
from trt_kvcache.runtime.runner import StepBatch


def _recorded(path: Path, options: PlanOptions | None = None) -> Proof:
    return record.record_proof(import_model(path, options or PlanOptions()), Most(3, 8, 4))


def _tokens(proof: Proof) -> dict[tuple[int, int], list[int]]:
    """Tokens of each row from its last start on, by row and start of the episode."""
    found: dict[tuple[int, int], list[int]] = {}
    for at, episode in enumerate(proof.facts.episodes):
        for row, start in enumerate(episode.starts):
            steps = [proof.arrays[f"{at}/{n}/tokens"][row] for n in range(len(episode.lengths))]
            found[row, start] = [int(t) for t in np.concatenate(steps)]
    return found


def test_a_model_continues_its_own_text(tmp_path: Path) -> None:
    """Each row begins with five tokens of its own; then all read on in the same text, which repeats no pair."""
    proof = _recorded(write_decoder(tmp_path / "model.onnx", DecoderConfig(capacity=64)))
    rows: dict[int, dict[int, int]] = {}
    for (row, start), tokens in _tokens(proof).items():
        rows.setdefault(row, {}).update(enumerate(tokens, start))
    assert all(sorted(row) == list(range(max(row) + 1)) for row in rows.values()), "no token is missing"
    assert len({tuple(row[i] for i in range(5)) for row in rows.values()}) == 3
    text = [rows[0][i] for i in range(5, 53)]
    assert len(set(pairwise(text))) == 47
    for number, row in rows.items():
        assert all(token == text[(place - 5 + 16 * number) % 48] for place, token in row.items() if place >= 5)


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["optimum/llama", "mobius/llama_static_f32", "ort-genai/llama_cpu_fp32"])
def test_a_rewritten_model_that_is_another_one_gets_no_proof(name: str) -> None:
    """The model as exported decodes the beginning, too."""
    options = PlanOptions() if "static" in name else PlanOptions(capacity=40)
    imported = import_model(MODELS / name / "model.onnx", options)
    record.record_proof(imported, Most(4, 8))
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
        record.record_proof(imported, Most(4, 8))


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
    monkeypatch.setattr(tolerance, "_SHOWS", 1e-9)
    monkeypatch.setattr(tolerance, "_FAINT", 0.0)
    proof = _recorded(path)
    assert proof.facts.note.startswith("rounding decides the logits of this model: ")
    assert "\n" not in proof.facts.note
    assert not any(proof.facts.tolerances.values())
    runner = OnnxRuntimeRunner(path, max_batch=4, max_chunk=8)
    assert replay(runner, proof).passed
    (finding,) = replay(_Stray(runner), proof).findings
    assert "changed cache rows that no token went to" in str(finding)
    runner.close()


def test_what_a_proof_cannot_show_is_a_note_of_the_build() -> None:
    recording = Recording.__new__(Recording)
    recording.answer = Future()
    recording.answer.set_result(Answer(b"proof", "rounding decides"))
    assert recording.result() == (b"proof", ("rounding decides",))


def test_logits_of_the_original_that_are_no_numbers_are_left_out(tmp_path: Path) -> None:
    """An engine that computes the same in a wider type has numbers there, and is right."""
    path = write_decoder(tmp_path / "model.onnx", DecoderConfig(capacity=64))
    model = onnx.load(path)
    last = next(node for node in model.graph.node if "logits" in node.output)
    last.output[0] = "before"
    model.graph.node.append(helper.make_node("Sqrt", ["before"], ["logits"]))
    onnx.save(model, tmp_path / "roots.onnx")
    proof = _recorded(tmp_path / "roots.onnx")
    assert proof.facts.note.startswith("the model has logits that are not a number")
    assert "\n" not in proof.facts.note
    assert not any("logits" in found for found in proof.facts.tolerances.values())
    assert any(proof.facts.tolerances.values())
    runner = OnnxRuntimeRunner(path, max_batch=4, max_chunk=8)
    assert replay(runner, proof).passed
    runner.close()

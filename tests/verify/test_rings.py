"""Plain models whose windows become rings (``--sliding circular``): the original keeps its own capacity."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest
from onnx import ModelProto, numpy_helper
from plain_graphs import plain_model
from verify import mistakes as m

from trt_kvcache.importer import ImportedModel, import_model
from trt_kvcache.importer.plan import UpdateMode
from trt_kvcache.verify import VerifyOptions, verify_import

CAPACITY = 12


def _imported(folder: Path, seed: int) -> ImportedModel:
    plain = plain_model(seed, ("ring",))
    onnx.save(plain.model, folder / "model.onnx")
    imported = import_model(folder / "model.onnx", plain.options)
    assert {c.mode for c in imported.plan.caches} == {UpdateMode.CIRCULAR}
    assert not imported.plan.original
    return imported


@pytest.mark.parametrize("seed", [2, 3, 4, 5001])
def test_the_original_keeps_its_capacity(tmp_path: Path, seed: int) -> None:
    imported = _imported(tmp_path, seed)
    rows = {c.capacity for c in imported.plan.caches}
    assert max(rows) < CAPACITY
    report = verify_import(imported, VerifyOptions())
    report.check()
    assert max(max(s.valid) for s in report.steps) == CAPACITY
    assert any(s.episode == "wrap" for s in report.steps)
    assert all(v in (0, start + s.length) for s in report.steps for start, v in zip(s.starts, s.valid, strict=True))
    assert any(0 in s.valid for s in report.steps), "idle rows are run"


def _shift_window(model: ModelProto) -> None:
    """A window of one key less."""
    node = next(n for n in m.nodes(model, "Sub") if "window_oldest" in n.output[0])
    tensor = next(t for t in model.graph.initializer if t.name == node.input[1])
    node.input[1] = m.constant(model, numpy_helper.to_array(tensor) - 1)


def _show_idle_rows(model: ModelProto) -> None:
    next(n for n in model.graph.node if "window_in_use" in n.output[0]).input[1] = m.constant(model, -1)


def _forget_the_end(model: ModelProto) -> None:
    """No token is written after the second row."""
    m.insert(model, m.nodes(model, "KVCacheUpdateCircularPair")[0], 4, "Min", m.constant(model, [1]))


@pytest.mark.parametrize("mistake", [_shift_window, _show_idle_rows, _forget_the_end])
def test_a_wrong_ring_fails(tmp_path: Path, mistake: m.Mistake) -> None:
    report = m.verify_with(_imported(tmp_path, 3), mistake)
    assert not report.passed
    assert report.failure is None, "it runs, and gives other numbers"

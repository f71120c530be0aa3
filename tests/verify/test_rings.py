"""Plain models whose windows become rings (``--sliding circular``): the original keeps its own capacity."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import ModelProto, helper, numpy_helper
from plain_graphs import plain_model

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
    node = next(n for n in model.graph.node if n.op_type == "Sub" and "window_oldest" in n.output[0])
    tensor = next(t for t in model.graph.initializer if t.name == node.input[1])
    values = numpy_helper.to_array(tensor) - 1
    model.graph.initializer.append(numpy_helper.from_array(values.astype(np.int64), "mistake"))
    node.input[1] = "mistake"


def _show_idle_rows(model: ModelProto) -> None:
    node = next(n for n in model.graph.node if "window_in_use" in n.output[0])
    model.graph.initializer.append(numpy_helper.from_array(np.array(-1), "mistake"))
    node.input[1] = "mistake"


def _forget_the_end(model: ModelProto) -> None:
    """No token is written after the second row."""
    node = next(n for n in model.graph.node if n.op_type == "KVCacheUpdateCircularPair")
    model.graph.initializer.append(numpy_helper.from_array(np.array([1]), "mistake"))
    model.graph.node.insert(0, helper.make_node("Min", [node.input[4], "mistake"], ["mistaken"], "mistaken"))
    node.input[4] = "mistaken"


@pytest.mark.parametrize("mistake", [_shift_window, _show_idle_rows, _forget_the_end])
def test_a_wrong_ring_fails(tmp_path: Path, mistake: Callable[[ModelProto], None]) -> None:
    imported = _imported(tmp_path, 3)
    wrong = ModelProto.FromString(imported.model.SerializeToString())
    mistake(wrong)
    report = verify_import(replace(imported, model=wrong), VerifyOptions())
    assert not report.passed
    assert report.failure is None, "it runs, and gives other numbers"

"""The decoders that are written as exporters write them are taken by the importer, and keep their numbers."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest
from decoders import DecoderConfig
from foreign_decoders import main, make_foreign

from trt_kvcache.importer import plan_model
from trt_kvcache.importer.plan import PlanOptions


@pytest.mark.slow
def test_rows_of_a_long_static_cache_are_counted(tmp_path: Path) -> None:
    # The mask compares with arange(capacity), an initializer as long as the cache.
    onnx.save(make_foreign("scatter", DecoderConfig(layers=1, capacity=1100)), tmp_path / "m.onnx")
    plan = plan_model(tmp_path / "m.onnx")
    assert {c.capacity for c in plan.caches} == {1100}
    assert plan.masks[0].causal


@pytest.mark.slow
def test_the_command_writes_a_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main([str(tmp_path / "out.onnx"), "--form", "scatter", "--capacity", "24"])
    assert capsys.readouterr().out.strip().endswith("out.onnx")
    assert {c.capacity for c in plan_model(tmp_path / "out.onnx").caches} == {24}
    with pytest.raises(ValueError, match="form is 'tensor-scatter'; it must be one of concat"):
        make_foreign("tensor-scatter", DecoderConfig())


def test_a_cache_that_grows_changes_into_a_buffer_of_the_capacity(tmp_path: Path) -> None:
    onnx.save(make_foreign("concat", DecoderConfig(layers=1)), tmp_path / "model.onnx")
    plan = plan_model(tmp_path / "model.onnx", PlanOptions(capacity=48))
    changes = {change.old: (change.new, change.why) for change in plan.changes if ".key" in change.old}
    why = "a buffer of fixed capacity, updated in place"
    assert changes == {
        "past_key_values.0.key [B, 2, P, 16]": ("past_key_values.0.key [B, 2, 48, 16]", why),
        "present.0.key [B, 2, P + S, 16]": ("present.0.key [B, 2, 48, 16]", why),
    }

"""The decoders that are written as exporters write them are taken by the importer, and keep their numbers."""

from pathlib import Path

import onnx
from decoders import DecoderConfig
from foreign_decoders import make_foreign

from trt_kvcache import PlanOptions, plan_model


def test_a_cache_that_grows_changes_into_a_buffer_of_the_capacity(tmp_path: Path) -> None:
    onnx.save(make_foreign("concat", DecoderConfig(layers=1)), tmp_path / "model.onnx")
    plan = plan_model(tmp_path / "model.onnx", PlanOptions(capacity=48))
    changes = {change.old: (change.new, change.why) for change in plan.changes if ".key" in change.old}
    why = "a buffer of fixed capacity, updated in place"
    assert changes == {
        "past_key_values.0.key [B, 2, P, 16]": ("past_key_values.0.key [B, 2, 48, 16]", why),
        "present.0.key [B, 2, P + S, 16]": ("present.0.key [B, 2, 48, 16]", why),
    }

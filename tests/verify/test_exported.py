"""Every decoder in tests/models, as its exporter wrote it, against what the importer makes of it."""

from __future__ import annotations

from pathlib import Path

import pytest
from concat_graphs import Build, Decoder, _signal, make_decoder
from onnx import TensorProto, save

from trt_kvcache.errors import UnsupportedModelError
from trt_kvcache.importer import import_model
from trt_kvcache.importer.plan import PlanOptions, Route
from trt_kvcache.verify import VerifyOptions, verify_import

MODELS = Path(__file__).parents[1] / "models"
DEAD_ENDS = {"plain-torch/roll_dynamo_op18", "plain-torch/narrow_copy_legacy_op17"}
NAMES = sorted(str(path.parent.relative_to(MODELS)) for path in MODELS.rglob("model.onnx"))


@pytest.mark.few(2)
@pytest.mark.parametrize("name", [n for n in NAMES if n not in DEAD_ENDS])
def test_the_rewritten_model_decodes_like_the_original(name: str) -> None:
    imported = import_model(MODELS / name / "model.onnx", PlanOptions(capacity=64))
    assert {c.route for c in imported.plan.caches} <= {Route.NATIVE}
    report = verify_import(imported, VerifyOptions())
    report.check()
    assert report.original_engine == report.rewritten_engine
    assert report.original_engine.startswith("ONNX Runtime")
    if imported.plan.original:
        decoded = [s for s in report.steps if s.episode == "decode"]
        assert sum(s.length for s in decoded) >= 3 * 8


@pytest.mark.parametrize("name", sorted(DEAD_ENDS))
def test_dead_ends_are_refused(name: str) -> None:
    assert name in NAMES
    with pytest.raises(UnsupportedModelError):
        import_model(MODELS / name / "model.onnx", PlanOptions(capacity=64))


@pytest.mark.parametrize("capacity", [24, 64])
def test_positions_that_all_sequences_share(capacity: int, tmp_path: Path) -> None:
    """An input ``[S]``: rows of the batch are as long as each other, which the rewritten model needs."""

    def after(g: Build, x: str) -> str:
        shared = g.input("position_ids", TensorProto.INT64, ["sequence"])
        return g.node("Add", [x, _signal(g, g.node("Unsqueeze", [shared, g.constant([0])]))])

    save(make_decoder(Decoder(positions="none", after=after)), tmp_path / "model.onnx")
    report = verify_import(import_model(tmp_path / "model.onnx", PlanOptions(capacity=capacity)), VerifyOptions())
    report.check()
    assert all(len(set(step.starts)) == 1 for step in report.steps)

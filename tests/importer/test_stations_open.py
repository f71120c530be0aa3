"""The model of each station is plain ONNX: ONNX Runtime opens it as it is."""

import fnmatch
from pathlib import Path
from typing import Any

import onnx
import pytest
from corpus import Entry, entries
from onnx.external_data_helper import load_external_data_for_model
from onnxruntime import InferenceSession, SessionOptions

from trt_kvcache.importer import prepare
from trt_kvcache.importer.cache_plan import PlanOptions
from trt_kvcache.importer.pipeline import import_model

CHOSEN = ("stored/*", "sinks/*", "slopes/*")
REFUSED = "stored/plain-torch/narrow_copy_legacy_op17"
MODELS = [e for e in entries() if any(fnmatch.fnmatch(e[0], p) for p in CHOSEN) and e[0] != REFUSED]


@pytest.mark.few(30)
@pytest.mark.parametrize("entry", MODELS, ids=lambda e: str(e[0]))
def test_the_models_of_all_stations_open(entry: Entry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, make, options = entry
    path = make(tmp_path)
    seen: dict[str, onnx.ModelProto] = {}
    normalize = prepare.normalize

    def watched(model: onnx.ModelProto, weights: dict[str, onnx.TensorProto], *more: Any) -> Any:
        result = normalize(model, weights, *more)
        for station, made in (("lowered", model), ("canonical", result[0])):
            seen[station] = onnx.ModelProto()
            seen[station].CopyFrom(made)
            prepare.attach_weights(seen[station], weights)
        return result

    monkeypatch.setattr(prepare, "normalize", watched)
    seen["rewritten"] = import_model(path, PlanOptions(**options)).model
    assert set(seen) == {"lowered", "canonical", "rewritten"}
    for station, model in seen.items():
        load_external_data_for_model(model, str(path.parent))
        onnx.save(model, tmp_path / f"{station}.onnx")
        settings = SessionOptions()
        settings.log_severity_level = 4
        InferenceSession(tmp_path / f"{station}.onnx", settings, ["CPUExecutionProvider"])

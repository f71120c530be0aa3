"""Families that few exports need are loaded for models of these families only."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import onnx
import pytest
from decoders import DecoderConfig
from foreign_decoders import make_foreign
from stacked_graphs import Stacking, stacked

from trt_kvcache.importer.extensions import EXTENSIONS, load

LOADED = """
import sys
from trt_kvcache.importer import plan_model
from trt_kvcache.importer.plan import PlanOptions
plan_model(sys.argv[1], PlanOptions(capacity=16))
folder = "trt_kvcache.importer.extensions."
print(*sorted({name[len(folder):].split(".")[0] for name in sys.modules if name.startswith(folder)}))
"""


def loaded(path: Path, model: onnx.ModelProto) -> list[str]:
    """The extensions that a fresh process loads to plan a model."""
    onnx.save(model, path)
    done = subprocess.run([sys.executable, "-c", LOADED, str(path)], check=True, capture_output=True, text=True)
    return done.stdout.split()


@pytest.mark.parametrize("form", ["concat", "concat-attention", "scatter", "gqa"])
def test_a_plain_decoder_loads_no_extension(tmp_path: Path, form: str) -> None:
    assert loaded(tmp_path / "model.onnx", make_foreign(form, DecoderConfig(vocab=64, capacity=16))) == []


def test_stacked_caches_are_loaded_for_stacked_caches(tmp_path: Path) -> None:
    model = stacked(make_foreign("concat-attention", DecoderConfig(vocab=64, capacity=16)), Stacking("L"))
    assert loaded(tmp_path / "model.onnx", model) == ["stacked_caches"]


def test_records_name_what_can_be_loaded() -> None:
    for extension in EXTENSIONS:
        module = load(extension.name)
        stations = [field.name for field in fields(extension) if field.name != "name"]
        assert all(hasattr(module, name) for name in stations if getattr(extension, name) is not None)

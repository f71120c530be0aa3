"""The documentation shows the table of exporters as it was measured, and the script measures what an exporter wrote."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import exporter_matrix
import onnx
import pytest
from decoders import DecoderConfig
from exporter_matrix import (
    ARCHITECTURES,
    BEGIN,
    END,
    EXPORTERS,
    FAMILIES_BEGIN,
    FAMILIES_END,
    ORDER,
    PAGE,
    TWINS_BEGIN,
    TWINS_END,
    UNAVAILABLE,
    cell,
    families,
    families_table,
    load,
    load_twins,
    replaced,
    table,
    twin_names,
    twins_table,
)
from foreign_decoders import make_foreign


def test_the_page_is_up_to_date() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert text == replaced(text), "python scripts/exporter_matrix.py --write"


def test_every_cell_is_measured_or_has_a_reason() -> None:
    results = load()
    for exporter in EXPORTERS:
        for arch in ARCHITECTURES:
            text, reason = cell(results, exporter, arch)
            assert text == "yes" or (text in ("-", "no", "copied", "wrong") and reason), (exporter, arch)
            assert (text == "-") == ((exporter, arch) in UNAVAILABLE)


def test_every_family_is_measured() -> None:
    results = load()
    for exporter in families.EXPORTERS:
        for family in families.FAMILIES:
            text, reason = cell(results, exporter, family)
            assert text == "yes" or (text in ("no", "copied", "wrong") and reason), (exporter, family)


def test_no_twin_is_silently_wrong() -> None:
    """Each checkpoint was measured with the exporters that auto tries, up to the first that is right."""
    results = load_twins()
    assert len(twin_names()) > 60
    for name in twin_names():
        outcomes = [results[name].get(exporter, {}).get("outcome", "?") for exporter in ORDER]
        tried = outcomes[: outcomes.index("right")] if "right" in outcomes else outcomes
        assert {*tried} <= {"wrong", "refused", "-"}, name


def test_markers_are_needed() -> None:
    second = f"{FAMILIES_BEGIN}\n{families_table(load())}\n{FAMILIES_END}"
    third = f"{TWINS_BEGIN}\n{twins_table(load_twins())}\n{TWINS_END}"
    text = f"a{BEGIN}old{END}b{FAMILIES_BEGIN}old{FAMILIES_END}c{TWINS_BEGIN}{TWINS_END}"
    assert replaced(text) == f"a{BEGIN}\n{table(load())}\n{END}b{second}c{third}"
    with pytest.raises(ValueError, match="exporters:end"):
        replaced(f"a{BEGIN}old")
    with pytest.raises(ValueError, match="families:end"):
        replaced(f"a{BEGIN}old{END}{FAMILIES_BEGIN}")


@pytest.fixture
def stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "results.json"
    path.write_text(json.dumps({"optimum": {"phi": {"outcome": "yes", "idiom": "Concat", "reason": ""}}}))
    monkeypatch.setattr(exporter_matrix, "RESULTS", path)
    return path


@pytest.mark.slow
def test_what_lies_in_a_folder_is_taken_through(tmp_path: Path, stored: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for arch, form in (("llama", "concat"), ("qwen3", None)):
        folder = tmp_path / "optimum" / arch
        folder.mkdir(parents=True)
        if form:
            onnx.save(make_foreign(form, DecoderConfig(layers=1)), folder / "model.onnx")
        else:
            (folder / "model.onnx").write_text("no model")
    words = ["exporter_matrix.py", "--measure", "--from", str(tmp_path), "--exporter", "optimum"]
    monkeypatch.setattr("sys.argv", words)
    exporter_matrix.main()
    results = json.loads(stored.read_text())["optimum"]
    assert results["llama"] == {"outcome": "yes", "idiom": "Concat", "reason": ""}
    assert results["qwen3"]["outcome"] == "no"
    assert results["qwen3"]["reason"].startswith("plan: text, not a binary ONNX model")
    assert results["phi"]["outcome"] == "yes"  # kept
    assert set(results) == {"llama", "qwen3", "phi"}


def test_absent_packages_keep_what_is_stored(
    tmp_path: Path, stored: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = stored.read_text()
    python = tmp_path / "python"  # an interpreter without any of them, with the tables alone
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" -S -s "$@"\n')
    python.chmod(0o755)
    monkeypatch.setattr(
        "sys.argv", ["exporter_matrix.py", "--measure", "--exporter", "optimum", "--python", str(python)]
    )
    exporter_matrix.main()
    assert stored.read_text() == before
    assert "kept: optimum needs torch" in capsys.readouterr().err

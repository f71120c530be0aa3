"""An engine as a folder: written by `build`, with what texts need, and taken wherever an engine is."""

import json
from pathlib import Path
from typing import Any

import pytest
from commands import invoke
from decoders import DecoderConfig, write_decoder

from trt_kvcache import DecodeSession, GenerationConfig, build_engine, inspect_engine, load_manifest
from trt_kvcache.engine import engine_build as building
from trt_kvcache.engine.backend import driver_present
from trt_kvcache.engine.engine_folder import copy_texts, output_engine
from trt_kvcache.errors import ManifestError, OptionError, OutputError
from trt_kvcache.model_paths import ENGINE, engine_in, is_model

TEXTS = {"tokenizer.json": "{}", "generation_config.json": '{"eos_token_id": 7}', "chat_template.jinja": "{{ a }}"}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "export"
    folder.mkdir()
    for name, content in TEXTS.items():
        (folder / name).write_text(content)
    return write_decoder(folder / "model.onnx", DecoderConfig(layers=1, capacity=32))


def test_build_writes_a_folder_that_commands_take(model: Path, tmp_path: Path) -> None:
    output = tmp_path / "made" / "here"
    options = ["--backend", "tensorrt-rtx", "--proof", "off"]
    built = invoke("build", model, "-o", f"{output}/", *options)
    assert {path.name for path in output.iterdir()} == {"model.engine", "model.engine.json", *TEXTS}
    assert f"{output}: files for texts: chat_template.jinja, generation_config.json, tokenizer.json\n" in built.stdout
    then = f"generate {output} --prompt Hello" if driver_present() else f"inspect {output}"
    assert built.stdout.splitlines()[-1] == f"next       trt-kvcache {then}"
    manifest = load_manifest(output)
    assert manifest == load_manifest(output / "model.engine") == inspect_engine(output).manifest
    assert GenerationConfig.for_model(output).eos_token_id == 7
    for command in (["inspect", str(output)], ["plugins", str(output)]):
        assert invoke(*command, code=None).exit_code == 0
    refused = invoke("generate", output, "--tokens", "1", "--capacity", "9", code=None)
    assert "was planned when it was built" in refused.stderr
    with pytest.raises(OptionError, match=r"model\.engine looks like an engine, but the CPU runs only models"):
        DecodeSession.open(output, device="cpu")


def test_an_engine_in_a_model_folder_does_not_take_its_place(model: Path) -> None:
    (model.parent / "model.engine").touch()
    assert is_model(model.parent)
    assert engine_in(model.parent) == model.parent
    with pytest.raises(ManifestError, match="a folder; give the path of an engine"):
        load_manifest(model.parent)


@pytest.mark.parametrize("name", TEXTS)
def test_files_of_something_else_are_neither_replaced_nor_removed(name: str, tmp_path: Path) -> None:
    """A checkpoint's folder, for one; an engine's own folder is built into again."""
    (tmp_path / name).write_text("mine")
    with pytest.raises(OutputError, match=f"holds {name}, but not the engine that it belongs to; give another folder"):
        output_engine(tmp_path)
    assert (tmp_path / name).read_text() == "mine"
    (tmp_path / ENGINE).write_bytes(b"")
    assert output_engine(tmp_path) == (tmp_path / ENGINE, tmp_path)


@pytest.mark.parametrize("output", ["a/b/", "a/b/c.engine"])
def test_a_build_that_fails_leaves_no_folder(
    model: Path, tmp_path: Path, output: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(engine: Path, *others: object) -> Any:
        assert engine.parent.is_dir()
        raise OptionError("no")

    monkeypatch.setattr(building, "_setup", fail)
    before = {*tmp_path.rglob("*")}
    with pytest.raises(OptionError, match="no"):
        build_engine(model, f"{tmp_path}/{output}")
    assert {*tmp_path.rglob("*")} == before


def test_a_folder_that_cannot_be_made(model: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OutputError, match="this folder cannot be made: "):
        build_engine(model, f"{tmp_path}/file/in/")


def test_texts_of_another_model_go(model: Path, tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json", "mine.txt"):
        (target / name).write_text("old")
    copy_texts(model, target)
    assert {path.name: path.read_text() for path in target.iterdir()} == {**TEXTS, "mine.txt": "old"}
    (model.parent / "config.json").symlink_to("/dev/zero")
    copy_texts(model, target)
    assert not (target / "config.json").exists()
    (model.parent / "tokenizer.json").write_text(json.dumps("x" * 100))
    copy_texts(model.parent, target)
    assert (target / "tokenizer.json").read_text() == json.dumps("x" * 100)

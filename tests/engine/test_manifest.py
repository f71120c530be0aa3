"""The manifest: written and read without loss; whatever else is found is refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from sample_plans import sample_manifest, sample_plan

from trt_kvcache.engine.manifest import check_engine, load_manifest, manifest_path, save_manifest
from trt_kvcache.errors import ManifestError
from trt_kvcache.files import identify


@pytest.fixture
def engine(tmp_path: Path) -> Path:
    path = tmp_path / "model.engine"
    path.write_bytes(b"an engine")
    save_manifest(sample_manifest(sample_plan(layers=2), identify(path)), manifest_path(path))
    return path


def change(engine: Path, edit: dict[str, object]) -> None:
    path = manifest_path(engine)
    path.write_bytes(msgspec.json.encode(msgspec.json.decode(path.read_bytes()) | edit))


def test_files_that_are_not_there(engine: Path, tmp_path: Path) -> None:
    wanted = sample_manifest(sample_plan(layers=2), identify(engine))
    for path in (engine, engine.with_name("model.engine.json"), str(engine)):
        assert load_manifest(path) == wanted
    check_engine(wanted, engine)
    (tmp_path / "x.engine").touch()
    (tmp_path / "y.engine.json").mkdir()
    for name, words in (
        ("x.engine", "x.engine.json: no such file; an engine needs the manifest"),
        ("z.engine", "z.engine: no such file; check the path"),
        ("z.engine.json", "z.engine.json: no such file; check the path"),
        ("y.engine", "cannot be read: Is a directory"),
    ):
        with pytest.raises(ManifestError, match=words):
            load_manifest(tmp_path / name)


def test_what_is_no_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "m.onnx").write_bytes(b"")
    monkeypatch.chdir(tmp_path)
    for path in (tmp_path, ".", "", "/"):
        with pytest.raises(ManifestError, match="a folder; give the path of an engine$"):
            load_manifest(path)
    with pytest.raises(ManifestError, match=r"m.onnx: a model without a manifest; .*'trt-kvcache plan' shows models"):
        load_manifest("m.onnx")


def test_an_unknown_schema_is_named_before_anything_else_is_read(engine: Path) -> None:
    change(engine, {"schema_version": 2, "plan": "of another form", "profiles": None})
    with pytest.raises(ManifestError, match="manifest schema 2; this version of trt_kvcache knows schema 1: use the"):
        load_manifest(engine)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        ({"max_batch": "four"}, r"Expected `int`, got `str` - at `\$.max_batch`"),
        ({"plan": {}}, r"missing required field `options` - at `\$.plan`"),
        ({"schema_version": None}, r"Expected `int`, got `null` - at `\$.schema_version`"),
    ],
)
def test_an_edited_manifest_is_refused_with_the_place(engine: Path, edit: dict[str, object], message: str) -> None:
    change(engine, edit)
    with pytest.raises(ManifestError, match=message):
        load_manifest(engine)


def _tensor(place: int, **fields: object) -> Callable[[dict[str, Any]], None]:
    return lambda data: data["plan"]["tensors"][place].update(fields)


def _profile(name: str, **shapes: list[int]) -> Callable[[dict[str, Any]], None]:
    usual = {"min": [1, 1], "opt": [1, 1], "max": [1, 1]}
    return lambda data: data["profiles"][0]["shapes"].update({name: usual | shapes})


CONTRADICTIONS: list[tuple[Callable[[dict[str, Any]], Any], str]] = [
    (lambda data: data.update(max_batch=-1), "max_batch is -1, which is no size"),
    (lambda data: data.update(max_batch=2**70), "max_batch is 1180591620717411303424, which is no size|Integer value"),
    (lambda data: data.update(max_chunk=0), "max_chunk is 0, which is no size"),
    (lambda data: data.update(vocab=0), "vocab is 0, which is no size"),
    (lambda data: data.update(profiles=[]), "it has no profiles"),
    (lambda data: data.update(aliases={}), r"aliases are not those of .*\(some are missing\)"),
    (lambda data: data["aliases"].update(logits="nothing"), r"aliases are not those of .*'logits' is 'nothing'"),
    (lambda data: data.update(double_buffered={"a": "b"}), "the tensors with two buffers are not those of the plan"),
    (lambda data: data.update(backend="evil"), "backend 'evil'; there are"),
    (_tensor(0, dtype="evil"), r"has the dtype 'evil', which no engine has"),
    (_tensor(0, shape=[-1, -5], axes=["batch", "sequence"]), r"has the shape \[-1, -5\]"),
    (_tensor(0, name="a\nb"), "has a control character or line break in its name"),
    (_tensor(0, name="\x9b2J"), "has a control character or line break in its name"),
    (lambda data: data["plan"]["tensors"].append(data["plan"]["tensors"][0]), "is there twice"),
    (lambda data: data["plan"]["caches"][0].update(past="gone"), "cache 'gone' is no input of the engine"),
    (_profile("nowhere"), "has 'nowhere', which is no input"),
    (_profile("input_ids", min=[2, 2]), "has sizes of 'input_ids' in no order"),
    (_profile("input_ids", max=[1, 2**40]), "has sizes of 'input_ids' in no order"),
]


@pytest.mark.parametrize(("edit", "message"), CONTRADICTIONS, ids=lambda value: value if isinstance(value, str) else "")
def test_a_manifest_that_contradicts_itself(engine: Path, edit: Callable[[dict[str, Any]], Any], message: str) -> None:
    path = manifest_path(engine)
    data = json.loads(path.read_bytes())
    edit(data)
    path.write_text(json.dumps(data))
    with pytest.raises(ManifestError, match=rf"not a valid manifest: .*({message}).*; build the engine again"):
        load_manifest(engine)


@pytest.mark.parametrize("data", [b"", b"not json", b"\xff\xfe\x00", b'{"schema_version": 1', b"[]", b"{}"])
def test_garbage_is_refused(engine: Path, data: bytes) -> None:
    manifest_path(engine).write_bytes(data)
    with pytest.raises(
        ManifestError, match=r"model.engine.json: not (JSON|a valid manifest): .*; build the engine again"
    ):
        load_manifest(engine)


def test_the_manifest_in_place_of_its_engine_is_refused(engine: Path) -> None:
    with pytest.raises(
        ManifestError, match=r"model.engine.json: a manifest; give the engine beside it, .*model.engine$"
    ):
        check_engine(load_manifest(engine), manifest_path(engine))


def test_another_engine_is_refused(engine: Path) -> None:
    manifest = load_manifest(engine)
    engine.write_bytes(b"an Engine")
    with pytest.raises(
        ManifestError, match=r"model.engine: BLAKE3 \w{64}, its manifest says \w{64}; the manifest is not"
    ):
        check_engine(manifest, engine)
    engine.write_bytes(b"an engine, and more")
    with pytest.raises(ManifestError, match="model.engine: 19 bytes, its manifest says 9"):
        check_engine(manifest, engine)
    engine.unlink()
    with pytest.raises(ManifestError, match="the engine cannot be read: No such file"):
        check_engine(manifest, engine)

"""The manifest: written and read without loss; whatever else is found is refused by name."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from blake3 import blake3
from sample_plans import sample_manifest, sample_plan

from trt_kvcache.engine.manifest import check_engine, load_manifest, manifest_path, save_manifest
from trt_kvcache.errors import ManifestError
from trt_kvcache.files import identify


@pytest.fixture
def engine(tmp_path: Path) -> Path:
    path = tmp_path / "model.engine"
    path.write_bytes(b"an engine")
    # a path may be a text, and end in a slash
    save_manifest(sample_manifest(sample_plan(layers=2), identify(path)), manifest_path(f"{path}/"))
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
    with pytest.raises(
        ManifestError, match=r"m.onnx: this is a model, which has no manifest; .*'trt-kvcache plan' to look at models"
    ):
        load_manifest("m.onnx")


def test_an_unknown_schema_is_named_before_anything_else_is_read(engine: Path) -> None:
    change(engine, {"schema_version": 1, "plan": "of another form", "profiles": None})
    with pytest.raises(
        ManifestError, match="the manifest has schema 1, but this version of trt_kvcache reads schema 2: use the"
    ):
        load_manifest(engine)


def test_what_is_no_manifest_is_refused_with_the_place(engine: Path) -> None:
    """Also if its digest is right, as a program may write it."""
    path = manifest_path(engine)
    content = json.loads(path.read_bytes()) | {"max_batch": "four"}
    del content["digest"]
    digest = blake3(msgspec.json.encode(content)).hexdigest()
    path.write_bytes(msgspec.json.encode(content | {"digest": digest}))
    with pytest.raises(ManifestError, match=r"Expected `int`, got `str` - at `\$.max_batch`"):
        load_manifest(engine)


def leaves(value: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, one in inside:
        yield from leaves(one, (*place, key))
    if not isinstance(value, (dict, list)):
        yield place, value


def test_nothing_in_a_manifest_can_be_changed(engine: Path) -> None:
    """Every fact of it, changed by itself."""
    path = manifest_path(engine)
    data = path.read_bytes()
    for place, value in leaves(json.loads(data)):
        edited = part = json.loads(data)
        for key in place[:-1]:
            part = part[key]
        part[place[-1]] = not value if isinstance(value, bool) else value + 1 if isinstance(value, int) else "x"
        path.write_bytes(json.dumps(edited).encode())
        with pytest.raises(
            ManifestError,
            match=r"model.engine.json: (the manifest (was edited or damaged|has schema)|this is not a valid)",
        ):
            load_manifest(engine)
    path.write_bytes(json.dumps(json.loads(data)).encode())  # without the line breaks
    assert load_manifest(engine).max_batch


@pytest.mark.parametrize(
    "data", [b"", b"not json", b"\xff\xfe\x00", b'{"schema_version": 1', b"[]", b"{}", b'{"schema_version": null}']
)
def test_garbage_is_refused(engine: Path, data: bytes) -> None:
    manifest_path(engine).write_bytes(data)
    with pytest.raises(
        ManifestError, match=r"model.engine.json: (not JSON|this is not a valid manifest): .*; build the engine again"
    ):
        load_manifest(engine)


def test_the_manifest_in_place_of_its_engine_is_refused(engine: Path) -> None:
    with pytest.raises(
        ManifestError, match=r"model.engine.json: this is a manifest; give the engine beside it, .*model.engine$"
    ):
        check_engine(load_manifest(engine), manifest_path(engine))


def test_another_engine_is_refused(engine: Path) -> None:
    manifest = load_manifest(engine)
    engine.write_bytes(b"an Engine")
    with pytest.raises(
        ManifestError,
        match=r"model.engine: the engine has the BLAKE3 digest \w{64}, but its manifest says \w{64}; the manifest",
    ):
        check_engine(manifest, engine)
    engine.write_bytes(b"an engine, and more")
    with pytest.raises(ManifestError, match="model.engine: the engine has 19 bytes, but its manifest says 9"):
        check_engine(manifest, engine)
    engine.unlink()
    with pytest.raises(ManifestError, match="the engine cannot be read: No such file"):
        check_engine(manifest, engine)

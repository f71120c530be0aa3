"""The manifest: written and read without loss; whatever else is found is refused by name."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hostile.manifests import CONTRADICTIONS, Edit
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


@pytest.mark.parametrize(("edit", "message"), CONTRADICTIONS, ids=lambda value: value if isinstance(value, str) else "")
def test_a_manifest_that_contradicts_itself(engine: Path, edit: Edit, message: str) -> None:
    path = manifest_path(engine)
    data = json.loads(path.read_bytes())
    edit(data)
    path.write_text(json.dumps(data))
    with pytest.raises(
        ManifestError, match=rf"(not a valid manifest|contradicts itself): .*({message}).*; build the engine again"
    ):
        load_manifest(engine)


ONCE = (
    r"created_by|backend_version|options\..*|warnings\..*|generation\..*|max_positions|vocab|compute_capabilities\..*",
    r"(engine|model\.0)\.(name|size|blake3)",  # compared with the files
    r"encoder|network|proof|model\.0\..*",  # there is none
    r"plan\.(opset|weights|prefill_in_one_step|options\..*)",
    r"plan\.caches\.\d+\.(node|update|write_indices|update_lengths|reason|idiom|update_length|form|mode|contract)",
    r"plan\.attention\.\d+\.(dtype|query_heads|kv_heads|head_size|value_head_size|kind|reason|mask|keys)",
    r"plan\.masks\.\d+\.(causal|lengths|\w+_window|mask|additive|span|guarded)",
    r"plan\.spans\.\d+\.lengths",
    r"plan\.tensors\.8\.name",  # of the logits
    r"plan\.tensors\.\d+\.(found_by|shape\.\d+|axes\.\d+)",  # of the model alone; the engine is compared with it
    r"profiles\.\d+\.shapes\.\w+(\.\d+)?\.(min|opt|max)\.\d+",  # the same
)
"""Facts of a manifest that nothing else in it tells."""


def leaves(value: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, one in inside:
        yield from leaves(one, (*place, key))
    if not isinstance(value, (dict, list)):
        yield place, value


def test_what_a_manifest_says_twice_cannot_be_changed_once(engine: Path) -> None:
    """Every fact of it, changed by itself."""
    path = manifest_path(engine)
    data, taken = path.read_bytes(), set()
    for place, value in leaves(json.loads(data)):
        for other in [not value] if isinstance(value, bool) else [-1, value + 1] if isinstance(value, int) else ["x"]:
            edited = part = json.loads(data)
            for key in place[:-1]:
                part = part[key]
            part[place[-1]] = other
            path.write_bytes(json.dumps(edited).encode())
            try:
                load_manifest(engine)
                taken.add(".".join(map(str, place)))
            except ManifestError as error:
                assert str(path) in str(error)  # noqa: PT017
    assert [fact for fact in sorted(taken) if not any(re.fullmatch(once, fact) for once in ONCE)] == []
    assert len(taken) < 150


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

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from commands import invoke
from decoders import DecoderConfig, write_decoder
from sample_plans import sample_manifest, sample_plan

import trt_kvcache.engine.inspection as inspect_module
from trt_kvcache import BuildOptions, build_engine
from trt_kvcache.engine.inspection import EngineTensor, EngineView, inspect_engine, reconcile
from trt_kvcache.engine.manifest import Manifest, ShapeRange, manifest_path, save_manifest
from trt_kvcache.errors import ManifestError
from trt_kvcache.files import FileIdentity, identify
from trt_kvcache.importer.cache_plan import Route


@pytest.fixture
def engine(tmp_path: Path) -> Path:
    """A file that stands for an engine, with its manifest."""
    path = tmp_path / "model.engine"
    path.write_bytes(b"engine" * 100)
    save_manifest(sample_manifest(sample_plan(2), identify(path)), manifest_path(path))
    return path


def agreeing_view(manifest: Manifest) -> EngineView:
    tensors = tuple(
        EngineTensor(t.name, t.io, t.dtype, tuple(d if isinstance(d, int) else -1 for d in t.shape))
        for t in manifest.plan.tensors
    )
    return EngineView(tensors, dict(manifest.aliases), tuple(dict(p.shapes) for p in manifest.profiles))


@pytest.fixture
def manifest() -> Manifest:
    return sample_manifest(sample_plan(1), FileIdentity("e", 1, "00"))


def changed(name: str, **changes: object) -> Callable[[EngineView], EngineView]:
    return lambda v: replace(v, tensors=tuple(replace(t, **changes) if t.name == name else t for t in v.tensors))


def aliases(**more: str) -> Callable[[EngineView], EngineView]:
    return lambda v: replace(v, aliases={k: a for k, a in (v.aliases | more).items() if a})


SURPRISE = EngineTensor("surprise", "input", "int64", (1,))
GROWN = {"input_ids": ShapeRange((1, 1), (1, 1), (8, 1))}


@pytest.mark.parametrize(
    ("change", "differences"),
    [(lambda v: v, ()),
     (lambda v: replace(v, tensors=(*v.tensors[1:], SURPRISE)),
      ("input input_ids is only in the manifest", "input surprise is only in the engine")),
     (changed("key_cache.0", dtype="float32", shape=(-1, 4, 512, 64)),
      ("input key_cache.0 is float32 in the engine, and float16 in the manifest",
       "input key_cache.0 has the shape [-1, 4, 512, 64] in the engine, and ['batch', 4, 256, 64] in the manifest")),
     (changed("key_cache.0", shape=(-1, 4, -1, 64)),
      ("input key_cache.0 has the shape [-1, 4, -1, 64] in the engine",)),
     (changed("logits", shape=(-1, -1, -1)), ()),  # an output, of which the engine knows less
     (aliases(**{"updated_key_cache.0": ""}),
      ("updated_key_cache.0 shares the buffer of nothing in the engine, and of key_cache.0 in the manifest",)),
     (aliases(logits="key_cache.0"),
      ("logits shares the buffer of key_cache.0 in the engine, and of nothing in the manifest",)),
     (aliases(**{"updated_key_cache.0": "value_cache.0"}),
      ("updated_key_cache.0 shares the buffer of value_cache.0 in the engine, and of key_cache.0 in the manifest",)),
     (lambda v: replace(v, profiles=()), ("the engine has 0 profiles, but the manifest has 1",)),
     (lambda v: replace(v, profiles=({**v.profiles[0], **GROWN},)),
      ("profile prefill: input_ids is ShapeRange(min=(1, 1), opt=(1, 1), max=(8, 1))",))],
)  # fmt: skip
def test_differences(
    manifest: Manifest, change: Callable[[EngineView], EngineView], differences: tuple[str, ...]
) -> None:
    found = reconcile(manifest, change(agreeing_view(manifest)))
    assert len(found) == len(differences)
    assert all(text.startswith(words) for text, words in zip(found, differences, strict=True)), found


def test_plugin_aliases_are_not_reported_by_tensorrt(manifest: Manifest) -> None:
    caches = tuple(replace(cache, route=Route.PLUGIN) for cache in manifest.plan.caches)
    manifest = replace(manifest, plan=replace(manifest.plan, caches=caches))
    assert reconcile(manifest, replace(agreeing_view(manifest), aliases={})) == ()


def test_with_a_gpu_a_difference_is_an_error(engine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    manifest = inspect_module.load_manifest(engine)
    view = agreeing_view(manifest)
    monkeypatch.setattr(inspect_module, "_open", lambda path, backend: (view, ""))
    assert inspect_engine(engine).view == view
    view.aliases.clear()
    with pytest.raises(ManifestError, match="updated_key_cache.0 shares the buffer of nothing"):
        inspect_engine(engine)


def test_another_engine_is_refused(engine: Path) -> None:
    engine.write_bytes(b"enginf" + engine.read_bytes()[6:])
    result = invoke("inspect", engine, code=1)
    assert result.stdout == ""
    assert re.fullmatch(r"error: [^\n]*BLAKE3[^\n]*\n", result.stderr)


@pytest.mark.gpu
def test_a_real_engine_says_what_its_manifest_says(tmp_path: Path) -> None:
    model = write_decoder(tmp_path / "model.onnx", DecoderConfig(layers=2, dtype="float16"))
    build_engine(model, tmp_path / "model.engine", build=BuildOptions(backend="tensorrt-rtx", max_batch=2, max_chunk=8))
    report = inspect_engine(tmp_path / "model.engine")
    assert report.view is not None, report.not_opened
    assert report.view.aliases == report.manifest.aliases

"""An engine against its manifest: whatever differs is refused before anything runs."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from runtime.opened import check_refused, edit

from trt_kvcache.engine.manifest import Manifest, load_manifest, manifest_path
from trt_kvcache.errors import ManifestError, UnsupportedModelError
from trt_kvcache.importer.plan import Role


def test_engine_that_was_changed(engine: Path) -> None:
    data = bytearray(engine.read_bytes())
    data[-1] ^= 1
    engine.write_bytes(data)
    check_refused(ManifestError, "BLAKE3 .*the manifest is not of this engine", engine)


@pytest.mark.parametrize("more", [True, False])
def test_aliases_are_reconciled(engine: Path, more: bool) -> None:
    aliases = dict(load_manifest(engine).aliases)
    if more:
        aliases["logits"] = "input_ids"
        words = "logits shares the buffer of input_ids, in the manifest of nothing"
    else:
        del aliases["updated_key_cache.1"]
        words = r"updated_key_cache\.1 shares the buffer of nothing, in the manifest of key_cache\.1"
    check_refused(ManifestError, f"the engine and its manifest differ: {words}; do not run it", engine, aliases=aliases)


def _alias(manifest: Manifest) -> Manifest:
    return replace(manifest, aliases=manifest.aliases | {"updated_key_cache.0": "value_cache.0"})


def _capacity(manifest: Manifest) -> Manifest:
    first, *others = manifest.plan.caches
    return replace(manifest, plan=replace(manifest.plan, caches=(replace(first, capacity=4096), *others)))


def _shape(manifest: Manifest) -> Manifest:
    first, *others = manifest.plan.caches
    changed = replace(first, physical_shape=("batch", 2, 4096, 16), capacity=4096)
    return replace(manifest, plan=replace(manifest.plan, caches=(changed, *others)))


def _rank(manifest: Manifest) -> Manifest:
    first, *others = manifest.plan.caches
    return replace(manifest, plan=replace(manifest.plan, caches=(replace(first, physical_shape=("batch",)), *others)))


def _axes(manifest: Manifest) -> Manifest:
    tensors = tuple(replace(t, axes=t.axes[1:]) if t.name == "input_ids" else t for t in manifest.plan.tensors)
    return replace(manifest, plan=replace(manifest.plan, tensors=tensors))


def _logits_span(manifest: Manifest) -> Manifest:
    assert manifest.plan.logits_span is not None
    span = replace(manifest.plan.logits_span, name="input_ids")
    return replace(manifest, plan=replace(manifest.plan, logits_span=span))


def _double(manifest: Manifest) -> Manifest:
    return replace(manifest, double_buffered={"updated_key_cache.0": "key_cache.0"})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (_alias, "aliases binds 'updated_key_cache.0' to 'value_cache.0', the plan to 'key_cache.0'"),
        (_capacity, "cache 'key_cache.0' has a capacity of 4096, its shape says otherwise"),
        (_shape, r"input 'key_cache.0' is float \['batch', 2, 64, 16\], its cache float \['batch', 2, 4096, 16\]"),
        (_double, "double_buffered binds 'updated_key_cache.0' to 'key_cache.0', the plan to None"),
        (
            lambda m: replace(m, plan=replace(m.plan, spans=())),
            "span 'attention_span' is not both an input and described",
        ),
        (_logits_span, "span 'input_ids' is not both an input and described; span 'logits_span' is not both"),
        (lambda m: replace(m, max_batch=9), "max_batch is 9, the profiles of 'input_ids' end at 3"),
        (lambda m: replace(m, max_chunk=9), "max_chunk is 9, the profiles of 'input_ids' end at 8"),
    ],
)
def test_manifest_edited_by_hand(engine: Path, change: Callable[[Manifest], Manifest], words: str) -> None:
    edit(engine, change)
    check_refused(ManifestError, f"its manifest contradicts itself: .*{words}.*; build the engine again", engine)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (_rank, r"cache 'key_cache.0' \['batch'\] has no axis 2"),
        (_axes, r"input 'input_ids' \[.*\] has axes or profiles of another length"),
        (lambda m: replace(m, backend="tensorrt-x"), "backend 'tensorrt-x'; there are tensorrt, tensorrt-rtx"),
    ],
)
def test_manifests_that_are_none(engine: Path, change: Callable[[Manifest], Manifest], words: str) -> None:
    edit(engine, change)
    check_refused(ManifestError, f"not a valid manifest: {words}; build the engine again", engine)
    with pytest.raises(ManifestError, match=words):  # as inspect and others read it
        load_manifest(engine)


def test_profiles_edited_by_hand(engine: Path) -> None:
    path = manifest_path(engine)
    data = json.loads(path.read_text())
    data["profiles"][0]["shapes"]["input_ids"]["max"] = [7, 8]
    path.write_text(json.dumps(data))
    check_refused(ManifestError, "profile prefill: input_ids is .*, in the manifest ", engine)


def test_input_without_a_part(engine: Path) -> None:
    def unknown(manifest: Manifest) -> Manifest:
        tensors = tuple(replace(t, role=Role.OTHER) if t.name == "position_ids" else t for t in manifest.plan.tensors)
        return replace(manifest, plan=replace(manifest.plan, tensors=tensors))

    edit(engine, unknown)
    check_refused(UnsupportedModelError, "input 'position_ids' .* has no known part in decoding", engine)

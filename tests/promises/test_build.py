"""Planned models are built: TensorRT takes them, and holds each cache that is in place in one buffer."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import net
import pytest
from corpus import Entry, entries

from trt_kvcache import BuildOptions, build_engine
from trt_kvcache.errors import BuildError
from trt_kvcache.importer import plan_model
from trt_kvcache.importer.plan import PlanOptions, Target

SHAPES: dict[str, dict[str, tuple[int, ...]]] = {
    "new rows/prefixed": {"prefix": (2, 4, 16)},
    "planes/any number of planes": {"position_ids": (3, 2, 8)},
    "state/grows": {"past_x": (2, 8)},
    "capacity, 16/nameless": {"beside": (2, 8)},
    "interface/names, where the graph says nothing": {"whatever": (8,)},
}
"""Largest sizes that nothing else tells, by the key of a model."""
REFUSED: dict[str, str] = {
    "cross/self_attention": "was killed by SIGSEGV while building",
    "repaired/later_in_a_body": "MyelinCheckException",
    "interface/one input as write index and position": "cosCache has sequence length 1",
    "interface/no names of axes": "reshape wildcard -1",
    "interface/unused outputs 24": "LayerNormalization nodes",
}
"""Words of TensorRT for RTX 1.7.1, or about its crash, that end a build, by the key of a model."""


def _distinct() -> list[Entry]:
    """One model for each plan with caches for TensorRT for RTX; single nodes are built by ``tests/conformance``."""
    record, first = net.load(), {}
    for entry in entries():
        other = (
            entry[0].startswith(("mutant/", "node/", "case/", "beside/")) or entry[2].get("target") == Target.TENSORRT
        )
        if not other and re.match(r"\d+ x \w+ (padded|packed) ", record[entry[0]][0]):
            first.setdefault(record[entry[0]][0], entry)
    return [*first.values()]


@pytest.mark.few(4)
@pytest.mark.parametrize("entry", _distinct(), ids=lambda entry: entry[0])
def test_each_cache_is_one_buffer(entry: Entry, tmp_path: Path) -> None:
    key, make, given = entry
    path, options = make(tmp_path), PlanOptions(**given)
    plan = plan_model(path, options)
    heard = 16 if any("encoder" in t.axes for t in plan.tensors) else None
    build = BuildOptions(max_encoder=heard, max_shapes=SHAPES.get(key, {}))
    if not any(isinstance(c.logical_shape[0], int) for c in plan.caches):
        build = replace(build, max_batch=2)
        if not any(isinstance(c.update_length, int) for c in plan.caches):
            bounds = [c.contract.max_update_length for c in plan.caches if c.contract is not None]
            chunk = min(8, *(c.capacity for c in plan.caches), *(b for b in bounds if b is not None))
            build = replace(build, max_chunk=chunk)
    if words := REFUSED.get(key):
        with pytest.raises(BuildError, match=words):
            build_engine(path, tmp_path / "model.engine", options=options, build=build)
        return
    manifest = build_engine(path, tmp_path / "model.engine", options=options, build=build)
    assert not any("a fault in trt_kvcache" in warning for warning in manifest.warnings)
    assert manifest.aliases == {c.present: c.past for c in plan.caches if c.in_place}

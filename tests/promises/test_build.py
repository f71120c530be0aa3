"""Planned models are built: TensorRT takes them, and holds each cache that is in place in one buffer."""

from dataclasses import replace
from pathlib import Path

import net
import pytest
from corpus import Entry, entries

from trt_kvcache import BuildOptions, build_engine, plan_model
from trt_kvcache.importer.cache_plan import PlanOptions, Target


def _built() -> list[Entry]:
    """Promised models with caches, for TensorRT for RTX; single nodes are built by ``tests/conformance``."""
    promised = net.promises().models
    return [
        e
        for e in entries()
        if e[0] in promised and not e[0].startswith(net.ELSEWHERE) and e[2].get("target") != Target.TENSORRT
    ]


@pytest.mark.few(4)
@pytest.mark.parametrize("entry", _built(), ids=lambda entry: entry[0])
def test_each_cache_is_one_buffer(entry: Entry, tmp_path: Path) -> None:
    _, make, given = entry
    path, options = make(tmp_path), PlanOptions(**given)
    plan = plan_model(path, options)
    heard = 16 if any("encoder" in t.axes for t in plan.tensors) else None
    build = BuildOptions(max_encoder=heard)
    if not any(isinstance(c.logical_shape[0], int) for c in plan.caches):
        build = replace(build, max_batch=2)
        if not any(isinstance(c.update_length, int) for c in plan.caches):
            bounds = [c.contract.max_update_length for c in plan.caches if c.contract is not None]
            chunk = min(8, *(c.capacity for c in plan.caches), *(b for b in bounds if b is not None))
            build = replace(build, max_chunk=chunk)
    manifest = build_engine(path, tmp_path / "model.engine", options=options, build=build)
    assert not any("a fault in trt_kvcache" in warning for warning in manifest.warnings)
    assert manifest.aliases == {c.present: c.past for c in plan.caches if c.in_place}

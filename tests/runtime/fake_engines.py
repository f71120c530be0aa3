"""Engine files for the fake TensorRT: planned, profiled and described like real ones, without a builder."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import onnx
from runtime.fake_tensorrt import MAGIC

from trt_kvcache.engine.build import _bound_contracts
from trt_kvcache.engine.encoder import find_job
from trt_kvcache.engine.manifest import Manifest, Profile, encoder_path, manifest_path, save_manifest
from trt_kvcache.engine.options import BuildOptions
from trt_kvcache.engine.profiles import make_profiles, resolve_limits, without_shapes
from trt_kvcache.files import identify
from trt_kvcache.importer import import_model
from trt_kvcache.importer.plan import PlanOptions, Target
from trt_kvcache.importer.planning.index_limits import index_limits


def write_engine(
    model: Path,
    *,
    options: PlanOptions | None = None,
    max_batch: int = 3,
    max_chunk: int = 8,
    max_encoder: int | None = None,
    max_logits: int | None = None,
    backend: str = "tensorrt-rtx",
    version: str = "1.7.1.116",
    encoder: str = "none",
    shapes: Mapping[str, Sequence[tuple[int, ...]]] | None = None,
) -> Path:
    """Write ``<model>.engine`` and its manifest; with ``encoder="auto"``, the encoder beside the model, too.

    `shapes` has the least, usual and largest ones of inputs that nothing else decides.
    """
    options = replace(options or PlanOptions(), target=Target(backend))
    imported = import_model(model, options)
    kinds = [{name: given[i] for name, given in (shapes or {}).items()} for i in range(3)]
    build = BuildOptions(
        max_batch=max_batch, max_chunk=max_chunk, max_encoder=max_encoder, max_logits=max_logits, encoder=encoder,
        min_shapes=kinds[0], opt_shapes=kinds[1], max_shapes=kinds[2],
    )  # fmt: skip
    job = find_job(model, imported.plan, build)
    own = build if job is None else without_shapes(build, imported.plan, job.plan)
    limits = resolve_limits(imported.plan, own)
    profiles = make_profiles(imported.plan, own, limits)
    plan = _bound_contracts(imported.plan, limits.max_chunk)
    tables = index_limits(imported.model, plan)
    engine = model.with_suffix(".engine")
    beside = None
    if job is not None:
        beside = encoder_path(engine)
        _write(beside, job.model[0], (job.profile,), {})
        manifest = Manifest(
            created_by="tests", backend=backend, backend_version=version, compute_capabilities=(),
            plan=job.plan, aliases={}, double_buffered={}, profiles=(job.profile,), max_batch=1, max_chunk=1,
            model=(), engine=identify(beside), vocab=job.vocab,
        )  # fmt: skip
        save_manifest(manifest, manifest_path(beside))
    carried = [c for c in plan.caches if c.carried]
    aliases = {c.present: c.past for c in carried if c.in_place}
    _write(engine, imported.model, profiles, aliases)
    manifest = Manifest(
        created_by="tests", backend=backend, backend_version=version, compute_capabilities=(), plan=plan,
        aliases=aliases, double_buffered=plan.double_buffered, profiles=profiles,
        max_batch=limits.max_batch, max_chunk=limits.max_chunk, max_logits=limits.max_logits, model=(identify(model),),
        engine=identify(engine),
        vocab=min(tables.tokens.values(), default=None), max_positions=min(tables.positions.values(), default=None),
        encoder=None if beside is None else identify(beside),
    )  # fmt: skip
    save_manifest(manifest, manifest_path(engine))
    return engine


def _write(engine: Path, model: onnx.ModelProto, profiles: tuple[Profile, ...], aliases: dict[str, str]) -> None:
    facts = {
        "profiles": [{n: [r.min, r.opt, r.max] for n, r in p.shapes.items()} for p in profiles],
        "aliases": aliases,
    }
    engine.write_bytes(MAGIC + json.dumps(facts).encode() + b"\n" + model.SerializeToString())

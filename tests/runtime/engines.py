"""Engine files for the fake TensorRT, planned, profiled and described like real ones, and runners on them."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import onnx
import pytest
from runtime.fake_cuda import Machine
from runtime.fake_tensorrt import MAGIC, VERSIONS, fake_module

from trt_kvcache import BuildOptions, DecodeSession
from trt_kvcache.engine.engine_build import _bound_contracts, find_job
from trt_kvcache.engine.manifest import Manifest, Profile, encoder_path, load_manifest, manifest_path, save_manifest
from trt_kvcache.engine.profiles import make_profiles, resolve_limits, without_shapes
from trt_kvcache.files import identify
from trt_kvcache.importer import import_model
from trt_kvcache.importer.cache_plan import PlanOptions, Target
from trt_kvcache.importer.interface import index_limits
from trt_kvcache.runtime.ort.ort_runner import OnnxRuntimeRunner
from trt_kvcache.runtime.trt.trt_runner import Bindings, TensorRTRunner

ARGUMENTS = ("max_batch", "max_chunk", "device", "kernel_cache", "cuda_graphs")


def write_engine(
    model: Path,
    *,
    options: PlanOptions | None = None,
    max_batch: int = 3,
    max_chunk: int = 8,
    max_encoder: int | None = None,
    max_logits: int | None = None,
    backend: str = "tensorrt-rtx",
    version: str | None = None,
    encoder: str = "none",
    shapes: Mapping[str, Sequence[tuple[int, ...]]] | None = None,
) -> Path:
    """Write ``<model>.engine`` and its manifest; with ``encoder="auto"``, the encoder beside the model, too.

    `shapes` has the least, usual and largest ones of inputs that nothing else decides.
    """
    version = version or VERSIONS[backend]
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
        _write(beside, job.part.model[0], (job.profile,), {})
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


def open_engine(
    engine: Path, machine: Machine | None = None, *, backend: str = "tensorrt-rtx", version: str | None = None,
    **more: Any,
) -> TensorRTRunner:  # fmt: skip
    """Open an engine on a fake GPU; `more` are arguments of the runner, and faults of the module (`runner.module`)."""
    machine = machine or Machine()
    arguments = {name: more.pop(name) for name in ARGUMENTS if name in more}
    rtx = backend == "tensorrt-rtx"
    module = fake_module(machine, rtx=rtx, version=version or VERSIONS[backend], **more)
    runner = TensorRTRunner(engine, bindings=Bindings(module, machine.bindings()), **arguments)
    runner.module = module  # type: ignore[attr-defined]
    return runner


def check_refused(
    error: type[Exception], words: str, engine: Path, machine: Machine | None = None, **more: Any
) -> None:
    """Opening fails with these words, and leaves nothing allocated."""
    machine = machine or Machine()
    with pytest.raises(error, match=words):
        open_engine(engine, machine, **more)
    assert machine.used == 0
    assert not machine.pinned


def edit(engine: Path, change: Callable[[Manifest], Manifest]) -> None:
    save_manifest(change(load_manifest(engine)), manifest_path(engine))


def runner_on(
    device: str, model: Path, options: PlanOptions | None = None, *, build: Mapping[str, Any] | None = None,
    **limits: int | None,
) -> OnnxRuntimeRunner | TensorRTRunner:  # fmt: skip
    """A runner on "cpu", on a fake "gpu", or "gpu without graphs"; `build` are arguments of `write_engine`."""
    if device == "cpu":
        return OnnxRuntimeRunner(model, options, **limits)
    backend = "tensorrt-rtx" if device == "gpu" else "tensorrt"
    engine = write_engine(model, options=options, backend=backend, **(build or {}))
    return open_engine(engine, backend=backend, cuda_graphs=device == "gpu", **limits)


def drain(session: DecodeSession, tokens: dict[int, list[int | None]] | None = None) -> dict[int, list[int | None]]:
    """Step until nothing runs; returns the tokens of each slot, those that `tokens` already has first."""
    tokens = {} if tokens is None else tokens
    while session.running:
        for event in session.step():
            tokens.setdefault(event.sequence, []).append(event.token)
    return tokens

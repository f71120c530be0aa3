"""Builds an engine once more with inner values as outputs, to find where it goes wrong."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from trt_kvcache.engine.build_options import BuildOptions
from trt_kvcache.engine.build_process import Job, run_worker
from trt_kvcache.engine.manifest import Manifest, manifest_path, save_manifest
from trt_kvcache.files import FileIdentity
from trt_kvcache.importer.plan import Role, Target, TensorRole

if TYPE_CHECKING:
    from onnx import ValueInfoProto

    from trt_kvcache.importer import ImportedModel

__all__ = ["build_with_outputs"]


def build_with_outputs(
    imported: ImportedModel, manifest: Manifest, values: Sequence[ValueInfoProto], folder: Path
) -> Path:
    """Build an engine with the same options, with these values as outputs, and write it with its manifest.

    Args:
        imported: the model that the engine was built from.
        manifest: manifest of the engine.
        values: values of the rewritten model, with their types.
        folder: folder for both files.

    Raises:
        BuildError: TensorRT refuses the model.
    """
    from trt_kvcache.importer.files.signed_weights import for_tensorrt
    from trt_kvcache.importer.protos import copied, dtype_name, elem_type_of, shape_of
    from trt_kvcache.importer.serialize import serialize_model

    outputs = []
    for value in values:
        shape = shape_of(value) or ()
        axes = tuple("" if isinstance(size, int) else "?" for size in shape)
        dtype = dtype_name(elem_type_of(value))
        outputs.append(TensorRole(value.name, "output", Role.OTHER, dtype, shape, "added", axes))
    plan = replace(manifest.plan, tensors=(*manifest.plan.tensors, *outputs))
    model = copied(imported.model)
    model.graph.output.extend(values)
    source, engine = imported.source.path, folder / "debug.engine"
    engine.touch()
    build = BuildOptions(
        backend="tensorrt" if manifest.backend == "tensorrt" else "tensorrt-rtx",
        compute_capabilities=manifest.compute_capabilities,
        encoder="none",
        proof="off",
    )
    title = f"{manifest.backend} {manifest.backend_version}"
    target, paths = Target(manifest.backend), (str(source), str(engine), str(engine))
    flipped = for_tensorrt(model, source.parent)
    job = Job(target, title, *paths, plan, manifest.profiles, build, flipped)
    done, _ = run_worker(job, lambda: serialize_model(model))
    identity = FileIdentity(engine.name, done.size, done.blake3)
    built = replace(manifest, plan=plan, engine=identity, proof=None, encoder=None, backend_version=done.version)
    save_manifest(built, manifest_path(engine))
    return engine

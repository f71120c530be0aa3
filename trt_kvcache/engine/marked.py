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
    from onnx import ModelProto, ValueInfoProto

    from trt_kvcache.importer import ImportedModel

__all__ = ["build_marked", "with_outputs"]


def with_outputs(model: ModelProto, values: Sequence[ValueInfoProto]) -> ModelProto:
    """Return a copy of a model with these values as further outputs."""
    from onnx import ModelProto

    marked = ModelProto()
    marked.CopyFrom(model)
    marked.graph.output.extend(values)
    return marked


def build_marked(imported: ImportedModel, manifest: Manifest, values: Sequence[ValueInfoProto], folder: Path) -> Path:
    """Build an engine with the same options, with these values as outputs, and write it with its manifest.

    Args:
        imported: the model that the engine was built from.
        manifest: manifest of the engine.
        values: values of the rewritten model.
        folder: folder for both files.

    Raises:
        BuildError: TensorRT refuses the model.
    """
    from trt_kvcache.importer.files.signed_weights import for_tensorrt
    from trt_kvcache.importer.protos import dtype_name, elem_type_of, shape_of
    from trt_kvcache.importer.serialize import serialize_model

    marks = []
    for value in values:
        shape = shape_of(value) or ()
        axes = tuple("" if isinstance(size, int) else "?" for size in shape)
        marks.append(
            TensorRole(value.name, "output", Role.OTHER, dtype_name(elem_type_of(value)), shape, "added", axes)
        )
    plan = replace(manifest.plan, tensors=(*manifest.plan.tensors, *marks))
    source = imported.source.path
    flipped = for_tensorrt(imported.model, source.parent)
    engine = folder / "marked.engine"
    engine.touch()
    build = BuildOptions(
        backend="tensorrt" if manifest.backend == "tensorrt" else "tensorrt-rtx",
        compute_capabilities=manifest.compute_capabilities,
        encoder="none",
        proof="off",
    )
    title = f"{manifest.backend} {manifest.backend_version}"
    target, paths = Target(manifest.backend), (str(source), str(engine), str(engine))
    job = Job(target, title, *paths, plan, manifest.profiles, build, flipped)
    done, _ = run_worker(job, lambda: serialize_model(with_outputs(imported.model, values)))
    identity = FileIdentity(engine.name, done.size, done.blake3)
    marked = replace(manifest, plan=plan, engine=identity, proof=None, encoder=None, backend_version=done.version)
    save_manifest(marked, manifest_path(engine))
    return engine

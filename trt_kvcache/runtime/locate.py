"""Finds the first layer in which an engine computes other numbers than ONNX Runtime for the same rewritten model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import reduce
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import onnx
from onnx import ModelProto, ValueInfoProto

from trt_kvcache.compare.differences import Share, first_layer, share_of, with_inner_outputs
from trt_kvcache.compare.float32_copy import Float32Copies
from trt_kvcache.compare.proof import LOGITS, Proof
from trt_kvcache.compare.rewritten_model import Float32Session
from trt_kvcache.cpu import RunError
from trt_kvcache.engine.build_options import BuildOptions
from trt_kvcache.engine.build_process import Job, run_worker
from trt_kvcache.engine.manifest import Manifest, load_manifest, manifest_path, save_manifest
from trt_kvcache.errors import ManifestError, UnsupportedModelError
from trt_kvcache.files import FileIdentity, identify
from trt_kvcache.importer import ImportedModel, import_model
from trt_kvcache.importer.cache_plan import Role, Target, TensorRole
from trt_kvcache.importer.families import for_cpu
from trt_kvcache.importer.protos import copied, dtype_name, elem_type_of, shape_of
from trt_kvcache.runtime.buffers import carried_buffers
from trt_kvcache.runtime.proof_check import CheckReport, load_proof
from trt_kvcache.runtime.replay import replay, rows_needed
from trt_kvcache.runtime.runner import Array, StepBatch
from trt_kvcache.runtime.step_inputs import StepInputs, model_identity

_LAYERS = frozenset({"Attention", "MatMul", "Gemm", "Conv", "Add", "LayerNormalization", "RMSNormalization", "Softmax"})
_FLOATS = (onnx.TensorProto.FLOAT, onnx.TensorProto.FLOAT16, onnx.TensorProto.BFLOAT16)


def with_layer(report: CheckReport, engine: Path, model: Path, options: Mapping[str, Any] | None = None) -> CheckReport:
    """Find the first wrong layer of an engine that failed its check. Return `report` with this layer added.

    The engine is built again from `model`, with the results of its layers as outputs. TensorRT may then fuse fewer
    layers, so that the error may disappear. Raises `ManifestError` if the engine was built from another model;
    `BuildError` or `BackendError` if TensorRT refuses the new engine.
    """
    from trt_kvcache.runtime.trt.trt_runner import TensorRTRunner

    manifest = load_manifest(engine)
    proof, imported = load_proof(manifest, engine), import_model(model, manifest.plan.options)
    source = imported.source
    if model_identity(manifest.model) != model_identity([identify(p) for p in (source.path, *source.external_files)]):
        names = ", ".join(file.name for file in manifest.model)
        raise ManifestError(
            f"{model}: the content of this model is not that of the model from which the engine was built "
            f"({names}); give that model, or build the engine again"
        )
    values = _layers(imported.model, manifest)
    with TemporaryDirectory(prefix="trt-kvcache-check-") as name:
        folder = Path(name)
        wide, _ = for_cpu(with_inner_outputs(imported.model, {value.name for value in values}))
        try:
            session = Float32Session(*Float32Copies(folder).copy(wide, source.path.parent))
        except RunError as error:
            raise UnsupportedModelError(f"{model}: ONNX Runtime cannot run the rewritten model: {error}") from None
        debug = build_with_outputs(imported, manifest, values, folder)
        rows, chunk = rows_needed(proof, manifest.plan, manifest.max_batch), min(proof.facts.chunk, manifest.max_chunk)
        runner = TensorRTRunner(debug, max_batch=rows, max_chunk=chunk, cuda_graphs=False, **(options or {}))
        try:
            compared = _ComparedRunner(runner, session, proof, imported.model, values)
            replay(compared, proof)
        finally:
            runner.close()
    return replace(report, layer=compared.finding or f"none of the {len(values)} layers differs if it is an output: so "
                                                     "the fault appears only where TensorRT fuses or places the layers "
                                                     "in another way")  # fmt: skip


class _ComparedRunner:
    """Runs steps on an engine, and compares the outputs of all layers with ONNX Runtime's until a layer differs."""

    def __init__(
        self, runner: Any, session: Float32Session, proof: Proof, model: ModelProto, values: Sequence[ValueInfoProto]
    ) -> None:
        self._runner, self._session, self._model = runner, session, model
        self._names = [value.name for value in values]
        limits = [own[LOGITS] for own in proof.facts.allowed.values() if LOGITS in own]
        self._allowed = reduce(Share.most, limits) if limits else None
        self._inputs, self._steps = StepInputs(runner.plan), 0
        self.finding = ""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def step(self, batch: StepBatch) -> Array:
        if self.finding or self._allowed is None:
            return np.asarray(self._runner.step(batch))
        rows = range(batch.first_row, batch.first_row + batch.rows)
        buffers = carried_buffers(self._runner.plan)
        feeds = {b.past: np.stack([self._runner.read_row(b.past, row, b.capacity) for row in rows]) for b in buffers}
        feeds |= self._inputs.arrays(batch)
        feeds |= {name: np.arange(size) for name, size in self._inputs.span_sizes(batch).items()}
        constants = [c.arrays for c in batch.constants]
        feeds |= {n: np.concatenate([np.asarray(g[n]) for g in constants]) for n in (constants or [{}])[0]}
        logits: Array = self._runner.step(batch)
        halves = ("float16", "bfloat16")
        wide = {n: v.astype(np.float32) if v.dtype.name in halves else v for n, v in feeds.items()}
        outputs, differs = self._session.run(wide), {}
        for name in self._names:
            pairs = zip(outputs[name], self._runner.read_output(name).astype(np.float32), strict=True)
            differs[name] = not all(share_of(one, other).within(self._allowed) for one, other in pairs)
        if found := first_layer(self._model.graph.node, differs, [o.name for o in self._model.graph.output]):
            right = list(differs.values()).index(True)
            self.finding = f"{found}, at step {self._steps}; {right} layers before it agree with ONNX Runtime"
        self._steps += 1
        return logits


def _layers(model: ModelProto, manifest: Manifest) -> list[ValueInfoProto]:
    known = {v.name: v for v in onnx.shape_inference.infer_shapes(model).graph.value_info}
    taken = {t.name for t in manifest.plan.tensors}
    names = [node.output[0] for node in model.graph.node if node.op_type in _LAYERS]
    values = [known[name] for name in names if name in known and name not in taken]
    layers = [v for v in values if elem_type_of(v) in _FLOATS and len(v.type.tensor_type.shape.dim) in (3, 4)]
    if not layers:
        raise UnsupportedModelError("no layer of this model can be compared: none has a known type and rank")
    return layers


def build_with_outputs(
    imported: ImportedModel, manifest: Manifest, values: Sequence[ValueInfoProto], folder: Path
) -> Path:
    """Build an engine again with more outputs, the tensors `values`; write it and its manifest, and return its path.

    Raises `BuildError` if TensorRT refuses the model.
    """
    from trt_kvcache.importer.files.signed_weights import for_tensorrt
    from trt_kvcache.importer.serialize import serialize_model

    outputs = []
    for value in values:
        shape, dtype = shape_of(value) or (), dtype_name(elem_type_of(value))
        axes = tuple("" if isinstance(size, int) else "?" for size in shape)
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
    job = Job(target, title, *paths, plan, manifest.profiles, build, for_tensorrt(model, source.parent))
    done, _ = run_worker(job, lambda: serialize_model(model))
    identity = FileIdentity(engine.name, done.size, done.blake3)
    built = replace(manifest, plan=plan, engine=identity, proof=None, encoder=None, backend_version=done.version)
    save_manifest(built, manifest_path(engine))
    return engine

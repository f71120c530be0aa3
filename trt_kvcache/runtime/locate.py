"""Finds the first wrong layer of an engine: compares its values with ONNX Runtime's, both for the rewritten model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import onnx
from onnx import ModelProto, NodeProto, ValueInfoProto

from trt_kvcache.compare.decode import Piece
from trt_kvcache.compare.float32_copy import float32_copy
from trt_kvcache.compare.proof import LOGITS, Proof
from trt_kvcache.compare.rewritten import WideSession
from trt_kvcache.compare.tolerance import share_of
from trt_kvcache.cpu import RunError
from trt_kvcache.engine.manifest import Manifest, load_manifest
from trt_kvcache.engine.marked import build_marked, with_outputs
from trt_kvcache.errors import ManifestError, UnsupportedModelError
from trt_kvcache.files import identify
from trt_kvcache.importer import import_model
from trt_kvcache.importer.families import for_cpu
from trt_kvcache.runtime.buffers import carried_buffers
from trt_kvcache.runtime.check import CheckReport, load_proof
from trt_kvcache.runtime.inputs import StepInputs, model_identity
from trt_kvcache.runtime.replay import replay, rows_needed
from trt_kvcache.runtime.runner import Array, StepBatch

__all__ = ["with_layer"]

_LAYERS = frozenset({"Attention", "MatMul", "Gemm", "Conv", "Add", "LayerNormalization", "RMSNormalization", "Softmax"})
_FLOATS = (onnx.TensorProto.FLOAT, onnx.TensorProto.FLOAT16, onnx.TensorProto.BFLOAT16)


def with_layer(report: CheckReport, engine: Path, model: Path, options: Mapping[str, Any] | None = None) -> CheckReport:
    """Return the report of an engine that disagrees, with its first wrong layer.

    The engine is built once more, with the results of its layers as outputs. TensorRT may then fuse less, and be right.

    Args:
        report: report of the engine.
        engine: path of the engine.
        model: path of the model that it was built from.
        options: options of `TensorRTRunner`, without sizes.

    Raises:
        ManifestError: the engine was built from another model.
        BuildError, BackendError: TensorRT refuses the new engine.
    """
    from trt_kvcache.runtime.trt.runner import TensorRTRunner

    manifest = load_manifest(engine)
    proof = load_proof(manifest, engine)
    imported = import_model(model, manifest.plan.options)
    _check_same(manifest, [imported.source.path, *imported.source.external_files], model)
    layers = _layers(imported.model, manifest)
    values = [value for value, _ in layers]
    with TemporaryDirectory(prefix="trt-kvcache-check-") as name, _reference(imported.model, values, model) as session:
        marked = build_marked(imported, manifest, values, Path(name))
        rows, chunk = rows_needed(proof, manifest.plan, manifest.max_batch), min(proof.facts.chunk, manifest.max_chunk)
        runner = TensorRTRunner(marked, max_batch=rows, max_chunk=chunk, cuda_graphs=False, **(options or {}))
        try:
            search = _Search(runner, session, proof, manifest, layers)
            replay(runner, proof, search)
        finally:
            runner.close()
    return replace(report, layer=search.finding or f"none of the {len(layers)} layers differs where they are outputs: "
                   "TensorRT goes wrong where it fuses or places them otherwise")  # fmt: skip


class _Search:
    """Compares all layers after each step, until one differs."""

    def __init__(
        self, runner: Any, session: WideSession, proof: Proof, manifest: Manifest,
        layers: Sequence[tuple[ValueInfoProto, NodeProto]],
    ) -> None:  # fmt: skip
        self._runner, self._session, self._proof, self._layers = runner, session, proof, layers
        self._inputs = StepInputs(manifest.plan)
        self._spans = [s.name for s in manifest.plan.spans]
        self._buffers = carried_buffers(manifest.plan)
        self._caches: dict[str, Array] = {}
        self.finding = ""

    def before(self, batch: StepBatch) -> None:
        """Copy the engine's caches: ONNX Runtime starts from the same."""
        rows = range(batch.first_row, batch.first_row + batch.rows) if not self.finding else ()
        for b in self._buffers if rows else ():
            self._caches[b.past] = np.stack([self._runner.read_row(b.past, row, b.capacity) for row in rows])

    def after(self, piece: Piece, number: int, batch: StepBatch) -> None:
        """Compare all layers, unless one has differed already."""
        allowed = self._proof.facts.allowed[piece.part].get(LOGITS)
        if self.finding or allowed is None:
            return
        arrays = [c.arrays for c in batch.constants]
        constants = {n: np.concatenate([np.asarray(g[n]) for g in arrays]) for n in (arrays[0] if arrays else ())}
        spans = {name: np.arange(size) for name, size in self._inputs.span_sizes(batch).items()}
        feeds = self._inputs.arrays(batch) | spans | constants | self._caches
        wide = {n: v.astype(np.float32) if v.dtype.name in ("float16", "bfloat16") else v for n, v in feeds.items()}
        outputs = self._session.run(wide)
        for place, (value, node) in enumerate(self._layers):
            wanted = outputs[value.name].astype(np.float32)
            had = self._runner.read_output(value.name).astype(np.float32)
            for row, (one, other) in enumerate(zip(wanted, had, strict=True)):
                share = share_of(one, other)
                if not self.finding and not share.within(allowed):
                    self.finding = (
                        f"the first layer that differs from ONNX Runtime: '{node.name}' ({node.op_type}), which gives "
                        f"'{value.name}', by {share.largest:.2g} of its largest number, at step {number} "
                        f"('{piece.part}'), row {row}; {place} layers before it agree"
                    )


def _check_same(manifest: Manifest, files: Sequence[Path], model: Path) -> None:
    if model_identity(manifest.model) != model_identity([identify(path) for path in files]):
        names = ", ".join(file.name for file in manifest.model)
        raise ManifestError(
            f"{model}: not the model that the engine was built from ({names}), by content; give that one, or build "
            "the engine again"
        )


def _layers(model: ModelProto, manifest: Manifest) -> list[tuple[ValueInfoProto, NodeProto]]:
    """Return the outputs of the layers, in the order of the graph, with the nodes that compute them."""
    known = {v.name: v for v in onnx.shape_inference.infer_shapes(model).graph.value_info}
    taken = {t.name for t in manifest.plan.tensors}
    layers = []
    for node in model.graph.node:
        value = known.get(node.output[0])
        if node.op_type not in _LAYERS or value is None or value.name in taken:
            continue
        kind = value.type.tensor_type
        if kind.elem_type in _FLOATS and len(kind.shape.dim) in (3, 4):
            layers.append((value, node))
    if not layers:
        raise UnsupportedModelError("no layer of this model can be looked at: none has a known type and rank")
    return layers


@contextmanager
def _reference(model: ModelProto, values: Sequence[ValueInfoProto], path: Path) -> Iterator[WideSession]:
    """Open the rewritten model with these outputs in ONNX Runtime, in float32."""
    marked, _ = for_cpu(with_outputs(model, values))
    with TemporaryDirectory(prefix="trt-kvcache-check-") as name:
        try:
            yield WideSession(*float32_copy(marked, path.parent if path.is_file() else path, Path(name)))
        except RunError as error:
            raise UnsupportedModelError(f"{path}: ONNX Runtime does not run the rewritten model: {error}") from None

"""Engines of the fake TensorRT with their proofs: right ones, and such as a wrong TensorRT would make."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import onnx
from runtime.engines import edit, write_engine
from runtime.fake_tensorrt import MAGIC

from trt_kvcache.compare.bounds import Bounds
from trt_kvcache.compare.proof import Proof, encode_proof
from trt_kvcache.compare.proof_recording import record_proof
from trt_kvcache.engine.manifest import Manifest, load_manifest, proof_path
from trt_kvcache.files import identify
from trt_kvcache.importer import import_model
from trt_kvcache.importer.cache_plan import PlanOptions

BATCH, CHUNK = 3, 8


_PROOFS: dict[object, Proof] = {}


def recorded(model: Path, options: PlanOptions | None = None, batch: int = BATCH) -> Proof:
    """The proof of a model, recorded once for all of the same contents."""
    key = model.read_bytes(), options, batch
    if key not in _PROOFS:
        _PROOFS[key] = record_proof(import_model(model, options or PlanOptions()), Bounds(batch, CHUNK, 4))
    return _PROOFS[key]


def write_proved(
    model: Path, *, options: PlanOptions | None = None, batch: int = BATCH,
    fault: Callable[[onnx.ModelProto], object] | None = None,
) -> Path:  # fmt: skip
    """Write an engine with manifest and proof; with a fault, one that computes something else than it should."""
    engine = write_engine(model, options=options, max_batch=batch, max_chunk=CHUNK)
    if fault is not None:
        header, content = engine.read_bytes()[len(MAGIC) :].split(b"\n", 1)
        wrong = onnx.load_from_string(content)
        fault(wrong)
        engine.write_bytes(MAGIC + header + b"\n" + wrong.SerializeToString())
        edit(engine, lambda m: replace(m, engine=identify(engine)))
    bind(engine, recorded(model, options, batch))
    return engine


def bind(engine: Path, proof: Proof) -> None:
    """Write the proof of an engine, and name it in the manifest."""
    path = proof_path(engine)
    path.write_bytes(encode_proof(proof, load_manifest(engine).engine.blake3))
    edit(engine, lambda m: named(m, path))


def named(manifest: Manifest, proof: Path) -> Manifest:
    """The manifest with this proof."""
    return replace(manifest, proof=identify(proof))

"""Records the proof of an engine after TensorRT has parsed its model; TensorRT's network runs some of its steps."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from onnx import ModelProto

from trt_kvcache.compare.parsed import NetworkComparison, NetworkWatch, too_large
from trt_kvcache.compare.proof import Proof
from trt_kvcache.compare.record import Watch, record_proof
from trt_kvcache.engine.build_process import Job
from trt_kvcache.engine.manifest import NO_PROOF
from trt_kvcache.errors import BuildError, TrtKvCacheError
from trt_kvcache.importer import ImportedModel
from trt_kvcache.importer.files.source import load_source

__all__ = ["Recorded", "record"]

_BUDGET = 50.0  # seconds of one decode without --proof STEPS; the whole proof takes about two and a half times as long
_COMPARED = (0, 2, 4)  # steps that the network runs: NumPy takes seconds for one of a large model


@dataclass(frozen=True)
class Recorded:
    """The result of a recording.

    Attributes:
        proof: the proof; None: there is none.
        note: what the proof cannot show, or why there is none.
        network: comparison of the network with the model; None: they were not compared.
    """

    proof: Proof | None = None
    note: str = ""
    network: NetworkComparison | None = None


def record(job: Job, content: bytes, weights: dict[str, bytearray], network: Any, trt: Any) -> Recorded:
    """Record the proof of an engine, and compare TensorRT's network with the model on some of its steps.

    Args:
        job: job of the engine.
        content: the rewritten model.
        weights: bytes that TensorRT was given instead of those in the model's files, by name.
        network: TensorRT's ``INetworkDefinition``.
        trt: the module that parsed it.

    Raises:
        TrtKvCacheError: the caller asked for a number of steps, and they cannot be recorded.
        BuildError: the network computes something else than the model.
    """
    assert job.bounds is not None
    model, steps = ModelProto.FromString(content), None if job.build.proof == "auto" else int(job.build.proof)
    watches: list[NetworkWatch] = []
    large = too_large(model, job.plan, job.bounds.batch)

    def watch(wide: ModelProto, folder: Path, garbage: float) -> Watch:
        watches.append(NetworkWatch(network, trt, wide, folder, garbage, _COMPARED))

        def look(feeds: Any, outputs: Any) -> None:
            watches[0](feeds, outputs)
            watches[0].found.check()

        return look

    def compared() -> NetworkComparison | None:
        found = watches[0].found if watches else NetworkComparison(0, 0.0, note=large) if large else None
        return found if found is not None and (found.steps or found.note) else None

    try:
        imported = ImportedModel(load_source(job.model), job.plan, model)
        proof = record_proof(
            imported, job.bounds, steps=steps, seconds=_BUDGET if steps is None else None, replaced=weights,
            watch=None if large else watch,
        )  # fmt: skip
    except BuildError:
        raise
    except TrtKvCacheError as error:
        if steps is not None:
            raise type(error)(f"{NO_PROOF}{error.message}; leave --proof out, or give --proof off") from error
        return Recorded(None, f"{NO_PROOF}{error.message}", compared())
    except Exception as error:
        if steps is not None:
            raise
        last = (str(error).strip().splitlines() or [""])[-1]
        why = f"{type(error).__name__}: {last}: a fault in trt_kvcache, please report it with the output of --proof 5"
        return Recorded(None, f"{NO_PROOF}{why}", compared())
    return Recorded(proof, proof.facts.note, compared())

"""Checks of the network that TensorRT parsed, before the build: against the plan, and in numbers against the model.

TensorRT ignores what it does not know. The proof is recorded on the way: the network runs some of its steps.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from onnx import ModelProto

from trt_kvcache.compare.network_comparison import NetworkComparison, NetworkWatch, too_large
from trt_kvcache.compare.proof import Proof
from trt_kvcache.compare.proof_recording import Watch, record_proof
from trt_kvcache.engine.build_process import Job
from trt_kvcache.engine.manifest import NO_PROOF
from trt_kvcache.errors import BuildError, TrtKvCacheError
from trt_kvcache.importer import ImportedModel
from trt_kvcache.importer.files.source import load_source
from trt_kvcache.importer.plan import TENSORRT_DTYPES, CachePlan, Dim, Route, TensorRole

__all__ = ["Recorded", "check_network", "record"]

_REPORT = "this is a fault in trt_kvcache, please report it with the model"
_BUDGET = 50.0  # seconds of one decode without --proof STEPS; the whole proof takes about two and a half times as long
_COMPARED = (0, 2, 4)  # steps that the network runs: NumPy takes seconds for one of a large model


def check_network(network: Any, plan: CachePlan, trt: Any) -> None:
    """Compare the network's cache updates, inputs and outputs with the plan's.

    Raises:
        BuildError: they differ; the engine would contradict its manifest.
    """
    layers = [network.get_layer(i) for i in range(network.num_layers)]
    updates = [layer for layer in layers if layer.type == trt.LayerType.KV_CACHE_UPDATE]
    parsed = Counter((layer.get_input(0).name, layer.get_output(0).name) for layer in updates)
    planned = Counter((c.past, c.present) for c in plan.caches if c.route is Route.NATIVE)
    if missing := planned - parsed:
        raise BuildError(
            f"the parsed network has {parsed.total()} KV-cache layers, the plan {planned.total()}; missing: "
            f"{_pairs(missing)}. The engine would not update them in place; {_REPORT}"
        )
    if surplus := parsed - planned:
        raise BuildError(
            f"the parsed network has KV-cache layers that are not in the plan: {_pairs(surplus)}; {_REPORT}"
        )
    # If the parser does not find the plugin, it uses the node's definition in ONNX: correct, but with a copy.
    plugins = [layer for layer in layers if layer.type == trt.LayerType.PLUGIN_V3]
    # The caches come first among their inputs and outputs.
    written = {(p.get_input(j).name, p.get_output(j).name) for p in plugins for j in range(p.num_outputs)}
    by_plugin = [(c.past, c.present) for c in plan.caches if c.route is Route.PLUGIN]
    if lost := [pair for pair in by_plugin if pair not in written]:
        raise BuildError(
            f"the parsed network has no layer of the cache-update plugin for {_pairs(lost)}. The engine would not "
            f"update them in place; {_REPORT}"
        )
    inputs, outputs = ([t for t in plan.tensors if t.io == io] for io in ("input", "output"))
    _check_tensors("input", [network.get_input(i) for i in range(network.num_inputs)], inputs)
    _check_tensors("output", [network.get_output(i) for i in range(network.num_outputs)], outputs)


def _pairs(pairs: Iterable[tuple[str, str]]) -> str:
    return ", ".join(f"{past} -> {present}" for past, present in pairs)


def _check_tensors(io: str, parsed: list[Any], planned: list[TensorRole]) -> None:
    """Check names, dtypes and shapes of the network's inputs or outputs."""
    expected = {t.name: t for t in planned}
    names = [t.name for t in parsed]
    if set(names) != set(expected):
        raise BuildError(
            f"the parsed network's {io}s differ from the plan's: "
            f"missing {sorted(set(expected) - set(names))}, unknown {sorted(set(names) - set(expected))}"
        )
    for tensor in parsed:
        role = expected[tensor.name]
        dtype = tensor.dtype.name
        if dtype != TENSORRT_DTYPES.get(role.dtype):
            raise BuildError(f"TensorRT gives {io} {role.name!r} the dtype {dtype}, the model says {role.dtype}")
        if not _same_shape(tuple(tensor.shape), role.shape, exact=io == "input"):
            raise BuildError(
                f"TensorRT gives {io} {role.name!r} the shape {list(tensor.shape)}, the plan says {list(role.shape)}"
            )
        if io == "input" and tensor.is_shape_tensor:
            raise BuildError(
                f"input {role.name!r} decides shapes by its values (TensorRT reads it on the CPU before every step), "
                "which is not supported; export the model so that it takes this size from the shape of an input"
            )


def _same_shape(parsed: tuple[int, ...], planned: tuple[Dim, ...], *, exact: bool) -> bool:
    """Compare shapes. -1 is TensorRT's dynamic size; it may know more or less about an output than the model."""
    if len(parsed) != len(planned):
        return False
    for size, dim in zip(parsed, planned, strict=True):
        if isinstance(dim, int):
            if size != dim and (exact or size != -1):
                return False
        elif exact and size != -1:
            return False
    return True


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
    large = too_large(model, job.plan, job.bounds.batch)
    watches: list[NetworkWatch] = []

    def watch(wide: ModelProto, folder: Path, garbage: float) -> Watch:
        watches.append(NetworkWatch(network, trt, wide, folder, garbage, () if large else _COMPARED))

        def look(feeds: Any, outputs: Any) -> None:
            watches[0](feeds, outputs)
            watches[0].found.check()

        return look

    def compared() -> NetworkComparison | None:
        found = NetworkComparison(0, 0.0, note=large) if large or not watches else watches[0].found
        return found if found.steps or found.note else None

    try:
        imported = ImportedModel(load_source(job.model), job.plan, model)
        proof = record_proof(
            imported, job.bounds, steps=steps, seconds=_BUDGET if steps is None else None, replaced=weights, watch=watch
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

"""Sequences of a batch that depend on each other: refused, since who shares a batch must not change a text.

    long = ReduceMax(positions) > 4096                  one answer for the whole batch
    cos  = Cos(positions * Where(long, long_factors, short_factors))

Exporters write a rotary embedding that depends on the length (LongRoPE, dynamic NTK) with the length of the longest
sequence. Two steps are evaluated that differ in where the other sequences are, and in nothing else: whatever reaches
weights or tokens must then be the same for the first sequence.
"""

from __future__ import annotations

import numpy as np
import onnx
import onnx_graphsurgeon as gs

from trt_kvcache.errors import UnsupportedModelError
from trt_kvcache.importer.normalize.cancelled import canonical_step
from trt_kvcache.importer.normalize.canonical import Canonical
from trt_kvcache.importer.normalize.probe import Array, Blueprint, Probe
from trt_kvcache.importer.normalize.samples import Interface, Samples
from trt_kvcache.importer.plan import OriginalRole

# Integers that other operators take are sizes, such as how much of a table of positions is cut out.
_LOOKUPS = ("Gather", "GatherND", "GatherElements", "RotaryEmbedding")


def check_independence(graph: gs.Graph, canonical: Canonical, interface: Interface, samples: Samples) -> None:
    """Refuse a model in which the positions of one sequence change what another one computes.

    Args:
        graph: canonical; dead nodes are gone.
        canonical: of the graph.
        interface: of the model as exported.
        samples: of the model as exported.

    Raises:
        UnsupportedModelError: naming the operator where it shows.
    """
    sample = samples.twins[0]
    last = sample.capacity - sample.length
    if sample.batch < 2 or last < 1:
        return
    model = gs.export_onnx(graph)
    blueprint = Blueprint(model, {})
    roles = {t.name: interface.inputs[t.name].role for t in graph.inputs if t.name in interface.inputs}
    sources = [t.name for t in graph.inputs if roles.get(t.name, OriginalRole.POSITIONS) is OriginalRole.POSITIONS]
    for own, other in ((0, last), (last, 0)):
        alone, beside = np.full(sample.batch, own, np.int64), np.full(sample.batch, other, np.int64)
        beside[0] = own
        steps = [canonical_step(graph, canonical, interface, blueprint, sample, s) for s in (alone, beside)]
        _compare(model, sources, steps[0], steps[1], sample.batch)


def _compare(model: onnx.ModelProto, sources: list[str], alone: Probe, beside: Probe, batch: int) -> None:
    readers: dict[str, list[onnx.NodeProto]] = {}
    for node in model.graph.node:
        for name in node.input:
            readers.setdefault(name, []).append(node)
    pending, seen = list(sources), set(sources)
    while pending:
        name = pending.pop()
        for node in readers.get(name, ()):
            if node.op_type in ("TensorScatter", "Attention"):
                continue
            known = [o for o in node.output if o and alone.value(o) is not None]
            pending += [o for o in known if o not in seen]
            seen.update(known)
            if not known and not _agree(node, alone.value(name), beside.value(name), batch):
                raise UnsupportedModelError(
                    f"{node.op_type} '{node.name}' computes with '{name}', which for one sequence of a batch depends "
                    "on the positions of the others, such as rotary factors chosen by the longest sequence (LongRoPE, "
                    "dynamic NTK); supported are sequences that do not depend on each other: export with a batch of 1, "
                    "or take a capacity below the length at which the factors change"
                )


def _agree(node: onnx.NodeProto, alone: Array | None, beside: Array | None, batch: int) -> bool:
    """Whether the first sequence reads the same."""
    if alone is None or beside is None or (alone.dtype.kind in "iu" and node.op_type not in _LOOKUPS):
        return True
    if alone.shape != beside.shape:
        return False
    return np.array_equal(_first(alone, batch), _first(beside, batch), equal_nan=alone.dtype.kind == "f")


def _first(value: Array, batch: int) -> Array:
    """What belongs to the first sequence; everything where nothing says."""
    if batch in value.shape:
        return np.asarray(value.take(0, axis=value.shape.index(batch)))
    if value.ndim and value.shape[0] % batch == 0:
        return np.asarray(value[: value.shape[0] // batch])
    return value

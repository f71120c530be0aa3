"""Sequences of a batch that depend on each other: refused, since who shares a batch must not change a text.

    long = ReduceMax(positions) > 4096                  one answer for the whole batch
    cos  = Cos(positions * Where(long, long_factors, short_factors))

Exporters write a rotary embedding that depends on the length (LongRoPE, dynamic NTK) with the length of the longest
sequence. Steps are evaluated that differ in where the other sequences are, and in nothing else: whatever reaches
weights or tokens must then be the same for the first sequence, and for the last. This is asked of every model: of one
that normalization changed by what is known of it as exported, of others by the roles of their inputs.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import product

import numpy as np
import onnx
import onnx_graphsurgeon as gs

from trt_kvcache.errors import UnsupportedModelError
from trt_kvcache.importer.interface.exported import Interface
from trt_kvcache.importer.interface.mrope import place_positions
from trt_kvcache.importer.normalize.cancelled import canonical_step
from trt_kvcache.importer.normalize.canonical import Canonical
from trt_kvcache.importer.normalize.counted import draw
from trt_kvcache.importer.normalize.evidence.batch_axis import BATCHES, check_batch_axis
from trt_kvcache.importer.normalize.evidence.blueprint import Array, Blueprint
from trt_kvcache.importer.normalize.evidence.probe import Probe, Shape
from trt_kvcache.importer.normalize.evidence.samples import Samples
from trt_kvcache.importer.plan import OriginalRole, Role, TensorRole
from trt_kvcache.importer.protos import elem_type_of, shape_of

# Integers that other operators take are sizes, such as how much of a table of positions is cut out.
_LOOKUPS = ("Gather", "GatherND", "GatherElements", "RotaryEmbedding")
_BATCH, _LENGTH = 5, 3  # of a step, where the model does not fix them
_DRAWS = 8  # of tokens
_OTHER = 6  # size of axes that nothing explains
_SOURCES = (Role.POSITIONS, Role.WRITE_INDICES, Role.VALID_LENGTHS)


def check_independence(
    graph: gs.Graph, canonical: Canonical, interface: Interface, samples: Samples, ids: Collection[int] = ()
) -> None:
    """Refuse a model in which the positions of one sequence change what another one computes.

    Args:
        graph: canonical; dead nodes are gone.
        canonical: of the graph.
        interface: of the model as exported.
        samples: of the model as exported.
        ids: tokens that positions are counted with, where they are: then the others' tokens must not matter, either.

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
    for (own, other), row in product(((0, last), (last, 0)), (0, sample.batch - 1)):
        alone, beside = np.full(sample.batch, own, np.int64), np.full(sample.batch, other, np.int64)
        beside[row] = own
        steps = [canonical_step(graph, canonical, interface, blueprint, sample, s) for s in (alone, beside)]
        _compare(model, sources, steps[0], steps[1], sample.batch, row)
    for seed in range(_DRAWS if ids else 0):
        rng = np.random.default_rng(seed)
        row = (0, sample.batch - 1)[seed % 2]  # what is summed up over the batch, the first one does not show
        tokens = draw(ids, (2, sample.batch, sample.length), rng)
        begins = rng.integers(0, last + 1, (2, sample.batch))
        tokens[1, row], begins[1, row] = tokens[0, row], begins[0, row]
        drawn = [
            canonical_step(graph, canonical, interface, blueprint, sample, s).given({canonical.tokens.name: t})
            for s, t in zip(begins, tokens, strict=True)
        ]
        _compare(model, [*sources, canonical.tokens.name], drawn[0], drawn[1], sample.batch, row)


def check_exported(model: onnx.ModelProto, roles: Sequence[TensorRole], capacity: int) -> None:
    """As `check_independence`, of a model whose caches were canonical as exported.

    Args:
        model: prepared.
        roles: of its inputs.
        capacity: tokens per sequence.

    Raises:
        UnsupportedModelError: naming the operator where it shows.
    """
    inputs = [r for r in roles if r.io == "input"]
    shapes = {v.name: shape_of(v) or () for v in model.graph.input}
    batch = next((d for r in inputs if r.role is Role.CACHE and isinstance(d := shapes[r.name][0], int)), _BATCH)
    tokens = next((shapes[r.name] for r in inputs if r.role is Role.TOKENS), ())
    length = next((d for d in tokens[1:2] if isinstance(d, int)), min(_LENGTH, capacity - 1))
    last = capacity - length
    if batch < 2 or length < 1 or last < 1:
        return
    blueprint = Blueprint(model, {})
    sources = [r.name for r in inputs if r.role in _SOURCES]
    for (own, other), row in product(((0, last), (last, 0)), (0, batch - 1)):
        starts = np.full((2, batch), own, np.int64)
        starts[1] = other
        starts[1, row] = own
        alone, beside = (_exported_step(blueprint, inputs, s, length, capacity) for s in starts)
        _compare(model, sources, alone, beside, batch, row)


def check_batch(model: onnx.ModelProto, roles: Sequence[TensorRole], capacity: int) -> None:
    """Refuse a model in which an operator behind weights is along the sequences of a batch: see `batch_axis`.

    Args:
        model: canonical.
        roles: of its inputs.
        capacity: tokens per sequence.

    Raises:
        UnsupportedModelError: naming the operator.
    """
    inputs = [r for r in roles if r.io == "input"]
    shapes = {v.name: shape_of(v) or () for v in model.graph.input}
    tokens = next((shapes[r.name] for r in inputs if r.role is Role.TOKENS), ())
    length = next((d for d in tokens[1:2] if isinstance(d, int)), min(_LENGTH, capacity))
    blueprint = Blueprint(model, {})
    few, many = (
        _exported_step(blueprint, inputs, np.zeros(batch, np.int64), length, capacity, other=_OTHER)
        for batch in BATCHES
    )
    check_batch_axis(model, few, many)


def _exported_step(
    blueprint: Blueprint, inputs: Sequence[TensorRole], starts: Array, length: int, capacity: int, other: int = 0
) -> Probe:
    """A step of `length` tokens in every sequence, with rows that start at `starts`, int64 ``[B]``.

    `other`: size of axes that nothing explains; 0: inputs that have one are left out.
    """
    sizes = {"batch": len(starts), "sequence": length, "keys": capacity}
    shapes: dict[str, Shape] = {}
    values: dict[str, Array] = {}
    for role in inputs:
        value = blueprint.inputs[role.name]
        shape = tuple(
            d if isinstance(d, int) else sizes.get(a, other)
            for d, a in zip(shape_of(value) or (), role.axes, strict=True)
        )
        if not all(shape):
            continue  # nothing says how large it is
        shapes[role.name] = shape
        rows = None
        axes = role.axes if len(shape) > 2 else ("batch", "sequence")
        if role.role is Role.POSITIONS and shape[-1:] == (length,) and "batch" in axes and len(starts) in shape[:-1]:
            rows = place_positions(starts[:, None] + np.arange(length), shape, axes)
        elif role.role in (Role.WRITE_INDICES, Role.VALID_LENGTHS) and shape == (len(starts),):
            rows = starts + (length if role.role is Role.VALID_LENGTHS else 0)
        if rows is not None:
            values[role.name] = rows.astype(onnx.helper.tensor_dtype_to_np_dtype(elem_type_of(value)))
    return Probe(blueprint, shapes, values)


def _compare(model: onnx.ModelProto, sources: list[str], alone: Probe, beside: Probe, batch: int, row: int = 0) -> None:
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
            if not known and not _agree(node, alone.value(name), beside.value(name), batch, row):
                raise UnsupportedModelError(
                    f"{node.op_type} '{node.name}' computes with '{name}', which for one sequence of a batch depends "
                    "on the positions of the others, such as rotary factors chosen by the longest sequence (LongRoPE, "
                    "dynamic NTK); supported are sequences that do not depend on each other: export with a batch of 1, "
                    "or take a capacity below the length at which the factors change"
                )


def _agree(node: onnx.NodeProto, alone: Array | None, beside: Array | None, batch: int, row: int) -> bool:
    """Whether a sequence reads the same."""
    if alone is None or beside is None or (alone.dtype.kind in "iu" and node.op_type not in _LOOKUPS):
        return True
    if alone.ndim != beside.ndim:
        return False
    # What is cut to the longest sequence is longer in one of them; the sequence has no part in the rest.
    both = tuple(slice(min(sizes)) for sizes in zip(alone.shape, beside.shape, strict=True))
    alone, beside = alone[both], beside[both]
    alone, beside = (_of_row(value, batch, row) for value in (alone, beside))
    return np.array_equal(alone, beside, equal_nan=alone.dtype.kind == "f")


def _of_row(value: Array, batch: int, row: int) -> Array:
    """What belongs to a sequence; everything where nothing says."""
    if batch in value.shape:
        return np.asarray(value.take(row, axis=value.shape.index(batch)))
    if value.ndim and value.shape[0] % batch == 0:
        return np.asarray(np.split(value, batch)[row])
    return value

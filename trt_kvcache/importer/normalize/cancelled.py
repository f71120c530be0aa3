"""Counts in which the length of the past cancels out: S as the rows of the present minus those of the past.

Caches of a fixed capacity have as many rows before a step as after it, so such a count is another one in the canonical
graph. It is evaluated there, in a step of the same sizes, and must have kept its value.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
import onnx_graphsurgeon as gs

from trt_kvcache.errors import UnsupportedModelError
from trt_kvcache.importer.graph import dims
from trt_kvcache.importer.normalize.canonical import Canonical
from trt_kvcache.importer.normalize.probe import Array, Blueprint, Probe, Shape
from trt_kvcache.importer.normalize.samples import Interface, Sample, Samples
from trt_kvcache.importer.plan import OriginalRole

_OTHER_ROWS = 3  # of a padding mask beyond the capacity: nothing says how long it is from now on


def check_cancelled(
    graph: gs.Graph, canonical: Canonical, interface: Interface, names: Sequence[str], samples: Samples
) -> None:
    """Refuse a count that did not depend on the length of the past and is another one now.

    Args:
        graph: canonical.
        canonical: of the graph.
        interface: of the model as exported.
        names: of the counts.
        samples: of the model as exported; that the counts stay is promised for all lengths.

    Raises:
        UnsupportedModelError: naming the count.
    """
    if not names:
        return
    model = gs.export_onnx(graph)
    blueprint = Blueprint(model, {})
    now: dict[tuple[int, int], Probe] = {}

    def check(name: str, sample: Sample) -> None:
        size = (sample.batch, sample.length)
        if size not in now:
            starts = np.full(sample.batch, sample.past, np.int64)
            now[size] = canonical_step(graph, canonical, interface, blueprint, sample, starts)
        before, after = sample.probe.value(name), now[size].value(name)
        if before is None or after is None or not np.array_equal(before, after):
            raise UnsupportedModelError(
                f"'{name}' is computed from the length of the cache and of something else, such as the number of "
                "new tokens as the rows of the present minus those of the past; supported are caches that only "
                "attention reads, and positions counted from their length: take this number from the tokens"
            )

    made = {name for node in model.graph.node for name in node.output}
    live = [name for name in names if name in made]
    for sample in samples.twins:
        now.clear()  # with the positions of each
        for name in live:
            check(name, sample)
    for name in live:
        samples.promise([name], "cancelled", partial(check, name))


def canonical_step(
    graph: gs.Graph,
    canonical: Canonical,
    interface: Interface,
    blueprint: Blueprint,
    sample: Sample,
    starts: Array,
) -> Probe:
    """The canonical graph in a step of a sample's sizes, with rows that start at `starts`, int64 ``[B]``."""
    shapes: dict[str, Shape] = {}
    values: dict[str, Array] = {}
    first = canonical.write_indices
    for tensor in graph.inputs:
        role = interface.inputs[tensor.name].role if tensor.name in interface.inputs else None
        shape, value = sample.probe.shape(tensor.name), sample.probe.value(tensor.name)
        if role is None:
            shape, value = (sample.batch,), starts if tensor is first else starts + sample.length
        elif role is OriginalRole.POSITIONS and shape is not None and value is not None and len(shape) > 1:
            steps = starts.reshape(-1, *[1] * (len(shape) - 1)) + np.arange(shape[-1])
            value = np.broadcast_to(steps, shape).astype(value.dtype)
        elif role is OriginalRole.GROWING_CACHE:
            shape = tuple(d if isinstance(d, int) else sample.batch for d in dims(tensor) or ())
        elif role is OriginalRole.PADDING_MASK and shape is not None:
            shape = (*shape[:-1], sample.capacity + _OTHER_ROWS)
            value = np.ones(shape, np.int64 if value is None else value.dtype)
        if shape is not None:
            shapes[tensor.name] = shape
        if value is not None:
            values[tensor.name] = value
    return Probe(blueprint, shapes, values)

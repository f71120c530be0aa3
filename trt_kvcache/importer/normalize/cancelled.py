"""Counts in which the length of the past cancels out: S as the rows of the present minus those of the past.

Caches of a fixed capacity have as many rows before a step as after it, so such a count is another one in the canonical
graph. It is evaluated there, in a step of the same sizes, and must have kept its value.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_graphsurgeon as gs

from trt_kvcache.errors import UnsupportedModelError
from trt_kvcache.importer.graph import dims
from trt_kvcache.importer.interface.exported import Interface
from trt_kvcache.importer.interface.mrope import place_positions
from trt_kvcache.importer.normalize.canonical import Canonical
from trt_kvcache.importer.normalize.evidence.blueprint import Array, Blueprint
from trt_kvcache.importer.normalize.evidence.probe import Probe, Shape
from trt_kvcache.importer.normalize.evidence.samples import Sample, Samples
from trt_kvcache.importer.plan import OriginalRole

_OTHER_ROWS = 3  # of a padding mask beyond the capacity, and of counters: nothing says what they are from now on


def check_cancelled(
    graph: gs.Graph, canonical: Canonical, interface: Interface, names: Sequence[str], samples: Samples
) -> None:
    """Refuse a count that did not depend on the length of the past and is another one now.

    Args:
        graph: canonical.
        canonical: of the graph.
        interface: of the model as exported.
        names: of the counts.
        samples: of the model as exported.

    Raises:
        UnsupportedModelError: naming the count.
    """
    if not names:
        return
    model = gs.export_onnx(graph)
    made = {name for node in model.graph.node for name in node.output}
    live = [name for name in names if name in made]
    if not live:
        return
    blueprint = Blueprint(model, {})

    def step(sample: Sample) -> Probe:
        starts = np.full(sample.batch, sample.past, np.int64)
        return canonical_step(graph, canonical, interface, blueprint, sample, starts)

    always: dict[tuple[str, int, int], Array | None] = {}  # the value that does not depend on the past
    for sample in samples.twins:
        probe = step(sample)
        for name in live:
            before, after = sample.probe.value(name), probe.value(name)
            one = always.setdefault((name, sample.batch, sample.length), before)
            if before is None or not all(v is not None and np.array_equal(before, v) for v in (one, after)):
                raise UnsupportedModelError(
                    f"'{name}' is computed from the length of the cache and of something else, such as the number of "
                    "new tokens as the rows of the present minus those of the past; supported are caches that only "
                    "attention reads, and positions counted from their length: take this number from the tokens"
                )


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
    for tensor in graph.inputs:
        shape, value = _fact(tensor, canonical, interface, sample, starts)
        if shape is not None:
            shapes[tensor.name] = shape
        if value is not None:
            values[tensor.name] = value
    return Probe(blueprint, shapes, values)


def _fact(
    tensor: gs.Tensor, canonical: Canonical, interface: Interface, sample: Sample, starts: Array
) -> tuple[Shape | None, Array | None]:
    """Shape and value of an input of the canonical graph in a step, as far as they are known."""
    role = interface.inputs[tensor.name].role if tensor.name in interface.inputs else None
    shape, value = sample.probe.shape(tensor.name), sample.probe.value(tensor.name)
    if role is None:
        return (sample.batch,), starts if tensor is canonical.write_indices else starts + sample.length
    if role is OriginalRole.POSITIONS and shape is not None and value is not None and len(shape) > 1:
        rows = starts[:, None] + np.arange(shape[-1])
        value = place_positions(rows, shape, interface.inputs[tensor.name].axes).astype(value.dtype)
    elif role is OriginalRole.PAST_LENGTH and value is not None:
        value = value + np.asarray(_OTHER_ROWS, value.dtype)
    elif role is OriginalRole.GROWING_CACHE:
        shape = tuple(d if isinstance(d, int) else sample.batch for d in dims(tensor) or ())
    elif role is OriginalRole.PADDING_MASK and shape is not None:
        shape = (*shape[:-1], sample.capacity + _OTHER_ROWS)
        value = np.ones(shape, np.int64 if value is None else value.dtype)
    return shape, value

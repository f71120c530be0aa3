"""A cache update as plain operators: correct on every target, but it writes a whole new cache.

present = ScatterElements(past, Expand((write_indices + arange(S_new)) [mod S_max]), update)
"""

from __future__ import annotations

import onnx_graphsurgeon as gs

from trt_kvcache.importer.graph import INT64, Emitter, input_or_none
from trt_kvcache.importer.plan import CacheUpdate, UpdateMode


def rewrite_functional(emitter: Emitter, node: gs.Node, cache: CacheUpdate) -> None:
    """Replace the update by ScatterElements, for any rank and axis."""
    past, update, indices = node.inputs[0], node.inputs[1], input_or_none(node, 2)
    axis, rank = cache.sequence_axis, len(cache.logical_shape)
    count = emitter.op("Shape", [update], f"{cache.past}_rows", INT64, start=axis, end=axis + 1)
    scalar = emitter.op("Squeeze", [count], f"{cache.past}_row_count", INT64)
    rows = emitter.op("Range", [emitter.ints(0), scalar, emitter.ints(1)], f"{cache.past}_iota", INT64)
    if indices is not None:
        first = emitter.op("Unsqueeze", [indices, emitter.ints([1])], f"{cache.past}_first", INT64)
        rows = emitter.op("Add", [first, rows], f"{cache.past}_positions", INT64)
        between = [i for i in range(1, rank) if i != axis]
    else:
        between = [i for i in range(rank) if i != axis]
    if cache.mode is UpdateMode.CIRCULAR:
        rows = emitter.op("Mod", [rows, emitter.ints(cache.capacity)], f"{cache.past}_wrapped", INT64)
    if between:
        rows = emitter.op("Unsqueeze", [rows, emitter.ints(between)], f"{cache.past}_aligned", INT64)
    shape = emitter.op("Shape", [update], f"{cache.past}_update_shape", INT64)
    where = emitter.op("Expand", [rows, shape], f"{cache.past}_where", INT64)
    node.op, node.domain, node.attrs = "ScatterElements", None, {"axis": axis}
    node.inputs = [past, where, update]

"""Rows of a table that are cut out by the length of the past: learned positions, as in onnxruntime-genai's Whisper.

Add(x [B, S, H], Slice(table [positions, H], P, P + S))
becomes
Add(x, Gather(table, write_indices + arange(S))  [B, S, H])
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_graphsurgeon as gs

from trt_kvcache.errors import OptionError
from trt_kvcache.importer.graph import consumers, contains, dims, input_or_none, is_op, replace_uses
from trt_kvcache.importer.normalize.canonical import Canonical
from trt_kvcache.importer.normalize.samples import Sample


def gather_rows(graph: gs.Graph, node: gs.Node, canonical: Canonical, samples: Sequence[Sample]) -> bool:
    """Put a Gather by position in the place of `node`, if it is a Slice that provably takes the new tokens' rows.

    Args:
        graph: edited in place.
        node: anything.
        canonical: gives the positions.
        samples: what the bounds are proven on, and that each reader adds the rows to ``[B, S, H]``.

    Returns:
        Whether it was done.

    Raises:
        OptionError: the capacity is more than the table's rows; a Slice beyond them gives fewer, where Gather fails.
    """
    if not is_op(node, "Slice") or not isinstance(node.inputs[0], gs.Constant):
        return False
    table, rows = node.inputs[0], node.outputs[0]
    shape = dims(table) or ()
    if len(shape) != 2 or contains(graph.outputs, rows) or not all(_takes_new(node, s) for s in samples):
        return False
    if isinstance(shape[0], int) and shape[0] < canonical.capacity:
        raise OptionError(
            f"--capacity is {canonical.capacity}, but the model has {shape[0]} positions: '{node.name}' takes rows of "
            f"the table '{table.name}'; give at most --capacity {shape[0]}"
        )
    if not all(is_op(n, "Add") and _adds_per_row(n, s, shape[1]) for n in consumers(rows) for s in samples):
        return False
    gathered = canonical.emit.op("Gather", [table, canonical.positions()], "position_rows", axis=0)
    replace_uses(rows, gathered)
    return True


def _takes_new(node: gs.Node, sample: Sample) -> bool:
    """Whether the bounds are P and P + S along the first axis, one by one."""
    for index, expected in ((1, sample.past), (2, sample.total), (3, 0), (4, 1)):
        tensor = input_or_none(node, index)
        if tensor is None and index in (3, 4):
            continue
        value = sample.probe.value(tensor.name) if tensor is not None else None
        if value is None or not np.array_equal(value, [expected]):
            return False
    return True


def _adds_per_row(node: gs.Node, sample: Sample, width: int | str) -> bool:
    """Whether the sum is ``[B, S, H]``, so that rows of its own for each sequence fit."""
    return sample.probe.shape(node.outputs[0].name) == (sample.batch, sample.length, width)

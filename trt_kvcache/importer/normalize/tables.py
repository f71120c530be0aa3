"""Rows of a table that are cut out by the length of the past: learned positions, as in onnxruntime-genai's Whisper.

Add(x [B, S, H], Slice(table [positions, H], P, P + S))
becomes
Add(x, Gather(table, write_indices + arange(S))  [B, S, H])
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_graphsurgeon as gs

from trt_kvcache.errors import OptionError, UnsupportedModelError
from trt_kvcache.importer.graph import consumers, contains, dims, input_or_none, is_op, replace_uses
from trt_kvcache.importer.normalize.canonical import Canonical
from trt_kvcache.importer.normalize.samples import Sample, Samples

_PASSING = ("Unsqueeze", "Squeeze", "Reshape", "Expand", "Tile", "Cast", "Identity", "Flatten", "Transpose")


def gather_rows(graph: gs.Graph, node: gs.Node, canonical: Canonical, samples: Samples) -> bool:
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
    bounds = [input_or_none(node, index) for index in range(1, 5)]
    if len(shape) != 2 or contains(graph.outputs, rows) or not all(_takes_new(bounds, s) for s in samples.plain):
        return False
    _check_rows(node, table, shape[0], canonical.capacity)
    if not all(is_op(n, "Add") and _adds_per_row(n, s, shape[1]) for n in consumers(rows) for s in samples.plain):
        return False
    gathered = canonical.emit.op("Gather", [table, canonical.positions()], "position_rows", axis=0)
    replace_uses(rows, gathered)

    def takes_new(sample: Sample) -> None:
        if not _takes_new(bounds, sample):
            raise UnsupportedModelError(
                f"Slice '{node.name}' takes rows of the table '{table.name}' that are not those of the new tokens, "
                f"with {sample.past} tokens in the cache and {sample.length} new; supported are rows P .. P + S - 1"
            )

    samples.promise([t.name for t in bounds if t is not None], "new rows", takes_new)
    return True


def check_tables(graph: gs.Graph, canonical: Canonical) -> None:
    """Refuse tables that end before the caches do, where positions counted in the graph look them up.

    What a lookup behind the end gives is not defined: ONNX Runtime fails, TensorRT does not say so.

    Args:
        graph: canonical; dead nodes are gone.
        canonical: of the graph.

    Raises:
        OptionError: the capacity is more than a table's rows.
    """
    pending = [t for t in graph.tensors().values() if t.name == canonical.positions_name]
    while pending:
        tensor = pending.pop()
        for node in consumers(tensor):
            if is_op(node, *_PASSING) and node.inputs[0] is tensor:
                pending += node.outputs
                continue
            places = {"Gather": (1, 0), "GatherND": (1, 0), "RotaryEmbedding": (3, 1)}
            index, table = places.get(node.op, (0, 0)) if is_op(node, *places) else (0, 0)
            if index and index < len(node.inputs) and node.inputs[index] is tensor:
                axis = int(node.attrs.get("axis", 0)) if is_op(node, "Gather") else 0
                shape = dims(node.inputs[table]) or ()
                if isinstance(node.inputs[table], gs.Constant) and axis < len(shape):
                    _check_rows(node, node.inputs[table], shape[axis], canonical.capacity)


def _check_rows(node: gs.Node, table: gs.Tensor, rows: int | str, capacity: int) -> None:
    if isinstance(rows, int) and rows < capacity:
        raise OptionError(
            f"--capacity is {capacity}, but the model has {rows} positions: '{node.name}' takes rows of the table "
            f"'{table.name}'; give at most --capacity {rows}"
        )


def _takes_new(bounds: Sequence[gs.Tensor | None], sample: Sample) -> bool:
    """Whether the bounds of a Slice are P and P + S along the first axis, one by one."""
    for index, (tensor, expected) in enumerate(zip(bounds, (sample.past, sample.total, 0, 1), strict=True)):
        if tensor is None and index > 1:
            continue
        value = sample.probe.value(tensor.name) if tensor is not None else None
        if value is None or not np.array_equal(value, [expected]):
            return False
    return True


def _adds_per_row(node: gs.Node, sample: Sample, width: int | str) -> bool:
    """Whether the sum is ``[B, S, H]``, so that rows of its own for each sequence fit."""
    return sample.probe.shape(node.outputs[0].name) == (sample.batch, sample.length, width)

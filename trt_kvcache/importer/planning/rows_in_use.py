"""If a graph computes keys or values from caches, shortens these caches to the rows in use first.

    present -- Slice(0, L) -- MatMul, Reshape, ... -> K of an Attention

The canonical form has this Slice if all operators from the cache to the attention work row by row. The row
numbers of a bias have such a Slice, too. At first, the Slices take all L rows; the rewrite ends them at the span.
"""

from __future__ import annotations

import onnx_graphsurgeon as gs

from trt_kvcache.importer.graph import NAME_PREFIX, Emitter, dims, is_op, producer, small_constant

_HINT = "rows_in_use"


def emit_row_slice(emit: Emitter, present: gs.Tensor, axis: int, capacity: int) -> gs.Variable:
    """Emit a Slice of all rows of an updated cache along `axis`. The rewrite may shorten the Slice."""
    rows = emit.op("Slice", [present, *(emit.ints([n]) for n in (0, capacity, axis))], _HINT)
    rows.shape = present.shape
    return rows


def is_row_slice(node: gs.Node, end: gs.Tensor | None = None) -> bool:
    """True for a Slice as `emit_row_slice` makes it, which ends at a constant or at `end`."""
    return (
        is_op(node, "Slice")
        and node.name.startswith(NAME_PREFIX + _HINT)
        and (small_constant(node.inputs[2]) is not None or node.inputs[2] is end)
    )


def row_slices(tensor: gs.Tensor, end: gs.Tensor | None = None) -> list[gs.Node]:
    """Return the row Slices between caches and a tensor; empty if the tensor reads a cache without a row Slice."""
    slices: dict[int, gs.Node] = {}
    pending, seen = [tensor], set[int]()
    while pending:
        current = pending.pop()
        node = producer(current)
        if isinstance(current, gs.Constant) or current.is_empty() or id(node) in seen:
            continue
        if node is None or is_op(node, "TensorScatter"):
            return []
        seen.add(id(node))
        if is_row_slice(node, end):
            slices[id(node)] = node
        else:
            pending += reversed(node.inputs)
    return list(slices.values())


def cut_rows(tensor: gs.Tensor, end: gs.Tensor) -> bool:
    """Make the Slices of row numbers before a tensor stop at row `end`. Return False if there are none."""
    pending, seen, found = [tensor], set[int](), False
    while pending:
        node = producer(pending.pop())
        if node is None or id(node) in seen:
            continue
        seen.add(id(node))
        if is_row_slice(node, end) and isinstance(node.inputs[0], gs.Constant):
            end_with(node, end)
            found = True
        else:
            pending += node.inputs
    return found


def end_with(node: gs.Node, end: gs.Tensor) -> None:
    """Make a Slice end at row `end`, int64 ``[1]``."""
    node.inputs[2] = end
    output = node.outputs[0]
    axis = small_constant(node.inputs[3])
    shape = dims(output)
    assert axis is not None
    output.shape = None if shape is None else [None if d == "?" or i == axis[0] else d for i, d in enumerate(shape)]

"""Caches are sliced to the rows in use for what is computed of them before attention.

    present -- Slice(0, L) -- MatMul, Reshape, ... -> K of an Attention

Normalization puts such a Slice after a cache, which takes all rows, where everything from there to the attention
works on each row by itself; and after the numbers of rows that a bias is computed from. The rewrite lets it end with
the span: then only the rows in use are computed.
"""

from __future__ import annotations

import onnx_graphsurgeon as gs

from trt_kvcache.importer.graph import NAME_PREFIX, Emitter, dims, is_op, producer, small_constant

_HINT = "rows_in_use"


def emit_row_slice(emit: Emitter, present: gs.Tensor, axis: int, capacity: int) -> gs.Variable:
    """All rows of an updated cache, along `axis`, of which the rewrite may take fewer."""
    rows = emit.op("Slice", [present, *(emit.ints([n]) for n in (0, capacity, axis))], _HINT)
    rows.shape = present.shape
    return rows


def is_row_slice(node: gs.Node, end: gs.Tensor | None = None) -> bool:
    """True for such a Slice that does not end with a span yet, or ends with `end`."""
    return (
        is_op(node, "Slice")
        and node.name.startswith(NAME_PREFIX + _HINT)
        and (small_constant(node.inputs[2]) is not None or node.inputs[2] is end)
    )


def row_slices(tensor: gs.Tensor, end: gs.Tensor | None = None) -> list[gs.Node]:
    """The Slices that a tensor is computed from, in the order in which it takes them; none where there is more to it.

    Slices that K and V share may end with `end` already.
    """
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
    """Let a tensor be computed of the first `end` rows of a constant; False: it is not computed from such a Slice."""
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
    """Let a Slice take the first `end` rows, int64 ``[1]``."""
    node.inputs[2] = end
    output = node.outputs[0]
    axis = small_constant(node.inputs[3])
    shape = dims(output)
    assert axis is not None
    output.shape = None if shape is None else [None if d == "?" or i == axis[0] else d for i, d in enumerate(shape)]

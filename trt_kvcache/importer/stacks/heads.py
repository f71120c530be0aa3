"""Caches whose heads are written one by one, written as a whole.

    past [B, N, P, H] -- Slice(n:n+1) -- Concat(new rows of head n) -- what attends to head n
                                                 `- Concat with those of other heads -> present

        becomes

    past -- Concat(Concat(new rows of all heads)) -> present -- Slice(n:n+1) -- what attends to head n

That is the same, whatever the tensors hold, where the Slices are all of an input, each head once, and no new rows are
made of what a head holds. So it is where the last axis is cut, by Slice or Split: keys and values side by side.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import onnx
import onnx_graphsurgeon as gs

from trt_kvcache.importer.graph import (
    FLOATS,
    Emitter,
    consumers,
    contains,
    elem_type,
    input_or_none,
    is_op,
    producer,
    replace_uses,
    small_constant,
)
from trt_kvcache.importer.protos import elem_type_of, shape_of

_RANK = 4


@dataclass(frozen=True, eq=False)
class _Part:
    """One head of a cache.

    Attributes:
        start, end: which one, or which part of the last axis.
        axis: of the heads, or the last one.
        write: the Concat of it and its new rows.
        rows: the axis of these.
    """

    start: int
    end: int
    axis: int
    write: gs.Node
    rows: int


def write_heads_together(model: onnx.ModelProto) -> onnx.ModelProto:
    """The same model with a Concat for each cache in place of one for each head; the same object if there is none.

    Args:
        model: flat, with shapes as far as they are known. Not changed.
    """
    inputs = {v.name for v in model.graph.input if elem_type_of(v) in FLOATS and len(shape_of(v) or ()) == _RANK}
    if not any(node.op_type in ("Slice", "Split") and node.input[0] in inputs for node in model.graph.node):
        return model
    graph: gs.Graph = gs.import_onnx(onnx.shape_inference.infer_shapes(model, data_prop=True))
    emit = Emitter(graph)
    if not [past for past in graph.inputs if str(past.name) in inputs and _join(past, graph, emit)]:
        return model
    graph.cleanup(remove_unused_graph_inputs=False).toposort()
    made: onnx.ModelProto = gs.export_onnx(graph)
    made.ir_version = model.ir_version
    return made


def _join(past: gs.Tensor, graph: gs.Graph, emit: Emitter) -> bool:
    """Write all heads of one cache together, if they are not."""
    found = [_parts(node) for node in consumers(past) if not is_op(node, "Shape")]
    parts = sorted((part for some in found for part in some), key=lambda part: part.start)
    if len(parts) < 2 or not all(found) or len({(part.axis, part.rows) for part in parts}) > 1:
        return False
    axis, rows, ends = parts[0].axis, parts[0].rows, [part.end for part in parts]
    if axis == rows or [part.start for part in parts] != [0, *ends[:-1]] or past.shape[axis] != ends[-1]:
        return False
    if _depends(parts):
        return False
    kind = elem_type(past)
    heads = [part.write.inputs[1] for part in parts]
    joined = next(_joined(heads, axis), None)
    new = _cut_of(heads, parts) if joined is None else joined.outputs[0]
    if new is None:
        new = emit.op("Concat", heads, "new_rows", kind, axis=axis)
    whole = emit.op("Concat", [past, new], "whole_cache", kind, axis=rows)
    for present in list(_joined([part.write.outputs[0] for part in parts], axis)):
        output, maker = present.outputs[0], whole.inputs[0]
        replace_uses(output, whole)
        if contains(graph.outputs, output) and not contains(graph.outputs, whole):
            present.outputs.clear()
            replace_uses(whole, output)
            maker.outputs, whole = [output], output
    for part in parts:
        bounds = [emit.ints([n]) for n in (part.start, part.end, axis)]
        replace_uses(part.write.outputs[0], emit.op("Slice", [whole, *bounds], "head", kind))
    return True


def _parts(node: gs.Node) -> list[_Part]:
    """What a reader of a cache cuts out of it, and who writes to that; nothing where it does something else."""
    cuts = _cuts(node)
    parts = [_part(tensor, *cut) for tensor, cut in zip(node.outputs, cuts, strict=True)] if cuts else []
    return [part for part in parts if part is not None] if None not in parts else []


def _part(tensor: gs.Tensor, axis: int, start: int, end: int) -> _Part | None:
    readers = [n for n in consumers(tensor) if not is_op(n, "Shape")]
    if len(readers) != 1 or not is_op(readers[0], "Concat") or len(readers[0].inputs) != 2:
        return None
    write = readers[0]
    if write.inputs[0] is not tensor or write.inputs[1] is tensor:
        return None
    return _Part(start, end, axis, write, int(write.attrs["axis"]) % _RANK)


def _depends(parts: Sequence[_Part]) -> bool:
    """Whether new rows are made of what a part holds: parts are those of layers then, one behind the other."""
    written = {id(part.write.outputs[0]) for part in parts}
    pending, seen = [part.write.inputs[1] for part in parts], set[int]()
    while pending:
        tensor = pending.pop()
        if id(tensor) in written:
            return True
        if id(tensor) not in seen and (node := producer(tensor)) is not None:
            seen.add(id(tensor))
            pending += [t for t in node.inputs if not t.is_empty()]
    return False


_Cut = tuple[int, int, int]


def _cuts(node: gs.Node) -> list[_Cut]:
    """The axis of each output of a Slice or Split, where it starts and ends; nothing where that is not known."""
    if len(node.inputs[0].shape or ()) != _RANK:
        return []
    if is_op(node, "Split") and int(node.attrs.get("axis", 0)) in (-1, _RANK - 1):
        sizes = [size for t in node.outputs if isinstance(size := (t.shape or ("?",))[-1], int)]
        if len(sizes) < len(node.outputs):
            return []
        return [(_RANK - 1, sum(sizes[:i]), sum(sizes[: i + 1])) for i in range(len(sizes))]
    cut = _cut(node) if is_op(node, "Slice") else None
    return [] if cut is None else [cut]


def _cut(node: gs.Node) -> _Cut | None:
    starts, ends, axes, steps = (small_constant(input_or_none(node, i)) for i in range(1, 5))
    if any(numbers is None or numbers.size != 1 for numbers in (starts, ends, axes)):
        return None
    axis, start, end = (int(numbers.reshape(())) for numbers in (axes, starts, ends) if numbers is not None)
    size = node.inputs[0].shape[axis]
    if not isinstance(size, int) or (len(node.inputs) > 4 and (steps is None or steps.tolist() != [1])):
        return None
    taken, axis = range(size)[start:end], axis % _RANK
    return (axis, taken[0], taken[-1] + 1) if len(taken) == 1 or (taken and axis == _RANK - 1) else None


def _cut_of(heads: Sequence[gs.Tensor], parts: Sequence[_Part]) -> gs.Tensor | None:
    """The tensor that is cut into these heads, and holds no others; None where there is none."""
    nodes = [producer(head) for head in heads]
    cuts = [(node.inputs[0], _cuts(node)) for node in nodes if node is not None and is_op(node, "Slice")]
    if [cut for _, cut in cuts] != [[(part.axis, part.start, part.end)] for part in parts]:
        return None
    source = cuts[0][0]
    return source if all(t is source for t, _ in cuts) and source.shape[parts[0].axis] == parts[-1].end else None


def _joined(heads: Sequence[gs.Tensor], axis: int) -> Iterator[gs.Node]:
    """What brings heads together."""
    for node in consumers(heads[0]):
        is_along = is_op(node, "Concat") and int(node.attrs["axis"]) % _RANK == axis
        if is_along and [id(t) for t in node.inputs] == [id(t) for t in heads]:
            yield node

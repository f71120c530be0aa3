"""Changes a graph so that nothing depends on P, the length of the past, except positions of new tokens.

Some exporters compute positions from the length of a cache, and may add a constant:

    Range(P, P + S) -> Unsqueeze -> [1, S]          becomes         write_indices + arange(S)  [B, S]
    Slice(table [positions, H], P, P + S)  [S, H]                   Gather(table, write_indices + arange(S))  [B, S, H]
    Add(CumSum(tokens != pad)  [B, S], P)                           Add(CumSum(tokens != pad), write_indices  [B, 1])

Whisper of onnxruntime-genai has the second form; torch's export of Marian, too, with one lookup for all sequences.
M2M-100 has the third form, because its positions do not count padding. If another tensor differs between sample steps
that differ only in P, the import fails and names this tensor. This module also removes outputs that return an input
unchanged (caches of cross-attention), and replaces ``Shape`` of a removed input by sizes of the tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
import onnx_graphsurgeon as gs

from trt_kvcache.errors import UnsupportedModelError
from trt_kvcache.importer.cache_plan import OriginalRole
from trt_kvcache.importer.emit.canonical_nodes import Canonical
from trt_kvcache.importer.graph import (
    FLOAT,
    INT32,
    INT64,
    Emitter,
    consumers,
    contains,
    elem_type,
    is_constant,
    is_copy,
    is_op,
    replace_uses,
    tidy,
)
from trt_kvcache.importer.interface.exported_interface import Interface
from trt_kvcache.importer.planning.cache_plans import is_row_slice as is_cut_to_use
from trt_kvcache.importer.protos import Array
from trt_kvcache.importer.recognize.sample_steps import Sample, Samples

NOTE = (
    "the model counts positions from the tokens of a step, and skips some tokens, such as padding. As in the exported "
    "model, it counts all tokens of earlier steps. So the result for a text with padding depends on how "
    "the text is split into steps"
)
_LOST = (OriginalRole.PADDING_MASK, OriginalRole.PAST_LENGTH, OriginalRole.POSITIONS)
_FAR = 1 << 31  # numbers of at least this are no positions
_COUNTED = (OriginalRole.PAST_LENGTH, OriginalRole.PADDING_MASK)


def free_positions(graph: gs.Graph, canonical: Canonical, interface: Interface, samples: Samples) -> bool:
    """Compute positions from write indices. Return True if the model itself computes positions from a step's tokens.

    The graph has TensorScatter, Attention, and no dead nodes. Raises `UnsupportedModelError` if a node uses the length
    of the past for something else than positions.
    """
    sources = {t.name for t in interface.of(*_COUNTED, OriginalRole.GROWING_CACHE, OriginalRole.FIXED_CACHE)}
    queue = [t for t in graph.inputs if t.name in sources]
    updates = [n for n in graph.nodes if is_op(n, "TensorScatter")]
    caches = [t for n in updates for t in (n.inputs[0], n.outputs[0])]
    queue += [n.outputs[0] for n in updates]
    seen: set[str] = set()
    marks = _numbers_of(graph, {t.name for t in interface.of(OriginalRole.PADDING_MASK)})
    by_tokens = False
    while queue:
        tensor = queue.pop(0)
        for node in consumers(tensor):
            if is_op(node, "TensorScatter") or (is_op(node, "Attention") and contains(node.inputs[1:], tensor)):
                continue
            if contains(caches, tensor) and _is_view(node):
                caches += node.outputs  # a view of a cache has the cache's length
                queue += node.outputs
                continue
            if contains(caches, tensor) and not is_op(node, "Shape", "Size"):
                continue  # `check_readers` checks the nodes that read the contents of a cache
            for output in node.outputs:
                if output.name in seen or output.is_empty():
                    continue
                seen.add(output.name)
                if _is_cancelled(output, samples):
                    if output.name in marks:
                        _fill(graph, output, canonical.emit, interface, samples)
                    continue
                if _count_per_row(node, canonical, samples):
                    by_tokens = True
                elif _follow(graph, node, output, canonical, samples):
                    queue.append(output)
    tidy(graph)
    return by_tokens


def check_readers(graph: gs.Graph) -> None:
    """Raise `UnsupportedModelError` if a node reads a cache, but is neither a cache update nor an attention."""
    for update in [n for n in graph.nodes if is_op(n, "TensorScatter")]:
        for tensor in (update.inputs[0], update.outputs[0]):
            reader = _other_reader(graph, tensor, update)
            if reader is not None:
                early = " before the new rows are written" if tensor is update.inputs[0] else ""
                raise UnsupportedModelError(
                    f"{reader.op} '{reader.name}' reads the cache '{update.inputs[0].name}'{early}, but is not a "
                    "recognized attention; only attention may read a cache"
                )


def _other_reader(graph: gs.Graph, tensor: gs.Tensor, update: gs.Node) -> gs.Node | None:
    """Return the first node that reads a cache or a view of it, but is neither its update nor attention; else None."""
    for node in consumers(tensor):
        is_read = is_op(node, "Attention") and node.inputs[0] is not tensor
        if is_read or node is update or is_op(node, "Shape") or is_cut_to_use(node):
            continue
        is_view = _is_view(node) and bool(consumers(node.outputs[0]))
        if not is_view or contains(graph.outputs, node.outputs[0]) or _other_reader(graph, node.outputs[0], update):
            return node
    return None


def _is_view(node: gs.Node) -> bool:
    return is_op(node, "Transpose", "Reshape") or (is_op(node, "Cast") and node.attrs["to"] == FLOAT)


def drop_copies(graph: gs.Graph) -> set[str]:
    """Remove graph outputs that return a graph input unchanged, in place. Return the names of these outputs."""
    copies = {str(t.name) for t in graph.outputs if is_copy(graph, t)}
    graph.outputs = [t for t in graph.outputs if t.name not in copies]
    return copies


def free_shapes(graph: gs.Graph, emit: Emitter, interface: Interface, samples: Samples) -> None:
    """Replace Shape nodes of inputs that will be removed, in place: take the sizes from the tokens instead."""
    tokens = next(t for t in graph.inputs if t.name == interface.tokens)
    reached = _numbers_of(graph, {t.name for t in interface.of(*_LOST)}) - {t.name for t in graph.inputs}
    for node in [n for n in graph.nodes if is_op(n, "Shape") and n.inputs[0].name in reached]:
        shapes = [(s, s.probe.shape(node.inputs[0].name)) for s in (*samples.plain, *samples.twins)]
        found = _sizes(emit, tokens, [(s, d) for s, d in shapes if d is not None])
        fixed = [size for size in found if size is not None]
        if fixed and all(d is not None and len(d) == len(fixed) for _, d in shapes):
            _replace_shape(node, fixed, emit)
    for tensor in interface.of(*_LOST):
        known = next((t for t in graph.inputs if t.name == tensor.name), None)
        readers = consumers(known) if known is not None else []
        if not readers or not all(is_op(n, "Shape") for n in readers):
            continue
        sizes = [_size(emit, tokens, size, axis) for size, axis in zip(tensor.shape, tensor.axes, strict=True)]
        if any(size is None for size in sizes):
            continue
        for node in readers:
            _replace_shape(node, [size for size in sizes if size is not None], emit)


def _replace_shape(node: gs.Node, sizes: list[gs.Tensor], emit: Emitter) -> None:
    taken = sizes[int(node.attrs.get("start", 0)) : int(node.attrs.get("end", len(sizes)))]
    if taken:
        shape = emit.op("Concat", taken, "shape", INT64, axis=0) if len(taken) > 1 else taken[0]
        replace_uses(node.outputs[0], shape)


def _sizes(
    emit: Emitter, tokens: gs.Tensor, shapes: Sequence[tuple[Sample, tuple[int, ...]]]
) -> list[gs.Tensor | None]:
    sizes = []
    for axis in range(len(shapes[0][1]) if shapes else 0):
        found = [(s, shape[axis]) for s, shape in shapes if len(shape) == len(shapes[0][1])]
        named = {"batch": all(n == s.batch for s, n in found), "sequence": all(n == s.length for s, n in found)}
        name = next((name for name, fits in named.items() if fits), "")
        fixed = {n for _, n in found}
        sizes.append(_size(emit, tokens, name or found[0][1], name) if name or len(fixed) == 1 else None)
    return sizes


def _size(emit: Emitter, tokens: gs.Tensor, size: int | str, axis: str) -> gs.Tensor | None:
    """Emit one size as int64 ``[1]``: a constant, the batch or the new tokens; None for other sizes."""
    if isinstance(size, int):
        return emit.ints([size])
    if axis not in ("batch", "sequence"):
        return None
    start = 0 if axis == "batch" else 1
    size_of = partial(emit.op, "Shape", [tokens], f"{axis}_size", INT64, start=start, end=start + 1)
    return emit.once(("size", axis), size_of)


def _follow(graph: gs.Graph, node: gs.Node, output: gs.Tensor, canonical: Canonical, samples: Samples) -> bool:
    """Replace or refuse `output`, which depends on P; True: do so with its readers instead."""
    if any(s.probe.value(output.name) is None for s in samples.twins):
        if _gather_rows(graph, node, canonical, samples):
            return False
        if is_op(node, "If"):
            raise UnsupportedModelError(
                f"the operator If '{node.name}' chooses '{output.name}' by the length of the longest sequence of a "
                "batch, for example rotary factors (LongRoPE, dynamic NTK). Sequences must not depend on each other: "
                "use a capacity below the length at which this choice changes"
            )
        raise UnsupportedModelError(
            f"{node.op} '{node.name}' computes '{output.name}' from the length of the cache together with weights or "
            "tokens; only attention may read caches, and only positions may be computed from their length"
        )
    place = _place(output, samples)
    if place is not None:
        # Replace the last tensor that holds positions. Nodes before this tensor may repeat [1, S] for the batch, and
        # would repeat positions [B, S] once more.
        after_all = [t for n in consumers(output) for t in n.outputs]
        if after_all and all(_place(t, samples) is not None for t in after_all):
            return True
        replace_uses(output, _positions(output, *place, canonical, samples))
        return False
    if _gather_rows(graph, node, canonical, samples):
        return False
    if contains(graph.outputs, output):
        raise UnsupportedModelError(
            f"the output '{output.name}' depends on the length of the cache, but is not the number of its tokens; "
            "export the model without this output"
        )
    return True


def _is_cancelled(output: gs.Tensor, samples: Samples) -> bool:
    """True if a tensor is the same for all sampled lengths P of the past. One P is large: floor(P / 16) differs."""
    for pair in (samples.twins, samples.plain[-2:]):
        before, *after = (s.probe.value(output.name) for s in pair)
        if before is None or not all(value is not None and np.array_equal(before, value) for value in after):
            return False
    return True


def _numbers_of(graph: gs.Graph, names: set[str]) -> set[str]:
    """Return all tensors that depend on the values, not only shapes, of these inputs. The graph must be sorted."""
    reached = set(names)
    for node in graph.nodes:
        if not is_op(node, "Shape", "Size") and any(t.name in reached for t in node.inputs):
            reached |= {t.name for t in node.outputs}
    return reached


def _fill(graph: gs.Graph, output: gs.Tensor, emit: Emitter, interface: Interface, samples: Samples) -> None:
    """If a tensor from a padding mask has one number everywhere, in all samples, replace it with a constant.

    Some models multiply by the mask's last columns, the new tokens. The rewritten mask covers the capacity instead.
    """
    values = [(s, s.probe.value(output.name)) for s in (*samples.plain, *samples.twins)]
    first = values[0][1]
    if first is None or not first.size or any(v is None or np.any(v != first.flat[0]) for _, v in values):
        return
    tokens = next(t for t in graph.inputs if t.name == interface.tokens)
    sizes = _sizes(emit, tokens, [(s, v.shape) for s, v in values if v is not None])
    known = [size for size in sizes if size is not None]
    if len(known) < len(sizes):
        return
    number = emit.constant(first.reshape(-1)[:1].reshape([1] * first.ndim))
    shape = emit.op("Concat", known, "filled_shape", INT64, axis=0) if len(known) > 1 else known[0] if known else None
    replace_uses(output, number if shape is None else emit.op("Expand", [number, shape], "filled", elem_type(output)))


def _place(output: gs.Tensor, samples: Samples) -> tuple[int, int] | None:
    """Return (offset, axis) if a tensor equals P + offset + arange(S) along the axis of S; otherwise None."""
    counts = {_counted(sample.probe.value(output.name), sample) for sample in samples.twins}
    return counts.pop() if len(counts) == 1 else None


def _counted(value: Array | None, sample: Sample) -> tuple[int, int] | None:
    if value is None or value.ndim < 2 or not value.size or value.dtype.kind not in "iuf":
        return None
    if value.shape[0] not in (1, sample.batch) or not abs(float(value.flat[0])) < _FAR:
        return None
    axis = next((a for a in range(1, value.ndim) if value.shape[a] == sample.length), 0)
    if not axis or value.size != value.shape[0] * sample.length:
        return None
    offset = int(value.flat[0]) - sample.past
    rows = value.reshape(-1, sample.length)
    return (offset, axis) if (rows == sample.past + offset + np.arange(sample.length)).all() else None


def _positions(output: gs.Tensor, offset: int, axis: int, canonical: Canonical, samples: Samples) -> gs.Variable:
    emit, positions = canonical.emit, _shifted(canonical, offset)
    others = [i for i in range(1, len(samples.twins[0].probe.shape(output.name) or ())) if i != axis]
    if others:
        positions = emit.op("Unsqueeze", [positions, emit.ints(others)], "positions_like")
    wanted = elem_type(output)
    if wanted not in (None, 0, elem_type(positions)):
        positions = emit.op("Cast", [positions], "positions_cast", wanted, to=wanted)
    return positions


def _shifted(canonical: Canonical, offset: int) -> gs.Variable:
    positions, emit = canonical.positions(), canonical.emit
    if not offset:
        return positions
    shifted = partial(emit.op, "Add", [positions, emit.ints(offset)], "shifted_positions")
    return emit.once(("positions", offset), shifted)


def _gather_rows(graph: gs.Graph, node: gs.Node, canonical: Canonical, samples: Samples) -> bool:
    """If a node takes rows of the new positions from a constant table, replace it by a Gather; return True if so."""
    rows = node.outputs[0]
    taken = is_op(node, "Slice", "Gather") and is_constant(node.inputs[0])
    offsets = {_rows_taken(node, sample) for sample in samples.twins} if taken else {None}
    offset = offsets.pop()
    if offsets or offset is None or offset < 0:
        return False
    one = all(sample.batch == 1 for sample in samples.twins)  # with one sequence, rows [S, H] need no batch axis
    found = ([], []) if one else _readers_of_rows(graph, rows, samples.twins)
    if found is None:
        return False
    (chain, readers), emit = found, canonical.emit
    gathered = emit.op("Gather", [node.inputs[0], _shifted(canonical, offset)], "position_rows", axis=0)
    if not one and all(tensor is rows and not before and len(after) == 1 for _, tensor, before, after in readers):
        replace_uses(rows, gathered)  # the readers accept [B, S, H]
        return True
    width = (samples.twins[0].probe.shape(rows.name) or (1,))[-1]
    flat = emit.op("Reshape", [gathered, emit.ints([-1, width])], "position_rows")  # rows of all sequences, [B * S, H]
    replace_uses(rows, flat)
    for between, shape in chain:
        if is_op(between, "Reshape"):
            between.inputs[1] = emit.ints(shape)
    for reader, tensor, before, after in readers:
        operand = flat if tensor is rows else tensor
        batch, length = (_size(emit, canonical.tokens, axis, axis) for axis in ("batch", "sequence"))
        sizes = [batch, emit.ints([1] * before) if before else None, length, emit.ints(after) if after else None]
        whole = emit.op("Concat", [size for size in sizes if size is not None], "rows_shape", INT64, axis=0)
        placed = emit.op("Reshape", [operand, whole], "placed_rows", elem_type(tensor))
        reader.inputs = [placed if t is operand else t for t in reader.inputs]
    return True


def _rows_taken(node: gs.Node, sample: Sample) -> int | None:
    """Return the first row that a node takes from a table, minus P; None unless it takes S rows in order."""
    table, shape = (sample.probe.shape(t.name) for t in (node.inputs[0], node.outputs[0]))
    if table is None or len(table) != 2 or shape != (sample.length, table[1]):
        return None
    numbers = np.arange(table[0])[:, None]
    rows = sample.probe.with_values({node.inputs[0].name: numbers}).value(node.outputs[0].name)
    if rows is None or rows.shape != (sample.length, 1):
        return None
    offset = int(rows[0, 0]) - sample.past
    return offset if (rows == sample.past + offset + np.arange(sample.length)[:, None]).all() else None


_Chain = list[tuple[gs.Node, list[int]]]
_Readers = list[tuple[gs.Node, gs.Tensor, int, tuple[int, ...]]]


def _readers_of_rows(graph: gs.Graph, rows: gs.Tensor, samples: Sequence[Sample]) -> tuple[_Chain, _Readers] | None:
    """Find the nodes that combine table rows ``[S, H]`` with tensors of a batch; None if rows cannot get a batch axis.

    Return two lists: the nodes before the found ones, which compute rows only from rows, with shapes of their outputs
    (-1: rows); and the found nodes, each with its operand of rows, and the two results of `_place_of_rows`.
    """
    chain: _Chain = []
    readers: _Readers = []
    made, pending = {rows.name}, [rows]
    while pending:
        tensor = pending.pop()
        if contains(graph.outputs, tensor):
            return None
        for node in consumers(tensor):
            output = node.outputs[0]
            if output.name in made:
                continue
            if all(t.name in made or is_constant(t) for t in node.inputs):
                axes = {_axis_of_rows(output, sample) for sample in samples}
                axis = axes.pop()
                if axes or axis is None or is_op(node, "Transpose", "Expand"):
                    return None
                shape = list(samples[0].probe.shape(output.name) or ())
                shape[axis] = -1
                chain.append((node, shape))
                made.add(output.name)
                pending.append(output)
                continue
            places = {_place_of_rows(node, tensor, sample) for sample in samples}
            place = places.pop()
            if places or place is None:
                return None
            readers.append((node, tensor, *place))
    return chain, readers


def _axis_of_rows(tensor: gs.Tensor, sample: Sample) -> int | None:
    """Return the axis of the S new tokens in a tensor if all axes before this axis have size 1; otherwise None."""
    shape = sample.probe.shape(tensor.name) or ()
    first = next((a for a, d in enumerate(shape) if d != 1), len(shape))
    axis = first - (sample.length == 1)
    return axis if 0 <= axis < len(shape) and shape[axis] == sample.length else None


def _place_of_rows(node: gs.Node, rows: gs.Tensor, sample: Sample) -> tuple[int, tuple[int, ...]] | None:
    """Return the number of axes between B and S in a node's result, and sizes of `rows` after S; None if unknown."""
    own, whole = (sample.probe.shape(t.name) for t in (rows, node.outputs[0]))
    axis = _axis_of_rows(rows, sample)
    if own is None or whole is None or axis is None or not is_op(node, "Add", "Sub", "Mul", "Div", "Expand"):
        return None
    place = len(whole) - len(own) + axis
    fits = place > 0 and (whole[0], whole[place]) == (sample.batch, sample.length)
    return (place - 1, own[axis + 1 :]) if fits else None


def _count_per_row(node: gs.Node, canonical: Canonical, samples: Samples) -> bool:
    """If a node adds P (length of the past) to integers ``[B, S]``, make it add `write_indices`; return True if so."""
    output, twins = node.outputs[0], samples.twins
    kind = twins[0].probe.elem_type(output.name)
    sizes = [s.probe.shape(output.name) for s in twins]
    if not is_op(node, "Add", "Sub") or kind not in (INT32, INT64) or sizes != [(s.batch, s.length) for s in twins]:
        return False
    for place, tensor in enumerate(node.inputs):
        values = [s.probe.value(tensor.name) for s in twins]
        offsets = {int(v.item()) - s.past for v, s in zip(values, twins, strict=True) if v is not None and v.size == 1}
        others = [s.probe.value(node.inputs[1 - place].name) for s in twins]
        if len(offsets) == 1 and not any(v is None for v in values) and all(v is None for v in others):
            emit, offset = canonical.emit, offsets.pop()
            count = emit.op("Unsqueeze", [canonical.write_indices, emit.ints([1])], "first_position", INT64)
            if offset:
                count = emit.op("Add", [count, emit.ints(offset)], "shifted_position", INT64)
            if kind != INT64:
                count = emit.op("Cast", [count], "position_cast", kind, to=kind)
            node.inputs[place] = count
            return True
    return False

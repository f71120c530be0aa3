"""Turns caches of windowed attention into circular buffers (``--sliding circular``).

    present = TensorScatter(past [B, N, L, D], update, w, mode=linear)
    output  = Attention(q, k, v, nonpad_kv_seqlen; is_causal=1, left_window_size=W-1)

    becomes

    present = TensorScatter(past [B, N, R, D], update, w, mode=circular)
    output  = Attention(q, k, v, visible [B, 1, S, R])

For updates of up to C tokens, a ring (circular buffer) has ``R = W + C - 1`` rows, so that the first token of an update
still finds its W keys after the last token is written. With S new tokens, the first at position ``w``:

    newest(j)     = w + S - 1 - (w + S - 1 - j) mod R        the position of the token in row j
    visible(i, j) = newest(j) >= 0  and  w + i - W < newest(j) <= w + i

If a model has an input for lengths, each sequence has w + S valid tokens, or 0 (its queries see nothing). Other lengths
are not allowed: the ring may have overwritten rows that the first queries need. A cache stays linear if any attention
sees all its rows. The check refuses models that use the length of a cache elsewhere, or compute lengths or indices.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import onnx
import onnx_graphsurgeon as gs

from trt_kvcache.importer.cache_plan import PlanOptions
from trt_kvcache.importer.emit.canonical_nodes import Findings, emit_visible
from trt_kvcache.importer.graph import (
    Emitter,
    consumers,
    contains,
    dims,
    fold_identities,
    input_or_none,
    is_op,
    producer,
    small_constant,
)
from trt_kvcache.importer.operators import VIEWS
from trt_kvcache.importer.planning.attention_plans import reads_columns


@dataclass(frozen=True, eq=False)
class _Windowed:
    """A layer's caches of keys and values. Only attentions with the same window size read them."""

    keys: gs.Node
    values: gs.Node
    readers: tuple[gs.Node, ...]
    window: int


@dataclass(frozen=True)
class Rings:
    """The caches that became circular.

    Attributes:
        longest: the most tokens of one update, by name of the cache input.
        notes: notes for the plan about what the change saves, or why a cache stays linear.
    """

    longest: dict[str, int]
    notes: tuple[str, ...]


def slide(model: onnx.ModelProto, options: PlanOptions, usual: int) -> tuple[onnx.ModelProto, Findings | None]:
    """Return a model that has TensorScatter with circular caches for windowed attention, and facts for the plan."""
    graph = gs.import_onnx(onnx.shape_inference.infer_shapes(model, data_prop=True))
    fold_identities(graph)
    updates = [n for n in graph.nodes if is_op(n, "TensorScatter")]
    fixed = max((_rows(n, 0) for n in updates), default=0)
    capacity = options.capacity or fixed or usual
    rings = make_circular(graph, Emitter(graph), capacity, options.window_chunk, idle=True)
    written = [str(n.outputs[0].name) for n in updates]
    findings = Findings(written, notes=rings.notes, longest=rings.longest, capacity=None if fixed else capacity)
    if not rings.longest:
        return model, findings
    exported: onnx.ModelProto = gs.export_onnx(graph.cleanup(remove_unused_graph_inputs=False).toposort())
    del exported.graph.value_info[:]
    exported.ir_version = max(model.ir_version, 10)
    return exported, findings


def make_circular(graph: gs.Graph, emit: Emitter, capacity: int, chunk: int, *, idle: bool = False) -> Rings:
    """Make every cache of windowed attention circular, in place, for updates of up to `chunk` tokens.

    With `idle`, the model has an input for lengths: 0 means that a sequence has no tokens in a step.
    """
    longest: dict[str, int] = {}
    notes: list[str] = []
    before = _all_rows(graph, capacity)
    for pair in _find(graph):
        rows = pair.window + chunk - 1
        names = [str(update.inputs[0].name) for update in (pair.keys, pair.values)]
        if rows >= capacity:
            notes.append(
                f"caches '{names[0]}' and '{names[1]}' stay linear: a window of {pair.window} and updates of up to "
                f"{chunk} tokens (--window-chunk) need {rows} rows, but the capacity is {capacity}"
            )
            continue
        respelled = [shape for cache in (pair.keys, pair.values) for shape in _spelled(cache, capacity, rows)]
        other = _other_reader(graph, pair) or next((node for node, shape in respelled if shape is None), None)
        why = ""
        if other is not None:
            why = f"{other.op} '{other.name}' reads their rows outside of attention, or depends on their number"
        if bound := _bound(pair.keys.inputs[2]):
            why = f"{bound.op} '{bound.name}' changes their write indices"
        if why:
            notes.append(f"caches '{names[0]}' and '{names[1]}' stay linear: {why}")
            continue
        for node, shape in respelled:
            node.inputs[1] = emit.constant(np.asarray(shape, np.int64))
        _turn(pair, emit, rows, idle=idle)
        longest |= dict.fromkeys(names, chunk)
    if longest:
        after = _all_rows(graph, capacity)
        notes.append(
            f"{len(longest)} caches hold only a window of tokens: {after} cache rows per sequence instead of {before} "
            f"({100 * (before - after) / before:.0f} % saved); updates have at most {chunk} tokens (--window-chunk)"
            + (", and in each sequence, either all tokens of an update are valid or none" if idle else "")
        )
    elif not notes:
        notes.append("no cache became circular, because no attention is limited to a window")
    return Rings(longest, tuple(notes))


def _all_rows(graph: gs.Graph, capacity: int) -> int:
    return sum(_rows(n, capacity) for n in graph.nodes if is_op(n, "TensorScatter"))


def _rows(update: gs.Node, capacity: int) -> int:
    size = (dims(update.inputs[0]) or ())[int(update.attrs.get("axis", -2))]
    return size if isinstance(size, int) else capacity


def _find(graph: gs.Graph) -> list[_Windowed]:
    updates = {n.outputs[0].name: n for n in graph.nodes if is_op(n, "TensorScatter") and _plain(graph, n)}
    readers: dict[str, list[gs.Node]] = {name: _readers(n.outputs[0]) for name, n in updates.items()}
    pairs = []
    done: set[str] = set()
    for name, nodes in readers.items():
        windows = {int(n.attrs.get("left_window_size", -1)) if _windowed(graph, n) else -1 for n in nodes}
        if name in done or len(windows) != 1 or -1 in windows:
            continue
        caches = [_cache_of(t, updates) for n in nodes for t in n.inputs[1:3]]
        names = [n.outputs[0].name for n in caches if n is not None]
        if (
            len(set(names)) != 2
            or len(names) != len(caches)
            or any(set(map(id, readers[n])) != set(map(id, nodes)) for n in names)
        ):
            continue
        done |= set(names)
        keys, values = (updates[name] for name in names[:2])
        pairs.append(_Windowed(keys, values, tuple(nodes), windows.pop() + 1))
    return pairs


def _plain(graph: gs.Graph, update: gs.Node) -> bool:
    linear = update.attrs.get("mode", "linear") == "linear" and input_or_none(update, 2) is not None
    return linear and contains(graph.inputs, update.inputs[0]) and contains(graph.outputs, update.outputs[0])


def _windowed(graph: gs.Graph, node: gs.Node) -> bool:
    """True if an Attention sees only a window, and has lengths; without lengths, ONNX counts queries from row 0."""
    if reads_columns(graph, node):
        return False  # the graph reads scores, and their columns belong to rows of a linear cache
    causal = is_op(node, "Attention") and bool(node.attrs.get("is_causal", 0)) and input_or_none(node, 6) is not None
    plain = input_or_none(node, 3) is None
    return causal and plain and int(node.attrs.get("left_window_size", -1)) >= 0


def _readers(present: gs.Tensor) -> list[gs.Node]:
    readers: dict[int, gs.Node] = {}
    for node in consumers(present):
        if is_op(node, *VIEWS) and node.inputs[0] is present:
            readers |= {id(n): n for n in _readers(node.outputs[0])}
        elif not is_op(node, "Shape"):
            readers[id(node)] = node
    return list(readers.values())


def _bound(indices: gs.Tensor) -> gs.Node | None:
    """Return the node, such as Min or Mod, that makes write indices differ from the number of tokens; else None."""
    node = producer(indices)
    if node is None:
        return None
    if not is_op(node, *VIEWS, "Cast", "Add", "Sub", "Expand", "Gather", "Slice"):
        return None if is_op(node, "Shape", "Constant") else node
    return next((found for tensor in node.inputs if (found := _bound(tensor)) is not None), None)


def _other_reader(graph: gs.Graph, pair: _Windowed) -> gs.Node | None:
    """Return the first node that reads a cache before its update, or a view that is a graph output; else None."""
    for update in (pair.keys, pair.values):
        for node in consumers(update.inputs[0]):
            if node is not update and not is_op(node, "Shape"):
                return node
        for node in _views(update.outputs[0]):
            if contains(graph.outputs, node.outputs[0]):
                return node
    return None


def _views(present: gs.Tensor) -> list[gs.Node]:
    views = [node for node in consumers(present) if is_op(node, *VIEWS) and node.inputs[0] is present]
    return views + [inner for node in views for inner in _views(node.outputs[0])]


def _spelled(update: gs.Node, capacity: int, rows: int) -> Iterator[tuple[gs.Node, list[int] | None]]:
    """Yield each Reshape that states the cache's rows, with its new shape (None: unclear which size means rows)."""
    is_open = isinstance((dims(update.inputs[0]) or ())[int(update.attrs.get("axis", -2))], str)
    before = _rows(update, capacity)
    for node in _views(update.outputs[0]):
        spelled = small_constant(node.inputs[1]) if is_op(node, "Reshape") else None
        sizes = [] if spelled is None else [int(n) for n in spelled.ravel()]
        others = (dims(node.inputs[0]) or ()).count(before) - (not is_open)  # other axes that have the same size
        if (count := sizes.count(before)) > max(others, 0):
            yield node, [rows if n == before else n for n in sizes] if count == 1 else None


def _cache_of(tensor: gs.Tensor, updates: dict[str, gs.Node]) -> gs.Node | None:
    while tensor.name not in updates:
        node = producer(tensor)
        if node is None or not is_op(node, *VIEWS):
            return None
        tensor = node.inputs[0]
    return updates[tensor.name]


def _turn(pair: _Windowed, emit: Emitter, rows: int, *, idle: bool) -> None:
    for update in (pair.keys, pair.values):
        update.attrs["mode"] = "circular"
        axis = int(update.attrs.get("axis", -2))
        for tensor in (update.inputs[0], update.outputs[0]):
            shape = list(tensor.shape)
            shape[axis] = rows
            tensor.shape = shape
    for node in pair.readers:
        lengths = node.inputs[6] if idle else None
        visible = emit_visible(emit, pair.keys.inputs[2], lengths, node.inputs[0], pair.window, rows)
        node.inputs = [*node.inputs[:3], visible]
        for name in ("left_window_size", "right_window_size"):
            node.attrs.pop(name, None)
        node.attrs["is_causal"] = 0

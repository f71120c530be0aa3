"""Attention in which the query heads of a group share a head of keys and values by broadcasting.

    Q [B, N, G, S, D] @ K [B, N, 1, D, T] -- Add(mask), Softmax [B, N, G, S, T] -- @ V [B, N, 1, T, D]
    Q [B, G, N, S, D] @ K [B, 1, N, D, T] -- Add(mask), Softmax [B, G, N, S, T] -- @ V [B, 1, N, T, D]
    Q [B, N, G*S, D]  @ K [B, N, D, T]    -- Reshape, Add(mask), Softmax, Reshape -- @ V [B, N, T, D]
    Q [B, N, G, D]    @ K [B, N, D, T]    -- Add(mask), Softmax [B, N, G, T] -- @ V [B, N, T, D]     of one token

becomes the same over ``[B, N*G, S, ...]``, or ``[B, G*N, S, ...]``, with keys and values that are repeated: every
operator gets Reshapes around it that merge the axes in front of it and split them behind it. All of these hold the
numbers in the same order, so that this changes none; in which order query heads share heads of keys, `head_order` sees
to.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import onnx_graphsurgeon as gs

from trt_kvcache.importer.graph import INT64, Emitter, consumers, dims, input_or_none, is_op, producer, small_constant
from trt_kvcache.importer.normalize.attention.merged_heads import past_behind, read_of, scored
from trt_kvcache.importer.normalize.candidate import Candidate
from trt_kvcache.importer.plan import Dim

_AXES = {"ReduceMax": 1, "Slice": 3}  # which of their inputs these are


@dataclass(frozen=True, eq=False)
class _Group:
    """One attention in groups.

    Attributes:
        past: the cache of keys.
        heads: of it, N; of five axes the first of the two that heads have.
        size: of a group, G; the second one.
        is_flat: batch and heads are one axis; else, without an axis of its own, the group is one with the queries.
    """

    past: gs.Tensor
    heads: int
    size: int
    is_flat: bool


def merge_groups(graph: gs.Graph, candidates: Iterable[Candidate]) -> None:
    """Let attention over caches run over ``[B, N*G, ...]``, in place, where it runs over ``[B, N, G, ...]``.

    Args:
        graph: sorted, with shapes as far as they are known.
        candidates: what looks like its caches.
    """
    candidates = list(candidates)
    pasts = dict(read_of(candidates))
    singly = {c.past.name for c in candidates if _is_single(c)}
    found: dict[int, _Group] = {}
    scores: set[str] = set()
    for node in graph.nodes:
        if is_op(node, "MatMul") and (past := past_behind(node.inputs[1], pasts)) is not None:
            around = scored(node.outputs[0], ("Concat", "ReduceMax", "Slice"))  # of sinks
            if around and (group := _group(node, around, past, past.name in singly)) is not None:
                scores |= {n.outputs[0].name for n in (node, *around)}
                found.update((id(n), group) for n in (node, *around) if not is_op(n, "Reshape"))
                products = [n for inner in around for n in consumers(inner.outputs[0]) if is_op(n, "MatMul")]
                found.update((id(n), group) for n in products
                             if past_behind(n.inputs[1], pasts) is not None and _fits(n, group))  # fmt: skip
    merger = _Merger(graph, scores)
    for node in list(graph.nodes):
        if (found_group := found.get(id(node))) is not None:
            merger.merge(node, found_group)


def _is_single(candidate: Candidate) -> bool:
    """Whether what is written to a cache is one row, in every step."""
    axis = candidate.axis
    rows = [shape for t in candidate.updates if len(shape := dims(t) or ()) == len(candidate.past.shape or ())]
    return axis is not None and bool(rows) and all(shape[axis] == 1 for shape in rows)


def _group(product: gs.Node, around: list[gs.Node], past: gs.Tensor, is_single: bool) -> _Group | None:
    """The groups of an attention, by what its scores look like; None where it has none."""
    heads = (dims(past) or ("?", "?"))[1]
    shapes = [dims(n.outputs[0]) or () for n in (product, *around)]
    wide = next((shape for shape in shapes if len(shape) == 5), None)
    queries, keys = (dims(t) or () for t in product.inputs)
    is_flat = len(queries) == len(keys) == 4 and keys[1] == 1 != queries[1] and not _has_batch(keys, past)
    if wide is not None:
        heads, size = wide[1:3]
    elif is_flat and heads != 1:
        size = queries[1]
    elif len(queries) == len(keys) == 4:
        heads, size = keys[1], _folded(product.inputs[0], is_single=is_single)
    else:
        return None
    if not isinstance(heads, int) or not isinstance(size, int) or len(shapes[0]) < 4:
        return None
    group = _Group(past, heads, size, is_flat)
    return group if all(_keeps_keys(n) for n in around) and _fits(product, group) else None


def _folded(query: gs.Tensor, *, is_single: bool) -> Dim:
    """How many heads of a group are in one axis ``[B, N, G*S, D]`` with S queries each; `?`: none, or it is not known.

    Where steps are of one token, all that this axis holds; else what was there before the axis was made.
    """
    _, heads, rows, size = dims(query) or ("?",) * 4
    if is_single:
        return rows if rows != 1 else "?"
    while (node := producer(query)) is not None and is_op(node, "Mul", "Div", "Cast", "Identity"):
        query = max(node.inputs, key=lambda t: len(dims(t) or ()))
    before = (dims(node.inputs[0]) or ()) if node is not None and is_op(node, "Reshape") else ()
    return before[2] if len(before) == 5 and (before[1], before[4]) == (heads, size) and before[2] != 1 else "?"


def _keeps_keys(node: gs.Node) -> bool:
    """Whether an operator along one axis is along the last one, the keys."""
    axes = [int(node.attrs.get("axis", -1))] if is_op(node, "Softmax", "Concat") else [-1]
    if is_op(node, "ReduceMax", "Slice"):
        operand = small_constant(input_or_none(node, _AXES[node.op]))
        axes = [] if operand is None or not int(node.attrs.get("keepdims", 1)) else operand.tolist()
    return bool(axes) and all(axis in (-1, len(dims(node.inputs[0]) or ()) - 1) for axis in axes)


def _fits(product: gs.Node, group: _Group) -> bool:
    """Whether queries, or weights, meet the keys or values of the head that their group has."""
    left, right = (dims(t) or () for t in product.inputs)
    if len(right) == 5:
        sizes = (group.heads, group.size)
        return left[1:3] == sizes and all(n in (1, whole) for n, whole in zip(right[1:3], sizes, strict=True))
    if len(left) != 4 or len(right) != 4:
        return False
    return (left[1], right[1]) == (group.size, 1) if group.is_flat else left[1] == right[1] == group.heads


def _has_batch(shape: tuple[Dim, ...], past: gs.Tensor) -> bool:
    """Whether the first axis of what a cache became is the cache's batch, of any size."""
    batch = (dims(past) or ("?",))[0]
    return isinstance(batch, str) and shape[0] == batch != "?"


class _Merger:
    def __init__(self, graph: gs.Graph, scores: set[str]) -> None:
        self._graph = graph
        self._scores = scores
        self._emit = Emitter(graph)
        self._merged: dict[str, gs.Tensor] = {}  # by the name of what is in groups

    def merge(self, node: gs.Node, group: _Group) -> None:
        """Let a node run over ``[B, N*G, ...]``; those before it come first."""
        emit, output = self._emit, node.outputs[0]
        if is_op(node, "MatMul"):
            node.inputs = [self._heads(node.inputs[0], group), self._repeated(node.inputs[1], group)]
        elif is_op(node, "Concat"):
            node.inputs = [self._heads(t, group) for t in node.inputs]
        elif is_op(node, *_AXES):
            node.inputs[0] = self._heads(node.inputs[0], group)
            node.inputs[_AXES[node.op]] = emit.ints([-1])
        else:
            like = next(t for t in node.inputs if t.name in self._scores)
            node.inputs = [self._operand(t, like, group) for t in node.inputs]
        if is_op(node, "Softmax", "Concat"):
            node.attrs["axis"] = -1
        merged = gs.Variable(emit.name(f"merged:{output.name}"), dtype=output.dtype)
        node.outputs = [merged, *node.outputs[1:]]
        shape = emit.op("Concat", self._apart(merged, group, len(dims(output) or ())), "group_shape", INT64, axis=0)
        self._graph.nodes.append(gs.Node("Reshape", emit.name(f"groups:{node.name}"), {}, [merged, shape], [output]))
        self._merged[output.name] = merged

    def _apart(self, merged: gs.Tensor, group: _Group, rank: int) -> list[gs.Tensor]:
        """What a tensor ``[B, N*G, S, ...]`` was as long as."""
        ints, sizes = self._emit.ints, self._sizes
        if rank == 5:
            return [sizes(merged, 0, 1), ints([group.heads, group.size]), sizes(merged, 2)]
        if group.is_flat:
            return [ints([-1, group.size]), sizes(merged, 2)]
        return [sizes(merged, 0, 1), ints([group.heads, -1]), sizes(merged, 3)]

    def _heads(self, tensor: gs.Tensor, group: _Group) -> gs.Tensor:
        """What is in groups as ``[B, N*G, S, ...]``."""
        if tensor.name not in self._merged:
            emit = self._emit
            heads = emit.ints([group.heads * group.size, -1])
            parts = [self._sizes(group.past, 0, 1), heads, self._sizes(tensor, -1)]
            shape = emit.op("Concat", parts, "merged_shape", INT64, axis=0)
            self._merged[tensor.name] = emit.op("Reshape", [tensor, shape], f"merged:{tensor.name}")
        return self._merged[tensor.name]

    def _operand(self, tensor: gs.Tensor, like: gs.Tensor, group: _Group) -> gs.Tensor:
        """What meets scores: these themselves, or what broadcasts to them."""
        emit, shape, rank = self._emit, dims(tensor), len(dims(like) or ())
        if tensor.name in self._scores:
            return self._heads(tensor, group)
        if shape is not None and all(d == 1 for d in shape[-rank:-1]):
            return tensor if len(shape) < rank or rank < 5 else emit.op("Squeeze", [tensor, emit.ints([1])], "mask")
        if shape is not None and rank == 5 and all(d == 1 for d in shape[-4:-2]):  # the same for all heads
            return emit.op("Squeeze", [tensor, emit.ints([len(shape) - 4])], "mask") if len(shape) > 3 else tensor

        def make() -> gs.Tensor:
            spread = emit.op("Expand", [tensor, self._sizes(like, 0)], f"{tensor.name}:spread")
            return self._heads(spread, group)

        made: gs.Tensor = emit.once(("spread", tensor.name, like.name), make)
        return made

    def _repeated(self, tensor: gs.Tensor, group: _Group) -> gs.Tensor:
        """Keys or values ``[B, N*G, ., .]``."""
        emit = self._emit

        def make() -> gs.Tensor:
            whole, rows = tensor, self._sizes(tensor, -2)
            if len(dims(tensor) or ()) != 5:
                parts = [self._sizes(group.past, 0, 1), emit.ints([group.heads, 1]), rows]
                shape = emit.op("Concat", parts, "apart_shape", INT64, axis=0)
                whole = emit.op("Reshape", [tensor, shape], f"{tensor.name}:apart")
            spread = emit.op("Expand", [whole, emit.ints([1, group.heads, group.size, 1, 1])], f"{tensor.name}:spread")
            parts = [self._sizes(group.past, 0, 1), emit.ints([group.heads * group.size]), rows]
            shape = emit.op("Concat", parts, "merged_shape", INT64, axis=0)
            return emit.op("Reshape", [spread, shape], f"merged:{tensor.name}")

        made: gs.Tensor = emit.once(("repeated", tensor.name), make)
        return made

    def _sizes(self, tensor: gs.Tensor, start: int, end: int | None = None) -> gs.Tensor:
        bounds = {"start": start} if end is None else {"start": start, "end": end}
        made: gs.Tensor = self._emit.once(
            ("sizes", tensor.name, start, end), lambda: self._emit.op("Shape", [tensor], "sizes", INT64, **bounds)
        )
        return made

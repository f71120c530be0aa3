"""Attention in which the query heads of a group share a head of keys and values by broadcasting.

    Q [B, N, G, S, D] @ K [B, N, 1, D, T] -- Add(mask), Softmax [B, N, G, S, T] -- @ V [B, N, 1, T, D]
    Q [B, N, G*S, D]  @ K [B, N, D, T]    -- Reshape, Add(mask), Softmax, Reshape -- @ V [B, N, T, D]

becomes the same over ``[B, N*G, S, ...]`` with keys and values that are repeated: every operator gets Reshapes around
it that merge the axes in front of it and split them behind it. All of these hold the numbers in the same order, so that
this changes none, whatever the axes are. What heads the keys and values are of is proven of the result, as for any
attention.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import onnx_graphsurgeon as gs

from trt_kvcache.importer.graph import INT64, Emitter, consumers, dims, is_op
from trt_kvcache.importer.normalize.attention.merged_heads import past_behind, read_of, scored
from trt_kvcache.importer.normalize.candidate import Candidate


@dataclass(frozen=True, eq=False)
class _Group:
    """One attention in groups.

    Attributes:
        past: the cache of keys.
        heads: of it, N.
        size: of a group, G.
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
    pasts = dict(read_of(candidates))
    found: dict[int, _Group] = {}
    scores: set[str] = set()
    for node in graph.nodes:
        if is_op(node, "MatMul") and (past := past_behind(node.inputs[1], pasts)) is not None:
            around = scored(node.outputs[0])
            if around and (group := _group(node, around, past)) is not None:
                scores |= {n.outputs[0].name for n in (node, *around)}
                found.update((id(n), group) for n in (node, *around) if not is_op(n, "Reshape"))
                products = [n for inner in around for n in consumers(inner.outputs[0]) if is_op(n, "MatMul")]
                found.update((id(n), group) for n in products
                             if past_behind(n.inputs[1], pasts) is not None and _fits(n, group))  # fmt: skip
    merger = _Merger(graph, scores)
    for node in list(graph.nodes):
        if (found_group := found.get(id(node))) is not None:
            merger.merge(node, found_group)


def _group(product: gs.Node, around: list[gs.Node], past: gs.Tensor) -> _Group | None:
    """The groups of an attention, by what its scores look like; None where it has none."""
    heads = (dims(past) or ("?", "?"))[1]
    shapes = [dims(n.outputs[0]) or () for n in (product, *around)]
    wide = next((shape for shape in shapes if len(shape) == 5), None)
    queries, keys = (dims(t) or () for t in product.inputs)
    is_flat = len(queries) == len(keys) == 4 and keys[1] == 1 != queries[1]
    if wide is not None:
        heads, size = wide[1:3]
    elif is_flat and heads != 1:
        size = queries[1]
    else:
        return None
    if not isinstance(heads, int) or not isinstance(size, int) or len(shapes[0]) < 4:
        return None
    group = _Group(past, heads, size, is_flat)
    softmaxes = [n for n in around if is_op(n, "Softmax")]
    last = all(int(n.attrs.get("axis", -1)) in (-1, len(dims(n.outputs[0]) or ()) - 1) for n in softmaxes)
    return group if last and _fits(product, group) else None


def _fits(product: gs.Node, group: _Group) -> bool:
    """Whether queries, or weights, meet the keys or values of the head that their group has."""
    left, right = (dims(t) or () for t in product.inputs)
    if len(right) == 5:
        return left[1:3] == (group.heads, group.size) and right[1] == group.heads and right[2] in (1, group.size)
    if len(left) != 4 or len(right) != 4:
        return False
    if group.is_flat:
        return (left[1], right[1]) == (group.size, 1)
    # As many heads as queries in a group: which of them an axis holds, only the one in front of it says.
    return left[1] == right[1] == group.heads and (group.heads != group.size or left[0] == right[0] != "?")


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
        else:
            like = next(t for t in node.inputs if t.name in self._scores)
            node.inputs = [self._operand(t, like, group) for t in node.inputs]
            if is_op(node, "Softmax"):
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
            spread = emit.op("Expand", [whole, emit.ints([1, 1, group.size, 1, 1])], f"{tensor.name}:spread")
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

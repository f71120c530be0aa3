"""Attention over batch and heads in one axis, as torch.bmm and torch.baddbmm have it.

    present [B, H, T, D] -- Reshape -> [B*H, T, D] -- MatMul, Add(mask), Softmax, MatMul -> [B*H, S, D] -- Reshape ->

becomes the same over ``[B, H, ...]``: every operator with such an axis gets Reshapes around it that split the axis in
front of it and merge it after it. Whatever the axis holds, that changes no number. Reshapes that lead back to the shape
that they come from are then looked through.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import onnx_graphsurgeon as gs

from trt_kvcache.importer.graph import (
    INT64,
    NAME_PREFIX,
    Emitter,
    consumers,
    dims,
    input_or_none,
    is_op,
    producer,
    replace_uses,
)
from trt_kvcache.importer.normalize.candidate import Candidate
from trt_kvcache.importer.normalize.evidence.samples import Samples
from trt_kvcache.importer.normalize.views import trace_back

_ELEMENTWISE = ("Add", "Sub", "Mul", "Div", "Where", "Max", "Min", "Tanh", "Cast", "Identity", "Dropout", "IsNaN")
_SCORED = (*_ELEMENTWISE, "Softmax", "Reshape")
_MOVES = ("Identity", "Cast", "Transpose", "Reshape", "Squeeze", "Unsqueeze", "Expand", "Tile", "Slice", "Gather")
_SPLIT, _MERGE = "split", "merge"  # of names


def split_heads(graph: gs.Graph, candidates: Iterable[Candidate]) -> None:
    """Let attention over caches run over ``[B, H, ...]``, in place, where it runs over ``[B*H, ...]``.

    Args:
        graph: sorted, with shapes as far as they are known.
        candidates: what looks like its caches.
    """
    pasts = dict(read_of(candidates))
    splitter = _Splitter(graph)
    products: dict[int, gs.Tensor] = {}
    inner: dict[int, gs.Tensor] = {}
    for node in graph.nodes:
        if is_op(node, "MatMul") and all(_rank(t) == 3 for t in (*node.inputs, *node.outputs)):
            past = past_behind(node.inputs[1], pasts)
            if past is not None:
                products[id(node)] = past
                around = (*scored(node.outputs[0]), *_made(node.inputs[0]))
                inner.update((id(n), past) for n in around if _splits(n))
    for node in list(graph.nodes):
        past = products.get(id(node), inner.get(id(node)))
        if past is not None:
            splitter.split(node, past)


def turn_keys(graph: gs.Graph) -> None:
    """Let keys, in place, be ``[B, N, T, D]`` before they are transposed for the scores, where one Transpose does both.

    Args:
        graph: with shapes as far as they are known.
    """
    emit = Emitter(graph)
    for node in list(graph.nodes):
        turn = producer(node.inputs[1]) if is_op(node, "MatMul") else None
        perm = (
            [int(axis) for axis in turn.attrs.get("perm", ())] if turn is not None and is_op(turn, "Transpose") else []
        )
        if len(perm) == 4 and perm[:2] != [0, 1] and perm[0] == 0 and scored(node.outputs[0]):
            assert turn is not None
            shape = node.inputs[1].shape
            rows = emit.op("Transpose", [turn.inputs[0]], "rows", perm=[*perm[:2], perm[3], perm[2]])
            turned = emit.op("Transpose", [rows], "turned", perm=[0, 1, 3, 2])
            turned.shape, rows.shape = shape, None if shape is None else [*shape[:2], shape[3], shape[2]]
            node.inputs[1] = turned


def read_of(candidates: Iterable[Candidate]) -> Iterator[tuple[str, gs.Tensor]]:
    """What attention may read of a cache, by name: the present, and what that is a view of."""
    for candidate in candidates:
        if candidate.rows_only:
            assert candidate.node is not None
            yield str(candidate.node.outputs[0].name), candidate.past
            continue
        yield str(candidate.present.name), candidate.past
        yield str(trace_back(candidate.present, cut=True)[0].name), candidate.past


def past_behind(tensor: gs.Tensor, pasts: Mapping[str, gs.Tensor]) -> gs.Tensor | None:
    """The past that a tensor is moved from, repeated and scaled, of those that `read_of` gives; None: of none."""
    while str(tensor.name) not in pasts:
        node = producer(tensor)
        if node is None or not is_op(node, *_MOVES, "Mul", "Div") or input_or_none(node, 0) is None:
            return None
        tensor = max(node.inputs[:2], key=_rank) if is_op(node, "Mul", "Div") else node.inputs[0]
    return pasts[str(tensor.name)]


def scored(scores: gs.Tensor, also: tuple[str, ...] = ()) -> list[gs.Node]:
    """What is done to scores, by operators that are known and `also` these, up to the next MatMul.

    Nothing if there is no softmax among it.
    """
    found: dict[int, gs.Node] = {}
    pending = [scores]
    while pending:
        for node in consumers(pending.pop()):
            if is_op(node, *_SCORED, *also) and id(node) not in found:
                found[id(node)] = node
                pending.append(node.outputs[0])
    return list(found.values()) if any(is_op(n, "Softmax") for n in found.values()) else []


def _made(query: gs.Tensor) -> list[gs.Node]:
    """What is done to queries behind the Reshape that merges their heads."""
    found: list[gs.Node] = []
    while (node := producer(query)) is not None and is_op(node, *_ELEMENTWISE) and _splits(node):
        found.append(node)
        query = max(node.inputs, key=_rank)
    return found


def _splits(node: gs.Node) -> bool:
    """Whether a node does the same where the first of three axes is split."""
    if is_op(node, "Reshape") or (is_op(node, "Softmax") and int(node.attrs.get("axis", -1)) in (0, -3)):
        return False
    if all(_rank(t) != 3 or _is_one(t) for t in node.inputs):
        return False
    return _rank(node.outputs[0]) == 3 and all(t.is_empty() or 0 <= _rank(t) <= 3 for t in node.inputs)


def _rank(tensor: gs.Tensor) -> int:
    """-1: unknown."""
    shape = dims(tensor)
    return -1 if shape is None else len(shape)


class _Splitter:
    def __init__(self, graph: gs.Graph) -> None:
        self._graph = graph
        self._emit = Emitter(graph)
        self._split: dict[str, gs.Tensor] = {}  # by the name of the merged tensor

    def split(self, node: gs.Node, past: gs.Tensor) -> None:
        """Let a node run over ``[B, H, ...]``; those before it come first."""
        emit, output = self._emit, node.outputs[0]
        like = None
        if not is_op(node, "MatMul"):
            merged = [t for t in node.inputs if _rank(t) == 3 and not _is_one(t)]
            like = next((t for t in merged if str(t.name) in self._split), merged[0])
        node.inputs = [self._of(t, past, like) for t in node.inputs]
        if int(node.attrs.get("axis", -1)) >= 0:
            node.attrs["axis"] = int(node.attrs["axis"]) + 1
        split = gs.Variable(emit.name(f"{_SPLIT}:{output.name}"), dtype=output.dtype)
        node.outputs = [split, *node.outputs[1:]]
        shape = emit.op("Concat", [emit.ints([-1]), self._sizes(split, 2)], "merged_shape", INT64, axis=0)
        self._graph.nodes.append(gs.Node("Reshape", emit.name(f"{_MERGE}:{node.name}"), {}, [split, shape], [output]))
        self._split[str(output.name)] = split

    def _of(self, tensor: gs.Tensor, past: gs.Tensor, like: gs.Tensor | None) -> gs.Tensor:
        """A tensor ``[B*H, ...]`` as ``[B, H, ...]``; others, and what is the same for all heads, as they are."""
        emit = self._emit
        if _rank(tensor) != 3 or (like is not None and _is_one(tensor)):
            return tensor
        if (known := self._split.get(str(tensor.name))) is not None:
            return known

        def make() -> gs.Tensor:
            whole = tensor
            if like is not None and like is not tensor:  # what is the same for all heads may come as [1, ...]
                sizes = emit.op("Concat", [self._sizes(like, 0, 1), emit.ints([1, 1])], "spread", INT64, axis=0)
                whole = emit.op("Expand", [tensor, sizes], f"{tensor.name}:spread")
            parts = [self._sizes(past, 0, 1), emit.ints([-1]), self._sizes(tensor, 1)]
            shape = emit.op("Concat", parts, "split_shape", INT64, axis=0)
            return emit.op("Reshape", [whole, shape], f"{_SPLIT}:{tensor.name}")

        made: gs.Tensor = emit.once(("split", tensor.name, past.name, like is None or like.name), make)
        return made

    def _sizes(self, tensor: gs.Tensor, start: int, end: int | None = None) -> gs.Tensor:
        bounds = {"start": start} if end is None else {"start": start, "end": end}
        made: gs.Tensor = self._emit.once(
            ("sizes", tensor.name, start, end), lambda: self._emit.op("Shape", [tensor], "sizes", INT64, **bounds)
        )
        return made


def _is_one(tensor: gs.Tensor) -> bool:
    return (dims(tensor) or ("?",))[0] == 1


def settle_heads(graph: gs.Graph, emit: Emitter, samples: Samples) -> None:
    """Take away, in place, what splits queries and merged them before, and what splits results.

    Where queries are split and did not come like that, TensorRT is told how many heads they have.

    Args:
        graph: canonical; dead nodes are gone.
        emit: of the graph.
        samples: of the model as exported.
    """
    for node in [n for n in graph.nodes if is_op(n, "Reshape")]:
        splits, merger = _is_own(node, _SPLIT), producer(node.inputs[0])
        if not splits and (merger is None or not _is_own(merger, _MERGE)):
            continue
        output = node.outputs[0]
        before = before_reshapes(output, samples)
        sizes = [s.probe.shape(output.name) for s in samples.few]
        if before is not output:
            replace_uses(output, before)
        elif splits and sizes[0] is not None and sizes[1] is not None:
            known = [emit.ints([sizes[0][axis]]) for axis in (1, 3) if sizes[0][axis] == sizes[1][axis]]
            if len(known) == 2:
                parts = [node.inputs[1].inputs[0].inputs[0], known[0], emit.ints([-1]), known[1]]
                node.inputs = [node.inputs[0], emit.op("Concat", parts, "split_shape", INT64, axis=0)]


def _is_own(node: gs.Node, what: str) -> bool:
    return is_op(node, "Reshape") and str(node.name).startswith(f"{NAME_PREFIX}{what}:")


def before_reshapes(tensor: gs.Tensor, samples: Samples) -> gs.Tensor:
    """A tensor as it was before Reshapes that lead back to the same shape."""
    found = source = tensor
    while (node := producer(source)) is not None:
        spread = is_op(node, "Expand") and _same_shape(node.inputs[0], source, samples)  # to what it is already
        if not is_op(node, "Reshape") and not spread:
            break
        source = node.inputs[0]
        if _same_shape(source, tensor, samples):
            found = source
    return found


def before_spread(mask: gs.Tensor, samples: Samples) -> gs.Tensor:
    """A mask as it was before it was repeated for all heads and merged; the mask itself if nothing did that.

    With 32 heads it is so much smaller, and says the same.
    """
    before = before_reshapes(mask, samples)
    node = producer(before)
    if before is mask or node is None or not is_op(node, "Expand"):
        return before
    shape = samples.plain[0].probe.shape(node.inputs[0].name)
    return node.inputs[0] if shape is not None and len(shape) == 4 else before


def after_reshapes(tensor: gs.Tensor, samples: Samples) -> gs.Tensor:
    """A tensor as it is after Reshapes that lead back to the same shape, where nothing else reads what is between."""
    found = after = tensor
    while len(readers := [n for n in consumers(after) if not is_op(n, "Shape")]) == 1:
        if not is_op(readers[0], "Reshape") or readers[0].inputs[0] is not after:
            break
        after = readers[0].outputs[0]
        if _same_shape(tensor, after, samples):
            found = after
    return found


def _same_shape(one: gs.Tensor, other: gs.Tensor, samples: Samples) -> bool:
    shapes = [[sample.probe.shape(t.name) for sample in samples.few] for t in (one, other)]
    return shapes[0] == shapes[1] and None not in shapes[0]

"""Scores of past and new tokens that are computed apart, as exports for NPUs have them, brought together.

    Concat(Q @ past K, Q @ new K) -- Softmax -- its first columns @ past V + the others @ new V

        becomes

    Q @ Concat(past K, new K) -- Softmax -- @ Concat(past V, new V)

That is the same, whatever the tensors hold: what the columns of the softmax are multiplied with says how many they are.
Masks and scales of the parts are brought together with them. The Concat goes in front of what only moves or repeats
keys and values, up to where the model joins the same itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import onnx
import onnx_graphsurgeon as gs

from trt_kvcache.importer.graph import (
    BOOL,
    INT64,
    Emitter,
    consumers,
    dims,
    elem_type,
    fold_identities,
    input_or_none,
    is_op,
    producer,
    small_constant,
)
from trt_kvcache.importer.normalize.attention.halves import fold_divisions
from trt_kvcache.importer.normalize.attention.joined_rows import RowJoiner, rank_of, same
from trt_kvcache.importer.normalize.einsum import lower_einsum

_ELEMENTWISE = ("Identity", "Cast", "Tanh", "Neg", "Mul", "Div", "Add", "Sub", "Where", "Max", "Min")
_EITHER_WAY = ("Add", "Mul", "Max", "Min")
_MASKS = ("Add", "Sub", "Where")
_MOVES = ("Identity", "Cast")
_END = 2**31 - 1


def rejoin(model: onnx.ModelProto) -> onnx.ModelProto:
    """The same model with one attention over past and new tokens; the same object where none is computed apart.

    Args:
        model: flat, of opset 13 at least. Not changed.
    """
    makers = {name: node.op_type for node in model.graph.node for name in node.output}
    sums = [[makers.get(t) for t in n.input] for n in model.graph.node if n.op_type == "Add"]
    if "Softmax" not in makers.values() or not any(set(made) <= {"MatMul", "Einsum"} for made in sums):
        return model
    if "Einsum" in makers.values():
        lowered: gs.Graph = gs.import_onnx(model)
        lower_einsum(lowered)
        lowered.cleanup(remove_unused_graph_inputs=False).toposort()
        graph = gs.import_onnx(_inferred(gs.export_onnx(lowered)))
    else:
        graph = gs.import_onnx(_inferred(model))
    fold_identities(graph)
    joiner = _Joiner(graph)
    if not [node for node in list(graph.nodes) if is_op(node, "Softmax") and joiner.attention(node)]:
        return model
    graph.cleanup(remove_unused_graph_inputs=False).toposort()
    made: onnx.ModelProto = gs.export_onnx(graph)
    made.ir_version = model.ir_version
    return made


def _inferred(model: onnx.ModelProto) -> onnx.ModelProto:
    inferred = onnx.shape_inference.infer_shapes(model, data_prop=True)
    return onnx.shape_inference.infer_shapes(inferred, data_prop=True) if fold_divisions(inferred) else inferred


class _Joiner:
    def __init__(self, graph: gs.Graph) -> None:
        self._emit = Emitter(graph)
        self._rows = RowJoiner(graph, self._emit)

    def attention(self, softmax: gs.Node) -> bool:
        """Bring one attention together, if it is apart."""
        rank = rank_of(softmax.outputs[0])
        if rank < 2 or int(softmax.attrs.get("axis", -1)) % rank != rank - 1:
            return False
        joined, used = _joined_scores(softmax.inputs[0]), _used_weights(softmax.outputs[0])
        if joined is None or used is None:
            return False
        scores, rows = self._scores(*joined.inputs), self._rows.join(*used.values, -2)
        if scores is None or rows is None:
            return False
        _take_place(joined.outputs[0], scores)
        weights = used.weights
        for kind in used.kinds:
            weights = self._emit.op("Cast", [weights], "weights", kind, to=kind)
        _take_place(used.output, self._emit.op("MatMul", [weights, rows], "rejoined", elem_type(used.output)))
        return True

    def _scores(self, one: gs.Tensor, other: gs.Tensor) -> gs.Tensor | None:
        """What gives both parts side by side; None where that is not known."""
        first, second = producer(one), producer(other)
        if first is None or second is None:
            return None
        if is_op(first, "MatMul") and is_op(second, "MatMul"):
            return self._product(first, second)
        keys = [(node.op, node.attrs, len(node.inputs)) for node in (first, second)]
        if is_op(first, *_ELEMENTWISE) and keys[0] == keys[1]:
            return self._elementwise(first, second)
        for side, node in enumerate((first, second)):
            if is_op(node, *_MASKS) and sum(_product(t) is not None for t in node.inputs) == 1:
                return self._masked(node, (one, other), side)
        return None

    def _product(self, first: gs.Node, second: gs.Node) -> gs.Tensor | None:
        keys, more = first.inputs[1], second.inputs[1]
        rows = self._rows.join(keys, more, -1) if same(first.inputs[0], second.inputs[0]) else None
        return None if rows is None else self._emit.op("MatMul", [first.inputs[0], rows], "scores")

    def _elementwise(self, first: gs.Node, second: gs.Node) -> gs.Tensor | None:
        """The same operator over both parts."""
        made: list[gs.Tensor] = []
        lengths = [self._length(node.outputs[0]) for node in (first, second)]
        others = list(second.inputs)
        if is_op(first, *_EITHER_WAY) and [_scored(t) for t in first.inputs] != [_scored(t) for t in others]:
            others.reverse()
        for pair in zip(first.inputs, others, strict=True):
            scored = [_scored(t) for t in pair]
            if all(scored):
                joined = self._scores(*pair)
            elif any(scored):
                return None
            else:
                joined = self._operand(first, pair, lengths)
            if joined is None:
                return None
            made.append(joined)
        return self._emit.op(first.op, made, "masked", elem_type(first.outputs[0]), **first.attrs)

    def _operand(self, node: gs.Node, pair: Sequence[gs.Tensor], lengths: Sequence[gs.Tensor]) -> gs.Tensor | None:
        """What meets both parts: the same number, or what masks each."""
        if _is_one(pair[0]) and same(*pair):
            return pair[0]
        return self._beside(pair, lengths) if is_op(node, *_MASKS) else None

    def _masked(self, node: gs.Node, parts: Sequence[gs.Tensor], side: int) -> gs.Tensor | None:
        """One part has a mask: the other one gets one that shows all."""
        at = next(i for i, t in enumerate(node.inputs) if _product(t) is not None)
        mask = 0 if is_op(node, "Where") else 1 - at
        kind = elem_type(node.inputs[mask])
        is_hidden = at != mask and (
            is_op(node, "Add") or (at == 0 if is_op(node, "Sub") else _is_one(node.inputs[3 - at]))
        )
        if not is_hidden or kind is None:
            return None
        operands = [node.inputs[at] if i == side else t for i, t in enumerate(parts)]
        shown = self._emit.tensor(onnx.helper.make_tensor("", kind, [], [kind == BOOL and at == 1]))
        masks = [node.inputs[mask] if i == side else shown for i in (0, 1)]
        made = list(node.inputs)
        made[at] = self._scores(*operands)
        made[mask] = self._beside(masks, [self._length(t) for t in parts])
        return (
            None if any(t is None for t in made) else self._emit.op(node.op, made, "masked", elem_type(node.outputs[0]))
        )

    def _length(self, scores: gs.Tensor) -> gs.Tensor:
        """How many columns a part of the scores has, as an int64 ``[1]``."""
        product = _product(scores)
        assert product is not None
        tensor, axis = self._rows.source(product.inputs[1], -1)
        return self._sizes(tensor, [axis])

    def _sizes(self, tensor: gs.Tensor, axes: Sequence[int]) -> gs.Tensor:
        def make() -> gs.Tensor:
            shape = self._emit.op("Shape", [tensor], "sizes", INT64)
            return self._emit.op("Gather", [shape, self._emit.ints(axes)], "sizes", INT64, axis=0)

        made: gs.Tensor = self._emit.once(("sizes", tensor.name, tuple(axes)), make)
        return made

    def _beside(self, pair: Sequence[gs.Tensor], lengths: Sequence[gs.Tensor]) -> gs.Tensor | None:
        """What meets each part, side by side: as long as these, and as large as the other one otherwise."""
        shapes = [dims(t) for t in pair]
        if any(shape is None for shape in shapes):
            return None
        emit, wide = self._emit, []
        known = [shape for shape in shapes if shape is not None]
        if len(known[0]) == len(known[1]) and known[0][:-1] == known[1][:-1] and "?" not in known[0][:-1]:
            lead: list[list[int]] = [[], []]
        else:
            lead = [list(range(max(len(shape) - 1, 0))) for shape in reversed(known)]
        for tensor, other, axes, length in zip(pair, reversed(pair), lead, lengths, strict=True):
            shape = emit.op("Concat", [self._sizes(other, axes), length], "sizes", INT64, axis=0) if axes else length
            wide.append(emit.op("Expand", [tensor, shape], "part", elem_type(tensor)))
        made: gs.Tensor = emit.op("Concat", wide, "parts", elem_type(pair[0]), axis=-1)
        return made


def _take_place(tensor: gs.Tensor, made: gs.Tensor) -> None:
    """Let a tensor, of which the name and the readers stay, be what makes another one."""
    node = producer(made)
    assert node is not None
    tensor.inputs.clear()
    node.outputs = [tensor]


def _joined_scores(tensor: gs.Tensor) -> gs.Node | None:
    """The Concat of two products that a softmax is of."""
    pending, seen = [tensor], set[int]()
    while pending:
        node = producer(pending.pop())
        if node is None or id(node) in seen:
            continue
        seen.add(id(node))
        if is_op(node, "Concat"):
            is_last = int(node.attrs["axis"]) in (-1, rank_of(node.outputs[0]) - 1)
            if is_last and len(node.inputs) == 2 and all(_product(t) is not None for t in node.inputs):
                return node
        elif is_op(node, *_ELEMENTWISE):
            pending += [t for t in node.inputs if not t.is_empty()]
    return None


def _scored(tensor: gs.Tensor) -> bool:
    return _product(tensor) is not None


def _product(tensor: gs.Tensor) -> gs.Node | None:
    """The MatMul that scores are of, behind scales and masks."""
    pending, seen = [tensor], set[int]()
    while pending:
        node = producer(pending.pop(0))
        if node is None or id(node) in seen:
            continue
        seen.add(id(node))
        if is_op(node, "MatMul"):
            return node
        if is_op(node, *_ELEMENTWISE):
            pending += [t for t in node.inputs if not t.is_empty()]
    return None


@dataclass(frozen=True, eq=False)
class _Used:
    """How the parts of a softmax are used.

    Attributes:
        weights: the whole.
        kinds: the types that parts are cast to.
        values: what they are multiplied with.
        output: the sum.
    """

    weights: gs.Tensor
    kinds: list[int]
    values: tuple[gs.Tensor, gs.Tensor]
    output: gs.Tensor


def _used_weights(weights: gs.Tensor) -> _Used | None:
    """What becomes of a softmax; None where that is not the sum of two products."""
    weights, _ = _behind(weights)
    rank, readers = rank_of(weights), _readers(weights)
    parts: list[gs.Tensor] = []
    if len(readers) == 1 and is_op(readers[0], "Split") and int(readers[0].attrs.get("axis", 0)) in (-1, rank - 1):
        parts = list(readers[0].outputs)
    elif len(readers) == 2 and all(is_op(node, "Slice") for node in readers):
        readers.sort(key=lambda node: _is_front(node, rank), reverse=True)
        if _is_front(readers[0], rank) and _is_back(readers[1], rank):
            parts = [node.outputs[0] for node in readers]
    ends = [_behind(part) for part in parts]
    products = [node for end, _ in ends for node in _readers(end)]
    if len(ends) != 2 or len(products) != 2 or ends[0][1] != ends[1][1]:
        return None
    if any(not is_op(n, "MatMul") or n.inputs[0] is not end for n, (end, _) in zip(products, ends, strict=True)):
        return None
    sums = [node for product in products for node in consumers(product.outputs[0])]
    if len(sums) != 2 or sums[0] is not sums[1] or not is_op(sums[0], "Add"):
        return None
    return _Used(weights, ends[0][1], (products[0].inputs[1], products[1].inputs[1]), sums[0].outputs[0])


def _behind(tensor: gs.Tensor) -> tuple[gs.Tensor, list[int]]:
    """What casts make of a tensor that nothing else reads, and to which types."""
    kinds: list[int] = []
    while len(readers := _readers(tensor)) == 1 and is_op(readers[0], *_MOVES):
        kinds += [int(readers[0].attrs["to"])] if is_op(readers[0], "Cast") else []
        tensor = readers[0].outputs[0]
    return tensor, kinds


def _readers(tensor: gs.Tensor) -> list[gs.Node]:
    return [node for node in consumers(tensor) if not is_op(node, "Shape")]


def _is_front(node: gs.Node, rank: int) -> bool:
    """Whether a Slice takes columns from the first one on."""
    start = small_constant(input_or_none(node, 1))
    return _is_along(node, rank) and start is not None and start.tolist() == [0]


def _is_back(node: gs.Node, rank: int) -> bool:
    """Whether a Slice takes columns up to the last one."""
    end, size = small_constant(input_or_none(node, 2)), (dims(node.inputs[0]) or ("?",))[-1]
    least = size if isinstance(size, int) else _END
    return _is_along(node, rank) and end is not None and end.size == 1 and int(end.reshape(())) >= least


def _is_along(node: gs.Node, rank: int) -> bool:
    axes, steps = (small_constant(input_or_none(node, i)) for i in (3, 4))
    is_last = axes is not None and axes.tolist() in ([-1], [rank - 1])
    return is_last and (len(node.inputs) < 5 or (steps is not None and steps.tolist() == [1]))


def _is_one(tensor: gs.Tensor) -> bool:
    """Whether a tensor is the same for all columns."""
    shape = dims(tensor)
    return shape is not None and shape[-1:] in ((), (1,))

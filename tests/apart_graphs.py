"""Attention in which scores of past and of new tokens are computed apart, in the ways that exports for NPUs have it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from concat_graphs import MASKS, TYPES, Build, Decoder

Change = Callable[[Build, str, int], str]


def _same(g: Build, tensor: str, part: int) -> str:
    return tensor


@dataclass(frozen=True)
class Apart:
    """How it is written: the `attend` of a `Decoder`.

    Attributes:
        mask: where the mask is: "whole" (behind the Concat of the scores), "parts" (each has its own columns of it),
            "new" (all of the past is visible, new tokens have a triangle of their own), "new where" (the same by
            Where), "none".
        scale: what is scaled: "query", "parts", "whole", "keys" or "none".
        visible: which tokens of a triangle of their own new tokens see.
        cut: how the softmax is cut: "slice", "split" or "end" (counted from the end).
        upcast: the softmax is in float32.
        raw: changes what one part has in front of its mask, such as a softcap.
        scores, weights, keys, values: change what one part (0: past, 1: new) has on its way.
        order: of the parts, in the scores, in the weights.
        add: what brings the results together.
        heads: each head of the cache has an attention of its own.
    """

    mask: str = "whole"
    scale: str = "whole"
    visible: str = "LessOrEqual"
    cut: str = "slice"
    upcast: bool = False
    raw: Change = _same
    scores: Change = _same
    weights: Change = _same
    keys: Change = _same
    values: Change = _same
    order: tuple[tuple[int, int], tuple[int, int]] = ((0, 1), (0, 1))
    add: str = "Add"
    heads: bool = False

    def __call__(self, g: Build, query: str, keys: str, values: str) -> str:
        parts = parts_of(g, keys), parts_of(g, values)
        if not self.heads:
            return self._attend(g, query, *parts)
        found = []
        for head in range(g.decoder.heads):
            one = head * g.decoder.kv_heads // g.decoder.heads
            cut = [tuple(_head(g, t, one) for t in pair) for pair in parts]
            found.append(self._attend(g, _head(g, query, head), *cut))
        return g.node("Concat", found, axis=1)

    def _attend(self, g: Build, query: str, keys: Sequence[str], values: Sequence[str]) -> str:
        factor = g.constant(g.decoder.size**-0.5, g.decoder.dtype)

        def scaled(where: str, tensor: str) -> str:
            return g.node("Mul", [tensor, factor]) if self.scale == where else tensor

        query = scaled("query", query)
        turned = [scaled("keys", g.node("Transpose", [t], perm=[0, 1, 3, 2])) for t in keys]
        scores = [scaled("parts", g.node("MatMul", [query, self.keys(g, t, i)])) for i, t in enumerate(turned)]
        scores = [self.scores(g, self._masked(g, self.raw(g, t, i), i), i) for i, t in enumerate(scores)]
        whole = scaled("whole", g.node("Concat", [scores[i] for i in self.order[0]], axis=-1))
        if self.mask == "whole":
            visible = g.once("mask", lambda: MASKS[str(g.decoder.mask)](g))
            whole = g.node("Where", [visible, whole, g.constant(-65504.0, g.decoder.dtype)])
        if self.upcast:
            whole = g.node("Cast", [whole], to=1)
        weights = g.node("Softmax", [whole], axis=-1)
        if self.upcast:
            weights = g.node("Cast", [weights], to=TYPES[g.decoder.dtype])
        made = zip(self._cut(g, weights), self.order[1], strict=True)
        found = [g.node("MatMul", [self.weights(g, w, i), self.values(g, values[i], i)]) for w, i in made]
        return g.node(self.add, found)

    def _masked(self, g: Build, scores: str, part: int) -> str:
        lowest, zero = (g.constant(n, g.decoder.dtype) for n in (-65504.0, 0.0))
        if self.mask == "parts":
            visible = g.once("mask", lambda: MASKS[str(g.decoder.mask)](g))
            visible = g.once(f"mask {part}", lambda: g.node("Slice", [visible, *_ends(g)[part], g.constant([3])]))
            return g.node("Add", [scores, g.node("Where", [visible, zero, lowest])])
        if self.mask.startswith("new") and part == 1:
            rows = g.once("own", lambda: g.node("Range", [g.constant(0), g.length, g.constant(1)]))
            visible = g.node(self.visible, [rows, g.node("Unsqueeze", [rows, g.constant([1])])])
            if self.mask == "new where":
                return g.node("Where", [g.to_scores(visible), scores, lowest])
            return g.node("Add", [scores, g.node("Where", [visible, zero, lowest])])
        return scores

    def _cut(self, g: Build, weights: str) -> list[str]:
        if self.cut == "split":
            names = [f"{weights}_past", f"{weights}_new"]
            sizes = g.node("Concat", [g.node("Unsqueeze", [n, g.constant([0])]) for n in (g.past, g.length)], axis=0)
            g.node("Split", [weights, sizes], names, axis=3)
            return names
        ends = _ends(g)
        if self.cut == "end":
            first = g.node("Unsqueeze", [g.node("Neg", [g.length]), g.constant([0])])
            ends = [(g.constant([0]), first), (first, g.constant([2**63 - 1]))]
        return [g.node("Slice", [weights, *pair, g.constant([-1])]) for pair in ends]


def _ends(g: Build) -> list[tuple[str, str]]:
    """From where to where the columns of the past are, and the others."""
    rows = g.node("Unsqueeze", [g.past, g.constant([0])])
    return [(g.constant([0]), rows), (rows, g.constant([2**31 - 1]))]


def _head(g: Build, tensor: str, head: int) -> str:
    bounds = (head, head + 1, 1)
    return g.once(f"{tensor} {head}", lambda: g.node("Slice", [tensor, *(g.constant([n]) for n in bounds)]))


def parts_of(g: Build, tensor: str) -> tuple[str, str]:
    """What the past alone would give, and the new rows alone, where the model has a tensor made of both."""
    found = [_without(g, tensor, part) for part in (0, 1)]
    return found[0], found[1]


def _without(g: Build, tensor: str, part: int) -> str:
    node = next((n for n in g.nodes if tensor in n.output), None)
    if node is None or tensor in g.presents:
        return tensor if node is None else str(node.input[part])
    inputs = [_without(g, t, part) for t in node.input]
    if inputs == list(node.input):
        return tensor

    def make() -> str:
        name = f"{tensor}_part{part}"
        made = type(node)()
        made.CopyFrom(node)
        made.name, made.input[:], made.output[:] = name, inputs, [name]
        g.nodes.append(made)
        return name

    return g.once(f"{tensor} of {part}", make)


def apart(decoder: dict[str, Any] | None = None, **settings: Any) -> Decoder:
    return Decoder(**{"scale": "none", **(decoder or {})}, attend=Apart(**settings))


def scaled_by(factor: float, part: int) -> Change:
    """One part is multiplied with a number."""

    def change(g: Build, tensor: str, at: int) -> str:
        return g.node("Mul", [tensor, g.constant(np.asarray(factor), g.decoder.dtype)]) if at == part else tensor

    return change


def capped(g: Build, tensor: str, part: int) -> str:
    """A softcap."""
    cap = g.constant(5.0, g.decoder.dtype)
    return g.node("Mul", [g.node("Tanh", [g.node("Div", [tensor, cap])]), cap])


def in_one(op: str, part: int) -> Change:
    """One part goes through an operator that changes nothing, or has the operands of its last one swapped."""

    def change(g: Build, tensor: str, at: int) -> str:
        if at != part:
            return tensor
        if op == "swap":
            node = next(n for n in g.nodes if tensor in n.output)
            node.input[:] = list(node.input)[::-1]
            return tensor
        return g.node(op, [tensor])

    return change


def repeated(g: Build, tensor: str, part: int) -> str:
    """Heads are repeated, and the sizes behind that are taken from what is repeated."""
    times = g.constant([1, 1, g.decoder.heads // g.decoder.kv_heads, 1, 1])
    tiled = g.node("Tile", [g.node("Unsqueeze", [tensor, g.constant([2])]), times])
    taken = g.node("Slice", [g.node("Shape", [tiled]), g.constant([3]), g.constant([5]), g.constant([0])])
    return g.node("Reshape", [tiled, g.node("Concat", [g.constant([1, -1]), taken], axis=0)])


def in_halves(model: onnx.ModelProto) -> onnx.ModelProto:
    """New rows are cut in two and put together, as TorchScript has it: with bounds computed from their width."""
    nodes: list[onnx.NodeProto] = []
    news = {n.input[1] for n in model.graph.node if n.op_type == "Concat" and n.output[0].startswith("present")}
    for name, value in (("axis", [-1]), ("none", [0]), ("half", [1]), ("two", [2])):
        model.graph.initializer.append(onnx.helper.make_tensor(name, onnx.TensorProto.INT64, [1], value))
    for node in model.graph.node:
        made = onnx.NodeProto()
        made.CopyFrom(node)
        nodes.append(made)
        (out, *_) = made.output
        if out not in news:
            continue
        made.output[0] = whole = f"{out}_whole"
        steps = [
            ("Shape", [whole], "sizes"), ("Gather", ["sizes", "axis"], "width"), ("Add", ["width", "half"], "more"),
            ("Div", ["more", "two"], "middle"), ("Mul", ["middle", "two"], "end"),
            ("Slice", [whole, "none", "middle", "axis"], "front"), ("Slice", [whole, "middle", "end", "axis"], "back"),
        ]  # fmt: skip
        own = {name for _, _, name in steps}
        for op, inputs, name in steps:
            inputs = [f"{out}_{t}" if t in own else t for t in inputs]
            nodes.append(onnx.helper.make_node(op, inputs, [f"{out}_{name}"], f"{out}_{name}"))
        nodes.append(onnx.helper.make_node("Concat", [f"{out}_front", f"{out}_back"], [out], f"n_{out}", axis=-1))
    del model.graph.node[:], model.graph.value_info[:]
    model.graph.node.extend(nodes)
    return model

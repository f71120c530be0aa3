"""Attention in which query heads share keys and values by broadcasting, in the ways that exporters write it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from concat_graphs import MASKS, Build, Decoder, beside_sinks, decoders, make_decoder, without_sinks

from corpus import Entry, built


@dataclass(frozen=True)
class Grouped:
    """The form of an attention over groups of heads: the `attend` of a `concat_graphs.Decoder`.

    Attributes:
        form: "broadcast" (``[B, N, G, S, D] @ [B, N, 1, D, T]``), "einsum" (the same, as torch.einsum exports it),
            "rows" (``[B, N, G * S, D] @ [B, N, D, T]``), "flat"
            (``[B * N, G, S, D] @ [B * N, 1, D, T]``); with the queries in one axis all the way "folded"
            (``[B, N, G * S, D]``), and of one token "one" (``[B, N, G, D]``).
        mask: rank of the mask: 2, 3, 4 or 5.
        apply: "add" or "where".
        rolled: keys are those of other heads.
        computed: the batch is computed, so that nothing but numbers says that it is that of the caches.
    """

    form: str = "broadcast"
    mask: int = 2
    apply: str = "add"
    rolled: bool = False
    computed: bool = False

    def __call__(self, g: Build, query: str, keys: str, values: str) -> str:
        decoder = g.decoder
        heads, group, size = decoder.kv_heads, decoder.heads // decoder.kv_heads, decoder.size
        if self.rolled:
            keys = g.Gather(keys, np.roll(np.arange(heads), 1), axis=1)
        query = g.Mul(query, g.number(size**-0.5))
        batch, length = (g.Unsqueeze(g.size_of(g.tokens, axis), [0]) for axis in (0, 1))
        if self.computed:
            batch = g.Div(g.Mul(batch, [2]), [2])
        last = g.constant([size])

        def shaped(tensor: str, *sizes: str) -> str:
            return g.Reshape(tensor, g.node("Concat", list(sizes), axis=0))

        def numbers(*sizes: int) -> str:
            return g.constant(list(sizes))

        whole = (batch, numbers(heads, group), length)
        turned = g.Transpose(keys, perm=[0, 1, 3, 2])
        match self.form:
            case "broadcast":
                scores = g.MatMul(shaped(query, *whole, last), g.Unsqueeze(turned, numbers(2)))
            case "folded":
                queries = shaped(query, *whole, last)
                scores = g.MatMul(shaped(queries, batch, numbers(heads, -1), last), turned)
            case "one":
                scores = g.MatMul(shaped(query, batch, numbers(heads, group), last), turned)
            case "einsum":
                scores = g.Einsum(shaped(query, *whole, last), keys, equation="bngsd,bntd->bngst")
            case "rows":
                product = g.MatMul(shaped(query, batch, numbers(heads, -1), last), turned)
                scores = shaped(product, *whole, numbers(-1))
            case _:
                queries = shaped(query, numbers(-1, group), length, last)
                turned = shaped(turned, numbers(-1, 1), last, g.Unsqueeze(g.all, numbers(0)))
                scores = g.MatMul(queries, turned)
        weights = self._weights(g, decoder.scores(g, scores))
        match self.form:
            case "broadcast":
                output = g.MatMul(weights, g.Unsqueeze(values, numbers(2)))
            case "einsum":
                output = g.Einsum(weights, values, equation="bngst,bntd->bngsd")
            case "folded" | "one":
                groups = numbers(group)
                output = shaped(g.MatMul(weights, values), batch, numbers(heads), groups, length, last)
            case "rows":
                rows = shaped(weights, batch, numbers(heads, -1), g.Unsqueeze(g.all, numbers(0)))
                output = g.MatMul(rows, values)
            case _:
                apart = shaped(values, numbers(-1, 1), g.Unsqueeze(g.all, numbers(0)), last)
                output = g.MatMul(weights, apart)
        return shaped(output, batch, numbers(heads * group), length, last)

    def _weights(self, g: Build, scores: str) -> str:
        decoder = g.decoder
        visible = g.once("mask", lambda: self._mask(g))
        lowest, zero = g.number(decoder.lowest), g.number(0.0)
        if self.apply == "where":
            scores = g.Where(visible, scores, lowest)
        else:
            scores = g.Add(g.Where(visible, zero, lowest), scores)
        if not decoder.sinks:
            return g.Softmax(scores, axis=-1)
        both = beside_sinks(g, scores, self._sinks(g, scores))
        return without_sinks(g, g.Softmax(both, axis=4))

    def _sinks(self, g: Build, scores: str) -> str:
        """``[B, N, G, S, 1]``."""
        heads, all_heads = g.decoder.kv_heads, g.decoder.heads
        sizes = [heads, all_heads // heads]
        sinks = g.constant(np.linspace(-1.0, 3.0, all_heads).reshape([1, *sizes, 1, 1]), g.decoder.dtype)
        ends = [g.Unsqueeze(g.size_of(scores, axis), [0]) for axis in (0, 3)]
        shape = g.Concat(ends[0], sizes, ends[1], [1], axis=0)
        return g.Expand(sinks, shape)

    def _mask(self, g: Build) -> str:
        """``[S, T]``, ``[1, S, T]`` or ``[B, 1, 1, S, T]``, of what a decoder says in four axes."""
        if g.decoder.mask == "own":
            shape = [g.decoder.batch, 1, g.decoder.sequence, g.decoder.total]
            mask = g.input("mask", 9, shape)
        else:
            assert isinstance(g.decoder.mask, str)
            mask = MASKS[g.decoder.mask](g)
        if self.form == "folded":  # ``[1, 1, G * S, T]``
            mask = g.Unsqueeze(mask, [2])
            group = g.decoder.heads // g.decoder.kv_heads
            rows = g.Mul(g.length, group)
            sizes = [g.constant([-1, 1]), *(g.Unsqueeze(n, [0]) for n in (rows, g.all))]
            return g.Reshape(g.Tile(mask, [1, 1, group, 1, 1]), g.node("Concat", sizes, axis=0))
        if self.mask == 5:
            return g.Unsqueeze(mask, [2])
        return mask if self.mask == 4 else g.Squeeze(mask, [0, 1][: 4 - self.mask])


FORMS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "own mask": ({"mask": "own"}, {"mask": 5, "apply": "where"}),
    "a window, bsnd": ({"layout": "bsnd", "window": 5}, {"mask": 3}),
    "rows, flat": ({"layout": "flat", "mask": "padding"}, {"form": "rows", "mask": 5}),
    "all the way, padding": ({"mask": "padding", "layout": "bsnd"}, {"form": "folded"}),
    "rows, a computed batch": ({"heads": 6}, {"form": "rows", "computed": True}),
    "all the way, a computed batch": ({"heads": 6, "batch": 2}, {"form": "folded", "computed": True}),
    "one token": ({"heads": 6, "sequence": 1}, {"form": "one"}),
    "one token, a computed batch": ({"heads": 6, "sequence": 1}, {"form": "one", "computed": True}),
    "one token, padding": ({"sequence": 1, "mask": "padding"}, {"form": "one", "mask": 4}),
    "one token, one key head": ({"sequence": 1, "kv_heads": 1, "window": 5}, {"form": "one", "apply": "where"}),
    "sinks": ({"heads": 6, "sinks": "weight"}, {}),
    "batch and heads": ({"scores": lambda g, s: g.Tanh(s)}, {"form": "flat", "mask": 3}),
    **{
        f"rolled, {form}": ({"sequence": 1} if form == "one" else {}, {"form": form, "rolled": True})
        for form in ("rows", "flat", "folded", "one")
    },
}


def groups_first(heads: int, place: int) -> onnx.ModelProto:
    """``[G * B, N, S, D]``, with which one sequence alone fits: its keys broadcast, and each head meets another one."""
    model = make_decoder(Decoder(heads=heads, repeat="none", scale="none", attend=Grouped(form="rows")))
    reshapes = [n for n in model.graph.node if n.op_type == "Reshape"]
    readers = {n.input[0]: n for n in model.graph.node if n.op_type == "MatMul"}
    shape = [n for n in reshapes if n.output[0] in readers and "concat" in n.input[1]][place].input[1]
    index, concat = next((i, n) for i, n in enumerate(model.graph.node) if n.output[0] == shape)
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.array([heads // 2]), "group"))
    first, concat.input[0] = concat.input[0], "groups"
    model.graph.node.insert(index, onnx.helper.make_node("Mul", [first, "group"], ["groups"], "groups"))
    return model


# Attention in pieces, as exports for NPUs may have it: scores of past and new tokens apart, heads one by one.


def _attended(g: Build, query: str, keys: list[str], values: list[str]) -> str:
    """Attention over keys and values whose scores are joined for the softmax."""
    query = g.Mul(query, g.number(g.decoder.size**-0.5))
    scores = [g.MatMul(query, g.Transpose(t, perm=[0, 1, 3, 2])) for t in keys]
    whole = g.node("Concat", scores, axis=-1) if len(scores) > 1 else scores[0]
    visible = g.once("mask", lambda: MASKS["past"](g))
    weights = g.Softmax(g.Where(visible, whole, g.number(g.decoder.lowest)), axis=-1)
    if len(values) == 1:
        return g.MatMul(weights, values[0])
    past, zero, end = g.Unsqueeze(g.past, [0]), g.constant([0]), g.constant([2**31 - 1])
    cut = [g.Slice(weights, *bounds, [3]) for bounds in ((zero, past), (past, end))]
    return g.node("Add", [g.MatMul(w, v) for w, v in zip(cut, values, strict=True)])


def _scores_apart(g: Build, query: str, keys: str, values: str) -> str:
    def parts(tensor: str) -> list[str]:
        return list(next(n for n in g.nodes if n.output[0] == tensor).input)

    return _attended(g, query, parts(keys), parts(values))


def _head(g: Build, tensor: str, head: int) -> str:
    bounds = (head, head + 1, 1)
    return g.once(f"{tensor} {head}", lambda: g.Slice(tensor, *(g.constant([n]) for n in bounds)))


def _one_by_one(g: Build, query: str, keys: str, values: str) -> str:
    found = []
    for head in range(g.decoder.heads):
        one, key, value = (_head(g, tensor, head) for tensor in (query, keys, values))
        found.append(_attended(g, one, [key], [value]))
    return g.node("Concat", found, axis=1)


def entries() -> Iterator[Entry]:
    forms = ("broadcast", "einsum", "rows", "flat", "folded")
    how: list[dict[str, Any]] = [{"form": f} for f in forms] + [{"mask": m} for m in (3, 4, 5)]
    how += [{"apply": "where"}, {"rolled": True}]
    yield from decoders("grouped", {str(h): Decoder(repeat="none", attend=Grouped(**h)) for h in how})
    named = {
        n: Decoder(**{"repeat": "none", "scale": "none", **s}, attend=Grouped(**grouped))
        for n, (s, grouped) in FORMS.items()
    }
    named["two tokens, two heads"] = Decoder(heads=2, kv_heads=2, sequence=2, positions="past")
    yield from decoders("grouped", named)
    models = {f"groups first, 4, {p}": (lambda p=p: groups_first(4, p)) for p in (0, 1)}
    yield from built("grouped", models, capacity=24)
    pieces = {"scores apart": _scores_apart, "heads one by one": _one_by_one}
    yield from decoders("apart", {name: {"kv_heads": 4, "attend": attend} for name, attend in pieces.items()})

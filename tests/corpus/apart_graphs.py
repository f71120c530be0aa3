"""Attention in pieces, as exports for NPUs may have it: scores of past and new tokens apart, heads one by one."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import onnx
from concat_graphs import MASKS, Build, Decoder, make_decoder

from corpus import Entry, built


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


def _decoder(attend: Callable[[Build, str, str, str], str]) -> onnx.ModelProto:
    return make_decoder(Decoder(kv_heads=4, attend=attend))


FORMS: dict[str, Callable[[], onnx.ModelProto]] = {
    "scores apart": lambda: _decoder(_scores_apart),
    "heads one by one": lambda: _decoder(_one_by_one),
}


def entries() -> Iterator[Entry]:
    yield from built("apart", FORMS, capacity=24)

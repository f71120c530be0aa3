"""Attention in pieces, as exports for NPUs may have it: scores of past and new tokens apart, heads one by one."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import onnx
import onnx_graphsurgeon as gs
from concat_graphs import MASKS, Build, Decoder, make_decoder

from corpus import Entry, built
from trt_kvcache.importer.graph import replace_uses


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


def _written_one_by_one() -> onnx.ModelProto:
    """Each head of a cache has a Concat of its own, which its attention reads."""
    graph = gs.import_onnx(onnx.shape_inference.infer_shapes(_decoder(_one_by_one)))
    for present in graph.outputs[1:]:
        (whole,) = present.inputs
        past, new = whole.inputs
        cuts = {r.name: r for r in present.outputs if r.op == "Slice"}
        written = []
        for reader in sorted(cuts.values(), key=lambda r: int(r.inputs[1].values[0])):
            made = [gs.Variable(f"{t.name}_{reader.name}", t.dtype) for t in (past, new, present)]
            for tensor, part in zip((past, new), made, strict=False):
                graph.nodes.append(gs.Node("Slice", part.name, {}, [tensor, *reader.inputs[1:]], [part]))
            graph.nodes.append(gs.Node("Concat", made[2].name, {"axis": 2}, made[:2], [made[2]]))
            replace_uses(reader.outputs[0], made[2])
            written.append(made[2])
        whole.attrs, whole.inputs = {"axis": 1}, written
    graph.cleanup().toposort()
    return gs.export_onnx(graph)


def _decoder(attend: Callable[[Build, str, str, str], str]) -> onnx.ModelProto:
    return make_decoder(Decoder(kv_heads=4, attend=attend))


FORMS: dict[str, Callable[[], onnx.ModelProto]] = {
    "scores apart": lambda: _decoder(_scores_apart),
    "heads one by one": lambda: _decoder(_one_by_one),
    "heads written one by one": _written_one_by_one,
}


def entries() -> Iterator[Entry]:
    yield from built("apart", FORMS, capacity=24)

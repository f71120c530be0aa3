"""Constants in disguise are folded; sizes that data decide are refused if they stay."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import onnx
from concat_graphs import Build, Decoder, _attend, decoders, make_decoder
from graphs import Graph
from onnx import TensorProto, helper, numpy_helper

from corpus import Entry, built

FLOAT, INT64 = TensorProto.FLOAT, TensorProto.INT64
SWITCH = 11


Change = Callable[[Build, str], str]


def repeated(rows: Callable[[Build, str], str], reads: str = "cos") -> Change:
    """As TorchScript writes ``repeat_interleave(cos, 2)``: which column, and as often as there are copies of it.

    Args:
        rows: how many columns there are, int64 scalar, of the hidden states.
        reads: where the indices go: "cos", or "count" for how many there are.
    """

    def after(g: Build, x: str) -> str:
        count = rows(g, x)
        copies = g.Expand(g.constant(2), g.Unsqueeze(count, [0]))
        most = g.ReduceMax(copies, keepdims=0)
        columns = g.Range(0, most, 1)
        wanted = g.Less(columns, g.Unsqueeze(copies, [1]))
        found = g.Transpose(g.NonZero(wanted), perm=[1, 0])
        if reads == "count":
            many = g.Cast(g.size_of(found, 0), to=FLOAT)
            return g.Mul(x, many)
        column = g.Slice(found, [0], [1], [1])
        spread = g.GatherND(g.Transpose(x, perm=[2, 0, 1]), column)
        halves = g.Reshape(g.Transpose(spread, perm=[1, 2, 0]), [0, 0, -1, 2])
        return g.ReduceSum(halves, [3], keepdims=0)

    return after


def width(g: Build, x: str) -> str:
    return g.size_of(x, 2)


def cancelled(g: Build, x: str) -> str:
    """Rows of the present minus those of the past, over the new tokens: 1, of which there are as many as columns."""
    new = g.Sub(g.all, g.past)
    return g.Mul(g.Div(new, g.length), g.size_of(x, 2))


def count_of(tensor: Callable[[Build, str], str]) -> Change:
    """Scales by how many numbers a NonZero finds."""

    def after(g: Build, x: str) -> str:
        many = g.Cast(g.size_of(g.NonZero(tensor(g, x)), 1), to=FLOAT)
        return g.Mul(x, g.Add(many, g.number(1.0)))

    return after


def ones(size: Callable[[Build, str], str]) -> Callable[[Build, str], str]:
    """As many ones as a size says."""

    def make(g: Build, x: str) -> str:
        return g.Expand(g.constant(1), g.Unsqueeze(size(g, x), [0]))

    return make


def below(limit: int, size: Callable[[Build, str], str]) -> Callable[[Build, str], str]:
    """1 up to a limit, and 2 beyond it: the same in all small steps."""

    def make(g: Build, x: str) -> str:
        over = g.GreaterOrEqual(size(g, x), limit)
        return g.Add(g.Cast(over, to=INT64), 1)

    return make


def by_axis(axis: int) -> Callable[[Build, str], str]:
    return lambda g, x: g.size_of(g.tokens, axis)


def all_rows(g: Build, x: str) -> str:
    return g.all


FOUND: dict[str, Callable[[Build, str], str]] = {
    "batch": ones(by_axis(0)),
    "update": ones(by_axis(1)),
    "a long update": ones(below(21, by_axis(1))),
    "tokens": lambda g, _: g.tokens,
    "chance": lambda g, _: g.RandomUniform(shape=[4], seed=1.0),
    "some rows": ones(below(12, all_rows)),
    "more rows": ones(below(25, all_rows)),
}


def of_an_encoder(limit: int | None) -> Change:
    """An axis that nothing explains may be of any size."""

    def after(g: Build, x: str) -> str:
        extra = g.input("extra", FLOAT, ["batch", "extra", 16])
        size = g.size_of(extra, 1)
        size = size if limit is None else below(limit, lambda *_: size)(g, x)
        added = g.ReduceMean(extra, [1], keepdims=1)
        return g.Add(count_of(ones(lambda *_: size))(g, x), added)

    return after


def branch(value: float, name: str) -> onnx.GraphProto:
    table = numpy_helper.from_array(np.full((1, 16), value, np.float32), f"{name}_table")
    out = helper.make_tensor_value_info(f"{name}_out", FLOAT, [1, 16])
    return helper.make_graph(
        [helper.make_node("Constant", [], [f"{name}_out"], f"{name}_made", value=table)], name, [], [out]
    )


def chosen(size: Callable[[Build, str], str], switch: int = SWITCH) -> Change:
    """As onnxruntime-genai chooses the factors of LongRoPE."""

    def after(g: Build, x: str) -> str:
        long = g.Greater(size(g, x), switch)
        factors = g.If(long, out="factors", then_branch=branch(3.0, "long"), else_branch=branch(0.5, "short"))
        return g.Mul(x, factors)

    return after


def keys(g: Build, x: str) -> str:
    return g.size_of(g.padding, 1)


def with_experts(model: onnx.ModelProto) -> onnx.ModelProto:
    """With an expert that some tokens take, as TorchScript writes a mixture of them, in front of the caches."""
    nodes = list(model.graph.node)
    place = next(i for i, node in enumerate(nodes) if "input_ids" in node.input and node.op_type == "Gather")
    g, name = Graph(), nodes[place].output[0]
    nodes[place].output[0] = "embedded"
    nodes[place].name = "embed"
    flat = g.Reshape("embedded", "flat", out="tokens")
    mine = g.Greater(g.ReduceSum(flat, "one", out="sums", keepdims=0), "zero", out="mine")
    rows = g.Transpose(g.NonZero(mine, out="experts"), out="chosen", perm=[1, 0])
    given = g.MatMul(g.GatherND(flat, rows, out="taken"), "expert", out="given")
    added = g.ScatterND(flat, rows, given, out="added", reduction="add")
    g.Reshape(added, g.Shape("embedded", out="size"), out=name)
    weight = np.random.default_rng(2).standard_normal((16, 16))
    constants = {"flat": np.array([-1, 16]), "one": np.array([1]), "zero": np.float32(0), "expert": np.float32(weight)}
    model.graph.initializer.extend(numpy_helper.from_array(np.asarray(v), n) for n, v in constants.items())
    del model.graph.node[:]
    model.graph.node.extend([*nodes[: place + 1], *g.nodes, *nodes[place + 1 :]])
    onnx.checker.check_model(model, full_check=True)
    return model


def _experts(g: Build, query: str, keys: str, values: str, by: str = "Range") -> str:
    """Attention, and after it two experts that take some of the tokens each, as transformers' grouped_mm does."""
    output = _attend(g, query, keys, values)
    size = g.decoder.heads * g.decoder.size
    flat = g.Reshape(g.Transpose(output, perm=[0, 2, 1, 3]), [-1, size])
    first = g.Less(g.Reshape(g.tokens, [-1]), 16)
    total, order = g.Shape(first), f"order_{len(g.nodes)}"
    g.TopK(g.Cast(first, to=1), total, out=["", order])
    whole = g.Squeeze(total)
    count = g.ReduceSum(g.Cast(first, to=7), keepdims=0)
    parts = []
    for start, end in ((g.constant(0), count), (count, whole)):
        if by == "Range":
            places = g.Range(start, end, 1)
        else:
            bounds = [g.Unsqueeze(n, [0]) for n in (start, end)]
            places = g.Slice(g.Range(0, whole, 1), *bounds)
        rows = g.Gather(flat, g.Gather(order, places))
        parts.append(g.MatMul(rows, g.weight(size, size)))
    made = g.node("Concat", parts, axis=0)
    length = g.Unsqueeze(g.length, [0])
    split = g.Reshape(made, g.Concat([-1], length, [4, 4], axis=0))
    return g.Transpose(split, perm=[0, 2, 1, 3])


def entries() -> Iterator[Entry]:
    forms = {
        f"{r}, {n}": repeated(rows, r) for r in ("cos", "count") for n, rows in (("width", width), ("1", cancelled))
    }
    forms |= {name: count_of(found) for name, found in FOUND.items()}
    forms |= {f"encoder, {limit}": of_an_encoder(limit) for limit in (None, 7)}
    yield from decoders("sizes", {name: Decoder(mask="padding", after=after) for name, after in forms.items()})
    kept = {n: Decoder(after=count_of(FOUND[n])) for n in ("batch", "update", "some rows")}
    yield from decoders("sizes, tensorrt", kept, target="tensorrt")
    for capacity in (5, SWITCH, SWITCH + 1):
        branches = {f"{n}, {capacity}": {"after": chosen(by)} for n, by in (("mask", keys), ("caches", all_rows))}
        yield from decoders("branch", branches, capacity=capacity)
    steps = {f"axis {axis}, from {n}": {"after": chosen(by_axis(axis), n)} for axis in (0, 1) for n in (2, 22)}
    yield from decoders("branch", steps)
    grouped = {by: {"attend": partial(_experts, by=by), "layers": 2} for by in ("Range", "Slice")}
    yield from decoders("experts", grouped | {"one layer": {"attend": _experts}})
    chosen_by_tokens = {"by tokens": lambda: with_experts(make_decoder(Decoder(layers=2)))}
    yield from built("experts", chosen_by_tokens, capacity=24)
    yield from built("experts, tensorrt", chosen_by_tokens, capacity=24, target="tensorrt")

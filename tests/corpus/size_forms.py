"""Sizes that data decide are refused if they stay, and so are sequences of a batch that depend on each other."""

from collections.abc import Callable, Iterator

import numpy as np
import onnx
from concat_graphs import Build, Decoder, decoders
from onnx import TensorProto, helper, numpy_helper

from corpus import Entry

FLOAT, INT64 = TensorProto.FLOAT, TensorProto.INT64
SWITCH, FAR = 11, 1 << 40
Change = Callable[[Build, str], str]


def count_of(tensor: Change) -> Change:
    """Scales by how many numbers a NonZero finds."""

    def after(g: Build, x: str) -> str:
        many = g.Cast(g.size_of(g.NonZero(tensor(g, x)), 1), to=FLOAT)
        return g.Mul(x, g.Add(many, g.number(1.0)))

    return after


def ones(size: Change) -> Change:
    return lambda g, x: g.Expand(g.constant(1), g.Unsqueeze(size(g, x), [0]))


def below(limit: int, size: Change) -> Change:
    """1 up to a limit, and 2 beyond it: the same in all small steps."""

    def make(g: Build, x: str) -> str:
        over = g.GreaterOrEqual(size(g, x), limit)
        return g.Add(g.Cast(over, to=INT64), 1)

    return make


def of_an_encoder(g: Build, x: str) -> str:
    """An axis that nothing explains may be of any size."""
    extra = g.input("extra", FLOAT, ["batch", "extra", 16])
    size = g.size_of(extra, 1)
    added = g.ReduceMean(extra, [1], keepdims=1)
    return g.Add(count_of(ones(below(7, lambda *_: size)))(g, x), added)


def branch(value: float, name: str) -> onnx.GraphProto:
    table = numpy_helper.from_array(np.full((1, 16), value, np.float32), f"{name}_table")
    out = helper.make_tensor_value_info(f"{name}_out", FLOAT, [1, 16])
    return helper.make_graph(
        [helper.make_node("Constant", [], [f"{name}_out"], f"{name}_made", value=table)], name, [], [out]
    )


def chosen(g: Build, x: str) -> str:
    """As onnxruntime-genai chooses the factors of LongRoPE."""
    long = g.Greater(g.size_of(g.padding, 1), SWITCH)
    factors = g.If(long, out="factors", then_branch=branch(3.0, "long"), else_branch=branch(0.5, "short"))
    return g.Mul(x, factors)


SIZES: dict[str, Change] = {
    "tokens": count_of(lambda g, _: g.tokens),
    "more rows": count_of(ones(below(25, lambda g, _: g.all))),
    "encoder, 7": of_an_encoder,
}

# Sequences that depend on each other.


def by_the_longest(g: Build, x: str) -> str:
    """As LongRoPE chooses its factors."""
    long = g.Greater(g.ReduceMax(g.position_ids, keepdims=0), 9)
    return g.Mul(x, g.Where(long, g.number(3), g.number(1)))


def by_a_row_of_a_table(g: Build, x: str) -> str:
    """Weights are looked up at an offset: no value shows, only which rows are taken."""
    long = g.Greater(g.ReduceMax(g.position_ids, keepdims=0), 9)
    offset = g.Mul(g.Cast(long, to=INT64), 64)
    table = g.Mul(g.weight(128, 1), g.Cast(g.ReduceMax(g.tokens), to=FLOAT))
    return g.Mul(x, g.Gather(table, g.Add(g.position_ids, offset), axis=0))


def roll(g: Build, x: str) -> str:
    parts = [g.Slice(x, [start], [end], [0]) for start, end in ((1, FAR), (0, 1))]
    return g.node("Concat", parts, axis=0)


BATCH: dict[str, Change] = {
    **{f.__name__: f for f in (by_the_longest, by_a_row_of_a_table, roll)},
    "softmax": lambda g, x: g.Softmax(x, axis=0),
}


def entries() -> Iterator[Entry]:
    yield from decoders("sizes", {name: Decoder(mask="padding", after=after) for name, after in SIZES.items()})
    for capacity in (5, SWITCH + 1):
        yield from decoders("branch", {f"mask, {capacity}": {"after": chosen}}, capacity=capacity)
    yield from decoders("batch", {name: {"after": after} for name, after in BATCH.items()})

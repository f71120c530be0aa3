"""Logits of the last positions: cut before the last product, or of all positions where odd operators follow it."""

from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import onnx
from decoders import DecoderConfig, make_decoder
from graphs import Graph
from onnx import ModelProto, TensorProto

from corpus import Entry, built

WIDTH, VOCABULARY, CAPACITY, FAR = 64, 256, 16, 2**62
SMALL = DecoderConfig(layers=1, capacity=CAPACITY)
FIXED = DecoderConfig(layers=1, capacity=CAPACITY, sequence=3)


class Tail(Graph):
    """Puts another tail after the last norm of a decoder. `x` is the norm, `head` the product with the vocabulary."""

    def __init__(self, config: DecoderConfig = SMALL) -> None:
        super().__init__()
        self.decoder = make_decoder(config)
        self.rng = np.random.default_rng(3)
        assert list(self.decoder.graph.node.pop().output) == ["logits"]
        self.x = "norm"

    def f(self, value: object) -> str:
        return self.constant(value, np.float32)

    def random(self, *shape: int) -> str:
        return self.f(self.rng.normal(0, 0.5, shape))

    def head(self, x: str) -> str:
        return self.MatMul(x, "head.weight")

    def end(self, logits: str, *, check: bool = True) -> ModelProto:
        self.Identity(logits, out="logits")
        graph = self.decoder.graph
        graph.node.extend(self.nodes)
        graph.initializer.extend(self.initializers)
        graph.output.extend(self.outputs)
        if check:
            onnx.checker.check_model(self.decoder, full_check=True)
        return self.decoder


def from_the_left(t: Tail) -> str:
    """Logits ``[B, V, S]``, then transposed."""
    made = t.MatMul(t.random(VOCABULARY, WIDTH), t.Transpose(t.x, perm=[0, 2, 1]))
    return t.Transpose(made, perm=[0, 2, 1])


def tied(t: Tail) -> str:
    table = next(n for n in t.decoder.graph.node if n.op_type == "Gather").input[0]
    return t.MatMul(t.x, t.Transpose(table, perm=[1, 0]))


def cut_vocabulary(t: Tail) -> str:
    return t.Slice(t.MatMul(t.x, t.random(WIDTH, VOCABULARY + 8)), [0], [VOCABULARY], [2])


CUT: dict[str, Callable[[Tail], str]] = {
    "plain": lambda t: t.head(t.x),
    "bias": lambda t: t.Add(t.head(t.x), t.random(VOCABULARY)),
    "scaled": lambda t: t.Mul(t.head(t.x), t.f([[[0.25]]])),
    "softcap": lambda t: t.Tanh(t.Div(t.head(t.x), t.f(7.0))),
    "probabilities": lambda t: t.LogSoftmax(t.head(t.x), axis=-1),
    "two layers": lambda t: t.head(t.Gelu(t.MatMul(t.x, t.random(WIDTH, WIDTH)))),
    "tied": tied,
    "cut vocabulary": cut_vocabulary,
    "from the left": from_the_left,
}


def mean_of_positions(t: Tail, x: str) -> str:
    return t.Sub(x, t.ReduceMean(x, [1]))


MIXING: dict[str, Callable[[Tail, str], str]] = {
    "cumulative": lambda t, x: t.CumSum(x, 1),
    "mean of positions": mean_of_positions,
}


def cut(build: Callable[[Tail], str]) -> ModelProto:
    tail = Tail()
    return tail.end(build(tail))


def mixing(build: Callable[[Tail, str], str], *, before: bool) -> ModelProto:
    """Before the product with the vocabulary, or after it."""
    tail = Tail()
    return tail.end(tail.head(build(tail, tail.x)) if before else build(tail, tail.head(tail.x)))


def spanning(*, before: bool) -> ModelProto:
    """Constants that span the sequence."""
    t = Tail(FIXED)
    if before:
        return t.end(t.head(t.Mul(t.x, t.random(3, WIDTH))))
    return t.end(t.Mul(t.head(t.x), t.random(3, VOCABULARY)))


def other_output(name: str) -> ModelProto:
    t, shape = Tail(), ["batch", "sequence_len"]
    logits = t.head(t.x)
    if name == "other head":
        t.output(t.MatMul(t.x, t.random(WIDTH, 30)), TensorProto.FLOAT, [*shape, 30])
    else:
        kind = TensorProto.DOUBLE if name == "double" else TensorProto.FLOAT16
        t.output(t.Cast(logits, to=kind), kind, [*shape, VOCABULARY])
    return t.end(logits)


def last_position(*, cut: bool = True) -> ModelProto:
    """`cut`: the graph picks it; else a traced step merely says one token."""
    t = Tail()
    output = next(o for o in t.decoder.graph.output if o.name == "logits")
    output.type.tensor_type.shape.dim[1].dim_value = 1
    return t.end(t.head(t.Slice(t.x, [-1], [FAR], [1]) if cut else t.x), check=cut)


def entries() -> Iterator[Entry]:
    models: dict[str, Callable[[], ModelProto]] = {name: partial(cut, build) for name, build in CUT.items()}
    models |= {f"{name}, after": partial(mixing, build, before=False) for name, build in MIXING.items()}
    models["mean of positions, before"] = partial(mixing, mean_of_positions, before=True)
    models["spans the sequence"] = partial(spanning, before=True)
    models |= {name: partial(other_output, name) for name in ("cast", "double", "other head")}
    models["last_position"] = last_position
    models["one position stated"] = partial(last_position, cut=False)
    yield from built("tail", models)

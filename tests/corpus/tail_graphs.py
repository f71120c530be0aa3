"""Logits of the last positions: cut before the last product, or of all positions where odd operators follow it."""

from __future__ import annotations

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


def norm_of_operators(t: Tail) -> str:
    size = t.Sqrt(t.Add(t.ReduceMean(t.Mul(t.x, t.x), [-1]), t.f(1e-5)))
    return t.head(t.Mul(t.Div(t.x, size), t.random(WIDTH)))


def half(t: Tail) -> str:
    x, weight = (t.Cast(name, to=TensorProto.FLOAT16) for name in (t.x, "head.weight"))
    return t.Cast(t.MatMul(x, weight), to=TensorProto.FLOAT)


def from_the_left(t: Tail) -> str:
    """Logits ``[B, V, S]``, then transposed."""
    made = t.MatMul(t.random(VOCABULARY, WIDTH), t.Transpose(t.x, perm=[0, 2, 1]))
    return t.Transpose(made, perm=[0, 2, 1])


def tied(t: Tail) -> str:
    table = next(n for n in t.decoder.graph.node if n.op_type == "Gather").input[0]
    return t.MatMul(t.x, t.Transpose(table, perm=[1, 0]))


def packed_gate(t: Tail) -> str:
    t.Split(t.MatMul(t.x, t.random(WIDTH, 2 * WIDTH)), out=["gate", "up"], axis=2, num_outputs=2)
    return t.head(t.Mul(t.Sigmoid("gate"), "up"))


def cut_vocabulary(t: Tail) -> str:
    return t.Slice(t.MatMul(t.x, t.random(WIDTH, VOCABULARY + 8)), [0], [VOCABULARY], [2])


def attends_itself(t: Tail) -> str:
    """The rows of the scores are those of `x`; what they are multiplied with stays whole."""
    scores = t.MatMul(t.x, t.Transpose(t.x, perm=[0, 2, 1]))
    return t.head(t.MatMul(t.Softmax(scores, axis=-1), t.x))


def scalar_axes(t: Tail) -> str:
    """As onnxsim 0.8 writes them, which ONNX Runtime loads and does not run."""
    return t.head(t.Sub(t.x, t.ReduceMean(t.x, -1)))


CUT: dict[str, Callable[[Tail], str]] = {
    "plain": lambda t: t.head(t.x),
    "bias": lambda t: t.Add(t.head(t.x), t.random(VOCABULARY)),
    "scaled": lambda t: t.Mul(t.head(t.x), t.f([[[0.25]]])),
    "softcap": lambda t: t.Tanh(t.Div(t.head(t.x), t.f(7.0))),
    "probabilities": lambda t: t.LogSoftmax(t.head(t.x), axis=-1),
    "all positions": lambda t: t.head(t.Slice(t.x, [0], [FAR], [1])),
    "two layers": lambda t: t.head(t.Gelu(t.MatMul(t.x, t.random(WIDTH, WIDTH)))),
    "tied": tied,
    "packed gate": packed_gate,
    "cut vocabulary": cut_vocabulary,
    "half": half,
    "norm of operators": norm_of_operators,
    "from the left": from_the_left,
    "attends itself": attends_itself,
}


def mean_of_positions(t: Tail, x: str) -> str:
    return t.Sub(x, t.ReduceMean(x, [1]))


def norm_over_positions(t: Tail, x: str) -> str:
    normed = t.LayerNormalization(t.Transpose(x, perm=[0, 2, 1]), t.f([1.5]), axis=-1)
    return t.Transpose(normed, perm=[0, 2, 1])


def reversed_positions(t: Tail, x: str) -> str:
    return t.Slice(x, [-1], [-FAR], [1], [-1])


def rounded_by_the_largest(t: Tail, x: str) -> str:
    """To steps that all positions have in common, as quantization with a computed scale has them."""
    step = t.Div(t.ReduceMax(t.Abs(x), [1, 2]), t.f(127))
    return t.Mul(t.Round(t.Div(x, step)), step)


MIXING: dict[str, Callable[[Tail, str], str]] = {
    "cumulative": lambda t, x: t.CumSum(x, 1),
    "mean of positions": mean_of_positions,
    "norm over positions": norm_over_positions,
    "reversed positions": reversed_positions,
    "rounded by the largest": rounded_by_the_largest,
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
    logits, kind = t.head(t.x), TensorProto.FLOAT
    if name == "hidden states":
        t.output(t.x, kind, [*shape, WIDTH])
    elif name == "other head":
        t.output(t.MatMul(t.x, t.random(WIDTH, 30)), kind, [*shape, 30])
    else:
        kind = TensorProto.DOUBLE if name == "double" else TensorProto.FLOAT16
        t.output(t.Cast(logits, to=kind), kind, [*shape, VOCABULARY])
    return t.end(logits)


def one_position() -> ModelProto:
    t = Tail(DecoderConfig(layers=1, capacity=CAPACITY, sequence=1))
    return t.end(t.head(t.x))


def last_position(*, cut: bool = True) -> ModelProto:
    """`cut`: the graph picks it; else a traced step merely says one token."""
    t = Tail()
    output = next(o for o in t.decoder.graph.output if o.name == "logits")
    output.type.tensor_type.shape.dim[1].dim_value = 1
    return t.end(t.head(t.Slice(t.x, [-1], [FAR], [1]) if cut else t.x), check=cut)


def taken_name() -> ModelProto:
    t = Tail()
    return t.end(t.Neg(t.Tanh(t.head(t.x), out="logits_span")))


def entries() -> Iterator[Entry]:
    models: dict[str, Callable[[], ModelProto]] = {name: partial(cut, build) for name, build in CUT.items()}
    for place in ("before", "after"):
        before = place == "before"
        models |= {f"{name}, {place}": partial(mixing, build, before=before) for name, build in MIXING.items()}
        models[f"spans the sequence, {place}"] = partial(spanning, before=before)
    models |= {name: partial(other_output, name) for name in ("cast", "double", "hidden states", "other head")}
    models |= {f.__name__: f for f in (one_position, last_position, taken_name)}
    models["one position stated"] = partial(last_position, cut=False)
    models["axes that do not run"] = partial(cut, scalar_axes)
    yield from built("tail", models)

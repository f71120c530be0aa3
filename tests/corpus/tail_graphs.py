"""Logits of the last positions: cut where the tail works on each position by itself, and exact wherever it is cut."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import onnx
from decoders import DecoderConfig, make_decoder
from onnx import ModelProto, TensorProto, helper, numpy_helper

from corpus import Entry, built

WIDTH, VOCABULARY, CAPACITY = 64, 256, 16
SMALL = DecoderConfig(layers=1, capacity=CAPACITY)
FIXED = DecoderConfig(layers=1, capacity=CAPACITY, sequence=3)


class Tail:
    """Puts another tail after the last norm of a decoder. `x` is the norm, `head` the product with the vocabulary."""

    def __init__(self, config: DecoderConfig = SMALL) -> None:
        self.model = make_decoder(config)
        self.graph = self.model.graph
        self.rng = np.random.default_rng(3)
        self._head = self.graph.node.pop()
        assert list(self._head.output) == ["logits"]
        self.x = "norm"

    def op(self, op: str, inputs: list[str], outputs: int | str = 1, **attributes: object) -> str:
        place = len(self.graph.node)
        names = [outputs] if isinstance(outputs, str) else [f"tail.{op}.{place}.{i}" for i in range(outputs)]
        self.graph.node.append(helper.make_node(op, inputs, names, name=f"node.{place}", **attributes))
        return names[0]

    def constant(self, values: object, dtype: type = np.float32) -> str:
        name = f"tail.constant.{len(self.graph.initializer)}"
        self.graph.initializer.append(numpy_helper.from_array(np.asarray(values, dtype), name))
        return name

    def random(self, *shape: int) -> str:
        return self.constant(self.rng.normal(0, 0.5, shape))

    def ints(self, *values: int) -> str:
        return self.constant(values, np.int64)

    def head(self, x: str) -> str:
        return self.op("MatMul", [x, "head.weight"])

    def also(self, name: str, shape: list[int | str], dtype: int = TensorProto.FLOAT) -> None:
        self.graph.output.append(helper.make_tensor_value_info(name, dtype, shape))

    def end(self, logits: str) -> ModelProto:
        self.ended(logits)
        onnx.checker.check_model(self.model, full_check=True)
        return self.model

    def ended(self, logits: str) -> ModelProto:
        self.op("Identity", [logits], "logits")
        return self.model


def norm_of_operators(t: Tail) -> str:
    square = t.op("ReduceMean", [t.op("Mul", [t.x, t.x]), t.ints(-1)])
    size = t.op("Sqrt", [t.op("Add", [square, t.constant(1e-5)])])
    return t.head(t.op("Mul", [t.op("Div", [t.x, size]), t.random(WIDTH)]))


def quantized(t: Tail) -> str:
    scale, zero = t.constant(0.05), t.constant(128, np.uint8)
    return t.head(t.op("DequantizeLinear", [t.op("QuantizeLinear", [t.x, scale, zero]), scale, zero]))


def half(t: Tail) -> str:
    x, weight = (t.op("Cast", [name], to=TensorProto.FLOAT16) for name in (t.x, "head.weight"))
    return t.op("Cast", [t.op("MatMul", [x, weight])], to=TensorProto.FLOAT)


def from_the_left(t: Tail) -> str:
    """Logits ``[B, V, S]``, then transposed."""
    made = t.op("MatMul", [t.random(VOCABULARY, WIDTH), t.op("Transpose", [t.x], perm=[0, 2, 1])])
    return t.op("Transpose", [made], perm=[0, 2, 1])


def tied(t: Tail) -> str:
    table = next(n for n in t.graph.node if n.op_type == "Gather").input[0]
    return t.op("MatMul", [t.x, t.op("Transpose", [table], perm=[1, 0])])


def packed_gate(t: Tail) -> str:
    wide = t.op("MatMul", [t.x, t.random(WIDTH, 2 * WIDTH)])
    gate = t.op("Split", [wide], 2, axis=2, num_outputs=2)
    return t.head(t.op("Mul", [t.op("Sigmoid", [gate]), t.graph.node[-2].output[1]]))


def cut_vocabulary(t: Tail) -> str:
    padded = t.op("MatMul", [t.x, t.random(WIDTH, VOCABULARY + 8)])
    return t.op("Slice", [padded, t.ints(0), t.ints(VOCABULARY), t.ints(2)])


def attends_itself(t: Tail) -> str:
    """The rows of the scores are those of `x`; what they are multiplied with stays whole."""
    scores = t.op("MatMul", [t.x, t.op("Transpose", [t.x], perm=[0, 2, 1])])
    return t.head(t.op("MatMul", [t.op("Softmax", [scores], axis=-1), t.x]))


def scalar_axes(t: Tail) -> str:
    """As onnxsim 0.8 writes them, which ONNX Runtime loads and does not run."""
    mean = t.op("ReduceMean", [t.x, t.constant(-1, np.int64)])
    return t.head(t.op("Sub", [t.x, mean]))


CUT: dict[str, Callable[[Tail], str]] = {
    "plain": lambda t: t.head(t.x),
    "bias": lambda t: t.op("Add", [t.head(t.x), t.random(VOCABULARY)]),
    "scaled": lambda t: t.op("Mul", [t.head(t.x), t.constant([[[0.25]]])]),
    "softcap": lambda t: t.op("Tanh", [t.op("Div", [t.head(t.x), t.constant(7.0)])]),
    "probabilities": lambda t: t.op("LogSoftmax", [t.head(t.x)], axis=-1),
    "all positions": lambda t: t.head(t.op("Slice", [t.x, t.ints(0), t.ints(2**62), t.ints(1)])),
    "two layers": lambda t: t.head(t.op("Gelu", [t.op("MatMul", [t.x, t.random(WIDTH, WIDTH)])])),
    "tied": tied,
    "packed gate": packed_gate,
    "cut vocabulary": cut_vocabulary,
    "half": half,
    "quantized": quantized,
    "norm of operators": norm_of_operators,
    "from the left": from_the_left,
    "attends itself": attends_itself,
}


def mean_of_positions(t: Tail, x: str) -> str:
    return t.op("Sub", [x, t.op("ReduceMean", [x, t.ints(1)])])


def norm_over_positions(t: Tail, x: str) -> str:
    turned = t.op("Transpose", [x], perm=[0, 2, 1])
    normed = t.op("LayerNormalization", [turned, t.constant([1.5])], axis=-1)
    return t.op("Transpose", [normed], perm=[0, 2, 1])


def reversed_positions(t: Tail, x: str) -> str:
    return t.op("Slice", [x, t.ints(-1), t.ints(-(2**62)), t.ints(1), t.ints(-1)])


def rounded_by_the_largest(t: Tail, x: str) -> str:
    """To steps that all positions have in common, as quantization with a computed scale has them."""
    step = t.op("Div", [t.op("ReduceMax", [t.op("Abs", [x]), t.ints(1, 2)]), t.constant(127)])
    return t.op("Mul", [t.op("Round", [t.op("Div", [x, step])]), step])


MIXING: dict[str, Callable[[Tail, str], str]] = {
    "cumulative": lambda t, x: t.op("CumSum", [x, t.constant(1, np.int64)]),
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
    tail = Tail(FIXED)
    numbers = tail.random(3, WIDTH if before else VOCABULARY)
    return tail.end(
        tail.head(tail.op("Mul", [tail.x, numbers])) if before else tail.op("Mul", [tail.head(tail.x), numbers])
    )


def other_output(name: str) -> ModelProto:
    tail = Tail()
    shape: list[int | str] = ["batch", "sequence_len"]
    logits = tail.head(tail.x)
    if name == "hidden states":
        tail.also(tail.x, [*shape, WIDTH])
    elif name == "other head":
        tail.op("MatMul", [tail.x, tail.random(WIDTH, 30)], "value")
        tail.also("value", [*shape, 30])
    else:
        dtype = TensorProto.DOUBLE if name == "double" else TensorProto.FLOAT16
        tail.op("Cast", [logits], "more", to=dtype)
        tail.also("more", [*shape, VOCABULARY], dtype)
    return tail.end(logits)


def one_position() -> ModelProto:
    tail = Tail(DecoderConfig(layers=1, capacity=CAPACITY, sequence=1))
    return tail.end(tail.head(tail.x))


def last_position(*, cut: bool = True) -> ModelProto:
    """`cut`: the graph picks it; else a traced step merely says one token."""
    tail = Tail()
    ends = [tail.ints(-1), tail.ints(2**62), tail.ints(1)]
    logits = tail.head(tail.op("Slice", [tail.x, *ends]) if cut else tail.x)
    output = next(o for o in tail.graph.output if o.name == "logits")
    output.type.tensor_type.shape.dim[1].dim_value = 1
    return tail.end(logits) if cut else tail.ended(logits)


def taken_name() -> ModelProto:
    tail = Tail()
    tail.op("Tanh", [tail.head(tail.x)], "logits_span")
    return tail.end(tail.op("Neg", ["logits_span"]))


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

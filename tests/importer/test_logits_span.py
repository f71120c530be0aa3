"""Logits of the last positions: cut where the tail works on each position by itself, and exact wherever it is cut."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from decoders import DecoderConfig, make_decoder
from harness import Array, imported, run, run_rewritten
from onnx import ModelProto, TensorProto, helper, numpy_helper

from trt_kvcache.importer import ImportedModel, plan_model
from trt_kvcache.importer.plan import LogitPositions, PlanOptions, Role

WIDTH, VOCABULARY, CAPACITY = 64, 256, 16
SMALL = DecoderConfig(layers=1, capacity=CAPACITY)
FIXED = DecoderConfig(layers=1, capacity=CAPACITY, sequence=3)


class Tail:
    """Puts another tail behind the last norm of a decoder. `x` is the norm, `head` the product with the vocabulary."""

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
        self.op("Identity", [logits], "logits")
        onnx.checker.check_model(self.model, full_check=True)
        return self.model


def feeds(model: ModelProto, batch: int, length: int, rng: np.random.Generator) -> dict[str, Array]:
    """A step of rows that hold 4, 5, ... tokens."""
    starts = 4 + np.arange(batch)
    values: dict[str, Array] = {
        "input_ids": rng.integers(0, VOCABULARY, (batch, length)),
        "position_ids": starts[:, None] + np.arange(length),
        "write_indices": starts,
        "nonpad_kv_seqlen": starts + length,
    }
    for value in model.graph.input:
        if "cache" in value.name:
            sizes = [d.dim_value or batch for d in value.type.tensor_type.shape.dim]
            values[value.name] = rng.normal(0, 1, sizes).astype(np.float32)
    return values


def check(model: ModelProto, folder: Path, *, fixed: bool = False) -> ImportedModel:
    """The rewritten model gives the original's numbers, of as many positions as it is asked for."""
    result = imported(model, folder)
    rng = np.random.default_rng(1)
    for batch, length in ((2, 3),) if fixed else ((1, 1), (2, 5), (3, 2)):
        given = feeds(model, batch, length, rng)
        wanted = run(model, given)
        span = result.plan.logits_span
        for kept in range(1, length + 2) if span is not None else (0,):
            found = run_rewritten(result, given, {} if span is None else {span.name: kept})
            for name, value in wanted.items():
                value = value[:, -kept:] if span is not None and name == span.output else value
                assert found[name].shape == value.shape, (name, kept)
                np.testing.assert_allclose(found[name], value, rtol=1e-5, atol=1e-5, err_msg=name)
    return result


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


RESIDUAL = "layers.0.attention_residual"
CUT: dict[str, tuple[Callable[[Tail], str], str]] = {
    "plain": (lambda t: t.head(t.x), RESIDUAL),
    "bias": (lambda t: t.op("Add", [t.head(t.x), t.random(VOCABULARY)]), RESIDUAL),
    "scaled": (lambda t: t.op("Mul", [t.head(t.x), t.constant([[[0.25]]])]), RESIDUAL),
    "softcap": (lambda t: t.op("Tanh", [t.op("Div", [t.head(t.x), t.constant(7.0)])]), RESIDUAL),
    "probabilities": (lambda t: t.op("LogSoftmax", [t.head(t.x)], axis=-1), RESIDUAL),
    "all positions": (lambda t: t.head(t.op("Slice", [t.x, t.ints(0), t.ints(2**62), t.ints(1)])), RESIDUAL),
    "two layers": (lambda t: t.head(t.op("Gelu", [t.op("MatMul", [t.x, t.random(WIDTH, WIDTH)])])), RESIDUAL),
    "tied": (tied, RESIDUAL),
    "packed gate": (packed_gate, RESIDUAL),
    "cut vocabulary": (cut_vocabulary, RESIDUAL),
    "half": (half, RESIDUAL),
    "quantized": (quantized, RESIDUAL),
    "norm of operators": (norm_of_operators, RESIDUAL),
    "from the left": (from_the_left, RESIDUAL),
    "attends itself": (attends_itself, "norm"),
}


@pytest.mark.parametrize("name", CUT)
def test_the_tail_is_cut_after_the_last_attention(name: str, tmp_path: Path) -> None:
    tail = Tail()
    build, place = CUT[name]
    result = check(tail.end(build(tail)), tmp_path)
    span = result.plan.logits_span
    assert span is not None
    assert span.tensor == place
    assert not result.plan.notes
    logits = result.plan.tensor(Role.LOGITS, "output")
    assert logits is not None
    assert (logits.shape, logits.axes) == (("batch", "logits_span", VOCABULARY), ("batch", "kept", ""))


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


def counted(t: Tail, x: str) -> str:
    """Something for each position that is made of the number of positions alone."""
    length = t.op("Squeeze", [t.op("Shape", [x], start=1, end=2)])
    steps = t.op("Range", [t.constant(0, np.int64), length, t.constant(1, np.int64)])
    return t.op("Add", [x, t.op("Unsqueeze", [t.op("Cast", [steps], to=TensorProto.FLOAT), t.ints(-1)])])


MIXING: dict[str, Callable[[Tail, str], str]] = {
    "cumulative": lambda t, x: t.op("CumSum", [x, t.constant(1, np.int64)]),
    "softmax of positions": lambda t, x: t.op("Softmax", [x], axis=1),
    "mean of positions": mean_of_positions,
    "norm over positions": norm_over_positions,
    "reversed positions": reversed_positions,
    "rounded by the largest": rounded_by_the_largest,
    "counted": counted,
}


@pytest.mark.parametrize("name", MIXING)
def test_what_mixes_positions_is_computed_of_all(name: str, tmp_path: Path) -> None:
    """Before the product with the vocabulary: cut after it. After: not at all, and the plan says why."""
    before = Tail()
    result = check(before.end(before.head(MIXING[name](before, before.x))), tmp_path)
    assert result.plan.logits_span is not None
    assert result.plan.logits_span.tensor.startswith("tail.")
    after = Tail()
    result = check(after.end(MIXING[name](after, after.head(after.x))), tmp_path)
    assert result.plan.logits_span is None
    assert any("'logits' stays as exported, of all positions" in note for note in result.plan.notes)
    logits = result.plan.tensor(Role.LOGITS, "output")
    assert logits is not None
    assert logits.axes == ("batch", "sequence", "")


@pytest.mark.parametrize("place", ["before", "after"])
def test_constants_that_span_the_sequence(place: str, tmp_path: Path) -> None:
    tail = Tail(FIXED)

    def spanning(x: str) -> str:
        return tail.op("Mul", [x, tail.random(3, WIDTH if place == "before" else VOCABULARY)])

    logits = tail.head(spanning(tail.x)) if place == "before" else spanning(tail.head(tail.x))
    plan = check(tail.end(logits), tmp_path, fixed=True).plan
    assert (plan.logits_span is None) is (place == "after")
    assert any("each position" in note for note in plan.notes) is (place == "after")


@pytest.mark.parametrize("name", ["cast", "hidden states", "other head"])
def test_other_outputs_stay_complete(name: str, tmp_path: Path) -> None:
    tail = Tail()
    shape: list[int | str] = ["batch", "sequence_len"]
    logits = tail.head(tail.x)
    if name == "hidden states":
        tail.also(tail.x, [*shape, WIDTH])
    elif name == "other head":
        tail.op("MatMul", [tail.x, tail.random(WIDTH, 30)], "value")
        tail.also("value", [*shape, 30])
    else:
        tail.op("Cast", [logits], "more", to=TensorProto.DOUBLE)
        tail.also("more", [*shape, VOCABULARY], TensorProto.DOUBLE)
    plan = check(tail.end(logits), tmp_path).plan
    if name == "cast":
        assert plan.logits_span is None
        assert any("reads" in note and "too" in note for note in plan.notes)
    else:
        assert plan.logits_span is not None
        assert plan.logits_span.tensor == "norm"


@pytest.mark.parametrize("name", ["as asked", "one position", "last position", "axes that do not run"])
def test_nothing_is_said_of_logits_that_stay(name: str, tmp_path: Path) -> None:
    tail = Tail(DecoderConfig(layers=1, capacity=CAPACITY, sequence=1) if name == "one position" else SMALL)
    logits = scalar_axes(tail) if name == "axes that do not run" else ""
    if name == "last position":
        logits = tail.head(tail.op("Slice", [tail.x, tail.ints(-1), tail.ints(2**62), tail.ints(1)]))
        output = next(o for o in tail.graph.output if o.name == "logits")
        output.type.tensor_type.shape.dim[1].dim_value = 1
    onnx.save(tail.end(logits or tail.head(tail.x)), tmp_path / "m.onnx")
    positions = LogitPositions.ALL if name == "as asked" else LogitPositions.LAST
    plan = plan_model(tmp_path / "m.onnx", PlanOptions(logits=positions))
    assert (plan.logits_span is not None) is (name == "axes that do not run")
    assert not plan.notes


def test_a_name_that_is_taken(tmp_path: Path) -> None:
    tail = Tail()
    tail.op("Tanh", [tail.head(tail.x)], "logits_span")
    result = check(tail.end(tail.op("Neg", ["logits_span"])), tmp_path)
    assert result.plan.logits_span is not None
    assert result.plan.logits_span.name == "logits_span_"

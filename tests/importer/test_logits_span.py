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


def softcap(t: Tail) -> str:
    return t.op("Mul", [t.op("Tanh", [t.op("Div", [t.head(t.x), t.constant(7.0)])]), t.constant(7.0)])


def tied(t: Tail) -> str:
    table = next(n for n in t.graph.node if n.op_type == "Gather").input[0]
    return t.op("MatMul", [t.x, t.op("Transpose", [table], perm=[1, 0])])


def in_parts(t: Tail) -> str:
    parts = [t.op("MatMul", [t.x, t.random(WIDTH, size)]) for size in (100, 156)]
    return t.op("Concat", parts, axis=-1)


def cut_vocabulary(t: Tail) -> str:
    padded = t.op("MatMul", [t.x, t.random(WIDTH, VOCABULARY + 8)])
    return t.op("Slice", [padded, t.ints(0), t.ints(VOCABULARY), t.ints(2)])


def picked_vocabulary(t: Tail) -> str:
    return t.op("Gather", [t.op("MatMul", [t.x, t.random(WIDTH, 300)]), t.ints(*range(VOCABULARY))], axis=-1)


def split_vocabulary(t: Tail) -> str:
    wide = t.op("MatMul", [t.x, t.random(WIDTH, 2 * VOCABULARY)])
    return t.op("Split", [wide], 2, axis=2, num_outputs=2)


def half(t: Tail) -> str:
    x, weight = (t.op("Cast", [name], to=TensorProto.FLOAT16) for name in (t.x, "head.weight"))
    return t.op("Cast", [t.op("MatMul", [x, weight])], to=TensorProto.FLOAT)


def quantized(t: Tail) -> str:
    scale, zero = t.constant(0.05), t.constant(128, np.uint8)
    return t.head(t.op("DequantizeLinear", [t.op("QuantizeLinear", [t.x, scale, zero]), scale, zero]))


def by_channel(t: Tail) -> str:
    scale = t.constant(np.linspace(0.02, 0.05, WIDTH))
    zero = t.constant(np.full(WIDTH, 128), np.uint8)
    codes = t.op("QuantizeLinear", [t.x, scale, zero], axis=2)
    return t.head(t.op("DequantizeLinear", [codes, scale, zero], axis=2))


def norm_of_operators(t: Tail) -> str:
    square = t.op("ReduceMean", [t.op("Mul", [t.x, t.x]), t.ints(-1)])
    size = t.op("Sqrt", [t.op("Add", [square, t.constant(1e-5)])])
    return t.head(t.op("Mul", [t.op("Div", [t.x, size]), t.random(WIDTH)]))


def sums_of_blocks(t: Tail) -> str:
    blocks = t.op("Reshape", [t.x, t.ints(0, 0, 4, WIDTH // 4)])
    sums = t.op("ReduceSum", [blocks, t.ints(-1)], keepdims=0)
    return t.op("Add", [t.head(t.x), t.op("MatMul", [sums, t.random(4, VOCABULARY)])])


def open_blocks(t: Tail) -> str:
    heads = t.op("Reshape", [t.x, t.ints(0, -1, 4, WIDTH // 4)])
    turned = t.op("Transpose", [heads], perm=[0, 2, 1, 3])
    back = t.op("Transpose", [t.op("Tanh", [turned])], perm=[0, 2, 1, 3])
    return t.head(t.op("Reshape", [back, t.ints(0, 0, -1)]))


def from_the_left(t: Tail) -> str:
    """Logits ``[B, V, S]``, then transposed."""
    weight = t.random(VOCABULARY, WIDTH)
    made = t.op("MatMul", [weight, t.op("Transpose", [t.x], perm=[0, 2, 1])])
    return t.op("Transpose", [made], perm=[0, 2, 1])


def by_sequence(t: Tail) -> str:
    """A scale for each sequence, which is made of all of its positions."""
    scale = t.op("ReduceMax", [t.op("Abs", [t.x]), t.ints(1, 2)], keepdims=0)
    return t.op("Mul", [t.head(t.x), t.op("Unsqueeze", [scale, t.ints(1, 2)])])


CUT: dict[str, Callable[[Tail], str]] = {
    "plain": lambda t: t.head(t.x),
    "bias": lambda t: t.op("Add", [t.head(t.x), t.random(VOCABULARY)]),
    "scaled": lambda t: t.op("Mul", [t.head(t.x), t.constant([[[0.25]]])]),
    "softcap": softcap,
    "tied": tied,
    "in parts": in_parts,
    "cut vocabulary": cut_vocabulary,
    "picked vocabulary": picked_vocabulary,
    "split vocabulary": split_vocabulary,
    "probabilities": lambda t: t.op("LogSoftmax", [t.head(t.x)], axis=-1),
    "half": half,
    "quantized": quantized,
    "by channel": by_channel,
    "norm of operators": norm_of_operators,
    "sums of blocks": sums_of_blocks,
    "open blocks": open_blocks,
    "from the left": from_the_left,
    "all positions": lambda t: t.head(t.op("Slice", [t.x, t.ints(0), t.ints(2**62), t.ints(1)])),
    "two layers": lambda t: t.head(t.op("Gelu", [t.op("MatMul", [t.x, t.random(WIDTH, WIDTH)])])),
}


@pytest.mark.parametrize("name", CUT)
def test_the_tail_is_cut_behind_the_last_attention(name: str, tmp_path: Path) -> None:
    tail = Tail()
    result = check(tail.end(CUT[name](tail)), tmp_path)
    span = result.plan.logits_span
    assert span is not None
    assert span.tensor == "layers.0.attention_residual"
    assert not result.plan.notes
    logits = result.plan.tensor(Role.LOGITS, "output")
    assert logits is not None
    assert (logits.shape, logits.axes) == (("batch", "logits_span", VOCABULARY), ("batch", "kept", ""))


def test_axes_that_are_a_scalar_leave_no_trace(tmp_path: Path) -> None:
    """As onnxsim 0.8 writes them, which ONNX Runtime loads and does not run."""
    tail = Tail()
    mean = tail.op("ReduceMean", [tail.x, tail.constant(-1, np.int64)])
    assert imported(tail.end(tail.head(tail.op("Sub", [tail.x, mean]))), tmp_path).plan.logits_span is not None


def cumulative(t: Tail, x: str) -> str:
    return t.op("CumSum", [x, t.constant(1, np.int64)])


def mean_of_positions(t: Tail, x: str) -> str:
    return t.op("Sub", [x, t.op("ReduceMean", [x, t.ints(1)])])


def softmax_of_positions(t: Tail, x: str) -> str:
    return t.op("Softmax", [x], axis=1)


def norm_over_positions(t: Tail, x: str) -> str:
    turned = t.op("Transpose", [x], perm=[0, 2, 1])
    normed = t.op("LayerNormalization", [turned, t.constant([1.5])], axis=-1)
    return t.op("Transpose", [normed], perm=[0, 2, 1])


def convolution(t: Tail, x: str) -> str:
    """Each channel over three positions, causal."""
    width = VOCABULARY if x != t.x else WIDTH
    turned = t.op("Transpose", [x], perm=[0, 2, 1])
    made = t.op("Conv", [turned, t.random(width, 1, 3)], pads=[2, 0], group=width)
    return t.op("Transpose", [made], perm=[0, 2, 1])


def reversed_positions(t: Tail, x: str) -> str:
    return t.op("Slice", [x, t.ints(-1), t.ints(-(2**62)), t.ints(1), t.ints(-1)])


def shifted(t: Tail, x: str) -> str:
    return t.op(
        "Add", [x, t.op("Slice", [t.op("Pad", [x, t.ints(0, 1, 0, 0, 0, 0)]), t.ints(0), t.ints(-1), t.ints(1)])]
    )


def flat(t: Tail, x: str) -> str:
    """All positions of all sequences in one axis, as a Gemm has them."""
    rows = t.op("Reshape", [x, t.ints(-1, VOCABULARY if x != t.x else WIDTH)])
    shape = t.op("Concat", [t.op("Shape", ["input_ids"]), t.ints(-1)], axis=0)
    return t.op("Reshape", [t.op("Tanh", [rows]), shape])


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
    f.__name__: f
    for f in (
        cumulative, mean_of_positions, softmax_of_positions, norm_over_positions, convolution, reversed_positions,
        shifted, flat, rounded_by_the_largest, counted,
    )
}  # fmt: skip


@pytest.mark.parametrize("name", MIXING)
def test_what_mixes_positions_is_computed_of_all(name: str, tmp_path: Path) -> None:
    """Before the product with the vocabulary: cut behind it. Behind: not at all, and the plan says why."""
    before = Tail()
    result = check(before.end(before.head(MIXING[name](before, before.x))), tmp_path)
    assert result.plan.logits_span is not None
    assert result.plan.logits_span.tensor.startswith("tail.")
    behind = Tail()
    result = check(behind.end(MIXING[name](behind, behind.head(behind.x))), tmp_path)
    assert result.plan.logits_span is None
    assert any("'logits' stays as exported, of all positions" in note for note in result.plan.notes)
    logits = result.plan.tensor(Role.LOGITS, "output")
    assert logits is not None
    assert logits.axes == ("batch", "sequence", "")


def test_what_is_computed_of_the_sequence_is_not_taken_for_a_constant(tmp_path: Path) -> None:
    tail = Tail()
    plan = check(tail.end(by_sequence(tail)), tmp_path).plan
    assert plan.logits_span is None
    assert any("Unsqueeze" in note for note in plan.notes)


def attends_itself(t: Tail) -> str:
    """The rows of the scores are those of `x`; what they are multiplied with stays whole."""
    x = t.x
    scores = t.op("MatMul", [x, t.op("Transpose", [x], perm=[0, 2, 1])])
    return t.head(t.op("MatMul", [t.op("Softmax", [scores], axis=-1), x]))


def test_one_side_of_a_product_is_cut(tmp_path: Path) -> None:
    tail = Tail()
    span = check(tail.end(attends_itself(tail)), tmp_path).plan.logits_span
    assert span is not None
    assert span.tensor == "norm"


def test_one_node_that_reads_both_is_not_cut(tmp_path: Path) -> None:
    tail = Tail(FIXED)
    square = tail.op("MatMul", [tail.x, tail.random(WIDTH, 3)])  # [B, 3, 3]
    both = tail.op("MatMul", [square, square])
    span = check(tail.end(tail.op("MatMul", [both, tail.random(3, VOCABULARY)])), tmp_path, fixed=True).plan.logits_span
    assert span is not None
    assert span.tensor == both


@pytest.mark.parametrize("place", ["before", "behind"])
@pytest.mark.parametrize("kind", ["bias", "scale", "scale and shift"])
def test_constants_that_span_the_sequence(kind: str, place: str, tmp_path: Path) -> None:
    tail = Tail(FIXED)

    def spanning(x: str) -> str:
        width = 1 if kind == "bias" else WIDTH if place == "before" else VOCABULARY
        if kind == "scale and shift":
            scale, zero = tail.constant([0.02, 0.03, 0.05]), tail.constant([0, 3, 7], np.int8)
            codes = tail.op("QuantizeLinear", [x, scale, zero], axis=1)
            return tail.op("DequantizeLinear", [codes, scale, zero], axis=1)
        return tail.op("Add" if kind == "bias" else "Mul", [x, tail.random(3, width)])

    logits = tail.head(spanning(tail.x)) if place == "before" else spanning(tail.head(tail.x))
    result = check(tail.end(logits), tmp_path, fixed=True)
    span = result.plan.logits_span
    assert (span is None) is (place == "behind")
    if span is None:
        assert any("each position" in note for note in result.plan.notes)


def test_a_fixed_number_of_positions_is_cut(tmp_path: Path) -> None:
    tail = Tail(FIXED)
    span = check(tail.end(tail.head(tail.x)), tmp_path, fixed=True).plan.logits_span
    assert span is not None


@pytest.mark.parametrize("name", ["chosen", "cast", "hidden states", "other head"])
def test_other_outputs_stay_complete(name: str, tmp_path: Path) -> None:
    tail = Tail()
    shape: list[int | str] = ["batch", "sequence_len"]
    if name == "hidden states":
        logits = tail.head(tail.x)
        tail.also(tail.x, [*shape, WIDTH])
    elif name == "other head":
        tail.op("MatMul", [tail.x, tail.random(WIDTH, 30)], "value")
        logits = tail.head(tail.x)
        tail.also("value", [*shape, 30])
    else:
        logits = tail.head(tail.x)
        more = {"axis": -1, "keepdims": 0} if name == "chosen" else {"to": TensorProto.DOUBLE}
        tail.op("ArgMax" if name == "chosen" else "Cast", [logits], "more", **more)
        kind = TensorProto.INT64 if name == "chosen" else TensorProto.DOUBLE
        tail.also("more", shape if name == "chosen" else [*shape, VOCABULARY], kind)
    plan = check(tail.end(logits), tmp_path).plan
    if name in ("hidden states", "other head"):
        assert plan.logits_span is not None
        assert plan.logits_span.tensor == "norm"
    else:
        assert plan.logits_span is None
        assert any("reads" in note and "too" in note for note in plan.notes)


def test_as_exported_if_asked(tmp_path: Path) -> None:
    tail = Tail()
    onnx.save(tail.end(tail.head(tail.x)), tmp_path / "m.onnx")
    plan = plan_model(tmp_path / "m.onnx", PlanOptions(logits=LogitPositions.ALL))
    assert plan.logits_span is None
    assert not plan.notes
    assert "logits_span" not in {t.name for t in plan.tensors}


@pytest.mark.parametrize("name", ["one position", "last position"])
def test_logits_of_one_position_are_left_alone(name: str, tmp_path: Path) -> None:
    tail = Tail(DecoderConfig(layers=1, capacity=CAPACITY, sequence=1) if name == "one position" else SMALL)
    x = tail.x
    if name == "last position":
        x = tail.op("Slice", [x, tail.ints(-1), tail.ints(2**62), tail.ints(1)])
        output = next(o for o in tail.graph.output if o.name == "logits")
        output.type.tensor_type.shape.dim[1].dim_value = 1
    onnx.save(tail.end(tail.head(x)), tmp_path / "m.onnx")
    plan = plan_model(tmp_path / "m.onnx")
    assert plan.logits_span is None
    assert not plan.notes


def test_a_name_that_is_taken(tmp_path: Path) -> None:
    tail = Tail()
    tail.op("Tanh", [tail.head(tail.x)], "logits_span")
    result = check(tail.end(tail.op("Neg", ["logits_span"])), tmp_path)
    assert result.plan.logits_span is not None
    assert result.plan.logits_span.name == "logits_span_"

"""Where logits are cut to the last positions: before the last product, or nowhere."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from decoders import DecoderConfig, make_decoder
from graphs import Graph
from onnx import TensorProto

from trt_kvcache import plan_model
from trt_kvcache.importer.cache_plan import CachePlan
from trt_kvcache.importer.operators import NORMS

WIDTH, VOCABULARY, FAR = 64, 256, 2**62


class Tail(Graph):
    """Puts another tail after the last norm of a decoder. `x` is the norm, `head` the product with the vocabulary."""

    x = "norm"

    def __init__(self, sequence: int | None = None) -> None:
        super().__init__()
        self.decoder = make_decoder(DecoderConfig(layers=1, capacity=16, sequence=sequence or "S"))
        self.rng = np.random.default_rng(3)
        assert list(self.decoder.graph.node.pop().output) == ["logits"]

    def f(self, value: object) -> str:
        return self.constant(value, np.float32)

    def random(self, *shape: int) -> str:
        return self.f(self.rng.normal(0, 0.5, shape))

    def head(self, x: str) -> str:
        return self.MatMul(x, "head.weight")

    def tied(self) -> str:
        table = next(n for n in self.decoder.graph.node if n.op_type == "Gather").input[0]
        return self.MatMul(self.x, self.Transpose(table, perm=[1, 0]))

    def planned(self, logits: str, folder: Path) -> CachePlan:
        self.Identity(logits, out="logits")
        graph = self.decoder.graph
        graph.node.extend(self.nodes)
        graph.initializer.extend(self.initializers)
        graph.output.extend(self.outputs)
        onnx.save(self.decoder, folder / "model.onnx")
        return plan_model(folder / "model.onnx")


Build = Callable[[Tail], str]
BEFORE_NORM: dict[str, Build] = {
    "plain": lambda t: t.head(t.x),
    "bias": lambda t: t.Add(t.head(t.x), t.random(VOCABULARY)),
    "scaled": lambda t: t.Mul(t.head(t.x), t.f([[[0.25]]])),
    "softcap": lambda t: t.Tanh(t.Div(t.head(t.x), t.f(7.0))),
    "probabilities": lambda t: t.LogSoftmax(t.head(t.x), axis=-1),
    "tied": Tail.tied,
}
ODD: dict[str, Build] = {
    "cut vocabulary": lambda t: t.Slice(t.MatMul(t.x, t.random(WIDTH, VOCABULARY + 8)), [0], [VOCABULARY], [2]),
    "from the left": lambda t: t.Transpose(
        t.MatMul(t.random(VOCABULARY, WIDTH), t.Transpose(t.x, perm=[0, 2, 1])), perm=[0, 2, 1]
    ),
    "spans the sequence": lambda t: t.Mul(t.head(t.x), t.random(3, VOCABULARY)),
    "cumulative": lambda t: t.CumSum(t.head(t.x), 1),
    "mean of positions": lambda t: t.Sub(t.head(t.x), t.ReduceMean(t.head(t.x), [1])),
}


@pytest.mark.parametrize("name", [*BEFORE_NORM, "two layers"])
def test_the_norm_before_the_last_product_is_cut_or_that_product(name: str, tmp_path: Path) -> None:
    t = Tail()
    two = name == "two layers"
    logits = t.head(t.Gelu(t.MatMul(t.x, t.random(WIDTH, WIDTH)))) if two else BEFORE_NORM[name](t)
    span = t.planned(logits, tmp_path).logits_span
    assert span is not None
    assert span.axis == 1
    (reader,) = span.readers
    node = next(n for n in onnx.load(tmp_path / "model.onnx").graph.node if reader == n.name)
    assert node.input[0] == span.tensor
    assert node.op_type in (("MatMul",) if two else NORMS)


@pytest.mark.parametrize("name", ODD)
def test_odd_tails_compute_all_logits(name: str, tmp_path: Path) -> None:
    t = Tail(3 if name == "spans the sequence" else None)
    plan = t.planned(ODD[name](t), tmp_path)
    assert plan.logits_span is None
    assert any("'logits' still has the logits of all positions of a step: the last product is" in n for n in plan.notes)


def test_what_is_read_elsewhere_is_not_cut(tmp_path: Path) -> None:
    t = Tail()
    logits = t.head(t.x)
    t.output(t.Slice(logits, [0], [FAR], [2]), TensorProto.FLOAT, ["batch", "sequence_len", VOCABULARY])
    assert t.planned(t.Tanh(logits), tmp_path).logits_span is None

"""Where logits are cut to the last positions: before the last product, or nowhere."""

from collections.abc import Callable
from pathlib import Path

import onnx
import pytest
from onnx import ModelProto
from tail_graphs import CUT, FAR, MIXING, VOCABULARY, Tail, cut, mixing, spanning

from trt_kvcache import plan_model
from trt_kvcache.importer.operators import NORMS

BEFORE_NORM = ["plain", "bias", "scaled", "softcap", "probabilities", "tied"]
ODD: dict[str, Callable[[], ModelProto]] = {
    "cut vocabulary": lambda: cut(CUT["cut vocabulary"]),
    "from the left": lambda: cut(CUT["from the left"]),
    "spans the sequence": lambda: spanning(before=False),
    **{name: lambda build=build: mixing(build, before=False) for name, build in MIXING.items()},
}


@pytest.mark.parametrize("name", BEFORE_NORM)
def test_the_norm_before_the_last_product_is_cut(name: str, tmp_path: Path) -> None:
    onnx.save(cut(CUT[name]), tmp_path / "model.onnx")
    span = plan_model(tmp_path / "model.onnx").logits_span
    assert span is not None
    assert span.axis == 1
    (reader,) = span.readers
    node = next(n for n in onnx.load(tmp_path / "model.onnx").graph.node if reader == n.name)
    assert node.input[0] == span.tensor
    assert node.op_type in NORMS


def test_where_no_norm_comes_before_it_the_product_is_cut(tmp_path: Path) -> None:
    onnx.save(cut(CUT["two layers"]), tmp_path / "model.onnx")
    span = plan_model(tmp_path / "model.onnx").logits_span
    assert span is not None
    assert [node.op_type for node in onnx.load(tmp_path / "model.onnx").graph.node if node.name in span.readers] == [
        "MatMul"
    ]


@pytest.mark.parametrize("name", ODD)
def test_odd_tails_compute_all_logits(name: str, tmp_path: Path) -> None:
    onnx.save(ODD[name](), tmp_path / "model.onnx")
    plan = plan_model(tmp_path / "model.onnx")
    assert plan.logits_span is None
    assert any("'logits' still has the logits of all positions of a step: the last product is" in n for n in plan.notes)


def test_what_is_read_elsewhere_is_not_cut(tmp_path: Path) -> None:
    t = Tail()
    logits = t.head(t.x)
    t.output(t.Slice(logits, [0], [FAR], [2]), onnx.TensorProto.FLOAT, ["batch", "sequence_len", VOCABULARY])
    onnx.save(t.end(t.Tanh(logits)), tmp_path / "model.onnx")
    assert plan_model(tmp_path / "model.onnx").logits_span is None

"""Models whose numbers rounding decides: their rewrites pass, mistakes in them do not."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from decoders import DecoderConfig, make_decoder
from importer.test_quantized import quantized
from onnx import ModelProto, NodeProto, helper
from verify.mistakes import IN_REWRITES, Mistake, constant, insert, nodes, nothing, verify_with

from trt_kvcache.importer import import_model
from trt_kvcache.verify import VerifyOptions, VerifyReport

NORM = "SkipSimplifiedLayerNormalization"
DOMAIN = "com.microsoft"
SMALL, LARGE = 2.0, 256.0  # factors in front of a sine; the larger one makes half a unit of the last bit
WIDE = 2048.0  # the same for a float32 model: ten times what is allowed


def norm_function(epsilon: float = 1e-6, offset: float = 0.0) -> onnx.FunctionProto:
    """The operator as mobius-onnx writes it, of rounded sums where ONNX Runtime's own does not round.

    Args:
        epsilon: of the norm.
        offset: added to the sum and taken away again, which loses bits of float16 and none of float32.
    """
    lines = [helper.make_node("Add", ["x", "skip"], ["sum"])]
    kept = "sum"
    if offset:
        lines += [
            helper.make_node("Constant", [], ["wide"], value_float=offset),
            helper.make_node("CastLike", ["wide", "x"], ["like"]),
            helper.make_node("Constant", [], ["all"], value_ints=list(range(64))),
            helper.make_node("Add", ["sum", "like"], ["up"]),
            helper.make_node("Gather", ["up", "all"], ["once"], axis=-1),
            helper.make_node("Gather", ["once", "all"], ["stored"], axis=-1),
            helper.make_node("Sub", ["stored", "like"], ["down"]),
        ]
        kept = "down"
    lines += [
        helper.make_node("RMSNormalization", [kept, "weight"], ["y"], axis=-1, epsilon=epsilon),
        *(helper.make_node("Constant", [], [name], value_floats=[0.0]) for name in ("mean", "deviation")),
    ]
    opset = [helper.make_opsetid("", 24)]
    return helper.make_function(DOMAIN, NORM, ["x", "skip", "weight"], ["y", "mean", "deviation", "sum"], lines, opset)


def sensitive(factor: float = LARGE, dtype: str = "float16", **function: float) -> ModelProto:
    """A decoder with that function, and logits of the sine of `factor` times what they were of."""
    model = make_decoder(DecoderConfig(dtype=dtype))
    model.opset_import.append(helper.make_opsetid(DOMAIN, 1))
    model.functions.append(norm_function(**function))
    sums = {n.output[0]: n for n in nodes(model, "Add")}
    for norm in nodes(model, "RMSNormalization"):
        if (total := sums.get(norm.input[0])) is None:
            continue
        call = helper.make_node(
            NORM, [*total.input, norm.input[1]], [norm.output[0], "", "", total.output[0]], name=norm.name,
            domain=DOMAIN, epsilon=1e-6,
        )  # fmt: skip
        model.graph.node.insert(list(model.graph.node).index(norm), call)
        model.graph.node.remove(norm)
        model.graph.node.remove(total)
    last = next(n for n in nodes(model, "MatMul") if n.output[0] == "logits")
    insert(model, last, 0, "Mul", constant(model, factor, np.dtype(dtype).type))
    insert(model, last, 0, "Sin")
    onnx.checker.check_model(model)
    return model


def verify(folder: Path, model: ModelProto, mistake: Mistake = nothing, **options: float) -> VerifyReport:
    """Verifies a model against its rewritten form with a mistake."""
    onnx.save(model, folder / "m.onnx")
    return verify_with(import_model(folder / "m.onnx"), mistake, VerifyOptions(**options))


@pytest.mark.slow
def test_a_model_that_rounding_does_not_move_is_compared_as_it_is(tmp_path: Path) -> None:
    report = verify(tmp_path, sensitive(SMALL))
    report.check()
    assert not report.float32_twin
    assert max(o.max_relative for o in report.outputs) > 0  # the function is not ONNX Runtime's operator


@pytest.mark.slow
def test_a_model_that_rounding_moves_is_compared_in_float32(tmp_path: Path) -> None:
    report = verify(tmp_path, sensitive())
    report.check()
    assert report.float32_twin
    assert any("rounding decides the numbers" in note for note in report.notes)
    assert all(o.max_relative < 2e-2 for o in report.outputs)  # in float16 it is ten times as much
    assert {o.dtype for o in report.outputs} == {"float16"}


@pytest.mark.slow
def test_who_says_what_is_allowed_gets_that(tmp_path: Path) -> None:
    report = verify(tmp_path, sensitive(), tolerance=2e-2)
    assert not report.passed
    assert not report.float32_twin


def stored(
    model: ModelProto, node: NodeProto, op: str, back: str, value: float, size: int, dtype: type = np.float16
) -> None:
    """An operator and its inverse in front of a node, with a rounding to float16 in between.

    ONNX Runtime 1.31.1 computes a single operator between others of float32 in float32, too: hence two.
    """
    other = constant(model, value, dtype)
    every = constant(model, list(range(size)))
    steps = [(op, other, {}), ("Gather", every, {"axis": -1}), ("Gather", every, {"axis": -1}), (back, other, {})]
    for number, (kind, operand, attributes) in enumerate(steps):
        name = f"{node.name}.stored.{number}"
        step = helper.make_node(kind, [node.input[0], operand], [name], name=name, **attributes)
        model.graph.node.insert(list(model.graph.node).index(node), step)
        node.input[0] = name


def lose_bits(model: ModelProto) -> None:
    """Numbers that float16 loses and float32 does not, as with a lost cast."""
    for node in nodes(model, "MatMul"):
        if node.input[1].endswith("gate.weight"):
            stored(model, node, "Add", "Sub", 1024.0, 64)


def overflow(model: ModelProto) -> None:
    """Numbers that are infinite in float16 only, and finite again after a bound."""
    node = next(n for n in nodes(model, "MatMul") if n.input[1] == "layers.1.down.weight")
    stored(model, node, "Mul", "Div", 6e4, 128)
    insert(model, node, 0, "Clip", *(constant(model, b, np.float16) for b in (-8.0, 8.0)))


@pytest.mark.few(1)
@pytest.mark.parametrize("mistake", [*IN_REWRITES, lose_bits, overflow])
@pytest.mark.parametrize("factor", [SMALL, LARGE])
def test_a_mistake_fails_whatever_rounding_does(tmp_path: Path, factor: float, mistake: Mistake) -> None:
    assert not verify(tmp_path, sensitive(factor), mistake).passed


@pytest.mark.slow
@pytest.mark.parametrize("factor", [SMALL, LARGE])
def test_a_function_that_is_another_than_the_operator_of_its_name_fails(tmp_path: Path, factor: float) -> None:
    assert not verify(tmp_path, sensitive(factor, epsilon=0.1)).passed


@pytest.mark.slow
def test_a_function_that_loses_what_the_operator_keeps_fails(tmp_path: Path) -> None:
    assert not verify(tmp_path, sensitive(SMALL, offset=1024.0)).passed


@pytest.mark.slow
def test_a_float32_model_that_rounding_moves_is_compared_in_float64(tmp_path: Path) -> None:
    report = verify(tmp_path, sensitive(WIDE, "float32"))
    report.check()
    assert not report.float32_twin
    assert any("compared computed in float64" in note for note in report.notes)
    assert all(o.max_relative < 1e-5 for o in report.outputs)
    assert {o.dtype for o in report.outputs} == {"float32"}


def test_operators_without_float64_are_compared_by_their_bodies(tmp_path: Path) -> None:
    """Quantized products, and scales that are float32 in every version of ONNX."""
    report = verify(tmp_path, quantized(sensitive(WIDE, "float32")))
    report.check()
    assert any("compared computed in float64" in note for note in report.notes)


def lose_few_bits(model: ModelProto) -> None:
    """Numbers that float32 loses and float64 does not."""
    for node in nodes(model, "MatMul"):
        if node.input[1].endswith("gate.weight"):
            stored(model, node, "Add", "Sub", 64.0, 64, np.float32)


def shift(model: ModelProto) -> None:
    """A change that moves numbers by less than rounding to float32 moves them."""
    insert(model, nodes(model, "Sin")[0], 0, "Mul", constant(model, 1 + 2**-22, np.float32))


@pytest.mark.few(2)
@pytest.mark.parametrize("mistake", [*IN_REWRITES, lose_few_bits, shift])
def test_a_mistake_in_float32_fails_whatever_rounding_does(tmp_path: Path, mistake: Mistake) -> None:
    assert not verify(tmp_path, sensitive(WIDE, "float32"), mistake).passed


@pytest.mark.few(2)
@pytest.mark.parametrize("mistake", [*IN_REWRITES, shift])
def test_a_mistake_beside_quantized_products_fails(tmp_path: Path, mistake: Mistake) -> None:
    assert not verify(tmp_path, quantized(sensitive(WIDE, "float32")), mistake).passed

"""Masks by their values: causal, window, padding and the caller's own; all else is refused."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import onnx_graphsurgeon as gs
import pytest
from concat_decode import CAPACITY, check_decode, normalized, rewritten
from concat_graphs import Build, Decoder, make_decoder
from onnx import NodeProto, TensorProto, helper

from trt_kvcache.errors import UnsupportedModelError
from trt_kvcache.importer.normalize.attention.masks import Masks, ZeroScores
from trt_kvcache.importer.normalize.evidence.samples import Sample

Mask = Callable[[Build], str]


def attention(decoder: Decoder, capacity: int = CAPACITY) -> tuple[NodeProto, dict[str, Any]]:
    (node,) = [n for n in normalized(make_decoder(decoder), capacity).graph.node if n.op_type == "Attention"]
    return node, {a.name: helper.get_attribute_value(a) for a in node.attribute}


@pytest.mark.few(4)
@pytest.mark.parametrize("mask", ["past", "padding", "positions", "buffer"])
@pytest.mark.parametrize("apply", ["add", "where", "hide"])
def test_causal_masks_become_an_attribute(tmp_path: Path, mask: str, apply: str) -> None:
    decoder = Decoder(mask=mask, apply=apply)
    check_decode(make_decoder(decoder), tmp_path)
    node, attrs = attention(decoder)
    assert attrs["is_causal"] == 1
    assert list(node.input[3:]) == ["", "", "", "nonpad_kv_seqlen"]
    assert "left_window_size" not in attrs


@pytest.mark.few(4)
@pytest.mark.parametrize("mask", ["past", "padding", "positions"])
@pytest.mark.parametrize("window", [1, 2, 5, CAPACITY - 1])
def test_windows_become_an_attribute(tmp_path: Path, mask: str, window: int) -> None:
    decoder = Decoder(mask=mask, window=window)
    check_decode(make_decoder(decoder), tmp_path)
    assert attention(decoder)[1]["left_window_size"] == window - 1


@pytest.mark.parametrize("window", [CAPACITY, CAPACITY + 3])
def test_a_window_that_the_capacity_never_fills_is_causal(tmp_path: Path, window: int) -> None:
    decoder = Decoder(window=window)
    check_decode(make_decoder(decoder), tmp_path)
    assert "left_window_size" not in attention(decoder)[1]


@pytest.mark.parametrize("lowest", [-1e4, -65504.0, float(np.finfo(np.float32).min), -np.inf])
def test_hidden_is_any_very_low_number(tmp_path: Path, lowest: float) -> None:
    check_decode(make_decoder(Decoder(lowest=lowest)), tmp_path)


def test_without_a_mask_every_token_sees_every_other(tmp_path: Path) -> None:
    decoder = Decoder(mask="none")
    check_decode(make_decoder(decoder), tmp_path)
    assert attention(decoder)[1]["is_causal"] == 0


def test_one_token_at_a_time_needs_no_mask(tmp_path: Path) -> None:
    decoder = Decoder(mask="none", sequence=1)
    check_decode(make_decoder(decoder), tmp_path)
    assert attention(decoder)[1]["is_causal"] == 1


@pytest.mark.few(4)
@pytest.mark.parametrize(
    ("own_type", "dtype", "upcast"),
    [
        (np.bool_, np.float32, False),
        (np.float32, np.float32, False),
        (np.bool_, np.float16, True),
        (np.float16, np.float16, False),
        (np.float32, np.float16, True),
    ],
)
@pytest.mark.parametrize("layers", [1, 2])
def test_the_callers_own_mask_stays(tmp_path: Path, own_type: Any, dtype: Any, upcast: bool, layers: int) -> None:
    decoder = Decoder(mask="own", own_type=own_type, dtype=dtype, upcast=upcast, layers=layers)
    result = check_decode(make_decoder(decoder), tmp_path, 1e-4 if dtype is np.float32 else 2e-2)
    assert "mask" in {value.name for value in result.model.graph.input}


def both(g: Build, left: str, right: str) -> str:
    return g.node("And", [left, right])


def either(g: Build, left: str, right: str) -> str:
    return g.node("Or", [left, right])


def later(g: Build, by: int) -> str:
    """Keys after the query's row minus `by`."""
    return g.node("Greater", [g.key_rows, g.node("Sub", [g.query_rows, g.constant(by)])])


def before(g: Build, row: int) -> str:
    """Keys before `row`."""
    return g.node("Less", [g.key_rows, g.constant(row)])


def off_by_one(g: Build) -> str:
    return g.node("LessOrEqual", [g.key_rows, g.node("Add", [g.query_rows, g.constant(1)])])


def not_itself(g: Build) -> str:
    return g.node("Less", [g.key_rows, g.query_rows])


def prefix(g: Build) -> str:
    return either(g, g.causal(), before(g, 8))


def prefix_inside_itself(g: Build) -> str:
    return either(g, g.causal(), both(g, before(g, 8), g.node("Less", [g.query_rows, g.constant(8)])))


def blocks(g: Build) -> str:
    block = [g.node("Div", [rows, g.constant(8)]) for rows in (g.key_rows, g.query_rows)]
    return both(g, g.causal(), g.node("Equal", block))


def sink(g: Build) -> str:
    return both(g, g.causal(), either(g, before(g, 1), later(g, 6)))


def window_without_the_first(g: Build) -> str:
    first = either(g, g.node("Greater", [g.key_rows, g.constant(0)]), g.node("Equal", [g.query_rows, g.constant(0)]))
    return both(g, both(g, g.causal(), later(g, 6)), first)


def dilated(g: Build) -> str:
    distance = g.node("Mod", [g.node("Sub", [g.query_rows, g.key_rows]), g.constant(2)])
    return both(g, g.causal(), g.node("Equal", [distance, g.constant(0)]))


def window_of_the_update_only(g: Build) -> str:
    """Right in every decode step, and in prompts of up to 16 tokens."""
    step = g.node("Sub", [g.query_rows, g.past])
    return both(g, g.causal(), g.node("Greater", [g.key_rows, g.node("Sub", [step, g.constant(16)])]))


def without_the_first_two_in_long_texts(g: Build) -> str:
    short = g.node("Less", [g.all, g.constant(18)])
    return both(g, g.causal(), either(g, short, g.node("Greater", [g.key_rows, g.constant(1)])))


def nothing(g: Build) -> str:
    return both(g, g.causal(), before(g, 0))


def window_on_both_sides(g: Build) -> str:
    ahead = g.node("Less", [g.key_rows, g.node("Add", [g.query_rows, g.constant(2)])])
    return both(g, later(g, 3), ahead)


LOOK_ALIKES = (
    off_by_one, not_itself, prefix, prefix_inside_itself, blocks, sink, window_without_the_first, dilated,
    window_of_the_update_only, without_the_first_two_in_long_texts, nothing, window_on_both_sides,
)  # fmt: skip


@pytest.mark.parametrize("mask", LOOK_ALIKES)
@pytest.mark.parametrize("apply", ["add", "where"])
def test_masks_that_are_no_template_are_refused(tmp_path: Path, mask: Mask, apply: str) -> None:
    model = make_decoder(Decoder(mask=lambda g: g.to_scores(mask(g)), apply=apply))
    with pytest.raises(
        UnsupportedModelError, match=r"none of the supported ones .*the last query sees|computes something else"
    ):
        rewritten(model, tmp_path)


def test_a_mask_for_each_head_is_refused(tmp_path: Path) -> None:
    def make(g: Build) -> str:
        near = g.to_scores(both(g, g.causal(), later(g, 3)))
        return g.node("Concat", [g.to_scores(g.causal())] * 3 + [near], axis=1)

    with pytest.raises(UnsupportedModelError, match="none of the supported ones"):
        rewritten(make_decoder(Decoder(mask=make)), tmp_path)


def test_the_same_mask_for_each_head_is_one(tmp_path: Path) -> None:
    check_decode(
        make_decoder(Decoder(mask=lambda g: g.node("Concat", [g.to_scores(g.causal())] * 4, axis=1))), tmp_path
    )


def test_a_mask_made_of_tokens_is_refused(tmp_path: Path) -> None:
    def make(g: Build) -> str:
        total = g.node("ReduceSum", [g.tokens, g.constant([1])], keepdims=1)
        return both(
            g,
            g.to_scores(g.causal()),
            g.node("Unsqueeze", [g.node("Greater", [total, g.constant(3)]), g.constant([1, 2])]),
        )

    with pytest.raises(UnsupportedModelError, match=r"alone: values of 'input_ids' \(such as .*\) take part in it"):
        rewritten(make_decoder(Decoder(mask=make)), tmp_path)


def bias(g: Build, scores: str, even: bool) -> str:
    """Added to the scores: a slope per head times the distance (ALiBi), or times the product of both positions."""
    number = g.node("Sub" if even else "Mul", [g.key_rows, g.query_rows])
    slopes = g.constant(np.array([0.5, 0.25, 0.125, 0.06]).reshape(1, 4, 1, 1), np.float32)
    numbers = g.node("Cast", [number], to=TensorProto.FLOAT)
    return g.node("Add", [scores, g.node("Mul", [g.to_scores(numbers), slopes])])


@pytest.mark.parametrize("where", ["scores", "masked"])
def test_a_bias_of_positions_that_is_not_even_is_refused(tmp_path: Path, where: str) -> None:
    check_decode(make_decoder(Decoder(**{where: partial(bias, even=True)})), tmp_path)
    with pytest.raises(UnsupportedModelError, match="adds numbers other than 0 and the lowest"):
        rewritten(make_decoder(Decoder(**{where: partial(bias, even=False)})), tmp_path)


def test_a_padding_mask_turned_round_is_refused(tmp_path: Path) -> None:
    def make(g: Build) -> str:
        shown = g.node("Not", [g.node("Cast", [g.padding], to=TensorProto.BOOL)])
        return both(g, g.to_scores(g.causal()), g.node("Unsqueeze", [shown, g.constant([1, 2])]))

    with pytest.raises(UnsupportedModelError, match="none of the supported ones .*sees no key"):
        rewritten(make_decoder(Decoder(mask=make)), tmp_path)


def test_what_padding_hides_is_gone_with_the_padding(tmp_path: Path) -> None:
    """The first token that is not padded is hidden, too, where any is: rows of a cache begin with a token here."""

    def make(g: Build) -> str:
        seen = g.node("CumSum", [g.padding, g.constant(1)])
        padded = g.node("ReduceMin", [g.padding], keepdims=0)
        shown = g.node("Greater", [seen, g.node("Sub", [g.constant(1), padded])])
        return both(g, g.to_scores(g.causal()), g.node("Unsqueeze", [shown, g.constant([1, 2])]))

    check_decode(make_decoder(Decoder(mask=make)), tmp_path)


def own(g: Build, kind: int = TensorProto.BOOL, name: str = "mask") -> str:
    return g.once(name, lambda: g.input(name, kind, ["batch", 1, "sequence", "total"]))


OWN: dict[str, tuple[dict[str, Any], str]] = {
    "beside causality": (
        {"mask": lambda g: both(g, own(g), g.to_scores(g.causal()))},
        "made of the input 'mask' and of something else",
    ),
    "turned round": ({"mask": lambda g: g.node("Not", [own(g)])}, "made of the input 'mask' and of something else"),
    "two": ({"mask": lambda g: both(g, own(g), own(g, name="mask_2"))}, r"several inputs \(mask, mask_2\)"),
    "integers": (
        {"mask": lambda g: g.node("Cast", [own(g, TensorProto.INT64, "attention_mask")], to=TensorProto.BOOL)},
        "'attention_mask' of .* is int64; supported is the caller's own mask as bool",
    ),
    "doubled": (
        {
            "mask": "none",
            "scores": lambda g, t: g.node("Add", [t, g.node("Mul", [own(g, TensorProto.FLOAT), g.number(2)])]),
        },
        "computes something else",
    ),
}


@pytest.mark.parametrize("name", OWN)
def test_own_masks_that_do_not_arrive_as_they_are(tmp_path: Path, name: str) -> None:
    changes, words = OWN[name]
    with pytest.raises(UnsupportedModelError, match=words):
        rewritten(make_decoder(Decoder(**changes)), tmp_path)


def test_a_mask_without_columns_is_refused() -> None:
    """It would equal whatever it is compared with."""
    probe = SimpleNamespace(value=lambda name: np.ones((1, 0), bool))
    step = cast(Sample, SimpleNamespace(batch=1, past=0, length=1, total=1, probe=probe))
    with pytest.raises(UnsupportedModelError, match=r"mask of 'attention' has the shape \[1, 1, 1, 0\] in a step of 1"):
        Masks("attention", gs.Variable("mask"), ZeroScores()).visible(step)

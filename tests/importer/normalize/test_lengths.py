"""Models that are right in most steps and wrong in some are refused: masks, factors, positions, padding, rows.

Recognizers look at few steps and guess; the check runs both models on both sides of every number in the graph.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import concat_graphs
import numpy as np
import onnx
import pytest
from concat_decode import rewritten
from concat_graphs import Build, Decoder, make_decoder
from onnx import TensorProto

from trt_kvcache.errors import UnsupportedModelError

CAPACITY = 60

Odd = Callable[[Build], str]


def equal(what: str, number: int) -> Odd:
    return lambda g: g.node("Equal", [getattr(g, what), g.constant(number)])


def above(what: str, number: int) -> Odd:
    return lambda g: g.node("Greater", [getattr(g, what), g.constant(number)])


def both(one: Odd, other: Odd) -> Odd:
    return lambda g: g.node("And", [one(g), other(g)])


ODD: dict[str, Odd] = {
    "P": equal("past", 17),
    "T": equal("all", 23),
    "P and S": both(equal("past", 9), equal("length", 4)),
    "P and T": both(equal("past", 19), equal("all", 30)),
    "long after some": both(above("length", 11), above("past", 6)),
    "S": equal("length", 7),
    "long": above("length", 40),
}
WITH_PAST = tuple(ODD)[:5]
"""Not by S alone: what only depends on S may stay in the graph."""


def refused(model: onnx.ModelProto, folder: Path, capacity: int = CAPACITY) -> None:
    with pytest.raises(UnsupportedModelError):
        rewritten(model, folder, capacity)


def masked(odd: Odd, apply: str) -> onnx.ModelProto:
    """The last key is hidden in odd steps."""

    def mask(g: Build) -> str:
        last = g.node("Equal", [g.key_rows, g.node("Sub", [g.all, g.constant(1)])])
        hidden = g.node("And", [last, odd(g)])
        return g.to_scores(g.node("And", [g.causal(), g.node("Not", [hidden])]))

    return make_decoder(Decoder(mask=mask, apply=apply))


def scaled(odd: Odd) -> onnx.ModelProto:
    """Scores are doubled in odd steps."""

    def scores(g: Build, tensor: str) -> str:
        factor = g.node("Where", [odd(g), g.constant(2.0, np.float32), g.constant(1.0, np.float32)])
        return g.node("Mul", [tensor, factor])

    return make_decoder(Decoder(scores=scores))


def shifted(odd: Odd) -> onnx.ModelProto:
    """Positions are one more in odd steps."""

    def after(g: Build, x: str) -> str:
        rows = g.node("Transpose", [g.query_rows], perm=[1, 0])
        more = g.node("Cast", [odd(g)], to=TensorProto.INT64)
        column = g.node("Unsqueeze", [g.node("Add", [rows, more]), g.constant([-1])])
        return g.node("Add", [x, g.node("Cast", [column], to=TensorProto.FLOAT)])

    return make_decoder(Decoder(positions="none", after=after))


@pytest.mark.parametrize("apply", ["add", "where"])
@pytest.mark.parametrize("odd", ODD)
def test_a_mask_that_is_another_one_in_some_steps(odd: str, apply: str, tmp_path: Path) -> None:
    refused(masked(ODD[odd], apply), tmp_path)


@pytest.mark.parametrize("odd", ODD)
def test_a_factor_that_is_another_one_in_some_steps(odd: str, tmp_path: Path) -> None:
    refused(scaled(ODD[odd]), tmp_path)


@pytest.mark.parametrize("odd", WITH_PAST)
def test_positions_that_are_others_in_some_steps(odd: str, tmp_path: Path) -> None:
    refused(shifted(ODD[odd]), tmp_path)


def hidden_by(odd: Odd, form: str) -> onnx.ModelProto:
    """What stands in the place of hidden scores is not low in odd steps."""

    def scores(g: Build, tensor: str) -> str:
        lowest = g.node("Where", [odd(g), g.number(0.0), g.number(-1e4)])
        visible = g.to_scores(g.causal())
        if form == "visible":
            return g.node("Where", [visible, tensor, lowest])
        if form == "hidden":
            return g.node("Where", [g.node("Not", [visible]), lowest, tensor])
        return g.node("Max", [g.node("Where", [visible, tensor, g.number(-1e4)]), lowest])

    return make_decoder(Decoder(mask="none", scores=scores))


@pytest.mark.parametrize("form", ["visible", "hidden", "Max"])
@pytest.mark.parametrize("odd", ODD)
def test_masks_that_do_not_hide_in_some_steps(odd: str, form: str, tmp_path: Path) -> None:
    refused(hidden_by(ODD[odd], form), tmp_path)


@pytest.mark.parametrize("odd", ODD)
def test_the_callers_own_mask_scaled_in_some_steps(odd: str, tmp_path: Path) -> None:
    """It hides the same keys, and the numbers that a caller may put between are others."""

    def scores(g: Build, tensor: str) -> str:
        mask = g.input("mask", TensorProto.FLOAT, ["batch", 1, "sequence", "total"])
        factor = g.node("Where", [ODD[odd](g), g.number(0.5), g.number(1.0)])
        return g.node("Add", [tensor, g.node("Mul", [mask, factor])])

    refused(make_decoder(Decoder(mask="none", scores=scores)), tmp_path)


def pick(g: Build, odd: Odd, one: Sequence[int], other: Sequence[int]) -> str:
    """Numbers that are `one` in odd steps, and `other` in all others."""
    return g.node("Where", [odd(g), g.constant(one), g.constant(other)])


def turned(g: Build, tensor: str, odd: Odd, how: str) -> str:
    """Keys ``[B, H, T, D]``, scrambled in odd steps."""
    end = 2**31
    if how == "heads":  # of one group, so that each keeps its shape
        return g.node("Gather", [tensor, pick(g, odd, [2, 3, 0, 1], [0, 1, 2, 3])], axis=1)
    axis = {"rows": 2, "channels": 3}[how]
    bounds = [pick(g, odd, [-1], [0]), pick(g, odd, [-end], [end]), g.constant([axis]), pick(g, odd, [-1], [1])]
    return g.node("Slice", [tensor, *bounds])


@pytest.mark.parametrize("which", ["keys", "values"])
@pytest.mark.parametrize("how", ["heads", "channels", "rows"])
@pytest.mark.parametrize("odd", ODD)
def test_caches_that_are_read_otherwise_in_some_steps(odd: str, how: str, which: str, tmp_path: Path) -> None:
    decoder = Decoder(**{which: lambda g, tensor: turned(g, tensor, ODD[odd], how)})
    refused(make_decoder(decoder), tmp_path)


def guarded(odd: Odd) -> Callable[[Build, str, str, str, str], str]:
    """Attention whose guard is true in odd steps, and where a query sees nothing."""
    attend = concat_graphs._attend

    def guard(g: Build, query: str, keys: str, values: str) -> str:
        output = attend(g, query, keys, values)
        counts = g.node("ReduceSum", [g.node("Cast", ["mask"], to=TensorProto.FLOAT), g.constant([-1])], keepdims=1)
        blind = g.node("Less", [counts, g.number(0.5)])
        return g.node("Where", [g.node("Or", [blind, odd(g)]), g.number(0.0), output])

    return guard


@pytest.mark.parametrize("odd", WITH_PAST)
def test_guards_that_close_in_some_steps(odd: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(concat_graphs, "_attend", guarded(ODD[odd]))
    refused(make_decoder(Decoder(mask="own")), tmp_path)


@pytest.mark.parametrize("odd", WITH_PAST)
def test_new_rows_that_are_turned_in_some_steps(odd: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    split = concat_graphs._split

    def turn(g: Build, tensor: str, heads: int) -> str:
        rows, size = split(g, tensor, heads), g.decoder.size
        shape = pick(g, ODD[odd], [0, size, -1, heads], [0, heads, -1, size])
        seen = g.node("Transpose", [g.node("Reshape", [rows, shape])], perm=[0, 2, 1, 3])
        back = g.node("Reshape", [seen, g.constant([0, -1, heads, size])])
        return g.node("Transpose", [back], perm=[0, 2, 1, 3])

    monkeypatch.setattr(concat_graphs, "_split", turn)
    refused(make_decoder(Decoder()), tmp_path)


def cut_shorter(odd: Odd) -> onnx.ModelProto:
    """A mask is made of the size of something that is cut shorter in odd steps."""

    def mask(g: Build) -> str:
        less = g.node("Sub", [g.length, g.node("Cast", [odd(g)], to=TensorProto.INT64)])
        end = g.node("Unsqueeze", [less, g.constant([0])])
        cut = g.node("Slice", [g.tokens, g.constant([0]), end, g.constant([1])])
        missing = g.node("Sub", [g.size_of(cut, 1), g.length])
        return g.to_scores(g.node("LessOrEqual", [g.key_rows, g.node("Add", [g.query_rows, missing])]))

    return make_decoder(Decoder(mask=mask))


@pytest.mark.parametrize("odd", ODD)
def test_shapes_that_are_others_in_some_steps(odd: str, tmp_path: Path) -> None:
    refused(cut_shorter(ODD[odd]), tmp_path)


@pytest.mark.parametrize("past", [0, 3, 10])
def test_counts_that_cancel_out_before_they_are_canonical_only(past: int, tmp_path: Path) -> None:
    """Rows of the past less a position, at that position: 0 as exported; the capacity less it afterwards."""

    def after(g: Build, x: str) -> str:
        first = g.node("Gather", [g.position_ids, g.constant([0])], axis=1)  # [B, 1], of each row its own
        there = g.node("Cast", [g.node("Equal", [first, g.constant(past)])], to=TensorProto.INT64)
        nothing = g.node("Mul", [there, g.node("Sub", [g.past, g.constant(past)])])
        as_x = g.node("Unsqueeze", [g.node("Cast", [nothing], to=TensorProto.FLOAT), g.constant([2])])
        return g.node("Add", [x, as_x])

    refused(make_decoder(Decoder(after=after)), tmp_path)


@pytest.mark.parametrize("at", [0, 7, 39])
def test_counters_that_count_at_one_position(at: int, tmp_path: Path) -> None:
    """An input that counts the tokens goes; whether it says one number does not stay either."""

    def after(g: Build, x: str) -> str:
        counter = g.input("position_ids", TensorProto.INT64, [])
        there = g.node("Cast", [g.node("Equal", [counter, g.constant(at)])], to=TensorProto.FLOAT)
        return g.node("Add", [x, there])

    refused(make_decoder(Decoder(positions="none", after=after)), tmp_path, 40)


def check_planned(decoder: Decoder, capacity: int, folder: Path) -> None:
    """Its caches are updated in place."""
    kinds = Counter(node.op_type for node in rewritten(make_decoder(decoder), folder, capacity).model.graph.node)
    assert (kinds["TensorScatter"], kinds["Attention"]) == (2, 1)


@pytest.mark.few(2)
@pytest.mark.parametrize("capacity", [1, 2, 5, 15, 16, 17, 33, 1000, 20000])
@pytest.mark.parametrize(
    "decoder", [Decoder(), Decoder(mask="padding", window=5), Decoder(sequence=3), Decoder(batch=1)]
)
def test_decoders_that_are_right_everywhere_pass_at_every_capacity(
    capacity: int, decoder: Decoder, tmp_path: Path
) -> None:
    if decoder.sequence == 3 and capacity < 3:
        pytest.skip("no step fits")
    check_planned(decoder, capacity, tmp_path)


@pytest.mark.parametrize("capacity", [9000, 40000])
def test_windows_that_only_long_texts_fill(capacity: int, tmp_path: Path) -> None:
    check_planned(Decoder(window=capacity - 100), capacity, tmp_path)

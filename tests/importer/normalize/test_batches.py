"""What is right in small batches and wrong in large ones is refused, and what grows with the batch is not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from concat_decode import rewritten
from concat_graphs import POSITIONS, Build, Decoder, make_decoder
from onnx import TensorProto
from slope_graphs import added, distance

from trt_kvcache.errors import UnsupportedModelError

Odd = Callable[[Build], str]


def batch(g: Build) -> str:
    return g.size_of(g.tokens, 0)


def equal(number: int) -> Odd:
    return lambda g: g.node("Equal", [batch(g), g.constant(number)])


def above(number: int) -> Odd:
    return lambda g: g.node("Greater", [batch(g), g.constant(number)])


def in_row(number: int) -> Odd:
    """``[B, 1, 1, 1]``: one sequence alone."""

    def odd(g: Build) -> str:
        rows = g.node("Range", [g.constant(0), batch(g), g.constant(1)])
        return g.node("Equal", [g.node("Unsqueeze", [rows, g.constant([1, 2, 3])]), g.constant(number)])

    return odd


def hidden(odd: Odd) -> Decoder:
    """The first key."""

    def mask(g: Build) -> str:
        first = g.node("Equal", [g.node("Unsqueeze", [g.key_rows, g.constant([0, 1, 2])]), g.constant(0)])
        return g.node("And", [g.to_scores(g.causal()), g.node("Not", [g.node("And", [odd(g), first])])])

    return Decoder(mask=mask)


def cut(odd: Odd) -> Decoder:
    """The first key, out of what is read."""

    def keys(g: Build, tensor: str) -> str:
        start = g.node("Unsqueeze", [g.node("Cast", [odd(g)], to=TensorProto.INT64), g.constant([0])])
        return g.node("Slice", [tensor, start, g.constant([2**31]), g.constant([2])])

    return Decoder(mask="none", keys=keys)


def crossed(odd: Odd) -> Decoder:
    """Keys of other heads."""

    def keys(g: Build, tensor: str) -> str:
        heads = g.node("Where", [odd(g), g.constant([2, 3, 0, 1]), g.constant([0, 1, 2, 3])])
        return g.node("Gather", [tensor, heads], axis=1)

    return Decoder(keys=keys)


def scaled(odd: Odd) -> Decoder:
    def scores(g: Build, tensor: str) -> str:
        return g.node("Mul", [tensor, g.node("Where", [odd(g), g.number(2.0), g.number(1.0)])])

    return Decoder(scores=scores)


def steep(odd: Odd) -> Decoder:
    def slopes(g: Build) -> str:
        return g.node("Mul", [distance(g), g.node("Where", [odd(g), g.number(2.0), g.number(1.0)])])

    return Decoder(scores=added(slopes))


def shifted(odd: Odd) -> Decoder:
    def after(g: Build, x: str) -> str:
        moved = g.node("Add", [POSITIONS["past"](g), g.node("Cast", [odd(g)], to=TensorProto.INT64)])
        table = g.constant(np.random.default_rng(0).standard_normal((64, 16)), np.float32)
        return g.node("Add", [x, g.node("Gather", [table, moved], axis=0)])

    return Decoder(positions="none", after=after)


WHERE = {"hidden": hidden, "cut": cut, "crossed": crossed, "scaled": scaled, "steep": steep, "shifted": shifted}


@pytest.mark.few(2)
@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("odd", [equal(48), above(4)], ids=["48", "above 4"])
def test_batches_in_which_a_model_does_something_else(where: str, odd: Odd, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError):
        rewritten(make_decoder(WHERE[where](odd)), tmp_path)


@pytest.mark.parametrize("row", [4, 70])
def test_a_sequence_that_sees_something_else(row: int, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match=f"2 new, in a batch of {5 if row == 4 else 71}, the last query"):
        rewritten(make_decoder(hidden(in_row(row))), tmp_path)


def test_heads_that_grow_with_one_batch_only(tmp_path: Path) -> None:
    """Three sequences read head 3 where others read head 1: as bounds of a view do that grow with the batch."""

    def keys(g: Build, tensor: str) -> str:
        heads = g.node("Where", [equal(3)(g), g.constant([0, 3, 2, 3]), g.constant([0, 1, 2, 3])])
        return g.node("Gather", [tensor, heads], axis=1)

    with pytest.raises(UnsupportedModelError, match=r"is \[0, 3, 2, 3\] with 3 tokens .* in a batch of 3, and"):
        rewritten(make_decoder(Decoder(keys=keys)), tmp_path)

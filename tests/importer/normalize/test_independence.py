"""Sequences of a batch that depend on each other are refused; what each of them decides for itself is not."""

from __future__ import annotations

from pathlib import Path

import pytest
from concat_decode import compare, rewritten
from concat_graphs import Build, Decoder, make_decoder
from onnx import TensorProto

from trt_kvcache.errors import UnsupportedModelError

SWITCH = 9


def _scaled(g: Build, x: str, positions: str) -> str:
    """Another factor in long texts."""
    long = g.node("Greater", [positions, g.constant(SWITCH)])
    return g.node("Mul", [x, g.node("Where", [long, g.number(3), g.number(1)])])


def by_the_longest(g: Build, x: str) -> str:
    """As LongRoPE chooses its factors."""
    return _scaled(g, x, g.node("ReduceMax", [g.position_ids], keepdims=0))


def by_the_shortest(g: Build, x: str) -> str:
    return _scaled(g, x, g.node("ReduceMin", [g.position_ids], keepdims=0))


def by_a_row_of_a_table(g: Build, x: str) -> str:
    """Weights are looked up behind an offset: no value shows, only which rows are taken."""
    long = g.node("Greater", [g.node("ReduceMax", [g.position_ids], keepdims=0), g.constant(SWITCH)])
    offset = g.node("Mul", [g.node("Cast", [long], to=TensorProto.INT64), g.constant(64)])
    table = g.node("Mul", [g.weight(128, 1), g.node("Cast", [g.node("ReduceMax", [g.tokens])], to=TensorProto.FLOAT)])
    return g.node("Mul", [x, g.node("Gather", [table, g.node("Add", [g.position_ids, offset])], axis=0)])


def each_by_itself(g: Build, x: str) -> str:
    rows = g.node("Unsqueeze", [g.position_ids, g.constant([2])])
    return _scaled(g, x, rows)


@pytest.mark.parametrize("after", [by_the_longest, by_the_shortest, by_a_row_of_a_table])
def test_a_factor_chosen_for_the_whole_batch_is_refused(tmp_path: Path, after) -> None:
    with pytest.raises(UnsupportedModelError, match="depends on the positions of the others"):
        rewritten(make_decoder(Decoder(after=after)), tmp_path)


@pytest.mark.parametrize("after", [by_the_longest, by_the_shortest])
def test_below_the_switch_it_is_taken(tmp_path: Path, after) -> None:
    rewritten(make_decoder(Decoder(after=after)), tmp_path, capacity=SWITCH)


def test_one_sequence_alone_decides_what_it_likes(tmp_path: Path) -> None:
    compare(make_decoder(Decoder(after=by_the_longest, batch=1)), tmp_path)


def test_each_sequence_by_itself_is_taken(tmp_path: Path) -> None:
    compare(make_decoder(Decoder(after=each_by_itself)), tmp_path)

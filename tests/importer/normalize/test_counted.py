"""Positions that a decoder counts from its past and looks up in a table, in the ways that exporters write them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from concat_decode import CAPACITY, check_decode, rewritten
from concat_graphs import Build, Decoder, make_decoder
from onnx import TensorProto

from trt_kvcache.errors import OptionError, UnsupportedModelError
from trt_kvcache.importer.normalize.residual import NOTE
from trt_kvcache.importer.planning.index_limits import index_limits

Index = Callable[[Build], str]
ROWS = 60  # of a table, unless it is to be too short
PAD = 1


def add(g: Build, *terms: str) -> str:
    result = terms[0]
    for term in terms[1:]:
        result = g.node("Add", [result, term])
    return result


def counted(g: Build, first: int = 0) -> str:
    """``[S]``: P + first and so on."""
    bounds = [add(g, n, g.constant(first)) if first else n for n in (g.past, g.all)]
    return g.node("Range", [*bounds, g.constant(1)])


def front(g: Build, tensor: str) -> str:
    return g.node("Unsqueeze", [tensor, g.constant([0])])


def real(g: Build, dtype: int = TensorProto.INT32) -> str:
    """``[B, S]``: 1 where a token is no pad."""
    return g.node("Cast", [g.node("Not", [g.node("Equal", [g.tokens, g.constant(PAD)])])], to=dtype)


def beside_pads(g: Build, past: str, axis: int = 1, offset: int = PAD) -> str:
    """As M2M-100 counts: pads have the position of the pad."""
    tokens = real(g)
    summed = g.node("CumSum", [tokens, g.constant(axis)])
    all_in = g.node("Add", [summed, g.node("Cast", [past], to=TensorProto.INT32)])
    positions = g.node("Cast", [g.node("Mul", [all_in, tokens])], to=TensorProto.INT64)
    return add(g, positions, g.constant(offset)) if offset else positions


def looked_up(index: Index, rows: int = ROWS, *, flat: bool = False, cast: bool = False) -> Callable[[Build, str], str]:
    """Rows of a table added to the hidden states."""

    def after(g: Build, x: str) -> str:
        width = g.decoder.heads * g.decoder.size
        places = index(g)
        if flat:
            places = g.node("Reshape", [places, g.constant([-1])])
        found = g.node("Gather", [g.weight(rows, width), places], "found", axis=0)
        if flat:
            found = g.node("Reshape", [found, g.node("Shape", [x])])
        if cast:
            found = g.node("Cast", [g.node("Cast", [found], to=TensorProto.DOUBLE)], to=TensorProto.FLOAT)
        return g.node("Add", [x, found])

    return after


FOUND: dict[str, tuple[Index, int]] = {  # and how far behind the positions
    "one for all": (counted, 0),
    "one for all, from 2": (lambda g: counted(g, 2), 2),
    "in front": (lambda g: front(g, counted(g)), 0),
    "in front, from 2": (lambda g: front(g, counted(g, 2)), 2),
    "2 more": (lambda g: add(g, front(g, counted(g)), g.constant(2)), 2),
    "2 more before": (lambda g: front(g, add(g, counted(g), g.constant([2]))), 2),
    "3 more, and 1 less": (lambda g: g.node("Sub", [add(g, front(g, counted(g)), g.constant(3)), g.constant(1)]), 2),
    "in int32": (
        lambda g: add(g, g.node("Cast", [front(g, counted(g))], to=TensorProto.INT32), g.constant(2, np.int32)), 2,
    ),
    "beside pads": (lambda g: beside_pads(g, g.past), 1 + PAD),
    "beside pads, from 3": (lambda g: beside_pads(g, add(g, g.past, g.constant(3)), offset=0), 4),
    "pads taken off": (
        lambda g: g.node("Sub", [add(g, g.past, g.node("CumSum", [real(g, TensorProto.INT64), g.constant(1)])),
                                 g.constant(1)]), 0,
    ),
}  # fmt: skip


@pytest.mark.few(2)
@pytest.mark.parametrize("name", FOUND)
def test_each_sequence_takes_rows_of_its_own(tmp_path: Path, name: str) -> None:
    result = check_decode(make_decoder(Decoder(positions="none", after=looked_up(FOUND[name][0]))), tmp_path)
    assert (NOTE in result.plan.notes) == ("pads" in name)
    assert not [v.name for v in result.model.graph.input if "position" in v.name]


def test_rows_of_another_type(tmp_path: Path) -> None:
    """As BigBird's decoder has them."""
    check_decode(make_decoder(Decoder(positions="none", after=looked_up(counted, cast=True))), tmp_path)


def test_rows_that_are_looked_up_in_one_row(tmp_path: Path) -> None:
    """As M2M-100 does."""
    check_decode(
        make_decoder(Decoder(positions="none", after=looked_up(lambda g: beside_pads(g, g.past), flat=True))), tmp_path
    )


def test_twice_the_position(tmp_path: Path) -> None:
    """The sum of two positions is one of each sequence's own."""
    after = looked_up(lambda g: add(g, counted(g), counted(g)), 200)
    check_decode(make_decoder(Decoder(positions="none", after=after)), tmp_path)


@pytest.mark.few(2)
@pytest.mark.parametrize("name", FOUND)
def test_a_table_ends_where_its_offset_says(tmp_path: Path, name: str) -> None:
    index, offset = FOUND[name]
    rows = CAPACITY + offset
    rewritten(make_decoder(Decoder(positions="none", after=looked_up(index, rows))), tmp_path)
    words = f"takes no more than {CAPACITY - 1} tokens: .* at most --capacity {CAPACITY - 1}"
    with pytest.raises(OptionError, match=words):
        rewritten(make_decoder(Decoder(positions="none", after=looked_up(index, rows - 1))), tmp_path)
    rewritten(make_decoder(Decoder(positions="none", after=looked_up(index, rows - 1))), tmp_path, CAPACITY - 1)


@pytest.mark.few(2)
@pytest.mark.parametrize("name", ["one for all", "in front, from 2", "beside pads"])
@pytest.mark.parametrize(("batch", "sequence"), [(1, "sequence"), (2, "sequence"), ("batch", 1), (2, 3)])
def test_fixed_sizes(tmp_path: Path, name: str, batch: int | str, sequence: int | str) -> None:
    index, _ = FOUND[name]
    check_decode(
        make_decoder(Decoder(positions="none", after=looked_up(index), batch=batch, sequence=sequence)), tmp_path
    )


def if_long(g: Build, limit: int = 9) -> str:
    return g.node("Cast", [g.node("Greater", [g.past, g.constant(limit)])], to=TensorProto.INT64)


def tenth(g: Build) -> str:
    return g.node("Div", [g.past, g.constant(10)])


def whole_batch(g: Build) -> str:
    """The longest decides."""
    positions = beside_pads(g, g.past)
    return add(
        g, g.node("ReduceMax", [positions, g.constant([0])], keepdims=1), g.node("Mul", [g.tokens, g.constant(0)])
    )


LOOK_ALIKES: dict[str, Index] = {
    "an offset that grows": lambda g: add(g, front(g, counted(g)), tenth(g)),
    "an offset that grows, one for all": lambda g: add(g, counted(g), tenth(g)),
    "an offset in long texts": lambda g: add(g, front(g, counted(g)), if_long(g)),
    "an offset in long texts, one for all": lambda g: add(g, counted(g), if_long(g)),
    "an offset at one length": lambda g: add(
        g, counted(g), g.node("Cast", [g.node("Equal", [g.past, g.constant(13)])], to=TensorProto.INT64)
    ),
    "an offset by the batch": lambda g: add(g, counted(g), g.size_of(g.tokens, 0)),
    "an offset by the new tokens": lambda g: add(g, counted(g), g.length),
    "one before": lambda g: counted(g, -1),
    "beside pads, twice": lambda g: beside_pads(g, add(g, g.past, g.past)),
    "beside pads, in long texts": lambda g: beside_pads(g, add(g, g.past, if_long(g))),
    "beside pads, at one length": lambda g: beside_pads(
        g, add(g, g.past, g.node("Cast", [g.node("Equal", [g.past, g.constant(13)])], to=TensorProto.INT64))
    ),
    "beside pads, with the new tokens": lambda g: beside_pads(g, g.all),
    "pads of the whole batch": lambda g: beside_pads(g, g.past, axis=0),
    "the longest of the batch": whole_batch,
}


@pytest.mark.few(4)
@pytest.mark.parametrize("name", LOOK_ALIKES)
def test_look_alikes_are_refused(tmp_path: Path, name: str) -> None:
    words = (
        "from the length of the cache|computes something else|not those of the new tokens"
        "|for one sequence of a batch depends"
    )
    with pytest.raises(UnsupportedModelError, match=words):
        rewritten(make_decoder(Decoder(positions="none", after=looked_up(LOOK_ALIKES[name], 200))), tmp_path)


def times(g: Build, x: str, found: str) -> str:
    return g.node("Mul", [x, found])


def summed(g: Build, x: str, found: str) -> str:
    return g.node("Add", [x, g.node("ReduceSum", [found, g.constant([0])], keepdims=0)])


def of_heads(g: Build, x: str, found: str) -> str:
    """``[B, H, S, D] + [S, D]``: with rows for each sequence, those would meet the heads."""
    heads = g.node("Transpose", [g.node("Reshape", [x, g.constant([0, 0, 2, -1])])], perm=[0, 2, 1, 3])
    half = g.node("Slice", [found, g.constant([0]), g.constant([8]), g.constant([1])])
    back = g.node("Transpose", [g.node("Add", [heads, half])], perm=[0, 2, 1, 3])
    return g.node("Reshape", [back, g.constant([0, 0, -1])])


def of_steps(g: Build, x: str, found: str) -> str:
    """``[S, B, H] + [S, 1, H]``."""
    turned = g.node("Transpose", [x], perm=[1, 0, 2])
    more = g.node("Unsqueeze", [found, g.constant([1])])
    return g.node("Transpose", [g.node("Add", [turned, more])], perm=[1, 0, 2])


def with_rows(read: Callable[[Build, str, str], str]) -> onnx.ModelProto:
    def after(g: Build, x: str) -> str:
        found = g.node("Gather", [g.weight(ROWS, 16), counted(g)], axis=0)
        return read(g, x, found)

    return make_decoder(Decoder(positions="none", after=after))


@pytest.mark.parametrize("read", [times, of_heads])
def test_rows_for_all_meet_the_tokens_of_each(tmp_path: Path, read: Callable[[Build, str, str], str]) -> None:
    check_decode(with_rows(read), tmp_path)


@pytest.mark.parametrize("read", [summed, of_steps])
def test_rows_for_all_that_do_not_fit_each_are_refused(tmp_path: Path, read: Callable[[Build, str, str], str]) -> None:
    with pytest.raises(UnsupportedModelError, match="from the length of the cache together with weights or tokens"):
        rewritten(with_rows(read), tmp_path)


def test_numbers_as_large_as_those_of_masks_are_no_positions(tmp_path: Path) -> None:
    def after(g: Build, x: str) -> str:
        large = g.node("Mul", [g.node("Cast", [front(g, counted(g, 1))], to=TensorProto.FLOAT), g.number(-1e30)])
        return g.node("Add", [x, g.node("Unsqueeze", [g.node("Mul", [large, g.number(1e-31)]), g.constant([2])])])

    check_decode(make_decoder(Decoder(positions="none", after=after)), tmp_path)


def test_lengths_that_meet_other_numbers_than_positions_are_refused(tmp_path: Path) -> None:
    def after(g: Build, x: str) -> str:
        return g.node("Add", [x, g.node("Cast", [g.past], to=TensorProto.FLOAT)])

    with pytest.raises(UnsupportedModelError, match="from the length of the cache together with weights or tokens"):
        rewritten(make_decoder(Decoder(positions="none", after=after)), tmp_path)


@pytest.mark.parametrize("offset", [0, 2])
def test_positions_that_are_given_are_limited_by_the_offset(tmp_path: Path, offset: int) -> None:
    def index(g: Build) -> str:
        return add(g, g.position_ids, g.constant(offset))

    rows = CAPACITY - 4
    result = rewritten(make_decoder(Decoder(after=looked_up(index, rows))), tmp_path)
    assert index_limits(result.model, result.plan).positions == {"position_ids": rows - offset}
    assert f"looks up a table of {rows - offset} positions" in " ".join(result.plan.warnings)

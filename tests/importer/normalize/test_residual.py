"""What is left of the length of the past: positions are counted anew, anything else is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from concat_decode import Decode, check_decode, rewritten
from concat_graphs import Build, Decoder, make_decoder
from new_row_graphs import lay_caches
from onnx import TensorProto

from trt_kvcache.errors import UnsupportedModelError

After = Callable[[Build, str], str]


@pytest.mark.few(3)
@pytest.mark.parametrize("positions", ["past", "padding", "present"])
@pytest.mark.parametrize("layout", ["bnsd", "bsnd", "flat"])
def test_positions_are_counted_from_the_write_indices(tmp_path: Path, positions: str, layout: str) -> None:
    model = make_decoder(Decoder(positions=positions, layout=layout))
    result = check_decode(model, tmp_path)
    assert {v.name for v in result.model.graph.input} == {
        "input_ids", "past_key_values.0.key", "past_key_values.0.value", "write_indices", "nonpad_kv_seqlen",
        "attention_span", "logits_span",
    }  # fmt: skip


@pytest.mark.parametrize("positions", ["past", "present"])
def test_lengths_read_off_views_of_caches(tmp_path: Path, positions: str) -> None:
    model = make_decoder(Decoder(positions=positions))
    same = lay_caches(model, (0, 1, 2, 3))  # with Transposes that change nothing
    Decode(model, rewritten(same, tmp_path).model).check()


@pytest.mark.few(7)
@pytest.mark.parametrize("positions", ["past", "padding", "present", "input"])
@pytest.mark.parametrize("capacity", [1, 2, 3, 4, 6, 8, 11])
def test_at_any_capacity(tmp_path: Path, positions: str, capacity: int) -> None:
    model = make_decoder(Decoder(positions=positions))
    result = rewritten(model, tmp_path, capacity)
    prompts = (1, 0, 0) if capacity > 1 else (0, 0, 0)
    Decode(model, result.model, capacity).check([1] * max(1, capacity - 1), prompts)


def test_the_whole_capacity_in_one_step(tmp_path: Path) -> None:
    model = make_decoder(Decoder(positions="past", sequence=8))
    Decode(model, rewritten(model, tmp_path, 8).model, 8).check([8], (0, 0, 0))


def total(g: Build) -> str:
    return g.node("Cast", [g.all], to=TensorProto.FLOAT)


def by_length(g: Build, x: str) -> str:
    return g.node("Mul", [x, g.node("Log", [g.node("Add", [total(g), g.number(1)])])])


def by_length_of_present(g: Build, x: str) -> str:
    return g.node("Mul", [x, g.node("Cast", [g.size_of(g.presents[0], 2)], to=TensorProto.FLOAT)])


def other_frequencies_in_long_texts(g: Build, x: str) -> str:
    """Phi-3's long factors."""
    long = g.node("Greater", [g.all, g.constant(16)])
    return g.node("Mul", [x, g.node("Where", [long, g.number(3), g.number(1)])])


def by_sum_of_padding(g: Build, x: str) -> str:
    return g.node("Mul", [x, g.node("Cast", [g.node("ReduceSum", [g.padding], keepdims=0)], to=TensorProto.FLOAT)])


@pytest.mark.parametrize("after", [by_length, by_length_of_present, other_frequencies_in_long_texts, by_sum_of_padding])
def test_a_length_that_reaches_the_logits_is_refused(tmp_path: Path, after: After) -> None:
    words = "from the length of the cache together with weights or tokens|computes something else than what was"
    with pytest.raises(UnsupportedModelError, match=words):
        rewritten(make_decoder(Decoder(mask="padding", after=after)), tmp_path)


def by_padding_of_the_update(g: Build, x: str) -> str:
    first = g.node("Unsqueeze", [g.node("Neg", [g.length]), g.constant([0])])
    new = g.node("Slice", [g.padding, first, g.constant([2**31]), g.constant([1])])
    return g.node("Mul", [x, g.node("Unsqueeze", [g.node("Cast", [new], to=TensorProto.FLOAT), g.constant([2])])])


def by_mean_of_padding(g: Build, x: str) -> str:
    mean = g.node("ReduceMean", [g.node("Cast", [g.padding], to=TensorProto.FLOAT)], keepdims=0)
    return g.node("Mul", [x, mean])


@pytest.mark.parametrize("after", [by_padding_of_the_update, by_mean_of_padding])
def test_padding_that_reaches_the_logits_is_refused(tmp_path: Path, after: After) -> None:
    """Both are ones in every text without padding: only of a mask that is exactly as long as the text."""
    with pytest.raises(UnsupportedModelError, match="reads the mask 'attention_mask' and is no attention"):
        rewritten(make_decoder(Decoder(mask="padding", after=after)), tmp_path)


def debug(what: Callable[[Build], str], rank: int, kind: int = TensorProto.INT64) -> After:
    """An output beside the logits."""

    def after(g: Build, x: str) -> str:
        g.node("Identity", [what(g)], "debug")
        g.output("debug", kind, [f"d{axis}" for axis in range(rank)])
        return x

    return after


COUNTS: dict[str, Any] = {
    "scalar": debug(lambda g: g.all, 0),
    "one element": debug(lambda g: g.node("Unsqueeze", [g.all, g.constant([0])]), 1),
    "of the present": debug(lambda g: g.size_of(g.presents[0], 2), 0),
    "of the padding mask": debug(lambda g: g.node("ReduceSum", [g.padding, g.constant([1])], keepdims=0), 1),
}


@pytest.mark.parametrize("name", COUNTS)
def test_outputs_that_count_tokens_go(tmp_path: Path, name: str) -> None:
    result = check_decode(make_decoder(Decoder(after=COUNTS[name])), tmp_path)
    assert [c.why for c in result.plan.changes if c.old.startswith("debug")] == ["the caller counts tokens itself"]
    assert "debug" not in {value.name for value in result.model.graph.output}


LENGTHS: dict[str, Any] = {
    "past": debug(lambda g: g.past, 0),
    "positions": debug(lambda g: g.query_rows, 2),
    "mask": debug(lambda g: g.to_scores(g.causal()), 4, TensorProto.BOOL),
}


@pytest.mark.parametrize("name", LENGTHS)
def test_other_outputs_that_show_the_length_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(UnsupportedModelError, match="the output 'debug' depends on the length of the cache"):
        rewritten(make_decoder(Decoder(after=LENGTHS[name])), tmp_path)


def test_outputs_that_do_not_show_the_length_stay(tmp_path: Path) -> None:
    result = check_decode(make_decoder(Decoder(after=debug(lambda g: g.length, 0))), tmp_path)
    assert "debug" in {value.name for value in result.model.graph.output}


def test_the_number_of_new_tokens_is_no_length_of_the_past(tmp_path: Path) -> None:
    def after(g: Build, x: str) -> str:
        return g.node("Mul", [x, g.node("Cast", [g.length], to=TensorProto.FLOAT)])

    check_decode(make_decoder(Decoder(after=after)), tmp_path)


def test_positions_that_are_given_may_decide_anything(tmp_path: Path) -> None:
    def after(g: Build, x: str) -> str:
        long = g.node("Greater", [g.node("ReduceMax", [g.position_ids], keepdims=0), g.constant(9)])
        return g.node("Mul", [x, g.node("Where", [long, g.number(3), g.number(1)])])

    model = make_decoder(Decoder(after=after, batch=1))
    result = rewritten(model, tmp_path)
    assert "position_ids" in {value.name for value in result.model.graph.input}
    Decode(model, result.model).check()


def rows_added(g: Build) -> str:
    return g.node("Sub", [g.size_of(g.presents[0], 2), g.size_of(g.pasts[0], 2)])


def in_both(g: Build) -> str:
    """0 in the model as exported, wherever the text ends."""
    return g.node("Sub", [g.size_of(g.presents[0], 2), g.node("Add", [g.size_of(g.pasts[0], 2), g.length])])


@pytest.mark.parametrize("count", [rows_added, in_both])
def test_a_count_in_which_the_past_cancels_out_is_refused(tmp_path: Path, count: Callable[[Build], str]) -> None:
    def after(g: Build, x: str) -> str:
        return g.node("Add", [x, g.node("Cast", [count(g)], to=TensorProto.FLOAT)])

    with pytest.raises(UnsupportedModelError, match="computes something else than what was recognized"):
        rewritten(make_decoder(Decoder(after=after)), tmp_path)


def test_a_count_that_is_the_same_at_any_capacity_stays(tmp_path: Path) -> None:
    def after(g: Build, x: str) -> str:
        some = g.node("Min", [g.size_of(g.presents[0], 2), g.constant(1)])
        return g.node("Mul", [x, g.node("Cast", [some], to=TensorProto.FLOAT)])

    check_decode(make_decoder(Decoder(after=after)), tmp_path)


def _along_heads(g: Build, x: str) -> str:
    """Halves of the hidden states as heads [B, 2, S, W / 2], times factors [1, S, 1]."""
    heads = g.node("Transpose", [g.node("Reshape", [x, g.constant([0, 0, 2, 8])])], perm=[0, 2, 1, 3])
    rows = g.node("Transpose", [g.query_rows], perm=[1, 0])
    factor = g.node("Cos", [g.node("Cast", [g.node("Unsqueeze", [rows, g.constant([2])])], to=TensorProto.FLOAT)])
    turned = g.node("Transpose", [g.node("Mul", [heads, factor])], perm=[0, 2, 1, 3])
    return g.node("Reshape", [turned, g.constant([0, 0, 16])])


@pytest.mark.parametrize("batch", ["batch", 2])
def test_positions_of_as_many_heads_as_rows_are_refused(tmp_path: Path, batch: int | str) -> None:
    """A batch of two meets two heads: the factors of each row would be those of a head."""
    words = "depends on the other sequences|could not be compared with the original"
    with pytest.raises(UnsupportedModelError, match=words):
        rewritten(make_decoder(Decoder(after=_along_heads, batch=batch)), tmp_path)

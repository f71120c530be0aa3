"""Caches that grow along another axis, or whose batch is not their first one."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest
from concat_decode import CAPACITY, Decode, rewritten
from concat_graphs import Build, Decoder, make_decoder
from new_row_graphs import as_joined, give_new_rows, lay_caches, turn_within
from stored import edited

from trt_kvcache import UnsupportedModelError, plan_model, verify_model
from trt_kvcache.verify import verify_import

KEYS, VALUES = (0, 1, 3, 2), (0, 1, 2, 3)
HEADS_FIRST = ((1, 0, 3, 2), (1, 0, 2, 3))
DECODERS = {
    "keys transposed": (Decoder(layers=2), (KEYS, VALUES)),
    "both transposed": (Decoder(mask="padding", positions="padding"), (KEYS,)),
    "lengths read off the whole": (Decoder(positions="present"), (KEYS, VALUES)),
    "own mask": (Decoder(mask="own", apply="where"), (KEYS, VALUES)),
}


@pytest.mark.few(4)
@pytest.mark.parametrize("form", ["whole", "new rows"])
@pytest.mark.parametrize("name", DECODERS)
def test_any_layout(tmp_path: Path, name: str, form: str) -> None:
    decoder, orders = DECODERS[name]
    whole = make_decoder(decoder)
    laid = lay_caches(whole, *orders)
    result = rewritten(laid if form == "whole" else give_new_rows(laid, as_joined), tmp_path)
    assert {c.route.value for c in result.plan.caches} == {"native"}
    Decode(whole, result.model).check()
    if decoder.layers > 1:  # where keys and values lie differently
        verify_import(result).check()


def test_one_head_is_no_batch(tmp_path: Path) -> None:
    whole = make_decoder(Decoder(kv_heads=1, batch=3))
    result = rewritten(whole, tmp_path)
    assert [c.logical_shape for c in result.plan.caches] == [(3, 1, CAPACITY, 4)] * 2
    Decode(whole, result.model).check()


def test_heads_before_one_sequence_are_refused(tmp_path: Path) -> None:
    laid = lay_caches(make_decoder(Decoder(batch=1)), *HEADS_FIRST)
    with pytest.raises(UnsupportedModelError, match="its first axis, '2', is not the batch"):
        rewritten(laid, tmp_path)


def by_batch(g: Build, x: str) -> str:
    """Hidden states, spread over as many sequences as the past has."""
    batch = g.node("Slice", [g.node("Shape", [g.pasts[0]]), g.constant([0]), g.constant([1])])
    return g.node("Expand", [x, g.node("Concat", [batch, g.constant([1, 1])], axis=0)])


def test_sizes_read_off_a_past_are_no_use_of_it(tmp_path: Path) -> None:
    whole = make_decoder(Decoder(after=by_batch))
    result = rewritten(lay_caches(whole, KEYS, VALUES), tmp_path)
    assert {c.route.value for c in result.plan.caches} == {"native"}
    Decode(whole, result.model).check()


@pytest.mark.parametrize("perm", [(1, 2, 0, 3), (1, 2, 3, 0)])
def test_read_before_it_is_transposed_for_the_caller(tmp_path: Path, perm: tuple[int, ...]) -> None:
    """onnxsim brings the Transpose in front of an output together with the one behind it."""

    def fuse(model: onnx.ModelProto) -> None:
        written = next(node.output[0] for node in model.graph.node if node.op_type == "ScatterND")
        reader = next(node for node in model.graph.node if list(node.input) == ["k_cache_out"])
        reader.input[0], reader.attribute[0].ints[:] = written, perm

    path = edited("plain-torch/bshd_index_put_dynamo_op18", tmp_path, fuse)
    if perm == (1, 2, 0, 3):
        verify_model(path).check()
        return
    with pytest.raises(UnsupportedModelError):  # another order of axes
        plan_model(path)


@pytest.mark.parametrize("positions", ["input", "present"])
def test_transposed_before_new_rows_are_joined(tmp_path: Path, positions: str) -> None:
    model = turn_within(make_decoder(Decoder(positions=positions)), (0, 2, 1, 3))
    result = rewritten(model, tmp_path)
    assert {c.route.value for c in result.plan.caches} == {"native"}
    verify_import(result).check()


def test_changes_say_both_layouts(tmp_path: Path) -> None:
    plan = rewritten(lay_caches(make_decoder(Decoder()), KEYS, VALUES), tmp_path).plan
    said = {c.old: (c.new, c.why) for c in plan.changes if "_key" in c.old or ".key" in c.old}
    new, why = said["past_key_values.0.key [B, 2, 4, P]"]
    assert new == "past_key_values.0.key [B, 2, L, 4]"
    assert why == "a buffer of fixed capacity L, in another layout, updated in place"
    assert said["present.0.key [B, 2, 4, P + S]"] == ("present.0.key [B, 2, L, 4]", why)

"""Caches that grow along another axis, or whose batch is not their first one."""

from __future__ import annotations

from pathlib import Path

import pytest
from concat_decode import CAPACITY, Decode, rewritten
from concat_graphs import Decoder, make_decoder
from new_row_graphs import as_joined, give_new_rows, lay_caches

from trt_kvcache import verify_model
from trt_kvcache.importer.plan import PlanOptions

KEYS, VALUES = (0, 1, 3, 2), (0, 1, 2, 3)
HEADS_FIRST = ((1, 0, 3, 2), (1, 0, 2, 3))
DECODERS = {
    "keys transposed": (Decoder(layers=2), (KEYS, VALUES)),
    "both transposed": (Decoder(mask="padding", positions="padding"), (KEYS,)),
    "lengths read off the whole": (Decoder(positions="present"), (KEYS, VALUES)),
    "own mask": (Decoder(mask="own", apply="where"), (KEYS, VALUES)),
    "heads before one sequence": (Decoder(layers=2, batch=1), HEADS_FIRST),
    "heads before one sequence and lengths": (Decoder(positions="present", batch=1), HEADS_FIRST),
}


@pytest.mark.parametrize("form", ["whole", "new rows"])
@pytest.mark.parametrize("name", DECODERS)
def test_any_layout(tmp_path: Path, name: str, form: str) -> None:
    decoder, orders = DECODERS[name]
    whole = make_decoder(decoder)
    laid = lay_caches(whole, *orders)
    result = rewritten(laid if form == "whole" else give_new_rows(laid, as_joined), tmp_path)
    assert {c.route.value for c in result.plan.caches} == {"native"}
    Decode(whole, result.model).run()
    if decoder.layers > 1:  # where keys and values lie differently
        verify_model(tmp_path / "model.onnx", PlanOptions(capacity=CAPACITY)).check()


def test_changes_say_both_layouts(tmp_path: Path) -> None:
    plan = rewritten(lay_caches(make_decoder(Decoder()), KEYS, VALUES), tmp_path).plan
    said = {c.old: (c.new, c.why) for c in plan.changes if "_key" in c.old or ".key" in c.old}
    new, why = said["past_key_values.0.key [B, 2, 4, P]"]
    assert new == "past_key_values.0.key [B, 2, L, 4]"
    assert why == "a buffer of fixed capacity L, in another layout, updated in place"
    assert said["present.0.key [B, 2, 4, P + S]"] == ("present.0.key [B, 2, L, 4]", why)

"""What a plan says about inputs and outputs that change, old to new."""

from __future__ import annotations

from pathlib import Path

from concat_decode import rewritten
from concat_graphs import Decoder, make_decoder

from trt_kvcache.importer.plan import Sliding


def test_the_plan_names_what_changes(tmp_path: Path) -> None:
    result = rewritten(make_decoder(Decoder(mask="padding", positions="padding")), tmp_path)
    changes = {(c.io, c.old, c.new): c.why for c in result.plan.changes}
    cache = "past_key_values.0.key [B, 2, {}, 4]"
    assert changes["input", cache.format("P"), cache.format("L")] == "a buffer of fixed capacity L, updated in place"
    present = "present.0.key [B, 2, {}, 4]"
    assert ("output", present.format("P + S"), present.format("L")) in changes
    assert "do not pad on the left" in changes["input", "attention_mask [B, P + S]", ""]
    assert "per sequence" in changes["input", "", "write_indices [batch]"]
    assert "write_indices + number of new tokens" in changes["input", "", "nonpad_kv_seqlen [batch]"]


def test_a_mask_that_nothing_reads_goes(tmp_path: Path) -> None:
    result = rewritten(make_decoder(Decoder(after=lambda g, x: (g.padding, x)[1])), tmp_path)
    assert "attention_mask [B, P + S]" in {c.old for c in result.plan.changes}
    assert "attention_mask" not in {v.name for v in result.model.graph.input}


def test_a_circular_cache_says_how_long_it_is(tmp_path: Path) -> None:
    result = rewritten(make_decoder(Decoder(window=5)), tmp_path, sliding=Sliding.CIRCULAR, window_chunk=4)
    why = {c.old: (c.new, c.why) for c in result.plan.changes}
    new, reason = why["past_key_values.0.key [B, 2, P, 4]"]
    assert new == "past_key_values.0.key [B, 2, 8, 4]"
    assert reason == "a circular buffer of a window, updated in place"


def test_nothing_else_changes(tmp_path: Path) -> None:
    result = rewritten(make_decoder(Decoder()), tmp_path)
    changed = {c.old.split(" ")[0] for c in result.plan.changes if c.old}
    caches = {"past_key_values.0.key", "past_key_values.0.value", "present.0.key", "present.0.value"}
    assert changed == caches | {"logits"}
    assert {c.new.split(" ")[0] for c in result.plan.changes if not c.old} == {"write_indices", "nonpad_kv_seqlen"}

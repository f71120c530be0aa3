"""Caches that are cut to their newest rows: caches of all tokens under a window, the same logits at every length."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import onnx
import pytest
from concat_decode import Decode, normalized, rewritten
from cut_graphs import Cut, make_cut

from trt_kvcache.errors import UnsupportedModelError
from trt_kvcache.importer.normalize import normalize
from trt_kvcache.importer.plan import PlanOptions, Sliding, UpdateMode
from trt_kvcache.verify import VerifyOptions, verify_import

LONG = 40  # tokens


def windows(model: onnx.ModelProto) -> list[int]:
    """Tokens that each attention sees; 0: all."""
    nodes = [n for n in model.graph.node if n.op_type == "Attention"]
    left = [next((a.i for a in n.attribute if a.name == "left_window_size"), -1) for n in nodes]
    return [n + 1 for n in left]


def decode(model: onnx.ModelProto, result: onnx.ModelProto, capacity: int, *, short: bool) -> None:
    """Prompts around the cut, long updates across it, and single tokens."""
    runner = Decode(model, result, capacity, short=short)
    runner.check((1, 4, 1, 1, 2, 9, 1, 3, 1, 1), prompts=(12, 5, 0))


EXACT: dict[str, Cut] = {
    "one layer": Cut(),
    "a window of two": Cut(kept=(1,), window=(2,)),
    "a large window": Cut(kept=(15,), window=(16,)),
    "more kept than seen": Cut(kept=(11,), window=(6,)),
    "every layer": Cut(kept=(7, 7), window=(8, 8)),
    "windows of their own": Cut(kept=(7, 4), window=(8, 5)),
    "cut first": Cut(kept=(7, 0), window=(8, 0)),
    "cut last": Cut(kept=(0, 7), window=(0, 8)),
    "a window that is not cut": Cut(kept=(7, 0), window=(8, 8)),
    "cut twice": Cut(cut="twice", kept=(7, 0), window=(8, 0)),
    "a computed start": Cut(cut="computed", kept=(7, 0), window=(8, 0)),
    "a chosen start": Cut(cut="chosen"),
    "positions": Cut(mask="positions", kept=(7, 0), window=(8, 0)),
    "padding": Cut(mask="padding", kept=(7, 0), window=(8, 0)),
    "padding from the first row": Cut(mask="padding from the first"),
    "padding of the rows that are kept": Cut(mask="padding of the rows", kept=(7, 7), window=(8, 8)),
    "fewer kept than the capacity, padding": Cut(mask="padding of the rows", kept=(12,), window=(5,)),
    "another layout": Cut(layout="bsnd", kept=(7, 0), window=(8, 0)),
    "fused": Cut(attention="fused", kept=(7, 0), window=(8, 0)),
    "fused by positions": Cut(attention="fused", mask="positions"),
    # One token at a time sees what is kept and itself, mask or not; several would see more than a window.
    "one token, no window": Cut(sequence=1, window=(0,)),
    "one token, no mask": Cut(sequence=1, window=(0,), mask=""),
    "one token, fused, no mask": Cut(sequence=1, window=(0, 0), kept=(7, 0), mask="", attention="fused"),
    "one token, fewer kept than the window": Cut(sequence=1, kept=(5,)),
    "positions counted from a layer that keeps all": Cut(kept=(7, 0), window=(8, 0), counted=1),
    "a cut that leaves all heads": Cut(cut="heads", kept=(0,)),
    "as long as the capacity": Cut(kept=(LONG,), window=(LONG + 1,)),
    "longer than the capacity": Cut(kept=(2 * LONG,), window=(2 * LONG + 1,)),
    "much longer": Cut(kept=(4095,), window=(4096,), cut="computed"),
    "not cut within the capacity, no window": Cut(kept=(LONG,), window=(0,)),
}


@pytest.mark.few(2)
@pytest.mark.parametrize("name", EXACT)
def test_the_same_logits_at_every_length(name: str, tmp_path: Path) -> None:
    how = EXACT[name]
    model = make_cut(how)
    result = rewritten(model, tmp_path, LONG)
    decode(model, result.model, LONG, short=how.mask == "padding of the rows")
    verify_import(result, VerifyOptions(batch=3)).check()


@pytest.mark.few(6)
@pytest.mark.parametrize("name", EXACT)
def test_the_mask_is_the_window(name: str) -> None:
    how = EXACT[name]
    found = windows(normalized(make_cut(how), LONG))
    seen = [k + 1 if how.sequence == 1 and k else w for k, w in zip(how.kept, how.window, strict=True)]
    assert found == [w if 0 < w < LONG else 0 for w in seen]


@pytest.mark.few(4)
@pytest.mark.parametrize("window", range(2, 12))
@pytest.mark.parametrize("capacity", [9, 24])
def test_windows_around_the_capacity(window: int, capacity: int, tmp_path: Path) -> None:
    how = Cut(kept=(window - 1, 0), window=(window, 0), mask="positions" if window % 2 else "lengths")
    model = make_cut(how)
    runner = Decode(model, rewritten(model, tmp_path, capacity).model, capacity)
    runner.check(
        (1, 2, 1, 1) if capacity == 9 else (4, 1, 3, 1, 1, 2), prompts=(3, 2, 0) if capacity == 9 else (9, 2, 0)
    )


@pytest.mark.few(2)
@pytest.mark.parametrize("chunk", [1, 4, 9])
@pytest.mark.parametrize(
    "how", [Cut(), Cut(kept=(7, 0), window=(8, 0)), Cut(kept=(11,), window=(6,)), Cut(cut="twice", mask="positions")]
)
def test_rings(how: Cut, chunk: int, tmp_path: Path) -> None:
    model = make_cut(how)
    result = normalize(model, {}, PlanOptions(capacity=LONG, sliding=Sliding.CIRCULAR, window_chunk=chunk))
    assert result.findings is not None
    assert result.findings.longest == dict.fromkeys(("past_key_values.0.key", "past_key_values.0.value"), chunk)
    decoded = onnx.ModelProto()
    decoded.CopyFrom(result.model)
    decoded.opset_import[0].version = 24
    runner = Decode(model, decoded, LONG)
    for row, prompt in zip(runner.rows, (12, 7, 0), strict=True):
        for length in (*[chunk] * (prompt // chunk), prompt % chunk):
            if length:
                runner.check_step(length, row)
    for length in (1, chunk, 1, 1, min(chunk, 3), 1):
        runner.check_step(length)
    imported = rewritten(model, tmp_path, LONG, sliding=Sliding.CIRCULAR, window_chunk=chunk)
    assert {c.mode for c in imported.plan.caches if c.past.startswith("past_key_values.0")} == {UpdateMode.CIRCULAR}
    verify_import(imported, VerifyOptions(chunks=(chunk,))).check()


def test_the_plan_says_what_was_kept(tmp_path: Path) -> None:
    plan = rewritten(make_cut(Cut(kept=(7, 0), window=(8, 0))), tmp_path, LONG).plan
    assert [c.idiom for c in plan.caches] == ["Concat, Slice"] * 2 + ["Concat"] * 2
    changes = {c.old: c.new for c in plan.changes if c.old.endswith("]")}
    assert changes["past_key_values.0.key [B, 2, min(P, 7), 4]"] == "past_key_values.0.key [B, 2, L, 4]"
    assert changes["present.0.value [B, 2, min(P + S, 7), 4]"] == "present.0.value [B, 2, L, 4]"
    assert changes["past_key_values.1.key [B, 2, P, 4]"] == "past_key_values.1.key [B, 2, L, 4]"
    assert {t.kept for t in plan.original if ".0." in t.name} == {7}
    assert {t.kept for t in plan.original if ".0." not in t.name} == {None}


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "fewer kept than seen": ({"kept": (5,)}, "is none of the supported ones"),
    "one fewer than seen": ({"kept": (6,)}, "is none of the supported ones"),
    "fewer kept than seen, beside a full layer": ({"kept": (6, 0), "window": (8, 0)}, "is none of the supported ones"),
    "no window": ({"window": (0,)}, "keeps its newest 7 rows: supported is a window of at most 8 tokens"),
    "no mask": ({"mask": ""}, "is none of the supported ones"),
    "positions counted from rows that are kept": ({"counted": 0}, "from the length of the cache together with weights"),
    "attention over what is left, one token": (
        {"reads": "cut", "mask": "", "sequence": 1},
        "keeps its newest 7 rows: supported is a window",
    ),
    "attention over what is left": ({"reads": "cut", "mask": ""}, "keeps its newest 7 rows: supported is a window"),
    "the oldest rows": ({"cut": "the oldest rows"}, "does not leave the newest rows"),
    "without the newest": ({"cut": "without the newest"}, "does not leave the newest rows"),
    "every other row": ({"cut": "every other row"}, "does not leave the newest rows"),
    "backwards": ({"cut": "backwards"}, "does not leave the newest rows"),
    "by the update": ({"cut": "by the update"}, "leaves more rows in some steps than in others"),
    "by a position": ({"cut": "by a position"}, "leaves more rows in some steps than in others"),
    "padding of the rows, beside a full layer": (
        {"mask": "padding of the rows", "kept": (7, 0), "window": (8, 0)},
        "which do not fit each other, as where an exporter chose one side",
    ),
    "values kept longer": ({"values": 2}, "keeps 7 rows of its keys and 9 of its values"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_exact_is_refused(name: str) -> None:
    how, words = REFUSED[name]
    with pytest.raises(UnsupportedModelError, match=words):
        normalized(make_cut(replace(Cut(), **how)), LONG)

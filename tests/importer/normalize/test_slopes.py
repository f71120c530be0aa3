"""ALiBi: slopes over the distance of key and query, in the ways that exporters write them, and what only looks so."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import harness
import numpy as np
import onnx
import pytest
from concat_decode import CAPACITY, check_decode, rewritten
from concat_graphs import Build, Decoder, make_decoder
from slope_graphs import absolute, added, as_float, counted, distance, one_slope, table, times_slopes

from trt_kvcache import UnsupportedModelError
from trt_kvcache.importer.plan import AttentionKind, Sliding
from trt_kvcache.runtime.ort.attention import fuse_attention
from trt_kvcache.verify import verify_import


def scaled_behind(g: Build, scores: str) -> str:
    """Falcon: scores and bias are scaled together."""
    return g.node("Mul", [added(counted)(g, scores), g.number(0.5)])


def twice(g: Build, scores: str) -> str:
    return added(counted)(g, scaled_behind(g, scores))


def in_the_mask(g: Build) -> str:
    """One tensor that hides and slants, behind a view."""
    visible = g.to_scores(g.causal())
    both = g.node("Where", [visible, distance(g), g.number(-65504.0)])
    return g.node("Slice", [both, g.constant([0]), g.constant([2**31]), g.constant([3])])


VARIANTS: dict[str, dict[str, Any]] = {
    "counted": {"scores": added(counted)},
    "table": {"scores": added(table)},
    "distance": {"scores": added(distance)},
    "absolute": {"scores": added(absolute)},
    "behind the mask": {"masked": added(distance)},
    "one slope": {"scores": added(one_slope)},
    "scaled behind": {"scores": scaled_behind},
    "twice": {"scores": twice},
    "mask and slopes scaled": {"masked": lambda g, s: g.node("Mul", [added(distance)(g, s), g.number(0.5)])},
    "in the mask": {"mask": "none", "scores": added(in_the_mask)},
    "a window": {"scores": added(counted), "window": 5},
    "sinks": {"scores": added(distance), "sinks": "weight"},
    "capped": {"scores": added(counted), "softcap": 3.0},
    "padding": {"scores": added(counted), "mask": "padding", "positions": "padding"},
    "Where": {"scores": added(table), "apply": "where"},
    "two layers": {"scores": added(counted), "layers": 2},
    "fixed batch": {"scores": added(distance), "batch": 2, "positions": "past"},
    "one token at a time": {"scores": added(counted), "sequence": 1},
    "float16": {"scores": added(counted), "dtype": np.float16},
    "float16, scores in float32": {"scores": added(counted), "dtype": np.float16, "upcast": True, "guard": True},
}


@pytest.mark.few(6)
@pytest.mark.parametrize("name", VARIANTS)
def test_decode(tmp_path: Path, name: str) -> None:
    decoder = Decoder(**VARIANTS[name])
    result = check_decode(make_decoder(decoder), tmp_path, 2e-4 if decoder.dtype is np.float32 else 2e-2)
    lowered = decoder.sinks or decoder.softcap or (decoder.dtype is np.float16 and decoder.size % 8)
    assert {a.kind for a in result.plan.attention} == {AttentionKind.LOWERED if lowered else AttentionKind.DECOMPOSED}
    assert {a.keys for a in result.plan.attention} == {"span"}
    assert [bool(m.slopes) for m in result.plan.masks] == [True]
    onnx.checker.check_model(result.model, full_check=True)


def test_nothing_grows_with_the_capacity(tmp_path: Path) -> None:
    model = make_decoder(Decoder(scores=added(counted)))
    sizes = []
    for capacity in (24, 4096):
        result = rewritten(model, tmp_path, capacity).model
        sizes.append(sum(int(np.prod(t.dims)) for t in result.graph.initializer))
    assert sizes[0] == sizes[1]


def test_far_keys(tmp_path: Path) -> None:
    """A bias of less than the numbers that stand for "hidden" hides nothing."""
    model = make_decoder(Decoder(scores=added(counted), capacity=4000))
    (mask,) = rewritten(model, tmp_path, 4000).plan.masks
    assert mask.slopes
    assert mask.causal


def test_windows_with_slopes_stay_linear(tmp_path: Path) -> None:
    model = make_decoder(Decoder(scores=added(counted), window=5))
    plan = rewritten(model, tmp_path, sliding=Sliding.CIRCULAR, window_chunk=4).plan
    assert {c.capacity for c in plan.caches} == {CAPACITY}


def test_the_cpu_keeps_attention_with_slopes(tmp_path: Path) -> None:
    """ONNX Runtime's GroupQueryAttention, which the runner takes elsewhere, knows no slopes."""
    imported = rewritten(make_decoder(Decoder(scores=added(counted), size=8)), tmp_path)
    assert "GroupQueryAttention" not in {n.op_type for n in fuse_attention(imported.model, imported.plan).graph.node}
    plain = rewritten(make_decoder(Decoder(size=8)), tmp_path)
    assert "GroupQueryAttention" in {n.op_type for n in fuse_attention(plain.model, plain.plan).graph.node}


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_from_export_to_engine(tmp_path: Path, dtype: Any) -> None:
    model = make_decoder(Decoder(scores=added(counted), dtype=dtype, size=16, layers=2))
    result = rewritten(model, tmp_path)
    verify_import(result).check()
    outcome = harness.build(result)
    assert outcome.stage == "built", outcome.words


def _when(g: Build, past: int, here: float, else_: float = 0.0) -> str:
    """A number in steps behind so many tokens, another one in all others."""
    return g.node("Where", [g.node("Equal", [g.past, g.constant(past)]), g.number(here), g.number(else_)])


def _odd_slopes(g: Build) -> str:
    return g.node("Mul", [distance(g), _when(g, 13, 1.5, 1.0)])


def _one_key_off(g: Build) -> str:
    odd = g.node("Where", [g.node("Equal", [g.key_rows, g.constant(4)]), _when(g, 17, 0.01), g.number(0.0)])
    return g.node("Sub", [distance(g), odd])


def _of_length(g: Build) -> str:
    return g.node("Mul", [distance(g), as_float(g, g.all)])


def _squares(g: Build) -> str:
    rows = g.node("Sub", [g.key_rows, g.query_rows])
    return times_slopes(g, g.to_scores(g.node("Mul", [rows, rows])))


def _turned(g: Build) -> str:
    """Keys counted from the other end of each query: even, but for where it is odd."""
    return times_slopes(g, g.to_scores(g.node("Mod", [g.node("Add", [g.key_rows, g.query_rows]), g.constant(7)])))


def _of_tokens(g: Build) -> str:
    """One bias for each token of the prompt."""
    tokens = g.node("Slice", [g.tokens, g.constant([0]), g.constant([1]), g.constant([1])])
    return g.node("Mul", [distance(g), as_float(g, g.node("Unsqueeze", [tokens, g.constant([1, 3])]))])


LOOK_ALIKES: dict[str, tuple[dict[str, Any], str]] = {
    "other slopes at one length": ({"scores": added(_odd_slopes)}, "computes something else"),
    "one key off at one length": ({"scores": added(_one_key_off)}, "computes something else|other than 0"),
    "slopes of the length": ({"scores": added(_of_length)}, "other than 0 and the lowest"),
    "squares": ({"scores": added(_squares)}, "other than 0 and the lowest"),
    "squares, scaled with the scores": (
        {"scores": lambda g, scores: g.node("Mul", [added(_squares)(g, scores), g.number(0.5)])},
        "other than 0 and the lowest",
    ),
    "not even": ({"scores": added(_turned)}, "other than 0 and the lowest"),
    "of the tokens": ({"scores": added(_of_tokens)}, "values of 'input_ids'"),
    "not causal": ({"scores": added(distance), "mask": "none"}, "other than 0 and the lowest"),
    "counted, beside sinks": ({"scores": added(counted), "sinks": "weight"}, "other than 0 and the lowest"),
    "the caller's own mask": ({"scores": added(distance), "mask": "own"}, "beside the caller's own mask"),
}  # fmt: skip


@pytest.mark.parametrize("name", LOOK_ALIKES)
def test_look_alikes_are_refused(tmp_path: Path, name: str) -> None:
    how, words = LOOK_ALIKES[name]
    with pytest.raises(UnsupportedModelError, match=words):
        rewritten(make_decoder(Decoder(**how)), tmp_path)

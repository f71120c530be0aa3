"""Attention over batch and heads in one axis: every way to write it becomes Attention, and look-alikes are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import harness
import numpy as np
import onnx
import pytest
from concat_decode import Decode, check_decode, normalized, rewritten
from concat_graphs import Build, Decoder, make_decoder
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from merged_graphs import Merged, by_length, cross_attention, fixed, heads_first, mixed, shuffled

from trt_kvcache import PlanOptions, plan_model, verify_model
from trt_kvcache.errors import UnsupportedModelError
from trt_kvcache.importer.plan import AttentionKind, Role, Route

VARIANTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "BART": ({"mask": "padding"}, {}),
    "BLOOM": ({"mask": "padding", "positions": "padding"}, {"split": "softmax", "scale": "scores"}),
    "all merged": ({}, {"split": "none"}),
    "all merged, padding mask": ({"mask": "padding"}, {"split": "none"}),
    "all merged, mask first": ({}, {"split": "none", "apply": "add in front"}),
    "all merged, one mask": ({}, {"split": "none", "spread": "one"}),
    "all merged, mask of rows": ({}, {"split": "none", "spread": "rows"}),
    "all merged, Where": ({}, {"split": "none", "apply": "where"}),
    "all merged, Where the other way round, own mask": ({"mask": "own"}, {"split": "none", "apply": "hide"}),
    "no mask": ({"mask": "none", "sequence": 1}, {"split": "none"}),
    "Where": ({}, {"apply": "where"}),
    "keys scaled": ({}, {"scale": "keys"}),
    "own mask": ({"mask": "own"}, {}),
    "a window": ({"window": 5}, {}),
    "groups of heads": ({"kv_heads": 2}, {}),
    "one head for all": ({"kv_heads": 1}, {"split": "none"}),
    "batch left open": ({}, {"sizes": "heads"}),
    "batch of one": ({"batch": 1}, {"keys": fixed(4), "values": fixed(4)}),
    "batch of two": ({"batch": 2, "positions": "past"}, {"split": "softmax"}),
    "[B, S, N, D]": ({"layout": "bsnd"}, {}),
    "[B, S, N * D]": ({"layout": "flat"}, {"split": "none"}),
    "float16, scores in float32": ({"dtype": np.float16, "upcast": True}, {"split": "none"}),
    "queries shifted": ({}, {"before": lambda g, q: g.node("Add", [q, g.number(0.5)])}),
    "queries by way of [B*H, 1, S, D]": ({}, {"before": lambda g, q: _there_and_back(g, q)}),
    "result times 2": ({}, {"behind": lambda g, y: g.node("Mul", [y, g.number(2.0)])}),
    "sizes read off the result": ({"after": lambda g, x: _as_result(g, x)}, {"behind": lambda g, y: _kept(g, y)}),
    "capped": ({"scores": lambda g, s: g.node("Tanh", [s])}, {}),
}


def _there_and_back(g: Build, tensor: str) -> str:
    """Behind an operator that takes no split axis."""
    return g.node("Squeeze", [g.node("Elu", [g.node("Unsqueeze", [tensor, g.constant([1])])]), g.constant([1])])


def _kept(g: Build, result: str) -> str:
    return g.once("result", lambda: result)


def _as_result(g: Build, x: str) -> str:
    """Reshaped to sizes of ``[B*H, S, D]``, as BLOOM takes B and S from there."""
    rows, length, size = (g.size_of(_kept(g, ""), axis) for axis in range(3))
    batch, width = (g.node(op, [n, g.constant(g.decoder.heads)]) for op, n in (("Div", rows), ("Mul", size)))
    shape = [g.node("Unsqueeze", [n, g.constant([0])]) for n in (batch, length, width)]
    return g.node("Reshape", [x, g.node("Concat", shape, axis=0)])


def _decoder(settings: dict[str, Any], **merged: Any) -> Decoder:
    return Decoder(**{"kv_heads": 4, **settings}, attend=Merged(**merged))


@pytest.mark.few(2)
@pytest.mark.parametrize("name", VARIANTS)
def test_decode(tmp_path: Path, name: str) -> None:
    decoder = _decoder(VARIANTS[name][0], **VARIANTS[name][1])
    model = make_decoder(decoder)
    result = check_decode(model, tmp_path, 1e-4 if decoder.dtype is np.float32 else 2e-2)
    assert {cache.idiom for cache in result.plan.caches} == {"Concat"}
    assert len(result.plan.attention) == 1
    canonical = normalized(model)
    assert "Softmax" not in {n.op_type for n in canonical.graph.node}
    if decoder.dtype is np.float32 and not decoder.window:  # ONNX Runtime knows no windows in an Attention yet
        Decode(model, canonical, seed=1).check()


@pytest.mark.slow
@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(
    mask=st.sampled_from(["past", "padding", "positions", "buffer", "own"]),
    window=st.sampled_from([0, 1, 5]),
    kv_heads=st.sampled_from([1, 2, 4]),
    layers=st.sampled_from([1, 2]),
    layout=st.sampled_from(["bnsd", "bsnd", "flat"]),
    attend=st.builds(
        Merged,
        split=st.sampled_from(["mask", "softmax", "none"]),
        apply=st.sampled_from(["add", "add in front", "where", "hide"]),
        scale=st.sampled_from(["query", "scores", "keys", "none"]),
        sizes=st.sampled_from(["numbers", "heads"]),
    ),
)
def test_any_combination(tmp_path: Path, **choices: Any) -> None:
    check_decode(make_decoder(Decoder(**choices)), tmp_path)


@pytest.mark.parametrize("split", ["mask", "none"])
def test_beside_an_encoder(tmp_path: Path, split: str) -> None:
    """Attention over what an encoder gives is left as it is."""
    path, options = tmp_path / "model.onnx", PlanOptions(capacity=24)
    decoder = _decoder({"mask": "padding", "positions": "padding", "after": cross_attention}, split=split)
    onnx.save(make_decoder(decoder), path)
    plan = plan_model(path, options)
    assert len(plan.caches) == 2
    assert {t.name for t in plan.tensors if t.role is Role.CONSTANT} == {
        "encoder_attention_mask", "past_key_values.0.encoder.key", "past_key_values.0.encoder.value",
    }  # fmt: skip
    verify_model(path, options).check()


@pytest.mark.few(2)
@pytest.mark.parametrize(
    "name", ["BART", "BLOOM", "all merged", "batch left open", "groups of heads", "queries by way of [B*H, 1, S, D]"]
)
def test_builds(tmp_path: Path, name: str) -> None:
    """With heads of 16 in half precision: attention is one kernel, and every cache is updated in place."""
    settings, merged = VARIANTS[name]
    model = make_decoder(_decoder({**settings, "dtype": np.float16, "size": 16}, **merged))
    result = rewritten(model, tmp_path, 256)
    assert [attention.kind for attention in result.plan.attention] == [AttentionKind.FUSED]
    assert {cache.route for cache in result.plan.caches} == {Route.NATIVE}
    outcome = harness.build(result)
    assert outcome.stage == "built", outcome.words


REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "heads outermost": ({}, {"keys": heads_first, "values": heads_first}, "with its heads repeated and transposed"),
    "values with heads outermost": ({}, {"values": heads_first}, "'past_key_values.0.value' with its heads repeated"),
    "rows and heads in turn": ({}, {"keys": mixed, "values": mixed}, "is not cache 'past_key_values.0.key' with"),
    "rows of values and heads in turn": ({}, {"values": mixed}, "is not cache 'past_key_values.0.value' with"),
    "traced with a batch of one": ({}, {"keys": fixed(4), "values": fixed(4)}, "reads the cache .* is no attention"),
    "traced with a batch of two": ({}, {"keys": fixed(8), "values": fixed(8)}, "cannot be evaluated"),
    "merged in another order for long texts": (
        {},
        {"keys": by_length, "values": by_length},
        "computes something else",
    ),
    "queries in another order for long texts": ({}, {"before": shuffled}, "computes something else"),
    "temperature of the text": ({"scores": lambda g, s: _by_length(g, s)}, {}, "computes something else"),
}


def _by_length(g: Build, scores: str) -> str:
    return g.node("Mul", [scores, g.node("Cast", [g.node("Add", [g.all, g.constant(1)])], to=1)])


@pytest.mark.parametrize("name", REFUSED)
def test_what_only_looks_like_merged_heads_is_refused(tmp_path: Path, name: str) -> None:
    settings, merged, words = REFUSED[name]
    with pytest.raises(UnsupportedModelError, match=words):
        rewritten(make_decoder(_decoder(settings, **merged)), tmp_path)

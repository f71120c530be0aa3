"""Attention over latents instead of over the keys and values that are computed from them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import harness
import numpy as np
import pytest
from concat_decode import Decode, check_decode, normalized, rewritten
from concat_graphs import Build, make_decoder
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from latent_graphs import Latent, latent_decoder

from trt_kvcache.importer.plan import LatentAttention, Route, Target
from trt_kvcache.verify import verify_import


class Quantized(Latent):
    """Its weight has 8 bits."""

    def _heads_of(self, g: Build, latents: str, columns: int) -> str:
        numbers = np.random.default_rng(5).integers(-99, 99, (g.decoder.size, g.decoder.heads * columns))
        weight = g.node("DequantizeLinear", [g.constant(numbers, np.int8), g.number(0.01)])
        return self._to_heads(g, g.node("MatMul", [latents, weight]), columns)


class Fused(Latent):
    """Its weight is the sum of two, as where a LoRA was merged into it at run time."""

    def _heads_of(self, g: Build, latents: str, columns: int) -> str:
        shape = g.decoder.size, g.decoder.heads * columns
        weight = g.node("Add", [g.weight(*shape), g.weight(*shape)])
        return self._to_heads(g, g.node("MatMul", [latents, weight]), columns)


class Crossed(Latent):
    """Each head has columns of its own, but heads are in another order in them."""

    def _to_heads(self, g: Build, flat: str, columns: int) -> str:
        heads = super()._to_heads(g, flat, columns)
        return g.node("Gather", [heads, g.constant([2, 0, 3, 1])], axis=1)


class Strided(Latent):
    """The columns of a head are apart: head n has every fourth, from n on."""

    def _to_heads(self, g: Build, flat: str, columns: int) -> str:
        sizes = [g.node("Unsqueeze", [n, g.constant([0])]) for n in (g.size_of(g.tokens, 0), g.all)]
        shape = g.node("Concat", [*sizes, g.constant([columns, -1])], axis=0)
        return g.node("Transpose", [g.node("Reshape", [flat, shape])], perm=[0, 3, 1, 2])


class Alike(Latent):
    """The values of all heads are the same: those of one."""

    def _parted(self, g: Build, latents: str) -> tuple[str, str]:
        plain, _ = super()._parted(g, latents)
        values = g.node("MatMul", [latents, g.weight(g.decoder.size, g.decoder.size)])
        return plain, g.node("Expand", [values, g.constant([1, g.decoder.heads, 1, 1])])


def _unary(op: str) -> Any:
    return lambda g, tensor: g.node(op, [tensor])


def _halved(g: Build, tensor: str) -> str:
    return g.node("Mul", [tensor, g.number(0.5)])


def _head_norm(g: Build, tensor: str) -> str:
    return g.node("LayerNormalization", [tensor, g.weight(2 * g.decoder.size)], epsilon=1e-5)


def _some_bent(g: Build, tensor: str) -> str:
    """The last columns as they are, before what a function makes of the first ones."""
    half = g.decoder.size // 2
    bounds = [[0], [half], [2**63 - 1]]
    first, last = (g.node("Slice", [tensor, *map(g.constant, (bounds[i], bounds[i + 1], [3]))]) for i in (0, 1))
    return g.node("Concat", [last, g.node("Tanh", [first])], axis=3)


def _reversed(g: Build, tensor: str) -> str:
    return g.node("Gather", [tensor, g.constant(list(reversed(range(g.decoder.size))))], axis=3)


ABSORBED: dict[str, tuple[Latent, dict[str, Any]]] = {
    "one product": (Latent(), {}),
    "keys beside values": (Latent(products="blocks"), {}),
    "two products": (Latent(products="two"), {}),
    "weights for each head": (Latent(heads="weights"), {}),
    "two products, weights for each head": (Latent(heads="weights", products="two", plain=3), {}),
    "wide keys": (Latent(plain=9), {}),
    "wide values": (Latent(width=7), {}),
    "narrow": (Latent(plain=1, width=1), {}),
    "blocks of other sizes": (Latent(products="blocks", plain=3, width=7), {}),
    "written side by side": (Latent(join="scatter", plain=6), {}),
    "cut apart": (Latent(parts="slice", plain=5, width=3), {}),
    "norm in pieces": (Latent(norm="pieces"), {}),
    "norm": (Latent(norm="operator"), {}),
    "no linear function before the weight": (Latent(latents=_unary("Tanh")), {}),
    "no linear function of what is rotated": (Latent(rotated=_unary("Tanh")), {}),
    "latents in another order": (Latent(latents=_reversed), {}),
    "a function of some of what is rotated": (Latent(rotated=_some_bent), {}),
    "two layers": (Latent(plain=6), {"layers": 2}),
    "scaled keys": (Latent(), {"scale": "k"}),
    "padding": (Latent(), {"mask": "padding", "positions": "padding"}),
    "own mask": (Latent(), {"mask": "own"}),
    "window": (Latent(), {"window": 5}),
    "softcap": (Latent(), {"softcap": 2.0}),
    "sinks": (Latent(), {"sinks": "weight"}),
    "[B, T, 1, D]": (Latent(plain=6), {"layout": "bsnd"}),
    "[B, T, D]": (Latent(plain=6), {"layout": "flat"}),
    "batch of one": (Latent(), {"batch": 1, "positions": "past"}),
    "fixed batch": (Latent(), {"batch": 2, "positions": "past"}),
    "one token at a time": (Latent(), {"sequence": 1}),
    "operator": (Latent(operator=True, width=7), {}),
    "float16": (Latent(plain=6), {"dtype": np.float16}),
    "scores in float32": (Latent(plain=6), {"dtype": np.float16, "upcast": True}),
    "values of one head": (Alike(), {}),
    "a weight that is the sum of two": (Fused(), {}),
}
EXPANDED: dict[str, tuple[Latent, dict[str, Any]]] = {
    "bias": (Latent(bias=True), {}),
    "no linear function of keys": (Latent(keys=_unary("Tanh")), {}),
    "no linear function of values": (Latent(values=_unary("Relu")), {}),
    "norm of each head's keys": (Latent(keys=_head_norm), {}),
    "scaled keys of all heads": (Latent(keys=_halved), {}),
    "groups of heads": (Latent(kv_heads=2), {}),
    "weights of 8 bits": (Quantized(), {}),
    "heads in another order": (Crossed(), {}),
    "what is rotated in an order without slices": (Latent(rotated=_reversed), {}),
    "columns of a head apart": (Strided(), {}),
}


def _tolerance(settings: dict[str, Any]) -> float:
    return 4e-2 if settings.get("dtype") is np.float16 else 1e-4


@pytest.mark.few(8)
@pytest.mark.parametrize("name", ABSORBED)
def test_queries_go_to_the_latents(tmp_path: Path, name: str) -> None:
    latent, rest = ABSORBED[name]
    decoder = latent_decoder(latent, **rest)
    model = make_decoder(decoder)
    plan = check_decode(model, tmp_path, _tolerance(rest)).plan
    size = decoder.size
    assert [(a.query_heads, a.kv_heads, a.head_size, a.value_head_size) for a in plan.attention] == [
        (decoder.heads, 1, 2 * size, size)
    ] * decoder.layers
    assert [a.keys for a in plan.attention] == ["mask" if decoder.mask == "own" else "span"] * decoder.layers
    assert {c for a in plan.attention for c in a.caches} == {c.past for c in plan.caches}
    assert sum("queries go to the latents" in note for note in plan.notes) == 1
    if decoder.dtype is np.float32 and not decoder.window and not decoder.sinks:  # the canonical form runs
        Decode(model, normalized(model), seed=1).check()


@pytest.mark.few(5)
@pytest.mark.parametrize("name", EXPANDED)
def test_what_only_looks_so_stays(tmp_path: Path, name: str) -> None:
    latent, rest = EXPANDED[name]
    decoder = latent_decoder(latent, **rest)
    plan = check_decode(make_decoder(decoder), tmp_path, _tolerance(rest)).plan
    assert [a.kv_heads for a in plan.attention] == [latent.kv_heads or decoder.heads] * decoder.layers
    assert not any("queries go to the latents" in note for note in plan.notes)


@pytest.mark.few(2)
@pytest.mark.parametrize("name", ABSORBED)
def test_expanded_on_demand(tmp_path: Path, name: str) -> None:
    latent, rest = ABSORBED[name]
    decoder = latent_decoder(latent, **rest)
    options = {"latent_attention": LatentAttention.EXPANDED}
    plan = check_decode(make_decoder(decoder), tmp_path, _tolerance(rest), **options).plan
    assert {a.head_size for a in plan.attention} == {(latent.plain or decoder.size) + decoder.size}
    assert not any("queries go to the latents" in note for note in plan.notes)


@pytest.mark.slow
@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(
    layers=st.sampled_from([1, 2]),
    layout=st.sampled_from(["bnsd", "bsnd", "flat"]),
    mask=st.sampled_from(["past", "padding", "positions", "buffer", "own"]),
    scale=st.sampled_from(["scores", "q", "k", "both", "none"]),
    size=st.sampled_from([2, 4, 6]),
    sinks=st.sampled_from(["", "weight"]),
    attend=st.builds(
        Latent,
        heads=st.sampled_from(["reshape", "weights"]),
        products=st.sampled_from(["one", "two"]),
        plain=st.integers(1, 9),
        width=st.integers(1, 9),
        join=st.sampled_from(["concat", "scatter", "reversed", "cast"]),
        parts=st.sampled_from(["split", "slice"]),
        norm=st.sampled_from(["", "pieces", "operator"]),
    ),
)
def test_any_sizes(tmp_path: Path, attend: Latent, **choices: Any) -> None:
    plan = check_decode(make_decoder(latent_decoder(attend, **choices)), tmp_path).plan
    assert {a.kv_heads for a in plan.attention} == {1}


@pytest.mark.parametrize("form", list(LatentAttention))
def test_rows_are_taken_out_of_each_cache_once(tmp_path: Path, form: LatentAttention) -> None:
    """And nothing else is done to them: neither joined nor transposed nor scaled, where queries go to them."""
    model = make_decoder(latent_decoder(Latent(plain=6)))
    graph = rewritten(model, tmp_path, latent_attention=form).model.graph
    presents = {n.output[0] for n in graph.node if n.op_type == "TensorScatter"}
    cuts = [n for n in graph.node if presents & set(n.input)]
    assert [n.op_type for n in cuts] == ["Slice", "Slice"]
    spans = [n for n in graph.node if n.op_type == "Slice" and n.input[2] == cuts[0].input[2]]
    assert len(spans) == 2
    if form is LatentAttention.ABSORBED:
        rows = {n.output[0] for n in cuts}
        readers = [n for n in graph.node if rows & set(n.input)]
        assert [n.op_type for n in readers] == ["MatMul"] * 3
        weights = {t.name for t in graph.initializer}
        assert not any(weights & set(n.input) for n in readers)


@pytest.mark.parametrize("target", list(Target))
def test_without_a_span_all_rows_are_read(tmp_path: Path, target: Target) -> None:
    model = make_decoder(latent_decoder(Latent(plain=6)))
    plan = check_decode(model, tmp_path, attention_span=False, target=target).plan
    assert [(a.keys, a.kv_heads) for a in plan.attention] == [("all", 1)]


def test_the_note_says_how_many_tokens_are_too_many(tmp_path: Path) -> None:
    """4 * (6 + 7) multiplications for each row and head, or 2 * 4 - 6 - 7 more for each token: never fewer."""
    latent = Latent(plain=6, width=7)
    plan = rewritten(make_decoder(latent_decoder(latent)), tmp_path).plan
    assert not any("--latent-attention" in note for note in plan.notes)
    plan = rewritten(make_decoder(latent_decoder(Latent(plain=2, width=3))), tmp_path).plan
    assert any("more than 6 tokens" in note and "--latent-attention expanded" in note for note in plan.notes)


@pytest.mark.few(1)
@pytest.mark.parametrize("dtype", [np.float16, np.float32])
@pytest.mark.parametrize(
    ("size", "latent"),
    [
        (16, Latent(plain=8, width=24)),
        (16, Latent(products="two", norm="pieces")),
        (24, Latent(join="scatter")),
        (272, Latent(plain=64, width=64)),
    ],
)
def test_builds(tmp_path: Path, size: int, latent: Latent, dtype: Any) -> None:
    result = rewritten(make_decoder(latent_decoder(latent, dtype=dtype, size=size)), tmp_path, 256)
    verify_import(result).check()
    assert {a.kv_heads for a in result.plan.attention} == {1}
    assert {cache.route for cache in result.plan.caches} == {Route.NATIVE}
    outcome = harness.build(result)
    assert outcome.stage == "built", outcome.words

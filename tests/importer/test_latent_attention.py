"""Keys and values that are computed from caches: the queries go to the latents, or only rows in use are computed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import harness
import numpy as np
import pytest
from concat_decode import check_decode, rewritten
from concat_graphs import Build, make_decoder
from latent_graphs import Latent, latent_decoder

from trt_kvcache.errors import UnsupportedModelError
from trt_kvcache.importer.plan import LatentAttention, Route, Sliding, Target
from trt_kvcache.verify import verify_import

EXPANDED = {"latent_attention": LatentAttention.EXPANDED}


class Quantized(Latent):
    """Its weight has 8 bits."""

    def _heads_of(self, g: Build, latents: str, columns: int) -> str:
        numbers = np.random.default_rng(5).integers(-99, 99, (g.decoder.size, g.decoder.heads * columns))
        weight = g.node("DequantizeLinear", [g.constant(numbers, np.int8), g.number(0.01)])
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


def _unary(op: str, **attrs: Any) -> Any:
    return lambda g, tensor: g.node(op, [tensor], **attrs)


def _with(op: str, *inputs: Any, **attrs: Any) -> Any:
    """An operator on a tensor and constants."""
    return lambda g, tensor: g.node(op, [tensor, *(g.constant(v, np.asarray(v).dtype) for v in inputs)], **attrs)


def _without_mean(axis: int) -> Any:
    return lambda g, t: g.node("Sub", [t, g.node("ReduceMean", [t, g.constant([axis])], keepdims=1)])


ABSORBED: dict[str, tuple[Latent, dict[str, Any]]] = {
    "plain": (Latent(), {}),
    "wide keys, narrow values": (Latent(plain=9, width=1), {}),
    "written side by side": (Latent(join="scatter", plain=6), {}),
    "cut apart, norm in pieces": (Latent(parts="slice", plain=5, width=3, norm="pieces"), {}),
    "norm": (Latent(norm="operator"), {}),
    "no linear function before the weight": (Latent(latents=_unary("Tanh")), {}),
    "two layers": (Latent(plain=6), {"layers": 2}),
    "padding": (Latent(), {"mask": "padding", "positions": "padding"}),
    "own mask": (Latent(), {"mask": "own"}),
    "window and sinks": (Latent(), {"window": 5, "sinks": "weight"}),
    "[B, T, 1, D]": (Latent(plain=6), {"layout": "bsnd"}),
    "[B, T, D]": (Latent(plain=6), {"layout": "flat"}),
    "fixed batch": (Latent(), {"batch": 2, "positions": "past"}),
    "one token at a time": (Latent(), {"sequence": 1}),
    "operator": (Latent(operator=True, width=7), {}),
    "float16": (Latent(plain=6), {"dtype": np.float16}),
}
STAYS: dict[str, Latent] = {
    "bias": Latent(bias=True),
    "no linear function of keys": Latent(keys=_unary("Tanh")),
    "weights of 8 bits": Quantized(),
    "heads in another order": Crossed(),
    "columns of a head apart": Strided(),
}


@pytest.mark.few(6)
@pytest.mark.parametrize("name", ABSORBED)
def test_queries_go_to_the_latents(tmp_path: Path, name: str) -> None:
    latent, rest = ABSORBED[name]
    decoder = latent_decoder(latent, **rest)
    plan = check_decode(make_decoder(decoder), tmp_path, 4e-2 if "dtype" in rest else 1e-4).plan
    sizes = [(a.query_heads, a.kv_heads, a.head_size, a.value_head_size) for a in plan.attention]
    assert sizes == [(decoder.heads, 1, 2 * decoder.size, decoder.size)] * decoder.layers
    assert [a.keys for a in plan.attention] == ["mask" if decoder.mask == "own" else "span"] * decoder.layers
    assert {c for a in plan.attention for c in a.caches} == {c.past for c in plan.caches}
    assert sum("queries go to the latents" in note for note in plan.notes) == 1


@pytest.mark.few(4)
@pytest.mark.parametrize("name", [*STAYS, *ABSORBED])
def test_keys_and_values_of_the_rows_in_use_are_computed(tmp_path: Path, name: str) -> None:
    """Where the weight cannot move, and on demand."""
    latent, rest = (STAYS[name], {}) if name in STAYS else ABSORBED[name]
    decoder, options = latent_decoder(latent, **rest), {} if name in STAYS else EXPANDED
    plan = check_decode(make_decoder(decoder), tmp_path, 4e-2 if "dtype" in rest else 1e-4, **options).plan
    assert {a.kv_heads for a in plan.attention} == {decoder.heads}
    assert {a.head_size for a in plan.attention} == {(latent.plain or decoder.size) + decoder.size}
    assert not any("queries go to the latents" in note for note in plan.notes)


def test_latents_that_queries_go_to_in_the_export_are_one_head(tmp_path: Path) -> None:
    plan = check_decode(make_decoder(latent_decoder(Latent(absorbed=True))), tmp_path).plan
    assert [(a.query_heads, a.kv_heads, a.head_size, a.value_head_size) for a in plan.attention] == [(4, 1, 8, 4)]


@pytest.mark.parametrize("form", list(LatentAttention))
def test_rows_in_use_are_taken_out_of_each_cache_once(tmp_path: Path, form: LatentAttention) -> None:
    model = make_decoder(latent_decoder(Latent(plain=6, join="scatter", norm="pieces")))
    graph = rewritten(model, tmp_path, latent_attention=form).model.graph
    presents = {n.output[0] for n in graph.node if n.op_type == "TensorScatter"}
    readers = [n for n in graph.node if presents & set(n.input)]
    made = {o: n for n in graph.node for o in n.output}
    assert [n.op_type for n in readers] == ["Slice", "Slice"]
    assert [list(made[end].input) for end in {n.input[2] for n in readers}] == [["attention_span"]]
    assert not {"ScatterND", "ConstantOfShape"} & {n.op_type for n in graph.node}


@pytest.mark.parametrize("target", list(Target))
@pytest.mark.parametrize("form", list(LatentAttention))
def test_without_a_span_all_rows_are_read(tmp_path: Path, target: Target, form: LatentAttention) -> None:
    model = make_decoder(latent_decoder(Latent(plain=6)))
    plan = check_decode(model, tmp_path, attention_span=False, target=target, latent_attention=form).plan
    assert [a.keys for a in plan.attention] == ["all"]


def test_windows_stay_linear_where_keys_are_computed(tmp_path: Path) -> None:
    model = make_decoder(latent_decoder(Latent(), window=5))
    plan = check_decode(model, tmp_path, sliding=Sliding.CIRCULAR, window_chunk=4).plan
    assert {cache.mode.value for cache in plan.caches} == {"linear"}


def test_the_note_says_how_many_tokens_are_too_many(tmp_path: Path) -> None:
    """4 * (6 + 7) multiplications for each row and head, or 2 * 4 - 6 - 7 more for each token: never fewer."""
    plan = rewritten(make_decoder(latent_decoder(Latent(plain=6, width=7))), tmp_path).plan
    assert not any("--latent-attention" in note for note in plan.notes)
    plan = rewritten(make_decoder(latent_decoder(Latent(plain=2, width=3))), tmp_path).plan
    assert any("more than 6 tokens" in note and "--latent-attention expanded" in note for note in plan.notes)


@pytest.mark.few(1)
@pytest.mark.parametrize("dtype", [np.float16, np.float32])
@pytest.mark.parametrize(
    ("size", "latent"),
    [(16, Latent(plain=8, width=24, norm="pieces")), (24, Latent(join="scatter")), (272, Latent(plain=64, width=64))],
)
@pytest.mark.parametrize("form", list(LatentAttention))
def test_builds(tmp_path: Path, size: int, latent: Latent, dtype: Any, form: LatentAttention) -> None:
    model = make_decoder(latent_decoder(latent, dtype=dtype, size=size))
    result = rewritten(model, tmp_path, 256, latent_attention=form)
    verify_import(result).check()
    assert {cache.route for cache in result.plan.caches} == {Route.NATIVE}
    outcome = harness.build(result)
    assert outcome.stage == "built", outcome.words


def _by_length(g: Build, tensor: str) -> str:
    return g.node("Mul", [tensor, g.node("Cast", [g.all], to=1)])


def _by_token(g: Build, tensor: str) -> str:
    seen = g.node("ReduceMax", [g.node("Cast", [g.tokens], to=1)], keepdims=0)
    return g.node("Mul", [tensor, g.node("Add", [seen, g.constant(1.0, np.float32)])])


def _newest(g: Build, tensor: str) -> str:
    """Each row beside the newest one."""
    return g.node("Add", [tensor, g.node("Slice", [tensor, *(g.constant([n]) for n in (-1, 2**63 - 1, 2))])])


def _attended(g: Build, tensor: str) -> str:
    scores = g.node("MatMul", [tensor, g.node("Transpose", [tensor], perm=[0, 1, 3, 2])])
    return g.node("MatMul", [g.node("Softmax", [scores]), tensor])


def _divided(g: Build, tensor: str) -> str:
    """By a norm, which is 0 in rows that were never written."""
    return g.node("Div", [tensor, g.node("ReduceL2", [tensor, g.constant([3])], keepdims=1)])


def _mixed_by_reshape(g: Build, tensor: str) -> str:
    """``[B, 1, T, D]`` as ``[B, 1, D, T]`` in memory."""
    turned = g.node("Shape", [g.node("Transpose", [tensor], perm=[0, 1, 3, 2])])
    return g.node("Transpose", [g.node("Reshape", [tensor, turned])], perm=[0, 1, 3, 2])


MIXED: dict[str, Any] = {
    "softmax over rows": _unary("Softmax", axis=2),
    "mean over rows": _without_mean(2),
    "mean over the batch": _without_mean(0),
    "by the length": _by_length,
    "by the tokens": _by_token,
    "the newest row": _newest,
    "the other way round": _with("Slice", [-1], [-(2**63) + 1], [2], [-1]),
    "attention of latents": _attended,
    "another arrangement": _mixed_by_reshape,
}


@pytest.mark.few(10)
@pytest.mark.parametrize(
    ("name", "where"),
    [*((name, where) for name in MIXED for where in ("latents", "keys", "rotated", "values")), ("divided", "values")],
)
def test_functions_of_more_than_a_row_are_refused(tmp_path: Path, name: str, where: str) -> None:
    """Or of what is 0 in rows that were never written."""
    changed: dict[str, Any] = {where: MIXED.get(name, _divided)}
    said = (
        "computes something else than what was recognized|no attention|not go to one MatMul|has the shape .* in a step"
    )
    with pytest.raises(UnsupportedModelError, match=said):
        rewritten(make_decoder(latent_decoder(Latent(**changed))), tmp_path)


def test_rows_that_something_else_is_computed_from_are_refused(tmp_path: Path) -> None:
    def after(g: Build, x: str) -> str:
        computed = g.node("MatMul", [g.presents[0], g.weight(g.decoder.size, 3)])
        g.node("ReduceSum", [computed], "debug", keepdims=0)
        g.output("debug", 1, [])
        return x

    with pytest.raises(UnsupportedModelError, match="reads the cache .* is no attention"):
        rewritten(make_decoder(latent_decoder(Latent(), after=after)), tmp_path)

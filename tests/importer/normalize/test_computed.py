"""Keys and values that are computed from caches, against their canonical and their rewritten form."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import harness
import numpy as np
import onnx
import pytest
from concat_decode import Decode, check_decode, normalized, rewritten
from concat_graphs import Build, make_decoder
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from latent_graphs import Latent, latent_decoder, written

from trt_kvcache.errors import InvalidModelError, UnsupportedModelError
from trt_kvcache.importer.plan import Route, Sliding, Target
from trt_kvcache.verify import verify_import

VARIANTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "weights for each head": ({"heads": "weights"}, {}),
    "written side by side": ({"join": "scatter"}, {}),
    "written side by side, the last first": ({"join": "reversed"}, {}),
    "written side by side into zeros of another type": ({"join": "cast"}, {}),
    "cut apart": ({"parts": "slice"}, {}),
    "bias": ({"bias": True}, {}),
    "norm in pieces": ({"norm": "pieces"}, {}),
    "norm": ({"norm": "operator"}, {}),
    "absorbed": ({"absorbed": True}, {}),
    "operator": ({"operator": True, "join": "scatter"}, {}),
    "absorbed, operator": ({"absorbed": True, "operator": True}, {}),
    "two layers": ({}, {"layers": 2}),
    "scaled keys": ({}, {"scale": "k"}),
    "positions from the past": ({}, {"positions": "past"}),
    "padding": ({}, {"mask": "padding", "positions": "padding"}),
    "own mask": ({}, {"mask": "own"}),
    "[B, T, 1, D]": ({}, {"layout": "bsnd"}),
    "[B, T, D]": ({}, {"layout": "flat"}),
    "float16": ({}, {"dtype": np.float16}),
    "fixed batch": ({}, {"batch": 2, "positions": "past"}),
    "batch of one": ({}, {"batch": 1, "positions": "past"}),
    "one token at a time": ({}, {"sequence": 1}),
}


@pytest.mark.few(2)
@pytest.mark.parametrize("name", VARIANTS)
def test_decode(tmp_path: Path, name: str) -> None:
    latent, rest = VARIANTS[name]
    decoder = latent_decoder(Latent(**latent), **rest)
    model = make_decoder(decoder)
    result = check_decode(model, tmp_path, 1e-4 if decoder.dtype is np.float32 else 4e-2)
    plan = result.plan
    assert {cache.idiom for cache in plan.caches} == {"Concat"}
    assert [a.keys for a in plan.attention] == ["mask" if decoder.mask == "own" else "span"] * decoder.layers
    assert {c for a in plan.attention for c in a.caches} == {c.past for c in plan.caches}
    if decoder.dtype is np.float32:
        Decode(model, normalized(model), seed=1).check()


@pytest.mark.slow
@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(
    layers=st.sampled_from([1, 2]),
    layout=st.sampled_from(["bnsd", "bsnd", "flat"]),
    mask=st.sampled_from(["past", "padding", "positions", "buffer", "own"]),
    scale=st.sampled_from(["scores", "q", "k", "both", "none"]),
    attend=st.builds(
        Latent,
        heads=st.sampled_from(["reshape", "weights"]),
        join=st.sampled_from(["concat", "scatter", "reversed", "cast"]),
        parts=st.sampled_from(["split", "slice"]),
        norm=st.sampled_from(["", "pieces", "operator"]),
        bias=st.booleans(),
        absorbed=st.booleans(),
    ),
)
def test_any_combination(tmp_path: Path, attend: Latent, **choices: Any) -> None:
    check_decode(make_decoder(latent_decoder(attend, **choices)), tmp_path)


def test_only_the_rows_in_use_are_computed(tmp_path: Path) -> None:
    """What reads a cache reads it up to the span, and what is read has no other length."""
    graph = rewritten(make_decoder(latent_decoder(Latent(join="scatter", norm="pieces"))), tmp_path).model.graph
    presents = {n.output[0] for n in graph.node if n.op_type == "TensorScatter"}
    readers = [n for n in graph.node if presents & set(n.input)]
    ends = {n.input[2] for n in readers}
    made = {o: n for n in graph.node for o in n.output}
    assert {n.op_type for n in readers} == {"Slice"}
    assert [list(made[end].input) for end in ends] == [["attention_span"]]
    kinds = Counter(n.op_type for n in graph.node)
    assert not kinds["ScatterND"]
    assert not kinds["ConstantOfShape"]


@pytest.mark.few(2)
@pytest.mark.parametrize("name", ["plain", "written side by side", "norm in pieces", "absorbed", "[B, T, D]"])
def test_builds(tmp_path: Path, name: str) -> None:
    latent, rest = VARIANTS[name]
    model = make_decoder(latent_decoder(Latent(**latent), **rest, dtype=np.float16, size=16))
    result = rewritten(model, tmp_path, 256)
    verify_import(result).check()
    assert {cache.route for cache in result.plan.caches} == {Route.NATIVE}
    outcome = harness.build(result)
    assert outcome.stage == "built", outcome.words


@pytest.mark.parametrize("target", list(Target))
def test_without_a_span_all_rows_are_computed(tmp_path: Path, target: Target) -> None:
    plan = check_decode(make_decoder(latent_decoder(Latent())), tmp_path, attention_span=False, target=target).plan
    assert [a.keys for a in plan.attention] == ["all"]


@pytest.mark.parametrize("repeat", [False, True])
def test_absorbed_latents_are_one_head(tmp_path: Path, repeat: bool) -> None:
    plan = check_decode(make_decoder(latent_decoder(Latent(absorbed=True, repeat=repeat))), tmp_path).plan
    assert [(a.query_heads, a.kv_heads, a.head_size, a.value_head_size) for a in plan.attention] == [(4, 1, 8, 4)]


def test_windows_stay_linear_where_keys_are_computed(tmp_path: Path) -> None:
    model = make_decoder(latent_decoder(Latent(), window=5))
    plan = check_decode(model, tmp_path, sliding=Sliding.CIRCULAR, window_chunk=4).plan
    assert {cache.mode.value for cache in plan.caches} == {"linear"}


def _number(g: Build, value: float) -> str:
    return g.constant(value, np.float32)


def _last(g: Build, op: str, tensor: str, axis: int, **attrs: Any) -> str:
    return g.node(op, [tensor, g.constant([axis])], keepdims=1, **attrs)


def _softmax(g: Build, tensor: str) -> str:
    return g.node("Softmax", [tensor], axis=2)


def _norm_over_rows(g: Build, tensor: str) -> str:
    return g.node("Sub", [tensor, _last(g, "ReduceMean", tensor, 2)])


def _cumulated(g: Build, tensor: str) -> str:
    return g.node("CumSum", [tensor, g.constant(2)])


def _by_length(g: Build, tensor: str) -> str:
    return g.node("Mul", [tensor, g.node("Cast", [g.all], to=1)])


def _by_row(g: Build, tensor: str) -> str:
    column = g.node("Unsqueeze", [g.node("Cast", [g.key_rows], to=1), g.constant([1])])
    return g.node("Mul", [tensor, g.node("Cos", [column])])


def _by_token(g: Build, tensor: str) -> str:
    seen = g.node("ReduceMax", [g.node("Cast", [g.tokens], to=1)], keepdims=0)
    return g.node("Mul", [tensor, g.node("Add", [seen, _number(g, 1.0)])])


def _by_position(g: Build, tensor: str) -> str:
    seen = g.node("ReduceMax", [g.node("Cast", [g.position_ids], to=1)], keepdims=0)
    return g.node("Mul", [tensor, g.node("Add", [seen, _number(g, 1.0)])])


def _shifted(g: Build, tensor: str) -> str:
    """Each row beside the one before it."""
    ends = [g.constant([n]) for n in (0, -1, 2)]
    before = g.node("Pad", [g.node("Slice", [tensor, *ends]), g.constant([0, 0, 1, 0, 0, 0, 0, 0])])
    return g.node("Add", [tensor, before])


def _newest(g: Build, tensor: str) -> str:
    """Each row beside the newest one."""
    ends = [g.constant([n]) for n in (-1, 2**63 - 1, 2)]
    return g.node("Add", [tensor, g.node("Slice", [tensor, *ends])])


def _reversed(g: Build, tensor: str) -> str:
    bounds = [g.constant([n]) for n in (-1, -(2**63) + 1, 2, -1)]
    return g.node("Slice", [tensor, *bounds])


def _over_all(g: Build, tensor: str) -> str:
    """No axes are all of them."""
    return g.node("Sub", [tensor, g.node("ReduceMean", [tensor, g.constant(np.zeros(0))], keepdims=1)])


def _over_batch(g: Build, tensor: str) -> str:
    return g.node("Sub", [tensor, _last(g, "ReduceMean", tensor, 0)])


def _weighted(g: Build, tensor: str) -> str:
    """Rows that are summed up with constant weights, as many as there are of the buffer."""
    whole = g.constant(np.linspace(-1, 1, 64 * 64).reshape(64, 64), np.float32)
    total = g.node("Unsqueeze", [g.all, g.constant([0])])
    rows = g.node("Concat", [total, total], axis=0)
    some = g.node("Slice", [whole, g.constant([0, 0]), rows, g.constant([0, 1])])
    return g.node("MatMul", [some, tensor])


def _scores_of_its_own(g: Build, tensor: str) -> str:
    return g.node(
        "MatMul",
        [g.node("Softmax", [g.node("MatMul", [tensor, g.node("Transpose", [tensor], perm=[0, 1, 3, 2])])]), tensor],
    )


def _divided(g: Build, tensor: str) -> str:
    return g.node("Div", [tensor, _last(g, "ReduceL2", tensor, 3)])


def _divided_by_mean(g: Build, tensor: str) -> str:
    return g.node("Div", [tensor, _last(g, "ReduceMean", tensor, 3)])


def _logarithm(g: Build, tensor: str) -> str:
    return g.node("Log", [g.node("Abs", [tensor])])


def _mixed_by_reshape(g: Build, tensor: str) -> str:
    """``[B, 1, T, D]`` as ``[B, 1, D, T]`` in memory."""
    turned = g.node("Shape", [g.node("Transpose", [tensor], perm=[0, 1, 3, 2])])
    swapped = g.node("Reshape", [tensor, turned])
    return g.node("Transpose", [swapped], perm=[0, 1, 3, 2])


FUNCTIONS: dict[str, Any] = {
    "softmax over rows": _softmax,
    "norm over rows": _norm_over_rows,
    "by the length": _by_length,
    "by the tokens": _by_token,
    "by the positions": _by_position,
    "the row before": _shifted,
    "the newest row": _newest,
    "the other way round": _reversed,
    "over all axes": _over_all,
    "over the batch": _over_batch,
    "sums with weights": _weighted,
    "attention of latents": _scores_of_its_own,
    "divided by a norm that may be 0": _divided,
    "divided by what may be 0": _divided_by_mean,
    "logarithm": _logarithm,
    "another arrangement": _mixed_by_reshape,
}
_REFUSED = (
    "computes something else than what was recognized|no attention|not go to one MatMul|has the shape .* in a step"
)


@pytest.mark.few(2)
@pytest.mark.parametrize("where", ["latents", "rotated", "keys", "values"])
@pytest.mark.parametrize("change", [_by_row, _cumulated])
def test_rows_may_be_made_of_their_numbers_and_of_rows_before(tmp_path: Path, change: Any, where: str) -> None:
    latent: dict[str, Any] = {where: change}
    check_decode(make_decoder(latent_decoder(Latent(**latent))), tmp_path)


@pytest.mark.few(14)
@pytest.mark.parametrize("where", ["latents", "rotated", "keys", "values"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_of_more_than_a_row_are_refused(tmp_path: Path, name: str, where: str) -> None:
    latent: dict[str, Any] = {where: FUNCTIONS[name]}
    with pytest.raises(UnsupportedModelError, match=_REFUSED):
        rewritten(make_decoder(latent_decoder(Latent(**latent))), tmp_path)


@pytest.mark.parametrize("where", ["latents", "rotated", "keys", "values"])
def test_a_transpose_that_is_none(tmp_path: Path, where: str) -> None:
    latent: dict[str, Any] = {where: lambda g, tensor: g.node("Transpose", [tensor], perm=[0, 1, 2, 3])}
    model = make_decoder(latent_decoder(Latent(**latent)))
    (perm,) = (
        attribute.ints
        for node in model.graph.node
        for attribute in node.attribute
        if node.op_type == "Transpose" and list(attribute.ints) == [0, 1, 2, 3]
    )
    perm[:] = [0, 2, 0, 3]
    with pytest.raises(InvalidModelError, match=r"has the perm \[0, 2, 0, 3\], which is none"):
        rewritten(model, tmp_path)


def _shown(which: int) -> Any:
    def after(g: Build, x: str) -> str:
        computed = g.node("MatMul", [g.presents[which], g.weight(g.decoder.size, 3)])
        g.node("ReduceSum", [computed], "debug", keepdims=0)
        g.output("debug", 1, [])
        return x

    return after


@pytest.mark.parametrize("which", [0, 1])
def test_rows_that_something_else_is_computed_from_are_refused(tmp_path: Path, which: int) -> None:
    with pytest.raises(UnsupportedModelError, match="reads the cache .* is no attention"):
        rewritten(make_decoder(latent_decoder(Latent(), after=_shown(which))), tmp_path)


def _twice(g: Build, tensor: str) -> str:
    """Some of it written once more."""
    return written(g, tensor, g.node("Slice", [tensor, *map(g.constant, ([0], [2], [3]))]), 1, 3)


def _added(g: Build, tensor: str) -> str:
    return written(g, tensor, g.node("Slice", [tensor, *map(g.constant, ([0], [2], [3]))]), 1, 3, "add")


def _rounded(g: Build, tensor: str) -> str:
    """All of it, after it was rounded: nothing is joined across a Cast."""
    half = g.node("Cast", [tensor], to=onnx.TensorProto.FLOAT16)
    again = g.node("Cast", [half], to=onnx.TensorProto.FLOAT)
    return written(g, again, g.node("Slice", [tensor, *map(g.constant, ([0], [2], [3]))]), 1, 3)


@pytest.mark.few(2)
@pytest.mark.parametrize("change", [_twice, _added, _rounded])
def test_rows_are_written_into_what_is_made_of_them(tmp_path: Path, change: Any) -> None:
    check_decode(make_decoder(latent_decoder(Latent(join="scatter", keys=change))), tmp_path)


def test_zeros_that_are_left_are_no_concatenation(tmp_path: Path) -> None:
    class Gap(Latent):
        def _joined(self, g: Build, plain: str, spread: str) -> str:
            whole = super()._joined(g, plain, spread)
            for node in g.nodes:
                if node.op_type == "ConstantOfShape":
                    zeros = node.output[0]
            return written(g, zeros, g.node("Slice", [whole, *map(g.constant, ([0], [7], [3]))]), 1, 8)

    with pytest.raises(UnsupportedModelError, match="ScatterND .* takes .*, which is no constant"):
        rewritten(make_decoder(latent_decoder(Gap(join="scatter"))), tmp_path)

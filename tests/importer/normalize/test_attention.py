"""Decomposed attention over Concat caches: every way to write it against its canonical and its rewritten form."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from concat_decode import CAPACITY, Decode, check_decode, normalized, rewritten
from concat_graphs import Build, Decoder, _attend, make_decoder
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper

from trt_kvcache import PlanOptions, plan_model
from trt_kvcache.errors import UnsupportedModelError

VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "query scaled": {"scale": "q"},
    "keys scaled": {"scale": "k"},
    "both scaled": {"scale": "both", "by": "Div"},
    "scores divided": {"by": "Div"},
    "not scaled": {"scale": "none"},
    "capped": {"softcap": 5.0},
    "capped, scaled keys, upcast": {"softcap": 5.0, "scale": "k", "dtype": np.float16, "upcast": True},
    "Where": {"apply": "where"},
    "Where the other way round": {"apply": "hide"},
    "guard against NaN": {"guard": True},
    "guard that asks the weights in another type": {"weights": lambda g, t: _guarded(g, t), "softcap": 5.0},
    "the largest score taken off": {"masked": lambda g, s: _without_largest(g, s)},
    "float16": {"dtype": np.float16},
    "float16, scores in float32": {"dtype": np.float16, "upcast": True, "guard": True},
    "Tile": {"repeat": "tile"},
    "Gather": {"repeat": "gather"},
    "as many heads": {"kv_heads": 4},
    "one head, broadcast": {"kv_heads": 1, "repeat": "none"},
    "one head, expanded": {"kv_heads": 1},
    "[B, S, N, D]": {"layout": "bsnd"},
    "[B, S, N * D]": {"layout": "flat"},
    "[B, S, N, D], positions from the past": {"layout": "bsnd", "positions": "past"},
    "two layers": {"layers": 2},
    "embedded tokens": {"embedded": True},
    "logits of the last token": {"last": True},
    "fixed batch": {"batch": 2, "positions": "past"},
    "batch of one": {"batch": 1, "mask": "padding", "positions": "padding"},
    "one token at a time": {"sequence": 1},
    "four tokens at a time": {"sequence": 4, "positions": "past"},
    "no pattern in names": {"names": ("past_x{layer}{kind}", "y{layer}{kind}")},
}


def _guarded(g: Build, weights: str) -> str:
    """As ONNX Runtime's optimizer leaves PyTorch's guard in float16."""
    asked = g.node("IsNaN", [g.node("Cast", [weights], to=TensorProto.FLOAT16)])
    return g.node("Where", [asked, g.number(0.0), weights])


def _without_largest(g: Build, scores: str) -> str:
    return g.node("Sub", [scores, g.node("ReduceMax", [scores, g.constant([-1])], keepdims=1)])


@pytest.mark.few(2)
@pytest.mark.parametrize("name", VARIANTS)
def test_decode(tmp_path: Path, name: str) -> None:
    decoder = Decoder(**VARIANTS[name])
    model = make_decoder(decoder)
    tolerance = 1e-4 if decoder.dtype is np.float32 else 2e-2
    result = check_decode(model, tmp_path, tolerance)
    assert {cache.idiom for cache in result.plan.caches} == {"Concat"}
    assert len(result.plan.attention) == decoder.layers
    if decoder.dtype is np.float32:
        Decode(model, normalized(model), seed=1).check()


@pytest.mark.slow
@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(
    decoder=st.builds(
        Decoder,
        kv_heads=st.sampled_from([1, 2, 4]),
        layers=st.sampled_from([1, 2]),
        scale=st.sampled_from(["scores", "q", "k", "both", "none"]),
        by=st.sampled_from(["Mul", "Div"]),
        softcap=st.sampled_from([0.0, 3.0]),
        mask=st.sampled_from(["past", "padding", "positions", "buffer", "own"]),
        apply=st.sampled_from(["add", "where", "hide"]),
        window=st.sampled_from([0, 1, 5]),
        upcast=st.booleans(),
        guard=st.booleans(),
        repeat=st.sampled_from(["expand", "tile", "gather"]),
        layout=st.sampled_from(["bnsd", "bsnd", "flat"]),
        positions=st.sampled_from(["input", "past", "padding", "present", "none"]),
        embedded=st.booleans(),
        last=st.booleans(),
    )
)
def test_any_combination(tmp_path: Path, decoder: Decoder) -> None:
    check_decode(make_decoder(decoder), tmp_path)


@pytest.mark.parametrize(("scale", "factor"), [("scores", 0.5), ("k", 0.5), ("both", 0.5**0.5), ("q", 1), ("none", 1)])
def test_factors_behind_the_query_become_the_scale(scale: str, factor: float) -> None:
    (node,) = [n for n in normalized(make_decoder(Decoder(scale=scale))).graph.node if n.op_type == "Attention"]
    assert {a.name: a.f for a in node.attribute}["scale"] == pytest.approx(factor)


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_heads_are_not_repeated_any_more(kv_heads: int) -> None:
    nodes = normalized(make_decoder(Decoder(kv_heads=kv_heads))).graph.node
    (node,) = [n for n in nodes if n.op_type == "Attention"]
    assert node.input[1:3] == ["present.0.key", "present.0.value"]
    assert not {"Expand", "Softmax", "Where"} & {n.op_type for n in nodes}


def _log_of_length(g: Build, tensor: str) -> str:
    """Times log(P + S + 2)."""
    total = g.node("Cast", [g.node("Add", [g.all, g.constant(2)])], to=1)
    return g.node("Mul", [tensor, g.node("Log", [total])])


def _times(factor: float) -> Any:
    return lambda g, tensor: g.node("Mul", [tensor, g.number(factor)])


def _guard_empty_rows(g: Build, query: str, keys: str, values: str, *, fewer: str) -> str:
    """Zeros for queries that see `fewer` keys than one."""
    output = _attend(g, query, keys, values)
    visible = "mask" if g.decoder.mask == "own" else g.to_scores(g.causal())
    seen = g.node("ReduceSum", [g.node("Cast", [visible], to=TensorProto.FLOAT), g.constant([-1])], keepdims=1)
    return g.node("Where", [g.node(fewer, [seen, g.number(1.0)]), g.number(0.0), output])


@pytest.mark.parametrize("mask", ["past", "own"])
def test_a_guard_against_empty_rows_goes(tmp_path: Path, mask: str) -> None:
    model = make_decoder(Decoder(mask=mask, attend=partial(_guard_empty_rows, fewer="Less")))
    check_decode(model, tmp_path)
    assert "Where" not in {n.op_type for n in normalized(model).graph.node}


@pytest.mark.parametrize("mask", ["past", "own"])
def test_a_guard_that_hides_the_first_token_is_refused(tmp_path: Path, mask: str) -> None:
    """``<= 1`` is no ``< 1``: a query that sees one key gets zeros."""
    model = make_decoder(Decoder(mask=mask, attend=partial(_guard_empty_rows, fewer="LessOrEqual")))
    with pytest.raises(UnsupportedModelError, match="computes something else"):
        rewritten(model, tmp_path)


def _last_rows(count: int) -> Any:
    return lambda g, t: g.node("Slice", [t, *(g.constant([n]) for n in (-count, 2**31, 2))])


def _twice(g: Build, tensor: str) -> str:
    """Heads 0 1 0 1, where grouped-query attention has 0 0 1 1."""
    return g.node("Tile", [tensor, g.constant([1, 2, 1, 1])])


def _integers(g: Build, tensor: str) -> str:
    return g.node("Cast", [g.node("Cast", [tensor], to=TensorProto.INT32)], to=TensorProto.FLOAT)


def _chosen(g: Build, scores: str) -> str:
    """As torch.cond between scores and softmax is exported."""
    branches = [
        helper.make_graph([helper.make_node(op, [scores], [f"{scores}_{op}"])], op, [], [value])
        for op in ("Neg", "Identity")
        for value in [helper.make_tensor_value_info(f"{scores}_{op}", TensorProto.FLOAT, None)]
    ]
    choice = g.node("Greater", [g.node("ReduceMax", ["input_ids"], keepdims=0), g.constant(3)])
    return g.node("If", [choice], then_branch=branches[0], else_branch=branches[1])


OTHER_HEADS = "heads of keys and . of values, and some are computed from a cache; supported are as many of both"
ELSE = "computes something else"
NO_ATTENTION = "reads the cache 'past_key_values.0.key' and is no attention"
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "keys of more heads, beside values [B, S, N, D]": (
        {"keys": lambda g, t: g.node("Mul", [t, g.constant(range(4), np.float32)]), "layout": "bsnd"},
        OTHER_HEADS,
    ),
    "a choice between branches": (
        {"scores": _chosen},
        NO_ATTENTION,
    ),
    "keys grow with the text": ({"keys": _log_of_length}, NO_ATTENTION),
    "scores grow with the text": ({"scores": _log_of_length}, ELSE),
    "values grow with the text": ({"values": _log_of_length}, "do not go to one MatMul with a cache of values"),
    "values scaled": ({"values": _times(2)}, r"the values of .* are scaled by 2\.0"),
    "scores negated": ({"scores": _times(-1)}, "scales its scores by -0.5 and caps them at 0"),
    "scores cut to integers": ({"scores": _integers}, ELSE),
    "keys negated": ({"keys": _times(-1)}, "scales its scores by -0.5 and caps them at 0"),
    "keys times 0": ({"keys": _times(0)}, "scales its scores by 0 .* supported are factors above 0"),
    "temperature that lifts the mask": (
        {"masked": _times(3e-4), "lowest": -1e4},
        "adds numbers other than 0 and the lowest",
    ),
    "two caps": ({"softcap": 3.0, "scores": lambda g, t: g.node("Tanh", [t])}, ELSE),
    "cap behind the mask": ({"masked": lambda g, t: g.node("Tanh", [t])}, "adds numbers other than 0 and the lowest"),
    "Relu": ({"scores": lambda g, t: g.node("Relu", [t])}, ELSE),
    "heads reversed": (
        {"keys": lambda g, t: g.node("Gather", [t, g.constant([3, 2, 1, 0])], axis=1)},
        "with its heads repeated and transposed",
    ),
    "last 6 rows": (
        {"keys": _last_rows(6), "values": _last_rows(6), "mask": "none"},
        r"is not cache .* \(found shape \[2, 4, 6, 4\]",
    ),
    "last 16 rows": (
        {"keys": _last_rows(16), "values": _last_rows(16), "mask": "none"},
        "the last query sees 16 of 20 keys",
    ),
    "last 16 rows, one token at a time": (
        {"keys": _last_rows(16), "values": _last_rows(16), "mask": "none", "sequence": 1},
        "the last query sees 16 of 20 keys",
    ),
}


@pytest.mark.few(16)
@pytest.mark.parametrize("name", REFUSED)
def test_what_only_looks_like_attention_is_refused(tmp_path: Path, name: str) -> None:
    changes, words = REFUSED[name]
    with pytest.raises(UnsupportedModelError, match=words):
        rewritten(make_decoder(Decoder(**changes)), tmp_path)


MORE_HEADS: dict[str, dict[str, Any]] = {
    "keys cut to integers": {"keys": _integers},
    "values cut to integers": {"values": _integers},
    "values in turn": {
        "repeat": "none",
        "keys": lambda g, t: g.node("Gather", [t, g.constant([0, 0, 1, 1])], axis=1),
        "values": _twice,
    },
    "norm over the keys": {"keys": lambda g, t: g.node("LpNormalization", [t], axis=-1)},
}


@pytest.mark.parametrize("name", MORE_HEADS)
def test_keys_computed_after_their_heads_are_repeated_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(UnsupportedModelError, match=OTHER_HEADS):
        rewritten(make_decoder(Decoder(**MORE_HEADS[name])), tmp_path)


@pytest.mark.parametrize("mask", ["past", "none"])
def test_tanh_alone_caps_at_one(tmp_path: Path, mask: str) -> None:
    model = make_decoder(Decoder(mask=mask, positions="none", scores=lambda g, t: g.node("Tanh", [t])))
    check_decode(model, tmp_path)
    (node,) = [n for n in normalized(model).graph.node if n.op_type == "Attention"]
    assert {a.name: a.f for a in node.attribute if a.name == "softcap"} == {"softcap": 1.0}


def test_a_floor_below_all_scores_says_nothing(tmp_path: Path) -> None:
    check_decode(make_decoder(Decoder(scores=lambda g, t: g.node("Max", [t, g.number(-1e4)]))), tmp_path)


def _repeated_by_batch(g: Build, tensor: str) -> str:
    """One sequence has its heads one after the other twice, two have each of them twice."""
    axis = g.node("Unsqueeze", [g.size_of(g.tokens, 0), g.constant([0])])
    sizes = [g.node("Unsqueeze", [n, g.constant([0])]) for n in (g.size_of(g.tokens, 0), g.all)]
    shape = g.node("Concat", [sizes[0], g.constant([2, 2]), sizes[1], g.constant([4])], axis=0)
    spread = g.node("Expand", [g.node("Unsqueeze", [tensor, axis]), shape])
    return g.node("Reshape", [spread, g.constant([0, 4, -1, 4])])


@pytest.mark.parametrize("where", ["keys", "values"])
def test_heads_in_an_order_of_the_batch_are_refused(tmp_path: Path, where: str) -> None:
    repeats = dict.fromkeys(("keys", "values"), lambda g, t: g.node("Gather", [t, g.constant([0, 0, 1, 1])], axis=1))
    decoder: dict[str, Any] = {"repeat": "none", **repeats, where: _repeated_by_batch}
    with pytest.raises(UnsupportedModelError, match="computes something else|could not be compared"):
        rewritten(make_decoder(Decoder(**decoder)), tmp_path)


def test_more_repeats_than_axes_are_refused_by_name(tmp_path: Path) -> None:
    """As paddle2onnx 2.1 writes repeat_interleave of an axis that it does not know."""
    model = make_decoder(Decoder(layers=2))
    (reader,) = [n for n in model.graph.node if n.op_type == "Unsqueeze" and n.input[0] == "present.0.key"]
    for name, value in (("one", [1]), ("two", [2])):
        model.graph.initializer.append(helper.make_tensor(name, TensorProto.INT64, [1], value))
    added = [
        ("Shape", [reader.input[0]], "sizes"),
        ("Gather", ["sizes", "one"], "heads"),
        ("Expand", ["two", "heads"], "twos"),
        ("Concat", ["one", "twos", "one", "one"], "times"),
        ("Tile", [reader.input[0], "times"], "tiled"),
    ]
    for op, inputs, output in added:
        model.graph.node.append(
            helper.make_node(op, inputs, [output], output, **({"axis": 0} if op == "Concat" else {}))
        )
    reader.input[0] = "tiled"
    path = tmp_path / "model.onnx"
    path.write_bytes(model.SerializeToString())
    with pytest.raises(UnsupportedModelError, match="Tile 'tiled' combines"):
        plan_model(path, PlanOptions(capacity=CAPACITY))

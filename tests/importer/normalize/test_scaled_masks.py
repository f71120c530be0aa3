"""Scores that are scaled behind their mask: the same attention where the mask still hides, refused where it may not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from concat_decode import check_decode, normalized, rewritten
from concat_graphs import Build, Decoder, make_decoder
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from merged_graphs import Merged

from trt_kvcache.errors import UnsupportedModelError


def _times(factor: float, by: str = "Mul") -> Any:
    return lambda g, t: g.node(by, [t, g.number(factor if by == "Mul" else 1 / factor)])


LOWEST = float(np.finfo(np.float32).min)
CODEGEN: dict[str, Any] = {"scale": "none", "masked": _times(0.5, "Div"), "lowest": LOWEST}


@pytest.mark.slow
@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(
    scale=st.sampled_from(["scores", "q", "k", "none"]),
    mask=st.sampled_from(["past", "padding", "positions", "buffer", "own"]),
    apply=st.sampled_from(["add", "where", "hide"]),
    window=st.sampled_from([0, 5]),
    masked=st.builds(_times, st.sampled_from([0.25, 0.5, 1.0, 2.0]), st.sampled_from(["Mul", "Div"])),
    lowest=st.sampled_from([LOWEST, float(np.finfo(np.float16).min), -np.inf]),
)
def test_any_combination(tmp_path: Path, **choices: Any) -> None:
    check_decode(make_decoder(Decoder(**choices)), tmp_path)


@pytest.mark.parametrize("apply", ["add", "where", "hide"])
def test_the_factor_is_part_of_the_scale(apply: str) -> None:
    model = make_decoder(Decoder(**{**CODEGEN, "scale": "scores"}, apply=apply))
    (node,) = [n for n in normalized(model).graph.node if n.op_type == "Attention"]
    assert {a.name: a.f for a in node.attribute}["scale"] == pytest.approx(0.25)


OTHERS: dict[str, dict[str, Any]] = {
    "half precision, heads of 256": {"dtype": np.float16, "masked": _times(1 / 16), "size": 4},
    "scaled twice": {"masked": lambda g, s: _times(0.5)(g, _times(0.5, "Div")(g, s))},
    "a floor as well": {"masked": lambda g, s: _times(0.5)(g, g.node("Max", [s, g.number(-1e5)]))},
    "masked again": {"masked": lambda g, s: g.node("Add", [_times(0.5)(g, s), _zeros_and_low(g, -1e4)])},
    "over [B*H, S, T]": {"kv_heads": 4, "attend": Merged("none", scale="none"), "scores": _times(0.5)},
}


def _zeros_and_low(g: Build, lowest: float) -> str:
    return g.node("Where", [g.to_scores(g.causal()), g.number(0.0), g.number(lowest)])


@pytest.mark.parametrize("name", OTHERS)
def test_others(tmp_path: Path, name: str) -> None:
    decoder = Decoder(**{**CODEGEN, "lowest": float(np.finfo(np.float16).min), **OTHERS[name]})
    check_decode(make_decoder(decoder), tmp_path, 1e-4 if decoder.dtype is np.float32 else 2e-2)


def _late(g: Build, scores: str) -> str:
    """A second mask, which is too high to be scaled for texts of 9 and more, then a factor."""
    total = g.node("Cast", [g.node("Less", [g.all, g.constant(9)])], to=1)
    high, far = g.node("Mul", [total, g.number(-1e6)]), g.number(-5e3)
    mask = g.node("Where", [g.to_scores(g.causal()), g.number(0.0), g.node("Add", [high, far])])
    return _times(0.5)(g, g.node("Add", [scores, mask]))


MASKED = "scales scores that are masked already"
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "-1e4 over 4": ({"lowest": -1e4, "masked": _times(0.25)}, f"{MASKED}, by 0.25, and .* is -10000; supported are"),
    "-1e4 over 4, Where": ({"lowest": -1e4, "masked": _times(0.25), "apply": "where"}, f"{MASKED}, by 0.25"),
    "-1e4 over 2, twice": ({"lowest": -1e4, "masked": lambda g, s: _times(0.5)(g, _times(0.5)(g, s))}, "by 0.25, and"),
    "a second mask": (
        {"masked": lambda g, s: _times(0.25)(g, g.node("Add", [s, _zeros_and_low(g, -1e4)]))},
        f"{MASKED}, by 0.25, and .* is -10000",
    ),
    "a floor that comes up": ({"masked": lambda g, s: _times(0.25)(g, g.node("Max", [s, g.number(-1e4)]))}, MASKED),
    "a mask that is high for long texts": ({"masked": _late, "mask": "none"}, f"{MASKED}, by 0.5, and .* is -5000"),
    "a bias": (
        {"masked": lambda g, s: _times(0.5)(g, g.node("Add", [s, g.number(-3.0)]))},
        "behind a bias, .* such as -3",
    ),
    "negative": ({"masked": _times(-0.5)}, "by -0.5; supported are factors above 0"),
    "own numbers": ({"mask": "own", "own_type": np.float32}, "own mask 'mask', and scales it by 0.5"),
    "capped behind": ({"masked": lambda g, s: g.node("Tanh", [_times(0.5)(g, s)])}, "caps scores that are masked"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_may_be_seen_is_refused(tmp_path: Path, name: str) -> None:
    changes, words = REFUSED[name]
    with pytest.raises(UnsupportedModelError, match=words):
        rewritten(make_decoder(Decoder(**{**CODEGEN, **changes})), tmp_path)


@pytest.mark.few(3)
@pytest.mark.parametrize("apply", ["add", "where", "hide"])
@pytest.mark.parametrize("scale", ["scores", "q", "k"])
def test_a_mask_has_to_be_lower_than_scores_that_are_made_larger(tmp_path: Path, scale: str, apply: str) -> None:
    """Queries, keys or scores are halved, and scores are then 40 times as large."""
    loud: dict[str, Any] = {"scale": scale, "apply": apply, "scores": _times(40.0)}
    check_decode(make_decoder(Decoder(**loud, lowest=-2e4)), tmp_path)
    with pytest.raises(UnsupportedModelError, match="scales its scores by 20, and .* is -10000; supported .* -20000:"):
        rewritten(make_decoder(Decoder(**loud, lowest=-1e4)), tmp_path)

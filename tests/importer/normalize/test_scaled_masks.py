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
    "masked again, then scaled": {"masked": lambda g, s: _times(0.25)(g, g.node("Add", [s, _zeros_and_low(g, -1e4)]))},
    "over [B*H, S, T]": {"kv_heads": 4, "attend": Merged("none", scale="none"), "scores": _times(0.5)},
    "-1e4 over 4": {"lowest": -1e4, "masked": _times(0.25)},
    "-1e4 over 4, Where": {"lowest": -1e4, "masked": _times(0.25), "apply": "where"},
    "masked again, by less": {"masked": lambda g, s: _times(0.05)(g, g.node("Add", [s, _zeros_and_low(g, -1e4)]))},
    "one number for all": {"masked": lambda g, s: _times(0.5)(g, g.node("Add", [s, g.number(-3.0)]))},
    "-1e4 beside larger scores": {"lowest": -1e4, "scores": _times(40.0), "masked": lambda g, s: s},
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
    high, far = g.node("Mul", [total, g.number(-1e6)]), g.number(-1e3)
    mask = g.node("Where", [g.to_scores(g.causal()), g.number(0.0), g.node("Add", [high, far])])
    return _times(0.5)(g, g.node("Add", [scores, mask]))


ADDED = "adds numbers other than 0 and the lowest"
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "-1e4 over 20": ({"lowest": -1e4, "masked": _times(0.05)}, ADDED),
    "-1e4 over 20, Where": ({"lowest": -1e4, "masked": _times(0.05), "apply": "where"}, ADDED),
    "-1e4 over 20, in two steps": (
        {"lowest": -1e4, "masked": lambda g, s: _times(0.1)(g, _times(0.5)(g, s)), "apply": "where"},
        ADDED,
    ),
    "a floor that comes up": ({"masked": lambda g, s: _times(0.05)(g, g.node("Max", [s, g.number(-1e4)]))}, ADDED),
    "a mask that is high for long texts": ({"masked": _late, "mask": "none"}, ADDED),
    "negative": ({"masked": _times(-0.5)}, "none of the supported ones"),
    "own numbers": ({"mask": "own", "own_type": np.float32}, "computes something else"),
    "capped after": ({"masked": lambda g, s: g.node("Tanh", [_times(0.5)(g, s)])}, ADDED),
    "scores as large as the mask": (
        {"lowest": -1e4, "scores": _times(1e5), "masked": lambda g, s: s},
        "computes something else",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_may_be_seen_is_refused(tmp_path: Path, name: str) -> None:
    changes, words = REFUSED[name]
    with pytest.raises(UnsupportedModelError, match=words):
        rewritten(make_decoder(Decoder(**{**CODEGEN, **changes})), tmp_path)

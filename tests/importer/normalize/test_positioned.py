"""Rotary factors made of positions in the graph: of the new tokens, and of all keys in every step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import onnx
import pytest
from concat_decode import check_decode, rewritten
from concat_graphs import Build, Decoder, make_decoder
from rope_graphs import ROWS, Rope

from trt_kvcache.errors import UnsupportedModelError

NEW: dict[str, dict[str, Any]] = {
    "slice": {},
    "negative bounds": {"form": "negative", "angles": "matmul"},
    "open bounds": {"form": "open", "angles": "einsum"},
    "gather": {"form": "gather"},
    "gather [1, S]": {"form": "gather 2d"},
    "range from P": {"form": "range"},
    "rows of a table": {"form": "table"},
    "positions of the caller": {"form": "position_ids"},
    "of two sequences, always": {"batch": 2},
    "of one token, always": {"form": "range", "sequence": 1},
}
EVERY: dict[str, dict[str, Any]] = {
    "slice": {},
    "rows of a table": {"form": "table"},
    "matmul": {"form": "negative", "angles": "matmul"},
}


def _model(**rope: Any) -> onnx.ModelProto:
    positions = "input" if rope.get("form") == "position_ids" else "none"
    settings = {key: rope.pop(key) for key in ("batch", "sequence") if key in rope}
    settings |= {"kv_heads": 4} if rope.get("keys") else {}
    return make_decoder(Decoder(positions=positions, attend=Rope(**rope), **settings))


@pytest.mark.few(4)
@pytest.mark.parametrize("rope", NEW.values(), ids=NEW.keys())
def test_new_tokens_have_their_own_positions(rope: dict[str, Any], tmp_path: Path) -> None:
    check_decode(_model(**rope), tmp_path)


@pytest.mark.parametrize("rope", EVERY.values(), ids=EVERY.keys())
def test_keys_may_be_rotated_behind_the_cache(rope: dict[str, Any], tmp_path: Path) -> None:
    result = check_decode(_model(**rope, keys=True), tmp_path)
    assert {c.route.value for c in result.plan.caches} == {"native"}


def _as_half(g: Build, positions: str) -> str:
    half = g.node("Cast", [positions], to=onnx.TensorProto.FLOAT16)
    return g.node("Cast", [half], to=onnx.TensorProto.INT64)


@pytest.mark.parametrize("capacity", [48, 2200])
def test_positions_in_float16_are_rounded_as_in_the_original(capacity: int, tmp_path: Path) -> None:
    """From 2048 on float16 holds every other one; the comparison runs steps at the end of the capacity."""
    model = rewritten(_model(every=_as_half), tmp_path, capacity=capacity).model
    assert any(n.op_type == "Cast" and n.attribute[0].i == onnx.TensorProto.FLOAT16 for n in model.graph.node)


def _plus(number: str, tensor: str, g: Build) -> str:
    """One more where a number is 7."""
    odd = g.node("Cast", [g.node("Equal", [number, g.constant(7)])], to=onnx.TensorProto.INT64)
    return g.node("Add", [tensor, odd])


def _reversed(g: Build, positions: str) -> str:
    return g.node("Sub", [g.node("Sub", [g.all, g.constant(1)]), positions])


def _from_the_end(g: Build, positions: str) -> str:
    return g.node("Sub", [positions, g.all])


ODD: dict[str, dict[str, Any]] = {
    "other positions after 7 tokens": {"form": "range", "first": lambda g, first: _plus(g.past, first, g)},
    "other rows after 7 tokens": {"form": "table", "first": lambda g, first: _plus(g.past, first, g)},
    "keys in reverse": {"keys": True, "every": _reversed},
    "keys counted from the end": {"keys": True, "every": _from_the_end},
    "keys that move at a length of 20": {"keys": True, "every": lambda g, positions: _moved(g, positions)},
    "one position back, of the last token for the first": {
        "form": "position_ids", "given": lambda g, ids: g.node("Sub", [ids, g.constant(1)]),
    },
    "positions from the end of the text": {"form": "position_ids", "given": lambda g, ids: g.node("Neg", [ids])},
}  # fmt: skip


def _moved(g: Build, positions: str) -> str:
    long = g.node("Cast", [g.node("Equal", [g.all, g.constant(20)])], to=onnx.TensorProto.INT64)
    return g.node("Add", [positions, long])


@pytest.mark.parametrize("rope", ODD.values(), ids=ODD.keys())
def test_other_positions_are_refused(rope: dict[str, Any], tmp_path: Path) -> None:
    said = "computes something else than what was recognized|from the length of the cache|is no attention"
    with pytest.raises(UnsupportedModelError, match=said):
        rewritten(_model(**rope), tmp_path)


def test_a_table_ends_before_the_capacity(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="from the length of the cache"):
        rewritten(_model(form="table"), tmp_path, capacity=ROWS + 1)


def test_a_table_for_all_keys_ends_before_the_capacity(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="reads the cache .* is no attention"):
        rewritten(_model(form="table", keys=True), tmp_path, capacity=ROWS + 1)

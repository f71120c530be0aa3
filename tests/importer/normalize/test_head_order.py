"""Query heads that take turns at the heads of keys and values, with all that may differ from head to head."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from concat_decode import check_decode, rewritten
from concat_graphs import Build, Decoder, make_decoder
from onnx import TensorProto
from slope_graphs import added, times_slopes

from trt_kvcache import UnsupportedModelError, verify_model
from trt_kvcache.importer.plan import PlanOptions

HEADS, KV_HEADS = 6, 3
TURNS = [0, 1, 2, 0, 1, 2]


def taking(g: Build, tensor: str, heads: Any = TURNS) -> str:
    return g.node("Gather", [tensor, g.constant(np.asarray(heads))], axis=1)


def tiled(g: Build, tensor: str) -> str:
    return g.node("Tile", [tensor, g.constant([1, HEADS // KV_HEADS, 1, 1])])


def spread(g: Build, tensor: str) -> str:
    """[B, 1, N, T, D] -> [B, G, N, T, D] -> [B, G * N, T, D]."""
    apart = g.node("Unsqueeze", [tensor, g.constant([1])])
    groups = g.constant([1, HEADS // KV_HEADS, 1, 1, 1])
    whole = g.node("Expand", [apart, groups])
    return g.node("Reshape", [whole, g.constant([0, HEADS, -1, g.decoder.size])])


def slopes(g: Build) -> str:
    distances = g.to_scores(g.node("Sub", [g.key_rows, g.query_rows]))
    return times_slopes(g, distances, np.linspace(0.03, 0.7, HEADS))


def bias(g: Build, scores: str) -> str:
    """T5: a number per head and distance, out of a table."""
    far = g.node("Clip", [g.node("Sub", [g.query_rows, g.key_rows]), g.constant(0), g.constant(7)])
    found = g.node("Gather", [g.weight(8, HEADS), far], axis=0)
    turned = g.node("Transpose", [found], perm=[2, 0, 1])
    return g.node("Add", [scores, g.node("Unsqueeze", [turned, g.constant([0])])])


taken_from_one = partial(taking, heads=[0] * HEADS)


def turns(**settings: Any) -> Decoder:
    given = {"heads": HEADS, "kv_heads": KV_HEADS, "repeat": "none", "keys": tiled, "values": tiled}
    return Decoder(**given | settings)


VARIANTS: dict[str, dict[str, Any]] = {
    "spread": {"keys": spread, "values": spread},
    "taken": {"keys": taking, "values": taking},
    "repeated in two ways": {"values": spread},
    "sinks": {"sinks": "weight"},
    "the same sink": {"sinks": "zero"},
    "slopes": {"scores": added(slopes)},
    "a bias": {"scores": bias},
    "a window, capped": {"window": 5, "softcap": 3.0},
    "float16, scores in float32": {"dtype": np.float16, "upcast": True, "layout": "bsnd"},
    "padding, two layers": {"mask": "padding", "positions": "padding", "layers": 2},
    "one key head": {"kv_heads": 1, "keys": taken_from_one, "values": taken_from_one},
}


@pytest.mark.few(3)
@pytest.mark.parametrize("name", VARIANTS)
def test_decode(tmp_path: Path, name: str) -> None:
    decoder = turns(**VARIANTS[name])
    result = check_decode(make_decoder(decoder), tmp_path, 1e-4 if decoder.dtype is np.float32 else 2e-2)
    assert {(a.query_heads, a.kv_heads) for a in result.plan.attention} == {(HEADS, decoder.kv_heads)}
    onnx.checker.check_model(result.model, full_check=True)


def test_it_is_verified(tmp_path: Path) -> None:
    onnx.save(make_decoder(turns()), tmp_path / "model.onnx")
    assert verify_model(tmp_path / "model.onnx", PlanOptions(capacity=24)).passed


@pytest.mark.parametrize("heads", [[0, 1, 2, 2, 1, 0], [1, 2, 0, 1, 2, 0], [0, 1, 0, 1, 2, 2]])
def test_other_orders_are_refused(tmp_path: Path, heads: list[int]) -> None:
    chosen = partial(taking, heads=heads)
    with pytest.raises(UnsupportedModelError, match="is not cache .* with its heads repeated"):
        rewritten(make_decoder(turns(keys=chosen, values=chosen)), tmp_path)


def test_values_in_another_order_are_refused(tmp_path: Path) -> None:
    grouped = partial(taking, heads=np.arange(HEADS) // (HEADS // KV_HEADS))
    with pytest.raises(UnsupportedModelError, match="6 heads of keys and 3 of values, and some are computed"):
        rewritten(make_decoder(turns(values=grouped)), tmp_path)


def test_a_mask_for_each_head_is_refused(tmp_path: Path) -> None:
    def masked(g: Build, scores: str) -> str:
        mask = g.input("mask", TensorProto.BOOL, ["batch", HEADS, "sequence", "total"])
        return g.node("Where", [mask, scores, g.number(-65504.0)])

    with pytest.raises(UnsupportedModelError, match=r"take turns at the 3 heads of .* has 6 heads"):
        rewritten(make_decoder(turns(mask="none", masked=masked)), tmp_path)

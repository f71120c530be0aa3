"""Scores of past and new tokens that are computed apart become those over both; what only looks so is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from apart_graphs import apart, capped, in_halves, in_one, repeated, scaled_by
from concat_decode import Decode, check_decode, rewritten
from concat_graphs import make_decoder
from new_row_graphs import as_joined, give_new_rows, lay_caches

from trt_kvcache import UnsupportedModelError, verify_model
from trt_kvcache.importer.plan import PlanOptions

VARIANTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "one mask": ({"layers": 2}, {}),
    "padding": ({"mask": "padding"}, {}),
    "a mask for each": ({}, {"mask": "parts", "scale": "parts"}),
    "a mask of new tokens": ({"repeat": "tile"}, {"mask": "new", "scale": "query"}),
    "by Where": ({"kv_heads": 4}, {"mask": "new where", "scale": "parts", "cut": "end"}),
    "Split": ({"kv_heads": 4}, {"cut": "split"}),
    "scaled keys, [B, S, N, D]": ({"layout": "bsnd"}, {"scale": "keys", "cut": "end"}),
    "[B, S, N * D]": ({"layout": "flat", "kv_heads": 4}, {"mask": "parts"}),
    "float16": ({"dtype": np.float16, "size": 8}, {"upcast": True}),
    "heads apart": ({"repeat": "none"}, {"heads": True}),
    "heads apart, a mask for each": ({"repeat": "none", "layers": 2}, {"heads": True, "mask": "parts", "cut": "split"}),
    "capped, one mask": ({}, {"raw": capped, "scale": "parts"}),
    "capped, a mask for each": ({}, {"raw": capped, "scale": "query", "mask": "parts"}),
    "capped, a mask of new tokens": ({}, {"raw": capped, "scale": "none", "mask": "new where"}),
    "Identity in one": (
        {},
        {"raw": in_one("Identity", 1), "keys": in_one("Identity", 0), "weights": in_one("Identity", 1)},
    ),
    "scale first in one": ({}, {"scale": "parts", "raw": in_one("swap", 1)}),
    "mask first in one": ({}, {"scale": "parts", "mask": "parts", "scores": in_one("swap", 0)}),
    "a window": ({"window": 5, "repeat": "gather"}, {}),
}


@pytest.mark.few(5)
@pytest.mark.parametrize("name", VARIANTS)
def test_they_become_one(tmp_path: Path, name: str) -> None:
    decoder = apart(VARIANTS[name][0], **VARIANTS[name][1])
    result = check_decode(make_decoder(decoder), tmp_path, 1e-4 if decoder.dtype is np.float32 else 2e-2)
    ops = [node.op_type for node in result.model.graph.node]
    assert (ops.count("TensorScatter"), len(result.plan.attention)) == (2 * decoder.layers, decoder.layers)
    onnx.checker.check_model(result.model, full_check=True)


@pytest.mark.parametrize("heads", [False, True])
def test_new_rows_returned(tmp_path: Path, heads: bool) -> None:
    """As exports for NPUs have it: keys transposed, and no Concat but that of the scores."""
    model = make_decoder(apart({"layers": 2, "repeat": "none" if heads else "expand"}, heads=heads, mask="parts"))
    model = give_new_rows(lay_caches(model, (0, 1, 3, 2), (0, 1, 2, 3)), as_joined)
    result = rewritten(model, tmp_path)
    assert [(a.query_heads, a.kv_heads) for a in result.plan.attention] == [(4, 2)] * 2
    assert verify_model(tmp_path / "model.onnx", PlanOptions(capacity=24)).passed


def test_sizes_of_what_is_repeated(tmp_path: Path) -> None:
    """As onnxsim leaves TorchScript's repeat_interleave; with no tokens in the cache, ONNX Runtime cannot run it."""
    plain = make_decoder(apart({"repeat": "tile", "batch": 1}))
    other = make_decoder(apart({"repeat": "none", "batch": 1}, keys=repeated, values=repeated))
    Decode(plain, rewritten(other, tmp_path).model).check()
    with pytest.raises(UnsupportedModelError, match="runs the original model in its first step, behind an empty cache"):
        verify_model(tmp_path / "model.onnx", PlanOptions(capacity=24))


def test_bounds_that_are_computed(tmp_path: Path) -> None:
    model = in_halves(make_decoder(apart({"layers": 2, "repeat": "tile", "layout": "flat"})))
    assert len(check_decode(model, tmp_path).plan.attention) == 2


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "another scale": ({"scores": scaled_by(0.5, 1)}, "joins scores of the past .* computed apart"),
    "another number of bounds": (
        {"scores": lambda g, t, i: g.node("Max", [t, *[g.constant(-6e4, g.decoder.dtype)] * (i + 1)])},
        "joins scores of the past",
    ),
    "a cap on one part": (
        {"raw": lambda g, t, i: capped(g, t, i) if i else t, "mask": "new"},
        "joins scores of the past .* computed apart",
    ),
    "other caps": (
        {"raw": lambda g, t, i: g.node("Mul", [g.node("Tanh", [t]), g.constant(5.0 + i, np.float32)])},
        "joins scores of the past .* computed apart",
    ),
    "other keys": ({"keys": scaled_by(0.5, 0)}, "joins scores of the past"),
    "other weights": ({"weights": scaled_by(0.5, 0)}, "joins scores of the past"),
    "other values": ({"values": scaled_by(0.5, 1)}, "joins scores of the past"),
    "new tokens that do not see themselves": ({"mask": "new", "visible": "Less"}, "mask"),
    "new tokens that see what follows": ({"mask": "new where", "visible": "GreaterOrEqual"}, "mask"),
    "subtracted": ({"add": "Sub"}, "joins scores of the past"),
    "new tokens first": ({"order": ((1, 0), (1, 0)), "mask": "none"}, "computed apart"),
    "weights in another order": ({"order": ((0, 1), (1, 0))}, "computed apart"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_differs_is_refused(tmp_path: Path, name: str) -> None:
    settings, why = REFUSED[name]
    with pytest.raises(UnsupportedModelError, match=why):
        rewritten(make_decoder(apart(**settings)), tmp_path)


def test_einsum(tmp_path: Path) -> None:
    model = make_decoder(apart({"repeat": "none", "kv_heads": 4}))
    for node in model.graph.node:
        if node.op_type == "MatMul" and not node.input[1].startswith("constant"):
            node.op_type = "Einsum"
            node.attribute.append(onnx.helper.make_attribute("equation", "bhsd,bhdt->bhst"))
    check_decode(model, tmp_path)

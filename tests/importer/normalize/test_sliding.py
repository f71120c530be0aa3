"""Windowed caches as circular buffers: the same logits as the model as exported, in fewer rows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import onnx
import pytest
from concat_decode import Decode
from concat_graphs import Build, Decoder, make_decoder
from graphs import Graph
from onnx import TensorProto

from trt_kvcache.errors import OptionError
from trt_kvcache.importer.normalize import Normalized, normalize
from trt_kvcache.importer.plan import PlanOptions, Sliding

LONG = 40  # tokens, several times around every ring here


def circular(model: onnx.ModelProto, chunk: int, capacity: int = LONG) -> Normalized:
    return normalize(model, {}, PlanOptions(capacity=capacity, sliding=Sliding.CIRCULAR, window_chunk=chunk))


def rows(model: onnx.ModelProto) -> dict[str, int]:
    """Length of each cache input."""
    axes = {n.input[0]: next(a.i for a in n.attribute if a.name == "axis") for n in model.graph.node
            if n.op_type == "TensorScatter"}  # fmt: skip
    return {v.name: v.type.tensor_type.shape.dim[axes[v.name]].dim_value for v in model.graph.input if v.name in axes}


@pytest.mark.few(8)
@pytest.mark.parametrize(("window", "chunk"), [(1, 1), (1, 4), (3, 4), (5, 1), (5, 5), (6, 2)])
@pytest.mark.parametrize("how", [{}, {"mask": "padding"}, {"layout": "bsnd"}, {"layout": "flat"}, {"layers": 2}])
def test_decode_around_the_ring(window: int, chunk: int, how: dict[str, Any]) -> None:
    model = make_decoder(Decoder(window=window, capacity=LONG, **how))
    result = circular(model, chunk).model
    assert set(rows(result).values()) == {window + chunk - 1}
    result.opset_import[0].version = 24  # ONNX Runtime has no Attention of opset 25; no window is left
    decode = Decode(model, result, LONG)
    for row, prompt in zip(decode.rows, (9, 4, 0), strict=True):
        for length in (*[chunk] * (prompt // chunk), prompt % chunk):
            if length:
                decode.check_step(length, row)
    for length in (1, chunk, 1, 1, chunk, max(1, chunk - 1), *[chunk] * 2):
        decode.check_step(length)


def test_what_it_saves_is_said() -> None:
    findings = circular(make_decoder(Decoder(window=5)), 4).findings
    assert findings is not None
    assert findings.longest == {"past_key_values.0.key": 4, "past_key_values.0.value": 4}
    assert findings.notes == (
        "2 caches hold a window instead of all tokens: 16 cache rows per sequence, not 80 (80 % saved); updates of at "
        "most 4 tokens (--window-chunk)",
    )


def test_a_ring_longer_than_the_capacity_stays_linear() -> None:
    result = circular(make_decoder(Decoder(window=5)), 36)
    assert set(rows(result.model).values()) <= {0, LONG}
    assert result.findings is not None
    words = "stay linear: a window of 5 and updates of up to 36 tokens (--window-chunk) need 40 rows"
    assert words in result.findings.notes[0]


def test_causal_attention_stays_linear() -> None:
    result = circular(make_decoder(Decoder()), 4)
    assert {a.s for n in result.model.graph.node for a in n.attribute if a.name == "mode"} == {b"linear"}
    assert result.findings is not None
    assert result.findings.notes == ("no cache became circular: no attention sees a window only",)


def test_layers_of_both_kinds() -> None:
    """Every other layer sees all, as Gemma's do."""

    def mask(g: Build) -> str:
        return g.to_scores(g.causal())

    def local(g: Build, scores: str) -> str:
        layer = sum(n.op_type == "Softmax" for n in g.nodes)
        if layer % 2:
            return scores
        far = g.node("LessOrEqual", [g.key_rows, g.node("Sub", [g.query_rows, g.constant(4)])])
        return g.node("Where", [g.to_scores(far), g.number(-1e4), scores])

    model = make_decoder(Decoder(layers=3, mask=mask, scores=local))
    result = circular(model, 3)
    lengths = rows(result.model)
    assert {name: n for name, n in lengths.items() if ".1." in name} == {
        "past_key_values.1.key": LONG, "past_key_values.1.value": LONG,
    }  # fmt: skip
    assert {n for name, n in lengths.items() if ".1." not in name} == {6}


@pytest.mark.parametrize("chunk", [0, -1])
def test_updates_have_tokens(chunk: int) -> None:
    with pytest.raises(OptionError, match="it must be at least 1 token"):
        circular(make_decoder(Decoder(window=5)), chunk)


def canonical(nonpad: bool, *, shown: bool = False, **attrs: int) -> onnx.ModelProto:
    """A model with TensorScatter caches and an Attention of opset 25; `shown`: its scores are an output."""
    g = Graph()
    query = g.input("query", TensorProto.FLOAT, ["B", 2, "S", 4])
    indices = g.input("write_indices", TensorProto.INT64, ["B"])
    presents = []
    for kind in ("key", "value"):
        past = g.input(f"{kind}_cache", TensorProto.FLOAT, ["B", 2, LONG, 4])
        new = g.input(f"new_{kind}", TensorProto.FLOAT, ["B", 2, "S", 4])
        presents.append(g.node("TensorScatter", [past, new, indices], f"updated_{kind}_cache", axis=2))
        g.output(presents[-1], TensorProto.FLOAT, ["B", 2, LONG, 4])
    lengths = ["", "", "", g.input("nonpad_kv_seqlen", TensorProto.INT64, ["B"])] if nonpad else []
    scores = ["", "", "scores"] if shown else []
    g.node("Attention", [query, *presents, *lengths], ["out", *scores], **attrs)
    g.output("out", TensorProto.FLOAT, ["B", 2, "S", 4])
    if scores:
        g.output("scores", TensorProto.FLOAT, ["B", 2, "S", LONG])
    return g.model(25)


def test_a_canonical_window_becomes_circular() -> None:
    result = circular(canonical(True, is_causal=1, left_window_size=4), 3)
    assert rows(result.model) == {"key_cache": 7, "value_cache": 7}


@pytest.mark.parametrize(
    ("nonpad", "attrs"),
    [
        (True, {"is_causal": 1}),
        (True, {"left_window_size": 4}),
        (False, {"is_causal": 1, "left_window_size": 4}),  # aligned to the first key, not to the last
        (True, {"is_causal": 1, "left_window_size": -1}),
    ],
)
def test_canonical_models_without_a_window_of_the_newest_tokens_stay(nonpad: bool, attrs: dict[str, int]) -> None:
    model = canonical(nonpad, **attrs)
    assert circular(model, 3).model is model


def test_windows_whose_scores_are_an_output_stay() -> None:
    model = canonical(True, shown=True, is_causal=1, left_window_size=4)
    assert circular(model, 3).model is model


def test_linear_leaves_a_canonical_model_as_it_is() -> None:
    model = canonical(True, is_causal=1, left_window_size=4)
    result = normalize(model, {}, replace(PlanOptions(), sliding=Sliding.LINEAR))
    assert result.model is model
    assert result.findings is None

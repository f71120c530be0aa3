"""Attention sinks: a logit per head beside the scores, against the model as exported, and what only looks like them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import harness
import numpy as np
import onnx
import pytest
from concat_decode import CAPACITY, GARBAGE, Decode, check_decode, rewritten, run
from concat_graphs import Build, Decoder, beside_sinks, make_decoder, sink_column, without_sinks
from graphs import Graph
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from onnx import TensorProto

from trt_kvcache import InvalidModelError, UnsupportedModelError, plan_model
from trt_kvcache.importer.plan import AttentionKind, Fallback, Sliding
from trt_kvcache.verify import verify_import

LONG = 40
VARIANTS: dict[str, dict[str, Any]] = {
    "learned": {"sinks": "weight"},
    "zero": {"sinks": "zero"},
    "as many heads": {"sinks": "weight", "kv_heads": 4},
    "one head": {"sinks": "weight", "kv_heads": 1, "repeat": "none"},
    "one query head": {"sinks": "weight", "heads": 1, "kv_heads": 1},
    "capped": {"sinks": "weight", "softcap": 3.0},
    "a window": {"sinks": "weight", "window": 5},
    "two layers": {"sinks": "weight", "layers": 2},
    "padding": {"sinks": "weight", "mask": "padding", "positions": "padding"},
    "the caller's own mask": {"sinks": "weight", "mask": "own"},
    "the caller's own mask, added": {"sinks": "weight", "mask": "own", "own_type": np.float32},
    "Where": {"sinks": "weight", "apply": "where"},
    "[B, S, N * D]": {"sinks": "weight", "layout": "flat"},
    "fixed batch": {"sinks": "weight", "batch": 2, "positions": "past"},
    "one token at a time": {"sinks": "zero", "sequence": 1},
    "float16": {"sinks": "weight", "dtype": np.float16},
    "float16, scores in float32": {"sinks": "weight", "dtype": np.float16, "upcast": True},
}


@pytest.mark.few(4)
@pytest.mark.parametrize("name", VARIANTS)
def test_decode(tmp_path: Path, name: str) -> None:
    decoder = Decoder(**VARIANTS[name])
    result = check_decode(make_decoder(decoder), tmp_path, 1e-4 if decoder.dtype is np.float32 else 2e-2)
    assert {(a.kind, a.reason) for a in result.plan.attention} == {(AttentionKind.LOWERED, "attention sinks")}
    assert {a.keys for a in result.plan.attention} == {"mask" if decoder.mask == "own" else "span"}
    onnx.checker.check_model(result.model, full_check=True)


@pytest.mark.slow
@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(
    decoder=st.builds(
        Decoder,
        kv_heads=st.sampled_from([1, 2, 4]),
        sinks=st.sampled_from(["weight", "zero"]),
        scale=st.sampled_from(["scores", "q", "k", "both", "none"]),
        softcap=st.sampled_from([0.0, 3.0]),
        mask=st.sampled_from(["past", "padding", "positions", "buffer", "own"]),
        apply=st.sampled_from(["add", "where", "hide"]),
        window=st.sampled_from([0, 1, 5]),
        upcast=st.booleans(),
        repeat=st.sampled_from(["expand", "tile", "gather"]),
        layout=st.sampled_from(["bnsd", "bsnd", "flat"]),
        positions=st.sampled_from(["input", "past", "padding", "none"]),
    )
)
def test_any_combination(tmp_path: Path, decoder: Decoder) -> None:
    check_decode(make_decoder(decoder), tmp_path)


def test_heads_are_not_repeated(tmp_path: Path) -> None:
    nodes = rewritten(make_decoder(Decoder(sinks="weight", kv_heads=1)), tmp_path).model.graph.node
    spread = [n.output[0] for n in nodes if n.op_type in ("Expand", "Tile", "Gather") and "trt_kvcache" in n.name]
    assert spread == ["trt_kvcache/sink_column"]


def test_queries_that_see_no_key_give_zero(tmp_path: Path) -> None:
    """All of their softmax goes to the sink, however low it is."""
    model = make_decoder(Decoder(sinks="weight", mask="own", positions="none", size=4))
    result = rewritten(model, tmp_path).model
    tokens = np.array([[3, 4]])
    mask = np.zeros((1, 1, 2, 2), bool)
    mask[..., 1, :] = True
    caches = {v.name: [d.dim_value for d in v.type.tensor_type.shape.dim] for v in result.graph.input}
    feeds: dict[str, Any] = {"input_ids": tokens, "mask": mask, "write_indices": np.zeros(1, np.int64)}
    feeds["logits_span"] = np.arange(2)
    feeds |= {n: np.full([1, *s[1:]], GARBAGE, np.float32) for n, s in caches.items() if "past" in n}
    got = run(result, {v.name: feeds[v.name] for v in result.graph.input})["logits"]
    grown = {n: np.zeros([1, s[1], 0, s[3]], np.float32) for n, s in caches.items() if "past" in n}
    before = run(model, {"input_ids": tokens, "mask": mask, **grown})["logits"]
    np.testing.assert_allclose(got[:, 1], before[:, 1], rtol=1e-4, atol=1e-4)
    weights = {t.name: onnx.numpy_helper.to_array(t) for t in model.graph.initializer}
    embedding = next(w for w in weights.values() if w.shape == (32, 16))
    head = next(w for w in weights.values() if w.shape == (16, 32))
    np.testing.assert_allclose(got[:, 0], embedding[tokens[:, 0]] @ head, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("window", "chunk"), [(1, 1), (3, 4), (5, 5)])
def test_decode_around_the_ring(tmp_path: Path, window: int, chunk: int) -> None:
    model = make_decoder(Decoder(sinks="weight", window=window, capacity=LONG, layers=2))
    options = {"sliding": Sliding.CIRCULAR, "window_chunk": chunk, "fallback": Fallback.FUNCTIONAL}  # updates straddle
    result = rewritten(model, tmp_path, LONG, **options)
    assert {c.capacity for c in result.plan.caches} == {window + chunk - 1}
    decode = Decode(model, result.model, LONG)
    for length in (*[chunk] * 3, 1, 1, chunk, max(1, chunk - 1), *[chunk] * 2):
        decode.check_step(length)


def test_windows_and_full_layers_in_turns(tmp_path: Path) -> None:
    """As gpt-oss has them."""

    def near(g: Build, scores: str) -> str:
        if sum(n.op_type == "Softmax" for n in g.nodes) % 2:
            return scores
        far = g.node("LessOrEqual", [g.key_rows, g.node("Sub", [g.query_rows, g.constant(4)])])
        return g.node("Where", [g.to_scores(far), g.number(-1e4), scores])

    model = make_decoder(Decoder(sinks="weight", layers=2, scores=near))
    check_decode(model, tmp_path)
    result = rewritten(model, tmp_path, sliding=Sliding.CIRCULAR, window_chunk=4)
    assert sorted(c.capacity for c in result.plan.caches) == [7, 7, CAPACITY, CAPACITY]


@pytest.mark.few(2)
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("how", [{}, {"window": 5}, {"mask": "own"}], ids=str)
def test_from_export_to_engine(tmp_path: Path, dtype: Any, how: dict[str, Any]) -> None:
    model = make_decoder(Decoder(sinks="weight", dtype=dtype, size=16, layers=2, **how))
    result = rewritten(model, tmp_path)
    verify_import(result).check()
    outcome = harness.build(result)
    assert outcome.stage == "built", outcome.words


def _beside(column: Callable[[Build, str], str]) -> dict[str, Any]:
    return {
        "masked": lambda g, scores: beside_sinks(g, scores, column(g, scores)),
        "weights": without_sinks,
    }


def _of_tokens(g: Build, scores: str) -> str:
    """The first score of each query."""
    return without_sinks(g, scores, 0, 1)


def _of_length(g: Build, scores: str) -> str:
    """More in each step."""
    total = g.node("Cast", [g.all], to=TensorProto.FLOAT)
    return g.node("Mul", [sink_column(g, scores), total])


def _odd_at(past: int) -> Callable[[Build, str], str]:
    """Another number with one length of the past."""

    def column(g: Build, scores: str) -> str:
        odd = g.node("Cast", [g.node("Equal", [g.past, g.constant(past)])], to=TensorProto.FLOAT)
        return g.node("Add", [sink_column(g, scores), odd])

    return column


def _of_query(g: Build, scores: str) -> str:
    """Another logit for each query of a step."""
    steps = g.node("Cast", [g.query_rows], to=TensorProto.FLOAT)
    return g.node("Add", [sink_column(g, scores), g.node("Unsqueeze", [steps, g.constant([0, 1])])])


def _heads_turned(g: Build, scores: str) -> str:
    """A weight whose logits are not in the order of the heads."""
    rows = g.node("Unsqueeze", [g.size_of(scores, 2), g.constant([0])])
    shape = g.node("Concat", [g.constant([1, 4]), rows, g.constant([1])], axis=0)
    turned = g.node("Transpose", [g.node("Reshape", [g.constant(np.arange(4.0), np.float32), g.constant([2, 2])])])
    column = g.node("Expand", [g.node("Reshape", [turned, g.constant([1, 4, 1, 1])]), shape])
    batch = g.node("Concat", [g.node("Unsqueeze", [g.size_of(scores, 0), g.constant([0])]), g.constant([4]), rows,
                              g.constant([1])], axis=0)  # fmt: skip
    return g.node("Expand", [column, batch])


def _zero_row(g: Build, values: str) -> str:
    """One row more, so that a column of sinks that is not dropped has something to weigh."""
    return g.node("Pad", [values, g.constant([0, 0, 0, 0, 0, 0, 1, 0])])


def _two_columns(g: Build, scores: str) -> str:
    column = sink_column(g, scores)
    return g.node("Concat", [column, column], axis=-1)


LOOK_ALIKES: dict[str, tuple[dict[str, Any], str]] = {
    "of the scores": (_beside(_of_tokens), "computes something else"),
    "of the length": (_beside(_of_length), "computes something else"),
    "odd at one length": (_beside(_odd_at(13)), "computes something else"),
    "of the query": (_beside(_of_query), "computes something else"),
    "two columns": (
        {**_beside(_two_columns), "weights": lambda g, w: without_sinks(g, w, 0, -2)},
        "is no attention that the importer can prove",
    ),
    "not dropped": (
        {**_beside(sink_column), "weights": lambda g, w: w, "values": _zero_row},
        "do not go to one MatMul with a cache of values",
    ),
    "the first column dropped": (
        {**_beside(sink_column), "weights": lambda g, w: without_sinks(g, w, 1, 2**31)},
        "computes something else",
    ),
    "dropped before the softmax": (
        {"masked": lambda g, scores: without_sinks(g, beside_sinks(g, scores, sink_column(g, scores)))},
        "is no attention that the importer can prove",
    ),
    "before the scores": (
        {
            "masked": lambda g, scores: g.node("Concat", [sink_column(g, scores), scores], axis=-1),
            "weights": lambda g, w: without_sinks(g, w, 1, 2**31),
        },
        "adds numbers other than 0 and the lowest",
    ),
    "less than the largest, of all queries": (
        {
            "masked": lambda g, s: g.node("Sub", [s, g.node("ReduceMax", [s, g.constant([2])], keepdims=1)]),
        },
        "computes something else",
    ),
}


@pytest.mark.parametrize("name", LOOK_ALIKES)
def test_look_alikes_are_refused(tmp_path: Path, name: str) -> None:
    how, words = LOOK_ALIKES[name]
    with pytest.raises(UnsupportedModelError, match=words):
        rewritten(make_decoder(Decoder(**how)), tmp_path)


def test_sinks_in_another_order_than_their_weight(tmp_path: Path) -> None:
    check_decode(make_decoder(Decoder(**_beside(_heads_turned))), tmp_path)


def test_sinks_as_an_input_of_attention_are_no_onnx(tmp_path: Path) -> None:
    """The importer's own form of a node is refused where a model has it."""
    graph = Graph()
    names = [graph.input(name, TensorProto.FLOAT, [1, 2, 4, 8]) for name in ("q", "k", "v")]
    sinks = graph.input("sinks", TensorProto.FLOAT, [2])
    graph.node("Attention", [*names, "", "", "", "", sinks], "y")
    graph.output("y", TensorProto.FLOAT, [1, 2, 4, 8])
    onnx.save(graph.model(24), tmp_path / "model.onnx")
    with pytest.raises(InvalidModelError, match="input size 8"):
        plan_model(tmp_path / "model.onnx")

"""Attention over caches of fixed length that a scatter writes at a counter: rows without a token must be hidden."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from concat_decode import CAPACITY, GARBAGE, rewritten, run
from graphs import Graph
from onnx import TensorProto

from trt_kvcache.errors import UnsupportedModelError

FLOAT = TensorProto.FLOAT
HEADS, SIZE = 4, 4
WIDTH = HEADS * SIZE

Mask = Callable[[Graph, str, str], str]


def decoder(
    mask: Mask,
    factor: Callable[[Graph], str] | None = None,
    repeat: Callable[[Graph, str], str] | None = None,
) -> onnx.ModelProto:
    """One layer; `mask` makes a bool ``[S, L]`` or ``[L]`` from the rows of the new tokens and their number.

    `factor` makes that of the scores; `repeat` is given a cache of half as many heads.
    """
    g = Graph()
    rng = np.random.default_rng(3)
    x = g.input("inputs_embeds", FLOAT, ["batch", "sequence", WIDTH])
    count = g.input("cur_len", TensorProto.INT64, [])
    new_tokens = g.node("Gather", [g.node("Shape", [x]), g.constant(1)], axis=0)
    rows = g.node("Add", [g.node("Range", [g.constant(0), new_tokens, g.constant(1)]), count])

    def heads(count: int = HEADS) -> str:
        weight = g.constant(rng.standard_normal((WIDTH, count * SIZE)) / 4, np.float32)
        return g.node("Reshape", [g.node("MatMul", [x, weight]), g.constant([0, 0, count, SIZE])])

    presents = []
    few = HEADS // 2 if repeat else HEADS
    for kind in ("key", "value"):
        past = g.input(f"past_{kind}", FLOAT, ["batch", CAPACITY, few, SIZE])
        first = [g.node("Transpose", [t], perm=[1, 0, 2, 3]) for t in (past, heads(few))]
        written = g.node("ScatterND", [first[0], g.node("Unsqueeze", [rows, g.constant([1])]), first[1]])
        present = g.node("Transpose", [written], f"present_{kind}", perm=[1, 0, 2, 3])
        g.output(present, FLOAT, ["batch", CAPACITY, few, SIZE])
        presents.append(repeat(g, present) if repeat else present)
    query = g.node("Transpose", [heads()], perm=[0, 2, 1, 3])
    scores = g.node("MatMul", [query, g.node("Transpose", [presents[0]], perm=[0, 2, 3, 1])])
    scores = g.node("Mul", [scores, factor(g) if factor else g.constant(0.5, np.float32)])
    if visible := mask(g, rows, new_tokens):
        scores = g.node("Where", [visible, scores, g.constant(-1e9, np.float32)])
    values = g.node("Transpose", [presents[1]], perm=[0, 2, 1, 3])
    output = g.node("MatMul", [g.node("Softmax", [scores], axis=-1), values])
    merged = g.node("Reshape", [g.node("Transpose", [output], perm=[0, 2, 1, 3]), g.constant([0, 0, WIDTH])])
    g.node("MatMul", [merged, g.constant(rng.standard_normal((WIDTH, 8)), np.float32)], "logits")
    g.output("logits", FLOAT, ["batch", "sequence", 8])
    model = g.model(18)
    onnx.checker.check_model(model, full_check=True)
    return model


def compared(g: Graph, rows: str, op: str, by: int = 0) -> str:
    """Keys compared with the rows of the queries minus `by`."""
    query = g.node("Sub", [g.node("Unsqueeze", [rows, g.constant([1])]), g.constant(by)])
    return g.node(op, [g.constant(np.arange(CAPACITY)), query])


def causal(g: Graph, rows: str, new: str) -> str:
    return compared(g, rows, "LessOrEqual")


def window(g: Graph, rows: str, new: str) -> str:
    return g.node("And", [causal(g, rows, new), compared(g, rows, "Greater", 5)])


def written(g: Graph, rows: str, new: str) -> str:
    """Every token sees every other."""
    return g.node("Less", [g.constant(np.arange(CAPACITY)), g.node("Add", ["cur_len", new])])


def one_row_more(g: Graph, rows: str, new: str) -> str:
    return g.node("LessOrEqual", [g.constant(np.arange(CAPACITY)), g.node("Add", ["cur_len", new])])


def nothing(g: Graph, rows: str, new: str) -> str:
    return ""


def check_decode(model: onnx.ModelProto, folder: Path) -> None:
    """Several steps, against ONNX Runtime on the model as it is."""
    result = rewritten(model, folder)
    rng = np.random.default_rng(0)
    shapes = {v.name: [d.dim_value for d in v.type.tensor_type.shape.dim] for v in model.graph.input}
    before = {name: np.zeros([2, *shapes[name][1:]], np.float32) for name in ("past_key", "past_value")}
    after = {c.past: np.full((2, *c.physical_shape[1:]), GARBAGE, np.float32) for c in result.plan.caches}
    past = 0
    for new in (5, 1, 3, 1, 1, 2, 4):
        given = {"inputs_embeds": rng.standard_normal((2, new, WIDTH)).astype(np.float32), "cur_len": np.array(past)}
        lengths = {
            "write_indices": np.full(2, past),
            "nonpad_kv_seqlen": np.full(2, past + new),
            "attention_span": np.arange(past + new),
            "logits_span": np.arange(new),
        }
        wanted = run(model, given | before)
        feeds = given | lengths | after
        got = run(result.model, {v.name: feeds[v.name] for v in result.model.graph.input})
        np.testing.assert_allclose(got["logits"], wanted["logits"], rtol=1e-4, atol=1e-4)
        before = {name: wanted[name.replace("past", "present")] for name in before}
        after = {c.past: got[c.present] for c in result.plan.caches}
        past += new


@pytest.mark.few(2)
@pytest.mark.parametrize("mask", [causal, window, written])
def test_decode(tmp_path: Path, mask: Mask) -> None:
    check_decode(decoder(mask), tmp_path)


@pytest.mark.parametrize("mask", [nothing, one_row_more])
def test_rows_without_tokens_that_are_seen_are_refused(tmp_path: Path, mask: Mask) -> None:
    """Zeros there are keys, too: their scores are 0, not the lowest."""
    with pytest.raises(UnsupportedModelError, match="none of the supported ones"):
        rewritten(decoder(mask), tmp_path)


def test_scores_that_follow_the_counter_are_refused(tmp_path: Path) -> None:
    def factor(g: Graph) -> str:
        return g.node("Log", [g.node("Cast", [g.node("Add", ["cur_len", g.constant(3)])], to=FLOAT)])

    with pytest.raises(UnsupportedModelError, match="computes something else than what was recognized"):
        rewritten(decoder(causal, factor), tmp_path)


def by_batch(g: Graph, present: str) -> str:
    """``[B, L, 2, D]``: one sequence has its heads one after the other twice, two have each of them twice."""
    batch, rows = (g.node("Shape", [present], start=i, end=i + 1) for i in (0, 1))
    heads = g.node("Transpose", [present], perm=[0, 2, 1, 3])
    shape = g.node("Concat", [batch, g.constant([2, 2]), rows, g.constant([SIZE])], axis=0)
    spread = g.node("Expand", [g.node("Unsqueeze", [heads, batch]), shape])
    merged = g.node("Reshape", [spread, g.constant([0, HEADS, -1, SIZE])])
    return g.node("Transpose", [merged], perm=[0, 2, 1, 3])


def in_turn(g: Graph, present: str) -> str:
    return g.node("Gather", [present, g.constant([0, 1, 0, 1])], axis=2)


def test_heads_in_an_order_of_the_batch_are_refused(tmp_path: Path) -> None:
    check_decode(decoder(causal, repeat=in_turn), tmp_path)
    with pytest.raises(UnsupportedModelError, match="computes something else"):
        rewritten(decoder(causal, repeat=by_batch), tmp_path)

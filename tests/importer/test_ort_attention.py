"""ONNX Runtime's Attention, whose past is keys and values in one tensor, as its converter of GPT-2 writes it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from graphs import Graph
from onnx import TensorProto

from trt_kvcache import PlanOptions, plan_model, verify_model
from trt_kvcache.errors import UnsupportedModelError
from trt_kvcache.importer.lower import CONTRIB
from trt_kvcache.importer.plan import Route

HEADS, SIZE, WIDTH, TOKENS = 2, 8, 12, 16
OPTIONS = PlanOptions(capacity=32)


def decoder(
    bias: bool = True,
    mask: bool = True,
    cast: bool = False,
    opset: int = 14,
    past: list[Any] | None = None,
    extra: tuple[str, ...] = (),
    **attrs: Any,
) -> onnx.ModelProto:
    """Two layers; `cast`: float32 caches around layers in float16."""
    g, rng = Graph(), np.random.default_rng(7)
    kind = np.float16 if cast else np.float32
    inner, outer = TensorProto.FLOAT16 if cast else TensorProto.FLOAT, TensorProto.FLOAT
    g.input("input_ids", TensorProto.INT32, ["B", "S"])
    if mask:
        g.input("attention_mask", TensorProto.INT32, ["B", "T"])
    x = g.node("Gather", [g.constant(rng.standard_normal((TOKENS, WIDTH)), kind), "input_ids"])
    for layer in range(2):
        own = g.input(f"past_{layer}", outer, past or [2, "B", HEADS, "P", SIZE])
        g.output(f"present_{layer}", outer, [2, "B", HEADS, "T", SIZE])
        weights = g.constant(rng.standard_normal((WIDTH, 3 * HEADS * SIZE)) / 3, kind)
        inputs = [x, weights, g.constant(rng.standard_normal(3 * HEADS * SIZE), kind) if bias else ""]
        inputs += ["attention_mask" if mask else "", g.node("Cast", [own], to=inner) if cast else own, "", *extra]
        present = f"present_{layer}" + ("_cast" if cast else "")
        attended = f"attended_{layer}"
        g.node("Attention", inputs, [attended, present], CONTRIB, num_heads=HEADS, **{"unidirectional": 1} | attrs)
        if cast:
            g.node("Cast", [present], f"present_{layer}", to=outer)
        back = g.node("MatMul", [attended, g.constant(rng.standard_normal((HEADS * SIZE, WIDTH)) / 4, kind)])
        x = g.node("Add", [x, back])
    g.node("MatMul", [x, g.constant(rng.standard_normal((WIDTH, TOKENS)), kind)], "logits")
    g.output("logits", inner, ["B", "S", TOKENS])
    for name in extra:
        if name:
            g.input(name, TensorProto.INT32, [1])
    return g.model(opset, [CONTRIB])


def saved(folder: Path, model: onnx.ModelProto) -> Path:
    onnx.save(model, folder / "model.onnx")
    return folder / "model.onnx"


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"bias": False, "unidirectional": 0},
        {"mask": False, "scale": 0.4},
        {"cast": True},
        {"opset": 11},
    ],
    ids=str,
)
def test_same_numbers_with_a_cache_for_each(options: dict[str, Any], tmp_path: Path) -> None:
    model = saved(tmp_path, decoder(**options))
    plan = plan_model(model, OPTIONS)
    assert [c.logical_shape[1:] for c in plan.caches] == [(HEADS, 32, SIZE)] * 4
    assert {c.route for c in plan.caches} == {Route.NATIVE}
    assert [(s.name, len(s.parts)) for s in plan.stacks if s.io == "input"] == [("past_0", 2), ("past_1", 2)]
    verify_model(model, OPTIONS).check()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"do_rotary": 1}, "rotates queries and keys"),
        ({"past_present_share_buffer": 1}, "keeps its past in a shared buffer"),
        ({"extra": ("length",)}, "keeps its past in a shared buffer"),
        ({"past": [1, "B", HEADS, "P", SIZE]}, r"takes a past of the shape \[1, 'B', 2, 'P', 8\]"),
    ],
    ids=str,
)
def test_what_is_refused_by_name(options: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match=words):
        plan_model(saved(tmp_path, decoder(**options)), OPTIONS)


def test_a_mask_that_hides_something_else_is_refused(tmp_path: Path) -> None:
    model = decoder()
    model.graph.node.insert(0, onnx.helper.make_node("Sub", ["attention_mask", "one"], ["hidden"]))
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.array(1, np.int32), "one"))
    for node in (n for n in model.graph.node if n.op_type == "Attention"):
        node.input[3] = "hidden"
    with pytest.raises(UnsupportedModelError, match="'node_attended_0' is none of the supported ones"):
        plan_model(saved(tmp_path, model), OPTIONS)


def test_a_past_that_is_computed_is_refused(tmp_path: Path) -> None:
    model = decoder()
    model.graph.node.insert(0, onnx.helper.make_node("Neg", ["past_1"], ["flipped"]))
    next(n for n in model.graph.node if "past_1" in n.input and n.op_type == "Attention").input[4] = "flipped"
    with pytest.raises(UnsupportedModelError, match="past"):
        plan_model(saved(tmp_path, model), OPTIONS)

"""ONNX Runtime's Attention, whose past is keys and values in one tensor, as its converter of GPT-2 writes it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import onnx
from graphs import Graph
from onnx import TensorProto, helper

from corpus import Entry, built

CONTRIB = "com.microsoft"
HEADS, SIZE, WIDTH, TOKENS = 2, 8, 12, 16


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
    x = g.Gather(g.constant(rng.standard_normal((TOKENS, WIDTH)), kind), "input_ids")
    for layer in range(2):
        own = g.input(f"past_{layer}", outer, past or [2, "B", HEADS, "P", SIZE])
        g.output(f"present_{layer}", outer, [2, "B", HEADS, "T", SIZE])
        weights = g.constant(rng.standard_normal((WIDTH, 3 * HEADS * SIZE)) / 3, kind)
        inputs = [x, weights, g.constant(rng.standard_normal(3 * HEADS * SIZE), kind) if bias else ""]
        inputs += ["attention_mask" if mask else "", g.Cast(own, to=inner) if cast else own, "", *extra]
        present = f"present_{layer}" + ("_cast" if cast else "")
        attended = f"attended_{layer}"
        g.node("Attention", inputs, [attended, present], CONTRIB, num_heads=HEADS, **{"unidirectional": 1} | attrs)
        if cast:
            g.Cast(present, out=f"present_{layer}", to=outer)
        back = g.MatMul(attended, g.constant(rng.standard_normal((HEADS * SIZE, WIDTH)) / 4, kind))
        x = g.Add(x, back)
    g.MatMul(x, g.constant(rng.standard_normal((WIDTH, TOKENS)), kind), out="logits")
    g.output("logits", inner, ["B", "S", TOKENS])
    for name in extra:
        if name:
            g.input(name, TensorProto.INT32, [1])
    return g.model(opset, [CONTRIB])


def other_mask() -> onnx.ModelProto:
    model = decoder()
    model.graph.node.insert(0, helper.make_node("Sub", ["attention_mask", "one"], ["hidden"]))
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.array(1, np.int32), "one"))
    for node in (n for n in model.graph.node if n.op_type == "Attention"):
        node.input[3] = "hidden"
    return model


HOW: tuple[dict[str, Any], ...] = (
    {}, {"bias": False, "unidirectional": 0}, {"mask": False, "scale": 0.4}, {"cast": True}, {"opset": 11},
    {"do_rotary": 1}, {"past_present_share_buffer": 1}, {"extra": ("length",)},
    {"past": [1, "B", HEADS, "P", SIZE]},
)  # fmt: skip


def entries() -> Iterator[Entry]:
    models: dict[str, Callable[[], onnx.ModelProto]] = {str(how): (lambda how=how: decoder(**how)) for how in HOW}
    models |= {make.__name__: make for make in (other_mask,)}
    yield from built("packed past", models, capacity=32)

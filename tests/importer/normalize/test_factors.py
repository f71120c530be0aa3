"""Factors that sizes make, against what ONNX Runtime computes for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import harness
import numpy as np
import onnx_graphsurgeon as gs
import pytest
from graphs import Graph
from onnx import TensorProto

from trt_kvcache.importer.graph import small_constant
from trt_kvcache.importer.normalize.evidence.factors import fold_factors

LAST = np.iinfo(np.int64).max


def cut(g: Graph, x: str) -> str:
    return g.node("Slice", [g.node("Shape", [x]), g.constant([-1]), g.constant([LAST])])


def picked(g: Graph, x: str, place: int = 2) -> str:
    return g.node("Gather", [g.node("Shape", [x]), g.constant(place)])


def wide(g: Graph, size: str) -> str:
    return g.node("Cast", [size], to=TensorProto.FLOAT)


def root(g: Graph, size: str) -> str:
    return g.node("Sqrt", [wide(g, size)])


FACTORS: dict[str, Callable[[Graph, str], str]] = {
    "a root": lambda g, x: root(g, picked(g, x)),
    "a part of the shape": lambda g, x: root(g, g.node("Shape", [x], start=2, end=3)),
    "one by it": lambda g, x: g.node("Div", [g.constant([1.0], np.float32), root(g, cut(g, x))]),
    "a root of it": lambda g, x: g.node("Sqrt", [g.node("Div", [g.constant(1.0, np.float32), root(g, picked(g, x))])]),
    "without its axis": lambda g, x: g.node("Squeeze", [root(g, cut(g, x))]),
}
KEPT: dict[str, Callable[[Graph, str], str]] = {
    "a batch": lambda g, x: root(g, picked(g, x, 0)),
    "a division of integers": lambda g, x: wide(g, g.node("Div", [picked(g, x), g.constant(2)])),
    "an input": lambda g, x: root(g, g.input("n", TensorProto.INT64, [])),
    "halves of integers": lambda g, x: wide(g, g.node("Cast", [root(g, picked(g, x))], to=TensorProto.INT32)),
}


def folded(make: Callable[[Graph, str], str]) -> tuple[Any, gs.Graph]:
    """The model, and its graph afterwards."""
    g = Graph()
    x = g.input("x", TensorProto.FLOAT, ["batch", "n", 7])
    g.node("Mul", [x, make(g, x)], "y")
    g.output("y", TensorProto.FLOAT, ["batch", "n", 7])
    model = g.model(opset=21)
    graph = gs.import_onnx(model)
    fold_factors(graph)
    return model, graph


@pytest.mark.parametrize("name", FACTORS)
def test_becomes_a_constant(name: str) -> None:
    model, graph = folded(FACTORS[name])
    product = next(n for n in graph.nodes if n.op == "Mul" and n.outputs[0].name == "y")
    assert small_constant(product.inputs[1]) is not None
    feeds = {"x": np.random.default_rng(0).standard_normal((2, 3, 7)).astype(np.float32)}
    result = harness.run(gs.export_onnx(graph.cleanup()), feeds)["y"]
    assert np.array_equal(result, harness.run(model, feeds)["y"])


@pytest.mark.parametrize("name", KEPT)
def test_stays(name: str) -> None:
    _, graph = folded(KEPT[name])
    product = next(n for n in graph.nodes if n.op == "Mul" and n.outputs[0].name == "y")
    assert small_constant(product.inputs[1]) is None

"""Deep models: what the layers have in common is looked at once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
import pytest
from concat_decode import normalized
from concat_graphs import Decoder, make_decoder
from graphs import Graph
from onnx import TensorProto

from trt_kvcache.importer.normalize.evidence.blueprint import Blueprint
from trt_kvcache.importer.normalize.evidence.probe import Probe

LAYERS = (2, 8, 14)


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often a node was evaluated, and its shapes were inferred."""
    counts: Counter[str] = Counter()

    def counting(name: str) -> None:
        method = getattr(Blueprint, name)

        def count(*args: Any) -> Any:
            counts[name] += 1
            return method(*args)

        monkeypatch.setattr(Blueprint, name, count)

    counting("evaluate")
    counting("infer")
    return counts


def chain(layers: int) -> onnx.ModelProto:
    """Layers that each split and join heads by the shapes of their own tensors, as exporters write it."""
    g = Graph()
    x = g.input("x", TensorProto.FLOAT, ["B", "S", 8])
    for _ in range(layers):
        sizes = [g.node("Gather", [g.node("Shape", [x]), g.constant([axis])]) for axis in (0, 1)]
        heads = g.node("Reshape", [x, g.node("Concat", [*sizes, g.constant([2]), g.constant([4])], axis=0)])
        moved = g.node("Transpose", [g.node("Transpose", [heads], perm=[0, 2, 1, 3])], perm=[0, 2, 1, 3])
        joined = g.node("Reshape", [moved, g.node("Concat", [*sizes, g.constant([-1])], axis=0)])
        x = g.node("Add", [x, joined])
    g.node("Identity", [x], "out")
    g.output("out", TensorProto.FLOAT, ["B", "S", 8])
    return g.model(18)


def work(counted: Counter[str], layers: Sequence[int], run: Any) -> list[Counter[str]]:
    """The counts for models of several depths."""
    found = []
    for depth in layers:
        counted.clear()
        run(depth)
        found.append(Counter(counted))
    return found


def test_shapes_of_more_layers_are_no_more_to_infer(counted: Counter[str]) -> None:
    def run(layers: int) -> None:
        probe = Probe(Blueprint(chain(layers), {}), {"x": (3, 5, 8)}, {})
        assert probe.shape("out") == (3, 5, 8)

    few, more, most = work(counted, LAYERS, run)
    assert few == more == most
    assert few["infer"]
    assert few["evaluate"]


def test_shapes_that_hang_on_shapes_do_not_recurse() -> None:
    """Each layer asks for the shape of what the one before it made."""
    assert Probe(Blueprint(chain(400), {}), {"x": (3, 5, 8)}, {}).shape("out") == (3, 5, 8)


def test_values_of_more_layers_are_no_more_to_evaluate(counted: Counter[str]) -> None:
    """Zeros, so that each layer adds what the one before it added."""

    def run(layers: int) -> None:
        value = Probe(Blueprint(chain(layers), {}), {"x": (3, 5, 8)}, {"x": np.zeros((3, 5, 8), np.float32)})
        np.testing.assert_array_equal(value.value("out"), np.zeros((3, 5, 8), np.float32))

    few, more, _ = work(counted, LAYERS, run)
    layer = (more["evaluate"] - few["evaluate"]) / (LAYERS[1] - LAYERS[0])
    assert layer <= 5  # what moves data: the shapes that this needs are the same in all layers


@pytest.mark.slow
@pytest.mark.parametrize("decoder", [{}, {"mask": "padding", "positions": "padding"}, {"window": 5}], ids=str)
def test_a_layer_more_costs_the_same_at_any_depth(counted: Counter[str], decoder: dict[str, Any]) -> None:
    """Not the product of layers and samples, let alone the square of the depth."""
    few, more, most = work(counted, LAYERS, lambda layers: normalized(make_decoder(Decoder(layers=layers, **decoder))))
    for name in ("evaluate", "infer"):
        assert most[name] - more[name] == more[name] - few[name]
    assert most["infer"] - more["infer"] < 6 * (LAYERS[2] - LAYERS[1])  # far from one for each tensor and sample

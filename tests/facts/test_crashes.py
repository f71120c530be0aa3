"""Forms on which TensorRT's builder dies or fails: attentions that share a tensor. Each build has its own process."""

from __future__ import annotations

import pytest
from builder import build_in_child
from cases import BF16, FLOAT, HALF
from graphs import Graph


def sharing(shared: str, dtype: int, scales: tuple[float, float]) -> bytes:
    """Two attentions; `shared` names the inputs that they have in common."""
    graph = Graph()
    shapes = {"q": ["B", 4, "S", 16], "k": ["B", 2, 16, 16], "v": ["B", 2, 16, 16]}
    for i, scale in enumerate(scales):
        inputs = []
        for name, shape in shapes.items():
            full = name if name in shared else f"{name}{i}"
            known = full in [value.name for value in graph.inputs]
            inputs.append(full if known else graph.input(full, dtype, shape))
        graph.node("Attention", inputs, f"y{i}", scale=scale)
        graph.output(f"y{i}", dtype, shapes["q"])
    return graph.model().SerializeToString()


@pytest.mark.few(2)
@pytest.mark.parametrize("dtype", [HALF, BF16])
@pytest.mark.parametrize("shared", ["q", "k", "kv", "qkv"])
def test_shared_query_or_key(shared: str, dtype: int) -> None:
    """The parser scales Q and K of each node; where two get the same product, the builder goes wrong."""
    assert build_in_child(sharing(shared, dtype, (0.25, 0.25)), [{}]).stage in ("crash", "build")


@pytest.mark.parametrize(("shared", "scales"), [("v", (0.25, 0.25)), ("", (0.25, 0.25)), ("qkv", (0.25, 0.5))])
def test_different_products(shared: str, scales: tuple[float, float]) -> None:
    """A shared V is harmless, and so is anything shared under different scales."""
    assert build_in_child(sharing(shared, HALF, scales), [{}]).stage == "built"


def test_a_crash_is_an_outcome() -> None:
    """The helper survives, and builds the next model."""
    assert build_in_child(sharing("q", FLOAT, (0.25, 0.25)), [{}]).stage in ("crash", "build")
    assert build_in_child(sharing("", HALF, (0.25, 0.25)), [{}]).stage == "built"

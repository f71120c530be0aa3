from __future__ import annotations

import pytest

from trt_kvcache.cli.grouping import group_rows, ranges

LAYERS = [(f"{kind}.{layer}", "[1, 4]") for layer in range(3) for kind in ("key", "value")]
BLOCKS = [(f"layers.{layer}.block2", f"reason of layer {layer}: head size 64") for layer in range(2)]
APART = [(f"layer.{layer}.expert.{expert}",) for layer in range(2) for expert in range(2)]


@pytest.mark.parametrize(
    ("rows", "names", "grouped"),
    [(LAYERS, 1, [(("key.0..2", "[1, 4]"), [0, 2, 4]), (("value.0..2", "[1, 4]"), [1, 3, 5])]),
     ([("key.0", "[1, 4]"), ("key.1", "[1, 8]"), ("key.2", "[1, 4]")], 1,
      [(("key.0,2", "[1, 4]"), [0, 2]), (("key.1", "[1, 8]"), [1])]),
     (BLOCKS, 2, [(("layers.0..1.block2", "reason of layer 0..1: head size 64"), [0, 1])]),
     (APART, 1, [(row, [at]) for at, row in enumerate(APART)]),
     ([("layers.0/Attention_16", "fused"), ("layers.1/Attention_42", "fused")], 1,
      [(("layers.0..1/Attention_*", "fused"), [0, 1])]),
     ([("l0.n0",), ("l1.n1",)], 1, [(("l0..1.n0..1",), [0, 1])]),
     ([("a", "1"), ("a", "2")], 1, [(("a", "1"), [0]), (("a", "2"), [1])]),
     ([("a", "1"), ("a", "1")], 1, [(("a", "1"), [0]), (("a", "1"), [1])])],
    ids=["layers in order of appearance", "another shape stays apart", "numbers that do not run are kept",
         "two numbers that run apart", "a count of nodes is left out", "two numbers that run together",
         "cells after the names are never merged", "equal rows without numbers"],
)  # fmt: skip
def test_layers_become_one_row(rows: list[tuple[str, ...]], names: int, grouped: list[object]) -> None:
    assert group_rows(rows, names) == grouped


def test_ranges() -> None:
    given = ([3], [2, 0, 1], [0, 1, 5, 7, 8], range(0, 31, 2), [0, 2])
    assert [ranges(numbers) for numbers in given] == ["3", "0..2", "0..1,5,7..8", "0..30 step 2", "0,2"]

from __future__ import annotations

from trt_kvcache.cli.grouping import group_rows, ranges


def test_layers_become_one_row_in_order_of_appearance() -> None:
    rows = [(f"{kind}.{layer}", "[1, 4]") for layer in range(3) for kind in ("key", "value")]
    assert group_rows(rows, 1) == [(("key.0..2", "[1, 4]"), [0, 2, 4]), (("value.0..2", "[1, 4]"), [1, 3, 5])]


def test_a_layer_of_another_shape_stays_apart() -> None:
    rows = [("key.0", "[1, 4]"), ("key.1", "[1, 8]"), ("key.2", "[1, 4]")]
    assert group_rows(rows, 1) == [(("key.0,2", "[1, 4]"), [0, 2]), (("key.1", "[1, 8]"), [1])]


def test_numbers_that_do_not_run_are_kept() -> None:
    rows = [(f"layers.{layer}.block2", f"reason of layer {layer}: head size 64") for layer in range(2)]
    assert group_rows(rows, 2) == [(("layers.0..1.block2", "reason of layer 0..1: head size 64"), [0, 1])]


def test_two_numbers_that_run_apart_are_not_merged() -> None:
    rows = [(f"layer.{layer}.expert.{expert}",) for layer in range(2) for expert in range(2)]
    assert group_rows(rows, 1) == [(row, [at]) for at, row in enumerate(rows)]


def test_a_count_of_nodes_beside_the_layer_is_left_out() -> None:
    rows = [("layers.0/Attention_16", "fused"), ("layers.1/Attention_42", "fused")]
    assert group_rows(rows, 1) == [(("layers.0..1/Attention_*", "fused"), [0, 1])]


def test_two_numbers_that_run_together_are() -> None:
    assert group_rows([("l0.n0",), ("l1.n1",)], 1) == [(("l0..1.n0..1",), [0, 1])]


def test_cells_after_the_names_are_never_merged() -> None:
    assert group_rows([("a", "1"), ("a", "2")], 1) == [(("a", "1"), [0]), (("a", "2"), [1])]


def test_equal_rows_without_numbers_are_kept() -> None:
    assert group_rows([("a", "1"), ("a", "1")], 1) == [(("a", "1"), [0]), (("a", "1"), [1])]


def test_ranges() -> None:
    assert ranges([3]) == "3"
    assert ranges([2, 0, 1]) == "0..2"
    assert ranges([0, 1, 5, 7, 8]) == "0..1,5,7..8"
    assert ranges(range(0, 31, 2)) == "0..30 step 2"
    assert ranges([0, 2]) == "0,2"

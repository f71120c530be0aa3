"""Caches that grow by Concat."""

from __future__ import annotations

import onnx
import pytest
from cache_updates import HEADS, SIZE, assert_same_update, candidates, prove_updates, transpose, update_model
from graphs import Graph
from onnx import TensorProto

from trt_kvcache.errors import UnsupportedModelError

PAST = ("B", HEADS, "P", SIZE)
PRESENT = ("B", HEADS, "T", SIZE)


def bnsd(graph: Graph, past: str, new: str) -> str:
    return graph.node("Concat", [past, transpose(graph, new, 0, 2, 1, 3)], axis=-2)


def bsnd(graph: Graph, past: str, new: str) -> str:
    return graph.node("Concat", [past, new], axis=1)


def merged_heads(graph: Graph, past: str, new: str) -> str:
    return graph.node("Concat", [past, graph.node("Reshape", [new, graph.constant([0, 0, -1])])], axis=1)


def keys_transposed(graph: Graph, past: str, new: str) -> str:
    """Keys kept as ``[B, N, D, P]``."""
    return graph.node("Concat", [past, transpose(graph, new, 0, 2, 3, 1)], axis=3)


def behind_transposes(graph: Graph, past: str, new: str) -> str:
    joined = graph.node("Concat", [transpose(graph, past, 2, 0, 1, 3), transpose(graph, new, 1, 0, 2, 3)], axis=0)
    return transpose(graph, joined, 1, 2, 0, 3)


def heads_in_batch(graph: Graph, past: str, new: str) -> str:
    """``[B * N, P, D]`` in between, as older models keep their heads."""

    def flat(tensor: str) -> str:
        rows = graph.node("Slice", [graph.node("Shape", [tensor]), *(graph.constant([v]) for v in (2, 3))])
        shape = graph.node("Concat", [graph.constant([-1]), rows, graph.constant([SIZE])], axis=0)
        return graph.node("Reshape", [tensor, shape])

    joined = graph.node("Concat", [flat(past), flat(transpose(graph, new, 0, 2, 1, 3))], axis=1)
    rows = graph.node("Slice", [graph.node("Shape", [joined]), *(graph.constant([v]) for v in (1, 2))])
    shape = graph.node("Concat", [graph.constant([-1, HEADS]), rows, graph.constant([SIZE])], axis=0)
    return graph.node("Reshape", [joined, shape])


@pytest.mark.parametrize(
    ("idiom", "past", "present", "axis", "perm"),
    [
        (bnsd, PAST, PRESENT, 2, (0, 2, 1, 3)),
        (bsnd, ("B", "P", HEADS, SIZE), ("B", "T", HEADS, SIZE), 1, None),
        (merged_heads, ("B", "P", HEADS * SIZE), ("B", "T", HEADS * SIZE), 1, None),
        (keys_transposed, ("B", HEADS, SIZE, "P"), ("B", HEADS, SIZE, "T"), 3, (0, 2, 3, 1)),
        (behind_transposes, PAST, PRESENT, 2, (0, 2, 1, 3)),
    ],
)
@pytest.mark.parametrize(("start", "batch", "length"), [(0, 1, 3), (5, 2, 1), (4, 3, 4)])
def test_layouts(idiom, past, present, axis, perm, start, batch, length):
    model = update_model(idiom, past, None, present=present)
    write = assert_same_update(model, start, batch, length, capacity=12)
    assert (write.idiom, write.growing, write.circular, write.axis, write.perm) == ("Concat", True, False, axis, perm)
    assert write.positions == ()


def test_heads_in_batch():
    write = assert_same_update(update_model(heads_in_batch, PAST, None, present=PRESENT), 5, 2, 3, capacity=12)
    assert (write.axis, write.perm, write.update.name) == (2, (0, 2, 1, 3), "new")


def test_half_precision():
    model = update_model(bnsd, PAST, None, dtype=TensorProto.FLOAT16, present=PRESENT)
    assert_same_update(model, 3, 2, 2, capacity=12)


def test_update_is_the_tensor_nearest_to_the_projection():
    (write,) = prove_updates(update_model(behind_transposes, PAST, None, present=PRESENT), 12)
    assert write.update.name == "new"


def test_aliases_have_the_layout_of_the_cache():
    model = update_model(behind_transposes, PAST, None, present=PRESENT)
    joined = next(n for n in model.graph.node if n.op_type == "Concat").output[0]
    (write,) = prove_updates(model, 12)
    names = {t.name for t in write.aliases}
    assert len(names) == 1
    assert joined not in names


def check_refused(idiom, match, past=PAST, present=PRESENT, length="S"):
    model = update_model(idiom, past, None, length, present=present)
    with pytest.raises(UnsupportedModelError, match=match):
        prove_updates(model, 12)


def test_new_before_past():
    def idiom(graph, past, new):
        return graph.node("Concat", [transpose(graph, new, 0, 2, 1, 3), past], axis=2)

    check_refused(idiom, "puts the new rows before the past")


def test_three_parts():
    def idiom(graph, past, new):
        rows = transpose(graph, new, 0, 2, 1, 3)
        return graph.node("Concat", [past, rows, rows], axis=2)

    check_refused(idiom, "joins 3 tensors")


def test_twice_the_new_rows():
    def idiom(graph, past, new):
        rows = transpose(graph, new, 0, 2, 1, 3)
        return graph.node("Concat", [past, graph.node("Concat", [rows, rows], axis=2)], axis=2)

    check_refused(idiom, r"has shape \[2, 2, 6, 4\] in a step of 3 tokens")


def test_batch_axis():
    def idiom(graph, past, new):
        return graph.node("Concat", [past, new], axis=0)

    check_refused(idiom, "grows along the batch", ("B", "S", HEADS, SIZE), ("T", "S", HEADS, SIZE))


def test_head_axis():
    """[B, P, S, D]: more heads in every step."""

    def idiom(graph, past, new):
        return graph.node("Concat", [past, transpose(graph, new, 0, 2, 1, 3)], axis=1)

    check_refused(idiom, "where the new rows have", ("B", "P", "S", SIZE), ("B", "T", "S", SIZE))


def test_fixed_length():
    def idiom(graph, past, new):
        return graph.node("Concat", [past, transpose(graph, new, 0, 2, 1, 3)], axis=2)

    check_refused(idiom, "fixed size 15", ("B", HEADS, 15, SIZE), ("B", HEADS, 16, SIZE), length=1)


def test_rolling_by_slicing_the_past():
    def idiom(graph, past, new):
        tail = graph.node("Slice", [past, *(graph.constant([v]) for v in (1, 1 << 40, 2))])
        return graph.node("Concat", [tail, transpose(graph, new, 0, 2, 1, 3)], axis=2)

    check_refused(
        idiom, "Slice '.*' moves its rows in every step", ("B", HEADS, 16, SIZE), ("B", HEADS, 16, SIZE), length=1
    )


def test_rolling_by_slicing_the_result():
    def idiom(graph, past, new):
        joined = graph.node("Concat", [past, transpose(graph, new, 0, 2, 1, 3)], axis=2)
        return graph.node("Slice", [joined, *(graph.constant([v]) for v in (-16, 1 << 40, 2))])

    check_refused(idiom, "Slice '.*' moves its rows in every step", ("B", HEADS, 16, SIZE), ("B", HEADS, 16, SIZE))


def test_reordered_past():
    """Beam search inside the model: Gather takes other sequences' rows."""

    def idiom(graph, past, new):
        beams = graph.input("beams", TensorProto.INT64, ["B"])
        past = graph.node("Gather", [past, beams], axis=0)
        return graph.node("Concat", [past, transpose(graph, new, 0, 2, 1, 3)], axis=2)

    check_refused(idiom, "Gather '.*' moves its rows in every step")


def test_past_that_is_read_as_well():
    def idiom(graph, past, new):
        joined = bnsd(graph, past, new)
        graph.node("ReduceMax", [past], "largest", keepdims=0)
        graph.output("largest", TensorProto.FLOAT, [])
        return joined

    check_refused(idiom, "ReduceMax 'node_largest' reads its past as well")


def test_two_results():
    def idiom(graph, past, new):
        graph.node("Concat", [past, transpose(graph, new, 0, 2, 1, 3)], "other", axis=2)
        graph.output("other", TensorProto.FLOAT, list(PRESENT))
        return bnsd(graph, past, new)

    check_refused(idiom, "two results, 'other' and 'present'|two results, 'present' and 'other'")


def test_another_layout_comes_back():
    def idiom(graph, past, new):
        return transpose(graph, bnsd(graph, past, new), 0, 2, 1, 3)

    check_refused(idiom, "'present' has another layout than 'past'", PAST, ("B", "T", HEADS, SIZE))


@pytest.mark.parametrize("output", [False, True])
def test_other_concats_are_no_candidates(output: bool):
    """Embeddings of an image in front of those of the text, and the halves of a rotary embedding."""
    graph = Graph()
    image = graph.input("image", TensorProto.FLOAT, ["B", "I", 8])
    text = graph.input("input_ids", TensorProto.INT64, ["B", "S"])
    embedded = graph.node("Gather", [graph.constant([[1.0] * 8] * 4, "float32"), text])
    joined = graph.node("Concat", [image, embedded], axis=1)
    turned = graph.node("Concat", [graph.node("Neg", [joined]), joined], axis=-1)
    graph.node("Relu", [turned], "hidden")
    graph.output("hidden", TensorProto.FLOAT, ["B", "T", 16])
    if output:
        graph.node("Sigmoid", [joined], "other")
        graph.output("other", TensorProto.FLOAT, ["B", "T", 8])
    model = graph.model(24)
    onnx.checker.check_model(model)
    assert candidates(model) == ()

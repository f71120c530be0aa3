"""Cache updates in decoders as exporters write them, and what all idioms have in common."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import onnx
import onnx_graphsurgeon as gs
import pytest
from cache_updates import (
    BNSD,
    CAPACITY,
    HEADS,
    SIZE,
    assert_same_update,
    candidates,
    index_copy,
    prove_updates,
    transpose,
    update_model,
)
from graphs import Graph
from onnx import TensorProto

from trt_kvcache.errors import UnsupportedModelError
from trt_kvcache.importer.interface.exported import Interface
from trt_kvcache.importer.normalize.evidence.blueprint import Blueprint
from trt_kvcache.importer.normalize.evidence.samples import Samples
from trt_kvcache.importer.normalize.idioms.writes import find_candidates, prove
from trt_kvcache.importer.prepare import detach_weights, fix_digit_dims, infer_shapes
from trt_kvcache.importer.simplify import name_nodes, raise_opset

MODELS = Path(__file__).parents[2] / "models"


def exported(name: str):
    """The proven updates of a stored model."""
    model, weights = detach_weights(onnx.load(MODELS / name / "model.onnx", load_external_data=False))
    fix_digit_dims(model.graph)
    name_nodes(model.graph)
    model = infer_shapes(raise_opset(model))
    graph = gs.import_onnx(model)
    found = find_candidates(graph)
    if any(c.reason for c in found):
        return tuple(prove(graph, candidate, ()) for candidate in found)
    interface = Interface(model, found, None)
    capacity = interface.capacity(48 if found[0].growing or isinstance(found[0].past.shape[2], str) else None)
    samples = Samples(Blueprint(model, weights), interface, capacity)
    return tuple(prove(graph, candidate, samples.all) for candidate in found)


def names(kind: str) -> list[str]:
    return sorted(str(p.parent.relative_to(MODELS)) for p in MODELS.glob(kind))


@pytest.mark.parametrize("name", names("optimum/*/model.onnx") + names("t*/*dyn*/model.onnx"))
def test_growing_caches_of_exporters(name):
    writes = exported(name)
    assert len(writes) == 4
    for write in writes:
        assert (write.idiom, write.growing, write.circular, write.axis) == ("Concat", True, False, 2)
        assert write.positions == ()
        is_value = "value" in write.past.name.rsplit(".", 1)[-1]
        assert write.perm == ((0, 2, 1, 3) if is_value else None)  # values from the projection, keys from the rotation
        producer = write.update.inputs[0].op
        assert producer == ("Reshape" if is_value else "Add")


@pytest.mark.parametrize("name", names("t*/*static*/model.onnx"))
def test_static_caches_of_exporters(name):
    writes = exported(name)
    assert len(writes) == 4
    for layer, write in enumerate(writes):
        assert (write.idiom, write.growing, write.circular, write.axis) == ("ScatterND", False, False, 2)
        assert write.perm == (None if layer % 2 == 0 else (0, 2, 1, 3))
        prefix = f"input.past_key_values.layers.{layer // 2}"
        assert write.positions in [("cur_len",), (f"{prefix}.cumulative_length",)]


@pytest.mark.parametrize(
    ("name", "idiom", "axis"),
    [
        ("bshd_index_put_dynamo_op18", "ScatterND", 1),
        ("index_copy_dynamo_op18", "ScatterND", 2),
        ("index_copy_legacy_op17", "ScatterElements", 2),
        ("index_put_batch_dynamo_op18", "ScatterND", 2),
        ("mod_index_put_dynamo_op18", "ScatterND", 2),
        ("onehot_mul_dynamo_op24", "one-hot", 2),
        ("scatter_dynamo_op18", "ScatterElements", 2),
        ("slice_assign_dynamo_op18", "ScatterND", 2),
        ("where_dynamo_op18", "Where", 2),
    ],
)
def test_own_torch_code(name, idiom, axis):
    key, value = exported(f"plain-torch/{name}")
    assert (key.past.name, value.past.name) == ("k_cache", "v_cache")
    for write in (key, value):
        assert (write.idiom, write.axis, write.growing) == (idiom, axis, False)
        assert write.circular == name.startswith("mod_")
        assert write.perm == (None if axis == 1 else (0, 2, 1, 3))
        assert write.positions == ("pos",)


def test_aliases_of_a_slice_assignment():
    """The output is a copy of slice_scatter, which attention may read as well."""
    key, value = exported("plain-torch/slice_assign_dynamo_op18")
    assert [t.name for t in key.aliases] == ["slice_scatter"]
    assert [t.name for t in value.aliases] == ["slice_scatter_2"]


@pytest.mark.parametrize(
    ("name", "match"),
    [
        ("narrow_copy_legacy_op17", "comes out as it went in, as 'k_cache_out', and the exporter has lost the write"),
        ("roll_dynamo_op18", "Slice '.*' moves its rows in every step"),
    ],
)
def test_dead_ends(name, match):
    with pytest.raises(UnsupportedModelError, match=match):
        exported(f"plain-torch/{name}")


@pytest.mark.parametrize("name", names("mobius/*/model.onnx") + names("ort-genai/*/model.onnx"))
def test_caches_in_operators_are_no_candidates(name):
    graph = gs.import_onnx(onnx.load(MODELS / name / "model.onnx", load_external_data=False))
    assert find_candidates(graph) == ()


def test_every_refusal_says_what_to_do():
    model = update_model(lambda graph, past, new: past, pos=None)
    with pytest.raises(UnsupportedModelError) as error:
        prove_updates(model)
    text = str(error.value)
    assert "'past'" in text
    assert "Supported are updates that write the S new rows" in text
    assert text.endswith(
        "write with index_copy, index_put or a slice instead of narrow().copy_(), and return what is written"
    )


def test_unchanged_in_another_layout_is_refused_as_well():
    model = update_model(
        lambda graph, past, new: transpose(graph, past, 0, 2, 1, 3), pos=None, present=("B", CAPACITY, HEADS, SIZE)
    )
    with pytest.raises(UnsupportedModelError, match="comes out as it went in"):
        prove_updates(model)


@pytest.mark.parametrize("length", ["E", CAPACITY])
def test_keys_of_an_encoder_go_through(length):
    """Unchanged, a cross-attention cache is none to write; one of the shape of those written has lost its write."""

    def idiom(graph: Graph, past: str, new: str) -> str:
        cross = graph.input("cross", TensorProto.FLOAT, ["B", HEADS, length, SIZE])
        graph.node("Identity", [cross], "present_cross")
        graph.output("present_cross", TensorProto.FLOAT, ["B", HEADS, length, SIZE])
        return index_copy()(graph, past, new)

    model = update_model(idiom)
    if length == "E":
        assert [w.past.name for w in prove_updates(model)] == ["past"]
    else:
        with pytest.raises(UnsupportedModelError, match="'cross' .* the exporter has lost the write"):
            prove_updates(model)


@pytest.mark.parametrize("inputs", [1, 2])
def test_hidden_states_go_through(inputs):
    """Hidden states of an encoder come alone; caches with merged heads come in pairs."""
    graph = Graph()
    for name in [f"states_{i}" for i in range(inputs)]:
        graph.input(name, TensorProto.FLOAT, ["B", "L", 8])
        graph.node("Identity", [name], f"{name}_out")
        graph.output(f"{name}_out", TensorProto.FLOAT, ["B", "L", 8])
    assert [c.idiom for c in candidates(graph.model(24))] == ["unchanged"] * (inputs if inputs > 1 else 0)


def test_casts_to_the_same_type_are_views():
    def idiom(graph: Graph, past: str, new: str) -> str:
        past, new = (graph.node("Cast", [t], to=TensorProto.FLOAT) for t in (past, new))
        return graph.node("Cast", [index_copy()(graph, past, new)], to=TensorProto.FLOAT)

    write = assert_same_update(update_model(idiom), 5, 2, 3)
    assert write.update.name == "new"


def test_casts_to_another_type_are_not():
    def idiom(graph: Graph, past: str, new: str) -> str:
        past, new = (graph.node("Cast", [t], to=TensorProto.DOUBLE) for t in (past, new))
        return graph.node("Cast", [index_copy()(graph, past, new)], to=TensorProto.FLOAT)

    assert candidates(update_model(idiom)) == ()


def test_update_behind_a_cast_to_the_type_of_the_cache():
    """The rows are rounded before they are written: the update is what the Cast makes."""

    def idiom(graph: Graph, past: str, new: str) -> str:
        rounded = graph.node(
            "Cast", [graph.node("Cast", [new], to=TensorProto.FLOAT16)], "rounded", to=TensorProto.FLOAT
        )
        return index_copy()(graph, past, rounded)

    assert assert_same_update(update_model(idiom), 5, 2, 3).update.name == "rounded"


def test_rows_that_are_shared_by_all_sequences():
    """The new rows of the first sequence, expanded over the batch: the update is what Expand makes."""

    def idiom(graph: Graph, past: str, new: str) -> str:
        first = graph.node("Slice", [new, *(graph.constant([v]) for v in (0, 1, 0))])
        expanded = graph.node("Expand", [first, graph.node("Shape", [new])], "expanded")
        return index_copy()(graph, past, expanded)

    assert assert_same_update(update_model(idiom), 5, 2, 3).update.name == "expanded"


def test_reversed_channels_are_part_of_the_update():
    """An operator that is no view ends the way back to the projection."""

    def idiom(graph: Graph, past: str, new: str) -> str:
        flipped = graph.node("Slice", [new, *(graph.constant([v]) for v in (-1, -(1 << 40), -1, -1))], "flipped")
        return index_copy()(graph, past, flipped)

    assert assert_same_update(update_model(idiom), 5, 2, 3).update.name == "flipped"


@pytest.mark.slow
def test_long_caches_are_proven_without_allocating_them():
    capacity = 131072
    cache = 2 * HEADS * capacity * SIZE * 4  # bytes, in the samples of two sequences
    tracemalloc.start()
    (write,) = prove_updates(update_model(index_copy(), ("B", HEADS, capacity, SIZE)))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert write.axis == 2
    assert peak < cache / 3


def test_first_axis_that_is_not_the_batch():
    def idiom(graph: Graph, past: str, new: str) -> str:
        update = graph.node("Reshape", [transpose(graph, new, 0, 2, 1, 3), graph.constant([HEADS, -1, SIZE])])
        return graph.node("Concat", [past, update], axis=1)

    model = update_model(idiom, (HEADS, "P", SIZE), None, batch=1, present=(HEADS, "T", SIZE))
    with pytest.raises(UnsupportedModelError, match="its first axis, '2', is not the batch"):
        prove_updates(model, CAPACITY)


def test_the_graph_is_not_changed():
    model = update_model(index_copy())
    graph = gs.import_onnx(onnx.shape_inference.infer_shapes(model))
    before = gs.export_onnx(graph).SerializeToString(deterministic=True)
    find_candidates(graph)
    assert gs.export_onnx(graph).SerializeToString(deterministic=True) == before
    assert [c.past.name for c in find_candidates(graph)] == ["past"]
    assert tuple(graph.tensors()["past"].shape) == BNSD

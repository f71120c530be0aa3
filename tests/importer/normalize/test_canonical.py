"""The nodes and inputs of the canonical form."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnx_graphsurgeon as gs
import pytest
from concat_decode import run
from graphs import Graph
from onnx import TensorProto

from trt_kvcache.importer.normalize.canonical import Canonical, batch_of
from trt_kvcache.importer.normalize.findings import Visibility, Write

FLOAT, INT64 = TensorProto.FLOAT, TensorProto.INT64
FEEDS = {
    "input_ids": np.zeros((2, 3), np.int64),
    "past": np.zeros((2, 2, 8, 4), np.float32),
    "new": np.zeros((2, 3, 2, 4), np.float32),
    "query": np.zeros((2, 4, 3, 4), np.float32),
}


def start(shape: tuple[int | str, ...] = ("B", 2, "P", 4), names: tuple[str, ...] = ()) -> tuple[gs.Graph, Canonical]:
    """A graph with a cache, new rows, tokens and a query, and nothing computed yet."""
    g = Graph()
    g.input("input_ids", INT64, ["B", "S"])
    g.input("past", FLOAT, shape)
    g.input("new", FLOAT, ["B", "S", 2, 4])
    g.input("query", FLOAT, ["B", 4, "S", 4])
    for name in names:
        g.input(name, FLOAT, [1])
    g.node("Identity", ["past"], "present")
    g.node("Identity", ["query"], "attended")
    g.output("present", FLOAT, shape)
    g.output("attended", FLOAT, ["B", 4, "S", 4])
    graph = gs.import_onnx(g.model(24))
    tokens = graph.inputs[0]
    return graph, Canonical(graph, tokens, batch_of(graph.inputs[1]), 8)


def write(graph: gs.Graph, perm: tuple[int, ...] | None, axis: int, **changes: Any) -> Write:
    tensors = graph.tensors()
    known = {"growing": True, "circular": False, "node": "node"} | changes
    return Write("Concat", tensors["past"], tensors["present"], tensors["new"], perm, axis, **known)


def finished(graph: gs.Graph) -> onnx.ModelProto:
    model: onnx.ModelProto = gs.export_onnx(graph.cleanup().toposort())
    del model.graph.value_info[:]
    model.ir_version = 10
    onnx.checker.check_model(model, full_check=True)
    return model


@pytest.mark.parametrize(("shape", "perm", "axis"), [
    (("B", 2, "P", 4), (0, 2, 1, 3), 2), (("B", "P", 2, 4), None, 1), (("B", "P", 2, 4), (0, 1, 2, 3), 1),
])  # fmt: skip
def test_an_update_writes_at_the_write_indices(shape: Any, perm: Any, axis: int) -> None:
    graph, canonical = start(shape)
    canonical.write(write(graph, perm, axis))
    model = finished(graph)
    sizes = [{"B": 2, "P": 8}.get(d, d) for d in shape]
    rng = np.random.default_rng(0)
    past, new = rng.standard_normal(sizes).astype(np.float32), rng.standard_normal((2, 3, 2, 4)).astype(np.float32)
    got = run(model, FEEDS | {"past": past, "new": new, "write_indices": np.array([1, 4])})["present"]
    wanted = past.copy()
    rows = np.moveaxis(wanted, axis, 1)
    for row, first in enumerate((1, 4)):
        rows[row, first : first + 3] = new[row]
    np.testing.assert_array_equal(got, wanted)
    assert canonical.idioms == {"past": "Concat"}


@pytest.mark.parametrize(("circular", "mode"), [(True, "circular"), (False, "linear")])
def test_modes(circular: bool, mode: str) -> None:
    graph, canonical = start()
    canonical.write(write(graph, (0, 2, 1, 3), 2, circular=circular))
    (node,) = [n for n in graph.nodes if n.op == "TensorScatter"]
    assert node.attrs["mode"] == mode


@pytest.mark.parametrize(("shape", "lengths"), [(("B", 2, "P", 4), 8), (("B", 2, 6, 4), 6)])
def test_a_symbolic_length_becomes_the_capacity(shape: Any, lengths: int) -> None:
    graph, canonical = start(shape)
    canonical.write(write(graph, (0, 2, 1, 3), 2))
    assert [graph.tensors()[name].shape[2] for name in ("past", "present")] == [lengths, lengths]


def test_inputs_are_added_once_and_only_when_needed() -> None:
    graph, canonical = start()
    before = [t.name for t in graph.inputs]
    assert canonical.write_indices is canonical.write_indices
    assert [t.name for t in graph.inputs] == [*before, "write_indices"]
    assert canonical.lengths.shape == ["B"]
    assert [t.name for t in graph.inputs] == [*before, "write_indices", "nonpad_kv_seqlen"]


def test_names_that_are_taken() -> None:
    _, canonical = start(names=("write_indices",))
    assert canonical.write_indices.name == "write_indices_"


def test_positions_of_each_row() -> None:
    graph, canonical = start()
    graph.outputs = [canonical.positions()]
    assert canonical.positions() is graph.outputs[0]
    graph.outputs[0].dtype = np.int64
    model: onnx.ModelProto = gs.export_onnx(graph.cleanup().toposort())
    model.ir_version = 10
    (got,) = run(model, FEEDS | {"write_indices": np.array([0, 5])}).values()
    np.testing.assert_array_equal(got, [[0, 1, 2], [5, 6, 7]])


@pytest.mark.parametrize(
    ("visibility", "attrs", "inputs", "opset"),
    [
        (Visibility(), {"is_causal": 1}, 7, 24),
        (Visibility(window=3), {"is_causal": 1, "left_window_size": 2}, 7, 25),
        (Visibility(causal=False), {"is_causal": 0}, 7, 24),
        (Visibility(causal=False, bounded=False), {"is_causal": 0}, 3, 24),
    ],
)
def test_what_queries_see(visibility: Visibility, attrs: dict[str, int], inputs: int, opset: int) -> None:
    graph, canonical = start()
    canonical.write(write(graph, (0, 2, 1, 3), 2))
    tensors = graph.tensors()
    canonical.attention(tensors["attended"], tensors["query"], tensors["present"], tensors["present"], visibility, 0.5)
    node = tensors["attended"].inputs[0]
    assert dict(node.attrs) == {**attrs, "scale": 0.5}
    assert len(node.inputs) == inputs
    assert canonical.opset == opset


def test_a_cap_is_an_attribute() -> None:
    graph, canonical = start()
    tensors = graph.tensors()
    canonical.attention(
        tensors["attended"], tensors["query"], tensors["past"], tensors["past"], Visibility(), 1.0, softcap=30.0
    )
    assert tensors["attended"].inputs[0].attrs["softcap"] == 30.0


@pytest.mark.parametrize(("first", "name"), [("B", "B"), (3, 3), ("", "batch")])
def test_the_batch_has_a_name(first: int | str, name: int | str) -> None:
    assert batch_of(gs.Variable("x", np.float32, [first, 2])) == name

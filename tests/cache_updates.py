"""Models with one cache update each, as many exporters write it, and what a proof of the update is compared with.

hidden [B, S, N * D] -- MatMul, Reshape --> new [B, S, N, D]
past, new, pos -- the idiom under test --> present
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod

import numpy as np
import onnx
import onnx_graphsurgeon as gs
import onnxruntime as ort
import pytest
from graphs import Dim, Graph
from onnx import TensorProto

from trt_kvcache.errors import UnsupportedModelError
from trt_kvcache.importer.interface.exported import Interface
from trt_kvcache.importer.normalize.candidate import Candidate
from trt_kvcache.importer.normalize.canonical import Canonical
from trt_kvcache.importer.normalize.evidence.blueprint import Blueprint
from trt_kvcache.importer.normalize.evidence.samples import Samples
from trt_kvcache.importer.normalize.findings import Write
from trt_kvcache.importer.normalize.idioms.cache_updates import find_candidates
from trt_kvcache.importer.normalize.idioms.read_updates import read_update

HEADS, SIZE, CAPACITY = 2, 4, 16
BNSD: tuple[Dim, ...] = ("B", HEADS, CAPACITY, SIZE)

Idiom = Callable[[Graph, str, str], str]


def update_model(
    idiom: Idiom,
    shape: Sequence[Dim] = BNSD,
    pos: Sequence[Dim] | None = (),
    length: Dim = "S",
    batch: Dim = "B",
    dtype: int = TensorProto.FLOAT,
    present: Sequence[Dim] | None = None,
) -> onnx.ModelProto:
    """A model whose cache `past` of this shape is updated by `idiom`.

    Args:
        idiom: is given the graph, ``past`` and ``new`` ``[B, S, N, D]``; returns the tensor that becomes `present`.
        shape: of the past.
        pos: shape of the int64 input ``pos``; None: there is none.
        length: S.
        batch: B.
        dtype: of hidden, past and present.
        present: shape of the present, if it is not that of the past.
    """
    graph = Graph()
    hidden = graph.input("hidden", dtype, [batch, length, HEADS * SIZE])
    if pos is not None:
        graph.input("pos", TensorProto.INT64, pos)
    past = graph.input("past", dtype, shape)
    weight = np.random.default_rng(7).standard_normal((HEADS * SIZE, HEADS * SIZE))
    projected = graph.node("MatMul", [hidden, graph.constant(weight, onnx.helper.tensor_dtype_to_np_dtype(dtype))])
    new = graph.node("Reshape", [projected, graph.constant([0, 0, HEADS, SIZE])], "new")
    result = idiom(graph, past, new)
    graph.node("Identity", [result], "present")
    graph.output("present", dtype, list(present or shape))
    return graph.model(24)


def transpose(graph: Graph, tensor: str, *perm: int) -> str:
    """A Transpose."""
    return graph.node("Transpose", [tensor], perm=list(perm))


def new_tokens(graph: Graph) -> str:
    """S, a scalar, from the shape of `hidden`."""
    return graph.node("Gather", [graph.node("Shape", ["hidden"]), graph.constant(1)])


def positions(graph: Graph, start: str = "pos") -> str:
    """``start + 0 .. S - 1``, ``[S]``."""
    steps = graph.node("Range", [graph.constant(0), new_tokens(graph), graph.constant(1)])
    return graph.node("Add", [steps, start])


def column(graph: Graph, rows: str) -> str:
    """Rows as ScatterND takes them, ``[.., 1]``."""
    return graph.node("Unsqueeze", [rows, graph.constant([-1])])


def joined(graph: Graph, *rows: str) -> str:
    """Numbers for several axes, each broadcast to the shape of all, as an index ``[.., k]``."""
    shape = graph.node("Shape", [rows[0]])
    for other in rows[1:]:
        shape = graph.node("Max", [shape, graph.node("Shape", [other])])
    parts = [column(graph, graph.node("Expand", [r, shape])) for r in rows]
    return graph.node("Concat", parts, axis=-1)


def count(graph: Graph, size: int | str) -> str:
    """0, 1, 2 .. below a constant, or below the batch."""
    if size == "B":
        size = graph.node("Gather", [graph.node("Shape", ["hidden"]), graph.constant(0)])
    else:
        size = graph.constant(size)
    return graph.node("Range", [graph.constant(0), size, graph.constant(1)])


def along(graph: Graph, vector: str, axis: int, rank: int) -> str:
    """A vector as one axis among `rank`."""
    return graph.node("Unsqueeze", [vector, graph.constant([a for a in range(rank) if a != axis])])


def index_copy(rows: Callable[[Graph], str] = positions) -> Idiom:
    """torch's index_copy on the sequence axis of ``[B, N, L, D]``: ScatterND between Transposes."""

    def idiom(graph: Graph, past: str, new: str) -> str:
        data, update = transpose(graph, past, 2, 0, 1, 3), transpose(graph, new, 1, 0, 2, 3)
        written = graph.node("ScatterND", [data, column(graph, rows(graph)), update], "written")
        return transpose(graph, written, 1, 2, 0, 3)

    return idiom


def load(model: onnx.ModelProto) -> tuple[gs.Graph, onnx.ModelProto]:
    """The graph that the search reads, and the model that samples are made of."""
    model = onnx.shape_inference.infer_shapes(model, check_type=True, strict_mode=True, data_prop=True)
    return gs.import_onnx(model), model


def candidates(model: onnx.ModelProto) -> tuple[Candidate, ...]:
    """What looks like a cache update."""
    return find_candidates(load(model)[0])


def prove_updates(model: onnx.ModelProto, capacity: int | None = None) -> tuple[Write, ...]:
    """The proven updates of a model."""
    return _prove(*load(model), capacity)


def _prove(graph: gs.Graph, model: onnx.ModelProto, capacity: int | None) -> tuple[Write, ...]:
    found = find_candidates(graph)
    for candidate in found:
        if candidate.reason:
            raise candidate.refusal(candidate.reason)
    interface = Interface(model, found, None)
    samples = Samples(Blueprint(model, {}), interface, interface.capacity(capacity))
    return tuple(read_update(candidate, samples) for candidate in found)


def assert_same_update(
    model: onnx.ModelProto, write_index: int, batch: int, length: int, capacity: int | None = None
) -> Write:
    """Prove the update of a model, put a TensorScatter in its place, and compare both in ONNX Runtime.

    Args:
        model: from `update_model`.
        write_index: P.
        batch: B.
        length: S.
        capacity: of a growing cache.

    Returns:
        The proven update.
    """
    graph, inferred = load(model)
    (write,) = _prove(graph, inferred, capacity)
    total = CAPACITY if capacity is None else capacity
    rng = np.random.default_rng(write_index)
    shapes = {t.name: t.shape for t in graph.inputs}
    sizes = {"B": batch, "S": length, "P": write_index, "L": total}
    dtype = onnx.helper.tensor_dtype_to_np_dtype(inferred.graph.input[0].type.tensor_type.elem_type)

    def random(name: str) -> np.ndarray:
        return rng.standard_normal([d if isinstance(d, int) else sizes[d] for d in shapes[name]]).astype(dtype)

    feeds = {"hidden": random("hidden"), "past": random("past")}
    if "pos" in shapes:
        shape = [d if isinstance(d, int) else sizes[d] for d in shapes["pos"]]
        moving = bool(shape) and shapes["pos"][-1] == "S"
        feeds["pos"] = np.broadcast_to(write_index + np.arange(length) if moving else write_index, shape).astype(
            np.int64
        )
    original = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    (wanted,) = original.run(["present"], feeds)

    past = feeds["past"]
    if write.growing:
        longer = list(past.shape)
        longer[write.axis] = total - write_index
        past = np.concatenate([past, np.full(longer, 1e4, past.dtype)], write.axis)
        write.past.shape = [total if i == write.axis else d for i, d in enumerate(write.past.shape)]
    canonical = Canonical(graph, next(t for t in graph.inputs if t.name == "hidden"), "B", total)
    canonical.write(write)
    graph.cleanup(remove_unused_graph_inputs=False).toposort()
    graph.inputs = [t for t in graph.inputs if t.name != "pos"]
    graph.outputs = [t for t in graph.outputs if t.name == "present"]
    rewritten = gs.export_onnx(graph)
    del rewritten.graph.value_info[:]
    onnx.checker.check_model(rewritten, full_check=True)
    session = ort.InferenceSession(rewritten.SerializeToString(), providers=["CPUExecutionProvider"])
    rows = write_index % total if write.circular else write_index
    indices = np.full(batch, rows, np.int64)
    (got,) = session.run(["present"], {"hidden": feeds["hidden"], "past": past, "write_indices": indices})
    if write.growing:
        got = got.take(np.arange(write_index + length), write.axis)
    assert prod(wanted.shape) > 0
    np.testing.assert_array_equal(got, wanted)
    return write


def check_refused(
    idiom: Idiom,
    match: str,
    shape: Sequence[Dim] = BNSD,
    pos: Sequence[Dim] | None = (),
    length: Dim = "S",
    batch: Dim = "B",
) -> None:
    """Assert that an update is refused with this message."""
    with pytest.raises(UnsupportedModelError, match=match):
        prove_updates(update_model(idiom, shape, pos, length, batch), CAPACITY if "L" in shape else None)

"""An index of ScatterND is read column by column, and what it writes is evaluated at once: as ONNX has it."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_graphsurgeon as gs
import pytest
from graphs import Graph
from onnx.reference import ReferenceEvaluator

from trt_kvcache.importer.normalize.evidence.blueprint import Array, Blueprint
from trt_kvcache.importer.normalize.evidence.probe import Probe
from trt_kvcache.importer.normalize.idioms.columns import read_index

INT, FLOAT = onnx.TensorProto.INT64, onnx.TensorProto.FLOAT
SHAPE = (2, 3, 4)


def _index(axes: int = -1, parts: tuple[list[int], ...] = ([2, 1, 1], [3, 1], [4])) -> onnx.ModelProto:
    """Of sequences, rows and numbers ``[2, 3, 4, 3]``."""
    g = Graph()
    start = g.input("start", INT, [1])
    shape = g.constant(np.array(SHAPE))
    columns = []
    for sizes in parts:
        counted = g.constant(np.arange(np.prod(sizes)).reshape(sizes))
        spread = g.node("Expand", [g.node("Add", [counted, start]), shape])
        columns.append(g.node("Unsqueeze", [spread, g.constant([axes])]))
    g.node("Concat", columns, "index", axis=-1)
    g.output("index", INT, [None] * 4)
    model: onnx.ModelProto = g.model(17)
    return model


def _read(model: onnx.ModelProto, start: int) -> tuple[Array | None, int]:
    """The whole index, and how many tensors it is read from."""
    index = read_index(gs.import_onnx(model).outputs[0])
    columns = index.read(Probe(Blueprint(model, {}), {"start": (1,)}, {"start": np.array([start])}))
    whole = None if columns is None else [np.broadcast_to(part, columns.shape) for part in columns.parts]
    return None if whole is None else np.stack(whole, axis=-1), len(index.names)


def _computed(model: onnx.ModelProto, given: dict[str, Array]) -> Array:
    (made,) = list(ReferenceEvaluator(model).run(None, given))
    return np.asarray(made)


@pytest.mark.parametrize("start", [0, 5, -3])
def test_columns_are_those_of_the_whole(start: int) -> None:
    model = _index()
    found, names = _read(model, start)
    wanted = _computed(model, {"start": np.array([start])})
    assert names == 6
    np.testing.assert_array_equal(found, wanted)


def test_what_is_put_together_in_another_way_is_read_as_a_whole() -> None:
    model = _index(axes=3)  # the last one, too, which structure alone does not say
    found, names = _read(model, 1)
    wanted = _computed(model, {"start": np.array([1])})
    assert names == 1
    np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize("parts", [([2, 1, 1], [5, 1], [4]), ([2, 1, 1], [3, 1], [1, 2, 1, 1])])
def test_columns_that_do_not_fit_are_unknown(parts: tuple[list[int], ...]) -> None:
    assert _read(_index(parts=parts), 0)[0] is None


@pytest.mark.parametrize("reduction", ["none", "add"])
@pytest.mark.parametrize("columns", [1, 2, 3])
def test_what_is_written_is_what_onnx_says(columns: int, reduction: str) -> None:
    rng = np.random.default_rng(columns)
    g = Graph()
    g.input("data", FLOAT, SHAPE), g.input("rows", FLOAT, [7, 5, *SHAPE[columns:]])
    index = rng.integers(-2, 2, (7, 5, columns))  # several in one place, and counted from the end
    g.node("ScatterND", ["data", g.constant(index), "rows"], "made", reduction=reduction)
    g.output("made", FLOAT, SHAPE)
    model = g.model(18)
    given = {"data": rng.random(SHAPE, np.float32), "rows": rng.random((7, 5, *SHAPE[columns:]), np.float32)}
    made = Probe(Blueprint(model, {}), {name: v.shape for name, v in given.items()}, given).value("made")
    np.testing.assert_array_equal(made, _computed(model, given))


def test_rows_outside_are_unknown() -> None:
    g = Graph()
    g.input("data", FLOAT, SHAPE), g.input("rows", FLOAT, [1, 3, 4])
    g.node("ScatterND", ["data", g.constant([[2]]), "rows"], "made")
    g.output("made", FLOAT, SHAPE)
    given = {"data": np.zeros(SHAPE, np.float32), "rows": np.ones((1, 3, 4), np.float32)}
    assert Probe(Blueprint(g.model(18), {}), {}, given).value("made") is None

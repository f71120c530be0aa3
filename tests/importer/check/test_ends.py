"""Outputs without an attention: TensorScatter of any type, views of past and present, the past itself."""

from copy import deepcopy
from functools import cache
from pathlib import Path

import onnx
import pytest
from graphs import Graph
from onnx import TensorProto
from plain_judge import EQUAL, REFUSED, judge, trial
from scatter_graphs import scatter_plain
from verify import mistakes as m

from trt_kvcache.errors import UnsupportedModelError
from trt_kvcache.importer import ImportedModel, import_model
from trt_kvcache.importer.cache_plan import PlanOptions
from trt_kvcache.importer.check import check_rewrite

ROWS = 8
DTYPES = {
    "bool": TensorProto.BOOL, "int8": TensorProto.INT8, "int32": TensorProto.INT32, "int64": TensorProto.INT64,
    "float16": TensorProto.FLOAT16, "bfloat16": TensorProto.BFLOAT16,
}  # fmt: skip


def scatter(dtype: int, *, mode: str = "linear", length: int | str = "S") -> onnx.ModelProto:
    """A cache ``[B, 8, 8, 2]``, and beside it the past, rows of the present by Slice and Gather, and all of it flat."""
    graph = Graph()
    past = graph.input("cache.0", dtype, ["B", 4, ROWS, ROWS])
    new = graph.input("update", dtype, ["B", 4, length, ROWS])
    where = graph.input("write_indices", TensorProto.INT64, ["B"])
    present = graph.TensorScatter(past, new, where, out="present.0", axis=2, mode=mode)
    graph.output(present, dtype, ["B", 4, ROWS, ROWS])
    graph.output(past, dtype, ["B", 4, ROWS, ROWS])
    graph.Slice(present, [1], [4], [2], out="rows")
    graph.output("rows", dtype, ["B", 4, 3, ROWS])
    graph.Gather(present, 2, axis=1, out="head")
    graph.output("head", dtype, ["B", ROWS, ROWS])
    graph.Reshape(past, [0, -1], out="flat")
    graph.output("flat", dtype, ["B", 4 * ROWS * ROWS])
    return graph.model()


@cache
def imported(folder: Path, dtype: str, mode: str, length: int | str) -> ImportedModel:
    onnx.save(scatter(DTYPES[dtype], mode=mode, length=length), folder / "model.onnx")
    return import_model(folder / "model.onnx", PlanOptions())


def _writer(model: onnx.ModelProto) -> onnx.NodeProto:
    return next(n for n in model.graph.node if n.output[0] == "present.0")


def _other_axis(model: onnx.ModelProto) -> None:
    m.set_attribute(_writer(model), "axis", 3)


def _next_row(model: onnx.ModelProto) -> None:
    """One row after the row that is meant, and the first one after the last."""
    m.insert(model, _writer(model), 1, "Add", m.constant(model, 1))
    m.insert(model, _writer(model), 1, "Mod", m.constant(model, ROWS))


def _lost(model: onnx.ModelProto) -> None:
    writer = _writer(model)
    writer.op_type = "Identity"
    del writer.input[1:], writer.attribute[:]


def _straight(model: onnx.ModelProto) -> None:
    """A circular update ends at the last row."""
    wrap = m.nodes(model, "Mod")[0]
    wrap.op_type = "Min"
    wrap.input[1] = m.constant(model, ROWS - 1)


def _fed(output: str, op: str, place: int, tensor: str) -> m.Mistake:
    def mistake(model: onnx.ModelProto) -> None:
        node = next(n for n in model.graph.node if output in n.output)
        assert node.op_type == op
        node.input[place] = tensor

    return mistake


def _later_rows(model: onnx.ModelProto) -> None:
    node = next(n for n in model.graph.node if "rows" in n.output)
    node.input[1:3] = [m.constant(model, [2]), m.constant(model, [5])]


def _other_head(model: onnx.ModelProto) -> None:
    next(n for n in model.graph.node if "head" in n.output).input[1] = m.constant(model, 1)


FAULTS: tuple[m.Mistake, ...] = (
    _other_axis, _next_row, _lost, _later_rows, _other_head, _fed("rows", "Slice", 0, "cache.0"),
    _fed("head", "Gather", 0, "cache.0"), _fed("flat", "Reshape", 0, "present.0"),
)  # fmt: skip
WORDS = "does not compute the same|could not be compared|computes the output '.*' differently|does not match its plan"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("scatter")


@pytest.mark.few(3)
@pytest.mark.parametrize("dtype", DTYPES)
def test_views_of_caches_are_compared(dtype: str, folder: Path) -> None:
    """The model is taken, and no fault is."""
    made = imported(folder, dtype, "linear", "S")
    assert {t.name for t in made.plan.tensors if t.io == "output"} >= {"rows", "head", "flat"}
    for fault in FAULTS:
        wrong = deepcopy(made.model)
        fault(wrong)
        with pytest.raises(UnsupportedModelError, match=WORDS):
            check_rewrite(made.source.proto, wrong, made.plan, {}, folder)


@pytest.mark.few(2)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("length", ["S", 3])
def test_circular_updates_are_not_straight(dtype: str, length: int | str, folder: Path) -> None:
    made = imported(folder, dtype, "circular", length)
    wrong = deepcopy(made.model)
    _straight(wrong)
    with pytest.raises(UnsupportedModelError, match=WORDS):
        check_rewrite(made.source.proto, wrong, made.plan, {}, folder)


def test_an_output_of_one_number_is_compared() -> None:
    """It is one in each step, and another one in the next."""
    plain = scatter_plain(303221)
    assert [d.dim_value for d in plain.model.graph.output[-1].type.tensor_type.shape.dim] == [1]
    assert judge(plain).kind == EQUAL


@pytest.mark.few(2)
@pytest.mark.parametrize("seed", range(40))
def test_random_faults_are_refused_or_equal(seed: int) -> None:
    plain = scatter_plain(seed)
    for number in range(4):
        outcome = trial(plain, 10 * seed + number)
        assert outcome.kind in (EQUAL, REFUSED), (seed, number, outcome)

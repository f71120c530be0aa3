"""`plan_model` is the dry run of `rewrite_model`: the same plan, and the same refusals in the same words."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import pytest
from cases import packed_model
from graphs import Graph, attention_model, scatter_model
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from onnx import TensorProto

from trt_kvcache.errors import InvalidModelError, ModelError, UnsupportedModelError
from trt_kvcache.importer import plan_model, rewrite_model
from trt_kvcache.importer.plan import CacheLayout, Fallback, PlanOptions, Target

FULL = PlanOptions(target=Target.TENSORRT)
DTYPES = ("FLOAT", "FLOAT16", "BFLOAT16", "INT8", "UINT8", "INT32", "INT64", "BOOL", "FLOAT8E4M3FN", "INT4")


def two_caches(updates: list[dict[str, Any]]) -> onnx.ModelProto:
    """Several updates in one model; each is ``dtype, mode, axis, shape`` (without batch), of open length."""
    graph = Graph()
    for i, update in enumerate(updates):
        dtype, shape, axis = TensorProto.DataType.Value(update["dtype"]), update["shape"], update["axis"]
        written: list[Any] = [*shape]
        written[axis - 1] = "S"
        inputs = [graph.input(f"past_{i}", dtype, ["B", *shape]), graph.input(f"update_{i}", dtype, ["B", *written])]
        inputs.append(graph.input(f"write_indices_{i}", TensorProto.INT64, ["B"]))
        graph.node("TensorScatter", inputs, f"present_{i}", mode=update["mode"], axis=axis)
        graph.output(f"present_{i}", dtype, ["B", *shape])
    return graph.model()


@st.composite
def updates(draw: st.DrawFn) -> list[dict[str, Any]]:
    found = []
    for _ in range(draw(st.integers(1, 2))):
        shape = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
        axis = draw(st.integers(1, len(shape)))
        shape[axis - 1] = 6
        mode = draw(st.sampled_from(("linear", "circular")))
        found.append({"dtype": draw(st.sampled_from(DTYPES)), "mode": mode, "axis": axis, "shape": shape})
    return found


OPTIONS = st.builds(
    PlanOptions, target=st.sampled_from(Target), fallback=st.sampled_from(Fallback),
    cache_layout=st.sampled_from(CacheLayout),
)  # fmt: skip


def outcome(work: Callable[[], Any]) -> Any:
    """What comes back, or the type and the words of the refusal."""
    try:
        return work()
    except ModelError as error:
        return type(error), str(error)


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(updates=updates(), options=OPTIONS)
def test_plan_and_rewrite_agree(updates: list[dict[str, Any]], options: PlanOptions) -> None:
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model.onnx"
        onnx.save(two_caches(updates), model)
        planned = outcome(lambda: plan_model(model, options))
        rewritten = outcome(lambda: rewrite_model(model, Path(folder) / "rewritten.onnx", options))
    assert planned == rewritten


def check_refused(
    model: onnx.ModelProto, folder: Path, options: PlanOptions, kind: type[ModelError], words: str
) -> None:
    onnx.save(model, folder / "model.onnx")
    for work in (
        lambda: plan_model(folder / "model.onnx", options),
        lambda: rewrite_model(folder / "model.onnx", folder / "rewritten.onnx", options),
    ):
        with pytest.raises(kind, match=words):
            work()


@pytest.mark.parametrize("dtype", ["INT4", "FLOAT4E2M1"])
@pytest.mark.parametrize(("axis", "shape"), [(2, (2, 16, 3)), (1, (16, 5)), (3, (3, 5, 16))], ids=str)
def test_rows_inside_a_byte(dtype: str, axis: int, shape: tuple[int, ...], tmp_path: Path) -> None:
    model = scatter_model(("B", *shape), axis, dtype=TensorProto.DataType.Value(dtype))
    check_refused(
        model, tmp_path, FULL, UnsupportedModelError, "elements, which do not end on a byte.*an even size after"
    )


def test_rows_of_a_view_may_end_inside_a_byte_of_the_model(tmp_path: Path) -> None:
    """Rows of the view are what the kernel writes: 3 x 2 elements of 4 bits are three bytes."""
    model = scatter_model(("B", 16, 3, 2), 1, dtype=TensorProto.INT4)
    onnx.save(model, tmp_path / "model.onnx")
    assert plan_model(tmp_path / "model.onnx", FULL).caches[0].physical_shape == ("B", 1, 16, 6)


def test_types_that_one_definition_cannot_cover(tmp_path: Path) -> None:
    both = [{"dtype": d, "mode": "linear", "axis": 2, "shape": [2, 6, 4]} for d in ("INT4", "INT64")]
    check_refused(
        two_caches(both), tmp_path, FULL, UnsupportedModelError, "caches of types int4 and int64 that are updated"
    )
    onnx.save(two_caches([both[0], both[1] | {"mode": "circular"}]), tmp_path / "model.onnx")
    assert len(plan_model(tmp_path / "model.onnx", FULL).caches) == 2  # two operators, two definitions


def test_plain_attention_of_an_unknown_number_of_heads(tmp_path: Path) -> None:
    model = attention_model(softcap=5.0)
    for value in (*model.graph.input, *model.graph.output):
        value.type.tensor_type.shape.dim[1].ClearField("dim_value")
    check_refused(
        model, tmp_path, PlanOptions(), UnsupportedModelError, "needs plain operators, and its number of heads"
    )


def packed(past: int = 4, update: int = 3, cache: int = TensorProto.FLOAT16, index: int = TensorProto.INT32) -> Any:
    model = packed_model(integer=index)
    shapes = {"past": past, "present": past, "update": update}
    for value in (*model.graph.input, *model.graph.output):
        kind = value.type.tensor_type
        if value.name in ("past", "present"):
            kind.elem_type = cache
        while len(kind.shape.dim) > shapes.get(value.name, 1):
            del kind.shape.dim[-1]
    return model


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (packed(past=3), r"has 'past' of shape \['B', 2, 16\] for its cache \[B, N, S_max, H\].*4 dimensions"),
        (packed(update=2), r"has 'update' of shape \['T', 2\] for its update \[T, N, H\].*3 dimensions"),
        (packed(cache=TensorProto.FLOAT), "writes a float16 update into a float cache; cast the update first"),
        (packed(index=TensorProto.INT8), "has int8 'write_indices' for its write indices.*cast it to int32 or int64"),
    ],
    ids=["cache", "update", "types", "indices"],
)
def test_rules_of_packed_updates(model: onnx.ModelProto, words: str, tmp_path: Path) -> None:
    check_refused(model, tmp_path, PlanOptions(), InvalidModelError, words)

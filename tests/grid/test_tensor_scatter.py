"""Every form of TensorScatter, generated: rewritten, it equals a numpy reference; built, or refused as documented."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from graphs import scatter_model
from harness import Feeds, build, imported, random_array, run_rewritten
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto
from reference import tensor_scatter

from trt_kvcache.errors import UnsupportedModelError
from trt_kvcache.importer import ImportedModel
from trt_kvcache.importer.plan import Fallback, PlanOptions, Route

CAPACITY = 6
STEPS = 3
NATIVE = ("FLOAT", "FLOAT16", "BFLOAT16")
COPIED = ("INT8", "INT32", "INT64", "BOOL")
REFUSED = (
    "DOUBLE", "UINT8", "UINT16", "UINT32", "UINT64", "INT16", "STRING", "COMPLEX64", "COMPLEX128", "FLOAT8E4M3FN",
    "FLOAT8E4M3FNUZ", "FLOAT8E5M2", "FLOAT8E5M2FNUZ", "UINT4", "INT4", "FLOAT4E2M1", "FLOAT8E8M0",
)  # fmt: skip


@dataclass(frozen=True)
class Case:
    """One update.

    Attributes:
        dynamic: the update length is a symbol.
        open_batch: the batch is a symbol.
        other: the dimensions besides batch and sequence.
    """

    axis: int
    mode: str = "linear"
    dtype: str = "FLOAT16"
    indices: bool = True
    dynamic: bool = True
    open_batch: bool = True
    length: int = 1
    other: tuple[int, ...] = (2, 3)
    batch: int = 2
    capacity: int = CAPACITY

    def __str__(self) -> str:
        dims = "x".join(map(str, self.shape))
        kind = ("B" if self.open_batch else "") + ("S" if self.dynamic else "") or "static"
        index = "indices" if self.indices else "zero"
        return f"{dims}-axis{self.axis}-{self.mode}-{self.dtype.lower()}-{index}-{kind}-{self.length}"

    @property
    def sequence_axis(self) -> int:
        return self.axis % (len(self.other) + 2)

    @property
    def shape(self) -> tuple[int, ...]:
        dims = list(self.other)
        dims.insert(self.sequence_axis - 1, self.capacity)
        return (self.batch, *dims)

    @property
    def update_shape(self) -> tuple[int, ...]:
        dims = list(self.shape)
        dims[self.sequence_axis] = self.length
        return tuple(dims)


def model_of(case: Case) -> object:
    shape: list[int | str] = list(case.shape)
    shape[0] = "B" if case.open_batch else case.batch
    dtype = TensorProto.DataType.Value(case.dtype)
    length = "S" if case.dynamic else case.length
    return scatter_model(shape, case.axis, length, dtype, case.mode, case.indices)


def start_positions(case: Case, result: ImportedModel, rng: np.random.Generator) -> np.ndarray:
    """A legal write index per row, different where they can be; circular ones lie beyond the capacity too."""
    fits = case.capacity - case.length + 1
    if case.mode == "linear":
        return rng.integers(0, fits, case.batch)
    if result.plan.caches[0].contract is None:
        return rng.integers(0, 3 * case.capacity, case.batch)
    return rng.integers(0, fits, case.batch) + case.capacity * rng.integers(0, 3, case.batch)


def check(case: Case, folder: Path, options: PlanOptions) -> ImportedModel:
    """A few steps, each on the cache of the one before, against the reference; then a build."""
    result = imported(model_of(case), folder, options)
    (cache,) = result.plan.caches
    assert (cache.capacity, cache.sequence_axis) == (case.capacity, case.sequence_axis)
    rng = np.random.default_rng(list(str(case).encode()))
    dtype = TensorProto.DataType.Value(case.dtype)
    past = random_array(rng, dtype, case.shape, scale=100.0)
    for _ in range(STEPS):
        feeds: Feeds = {"past": past, "update": random_array(rng, dtype, case.update_shape)}
        if case.indices:
            feeds["write_indices"] = start_positions(case, result, rng)
        expected = tensor_scatter(past, feeds["update"], feeds.get("write_indices"), case.axis, case.mode)
        (got,) = run_rewritten(result, feeds).values()
        np.testing.assert_array_equal(got, expected)
        past = expected
    outcome = build(result)
    assert outcome.stage == "built", str(outcome)
    return result


@pytest.mark.parametrize("dtype", REFUSED)
@pytest.mark.parametrize("mode", ["linear", "circular"])
def test_dtypes_that_the_target_cannot_hold(dtype: str, mode: str, tmp_path: Path) -> None:
    """What was found, what is supported, what to do."""
    with pytest.raises(UnsupportedModelError) as caught:
        imported(model_of(Case(-2, mode, dtype)), tmp_path)
    message = str(caught.value)
    assert f"is {dtype.lower()}, which this target cannot hold" in message
    assert "it can hold float, float16, bfloat16" in message
    assert "export the cache as" in message


def test_every_dtype_of_the_operator_is_covered() -> None:
    from onnx import defs

    (constraint,) = (t for t in defs.get_schema("TensorScatter", 24).type_constraints if t.type_param_str == "T")
    names = {name.removeprefix("tensor(").removesuffix(")") for name in constraint.allowed_type_strs}
    assert names == {name.lower() for name in (*NATIVE, *COPIED, *REFUSED)}


@st.composite
def cases(draw: st.DrawFn) -> Case:
    other = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=4)))
    rank = len(other) + 2
    capacity = draw(st.integers(1, 12))
    axis = draw(st.integers(1, rank - 1))
    return Case(
        axis=axis if draw(st.booleans()) else axis - rank,
        mode=draw(st.sampled_from(("linear", "circular"))),
        dtype=draw(st.sampled_from(NATIVE + COPIED)),
        indices=draw(st.booleans()),
        dynamic=draw(st.booleans()),
        open_batch=draw(st.booleans()),
        length=draw(st.integers(1, capacity)),
        other=other,
        batch=draw(st.integers(1, 4)),
        capacity=capacity,
    )


def judge(case: Case) -> None:
    """Equal and built; and the plan says how."""
    with tempfile.TemporaryDirectory() as folder:
        result = check(case, Path(folder), PlanOptions())
        (cache,) = result.plan.caches
        several = case.mode == "circular" and case.indices and (case.dynamic or case.length > 1)
        fits = not several or case.dynamic or case.capacity % case.length == 0
        assert cache.route is (Route.NATIVE if case.dtype in NATIVE and fits else Route.FUNCTIONAL)
        assert (cache.contract is not None) == (several and cache.route is Route.NATIVE)
        if cache.contract is not None:
            assert cache.contract.max_update_length == (None if case.dynamic else case.length)
            plain = check(case, Path(folder), PlanOptions(fallback=Fallback.FUNCTIONAL))
            assert plain.plan.caches[0].route is Route.FUNCTIONAL
        assert bool(result.plan.warnings) == (cache.contract is not None or cache.route is Route.FUNCTIONAL)


FOUND = settings(derandomize=True, deadline=None, database=None)


@pytest.mark.slow
@settings(FOUND, max_examples=3)
@given(case=cases())
def test_some_forms(case: Case) -> None:
    judge(case)


@pytest.mark.slow
@settings(FOUND, max_examples=300)
@given(case=cases())
def test_many_forms(case: Case) -> None:
    judge(case)

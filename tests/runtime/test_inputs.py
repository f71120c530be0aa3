"""Values of the inputs of a step, written out by hand."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import sample_plans
from numpy.testing import assert_array_equal

from trt_kvcache.dtypes import array_dtype
from trt_kvcache.errors import PromptError, UnsupportedModelError
from trt_kvcache.importer.cache_plan import CachePlan, Role, TensorRole, UpdateForm, UpdateMode
from trt_kvcache.importer.interface import IndexLimits
from trt_kvcache.importer.steps.drawn_inputs import DrawnInputs, Step
from trt_kvcache.runtime.runner import StepBatch
from trt_kvcache.runtime.step_inputs import StepInputs
from trt_kvcache.runtime.token_inputs import PositionInput

STEP = StepBatch(0, np.array([[5, 6], [7, 8]]), np.array([3, 9]))


def plan(*inputs: TensorRole, mode: str = "linear", rows: int = 16) -> CachePlan:
    """A plan of one layer whose inputs, besides tokens, write indices and caches, are these."""
    base = sample_plans.sample_plan(1)
    caches = tuple(replace(c, capacity=rows, mode=UpdateMode(mode)) for c in base.caches)
    kept = [t for t in base.tensors if t.role in (Role.TOKENS, Role.WRITE_INDICES, Role.CACHE, Role.LOGITS)]
    return replace(base, caches=caches, tensors=(*kept, *inputs), spans=(), masks=(), attention=())


def tensor(
    name: str, role: Role, shape: tuple[int | str, ...], axes: tuple[str, ...], dtype: str = "int64"
) -> TensorRole:
    return TensorRole(name, "input", role, dtype, shape, "test", axes)


def value(
    role: TensorRole, step: StepBatch = STEP, mode: str = "linear", rows: int = 16, bucket: int = 256
) -> np.ndarray:
    inputs = StepInputs(plan(role, mode=mode, rows=rows), bucket)
    found = inputs.arrays(step)[role.name]
    assert found.shape == inputs.shapes(step)[role.name]
    assert found.flags.c_contiguous
    assert found.dtype == array_dtype(role.dtype)
    return found


def test_drawn_positions_count_on_without_a_limit() -> None:
    drawn = DrawnInputs(
        plan(tensor("p", Role.POSITIONS, ("b", "s"), ("batch", "sequence"))),
        IndexLimits({}, {}),
        {},
        np.random.default_rng(0),
    )
    assert_array_equal(drawn.shared(Step(2, (3, 1 << 20), (5, 9)))["p"], [[3, 4], [1 << 20, (1 << 20) + 1]])


PLACES = np.array([[[1, 2], [3, 4], [5, 6]], [[7, 8], [9, 10], [11, 12]]])  # [R, planes, S]
FIRST = PLACES.transpose(1, 0, 2)
COUNTED = np.array([[3, 4], [9, 10]])


@pytest.mark.parametrize(("shape", "axes", "counted", "given"), [
    (("batch", "seq"), ("batch", "sequence"), COUNTED, PLACES[:, 0]),
    (("t",), ("tokens",), COUNTED.reshape(-1), PLACES[:, 0].reshape(-1)),
    ((3, "batch", "seq"), ("", "batch", "sequence"), [COUNTED] * 3, FIRST),
    (("batch", 3, "seq"), ("batch", "", "sequence"), [[row] * 3 for row in COUNTED], PLACES),
    ((3, 2, "seq"), ("", "batch", "sequence"), [COUNTED] * 3, FIRST),
    ((3, 1, "t"), ("", "", "tokens"), [[COUNTED.reshape(-1)]] * 3, FIRST.reshape(3, 1, 4)),
], ids=str)  # fmt: skip
def test_positions(shape: Any, axes: tuple[str, ...], counted: Any, given: Any) -> None:
    """Counted, or the caller's: in planes that differ, wherever the axis is; a model with one plane takes the first."""
    role = tensor("p", Role.POSITIONS, shape, axes, "int32")
    assert_array_equal(value(role), counted)
    assert_array_equal(value(role, replace(STEP, positions=PLACES)), given)
    if len(shape) == 3:
        one_plane = replace(STEP, positions=PLACES[:, :1])
        assert len(np.unique(np.moveaxis(value(role, one_plane), shape.index(3), 0), axis=0)) == 1
    assert not StepInputs(plan(role)).uniform


@pytest.mark.parametrize(
    ("roles", "planes", "refusal"),
    [
        ([(("batch", "seq"), ("batch", "sequence"))], 1, ""),
        ([((3, "batch", "seq"), ("", "batch", "sequence"))], 3, ""),
        ([(("batch", 4, "seq"), ("batch", "", "sequence"))], 4, ""),
        ([((3, 1, "t"), ("", "", "tokens"))], 3, ""),
        ([], 0, "the model has no input of positions"),
        ([(("batch",), ("batch",))], 0, r"one position for a whole step \('p0' \['batch'\]\), not one for each token"),
        ([(("seq",), ("sequence",)), (("batch", "seq"), ("batch", "sequence"))], 0, "several inputs of positions"),
    ],
)
def test_which_positions_a_caller_may_give(
    roles: list[tuple[tuple[int | str, ...], tuple[str, ...]]], planes: int, refusal: str
) -> None:
    found = PositionInput(plan(*(tensor(f"p{i}", Role.POSITIONS, *role) for i, role in enumerate(roles))))
    assert found.planes == planes
    if refusal:
        with pytest.raises(PromptError, match=f"positions are given, but .*{refusal}"):
            found.read([1], 1)
    else:
        assert_array_equal(found.read([4, 7], 2), [[4, 7]] * planes)


@pytest.mark.parametrize(("extra", "words"), [
    (tensor("x", Role.OTHER, (1,), ("",)), r"input 'x' \(int64 \[1\]\) has no known role in decoding"),
    (tensor("x", Role.POSITIONS, ("batch", "q"), ("batch", "?")), "its size 'q' is unknown"),
    (tensor("x", Role.POSITIONS, ("batch",), ("batch",), "float"), "fills it with integers"),
    (tensor("x", Role.CACHE, ("batch", 8), ("batch", "")), "input 'x' is a cache that no update writes"),
    (tensor("x", Role.MASK, ("batch", 12), ("batch", ""), "bool"), "covers 12 keys, but the caches .* hold 16"),
])  # fmt: skip
def test_refusals(extra: TensorRole, words: str) -> None:
    with pytest.raises(UnsupportedModelError, match=words):
        StepInputs(plan(extra))


def test_several_masks_may_stand_for_several_windows() -> None:
    masks = [tensor(name, Role.MASK, ("batch", 16), ("batch", ""), "bool") for name in ("full", "sliding")]
    with pytest.raises(UnsupportedModelError, match=r"several masks \('full', 'sliding'\).* which window"):
        StepInputs(plan(*masks))


def test_refused_caches() -> None:
    good = plan()

    def with_cache(**changes: object) -> CachePlan:
        return replace(good, caches=tuple(replace(c, **changes) for c in good.caches))  # type: ignore[arg-type]

    for changed, words in (
        (with_cache(write_indices=None), "no write indices"),
        (with_cache(update_length=2, mode=UpdateMode.CIRCULAR), "number of tokens per step is fixed at 2"),
        (with_cache(update_length=2, form=UpdateForm.PACKED_NHD), "fixed at 2, .* of packed updates"),
        (with_cache(carried=False), "keeps no KV cache from step to step"),
        (replace(good, tensors=tuple(t for t in good.tensors if t.role is not Role.TOKENS)), "has the role 'tokens'"),
    ):
        with pytest.raises(UnsupportedModelError, match=words):
            StepInputs(changed)

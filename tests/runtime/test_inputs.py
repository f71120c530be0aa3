"""Values of the inputs of a step, written out by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import sample_plans
from numpy.testing import assert_array_equal

from trt_kvcache.engine.manifest import FileIdentity
from trt_kvcache.errors import OptionError, PromptError, SessionError, UnsupportedModelError
from trt_kvcache.importer.plan import CachePlan, Role, TensorRole, UpdateContract, UpdateForm, UpdateMode
from trt_kvcache.runtime.inputs import StepInputs, array_dtype, model_identity
from trt_kvcache.runtime.logits import StepLogits
from trt_kvcache.runtime.positions import PositionInput
from trt_kvcache.runtime.runner import StepBatch

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


PLACES = np.array([[[1, 2], [3, 4], [5, 6]], [[7, 8], [9, 10], [11, 12]]])  # [R, planes, S]
FIRST = PLACES.transpose(1, 0, 2)
COUNTED = np.array([[3, 4], [9, 10]])


@pytest.mark.parametrize(
    ("shape", "axes", "counted", "given"),
    [(("batch", "seq"), ("batch", "sequence"), COUNTED, PLACES[:, 0]),
     (("t",), ("tokens",), COUNTED.reshape(-1), PLACES[:, 0].reshape(-1)),
     ((3, "batch", "seq"), ("", "batch", "sequence"), [COUNTED] * 3, FIRST),
     (("batch", 3, "seq"), ("batch", "", "sequence"), [[row] * 3 for row in COUNTED], PLACES),
     ((3, 2, "seq"), ("", "batch", "sequence"), [COUNTED] * 3, FIRST),
     ((3, 1, "t"), ("", "", "tokens"), [[COUNTED.reshape(-1)]] * 3, FIRST.reshape(3, 1, 4))],
    ids=str,
)  # fmt: skip
def test_positions(shape: Any, axes: tuple[str, ...], counted: Any, given: Any) -> None:
    """Counted, or the caller's: in planes that differ, wherever the axis is; a model with one plane takes the first."""
    role = tensor("p", Role.POSITIONS, shape, axes, "int32")
    assert_array_equal(value(role), counted)
    assert_array_equal(value(role, replace(STEP, positions=PLACES)), given)
    if len(shape) == 3:
        one_plane = replace(STEP, positions=PLACES[:, :1])
        assert len(np.unique(np.moveaxis(value(role, one_plane), shape.index(3), 0), axis=0)) == 1
    assert not StepInputs(plan(role)).uniform


def test_positions_that_rows_share() -> None:
    shared = tensor("p", Role.POSITIONS, ("seq",), ("sequence",))
    assert_array_equal(value(shared), [3, 4])
    assert StepInputs(plan(shared)).uniform
    one_row = tensor("p", Role.POSITIONS, (3, 1, "seq"), ("", "", "sequence"))
    alone = StepBatch(0, np.array([[5, 6]]), np.array([3]), positions=PLACES[:1])
    assert_array_equal(value(one_row, alone), FIRST[:, :1])


@pytest.mark.parametrize(
    ("roles", "planes", "refusal"),
    [
        ([(("batch", "seq"), ("batch", "sequence"))], 1, ""),
        ([((3, "batch", "seq"), ("", "batch", "sequence"))], 3, ""),
        ([(("batch", 4, "seq"), ("batch", "", "sequence"))], 4, ""),
        ([((3, 1, "t"), ("", "", "tokens"))], 3, ""),
        ([], 0, "the model has no input of positions"),
        ([(("batch",), ("batch",))], 0, r"where a whole step stands \('p0' \['batch'\]\), not each of its tokens"),
        ([(("seq",), ("sequence",)), (("batch", "seq"), ("batch", "sequence"))], 0, "several inputs of positions"),
    ],
)
def test_which_positions_a_caller_may_give(
    roles: list[tuple[tuple[int | str, ...], tuple[str, ...]]], planes: int, refusal: str
) -> None:
    found = PositionInput(plan(*(tensor(f"p{i}", Role.POSITIONS, *role) for i, role in enumerate(roles))))
    assert found.planes == planes
    if refusal:
        with pytest.raises(PromptError, match=f"positions are given, and .*{refusal}"):
            found.read([1], 1)
    else:
        assert_array_equal(found.read([4, 7], 2), [[4, 7]] * planes)


def test_embeddings() -> None:
    values = np.arange(12).reshape(2, 2, 3) + 0.5
    step = replace(STEP, embeds=values)
    wide = TensorRole("x", "input", Role.TOKENS, "float16", ("batch", "seq", 3), "test", ("batch", "sequence", ""))
    flat = TensorRole("x", "input", Role.TOKENS, "bfloat16", ("t", 3), "test", ("tokens", ""))
    for role in (wide, flat):
        base = plan()
        others = tuple(t for t in base.tensors if t.role is not Role.TOKENS)
        inputs = StepInputs(replace(base, tensors=(role, *others)))
        found = inputs.arrays(step)["x"]
        assert found.dtype == array_dtype(role.dtype)
        assert_array_equal(found.astype(float), values if role is wide else values.reshape(4, 3))
        assert found.shape == inputs.shapes(step)["x"]
        with pytest.raises(SessionError, match=r"takes embeddings \(input 'x'\), and the step has token ids alone"):
            inputs.arrays(STEP)
    open_width = replace(wide, shape=("batch", "seq", "h"), axes=("batch", "sequence", "?"))
    with pytest.raises(UnsupportedModelError, match="nothing says how large its size 'h' is"):
        StepInputs(replace(base, tensors=(open_width, *others)))


def test_a_linear_mask_is_causal_and_ends_with_what_is_written() -> None:
    mask = tensor("m", Role.MASK, ("batch", 1, "seq", 16), ("batch", "", "sequence", ""), "bool")
    found = value(mask)
    assert found.shape == (2, 1, 2, 16)
    assert found.sum(-1).tolist() == [[[4, 5]], [[10, 11]]]
    assert found[1, 0, 0, :10].all()


def test_a_circular_mask_follows_the_wrap() -> None:
    mask = tensor("m", Role.MASK, ("batch", 1, "seq", 8), ("batch", "", "sequence", ""), "bool")
    early = StepBatch(0, np.array([[1, 2, 3]]), np.array([2]))
    expected = [[1, 1, 1, 0, 0, 0, 0, 0], [1, 1, 1, 1, 0, 0, 0, 0], [1, 1, 1, 1, 1, 0, 0, 0]]
    assert_array_equal(value(mask, early, "circular", 8)[0, 0], np.array(expected, bool))
    late = StepBatch(0, np.array([[1]]), np.array([21]))
    assert value(mask, late, "circular", 8).all()


def test_a_float_mask_hides_with_the_lowest_number_of_its_dtype() -> None:
    for dtype, lowest in (("float16", -65504.0), ("float", np.finfo(np.float32).min), ("bfloat16", -3.3895314e38)):
        mask = tensor("m", Role.MASK, ("batch", 1, "seq", 16), ("batch", "", "sequence", ""), dtype)
        found = value(mask)[0, 0].astype(np.float64)
        assert_array_equal(found[0, :4], 0)
        np.testing.assert_allclose(found[0, 4:], lowest, rtol=1e-6)


def test_chunk() -> None:
    assert StepInputs(plan()).chunk(None, 512) == 16
    assert StepInputs(plan()).chunk(None, 8) == 8
    assert StepInputs(plan()).chunk(12, 8) == 12
    with pytest.raises(OptionError, match="max_chunk is 17, and this model takes at most 16"):
        StepInputs(plan()).chunk(17, 8)
    bound = plan()
    caches = tuple(replace(c, contract=UpdateContract(True, 4)) for c in bound.caches)
    assert StepInputs(replace(bound, caches=caches)).chunk(None, 8) == 4
    one = tuple(replace(c, update_length=1) for c in bound.caches)
    assert StepInputs(replace(bound, caches=one)).chunk(None, 8) == 1


def test_identity_is_of_contents() -> None:
    a, b = FileIdentity("a", 1, "00"), FileIdentity("b", 1, "11")
    renamed = FileIdentity("c", 1, "00")
    assert model_identity([a, b]) == model_identity([b, renamed])
    assert model_identity([a, b]) != model_identity([a])


def test_logits_of_all_positions_of_the_last_and_packed() -> None:
    base = plan()

    def logits(shape: tuple[int | str, ...], axes: tuple[str, ...]) -> StepLogits:
        tensors = tuple(
            replace(t, shape=shape, axes=axes, dtype="float") if t.role is Role.LOGITS else t for t in base.tensors
        )
        return StepLogits(replace(base, tensors=tensors))

    step = replace(STEP, keep=2)
    full = logits(("batch", "seq", 4), ("batch", "sequence", ""))
    values = np.arange(16.0)
    assert full.shape(step) == (2, 2, 4)
    assert_array_equal(full.last(values.reshape(2, 2, 4), STEP)[:, 0], [[4, 5, 6, 7], [12, 13, 14, 15]])
    packed = logits(("t", 4), ("tokens", ""))
    assert packed.shape(step) == (4, 4)
    assert_array_equal(packed.last(values.reshape(4, 4), step), values.reshape(2, 2, 4))
    last = logits(("batch", 4), ("batch", ""))
    assert last.shape(step) == (2, 4)
    assert last.last(values[:8].reshape(2, 4), STEP).shape == (2, 1, 4)
    with pytest.raises(SessionError, match="logits of the last position only"):
        last.last(values[:8].reshape(2, 4), step)
    unsettled = logits(("batch", "seq", "v"), ("batch", "sequence", "?"))
    assert not unsettled.known
    with pytest.raises(UnsupportedModelError, match="nothing says how large the vocabulary is"):
        unsettled.shape(step)
    unsettled.settle(4)
    assert unsettled.shape(step) == (2, 2, 4)


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        (tensor("x", Role.OTHER, (1,), ("",)), r"input 'x' \(int64 \[1\]\) has no known part in decoding"),
        (tensor("x", Role.POSITIONS, ("batch", "q"), ("batch", "?")), "nothing says how large its size 'q' is"),
        (tensor("x", Role.POSITIONS, ("batch",), ("batch",), "float"), "fills it with integers"),
        (tensor("x", Role.CACHE, ("batch", 8), ("batch", "")), "input 'x' is a cache that no update writes"),
        (tensor("x", Role.MASK, ("batch", 12), ("batch", ""), "bool"), "covers 12 keys, and the caches .* hold 16"),
    ],
)  # fmt: skip
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


def test_a_mask_over_keys_alone_is_that_of_the_last_token() -> None:
    mask = tensor("m", Role.MASK, ("batch", "k"), ("batch", "keys"))
    assert_array_equal(value(mask, bucket=4), [[1] * 5 + [0] * 7, [1] * 11 + [0]])
    assert value(mask).shape == (2, 16)

"""Models with TensorScatter and Attention, drawn at random: what `plan` takes is rewritten, built, and right."""

import collections

import pytest
from plain_graphs import ODD, Plain, plain_model
from plain_judge import BUILD, EQUAL, REFUSED, judge
from scatter_graphs import scatter_plain

from trt_kvcache.importer.cache_plan import Target

QUICK = 5000
SLOW, SHARE = 1500, 100
BUILT = 8


def _check(plain: Plain, *, build_too: bool = False) -> str:
    outcome = judge(plain, build_too=build_too)
    if outcome.kind == BUILD and "Myelin ([ir_verifier.cpp" in outcome.detail:
        return BUILD  # a fault of TensorRT for RTX 1.7.1 in models without any open size
    assert outcome.kind in (EQUAL, REFUSED), (plain.seed, plain.odd, outcome)
    # Of a few models ONNX Runtime infers sizes that do not fit, and runs them neither way (1.32.0; seed 524).
    compared = "could not be compared" not in outcome.detail or "ShapeInferenceError" in outcome.detail
    # One bool of a past is the same in all steps that show it (seed 796).
    compared = compared or ("last row" in plain.odd and "the same number for all" in outcome.detail)
    assert compared, (plain.seed, plain.odd, outcome)
    return outcome.kind


@pytest.mark.few(3)
@pytest.mark.parametrize("name", ODD)
def test_one_odd_thing(name: str) -> None:
    """Each by itself, in two models."""
    for seed in (QUICK, QUICK + 1):
        _check(plain_model(seed, (name,)))


@pytest.mark.parametrize("seed", [5001, 5006, 5035])
def test_masks_of_one_axis_are_as_long_as_the_plan_says(seed: int) -> None:
    """Float and bool: plan and model call the axis open, and an engine is built of them."""
    plain = plain_model(seed, ("flat mask",))
    assert [len(mask.shape) for mask in plain.masks.values()] == [1]
    outcome = judge(plain, build_too=True)
    assert outcome.kind == EQUAL, outcome


@pytest.mark.parametrize("seed", [807, 1634])
def test_constant_masks_of_bfloat16(seed: int) -> None:
    """They ended in a trace: ONNX Runtime makes no arrays of the type."""
    assert plain_model(seed).odd[0] == "constant mask"
    assert _check(plain_model(seed)) == EQUAL


@pytest.mark.parametrize("seed", [69, 80, 219, 343, 1722])
def test_the_last_row_of_a_past_may_be_an_output(seed: int) -> None:
    """It holds no token before the last step."""
    plain = scatter_plain(seed)
    assert "last row" in plain.odd
    assert _check(plain) == EQUAL


def test_rings_that_take_one_token_at_a_time() -> None:
    """No step has several tokens that could meet."""
    assert _check(plain_model(95)) == EQUAL


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, SLOW, SHARE))
def test_many_without_attention(first: int) -> None:
    kinds = collections.Counter(_check(scatter_plain(seed)) for seed in range(first, first + SHARE))
    assert kinds[EQUAL] > 0.6 * SHARE


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, SLOW, SHARE))
def test_many(first: int) -> None:
    kinds = collections.Counter(
        _check(plain := plain_model(seed), build_too=seed % BUILT == 0 and plain.options.target is Target.TENSORRT_RTX)
        for seed in range(first, first + SHARE)
    )
    assert kinds[EQUAL] > 0.6 * SHARE, "most are taken, or the test says nothing"

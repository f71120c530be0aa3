"""The best token is that of float32, whatever the type of the scores."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from trt_kvcache.runtime.generation.greedy import as_scores, best

HALVES = st.integers(0, 65535)


def check(logits: np.ndarray[Any, Any]) -> None:
    scores = logits.astype(np.float32)
    token, top = best(logits)
    if np.isnan(scores).any():
        assert np.isnan(top)
    else:
        assert (token, top) == (int(scores.argmax()), float(scores.max()))


@given(arrays.arrays(np.uint16, st.integers(1, 20), elements=HALVES))
def test_any_bits(bits: np.ndarray[Any, Any]) -> None:
    """Subnormal numbers, zeros of both signs, infinities and NaN of both signs among them."""
    check(bits.view(np.float16))
    check(bits.view(ml_dtypes.bfloat16))


@given(arrays.arrays(np.float16, st.integers(1, 20), elements=st.sampled_from([-0.0, 0.0, -1.0, -np.inf, 6e-8, -6e-8])))
def test_ties_and_zeros(logits: np.ndarray[Any, Any]) -> None:
    check(logits)


@pytest.mark.parametrize("at", [0, 1, 65535])
def test_each_float16_against_all(at: int) -> None:
    every = np.arange(65536, dtype=np.uint16).view(np.float16)
    finite = np.sort(every[np.isfinite(every)])
    check(np.roll(finite, at))
    check(np.roll(finite, at)[::2])
    check(np.roll(every, at))


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64, ml_dtypes.bfloat16])
def test_every_type(dtype: Any) -> None:
    logits = np.random.default_rng(0).standard_normal(1000).astype(dtype)
    check(logits)
    check(logits.reshape(10, 100)[:, 3])
    assert as_scores(logits).dtype == np.float32
    assert (as_scores(logits) is logits) == (dtype == np.float32)

"""The kernels that choose tokens: on the host against the host's own choice, and compiled by NVRTC."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from host_choice import ChoiceCase, HostChoice
from host_kernel import compiler, sanitizer_flags
from numpy.typing import NDArray

from trt_kvcache.plugins.choice import (
    CANDIDATES,
    CHOICE_DTYPES,
    ordered,
    read_keys,
    read_scores,
)
from trt_kvcache.plugins.spec import THREADS
from trt_kvcache.runtime.generation.sampling import best

BITS = {"float16": np.uint16, "bfloat16": np.uint16, "float32": np.uint32}


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> HostChoice:
    if compiler() is None:
        pytest.skip("needs a C++ compiler (g++ or clang++)")
    folder = tmp_path_factory.mktemp("choice")
    flags = sanitizer_flags(folder)
    if flags is None:
        pytest.skip(f"{compiler()} has no address and undefined-behavior sanitizers (libasan, libubsan)")
    return HostChoice(folder, ["-O1", *flags])


def check(host: HostChoice, cases: list[ChoiceCase]) -> None:
    for case, keys in zip(cases, host.run(cases), strict=True):
        dtype = case.logits.dtype.name
        tokens, scores = read_keys(keys[..., 0], dtype)
        kept = case.logits[:, case.logits.shape[1] - case.keep :]
        seen = seen_of(case)
        expected = [[best_of(*pair) for pair in zip(*row, strict=True)] for row in zip(kept, seen, strict=True)]
        about = f"{dtype} {case.logits.shape}, the last {case.keep}, {case.blocks} blocks, shift {case.shift}"
        wanted = [[top for _, top in row] for row in expected]
        np.testing.assert_array_equal(scores, np.array(wanted, np.float32), err_msg=about)
        if not np.isnan(scores).any():
            assert tokens.tolist() == [[token for token, _ in row] for row in expected], about
        if seen.all():
            assert tokens.tolist() == kept.astype(np.float32).argmax(axis=-1).tolist(), about


def seen_of(case: ChoiceCase) -> NDArray[np.bool_]:
    """The scores that kernels look at, ``[R, keep, V]``: those that masks allow, and what tells of a broken model."""
    kept = case.logits[:, case.logits.shape[1] - case.keep :].astype(np.float32)
    allowed = np.ones(kept.shape, bool) if case.allowed is None else case.allowed
    seen: NDArray[np.bool_] = allowed | np.isnan(kept) | (kept == np.inf)
    return seen


def best_of(scores: NDArray[Any], seen: NDArray[np.bool_]) -> tuple[int, float]:
    if not seen.any():
        return 0, -np.inf
    token, top = best(scores[seen])
    return int(np.flatnonzero(seen)[token]), top


def some_logits(rng: np.random.Generator, dtype: str, shape: tuple[int, ...]) -> NDArray[Any]:
    """Any bits; or few values, so that most are ties; or subnormal numbers; or ordinary ones with a few odd ones."""
    kind = CHOICE_DTYPES[dtype]
    few = [0.0, -0.0, 1.0, -1.0, -np.inf, 6e-8, -6e-8]
    way = rng.integers(5)
    if way == 0:
        limit = np.iinfo(BITS[dtype]).max
        return rng.integers(0, limit, shape, BITS[dtype], endpoint=True).view(kind)
    if way == 1:
        return rng.choice(few[: rng.integers(1, len(few) + 1)], shape).astype(kind)
    if way == 2:
        small = rng.integers(0, 40, shape).astype(BITS[dtype]).view(kind)
        return np.where(rng.random(shape) < 0.5, small, -small).astype(kind)
    logits = rng.normal(0, 5, shape).astype(kind)
    if way == 3:
        logits[rng.random(shape) < 0.05] = rng.choice([np.inf, -np.inf, np.nan, -np.nan])
    return logits


@pytest.mark.slow
def test_it_chooses_as_the_host_does(host: HostChoice) -> None:
    rng = np.random.default_rng(0)
    check(host, [case for dtype in CHOICE_DTYPES for case in some_cases(rng, dtype, 200)])


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize("dtype", CHOICE_DTYPES)
def test_the_best_token_anywhere(host: HostChoice, dtype: str) -> None:
    """In every access of every thread, of one block and of several that come around three times."""
    size = np.dtype(CHOICE_DTYPES[dtype]).itemsize
    for blocks, shift in ((1, 0), (2, size)):
        vocab = 3 * blocks * THREADS * 16 // size - 5
        places = sorted({*range(0, vocab, 16 // size - 1), vocab - 1})
        logits = np.full((len(places), 1, vocab), -3, CHOICE_DTYPES[dtype])
        for row, token in zip(logits[:, 0], places, strict=True):
            row[token:] = -2  # and equal ones after it
        check(host, [ChoiceCase(logits, 1, blocks, shift)])


def some_cases(rng: np.random.Generator, dtype: str, count: int) -> list[ChoiceCase]:
    size, cases = np.dtype(CHOICE_DTYPES[dtype]).itemsize, []
    for _ in range(count):
        vocab = int(rng.choice([1, 2, 7, 8, 9, 31, 32, 33, 255, 257, 1000, 3001]))
        logits = some_logits(rng, dtype, (int(rng.integers(1, 4)), int(rng.integers(1, 4)), vocab))
        keep, blocks = int(rng.integers(1, logits.shape[1] + 1)), int(rng.integers(1, 4))
        shift, backwards = size * int(rng.integers(0, 64 // size)), bool(rng.integers(2))
        share = rng.choice([0.0, 0.02, 0.5, 1.0], (len(logits), keep, 1))
        allowed = rng.random((len(logits), keep, vocab)) < share if rng.integers(2) else None
        cases.append(ChoiceCase(logits, keep, blocks, shift, backwards, allowed=allowed))
    return cases


@pytest.mark.parametrize("dtype", CHOICE_DTYPES)
def test_candidates_are_the_highest_scores(host: HostChoice, dtype: str) -> None:
    """The n-th highest of the sets' maxima is reached by n scores, if there are as many; they are what comes back."""
    rng = np.random.default_rng(1)
    equal = ChoiceCase(np.zeros((2, 1, CANDIDATES + 5), CHOICE_DTYPES[dtype]), 1, 1)  # more than a list holds
    cases = [*some_cases(rng, dtype, 60), equal]
    found = host.run([replace(case, kernel="set_maxima") for case in cases])
    asked = [int(rng.integers(1, 20)) for _ in cases]
    least = [np.sort(sets, axis=-1)[..., -count] for sets, count in zip(found, asked, strict=True)]
    lists = host.run([replace(c, kernel="candidates", least=x) for c, x in zip(cases, least, strict=True)])
    complete = 0
    for case, sets, thresholds, keys, count in zip(cases, found, least, lists, asked, strict=True):
        kept = np.where(seen_of(case), ordered(case.logits)[:, case.logits.shape[1] - case.keep :], 0)
        np.testing.assert_array_equal(sets.max(axis=-1), kept.max(axis=-1))
        for place in np.ndindex(kept.shape[:2]):
            wanted = np.flatnonzero((kept[place] >= thresholds[place]) & (kept[place] > 0))
            assert wanted.size >= min(count, np.count_nonzero(kept[place]))
            assert keys[place][0] == wanted.size
            if wanted.size <= CANDIDATES:
                tokens, scores = read_keys(keys[place][1 : 1 + wanted.size], dtype)
                order = np.argsort(tokens)
                np.testing.assert_array_equal(tokens[order], wanted)
                np.testing.assert_array_equal(scores[order], read_scores(kept[place][wanted], dtype))
                complete += 1
            else:
                tokens, _ = read_keys(keys[place][1:], dtype)
                assert set(tokens.tolist()) <= set(wanted.tolist())
    assert complete > 100

"""Choices from scores on a GPU against those of the host. Nobody has run these tests on a GPU yet."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from trt_kvcache.plugins.choice import CHOICE_DTYPES, ordered
from trt_kvcache.runtime.generation.sampling import best
from trt_kvcache.runtime.trt import trt_runner
from trt_kvcache.runtime.trt.choice import hard_scores, open_choice

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def cuda() -> Iterator[Any]:
    opened = trt_runner.Cuda(0, trt_runner.cuda_bindings())
    yield opened
    opened.close()


@pytest.mark.parametrize("vocab", [1, 31, 256, 50_257, 128_256])
@pytest.mark.parametrize("dtype", CHOICE_DTYPES)
def test_the_gpu_chooses_as_the_host_does(cuda: Any, dtype: str, vocab: int) -> None:
    kind, rows, positions = np.dtype(CHOICE_DTYPES[dtype]), 8, 3
    size = rows * positions * vocab * kind.itemsize
    address, pinned = cuda.allocate(size), cuda.allocate_pinned(size)
    choice, reason = open_choice(cuda, kind, vocab, rows, address, size, pinned)
    assert choice is not None, reason
    rng = np.random.default_rng(vocab)
    given = [hard_scores(kind, rows, positions, vocab, seed) for seed in range(3)]
    given.append(rng.normal(0, 3, (rows, positions, vocab)).astype(kind))
    bits = np.dtype(f"u{kind.itemsize}")
    given.append(rng.integers(0, 1 << 8 * kind.itemsize, (rows, positions, vocab), np.uint64).astype(bits).view(kind))
    for logits in given:
        pinned.data[:] = np.ascontiguousarray(logits).reshape(-1).view(np.uint8)
        cuda.upload(address, pinned.address, size)
        for keep in (1, 3):
            start = address + (positions - keep) * vocab * kind.itemsize
            chosen = choice.choose(start, positions * vocab * kind.itemsize, rows, keep, 1)
            for i, j in np.ndindex(rows, keep):
                row = logits[i, positions - keep + j]
                here, there = best(chosen[i, j]), best(row)
                if np.isnan(there[1]):
                    assert np.isnan(here[1])
                    assert here[0] == int(row.astype(np.float32).argmax())
                else:
                    assert here == there
            highest_are_there(choice, logits, start, keep)


def highest_are_there(choice: Any, logits: Any, start: int, keep: int) -> None:
    """The 2 and the 50 highest scores, all that equal the last of them, and no others but those above something."""
    rows, positions, vocab = logits.shape
    for highest in (2, 50):
        for row in range(min(rows, 3)):
            pitch = positions * vocab * logits.itemsize
            chosen = choice.choose(start + row * pitch, pitch, 1, keep, highest)
            if chosen is None:
                continue  # too many, or too few sets
            for found, scores in zip(chosen[0], logits[row, positions - keep :], strict=True):
                order, tokens = ordered(scores), found["token"][found["token"] >= 0]
                wanted = np.flatnonzero(order >= np.partition(order, -min(highest, vocab))[-min(highest, vocab)])
                assert set(wanted.tolist()) <= set(tokens.tolist())
                np.testing.assert_array_equal(tokens, np.flatnonzero(order >= order[tokens].min()))
                np.testing.assert_array_equal(found["score"][: tokens.size], scores[tokens].astype(np.float32))

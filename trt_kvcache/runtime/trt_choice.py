"""The best token of each position, chosen on the GPU: a few bytes of each come to the host instead of all scores.

Greedy decoding needs nothing else. The kernel (``plugins/best_token.cu``) is compiled by NVRTC, an optional package.
Before a session relies on it, it has to choose as the host does, on this GPU, from scores that are hard to choose from;
wherever it cannot be had, or is wrong, the host goes on choosing.
"""

from __future__ import annotations

import math
import warnings
from typing import Any

import numpy as np

from trt_kvcache.errors import BackendError, OptionError
from trt_kvcache.plugins.choice import (
    CHOICE_DTYPES,
    MOST_TOKENS,
    blocks_per_row,
    choice_name,
    compile_choice,
    read_keys,
)
from trt_kvcache.plugins.spec import THREADS
from trt_kvcache.runtime.cuda import Cuda, Pinned
from trt_kvcache.runtime.greedy import CHOICE, best
from trt_kvcache.runtime.runner import Array

__all__ = ["DeviceChoice", "open_choice"]

_KEY_BYTES = 8
_MOST_BLOCKS = 2**31 - 1
_PROVED = 8  # positions at once, at most, and kinds of hard scores


class DeviceChoice:
    """Chooses among the logits that lie on the GPU.

    Args:
        cuda: where they are.
        dtype: of the logits, one of `CHOICE_DTYPES`.
        vocab: V.
        most: positions in one step.

    Raises:
        BackendError, OptionError: there is no kernel for this GPU, driver or size; the message says what to do.
    """

    def __init__(self, cuda: Cuda, dtype: np.dtype[Any], vocab: int, most: int) -> None:
        self._cuda, self._dtype, self._vocab = cuda, dtype, vocab
        if dtype.name not in CHOICE_DTYPES:
            raise OptionError(f"the kernel takes {', '.join(CHOICE_DTYPES)}, and these logits are {dtype.name}")
        if vocab > MOST_TOKENS or most * blocks_per_row(vocab, dtype.itemsize) > _MOST_BLOCKS:
            raise OptionError(f"{most} positions of {vocab} tokens are more than the kernel takes")
        arch = "sm_" + cuda.compute_capability.replace(".", "")
        made = compile_choice(dtype.name, arch, driver=cuda.driver_version)
        self._kernel = cuda.load_kernel(made.code, choice_name(dtype.name))
        most = max(most, _PROVED)
        self._keys = cuda.allocate(_KEY_BYTES * most)
        self._host_keys = cuda.allocate_pinned(_KEY_BYTES * most)

    def best(self, start: int, pitch: int, rows: int, keep: int, vocab: int = 0) -> Array:
        """Wait for the step, and choose.

        Args:
            start: address of the first position of the first row.
            pitch: bytes from one row to the next.
            rows: R.
            keep: positions of each row, which follow each other.
            vocab: V, if it is another than the model's.

        Returns:
            `CHOICE` ``[R, keep]``.
        """
        cuda, vocab, count = self._cuda, vocab or self._vocab, rows * keep
        size, blocks = _KEY_BYTES * count, blocks_per_row(vocab, self._dtype.itemsize)
        cuda.zero_rows(self._keys, size, size, 1)
        sizes = (np.int32(keep), np.int32(vocab), np.int32(blocks), np.int64(pitch))
        cuda.launch_kernel(self._kernel, count * blocks, THREADS, start, self._keys, *sizes)
        cuda.download_rows(self._host_keys.address, self._keys, size, size, 1)
        cuda.sync()
        chosen = np.empty((rows, keep), CHOICE)
        keys = self._host_keys.data[:size].view(np.uint64).reshape(rows, keep)
        chosen["token"], chosen["score"] = read_keys(keys, self._dtype.name)
        return chosen

    def prove(self, memory: int, size: int, staging: Pinned) -> None:
        """Choose among scores that are hard to choose from.

        Args:
            memory: of the logits, which is written to.
            size: bytes of it.
            staging: on the way there.

        Raises:
            BackendError: the host chooses differently, or CUDA fails.
        """
        itemsize = self._dtype.itemsize
        fit = min(size, staging.data.size) // itemsize
        rows = min(fit // self._vocab, _PROVED)
        for kind in range(0, _PROVED, rows):
            self._compare(hard_scores(self._dtype, rows, 1, self._vocab, kind), 1, memory, 0, staging)
        if fit > 6:  # the last two positions of three; an odd vocabulary, so that rows begin anywhere
            odd = (min((fit - 1) // 6, self._vocab, 1000) - 1) | 1
            for shift in (0, 1):
                self._compare(hard_scores(self._dtype, 2, 3, odd, shift), 2, memory, shift * itemsize, staging)

    def _compare(self, logits: Array, keep: int, memory: int, shift: int, staging: Pinned) -> None:
        rows, positions, vocab = logits.shape
        width = vocab * logits.itemsize
        staging.data[: logits.nbytes] = logits.reshape(-1).view(np.uint8)
        self._cuda.upload(memory + shift, staging.address, logits.nbytes)
        start = memory + shift + (positions - keep) * width
        chosen = self.best(start, positions * width, rows, keep, vocab)
        for i, j in np.ndindex(rows, keep):
            here, there = best(chosen[i, j]), best(logits[i, positions - keep + j])
            if here != there and not (math.isnan(here[1]) and math.isnan(there[1])):  # no token is taken of NaN
                raise BackendError(
                    f"of {vocab} scores in {self._dtype.name} the GPU finds token {here[0]} with {here[1]}, and the "
                    f"host token {there[0]} with {there[1]}"
                )


def open_choice(
    cuda: Cuda, dtype: np.dtype[Any], vocab: int, most: int, memory: int, size: int, staging: Pinned
) -> tuple[DeviceChoice | None, str]:
    """A choice on the GPU that was tried there, or why there is none; see `DeviceChoice` and its `prove`."""
    try:
        choice = DeviceChoice(cuda, dtype, vocab, most)
    except (BackendError, OptionError) as error:
        return None, str(error)
    try:
        choice.prove(memory, size, staging)
    except BackendError as error:
        warnings.warn(f"the host chooses tokens, because the GPU does not: {error}", RuntimeWarning, stacklevel=2)
        return None, str(error)
    return choice, ""


def hard_scores(dtype: np.dtype[Any], rows: int, positions: int, vocab: int, first: int) -> Array:
    """Logits ``[R, positions, V]``: ties, zeros of both signs, subnormal numbers, infinities and NaN, in turn.

    Args:
        dtype: of the logits.
        rows: R.
        positions: of each.
        vocab: V.
        first: the kind of the first position; there are eight.
    """
    rng = np.random.default_rng(first)
    bits = np.dtype(f"u{dtype.itemsize}")
    logits = np.empty((rows * positions, vocab), dtype)
    for i, row in enumerate(logits):
        anywhere = rng.integers(vocab, size=3)
        kind = (first + i) % _PROVED
        row[:] = (0.0, 1.5, -np.inf, -np.inf, -1.0, -2.0, -0.0, 0.0)[kind]
        if kind == 0:
            row[:] = rng.standard_normal(vocab, np.float32)
        elif kind == 2:  # few values, each many times
            row[:] = rng.choice([-0.0, 0.0, -1.0, -np.inf, 2.0, -3.0], vocab)
        elif kind == 3:
            row[-1] = np.array([1], bits).view(dtype)[0]  # the least number above 0
        elif kind == 4:
            row[anywhere] = -np.inf, np.inf, np.inf
        elif kind == 5:
            row[anywhere] = np.inf, -np.nan, np.nan
        elif kind == 6:
            row[anywhere] = 0.0
        elif kind == 7:  # subnormal numbers of both signs
            few = rng.integers(0, 99, vocab).astype(bits)
            row[:] = (few | rng.integers(0, 2, vocab).astype(bits) << (8 * dtype.itemsize - 1)).view(dtype)
    return logits.reshape(rows, positions, vocab)

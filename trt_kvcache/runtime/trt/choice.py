"""Chooses tokens on the GPU: only the best token, or the highest scores, of each position are copied to the host.

Greedy decoding needs only the best token; sampling with `top_k` only that many scores. NVRTC, an optional package,
compiles the kernels (``plugins/choice.cu``). Before it uses them, a session tests on this GPU that they choose as the
host does, even among ties. If the kernels are missing or wrong, the host chooses among all scores.
"""

from __future__ import annotations

import math
import warnings
from typing import Any

import numpy as np
import numpy.typing as npt

from trt_kvcache.errors import BackendError, OptionError
from trt_kvcache.plugins.choice import (
    CANDIDATES,
    CHOICE_DTYPES,
    KERNELS,
    MOST_TOKENS,
    blocks_per_row,
    compile_choice,
    ordered,
    read_keys,
    read_lists,
    sets_per_row,
)
from trt_kvcache.plugins.spec import THREADS
from trt_kvcache.runtime.generation.sampling import CHOICE, best
from trt_kvcache.runtime.generation.token_masks import Mask, Masks, pack_masks, words
from trt_kvcache.runtime.runner import Array
from trt_kvcache.runtime.trt.cuda import Cuda, Pinned, taken

_KEY_BYTES, _ORDER_BYTES = 8, 4
_LIST_BYTES = _KEY_BYTES * (1 + CANDIDATES)
_MOST_BLOCKS = 2**31 - 1
_LEAST_MASKS = 256  # bytes
_PROVED = 8  # most positions in one test, and the number of kinds of `hard_scores`


class DeviceChoice:
    """Chooses tokens from logits ``[.., V]`` on the GPU, for at most `rows` sequences and `most` positions in one step.

    `dtype` is one of `CHOICE_DTYPES`. Raises `BackendError` or `OptionError` if there are no kernels for this GPU,
    driver or size; the message says what to do.
    """

    def __init__(self, cuda: Cuda, dtype: np.dtype[Any], vocab: int, rows: int, most: int) -> None:
        self._cuda, self._dtype, self._vocab = cuda, dtype, vocab
        results, least, masks = _sizes(dtype, vocab, rows, most)
        arch = "sm_" + cuda.compute_capability.replace(".", "")
        compiled = compile_choice(dtype.name, arch, driver=cuda.driver_version)
        self._kernels = cuda.load_kernels(compiled.code, compiled.name, KERNELS)
        self._most_lists = _most_lists(rows)
        self._words = words(vocab)
        self._results, self._least, self._masks = map(cuda.allocate, (results, least, masks))
        self._host, self._host_masks = cuda.allocate_pinned(results), cuda.allocate_pinned(masks)

    def choose(
        self, start: int, pitch: int, rows: int, keep: int, highest: int, masks: Masks | None = None
    ) -> Array | None:
        """Wait for the step, and find the best token or the highest scores of each position.

        Args:
            start: address of the first position of the first row.
            pitch: bytes from one row to the next.
            rows: R.
            keep: consecutive positions of each row.
            highest: how many of the highest scores to find at each position, see `StepBatch.highest`.
            masks: masks of the allowed tokens, see `StepBatch.masks`.

        Returns:
            `CHOICE` ``[R, keep, N]``, in ascending order of tokens; lists with fewer scores end with tokens of -1 and
            scores of ``-inf``. None if the host should choose, because too many scores or positions are asked for.
        """
        allowed = 0  # address of the masks, or 0 for none
        if masks is not None:
            if 4 * self._words * rows * keep > self._host_masks.data.size:
                return None
            data = masks(self._words)  # made and copied to the GPU while the step runs
            assert data.shape == (rows, keep, self._words)
            allowed = self._upload_masks(data)
        where = start, allowed, pitch, rows, keep
        if highest == 1:
            read = read_keys(self._best(*where, self._vocab)[:, None], self._dtype.name)
        elif rows * keep > self._most_lists or 2 * highest > sets_per_row(self._vocab, self._dtype.itemsize):
            return None
        else:
            lists, _ = self._lists(*where, highest, self._vocab)
            if lists[:, 0].max() > CANDIDATES:
                return None
            read = read_lists(lists, self._dtype.name)
        chosen = np.empty(read[0].shape, CHOICE)
        chosen["token"], chosen["score"] = read
        return chosen.reshape(rows, keep, -1)

    def _upload_masks(self, data: Mask) -> int:
        self._host_masks.data[: data.nbytes] = data.reshape(-1).view(np.uint8)
        self._cuda.upload(self._masks, self._host_masks.address, data.nbytes)
        return self._masks

    def _best(self, start: int, masks: int, pitch: int, rows: int, keep: int, vocab: int) -> npt.NDArray[np.uint64]:
        """Return for each position the best token and its score, in one number: uint64 ``[R * keep]``."""
        size = _KEY_BYTES * rows * keep
        self._cuda.zero_rows(self._results, size, size, 1)
        self._launch("best_token", (start, masks, self._results), pitch, rows, keep, vocab)
        return self._fetch(size).view(np.uint64)

    def _lists(
        self, start: int, masks: int, pitch: int, rows: int, keep: int, highest: int, vocab: int
    ) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint32]]:
        """Return each position's highest scores, ``[R * keep, 1 + CANDIDATES]`` (see `read_lists`), and their bound.

        The vocabulary is divided into sets, and each set has a largest score. The bound is the `highest`-th largest of
        these. So at least `highest` scores of the position are at or above the bound, and usually few more.
        """
        count, sets = rows * keep, sets_per_row(vocab, self._dtype.itemsize)
        self._launch("set_maxima", (start, masks, self._results), pitch, rows, keep, vocab)
        maxima = self._fetch(_ORDER_BYTES * count * sets).view(np.uint32).reshape(count, sets)
        least = np.partition(maxima, sets - highest, axis=1)[:, sets - highest].copy()
        self._host.data[: least.nbytes] = least.view(np.uint8)
        self._cuda.upload(self._least, self._host.address, least.nbytes)
        self._cuda.zero_rows(self._results, _LIST_BYTES, _KEY_BYTES, count)
        self._launch("candidates", (start, masks, self._least, self._results), pitch, rows, keep, vocab)
        lists = self._fetch(_LIST_BYTES * count).view(np.uint64).reshape(count, 1 + CANDIDATES)
        return lists, least

    def _launch(self, name: str, addresses: tuple[int, ...], pitch: int, rows: int, keep: int, vocab: int) -> None:
        blocks = blocks_per_row(vocab, self._dtype.itemsize)
        sizes = (np.int32(keep), np.int32(vocab), np.int32(blocks), np.int64(pitch))
        self._cuda.launch_kernel(self._kernels[name], rows * keep * blocks, THREADS, *addresses, *sizes)

    def _fetch(self, size: int) -> npt.NDArray[np.uint8]:
        self._cuda.download_rows(self._host.address, self._results, size, size, 1)
        self._cuda.sync()
        return self._host.data[:size]

    def prove(self, memory: int, size: int, staging: Pinned) -> None:
        """Test the kernels with difficult scores, which overwrite the logits (`size` bytes of GPU memory at `memory`).

        Raises `BackendError` if the host chooses differently, or CUDA fails.
        """
        itemsize = self._dtype.itemsize
        fit = min(size, staging.data.size) // itemsize
        rows = min(fit // self._vocab, _PROVED)
        for kind in range(0, _PROVED, rows):
            self._compare(hard_scores(self._dtype, rows, 1, self._vocab, kind), 1, memory, 0, staging)
        if fit > 6:  # choose at the last two of three positions; an odd vocabulary, so that rows are not aligned
            odd = (min((fit - 1) // 6, self._vocab, 1000) - 1) | 1
            for shift in (0, 1):
                self._compare(hard_scores(self._dtype, 2, 3, odd, shift), 2, memory, shift * itemsize, staging)

    def _compare(self, logits: Array, keep: int, memory: int, shift: int, staging: Pinned) -> None:
        rows, positions, vocab = logits.shape
        width = vocab * logits.itemsize
        staging.data[: logits.nbytes] = logits.reshape(-1).view(np.uint8)
        self._cuda.upload(memory + shift, staging.address, logits.nbytes)
        start = memory + shift + (positions - keep) * width
        looked_at = logits[:, positions - keep :].reshape(rows * keep, vocab)
        rng = np.random.default_rng(vocab + shift)
        allowed = rng.random(looked_at.shape) < rng.choice([0.0, 0.1, 0.5], (rows * keep, 1))
        self._compare_at((start, 0, positions * width, rows, keep), looked_at, np.ones_like(allowed))
        masks = self._upload_masks(pack_masks(allowed))
        self._compare_at((start, masks, positions * width, rows, keep), looked_at, allowed)

    def _compare_at(
        self, where: tuple[int, int, int, int, int], looked_at: Array, allowed: npt.NDArray[np.bool_]
    ) -> None:
        vocab, wide = looked_at.shape[1], looked_at.astype(np.float32)
        allowed = allowed | (wide == np.inf) | np.isnan(wide)
        tokens, scores = read_keys(self._best(*where, vocab), self._dtype.name)
        for token, score, row, known in zip(tokens.tolist(), scores.tolist(), looked_at, allowed, strict=True):
            here, there = (token, score), (0, -math.inf)
            if known.any():
                at, top = best(row[known])
                there = int(np.flatnonzero(known)[at]), top
            if here != there and not (math.isnan(score) and math.isnan(there[1])):  # NaN: any token
                raise BackendError(
                    f"among {vocab} scores in {self._dtype.name}, the GPU chooses token {token} ({score}), but the "
                    f"host chooses token {there[0]} ({there[1]})"
                )
        highest = min(7, vocab)
        order = np.where(allowed, ordered(looked_at), 0)
        lists = self._lists(*where, highest, vocab)
        for row, known, result, least in zip(order, allowed, *lists, strict=True):
            tokens = np.flatnonzero((row >= least) & known)
            count = tokens.size
            same = result[0] == count >= min(highest, np.count_nonzero(known))
            if same and count <= CANDIDATES:
                keys = row[tokens].astype(np.uint64) << 32 | (~tokens.astype(np.uint64) & 0xFFFFFFFF)
                same = np.array_equal(np.sort(result[1 : 1 + count]), np.sort(keys))
            if not same:
                raise BackendError(
                    f"among {vocab} scores in {self._dtype.name}, the GPU finds other highest scores than the host"
                )


def choice_bytes(dtype: np.dtype[Any], vocab: int, rows: int, most: int) -> int:
    """Return the bytes of GPU memory that a `DeviceChoice` takes; 0 if it does not support these logits."""
    try:
        return sum(map(taken, _sizes(dtype, vocab, rows, most)))
    except OptionError:
        return 0


def _sizes(dtype: np.dtype[Any], vocab: int, rows: int, most: int) -> tuple[int, int, int]:
    """Return the bytes of a `DeviceChoice`'s three buffers: results, score bounds and masks.

    Raises `OptionError` if the kernels do not support logits of this dtype and size.
    """
    if dtype.name not in CHOICE_DTYPES:
        raise OptionError(
            f"kernels that choose tokens take logits of {', '.join(CHOICE_DTYPES)}; these are {dtype.name}"
        )
    if vocab > MOST_TOKENS or most * blocks_per_row(vocab, dtype.itemsize) > _MOST_BLOCKS:
        raise OptionError(f"{most} positions of {vocab} tokens are more than the kernels that choose tokens can take")
    lists = _most_lists(rows)
    each = max(_LIST_BYTES, _ORDER_BYTES * sets_per_row(vocab, dtype.itemsize))
    masks = max(_LEAST_MASKS, 4 * words(vocab) * min(most, _PROVED * lists))  # for a decode step with some guesses
    return max(_KEY_BYTES * most, each * lists), _ORDER_BYTES * lists, masks


def _most_lists(rows: int) -> int:
    """Return the most positions per step for which the GPU finds the highest scores: at least one per batch row."""
    return max(rows, _PROVED)


def open_choice(
    cuda: Cuda, dtype: np.dtype[Any], vocab: int, rows: int, memory: int, size: int, staging: Pinned
) -> tuple[DeviceChoice | None, str]:
    """Return a `DeviceChoice` that passed its test (see `DeviceChoice.prove`); or None, and the reason."""
    try:
        choice = DeviceChoice(cuda, dtype, vocab, rows, size // (vocab * dtype.itemsize))
    except (BackendError, OptionError, RuntimeError) as error:  # such as no home folder for compiled kernels
        return None, str(error)
    try:
        choice.prove(memory, size, staging)
    except BackendError as error:
        warnings.warn(f"the host chooses tokens, because the GPU cannot: {error}", RuntimeWarning, stacklevel=2)
        return None, str(error)
    return choice, ""


def hard_scores(dtype: np.dtype[Any], rows: int, positions: int, vocab: int, first: int) -> Array:
    """Return logits for tests, ``[R, positions, V]``: ties, zeros of both signs, subnormal numbers, infinities, NaN.

    `first` is the kind of the first position, 0 to 7; the following positions have the next kinds.
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

"""The original's outputs, kept until the rewritten model has run: those that are compared, and nothing else.

Both models of a verification never lie in memory together. The original runs all steps first; of its caches the rows
that a step wrote are kept, of its other outputs everything.
"""

from __future__ import annotations

import math
import pickle
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from tempfile import TemporaryFile
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from trt_kvcache.errors import OutputError
from trt_kvcache.importer.steps.contents import CacheTensor

Array = npt.NDArray[Any]

_WORD = 8  # bytes, which numpy compares as fast as one


@dataclass(frozen=True)
class Written:
    """The rows of a cache that a step wrote.

    Attributes:
        shape: of the cache, in the original's layout.
        rows: bool ``[B, S_max]``: which rows the step changed.
        values: ``[changed rows, everything else]``: what they hold now.
        free: bool ``[B, S_max]``: rows that may hold anything, since the original does not have them; None: none.
    """

    shape: tuple[int, ...]
    rows: npt.NDArray[np.bool_]
    values: Array
    free: npt.NDArray[np.bool_] | None = None


Expected = dict[str, "Array | Written | None"]
"""Outputs of a step by name; None: a cache that the step gave another shape, which compares with nothing."""


def written_rows(cache: CacheTensor, past: Array, present: Array) -> Written | None:
    """The rows that a step wrote, from a cache before and after it, both in the original's layout."""
    if past.shape != present.shape:
        return None
    before, after = cache.rows(past), cache.rows(present)
    rows = ~same_bits(before, after)
    return Written(present.shape, rows, chosen_rows(after, rows))


def chosen_rows(rows: Array, chosen: npt.NDArray[np.bool_]) -> Array:
    """The rows of ``[B, S_max, ...]`` where ``[B, S_max]`` is true, as ``[chosen rows, everything else]``."""
    return rows[chosen].reshape(int(chosen.sum()), math.prod(rows.shape[2:]))


def same_bits(a: Array, b: Array) -> npt.NDArray[np.bool_]:
    """Per row ``[B, S_max]`` of ``[B, S_max, ...]``: do both arrays hold the same bytes?"""
    width = a.dtype.itemsize
    if width < _WORD and all(x.strides[-1] == width and x.shape[-1] * width % _WORD == 0 for x in (a, b)):
        width = _WORD
    differ: npt.NDArray[np.bool_] = np.not_equal(a.view(f"u{width}"), b.view(f"u{width}"))
    same = np.ones(differ.shape[:2], np.bool_)
    # Few differ. In the order of memory they are found several times as fast as axis by axis.
    order = sorted(range(differ.ndim), key=lambda axis: -differ.strides[axis])
    ordered = differ.transpose(order)
    places = np.unravel_index(np.flatnonzero(ordered), ordered.shape)
    same[places[order.index(0)], places[order.index(1)]] = False
    return same


@contextmanager
def open_tape() -> Iterator[Tape]:
    """An empty tape, in a file without a name: the operating system removes it with the process, however that ends."""
    file = TemporaryFile(prefix="trt-kvcache-verify-")  # noqa: SIM115  (closing it may fail)
    try:
        yield Tape(file)
    finally:
        with suppress(OSError):  # of a full disk, which `Tape.write` has named
            file.close()


class Tape:
    """Steps in a file, which are read in the order in which they were written."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file

    def write(self, expected: Mapping[str, Array | Written | None]) -> None:
        """Adds a step.

        Raises:
            OutputError: the disk is full.
        """
        try:
            pickle.dump(dict(expected), self._file, protocol=5)
            self._file.flush()
        except OSError as error:
            raise OutputError(
                f"what the original gives cannot be kept in the folder for temporary files ({error.strerror}): verify "
                "fewer tokens, or set TMPDIR to a folder with room"
            ) from None

    def rewind(self) -> None:
        """The next step read is the first one."""
        self._file.seek(0)

    def read(self) -> Expected:
        """The next step."""
        expected: Expected = pickle.load(self._file)
        return expected

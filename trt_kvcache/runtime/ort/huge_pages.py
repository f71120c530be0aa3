"""Moves memory that every step reads into huge pages: with 4 KiB pages, each step must look up most addresses again.

NumPy asks Linux for huge pages for its large arrays; ONNX Runtime does not ask for weights. So the weights are moved
afterwards, with Linux 6.1 or later (MADV_COLLAPSE). Processor time of a decode step with 200 MB of weights, one thread,
on a busy virtual machine: 33 ms before, 22 ms after.
"""

from __future__ import annotations

import ctypes
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np

_COLLAPSE = 25  # MADV_COLLAPSE, of linux/mman.h
_SETTINGS = Path("/sys/kernel/mm/transparent_hugepage")
_ANONYMOUS = re.compile(r"^([0-9a-f]+)-([0-9a-f]+) rw-p 00000000 00:00 0 *(?:\[heap\])?$", re.MULTILINE)
_PAGE = 4096
_AT_ONCE = 16  # number of huge pages that are moved before the time is checked again
_LEAST_SECONDS = 1.0


@contextmanager
def huge_pages(*, wait: bool = True) -> Iterator[None]:
    """Move the memory that the ``with`` block allocates and fills into huge pages, if Linux has some free.

    The move stops at an error, or after as much time as the block took (at least one second). If `wait` is False, the
    move runs in a thread.
    """
    before, start = _anonymous(), time.perf_counter()
    yield
    end = time.perf_counter()
    until = end + max(end - start, _LEAST_SECONDS)
    if wait:
        _move(before, until)
    else:
        threading.Thread(target=_move, args=(before, until), name="huge pages", daemon=True).start()


def _move(before: set[tuple[int, int]], until: float) -> None:
    """Move anonymous memory outside the ranges `before` into huge pages; stop at the time `until`."""
    with suppress(OSError):  # systems other than Linux, or with restricted /proc
        if "[never]" in (_SETTINGS / "enabled").read_text():
            return
        size = int((_SETTINGS / "hpage_pmd_size").read_text())
        for new in _without(_anonymous(), before):
            for first, last in _full(*new, size):
                for address in range(first, last, _AT_ONCE * size):
                    length = ctypes.c_size_t(min(_AT_ONCE * size, last - address))
                    failed = ctypes.CDLL(None).madvise(ctypes.c_void_p(address), length, _COLLAPSE)
                    if failed or time.perf_counter() > until:
                        return


def _anonymous() -> set[tuple[int, int]]:
    """Return start and end of each memory range of this process that is not mapped from a file."""
    try:
        text = Path("/proc/self/maps").read_text()
    except OSError:
        return set()
    return {(int(first, 16), int(last, 16)) for first, last in _ANONYMOUS.findall(text)}


def _without(ranges: set[tuple[int, int]], others: set[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Yield the address ranges in `ranges` outside of `others`. Linux joins ranges, so that one may be new in part."""
    for start, end in sorted(ranges):
        for first, last in sorted(others):
            if start < last and first < end:
                yield start, first
                start = last
        yield start, end


def _full(start: int, end: int, size: int) -> Iterator[tuple[int, int]]:
    """Yield the address ranges between `start` and `end` that consist of blocks of `size` bytes without empty pages."""
    start, end = -(-start // size) * size, end // size * size
    if start >= end:
        return
    with open("/proc/self/pagemap", "rb") as file:
        file.seek(start // _PAGE * 8)
        entries = np.frombuffer(file.read((end - start) // _PAGE * 8), np.uint64)
    full = (entries >> np.uint64(63)).reshape(-1, size // _PAGE).all(axis=1)  # bit 63: the page is present
    edges = np.flatnonzero(np.diff(full, prepend=False, append=False)).reshape(-1, 2)
    yield from ((start + int(first) * size, start + int(last) * size) for first, last in edges)

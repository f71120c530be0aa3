"""Memory in huge pages: which is moved, and what stays as it is."""

import mmap
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from trt_kvcache.runtime.ort import huge_pages as ours
from trt_kvcache.runtime.ort.huge_pages import huge_pages

SIZE = 2 << 20

pytestmark = pytest.mark.skipif(
    not Path("/sys/kernel/mm/transparent_hugepage/hpage_pmd_size").exists() or not Path("/proc/self/pagemap").exists(),
    reason="this system has no huge pages that can be asked for",
)


class Memory:
    """Private memory, all zeros and none of it there yet."""

    def __init__(self, blocks: int) -> None:
        self._map = mmap.mmap(-1, (blocks + 1) * SIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._map.madvise(mmap.MADV_NOHUGEPAGE)  # as it is where nobody asks, whatever the system's setting
        whole: Any = np.frombuffer(self._map, np.uint8)
        shift = -whole.ctypes.data % SIZE
        self.bytes = whole[shift : shift + blocks * SIZE]
        self.start = self.bytes.ctypes.data

    def allow(self) -> None:
        self._map.madvise(mmap.MADV_HUGEPAGE)

    def resident(self) -> int:
        """Pages of it that are there."""
        with open("/proc/self/pagemap", "rb") as file:
            file.seek(self.start // 4096 * 8)
            return int((np.frombuffer(file.read(self.bytes.size // 512), np.uint64) >> np.uint64(63)).sum())


@pytest.fixture
def collapsed(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Beginnings and ends of what is to be moved."""
    found: list[tuple[int, int]] = []

    def collapse(address: int, size: int) -> bool:
        found.append((address, address + size))
        return True

    monkeypatch.setattr(ours, "_collapse", collapse)
    monkeypatch.setattr(ours, "_LEAST_SECONDS", 60.0)
    return found


def covered(ranges: list[tuple[int, int]], memory: Memory) -> list[int]:
    starts = range(memory.start, memory.start + memory.bytes.size, SIZE)
    return [i for i, at in enumerate(starts) if any(first <= at and at + SIZE <= last for first, last in ranges)]


def test_what_is_new_and_full_is_moved(collapsed: list[tuple[int, int]]) -> None:
    old = Memory(3)
    old.bytes[:] = 1
    with huge_pages():
        new = Memory(40)
        new.bytes[: 20 * SIZE] = 1
        new.bytes[21 * SIZE] = 1  # one page of a block
        new.bytes[22 * SIZE : 24 * SIZE - 4096] = 1  # all but one
        new.bytes[30 * SIZE : 31 * SIZE] = 1
    assert covered(collapsed, new) == [*range(20), 22, 30]
    assert covered(collapsed, old) == []
    assert all(last - first <= 16 * SIZE for first, last in collapsed)


def test_its_contents_stay_and_nothing_is_added() -> None:
    with huge_pages():
        memory = Memory(6)
        memory.allow()
        memory.bytes[: 3 * SIZE : 4096] = np.arange(3 * 512) % 251
        before = memory.bytes[: 3 * SIZE].copy(), memory.resident()
    np.testing.assert_array_equal(memory.bytes[: 3 * SIZE], before[0])
    assert memory.resident() == before[1]


def test_it_takes_no_longer_than_what_it_is_for(
    collapsed: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter([0.0, 1.0, 1000.0])  # begins, ends, after the first piece
    monkeypatch.setattr("trt_kvcache.runtime.ort.huge_pages.time.perf_counter", lambda: next(clock))
    with huge_pages():
        memory = Memory(40)
        memory.bytes[:] = 1
    assert len(collapsed) == 1


@pytest.mark.parametrize("setting", ["always madvise [never]", None])
def test_where_it_is_not_wanted_nothing_is_moved(
    setting: str | None, collapsed: list[tuple[int, int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if setting is not None:
        (tmp_path / "enabled").write_text(setting)
        (tmp_path / "hpage_pmd_size").write_text(str(SIZE))
    monkeypatch.setattr(ours, "_SETTINGS", tmp_path)
    with huge_pages():
        memory = Memory(4)
        memory.bytes[:] = 1
    assert collapsed == []

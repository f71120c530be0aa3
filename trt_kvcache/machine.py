"""The memory of this machine, or of the container that the process is in."""

from __future__ import annotations

import os
from pathlib import Path


def memory() -> int:
    """Bytes of the machine's memory, or of the container's."""
    return min([os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), *_container()[:1]])


def free_memory(*, swap: bool = False) -> int:
    """Bytes that are free or can be freed, as mapped files can.

    Args:
        swap: count what can be moved to the disk, too; not in a container.
    """
    facts = {words[0]: int(words[1]) << 10 for line in _lines("/proc/meminfo") if len(words := line.split()) > 1}
    free = facts.get("MemAvailable:", memory() // 2) + (facts.get("SwapFree:", 0) if swap else 0)
    return min([free, *_container()[1:]])


def _container() -> tuple[int, ...]:
    """Limit of this process' control group (version 2), and what of it is free, or nothing."""
    folder = "/sys/fs/cgroup"
    limit = "".join(_lines(f"{folder}/memory.max"))
    if not limit.isdecimal():
        return ()
    stat = (line.split() for line in _lines(f"{folder}/memory.stat"))
    taken = next((int(words[1]) for words in stat if words[0] == "anon"), 0)
    return int(limit), max(int(limit) - taken, 0)


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []

"""The memory of this machine, or of what the process is kept to: a container, a batch job, a unit of systemd."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath

import psutil

_ROOT = "/sys/fs/cgroup"


def memory() -> int:
    """Bytes of the machine's memory, or of its part that the process may take."""
    return min([int(psutil.virtual_memory().total), *(limit for limit, _ in _limits())])


def free_memory(*, swap: bool = False) -> int:
    """Bytes that are free or can be freed, as mapped files can.

    Args:
        swap: count what can be moved to the disk, too; not where the process is kept to less than the machine.
    """
    free = int(psutil.virtual_memory().available)
    if swap:
        with suppress(RuntimeError):  # Windows without performance counters
            free += int(psutil.swap_memory().free)
    return min([free, *(max(limit - taken, 0) for limit, taken in _limits())])


def peak_memory() -> int:
    """Bytes of memory that this process has had at most."""
    if sys.platform == "win32":
        return int(psutil.Process().memory_info().peak_wset)
    else:  # noqa: RET505 - mypy looks at one of the two
        # getrusage counts the process that started this one, too.
        lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
        return int(lines["VmHWM"].split()[0]) << 10


_bounded: list[bool] = []


@contextmanager
def bounded_memory() -> Iterator[None]:
    """Let this process take no more memory than is free now: what asks for more fails. On Linux; elsewhere nothing.

    Files that are mapped to be read do not count. It is for processes of our own: all threads are bounded.
    """
    if sys.platform == "linux":
        import resource

        soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
        most = psutil.Process().memory_info().data + free_memory(swap=True)
        limits = [limit for limit in (soft, hard) if limit != resource.RLIM_INFINITY]
        resource.setrlimit(resource.RLIMIT_DATA, (min([most, *limits]), hard))
        _bounded.append(True)
        try:
            yield
        finally:
            _bounded.pop()
            resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))
    else:
        yield


def allow_memory(size: int) -> None:
    """Raise the bound of `bounded_memory`, if there is one, for memory that is asked for and perhaps never used."""
    if sys.platform == "linux" and _bounded:
        import resource

        soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
        resource.setrlimit(resource.RLIMIT_DATA, (soft + size if hard < 0 else min(soft + size, hard), hard))


def _limits() -> Iterator[tuple[int, int]]:
    """Limits of Linux' control groups that this process is in, one inside the other, and what each has taken of it.

    In a container the innermost group is the root of the file system, whatever name the host has for it.
    """
    groups = [("", "/"), *(tuple(line.split(":", 2)[1:]) for line in _lines("/proc/self/cgroup"))]
    for controllers, name in groups:
        if not controllers:  # version 2
            base, limited, counted = _ROOT, "memory.max", "anon"
        elif "memory" in controllers.split(","):
            base, limited, counted = f"{_ROOT}/memory", "memory.limit_in_bytes", "total_rss"
        else:
            continue
        for folder in (PurePosixPath(name), *PurePosixPath(name).parents):
            path = f"{base}{folder}".rstrip("/")
            limit = "".join(_lines(f"{path}/{limited}"))
            if limit.isdecimal():
                stat = (line.split() for line in _lines(f"{path}/memory.stat"))
                yield int(limit), next((int(words[1]) for words in stat if words[0] == counted), 0)


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []

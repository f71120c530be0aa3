"""Measures and limits memory: of this machine, or of the part that a container or a systemd unit may use."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath

import psutil

_ROOT = "/sys/fs/cgroup"


def memory() -> int:
    """Return the bytes of memory of the machine, or of the part that a container allows this process."""
    return min([int(psutil.virtual_memory().total), *(limit for limit, _ in _limits())])


def free_memory(*, swap: bool = False) -> int:
    """Return the bytes of memory that are free or can be freed; with `swap`, count free swap space, too."""
    free = int(psutil.virtual_memory().available)
    if swap:
        with suppress(RuntimeError):  # Windows without performance counters
            free += int(psutil.swap_memory().free)
    return min([free, *(max(limit - taken, 0) for limit, taken in _limits())])


def shortage(need: int) -> str:
    """Return a text that says how much memory is free, if that is less than `need` bytes; else ""."""
    free = free_memory(swap=True)
    return "" if need <= free else f"{free / 1e9:.1f} of this machine's {memory() / 1e9:.1f} GB are free"


def peak_memory() -> int:
    """Return the largest memory that this process has used so far, in bytes."""
    if sys.platform == "win32":
        return int(psutil.Process().memory_info().peak_wset)
    else:  # noqa: RET505 - mypy looks at one of the two
        # getrusage counts the process that started this one, too.
        lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
        return int(lines["VmHWM"].split()[0]) << 10


_bounded: list[bool] = []


@contextmanager
def bounded_memory() -> Iterator[None]:
    """Within the ``with`` block, limit this process to the memory that is free now. Linux only.

    Read-only mapped files do not count. All threads are limited, so use it only in processes of this package.
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
    """Raise the limit of `bounded_memory`, if there is one, by `size` bytes that the caller will reserve."""
    if sys.platform == "linux" and _bounded:
        import resource

        soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
        resource.setrlimit(resource.RLIMIT_DATA, (soft + size if hard < 0 else min(soft + size, hard), hard))


def _limits() -> Iterator[tuple[int, int]]:
    """Yield the memory limit and the use of each of Linux' nested control groups around this process, in bytes.

    In a container, the innermost group is the root of the cgroup file system, whatever its name on the host is.
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

"""Stores the verdicts of the check, so that regions that were equal once are not compared again.

    ~/.cache/trt-kvcache/verdicts/KEY       on Windows below %LOCALAPPDATA%

A key is a digest of all inputs of a comparison: both models with weights, plan, steps, and the code that compares. Only
"equal" is stored. A stored verdict is trusted only if no other user (except root) can write to its folder or any folder
above. Verdicts are never stored beside a model, where its author could have written them.
"""

from __future__ import annotations

import os
import platform
import secrets
import stat
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import ml_dtypes
import msgspec
import numpy as np
import onnx
import onnxruntime as ort
from blake3 import blake3

import trt_kvcache

SWITCH = "TRT_KVCACHE_VERDICTS"  # environment variable; "off": the check neither stores nor uses verdicts
_MOST = 2000  # the most verdicts; if there are more, the oldest half is deleted
_LARGEST = 1 << 16  # the most bytes of one verdict


@dataclass(frozen=True)
class _Entry:
    key: str
    alive: tuple[str, ...]


class Verdicts:
    """The stored verdicts of the check, in a private folder. With `again`, they are not used, only replaced."""

    def __init__(self, folder: Path, *, again: bool = False) -> None:
        self._folder, self._again = folder, again
        self._tidied = False

    def find(self, key: str) -> frozenset[str] | None:
        """If the comparison `key` is stored as equal, return the names of outputs whose numbers varied; else None."""
        path = self._folder / key
        if self._again:
            return None
        try:
            file = os.open(path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_BINARY", 0))
            try:
                status = os.fstat(file)
                if not _is_own(status) or status.st_size > _LARGEST:
                    return None
                entry = msgspec.json.decode(os.read(file, _LARGEST), type=_Entry)
            finally:
                os.close(file)
            if entry.key != key:
                return None
            os.utime(path)  # marks it as used: the oldest are deleted first
        except (OSError, msgspec.MsgspecError, RecursionError):
            return None
        return frozenset(entry.alive)

    def keep(self, key: str, alive: Iterable[str]) -> None:
        """Store that a comparison found no difference, and which outputs varied (`alive`). Ignore errors of files."""
        part = self._folder / f".{key}.{secrets.token_hex(4)}"
        with suppress(OSError):
            self._tidy()
            file = os.open(part, os.O_CREAT | os.O_EXCL | os.O_WRONLY | getattr(os, "O_BINARY", 0), 0o600)
            try:
                os.write(file, msgspec.json.encode(_Entry(key, tuple(sorted(alive)))))
            finally:
                os.close(file)
            part.replace(self._folder / key)

    def _tidy(self) -> None:
        if self._tidied:
            return
        self._tidied = True
        paths = list(self._folder.iterdir())
        if len(paths) > _MOST:
            for path in sorted(paths, key=lambda p: p.lstat().st_mtime)[: len(paths) - _MOST // 2]:
                path.unlink(missing_ok=True)


_current: ContextVar[Verdicts | None] = ContextVar("verdicts", default=None)


def current_verdicts() -> Verdicts | None:
    """Return the store of verdicts that is in use; None outside of a `keeping` block."""
    return _current.get()


@contextmanager
def keeping(verdicts: Verdicts | None) -> Iterator[None]:
    """Within the ``with`` block, comparisons look up and store their verdicts in `verdicts`."""
    token = _current.set(verdicts)
    try:
        yield
    finally:
        _current.reset(token)


def open_verdicts(*, again: bool) -> Verdicts | None:
    """Return the user's store of verdicts; None if its folder is not private, or the user turned the store off."""
    base = cache_folder()
    if base is None or os.environ.get(SWITCH) == "off":
        return None
    folder = base / "trt-kvcache" / "verdicts"
    try:
        folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)
        folder = folder.resolve(strict=True)
        return Verdicts(folder, again=again) if is_private(folder) else None
    except OSError:
        return None


def cache_folder() -> Path | None:
    """Return the user's cache folder; None if the user has none."""
    folder = os.environ.get("LOCALAPPDATA" if sys.platform == "win32" else "XDG_CACHE_HOME", "")
    if folder and Path(folder).is_absolute():  # the XDG specification says to ignore other paths
        return Path(folder)
    if sys.platform != "win32":
        with suppress(RuntimeError):  # a user without a home
            return Path.home() / ".cache"
    return None


def is_private(folder: Path) -> bool:
    """True if only this user and root can change or replace a folder. Folders in %LOCALAPPDATA% are private."""
    return sys.platform == "win32" or (
        _is_own(folder.lstat()) and all(_is_protected(parent.lstat()) for parent in folder.parents)
    )


def _is_own(status: os.stat_result) -> bool:
    return sys.platform == "win32" or (status.st_uid == os.geteuid() and not status.st_mode & 0o077)


def _is_protected(parent: os.stat_result) -> bool:
    written = parent.st_mode & 0o022 and not parent.st_mode & stat.S_ISVTX
    return sys.platform == "win32" or (parent.st_uid in (0, os.geteuid()) and not written)


def key_of(*parts: bytes) -> str:
    """Return the key of a comparison: a digest of its inputs `parts` and of the code that compares."""
    digest = blake3(_compares())
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.hexdigest()


@lru_cache(maxsize=1)
def _compares() -> bytes:
    """Return a digest of all code that can change verdicts: versions of packages, and the importer's sources."""
    versions = (
        trt_kvcache.__version__, onnx.__version__, ort.__version__, np.__version__, ml_dtypes.__version__,
        sys.version, platform.system(), platform.machine(),
    )  # fmt: skip
    digest = blake3(repr(versions).encode())
    root = Path(__file__).parents[1]
    for path in sorted(root.rglob("*.py")):
        data = path.read_bytes()
        digest.update(f"{path.relative_to(root).as_posix()} {len(data)} ".encode())
        digest.update(data)
    return digest.digest()

"""Reads small files within limits, writes outputs completely or not at all, and computes identities of files."""

from __future__ import annotations

import errno
import glob
import json
import os
import re
import secrets
import stat
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from blake3 import blake3

from trt_kvcache.arguments import as_path
from trt_kvcache.errors import OutputError
from trt_kvcache.native import HeldSignals

SETTINGS = 16 << 20
"""Most bytes of files with settings or templates."""

_BLOCK = 1 << 20
if sys.platform != "win32":
    import fcntl

_NEW = 10.0  # seconds; a new temporary file is locked sooner than this, so an older unlocked one is abandoned
_OPEN = ("/dev/stdout", "/dev/stderr", "/dev/fd/", "/proc/self/fd/")  # paths of files that are open already
_PART = re.compile(r"(decoder(_with_past)?_model(_merged)?|encoder_model)(?P<suffix>_\w+)?")


@dataclass(frozen=True)
class FileIdentity:
    """A file's name, size in bytes, and the BLAKE3 digest (hex) of its content."""

    name: str
    size: int
    blake3: str


def identify(path: Path, name: str | None = None, cancelled: threading.Event | None = None) -> FileIdentity:
    """Read a file, and return its identity. If `name` is given, it replaces the file's own name.

    BLAKE3 is used because SHA-256 of a multi-gigabyte engine would take a tenth of its build time. The file is not
    mapped, because mapped pages would count as this process's memory. Raises `OSError` if the file cannot be read, and
    `InterruptedError` if `cancelled` was set meanwhile.
    """
    digest, size = blake3(), 0
    buffer = memoryview(bytearray(_BLOCK))
    with open(path, "rb", buffering=0) as file:
        while count := file.readinto(buffer):
            digest.update(buffer[:count])
            size += count
            if cancelled is not None and cancelled.is_set():
                raise InterruptedError(f"{path}: no longer wanted")
    return FileIdentity(path.name if name is None else name, size, digest.hexdigest())


def read_file(path: Path, limit: int = SETTINGS) -> bytes:
    """Return the content of a regular file of at most `limit` bytes; symbolic links are followed.

    Raises `OSError` for other files (without waiting for a pipe), with the reason in `strerror`.
    """
    with open_regular(path) as file:
        data = file.read(limit + 1)
    if len(data) > limit:
        raise OSError(errno.EFBIG, f"larger than {limit >> 20} MiB, the most that is read of such a file", str(path))
    return data


def open_regular(path: Path) -> BinaryIO:
    """Open a regular file for reading; raise `OSError` for pipes and the like, with the reason in `strerror`."""
    flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)  # no wait for a pipe's writer
    descriptor = os.open(path, flags)
    try:
        mode = os.fstat(descriptor).st_mode
        if stat.S_ISDIR(mode):
            raise OSError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        if not stat.S_ISREG(mode):
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        return open(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def read_object(path: Path, limit: int = SETTINGS) -> dict[str, Any]:
    """Return the JSON object in a file; raise `OSError` as `read_file`, or `ValueError` if the file holds no object."""
    data = read_file(path, limit)
    try:
        content = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"is not JSON: {error}") from None
    if not isinstance(content, dict):
        raise ValueError(f"holds {type(content).__name__}, not an object")
    return content


def stamp(file: Path | int) -> tuple[int, ...]:
    """Return values that differ after a change of the file: device, inode, size, change times of contents and inode.

    The inode's time also changes if a file is moved away and back. `file` is a path or an open file's descriptor.
    """
    status = os.stat(file)  # noqa: PTH116 - it takes descriptors, too
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


def is_text(path: Path) -> bool:
    """Return True if the path can be written as UTF-8 text, as manifests, models and ONNX Runtime require."""
    return not any("\ud800" <= character <= "\udfff" for character in str(path.absolute()))


def is_inside(name: str) -> bool:
    """Return True if a file name in a config stays inside the config's folder."""
    return "\0" not in name and not Path(name).is_absolute() and ".." not in Path(name).parts


def export_suffix(model: Path) -> str:
    """Return the suffix that all files of one export by optimum share, such as ``_fp16``; "" if there is none."""
    part = _PART.fullmatch(model.stem)
    return (part["suffix"] or "") if part is not None and model.suffix == ".onnx" else ""


def check_output(path: str | os.PathLike[str]) -> Path:
    """Return the real path of an output file; raise `OutputError` if the file certainly cannot be written."""
    path = as_path(path, "output", OutputError)
    if path.absolute().as_posix().startswith(_OPEN):  # stdout may be a regular file, which would be replaced
        raise OutputError(f"{path}: not a regular file; give the name of a file to write")
    try:
        real = path.expanduser().resolve()
        if real.is_symlink():
            raise RuntimeError  # as `resolve` does before Python 3.13
    except RuntimeError:  # links in a circle, or the home of an unknown user
        raise OutputError(
            f"{path}: its links form a circle, or the user after ~ is unknown; give another path"
        ) from None
    if not is_text(real):
        raise OutputError(f"{path}: this name is not UTF-8, which models and manifests need; give another one")
    if not real.parent.is_dir():
        raise OutputError(f"{path}: no such folder: {real.parent}; create it first")
    if real.exists() and not stat.S_ISREG(real.stat().st_mode):
        what = "a directory" if real.is_dir() else "not a regular file"
        raise OutputError(f"{path}: {what}; give the name of a file to write")
    return real


@contextmanager
def temporary_file(final: Path) -> Iterator[Path]:
    """Create an empty temporary file beside `final`. The ``with`` block fills the file, and moves it to `final`.

    It is beside `final`, because a move in one step works only within one file system. A file that still exists after
    the block is removed. The file is locked while this process lives, so that unlocked files of killed processes can be
    removed. On Windows an open file cannot be moved: there files are not locked, and files of killed processes stay.
    """
    _remove_abandoned(final)
    path = final.with_name(f".{final.name}.{secrets.token_hex(4)}.tmp")
    refused = False
    try:
        try:
            # Not mkstemp, whose files are private to the user for good.
            descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666)
        except OSError as error:
            refused = True
            raise OutputError(f"{final}: cannot be written: {error.strerror}") from error
        with _locked(descriptor):
            yield path
    finally:
        if not refused:  # otherwise a file of this name belongs to another process
            path.unlink(missing_ok=True)


@contextmanager
def _locked(descriptor: int) -> Iterator[None]:
    """Lock an open file during the ``with`` block, if the system can lock files. Close the file at the end."""
    if sys.platform == "win32":
        os.close(descriptor)
        yield
    else:
        try:
            with suppress(OSError):  # a file system without locks
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield
        finally:
            os.close(descriptor)


def _remove_abandoned(final: Path) -> None:
    for path in final.parent.glob(f".{glob.escape(final.name)}.{'[0-9a-f]' * 8}.tmp"):
        if sys.platform != "win32":
            with suppress(OSError):
                descriptor = os.open(path, os.O_WRONLY | os.O_NOFOLLOW)
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    if time.time() - os.fstat(descriptor).st_mtime > _NEW:
                        path.unlink()
                finally:
                    os.close(descriptor)


@contextmanager
def atomic_file(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """Yield a binary file that replaces `path` if the block ends without an exception; or raise `OutputError`."""
    final = check_output(path)
    with temporary_file(final) as temporary:
        try:
            with open(temporary, "wb") as file:
                yield file
                sync(file)
        except OSError as error:
            raise OutputError(f"{final}: cannot be written: {error.strerror}") from error
        publish([(temporary, final)])


def sync(file: BinaryIO) -> None:
    """Wait until the content is on disk, because after a power cut a rename may survive without the content."""
    file.flush()
    os.fsync(file.fileno())


def publish(files: Sequence[tuple[Path, Path]]) -> None:
    """Move finished temporary files to their final names, in order. If a move fails, restore the former files.

    Ctrl-C takes effect after all moves. Raises `OutputError` if a file cannot be moved.
    """
    moved: list[tuple[Path, Path | None]] = []
    with HeldSignals():
        try:
            for temporary, final in files:
                moved.append((final, _keep_aside(final)))
                temporary.replace(final)
        except OSError as error:
            for path, former in reversed(moved):
                path.unlink(missing_ok=True)  # first: a name that is moved onto another name of the same file stays
                if former is not None:
                    former.replace(path)
            raise OutputError(f"{final}: cannot be written: {error.strerror}") from error
        for _, former in moved:
            if former is not None:
                former.unlink(missing_ok=True)


def _keep_aside(path: Path) -> Path | None:
    """Keep a file under a second name, from which it can be restored. Return this name; None if there is no file."""
    if not path.exists():
        return None
    former = path.with_name(f".{path.name}.{secrets.token_hex(4)}.old")
    try:
        os.link(path, former)
    except OSError:  # a file system without hard links
        path.replace(former)
    return former

"""Writes a rewritten model: either all of its files, or none.

Weights stay in their files, or the operating system copies these files. Only changed weights are written here.
"""

from __future__ import annotations

import errno
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import blake3
from google.protobuf.message import EncodeError
from onnx import ModelProto, TensorProto

from trt_kvcache.errors import OutputError
from trt_kvcache.files import check_output, publish, sync, temporary_file
from trt_kvcache.importer.files.flipped import Flipped
from trt_kvcache.importer.protos import byte_size, iter_tensors

if TYPE_CHECKING:
    from trt_kvcache.importer.files.source import SourceModel

_PAGE = 4096
_BLOCK = 1 << 25  # bytes read at a time


def save_model(
    proto: ModelProto, output: str | os.PathLike[str], source: SourceModel, flipped: Sequence[Flipped] = ()
) -> None:
    """Write a model that was made from `source`. Replace an existing `output`, but never change files of `source`.

    In the folder of the source, references to external data stay the same. Otherwise the data files are copied; an
    existing file with the same content is kept. Weights in `flipped` are written to ``<output>.signed``, and `proto`
    then refers to this file. No new file is left after an error.

    Raises:
        OutputError: the file cannot be written, belongs to the source, or a needed data file's name is taken.
        InvalidModelError: a file of the source changed after it was read, so a copy may mix two states.
    """
    target = check_output(output)
    _check_target(target, source)
    changed = target.with_name(f"{target.name}.signed")
    if flipped:
        _check_target(changed, source)
    data = {} if target.parent.samefile(source.path.parent) else _data_files(proto, target, source, flipped)
    if flipped and changed in data:
        raise OutputError(f"{changed}: a data file of the model already has this name; write to another path")
    _refer(proto, flipped, changed.name)
    try:
        content = proto.SerializeToString()
    except (ValueError, EncodeError) as error:
        raise OutputError(
            f"{output}: the rewritten model does not fit into one file ({error}); export the source model with "
            "external data"
        ) from None
    try:
        with _placing() as place:
            for copy, needed in data.items():
                place(copy, needed)
            if flipped:
                place(changed, _aligned(flipped, source.path.parent))
            place(target, content)
            source.check_unchanged()
    except OSError as error:
        where = f" ({error.filename})" if error.filename else ""  # the error of a full disk names no file
        raise OutputError(f"{output}: cannot be written: {error.strerror}{where}") from None


def _check_target(target: Path, source: SourceModel) -> None:
    for file in (source.path, *source.external_files):
        if target.exists() and target.samefile(file):
            raise OutputError(
                f"{target}: belongs to the source model, which must not be changed; write to another path"
            )


@dataclass(frozen=True)
class _Data:
    """The byte ranges of a data file that a model needs, sorted and without overlaps; None: the whole file."""

    original: Path
    ranges: tuple[tuple[int, int], ...] | None


def _data_files(proto: ModelProto, target: Path, source: SourceModel, flipped: Sequence[Flipped]) -> dict[Path, _Data]:
    """Return the data files to copy to the target's folder, by path of the copy. Weights in `flipped` are left out."""
    moved, emptied = {weight.name for weight in flipped}, {weight.location for weight in flipped}
    used: dict[str, list[tuple[int, int]]] = {}
    for tensor in iter_tensors(proto):
        if tensor.data_location == TensorProto.EXTERNAL and tensor.name not in moved:
            entries = {entry.key: entry.value for entry in tensor.external_data}
            start = int(entries.get("offset") or 0)
            used.setdefault(entries["location"], []).append((start, start + (byte_size(tensor) or 0)))
    files: dict[Path, _Data] = {}
    for location in sorted(used):
        copy, original = target.parent / location, source.path.parent / location
        if copy == target:
            raise OutputError(f"{target}: a data file of the model already has this name; write to another path")
        data = _Data(original, _joined(used[location]) if location in emptied else None)
        if not copy.exists():
            files[copy] = data
        elif not copy.samefile(original) and not _same_content(copy, data):
            raise OutputError(
                f"{copy}: this file exists and differs from the data file that must be copied here; use another folder"
            )
    return files


def _joined(ranges: list[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    joined: list[tuple[int, int]] = []
    for start, stop in sorted(ranges):
        if joined and start <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(stop, joined[-1][1])
        else:
            joined.append((start, stop))
    return tuple(joined)


def _same_content(copy: Path, data: _Data) -> bool:
    if not copy.is_file() or copy.stat().st_size != data.original.stat().st_size:
        return False
    if data.ranges is not None:
        with copy.open("rb") as a, data.original.open("rb") as b:
            return all(x == y for x, y in zip(_pieces(a, data.ranges), _pieces(b, data.ranges), strict=True))
    digests = [blake3.blake3(max_threads=blake3.blake3.AUTO).update_mmap(f).digest() for f in (copy, data.original)]
    return digests[0] == digests[1]


def _copy(data: _Data, file: BinaryIO) -> None:
    """Copy the byte ranges of a data file that a model needs. Other bytes become holes, which use no disk space."""
    status = data.original.stat()
    holes = getattr(status, "st_blocks", status.st_size) * 512 < status.st_size
    if data.ranges is None and not holes:
        shutil.copyfile(data.original, file.name)  # by the operating system
        return
    file.truncate(status.st_size)
    with data.original.open("rb", buffering=0) as original:  # unbuffered, because `_extents` moves the position
        for needed in data.ranges or ((0, status.st_size),):
            for start, stop in _extents(original.fileno(), *needed):
                file.seek(start)
                file.writelines(_pieces(original, ((start, stop),)))


def _extents(descriptor: int, start: int, stop: int) -> Iterator[tuple[int, int]]:
    """Yield the parts of a byte range that are not holes; on Windows, the whole range."""
    if sys.platform == "win32":
        yield start, stop
    else:
        while start < stop:
            try:
                first = os.lseek(descriptor, start, os.SEEK_DATA)
            except OSError as error:
                if error.errno != errno.ENXIO:
                    raise
                return  # only a hole is left
            start = os.lseek(descriptor, first, os.SEEK_HOLE)
            if first < stop:
                yield first, min(start, stop)


def _pieces(file: BinaryIO, ranges: Sequence[tuple[int, int]]) -> Iterator[bytes]:
    for start, stop in ranges:
        file.seek(start)
        while (left := stop - file.tell()) > 0:
            data = file.read(min(left, _BLOCK))
            if not data:
                raise OSError(errno.EIO, "the file ends before its last weight", file.name)
            yield data


def _refer(proto: ModelProto, flipped: Sequence[Flipped], location: str) -> None:
    weights, offset = {t.name: t for t in proto.graph.initializer}, 0
    for weight in flipped:
        tensor = weights[weight.name]
        del tensor.external_data[:]
        for key, value in (("location", location), ("offset", str(offset)), ("length", str(weight.length))):
            tensor.external_data.add(key=key, value=value)
        offset += weight.length + -weight.length % _PAGE


def _aligned(flipped: Sequence[Flipped], folder: Path) -> Iterator[bytes]:
    """Yield the flipped data. Each weight starts at a page boundary, which memory mapping needs."""
    for weight in flipped:
        yield from weight.read(folder)
        yield bytes(-weight.length % _PAGE)


@contextmanager
def _placing() -> Iterator[Callable[[Path, _Data | bytes | Iterator[bytes]], None]]:
    """Yield a function that writes temporary files. At the end, rename them; after an error, delete them."""
    folders: list[Path] = []
    pending: list[tuple[Path, Path]] = []
    with ExitStack() as stack:

        def place(target: Path, content: _Data | bytes | Iterator[bytes]) -> None:
            for folder in reversed([f for f in (target.parent, *target.parent.parents) if not f.exists()]):
                folders.append(folder)  # before mkdir, because an interrupt may come in between
                folder.mkdir()
            temporary = stack.enter_context(temporary_file(target))
            with temporary.open("wb") as file:
                if isinstance(content, _Data):
                    _copy(content, file)
                else:
                    file.writelines((content,) if isinstance(content, bytes) else content)
                sync(file)
            pending.append((temporary, target))

        try:
            yield place
            publish(pending)
        except BaseException:
            stack.close()
            for folder in reversed(folders):
                with suppress(OSError):
                    folder.rmdir()
            raise

"""Writing a rewritten model: all of it appears, or nothing does.

Weights stay where they are, or are copied by the operating system; only those that change are written anew.
"""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import blake3
from google.protobuf.message import EncodeError
from onnx import ModelProto, TensorProto

from trt_kvcache.errors import OutputError
from trt_kvcache.importer.flipped import Flipped
from trt_kvcache.importer.protos import iter_tensors

if TYPE_CHECKING:
    from trt_kvcache.importer.source import SourceModel

_PAGE = 4096


def save_model(
    proto: ModelProto, output: str | os.PathLike[str], source: SourceModel, flipped: Sequence[Flipped] = ()
) -> None:
    """Write a model derived from `source`; the source and its data files are never touched.

    In the source's own folder, references to external data stay as they are. Anywhere else, the data files are copied
    beside the new model by the operating system; a file there that already has the same content is used as it is.

    Args:
        proto: the model; its external data references are relative to ``source.path.parent``. Those of `flipped`
            will name the new file.
        output: the ``.onnx`` file; replaced if it exists.
        source: what the model was made from.
        flipped: weights that change on the way; they go to a file of their own, ``<output>.signed``.

    Raises:
        OutputError: the file cannot be written, is one of the source's own, or a different file stands where a data
            file must be copied. Nothing is left behind.
    """
    target = Path(output).absolute()
    changed = target.with_name(f"{target.name}.signed")
    for file in (target, changed) if flipped else (target,):
        _check_target(file, source)
    changing = {weight.name for weight in flipped}
    data = {} if target.parent.samefile(source.path.parent) else _data_files(proto, target, source, changing)
    if changing and changed in data:
        raise OutputError(f"{changed}: a data file of the model has this name; write to another path")
    _refer(proto, flipped, changed.name)
    try:
        content = proto.SerializeToString()
    except (ValueError, EncodeError) as error:
        raise OutputError(
            f"{output}: the rewritten model does not fit into one file ({error}); export the source with external data"
        ) from None
    try:
        with _placing() as place:
            for copy, original in data.items():
                place(copy, original)
            if flipped:
                place(changed, _aligned(flipped, source.path.parent))
            place(target, content)
    except OSError as error:
        raise OutputError(f"{output}: cannot be written: {error.strerror} ({error.filename})") from None


def _check_target(target: Path, source: SourceModel) -> None:
    if target.is_dir():
        raise OutputError(f"{target}: is a directory; give the path of the file to write")
    if not target.parent.is_dir():
        raise OutputError(f"{target}: its folder does not exist; create {target.parent} first")
    for file in (source.path, *source.external_files):
        if target.exists() and target.samefile(file):
            raise OutputError(f"{target}: belongs to the source model, which must stay as it is; write to another path")


def _data_files(proto: ModelProto, target: Path, source: SourceModel, changing: set[str]) -> dict[Path, Path]:
    """Copy -> original for each external file that the model refers to and that is not yet in the target's folder.

    The weights named in `changing` will be elsewhere.
    """
    locations = {
        entry.value
        for tensor in iter_tensors(proto)
        if tensor.data_location == TensorProto.EXTERNAL and tensor.name not in changing
        for entry in tensor.external_data
        if entry.key == "location"
    }
    files: dict[Path, Path] = {}
    for location in sorted(locations):
        copy, original = target.parent / location, source.path.parent / location
        if copy == target:
            raise OutputError(f"{target}: a data file of the model has this name; write to another path")
        if not copy.exists():
            files[copy] = original
        elif not copy.samefile(original) and not _same_content(copy, original):
            raise OutputError(f"{copy}: another file stands where a data file must be copied; write to another folder")
    return files


def _same_content(one: Path, other: Path) -> bool:
    if not one.is_file() or one.stat().st_size != other.stat().st_size:
        return False
    digests = [blake3.blake3(max_threads=blake3.blake3.AUTO).update_mmap(file).digest() for file in (one, other)]
    return digests[0] == digests[1]


def _refer(proto: ModelProto, flipped: Sequence[Flipped], location: str) -> None:
    """Let the weights of `flipped` refer to where `_aligned` puts them."""
    weights, offset = {t.name: t for t in proto.graph.initializer}, 0
    for weight in flipped:
        tensor = weights[weight.name]
        del tensor.external_data[:]
        for key, value in (("location", location), ("offset", str(offset)), ("length", str(weight.length))):
            tensor.external_data.add(key=key, value=value)
        offset += weight.length + -weight.length % _PAGE


def _aligned(flipped: Sequence[Flipped], folder: Path) -> Iterator[bytes]:
    """The flipped data, each weight from the start of a page, so that it can be mapped."""
    for weight in flipped:
        yield from weight.read(folder)
        yield bytes(-weight.length % _PAGE)


Place = Callable[[Path, "Path | bytes | Iterator[bytes]"], None]


@contextmanager
def _placing() -> Iterator[Place]:
    """Hand out a function that prepares new files; all are renamed into place at the end, or removed on any error."""
    undo: list[Callable[[], None]] = []
    pending: list[tuple[Path, Path]] = []

    def place(target: Path, content: Path | bytes | Iterator[bytes]) -> None:
        for folder in reversed([f for f in (target.parent, *target.parent.parents) if not f.exists()]):
            folder.mkdir()
            undo.append(folder.rmdir)
        # Not tempfile: its files are private to the user, and these are ordinary files that follow the umask.
        temporary = target.with_name(f".{target.name}.{secrets.token_hex(4)}.tmp")
        with temporary.open("xb") as file:
            undo.append(partial(temporary.unlink, missing_ok=True))
            if isinstance(content, Path):
                shutil.copyfile(content, temporary)
            else:
                file.writelines((content,) if isinstance(content, bytes) else content)
            file.flush()
            os.fsync(file.fileno())
        pending.append((temporary, target))

    try:
        yield place
        for temporary, target in pending:
            new = not target.exists()
            temporary.replace(target)
            if new:
                undo.append(target.unlink)
    except BaseException:
        for step in reversed(undo):
            with suppress(OSError):
                step()
        raise

"""Reads a model file without its weights, and checks the file and its external data.

External data must exist, lie inside the folder, and be long enough. To load fast, weights are never read.
"""

from __future__ import annotations

import mmap
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from google.protobuf.message import DecodeError
from onnx import GraphProto, ModelProto, TensorProto, numpy_helper

from trt_kvcache.arguments import as_path
from trt_kvcache.errors import InvalidModelError, UnsupportedModelError
from trt_kvcache.files import is_text, stamp
from trt_kvcache.importer import families
from trt_kvcache.importer.files.checks import check_graph, check_text, drop_defaults, repair
from trt_kvcache.importer.files.model_folder import INSTEAD_OF, find_model
from trt_kvcache.importer.interface import load_patterns
from trt_kvcache.importer.protos import (
    FLOATS,
    byte_size,
    elem_type_of,
    is_op,
    iter_scopes,
    iter_tensors,
    may_be_bias,
    shape_of,
    sliced_squares,
)
from trt_kvcache.importer.weights import read_data
from trt_kvcache.model_paths import model_named

PROTOBUF_LIMIT = 2**31 - 1
"""Bytes. No protobuf library can encode or decode a longer message."""

_ONNX_WANTED = "give the path of an .onnx file"
# Bytes for each element type. Positions and masks of long texts are int64 and bool; quantized weights may be int32.
_READ_LIMITS: dict[int, int] = {
    TensorProto.INT64: 1 << 26, TensorProto.INT32: 1 << 20, TensorProto.BOOL: 1 << 28,
}  # fmt: skip
_CONSTANT_LIMIT = 1 << 20
_BIAS_LIMIT = 1 << 28
_AGAIN = "export or copy the model again"
_CACHE_NAME = re.compile(r"present|past|cache|key|value", re.IGNORECASE)
_CACHE_RANK = 4
_SAMPLE = 512
_DIGITS = 20

# Other file formats that users may give: offset and content of the first bytes, name of the format, and advice.
_SIGNATURES: tuple[tuple[int, bytes, str, str], ...] = (
    (0, b"GGUF", "a GGUF file (llama.cpp)", "export the original model to ONNX"),
    (0, b"ftrt", "a TensorRT engine", "give the ONNX model that it was built from"),
    (0, b"vtrt", "a TensorRT engine", "give the ONNX model that it was built from"),
    (0, b"PK\x03\x04", "a zip archive (a PyTorch checkpoint?)", "export the model to ONNX"),
    (0, b"\x80\x02", "a Python pickle (a PyTorch checkpoint?)", "export the model to ONNX"),
    (0, b"\x89HDF", "an HDF5 file", "export the model to ONNX"),
    (0, b"\x1f\x8b", "a gzip archive", "unpack the archive first"),
    (4, b"ORTM", "a model in ONNX Runtime's own format", "give the ONNX model that it was converted from"),
    (4, b"TFL3", "a TensorFlow Lite model", "export the original model to ONNX"),
)


@dataclass(frozen=True)
class SourceModel:
    """A model file that passed every check.

    Attributes:
        path: absolute path of the model file.
        proto: the model with sorted nodes. Weights in external data are references relative to ``path.parent``.
        external_files: absolute paths of the external data files, in order of first use.
        stamps: state (size, times) of the model file and each external file when it was checked.
        is_edited: True if the importer repaired the graph, so that it differs from the file.
    """

    path: Path
    proto: ModelProto
    external_files: tuple[Path, ...]
    stamps: Mapping[Path, tuple[int, ...]] = field(default_factory=dict)
    is_edited: bool = False

    def check_unchanged(self) -> None:
        """Raise `InvalidModelError` if a file changed or was replaced since the importer read it."""
        for path, before in self.stamps.items():
            try:
                same = stamp(path) == before
            except OSError:
                same = False
            if not same:
                raise InvalidModelError(
                    f"{path}: was changed or replaced after it was read, so nothing is written. Run the command again, "
                    "and do not change the file while it runs"
                )


def load_source(path: str | os.PathLike[str], *, first_step: bool = False, config: str | None = None) -> SourceModel:
    """Read a model without its external data, and check files and graph.

    `path` is a file, an export's folder with one decoder, or the name of a model in the local hub cache. With
    `first_step`, also accept an export of only the first step (caches are outputs, but not inputs). `config` is a YAML
    file with name patterns for roles; inputs with such names lose their default values.

    Raises:
        OptionError: `config` cannot be read.
        UnsupportedModelError: the model is an export of only the first step.
        InvalidModelError: the file is missing, not ONNX or truncated; external data are missing, too short, or outside
            the model's folder; or the graph breaks the rules of ONNX or of TensorScatter.
    """
    path = model_named(as_path(path, "model"))
    try:
        path = find_model(path) if path.is_dir() else path
    except OSError as error:
        raise InvalidModelError(f"{path}: cannot be read: {error.strerror}") from error
    if not is_text(path):
        raise InvalidModelError(
            f"{path}: this file name is not UTF-8, but ONNX Runtime needs UTF-8 names; rename the file"
        )
    proto, own = _parse(path)
    check_text(proto, str(path))
    stamps = _check_tensor_data(proto, path)  # before other code, which may allocate memory for a stated shape
    repair(proto)
    is_edited = families.read(proto)
    check_graph(proto, str(path))
    is_edited |= drop_defaults(proto.graph, load_patterns(config) if config is not None else ())
    if not first_step:
        _check_takes_past(proto.graph, path)
    take_readable(proto, path.parent)
    return SourceModel(path.absolute(), proto, tuple(stamps), {path.absolute(): own, **stamps}, is_edited)


def take_readable(proto: ModelProto, folder: Path) -> None:
    """Load small constants from checked external data into the model, but no weights.

    The importer evaluates positions, masks and biases. torch.onnx.export stores shapes, axes and row numbers in
    external data, and optimum-onnx all Constant nodes of 100 bytes or more.
    """
    for graph in filter(lambda scope: isinstance(scope, GraphProto), iter_scopes(proto)):
        masks = sliced_squares(graph)
        for tensor in graph.initializer:
            limit = _BIAS_LIMIT if tensor.name in masks else _limit(tensor)
            if _is_external(tensor, limit):
                read_data(tensor, folder)
    for node in (node for scope in iter_scopes(proto) for node in scope.node if is_op(node, "Constant")):
        for tensor in (attribute.t for attribute in node.attribute if attribute.HasField("t")):
            if _is_external(tensor, max(_CONSTANT_LIMIT, _limit(tensor))):
                read_data(tensor, folder)


def _check_takes_past(graph: GraphProto, path: Path) -> None:
    """Raise `UnsupportedModelError` for an export of only the first step: caches are outputs, but not inputs."""
    if any(elem_type_of(v) in FLOATS and len(shape_of(v) or ()) >= _CACHE_RANK for v in graph.input):
        return  # an input with more axes holds the caches of several layers
    floats = [v for v in graph.output if elem_type_of(v) in FLOATS and len(shape_of(v) or ()) == _CACHE_RANK]
    presents = [v.name for v in floats if _CACHE_NAME.search(v.name)]
    if len(presents) < 2:
        return
    better = [name for name, others in INSTEAD_OF.items() if path.name in others and (path.parent / name).is_file()]
    raise UnsupportedModelError(
        f"{path}: has caches as outputs ('{presents[0]}' and {len(presents) - 1} more), but not as inputs, so it "
        "computes only the first step; "
        + (f"use {path.parent / better[0]}, which computes every step" if better else "export the decoder with past")
    )


def _is_external(tensor: TensorProto, most: int) -> bool:
    outside = tensor.data_location == TensorProto.EXTERNAL and tensor.data_type != TensorProto.STRING
    return outside and (byte_size(tensor) or 0) <= most


def _limit(tensor: TensorProto) -> int:
    """Return the size in bytes up to which a tensor's external data are loaded; -1: never."""
    return max(_READ_LIMITS.get(tensor.data_type, -1), _BIAS_LIMIT if may_be_bias(tensor) else -1)


def _parse(path: Path) -> tuple[ModelProto, tuple[int, ...]]:
    if not path.exists():
        raise InvalidModelError(f"{path}: no such file; {_ONNX_WANTED}")
    if not path.is_file():
        raise InvalidModelError(f"{path}: not a regular file; {_ONNX_WANTED}")
    proto = ModelProto()
    try:
        with path.open("rb") as file:
            start = file.read(_SAMPLE)
            if foreign := _recognize(start):
                raise InvalidModelError(f"{path}: {foreign}")
            read = stamp(file.fileno())
            size = read[2]
            if size > PROTOBUF_LIMIT:
                raise InvalidModelError(
                    f"{path}: has {size} bytes, but an ONNX file cannot be longer than 2 GiB; "
                    "export the model with external data"
                )
            # With a memory map, only protobuf copies inline weights.
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped, memoryview(mapped) as content:
                proto.ParseFromString(content)
    except OSError as error:
        raise InvalidModelError(
            f"{path}: cannot be read ({error.strerror}); check the file and its permissions"
        ) from None
    except DecodeError:
        raise InvalidModelError(
            f"{path}: not an ONNX model, or truncated ({size} bytes cannot be decoded); {_AGAIN}"
        ) from None
    # Protobuf skips unknown fields, so many byte strings decode to an empty model.
    fields = {"graph": proto.HasField("graph"), "opset import": bool(proto.opset_import)}
    missing = [what for what, there in fields.items() if not there]
    if missing:
        raise InvalidModelError(
            f"{path}: not an ONNX model, or truncated (it has no {' and no '.join(missing)}); {_AGAIN}"
        )
    return proto, read


def _recognize(start: bytes) -> str | None:
    """Return the format of a file that starts with these bytes, and advice; None if it may be ONNX."""
    if not start:
        return f"an empty file; {_AGAIN}"
    for offset, magic, what, todo in _SIGNATURES:
        if start[offset:].startswith(magic):
            return f"{what}; {todo}"
    if start[8:9] == b"{" and int.from_bytes(start[:8], "little") < 1 << 40:
        return "a safetensors file, which has weights but no graph; export the model to ONNX"
    if _is_text(start):
        what = "JSON" if start.lstrip()[:1] in (b"{", b"[") else "text"
        return f"a file with {what}, not a binary ONNX model; {_ONNX_WANTED}"
    return None


def _is_text(start: bytes) -> bool:
    """True for readable text. An ONNX file is no text: its fields start with tag bytes that are control characters."""
    sample = start.removeprefix(b"\xef\xbb\xbf")
    try:
        text = sample.decode()
    except UnicodeDecodeError as error:
        # the error is more than a last character that the sample cuts off
        if len(start) < _SAMPLE or error.start < len(sample) - 3:
            return False
        text = sample[: error.start].decode()
    return all(c.isprintable() or c in "\t\n\r\f" for c in text)


def _check_tensor_data(proto: ModelProto, path: Path) -> dict[Path, tuple[int, ...]]:
    """Check that the data of every tensor are complete. Return the state (size, times) of each external file."""
    files: dict[str, tuple[Path, tuple[int, ...]]] = {}
    for tensor in iter_tensors(proto):
        is_outside = tensor.data_location == TensorProto.EXTERNAL
        try:
            needed = byte_size(tensor)
            if not is_outside and (needed is None or not tensor.HasField("raw_data")):
                numpy_helper.to_array(tensor)
        except (ValueError, KeyError) as error:
            raise InvalidModelError(f"{path}: tensor '{tensor.name}' is invalid ({error}); {_AGAIN}") from None
        if is_outside:
            _check_external(tensor, needed, path, files)
        elif tensor.HasField("raw_data") and needed is not None and len(tensor.raw_data) != needed:
            raise InvalidModelError(
                f"{path}: tensor '{tensor.name}' has {len(tensor.raw_data)} bytes of data, but its dtype and shape "
                f"need {needed}; {_AGAIN}"
            )
    return {file.absolute(): mark for file, mark in files.values()}


def _check_external(
    tensor: TensorProto, needed: int | None, path: Path, files: dict[str, tuple[Path, tuple[int, ...]]]
) -> None:
    """Check a reference to external data (https://onnx.ai/onnx/repo-docs/ExternalData.html)."""
    entries = {entry.key: entry.value for entry in tensor.external_data}
    location = entries.get("location", "")
    where = f"{path}: the data of tensor '{tensor.name}'"
    if not location:
        raise InvalidModelError(f"{where} are external, but the model names no file; {_AGAIN}")
    texts = [entries.get(key) or "" for key in ("offset", "length")]
    if not all(text.isascii() and (text.isdecimal() or not text) and len(text) < _DIGITS for text in texts):
        raise InvalidModelError(
            f"{where} have offset '{entries.get('offset')}' and length '{entries.get('length')}' in {location}; both "
            f"must be integers from 0 on; {_AGAIN}"
        )
    offset, length = int(texts[0] or 0), int(texts[1] or -1)
    if location not in files:
        files[location] = _external_file(location, path, where)
    size = files[location][1][2]
    end = offset + max(length, needed or 0)
    if length >= 0 and needed is not None and length < needed:
        raise InvalidModelError(
            f"{where} are {length} bytes of {location}, but the tensor's dtype and shape need {needed}; {_AGAIN}"
        )
    if end > size:
        raise InvalidModelError(
            f"{where} end at byte {end} of {location}, which has only {size} bytes, so it is truncated or belongs to "
            "another model; copy the file or export the model again"
        )


def _external_file(location: str, path: Path, where: str) -> tuple[Path, tuple[int, ...]]:
    """Return a file, which must lie in the folder of the model or of its link target, and its state (size, times)."""
    move = f"move the file into {path.parent}, and refer to it by a relative path in the model"
    if Path(location).is_absolute() or "\\" in location or ".." in Path(location).parts:
        raise InvalidModelError(f"{where} lie outside the model's folder ('{location}'); {move}")
    file = path.parent / location
    try:
        real = file.resolve()
        folders = {path.parent.resolve(), path.resolve().parent}
        if not any(real.is_relative_to(folder) for folder in folders):
            raise InvalidModelError(
                f"{where} lie outside the model's folder ('{location}' is a link to {real}); {move}"
            )
        if not real.is_file():
            state = "is not a regular file" if real.exists() else "is missing"
            raise InvalidModelError(f"{where} are in {location}, which {state}; put this file into {path.parent}")
        with real.open("rb") as opened:
            return file, stamp(opened.fileno())
    # for example a name with a null byte, a loop of links, no permission
    except (OSError, ValueError, RuntimeError) as error:
        raise InvalidModelError(f"{where} are in {location!r}, which cannot be read ({error})") from None

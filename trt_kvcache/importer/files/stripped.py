"""Writes and reads bug reports: files with a model without weights and names, small enough to send.

    report.zip
    ├── model.onnx      weights are references to missing files; names are numbers
    ├── config.json     numbers and booleans of the export's config, without any text
    └── report.json     the results of this package for the model

`unpacked` makes files of random numbers for the weights, at different offsets so that no two weights are equal.
"""

from __future__ import annotations

import json
import re
import tempfile
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from onnx import FunctionProto, ModelProto, TensorProto, helper

from trt_kvcache.errors import InvalidModelError, TrtKvCacheError
from trt_kvcache.files import atomic_file, read_object
from trt_kvcache.importer.cache_plan import PlanOptions
from trt_kvcache.importer.files.source import SourceModel
from trt_kvcache.importer.protos import byte_size, copied, dtype_name, iter_scopes, iter_tensors, sliced_squares
from trt_kvcache.model_paths import REPORT

_MODEL, _REPORT = REPORT
_CONFIG = "config.json"
_FEW = 16
"""Elements. Tensors of at most this size are settings, such as an epsilon, and no weights."""
_TABLE = 1 << 14
"""Elements. Float tables up to this size, such as rotary factors, may keep their contents."""
_CODES = 1 << 16
"""Elements. Larger int32 tensors may be quantized weights."""
_STEP, _FILLED, _LARGEST, _MEMBER = 64, 1 << 26, 1 << 36, 1 << 28
"""Bytes: offset between two weights, random numbers in a file, largest file, largest member of a report."""
_PLACE = re.compile(r"weights\.[a-z0-9]+")
_EXACT = (TensorProto.INT64, TensorProto.INT32, TensorProto.BOOL, TensorProto.STRING)
_TEXTS = ("model_type",)


def strip(source: SourceModel, *, keep_tables: bool = False) -> tuple[ModelProto, dict[str, str], int]:
    """Return a copy without weights and names, a map from old to new names, and how many float tables it keeps.

    Names of inputs, outputs, functions and custom operators stay. With `keep_tables`, small float tables and masks keep
    their contents, because the importer reads rotary factors and biases.
    """
    model = copied(source.proto)
    tables, count = sliced_squares(model.graph) if keep_tables else frozenset(), 0
    places: dict[str, int] = {}
    for tensor in iter_tensors(model):
        size = int(np.prod(tensor.dims, dtype=np.int64))
        external = tensor.data_location == TensorProto.EXTERNAL
        exact = tensor.data_type in _EXACT and not (tensor.data_type == TensorProto.INT32 and size > _CODES)
        if not external and (size <= _FEW or exact):
            continue
        if keep_tables and not external and (size <= _TABLE or tensor.name in tables):
            count += 1
            continue
        _empty(tensor, places)
    return model, _rename(model), count


def _empty(tensor: TensorProto, places: dict[str, int]) -> None:
    kind = dtype_name(tensor.data_type)
    place, length = places.get(kind, 0), byte_size(tensor) or 0
    places[kind] = place + _STEP
    new = TensorProto(name=tensor.name, data_type=tensor.data_type, dims=tensor.dims)
    new.data_location = TensorProto.EXTERNAL
    for key, value in {"location": f"weights.{kind}", "offset": place, "length": length}.items():
        new.external_data.add(key=key, value=str(value))
    tensor.CopyFrom(new)


def _rename(model: ModelProto) -> dict[str, str]:
    """Replace names of nodes and tensors with numbers, and drop texts. Return a map from old to new names."""
    graph = model.graph
    names: dict[str, str] = {value.name: value.name for value in (*graph.input, *graph.output)} | {"": ""}
    weights = {tensor.name for tensor in graph.initializer}

    def new(old: str) -> str:
        if old not in names:
            names[old] = f"{'w' if old in weights else 't'}{len(names)}"
        return names[old]

    count = 0
    model.doc_string = graph.doc_string = ""
    graph.name = "graph"
    del model.metadata_props[:], graph.metadata_props[:], graph.value_info[:], graph.quantization_annotation[:]
    for scope in iter_scopes(model):
        scope.doc_string = ""
        del scope.metadata_props[:], scope.value_info[:]
        if isinstance(scope, FunctionProto):
            scope.input[:], scope.output[:] = map(new, scope.input), map(new, scope.output)
        else:
            for value in (*scope.input, *scope.output):
                value.name, value.doc_string = new(value.name), ""
                del value.metadata_props[:]
            for tensor in (*scope.initializer, *(sparse.values for sparse in scope.sparse_initializer)):
                tensor.name, tensor.doc_string = new(tensor.name), ""
        for node in scope.node:
            count += 1
            names.setdefault(node.name, f"n{count}_{node.op_type}")  # an empty name is in `names` already
            node.name, node.doc_string = f"n{count}_{node.op_type}", ""
            node.input[:], node.output[:] = map(new, node.input), map(new, node.output)
            del node.metadata_props[:]
            for attribute in node.attribute:
                attribute.doc_string = ""
                if attribute.HasField("t"):
                    attribute.t.name = attribute.t.doc_string = ""
    return names


def pack(path: Path, model: ModelProto, folder: Path, report: Mapping[str, Any]) -> None:
    """Write a zip file with a model from `strip`, the numbers in `folder`'s config.json, and `report` as JSON."""
    try:
        config = _plain(read_object(folder / _CONFIG))
    except (OSError, ValueError):
        config = None
    with atomic_file(path) as file, zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(_MODEL, model.SerializeToString())
        if config is not None:
            archive.writestr(_CONFIG, json.dumps(config, indent=1))
        archive.writestr(_REPORT, json.dumps(report, indent=1))


def _plain(config: Mapping[str, Any]) -> dict[str, Any]:
    plain: dict[str, Any] = {}
    for name, value in config.items():
        if isinstance(value, dict):
            plain[name] = _plain(value)
        elif isinstance(value, (bool, int, float)) or name in _TEXTS:
            plain[name] = value
    return plain


def recorded_options(path: Path) -> PlanOptions:
    """Return the options with which a report's model was planned. Raises `InvalidModelError` for an unreadable file."""
    try:
        with zipfile.ZipFile(path) as archive:
            return msgspec.json.decode(_read(archive, _REPORT), type=_Recorded).options
    except (OSError, KeyError, ValueError, RecursionError, TrtKvCacheError, zipfile.BadZipFile) as error:
        raise InvalidModelError(f"{path}: not a readable report: {error}; write the report again") from None


def _read(archive: zipfile.ZipFile, member: str) -> bytes:
    if (size := archive.getinfo(member).file_size) > _MEMBER:
        raise ValueError(f"{member} has {size} bytes, but may have at most {_MEMBER}")
    return archive.read(member)


class _Recorded(msgspec.Struct):
    options: PlanOptions


@contextmanager
def unpacked(path: Path) -> Iterator[Path]:
    """Unpack a report, with random weights, into a temporary folder, and yield the path of its model."""
    with tempfile.TemporaryDirectory(prefix="trt-kvcache-report-") as name:
        folder = Path(name)
        try:
            with zipfile.ZipFile(path) as archive:
                for member in {_MODEL, _CONFIG} & set(archive.namelist()):  # no other members are unpacked
                    (folder / member).write_bytes(_read(archive, member))
            model = ModelProto.FromString((folder / _MODEL).read_bytes())
        except (OSError, zipfile.BadZipFile, ValueError) as error:
            raise InvalidModelError(f"{path}: not a readable report: {error}; write the report again") from None
        write_stand_ins(model, folder, path)
        yield folder / _MODEL


def write_stand_ins(model: ModelProto, folder: Path, path: Path) -> None:
    """Write files of random numbers as large as the weights of a stripped model."""
    sizes: dict[str, tuple[int, int]] = {}
    for tensor in iter_tensors(model):
        if tensor.data_location != TensorProto.EXTERNAL:
            continue
        entries = {entry.key: entry.value for entry in tensor.external_data}
        place, end = entries.get("location", ""), int(entries.get("offset", 0)) + int(entries.get("length", 0))
        if not _PLACE.fullmatch(place) or end > _LARGEST:
            raise InvalidModelError(f"{path}: not a report of trt-kvcache: its model refers to the file {place[:60]!r}")
        sizes[place] = (tensor.data_type, max(end, sizes.get(place, (0, 0))[1]))
    for place, (kind, size) in sizes.items():
        with open(folder / place, "wb") as file:
            file.write(_random(kind, min(size, _FILLED)))
            file.truncate(size)


def _random(kind: int, size: int) -> bytes:
    generator = np.random.default_rng(0)
    name = dtype_name(kind)
    if kind in _EXACT:
        return bytes(size)
    if name in ("float", "float16", "bfloat16", "double"):
        dtype = helper.tensor_dtype_to_np_dtype(kind)
        numbers = generator.standard_normal(size // dtype.itemsize + 1, np.float32) * np.float32(0.05)
        return numbers.astype(dtype).tobytes()[:size]
    if name.startswith("float8"):
        return generator.integers(0x28, 0x38, size, np.uint8).tobytes()  # no NaN
    return generator.integers(0, 256, size, np.uint8).tobytes()

"""Reads weights, and gives their bytes another name, element type and shape.

    uint8 [N, K / 2]    ->    uint4 [N, K]    or    int32 [N, K / 8]

Only references are copied, not the bytes of external data or of weights that `prepare.detach_weights` took out.

External data are read through links, which some libraries refuse; `load_source` has already checked the links. ONNX
Runtime (1.31.1) reads data files of a model in memory only from one folder, but links of the Hugging Face cache lead
out of it. ONNX's loader (1.23) refuses such links, and hard links, which deduplication, DVC and ``cp -al`` make.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from onnx import ModelProto, StringStringEntryProto, TensorProto, numpy_helper

from trt_kvcache.importer.protos import byte_size, copied, iter_tensors

STAND_IN = "trt_kvcache:detached"
_OF = "trt_kvcache:of"


def storage(tensor: TensorProto) -> str | None:
    """Return a text that identifies the stored data of a tensor; None if the tensor contains its data."""
    if tensor.data_location != TensorProto.EXTERNAL:
        return None
    entries = {e.key: e.value for e in tensor.external_data}
    if entries.get("location") == STAND_IN:
        return f"{STAND_IN} {entries.get(_OF, tensor.name)}"
    return f"{entries.get('location')} {entries.get('offset', 0)}"


def detached(tensor: TensorProto, weights: Mapping[str, TensorProto]) -> TensorProto | None:
    """Return the weight that a placeholder replaces, in the placeholder's type and shape; None for other tensors."""
    entries = {e.key: e.value for e in tensor.external_data}
    if entries.get("location") != STAND_IN:
        return None
    if _OF not in entries:
        return weights[tensor.name]
    return reinterpret(weights[entries[_OF]], tensor.name, tensor.data_type, tensor.dims)


def reinterpret(tensor: TensorProto, name: str, data_type: int, shape: Sequence[int]) -> TensorProto:
    """Return a tensor with the bytes of `tensor`, but another type and shape; `ValueError` if the sizes differ."""
    view = TensorProto(name=name, data_type=data_type, dims=shape)
    if byte_size(view) != byte_size(tensor):
        raise ValueError(f"{byte_size(tensor)} bytes cannot be {list(shape)} of type {data_type}")
    if tensor.data_location != TensorProto.EXTERNAL:
        view.raw_data = raw_bytes(tensor)
        return view
    view.data_location = TensorProto.EXTERNAL
    view.external_data.extend(tensor.external_data)
    keys = {e.key: e.value for e in tensor.external_data}
    if keys.get("location") == STAND_IN and _OF not in keys:
        view.external_data.add(key=_OF, value=tensor.name)
    return view


def raw_bytes(tensor: TensorProto) -> bytes:
    """Return an inline tensor's data as in ``raw_data``, even if it stores them in typed fields, such as float_data."""
    if tensor.HasField("raw_data"):
        return bytes(tensor.raw_data)
    return bytes(numpy_helper.from_array(numpy_helper.to_array(tensor)).raw_data)


def read_data(tensor: TensorProto, folder: Path) -> None:
    """Read external data into a tensor, in place. Raises `OSError`, or `ValueError` if the file became shorter."""
    if tensor.data_location != TensorProto.EXTERNAL:
        return
    entries = {entry.key: entry.value for entry in tensor.external_data}
    size = byte_size(tensor) or 0
    with (folder / entries["location"]).open("rb") as file:
        file.seek(int(entries.get("offset") or 0))
        tensor.raw_data = file.read(size)
    if len(tensor.raw_data) != size:
        raise ValueError(f"{folder / entries['location']}: became shorter since it was checked")
    tensor.ClearField("data_location")
    del tensor.external_data[:]


def held(tensor: TensorProto, folder: Path) -> TensorProto:
    """Return the tensor itself, or a copy that contains its external data. Errors: see `read_data`."""
    if tensor.data_location != TensorProto.EXTERNAL:
        return tensor
    copy = copied(tensor)
    read_data(copy, folder)
    return copy


def without_links(model: ModelProto, folder: Path) -> tuple[ModelProto, Path]:
    """Return a model and a folder that really contains all of its external data, even if `folder` has links to them."""
    files = {entry.value: (folder / entry.value).resolve() for entry in _locations(model)}
    if all(file.is_relative_to(folder.resolve()) for file in files.values()):
        return model, folder
    real = Path(os.path.commonpath([file.parent for file in files.values()]))
    copy = copied(model)
    for entry in _locations(copy):
        entry.value = files[entry.value].relative_to(real).as_posix()
    return copy, real


def _locations(model: ModelProto) -> Iterator[StringStringEntryProto]:
    for tensor in iter_tensors(model):
        if tensor.data_location == TensorProto.EXTERNAL:
            yield from (entry for entry in tensor.external_data if entry.key == "location")


def for_session(model: ModelProto, folder: Path, options: Any) -> bytes:
    """Serialize the model for a session of ONNX Runtime, and set the folder of its external data in `options`."""
    linked, folder = without_links(model, folder)
    options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(folder))
    return bytes(linked.SerializeToString())

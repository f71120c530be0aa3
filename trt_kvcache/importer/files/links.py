"""Reads external data through links, which some libraries refuse. `load_source` has already checked the links.

ONNX Runtime (1.31.1) reads data files of a model in memory only from one folder, but links of the Hugging Face cache
lead out of it. ONNX's loader (1.23) refuses such links, and hard links, which deduplication, DVC and ``cp -al`` make.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from onnx import ModelProto, StringStringEntryProto, TensorProto

from trt_kvcache.importer.protos import byte_size, copied, iter_tensors


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
    """Return a model whose external data have real paths, and a folder that contains all of them."""
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

"""External data behind symbolic links, as in the Hugging Face cache, for those who refuse links out of a folder.

`load_source` has checked where they lead. ONNX Runtime (1.31.1), with a model that is no file, and ONNX's own loader
(1.23) take data only from within the folder that they are told.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from onnx import ModelProto, StringStringEntryProto, TensorProto

from trt_kvcache.importer.protos import copied, iter_tensors

__all__ = ["for_session", "without_links"]


def without_links(model: ModelProto, folder: Path) -> tuple[ModelProto, Path]:
    """The same model, with its external data named as they really lie, and the folder of these.

    If no link leads out of the folder of the model, both are returned unchanged; else a copy of the model.
    """
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
    """The model as a session of ONNX Runtime takes it, whose `options` are told the folder of its external data."""
    linked, folder = without_links(model, folder)
    options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(folder))
    return bytes(linked.SerializeToString())

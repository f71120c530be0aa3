"""Writes a model repository for Triton: the folder of an engine or a model, a configuration, and ``model.py``."""

from __future__ import annotations

import re
import secrets
import shutil
from collections.abc import Mapping
from pathlib import Path

from trt_kvcache.engine.manifest import load_manifest
from trt_kvcache.errors import InvalidModelError, OptionError, OutputError
from trt_kvcache.importer.files.model_folder import find_model
from trt_kvcache.lora import open_lora
from trt_kvcache.model_paths import is_model

FOLDER, ADAPTERS = "model", "adapters"
"""Folders beside ``model.py``: a copy of the model's folder, and copies of adapters' folders, by name."""

_CONFIG = """name: "{name}"
backend: "python"
max_batch_size: 0  # the session puts the requests of all clients into one batch
model_transaction_policy {{ decoupled: true }}
input [
  {{ name: "text_input", data_type: TYPE_STRING, dims: [ 1 ], optional: true }},
  {{ name: "input_ids", data_type: TYPE_INT64, dims: [ -1 ], optional: true }},
  {{ name: "stream", data_type: TYPE_BOOL, dims: [ 1 ], optional: true }},
  {{ name: "sampling_parameters", data_type: TYPE_STRING, dims: [ 1 ], optional: true }}
]
output [
  {{ name: "text_output", data_type: TYPE_STRING, dims: [ 1 ] }},
  {{ name: "output_ids", data_type: TYPE_INT64, dims: [ -1 ] }},
  {{ name: "finish_reason", data_type: TYPE_STRING, dims: [ 1 ] }}
]
instance_group [ {{ count: 1, kind: {kind} }} ]
"""
_PARAMETER = 'parameters {{ key: "{}", value {{ string_value: "{}" }} }}\n'
_MODEL = '''"""The code of this model is in the package trt-kvcache."""

from trt_kvcache.serve.triton import TritonPythonModel

__all__ = ["TritonPythonModel"]
'''


def write_repository(
    model: Path, output: Path, name: str, parameters: Mapping[str, int], adapters: Mapping[str, Path] | None = None
) -> Path:
    """Write the folder ``output/name/`` of a model repository for Triton, completely or not at all; return its path.

    The model's folder and the folders of `adapters` are copied; requests choose an adapter by its name in `adapters`.
    `parameters` are any of `max_batch`, `capacity` and `max_queue` of the session and its serving core.

    Raises:
        OptionError: a name is not a legal folder name, or a folder holds no adapter.
        InvalidModelError, ManifestError: the model or engine does not exist.
        OutputError: the folder for the model already exists in the repository, or cannot be written.
    """
    adapters = adapters or {}
    for one in (name, *adapters):
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]*", one):
            raise OptionError(f"name is {one!r}; give letters, digits, and any of _ . - after the first")
    for folder in adapters.values():
        open_lora(folder)
    if not model.is_dir():
        raise InvalidModelError(f"{model}: not a folder; give the folder of an engine or a model, which is copied")
    on_cpu = is_model(model)
    if on_cpu:
        find_model(model)
    else:
        load_manifest(model)
    final = output / name
    if final.exists():
        raise OutputError(f"{final} exists; remove it, or give another name")
    if final.resolve().is_relative_to(model.resolve()):
        raise OutputError(f"{final} lies in {model}, which is copied; give another folder")
    config = _CONFIG.format(name=name, kind="KIND_CPU" if on_cpu else "KIND_GPU")
    config += "".join(_PARAMETER.format(*item) for item in parameters.items())
    temporary = output / f".{name}.{secrets.token_hex(4)}.tmp"
    try:
        (temporary / "1").mkdir(parents=True)
        (temporary / "config.pbtxt").write_text(config, encoding="utf-8")
        (temporary / "1" / "model.py").write_text(_MODEL, encoding="utf-8")
        shutil.copytree(model, temporary / "1" / FOLDER)
        for one, folder in adapters.items():
            shutil.copytree(folder, temporary / "1" / ADAPTERS / one)
        temporary.rename(final)
    except (OSError, shutil.Error) as error:
        why = error.args[0][0][2] if isinstance(error, shutil.Error) else error.strerror
        raise OutputError(f"{final} cannot be written: {why}") from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return final

"""Finds the file that an argument MODEL, ENGINE or CHECKPOINT of a command means.

A model's name on the hub becomes its folder in the local cache of huggingface_hub.
"""

from __future__ import annotations

import json
import os
import re
import shlex
from glob import escape
from pathlib import Path

from trt_kvcache.errors import InvalidModelError

ENGINE = "model.engine"
"""Name of the engine file in an engine's folder."""

REPORT = ("model.onnx", "report.json")
"""Members of every zip file that the command ``report`` writes."""

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_OWN = (".onnx", ".engine", ".json", ".gguf", ".plan")
_LFS = b"version https://git-lfs"
_LFS_BYTES = 1024
_OTHERS = {
    "rank*.engine": "TensorRT-LLM",
    "*.engine": "TensorRT",
    "*.plan": "TensorRT",
    "*.trt": "TensorRT",
    "openvino_*.xml": "OpenVINO",
    "model.bin": "CTranslate2",
}
"""Patterns of files that identify another tool's folder."""
_PYTORCH = (".bin", ".pt", ".pth", ".ckpt")


def engine_in(path: Path) -> Path:
    """Return the path of the engine in an engine's folder; any other path is returned unchanged."""
    engine = path / ENGINE
    return engine if engine.is_file() and not models_in(path) else path


def is_model(path: Path) -> bool:
    """Return True for an ``.onnx`` file, or for its folder. Every other path counts as an engine."""
    return path.suffix.lower() == ".onnx" or (path.is_dir() and engine_in(path) == path)


def is_checkpoint(path: Path) -> bool:
    """Return True for a GGUF file, and for a folder that has weights and a config, but no ONNX model."""
    if path.suffix.lower() == ".gguf":
        return path.is_file()
    if not (path / "config.json").is_file() or next(path.rglob("*.onnx"), None) is not None:
        return False
    return any(next(path.glob(pattern), None) is not None for pattern in ("*.safetensors", "pytorch_model*.bin"))


def is_report(path: Path) -> bool:
    """Return True for a zip file that the command ``report`` wrote."""
    import zipfile  # only the command ``plan`` needs it

    if not path.is_file() or not zipfile.is_zipfile(path):
        return False
    with zipfile.ZipFile(path) as archive:
        return {*REPORT} <= {*archive.namelist()}


def folder_of(path: Path) -> Path:
    """Return the folder of a model or an engine, which may be given by its file."""
    return path if path.is_dir() else path.parent


def models_in(folder: Path) -> list[Path]:
    """Return the ``.onnx`` files in a folder, sorted by name."""
    return sorted(folder.glob("*.onnx")) if folder.is_dir() else []


def model_named(path: Path) -> Path:
    """Return the file or folder for an argument MODEL; raise `InvalidModelError` if it is another thing."""
    path = _checked(path, to_run=True)
    engine = engine_in(path)
    if engine.suffix not in (".onnx", ".json") and Path(f"{engine}.json").is_file():
        raise InvalidModelError(
            f"{path}: an engine; give the model that it was built from; '{_command('inspect', path)}' shows the "
            "engine's plan"
        )
    return path


def runnable_named(path: Path) -> Path:
    """Return the file or folder for an argument ENGINE|MODEL; raise what `model_named` raises."""
    return _checked(path, to_run=True)


def checkpoint_named(path: Path) -> Path:
    """Return the file or folder for an argument CHECKPOINT; raise what `model_named` raises."""
    return _checked(path, to_run=False)


def engine_named(path: Path) -> Path:
    """Return the file or folder for an argument ENGINE; raise what `model_named` raises."""
    path = _checked(path, to_run=True)
    if path.is_dir() and engine_in(path) == path and models_in(path):
        raise InvalidModelError(
            f"{path}: the folder of a model, without an engine; build one: {_command('build', path, '-o', 'engine/')}"
        )
    return path


def _checked(typed: Path, *, to_run: bool) -> Path:
    path = _of_hub(typed)
    if not path.exists():
        return path  # commands report a missing file
    for kind in (_pointer, _weights, _adapter, _foreign, _below):
        if said := kind(path):
            raise InvalidModelError(f"{typed}: {said}")
    if to_run and is_checkpoint(path):
        name = path.absolute().stem if path.is_file() else typed.absolute().name
        raise InvalidModelError(
            f"{typed}: a checkpoint; export it first: {_command('export', typed, '-o', f'{name}-onnx/')}"
        )
    return path


def _of_hub(typed: Path) -> Path:
    """Return the local cache folder of a model's name on the hub, or raise an error; other paths are unchanged."""
    name = typed.as_posix()
    local = typed.exists() or typed.parent.exists() or typed.suffix.lower() in _OWN
    if local or not _HUB_NAME.fullmatch(name):
        return typed
    home = os.environ.get("HF_HOME") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface"
    cache = Path(os.environ.get("HF_HUB_CACHE") or Path(home) / "hub").expanduser()
    repository = cache / f"models--{name.replace('/', '--')}"
    try:
        commit = (repository / "refs" / "main").read_text(encoding="utf-8").strip()
    except OSError:
        commit = ""
    folder = repository / "snapshots" / commit
    if not commit or not folder.is_dir():
        raise InvalidModelError(
            f"{name}: no such file; if it is a model of the hub, it is not in the cache at {cache}: download it by "
            f"'hf download {name}', and give the name again"
        )
    return folder


def _pointer(path: Path) -> str | None:
    beside = path.iterdir() if path.is_dir() else path.parent.glob(f"{escape(path.name)}*")
    for file in sorted(beside):
        if file.is_file() and file.stat().st_size < _LFS_BYTES and file.read_bytes().startswith(_LFS):
            return (
                f"{file.name} is a pointer of Git LFS, and the file itself was not downloaded; run 'git lfs pull' in "
                "the folder"
            )
    return None


def _weights(path: Path) -> str | None:
    if path.is_dir() or path.suffix.lower() not in (".safetensors", *_PYTORCH):
        return None
    if (path.parent / "config.json").is_file():
        return f"weights without a graph; export their folder: {_command('export', path.parent, '-o', 'my-export/')}"
    return "weights without a graph, and no config.json beside them; give the folder of a checkpoint to 'export'"


def _adapter(path: Path) -> str | None:
    config = path / "adapter_config.json"
    if not config.is_file() or (path / "config.json").is_file():
        return None
    try:
        base = json.loads(config.read_text(encoding="utf-8")).get("base_model_name_or_path")
    except (OSError, ValueError, AttributeError, RecursionError):
        base = None
    return (
        f"an adapter (LoRA){f' of {base}' if isinstance(base, str) else ''}, and no model; give its model, and "
        "the adapter beside it, as in 'trt-kvcache generate MODEL --adapter FOLDER'"
    )


def _foreign(path: Path) -> str | None:
    if not path.is_dir() or _is_some_model(path):
        return None
    for pattern, tool in _OTHERS.items():
        files = sorted(path.glob(pattern))
        if files and not any(Path(f"{file}.json").is_file() for file in files):
            return (
                f"the folder of {tool} ({files[0].name}), whose files no other program reads; give the ONNX model or "
                "the checkpoint that it was made from"
            )
        if files:
            return f"a folder with engines; give one of them: {files[0]}"
    return None


def _below(path: Path) -> str | None:
    """Describe, for an error message, the models in the folders directly below `path`; None if there are none."""
    if not path.is_dir() or models_in(path) or (path / ENGINE).exists() or is_checkpoint(path):
        return None
    if inner := sorted((path / "onnx").glob("*.onnx")):
        first = next((file for file in inner if file.name == "model.onnx"), inner[0])
        return (
            f"its {len(inner)} models lie in {path / 'onnx'}; give one of them, such as {first}, and for texts "
            f"--tokenizer {path}"
            if len(inner) > 1
            else f"its model lies in the folder onnx; give {first}, and for texts --tokenizer {path}"
        )
    folders = [f for f in sorted(path.iterdir()) if f.is_dir() and f.name != "decoder" and _is_some_model(f)]
    if len(folders) > 1 and not (path / "decoder").is_dir():
        return f"a folder with {len(folders)} models in folders of their own; give one of them, such as {folders[0]}"
    return None


def _is_some_model(folder: Path) -> bool:
    return (folder / ENGINE).is_file() or bool(models_in(folder)) or is_checkpoint(folder)


def _command(*words: object) -> str:
    return shlex.join(["trt-kvcache", *map(str, words)])

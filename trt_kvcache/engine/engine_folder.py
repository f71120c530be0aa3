"""Prepares an engine's folder: ``model.engine``, tokenizer files, and settings of generation such as end tokens."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from trt_kvcache.arguments import as_path
from trt_kvcache.errors import OptionError, OutputError
from trt_kvcache.files import atomic_file, read_file, read_object
from trt_kvcache.model_paths import ENGINE, folder_of, models_in

TEXTS = (
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "generation_config.json",
    "config.json",  # for encoder-decoders: this file names the token that starts a text
)
"""Files beside a model that turn text into tokens and back."""
_LARGEST = 1 << 28  # bytes


def output_engine(output: str | os.PathLike[str]) -> tuple[Path, Path | None]:
    """Return the path of the engine to build, and `output` if it is a folder (existing, or with a slash at its end).

    Raises `OutputError` if `output` is not a path, or a folder with a model, or with tokenizer files but no engine.
    """
    path = as_path(output, "output", OutputError).expanduser()
    if not (os.fspath(output).endswith(("/", os.sep)) or path.is_dir()):
        return path, None
    if models := models_in(path):
        raise OutputError(
            f"{path}: this folder holds the model {models[0].name}; give another folder, or the name of a file"
        )
    others = [name for name in TEXTS if (path / name).exists()]
    if others and not (path / ENGINE).exists():
        raise OutputError(
            f"{path}: this folder holds {others[0]}, but not the engine that it belongs to; give another folder, or "
            "the name of a file"
        )
    return path / ENGINE, path


@contextmanager
def new_folders(folder: Path) -> Iterator[None]:
    """Make a folder and its parents. If the ``with`` block fails, remove the new folders that are empty.

    Raises `OutputError` if the folder cannot be made.
    """
    missing = [place for place in (folder, *folder.parents) if not place.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError(f"{folder}: this folder cannot be made: {error.strerror}") from None
    try:
        yield
    except BaseException:
        for place in missing:
            with suppress(OSError):  # the folder is not empty
                place.rmdir()
        raise


def copy_texts(model: Path, folder: Path, *, missing_too: bool = True) -> None:
    """Copy tokenizer, chat template and configs from the folder of a model to that of an engine.

    With `missing_too`, also remove each of these files from the engine's folder if the model's folder does not have it.
    Raises `OptionError` if a file cannot be read, and `OutputError` if it cannot be written.
    """
    for name in TEXTS:
        source = folder_of(model) / name
        if source.is_file():
            try:
                content = read_file(source, _LARGEST)
            except OSError as error:
                raise OptionError(f"{source} cannot be copied: {error.strerror}") from None
            with atomic_file(folder / name) as file:
                file.write(content)
        elif missing_too:
            (folder / name).unlink(missing_ok=True)


_OF_MODEL = (
    # The model was trained with these settings; they apply however tokens are chosen.
    "eos_token_id",
    "bad_words_ids",
    "suppress_tokens",
    "begin_suppress_tokens",
    "forced_bos_token_id",
    "forced_eos_token_id",
)
_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
_PARTS = ("text_config", "decoder")
"""Keys under which the ``config.json`` of a model with several parts has the decoder's settings."""


def settings_beside(model: Path) -> dict[str, Any]:
    """Return the settings in a model's folder, such as end tokens; raise `OptionError` if a file is unreadable."""
    return {name: value for settings in each_beside(model).values() for name, value in settings.items()}


def sampling_beside(model: Path) -> dict[str, Any]:
    """Return the sampling settings in a model's folder, without null values; raise `OptionError` if unreadable."""
    path = folder_of(model) / "generation_config.json"
    said = load_settings(path) if path.exists() else {}
    return {name: said[name] for name in _SAMPLING if said.get(name) is not None}


def each_beside(model: Path) -> dict[Path, dict[str, Any]]:
    """Return the settings in a model's folder, by file. Settings of later files override those of earlier files.

    As in transformers, ``config.json`` is used only if there is no ``generation_config.json``.
    """
    folder, settings = folder_of(model), dict[Path, dict[str, Any]]()
    if (path := folder / "config.json").exists() and not (folder / "generation_config.json").exists():
        config = load_settings(path)
        parts = [part for name in _PARTS if isinstance(part := config.get(name), dict)]
        settings[path] = {name: value for part in (*parts, config) for name, value in part.items() if value is not None}
    if (path := folder / "genai_config.json").exists():
        of_model = load_settings(path).get("model")
        settings[path] = of_model if isinstance(of_model, dict) else {}
    if (path := folder / "generation_config.json").exists():
        settings[path] = load_settings(path)
    return {
        path: {name: said[name] for name in _OF_MODEL if said.get(name) is not None} for path, said in settings.items()
    }


def load_settings(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file; raise `OptionError` if the file cannot be read, or holds no object."""
    try:
        return read_object(path)
    except OSError as error:
        raise OptionError(f"{path} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise OptionError(f"{path} {error}") from None

"""An engine's folder: ``model.engine``, its other files, and files that turn text into tokens and back."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from trt_kvcache.arguments import as_path
from trt_kvcache.errors import OptionError, OutputError
from trt_kvcache.files import atomic_file, read_file
from trt_kvcache.model_paths import ENGINE, models_in

TEXTS = (
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "generation_config.json",
    "config.json",  # for encoder-decoders: names the token that starts a text
)
"""Files beside a model that turn text into tokens and back."""
_LARGEST = 1 << 28  # bytes


def output_engine(output: str | os.PathLike[str]) -> tuple[Path, Path | None]:
    """Return the path of an engine to be built, and its folder if `output` is a folder, else None.

    Args:
        output: a file; or a folder, which exists or ends with a slash.

    Raises:
        OutputError: `output` is not a path; or a folder that holds a model, or files for texts without an engine, which
            would be replaced.
    """
    path = as_path(output, "output", OutputError).expanduser()
    if not (os.fspath(output).endswith(("/", os.sep)) or path.is_dir()):
        return path, None
    if models := models_in(path):
        raise OutputError(
            f"{path}: the folder of a model, {models[0].name}; give another folder, or the name of a file"
        )
    others = [name for name in TEXTS if (path / name).exists()]
    if others and not (path / ENGINE).exists():
        raise OutputError(
            f"{path}: this folder holds {others[0]}, and no engine that it belongs to; give another folder, or the "
            "name of a file"
        )
    return path / ENGINE, path


@contextmanager
def new_folders(folder: Path) -> Iterator[None]:
    """Make a folder and its parents. If the block fails, remove the new folders that are empty.

    Raises:
        OutputError: the folder cannot be made.
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
    """Copy the files for texts beside a model to an engine's folder: tokenizer, chat template, configs.

    Args:
        model: the model or its folder.
        folder: the engine's folder.
        missing_too: remove files of these names that the model does not have.

    Raises:
        OptionError: a file cannot be read.
        OutputError: a file cannot be written.
    """
    source = model if model.is_dir() else model.parent
    for name in TEXTS:
        if not (source / name).is_file():
            if missing_too:
                (folder / name).unlink(missing_ok=True)
            continue
        try:
            content = read_file(source / name, _LARGEST)
        except OSError as error:
            raise OptionError(f"{source / name} cannot be copied: {error.strerror}") from None
        with atomic_file(folder / name) as file:
            file.write(content)

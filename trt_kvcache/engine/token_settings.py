"""Settings of tokens in files beside a model: ``generation_config.json``, ``genai_config.json``, ``config.json``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from trt_kvcache.errors import OptionError
from trt_kvcache.files import read_object

_OF_MODEL = (
    # The model was trained with these; they hold however its tokens are chosen.
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
    """Return the settings of tokens in files beside a model, by the names of transformers' ``GenerationConfig``.

    Args:
        model: a file, or the folder of an export.

    Raises:
        OptionError: a file is unreadable.
    """
    return {name: value for settings in each_beside(model).values() for name, value in settings.items()}


def sampling_beside(model: Path) -> dict[str, Any]:
    """Return the recommended sampling from ``generation_config.json`` beside a model; null values are left out.

    Args:
        model: a file, or the folder of an export or engine.

    Raises:
        OptionError: the file is unreadable.
    """
    path = (model if model.is_dir() else model.parent) / "generation_config.json"
    said = load_settings(path) if path.exists() else {}
    return {name: said[name] for name in _SAMPLING if said.get(name) is not None}


def each_beside(model: Path) -> dict[Path, dict[str, Any]]:
    """Return the settings of tokens by file; later files override earlier ones.

    ``config.json`` counts as in transformers: only if there is no ``generation_config.json``.
    """
    folder = model if model.is_dir() else model.parent
    settings: dict[Path, dict[str, Any]] = {}
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
    """Read a JSON object.

    Raises:
        OptionError: the file cannot be read, or holds no object.
    """
    try:
        return read_object(path)
    except OSError as error:
        raise OptionError(f"{path} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise OptionError(f"{path} {error}") from None

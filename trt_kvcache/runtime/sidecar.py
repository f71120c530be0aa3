"""Files that exporters leave beside a model: the tokenizer, and settings such as end tokens."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from trt_kvcache.engine.token_settings import sampling_beside
from trt_kvcache.errors import OptionError
from trt_kvcache.runtime.generation.generation_config import GenerationConfig
from trt_kvcache.runtime.generation.settings import changed


class Unread:
    """Replaces a tokenizer that cannot be read.

    Args:
        why: the reason, for the error message of a text prompt.
    """

    def __init__(self, why: str) -> None:
        self.why = why


def find_tokenizer(model: Path) -> Any:
    """Return the tokenizer beside a model or engine, or in its folder; an `Unread` if there is no usable one."""
    file = (model if model.is_dir() else model.parent) / "tokenizer.json"
    if not file.is_file():
        return Unread(f"there is no {file}")
    from trt_kvcache.runtime.text.tokenizer import Tokenizer

    try:
        return Tokenizer.load(file)
    except OptionError as error:  # token ids work without it
        return Unread(error.message)


def default_config(model: Path, tokenizer: Any) -> GenerationConfig:
    """Return the default config of a session: greedy, with the end tokens that the model's files name.

    Args:
        model: path of the model or engine.
        tokenizer: names the end token if no file does; or None.

    Raises:
        OptionError: a file beside the model is unreadable, or has a value that is out of range.
        ManifestError: the manifest of the engine is unreadable.
    """
    config = GenerationConfig.for_model(model)
    return config if config.eos_token_ids else ended_by(config, tokenizer)


USUAL_SAMPLING = {"temperature": 0.8, "min_p": 0.05}
"""For models that recommend no sampling. At temperature 1 without a limit, unlikely tokens derail small models."""


def default_sampling(model: Path) -> dict[str, Any]:
    """Return the sampling of servers and chats: from ``generation_config.json`` beside the model, or `USUAL_SAMPLING`.

    Raises:
        OptionError: the file is unreadable, or has a value that is out of range.
    """
    said = sampling_beside(model)
    try:
        changed(GenerationConfig(), said)
    except OptionError as error:
        folder = model if model.is_dir() else model.parent
        raise OptionError(f"{folder / 'generation_config.json'}: {error.message}") from None
    return said or dict(USUAL_SAMPLING)


def ended_by(config: GenerationConfig, tokenizer: Any) -> GenerationConfig:
    """Return the config with the end token that a tokenizer names, if it names one."""
    end = getattr(tokenizer, "eos_token_id", None)
    return replace(config, eos_token_id=end) if isinstance(end, int) else config

"""Files that exporters leave beside a model: the tokenizer, the tokens that end a text."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from trt_kvcache.engine.generation import sampling_beside
from trt_kvcache.errors import OptionError
from trt_kvcache.runtime.generation.config import GenerationConfig
from trt_kvcache.runtime.generation.settings import changed

__all__ = ["USUAL_SAMPLING", "Unread", "default_config", "default_sampling", "ended_by", "find_tokenizer"]


class Unread:
    """In the place of a tokenizer that is not there.

    Args:
        why: the reason, for the error of a text.
    """

    def __init__(self, why: str) -> None:
        self.why = why


def find_tokenizer(model: Path) -> Any:
    """Return the tokenizer beside a model or engine, or in its folder; an `Unread` where there is none to be used."""
    file = (model if model.is_dir() else model.parent) / "tokenizer.json"
    if not file.is_file():
        return Unread(f"there is no {file}")
    from trt_kvcache.runtime.text.tokenizer import Tokenizer

    try:
        return Tokenizer.load(file)
    except OptionError as error:  # token ids do without
        return Unread(error.message)


def default_config(model: Path, tokenizer: Any) -> GenerationConfig:
    """Return how a session generates where it is told nothing: greedy, with the tokens that the model's files name.

    Args:
        model: path of the model or engine.
        tokenizer: names the token that ends a text where no other file does; or None.

    Raises:
        OptionError: a file beside the model is unreadable, or has a value that is out of range.
        ManifestError: that of an engine is unreadable.
    """
    config = GenerationConfig.for_model(model)
    return config if config.eos_token_ids else ended_by(config, tokenizer)


USUAL_SAMPLING = {"temperature": 0.8, "min_p": 0.05}
"""For models that say nothing. At temperature 1 without a limit, unlikely tokens derail small models."""


def default_sampling(model: Path) -> dict[str, Any]:
    """Return how servers and chats draw tokens: as ``generation_config.json`` beside the model says, else as usual.

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
    """Return the settings with the token that a tokenizer names as the end of a text, if it names one."""
    end = getattr(tokenizer, "eos_token_id", None)
    return replace(config, eos_token_id=end) if isinstance(end, int) else config

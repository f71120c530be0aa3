"""Files that exporters leave beside a model: the tokenizer, the tokens that end a text, the longest text."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from trt_kvcache.errors import OptionError
from trt_kvcache.files import read_object
from trt_kvcache.runtime.generation.config import GenerationConfig

__all__ = ["Unread", "default_config", "ended_by", "find_tokenizer", "usual_capacity"]

_USUAL = 4096
"""Tokens: capacity of caches that grow, where nobody gives one and the model takes more."""
_LENGTHS = ("max_position_embeddings", "n_positions", "max_target_positions", "max_sequence_length", "context_length")


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


def ended_by(config: GenerationConfig, tokenizer: Any) -> GenerationConfig:
    """Return the settings with the token that a tokenizer names as the end of a text, if it names one."""
    end = getattr(tokenizer, "eos_token_id", None)
    return replace(config, eos_token_id=end) if isinstance(end, int) else config


def usual_capacity(model: Path) -> int:
    """Return the capacity of caches that grow, where nobody gives one: as long as the model's texts, at most 4096.

    Args:
        model: path of the model; the longest text is read from ``config.json`` or ``genai_config.json`` beside it.
    """
    folder = model if model.is_dir() else model.parent
    found = [_USUAL]
    for name, part in (("config.json", "text_config"), ("genai_config.json", "model")):
        try:
            config = read_object(folder / name)
        except (OSError, ValueError):
            continue
        inner = config.get(part)
        for settings in (config, inner if isinstance(inner, dict) else {}):
            found += [value for key in _LENGTHS if type(value := settings.get(key)) is int and value > 0]
    return min(found)

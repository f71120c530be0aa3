"""Finds the default capacity (rows) of caches whose length the model leaves open. All commands use this default."""

from __future__ import annotations

from itertools import product
from pathlib import Path

from trt_kvcache.files import read_object

USUAL = 4096
"""The largest default capacity in tokens; a shorter longest text of the model lowers it."""
_LENGTHS = ("max_position_embeddings", "n_positions", "max_target_positions", "max_sequence_length", "context_length")


def usual_capacity(folder: Path) -> int:
    """Return the default capacity: the longest text of the model in this folder, in tokens, but at most 4096."""
    longest = longest_text(folder)
    return USUAL if longest is None else min(longest[0], USUAL)


def longest_text(folder: Path) -> tuple[int, str] | None:
    """Return how many tokens a text may have by the config files of `folder`, and which setting says so; else None.

    The folder above is also searched if `folder` is named ``decoder`` (mobius-onnx).
    """
    texts: list[tuple[int, str]] = []
    folders = (folder, folder.parent) if folder.name == "decoder" else (folder,)
    files = (("config.json", "text_config"), ("genai_config.json", "model"))
    for place, (name, part) in product(folders, files):
        try:
            config = read_object(place / name)
        except (OSError, ValueError):
            continue
        inner = config.get(part)
        for settings in (config, inner if isinstance(inner, dict) else {}):
            lengths = ((settings.get(key), key) for key in _LENGTHS)
            texts += [(value, f"{key} in {name}") for value, key in lengths if type(value) is int and value > 0]
    return min(texts, default=None)

"""Finds the folders that ship beside the code: ``configs`` and ``plugins``."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

_PACKAGE = Path(__file__).resolve().parent


def resource_dir(name: Literal["configs", "plugins"]) -> Path:
    """Return the path of the shipped folder ``configs`` or ``plugins``; raise `FileNotFoundError` if it is missing."""
    for folder in (_PACKAGE / name, _PACKAGE.parent / name):
        if folder.is_dir():
            return folder.resolve()
    raise FileNotFoundError(f"{_PACKAGE / name}: missing from this installation; reinstall trt-kvcache")

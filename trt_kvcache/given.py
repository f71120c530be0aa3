"""What callers give to public functions: how messages show it, and checks that several functions share."""

from __future__ import annotations

import os
from pathlib import Path

from trt_kvcache.errors import OptionError

__all__ = ["given_path", "shown"]

_LONGEST = 200


def shown(value: object) -> str:
    """The ``repr`` of a value for one line of a message, shortened in its middle where it is long."""
    try:
        text = " ".join(repr(value).split())
    except Exception:  # noqa: BLE001 - of anybody's class; and of an int with more digits than Python writes
        text = f"a {type(value).__name__} that cannot be written"
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST // 2]} ... {text[-_LONGEST // 4 :]}"


def given_path(value: object, what: str) -> Path:
    """The path that a caller gave.

    Args:
        value: of the caller.
        what: to call it.

    Raises:
        OptionError: it is no path, or one that no file can have.
    """
    path = value.__fspath__() if isinstance(value, os.PathLike) else value
    if not isinstance(path, str) or not path or "\0" in path:
        raise OptionError(f"{what} is {shown(value)}; give the path of a file, as text or a Path")
    return Path(path)

"""Values that callers give to public functions: their form in messages, and checks that several functions share."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from numbers import Integral, Real
from pathlib import Path
from typing import Any, TypeGuard, TypeVar

from trt_kvcache.errors import OptionError, TrtKvCacheError

__all__ = [
    "as_list",
    "as_options",
    "as_path",
    "as_switch",
    "as_whole",
    "is_number",
    "is_whole",
    "shown",
]

_LONGEST = 200
_Options = TypeVar("_Options")
_MOST_WHOLE = 1 << 256


def shown(value: object) -> str:
    """The ``repr`` of a value for one line of a message, shortened in its middle where it is long."""
    try:
        text = " ".join(repr(value).split())
    except ValueError:  # an int of more digits than Python writes
        text = f"a {type(value).__name__} that cannot be written"
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST // 2]} ... {text[-_LONGEST // 4 :]}"


def is_whole(value: object) -> TypeGuard[int]:
    """True for a whole number, of Python's or NumPy's, that can be meant: up to a seed of 256 bits."""
    if type(value) is not int and (isinstance(value, bool) or not isinstance(value, Integral)):  # the latter takes 1 us
        return False
    return abs(int(value)) < _MOST_WHOLE


def is_number(value: object) -> TypeGuard[float]:
    """True if a float64 can hold it, be it NaN or infinite."""
    if isinstance(value, bool) or not isinstance(value, Real):
        return False
    try:
        float(value)
    except OverflowError:
        return False
    return True


def as_whole(value: object, what: str, unit: str = "", error: type[TrtKvCacheError] = OptionError) -> int:
    """A whole number that a caller gave, as Python's own: NumPy's of 8 bits overflow, and JSON has none of them.

    Raises:
        OptionError: it is none; or `error`.
    """
    if not is_whole(value):
        raise error(f"{what} is {shown(value)}; it must be a whole number{unit}")
    return int(value)


def as_switch(value: object, what: str) -> bool:
    """A switch that a caller gave: of other values, such as ``"off"``, most would count as on.

    Raises:
        OptionError: it is neither True nor False.
    """
    if not isinstance(value, bool):
        raise OptionError(f"{what} is {shown(value)}; it must be True or False")
    return value


def as_path(value: object, what: str, error: type[TrtKvCacheError] = OptionError) -> Path:
    """The path that a caller gave.

    Raises:
        OptionError: it is no path, or one that no file can have; or `error`.
    """
    path = value.__fspath__() if isinstance(value, os.PathLike) else value
    try:
        if isinstance(path, str) and path and b"\0" not in os.fsencode(path):
            return Path(path)
    except UnicodeEncodeError:
        pass
    raise error(f"{what} is {shown(value)}; give the path of a file, as text or a Path")


def as_list(value: object, what: str, entries: str, error: type[TrtKvCacheError] = OptionError) -> list[Any]:
    """The list that a caller gave, in any form; text and mappings are none.

    Raises:
        OptionError: it is none; or `error`.
    """
    try:
        if isinstance(value, Iterable) and not isinstance(value, (str, bytes, Mapping)):
            return list(value)
    except TypeError:  # NumPy's arrays without axes
        pass
    raise error(f"{what} is {shown(value)}; give a list of {entries}")


def as_options(value: object, kind: type[_Options], what: str) -> _Options:
    """The options that a caller gave.

    Raises:
        OptionError: they are of another kind.
    """
    if not isinstance(value, kind):
        raise OptionError(f"{what} is {shown(value)}; give {kind.__name__}(...)")
    return value

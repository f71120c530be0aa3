"""Checks the values that callers give to public functions, and shows values in messages."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from numbers import Integral, Real
from pathlib import Path
from typing import Any, TypeGuard, TypeVar

from trt_kvcache.errors import OptionError, TrtKvCacheError

_LONGEST = 200
_Options = TypeVar("_Options")
_MOST_WHOLE = 1 << 256


def shown(value: object) -> str:
    """Return the ``repr`` of a value for one line of a message; a long one is shortened in the middle."""
    try:
        text = " ".join(repr(value).split())
    except ValueError:  # an int with more digits than Python writes
        text = f"a {type(value).__name__} that cannot be written"
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST // 2]} ... {text[-_LONGEST // 4 :]}"


def is_whole(value: object) -> TypeGuard[int]:
    """Return True for a Python or NumPy integer of at most 256 bits."""
    if type(value) is not int and (isinstance(value, bool) or not isinstance(value, Integral)):  # the latter takes 1 us
        return False
    return abs(int(value)) < _MOST_WHOLE


def is_number(value: object) -> TypeGuard[float]:
    """Return True for a number that fits into a float64, NaN and infinity included."""
    if isinstance(value, bool) or not isinstance(value, Real):
        return False
    try:
        float(value)
    except OverflowError:
        return False
    return True


def as_whole(value: object, what: str, unit: str = "", error: type[TrtKvCacheError] = OptionError) -> int:
    """Return a whole number as Python's int, because NumPy's integers overflow; raise `error` for other values."""
    if not is_whole(value):
        raise error(f"{what} is {shown(value)}; it must be a whole number{unit}")
    return int(value)


def as_switch(value: object, what: str) -> bool:
    """Return a bool; raise `OptionError` for other values, because ``"off"`` would count as True."""
    if not isinstance(value, bool):
        raise OptionError(f"{what} is {shown(value)}; it must be True or False")
    return value


def as_path(value: object, what: str, error: type[TrtKvCacheError] = OptionError) -> Path:
    """Return a Path. Raise `error` if the value is not a path, is empty, or has a character that no path can have."""
    path = value.__fspath__() if isinstance(value, os.PathLike) else value
    try:
        if isinstance(path, str) and path and b"\0" not in os.fsencode(path):
            return Path(path)
    except UnicodeEncodeError:
        pass
    raise error(f"{what} is {shown(value)}; give the path of a file, as text or a Path")


def as_list(value: object, what: str, entries: str, error: type[TrtKvCacheError] = OptionError) -> list[Any]:
    """Convert an iterable to a list. Raise `error` if the value is a text, a mapping, or not iterable."""
    try:
        if isinstance(value, Iterable) and not isinstance(value, (str, bytes, Mapping)):
            return list(value)
    except TypeError:  # NumPy's arrays without axes
        pass
    raise error(f"{what} is {shown(value)}; give a list of {entries}")


def as_options(value: object, kind: type[_Options], what: str) -> _Options:
    """Return `value` if it is an object of `kind`, a dataclass of options; else raise `OptionError`."""
    if not isinstance(value, kind):
        raise OptionError(f"{what} is {shown(value)}; give {kind.__name__}(...)")
    return value

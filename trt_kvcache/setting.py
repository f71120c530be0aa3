"""Lets a dataclass of options define each option once: its text, limits and flag, for checks, commands and docs."""

from __future__ import annotations

import inspect
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from enum import Enum
from functools import cache
from types import NoneType, UnionType
from typing import Any, TypeVar, Union, get_args, get_origin

from trt_kvcache.arguments import as_list, as_path, as_switch, as_whole, is_number, shown
from trt_kvcache.errors import OptionError
from trt_kvcache.messages import as_arguments

_Class = TypeVar("_Class", bound=type)
_MANY = 10_000
"""Messages leave out upper limits from here on, which follow only from the type of the number."""


@dataclass(frozen=True)
class Setting:
    """Metadata in the ``Annotated`` type of an options field: its text, its limits and its flag.

    Attributes:
        help: text about the setting, in a command's help and at the beginning of the API reference's text.
        more: the rest of the API reference's text.
        metavar: name of the value in the help of a command.
        least: smallest number.
        most: largest number.
        unit: what a whole number counts, such as ``"tokens"``.
        choices: legal texts; ``("on", "off")`` for a switch whose flag takes a value. An enum needs none.
        flag: flag without dashes, if it differs from the field's name; with a slash: the flags for True and False.
        short: letter of the flag's short name.
        group: title of the flags in the help of a command.
        is_path: True if the text is the path of a file or folder.
        read: function that converts the flag's text to a value. Callers in Python may give the text, too.
        flag_type: type of the flag, if it differs from the field's, such as ``list[int]`` for a repeatable flag.
        has_flag: True if commands have a flag for this setting.
    """

    help: str = ""
    more: str = ""
    metavar: str | None = None
    least: float | None = None
    most: float | None = None
    unit: str = ""
    choices: Sequence[str] = ()
    flag: str = ""
    short: str = ""
    group: str = ""
    is_path: bool = False
    read: Callable[[str], Any] | None = None
    flag_type: Any = None
    has_flag: bool = True


@cache
def settings_of(options: type) -> dict[str, tuple[Any, bool, Setting]]:
    """Return (type, True if None is allowed, setting) of each field with a setting. A union becomes type `object`."""
    settings = {}
    for field in fields(options):
        if str(field.type).startswith("Annotated["):
            kind, setting = get_args(eval(str(field.type), vars(sys.modules[options.__module__])))
            parts = get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)
            kinds = [part for part in parts if part is not NoneType]
            settings[field.name] = (kinds[0] if len(kinds) == 1 else object, NoneType in parts, setting)
    return settings


def described(options: _Class) -> _Class:
    """Add the texts of a dataclass's settings to its docstring, as the section Attributes; return the class."""
    lines = [
        f"    {name}: {as_arguments(f'{setting.help} {setting.more}'.strip())}"
        for name, (_, _, setting) in settings_of(options).items()
    ]
    text, raises, errors = inspect.cleandoc(options.__doc__ or "").partition("Raises:")
    head, _, own = text.partition("Attributes:\n")
    options.__doc__ = "\n".join([head.rstrip(), "", "Attributes:", *lines, own.rstrip(), "", raises + errors])
    return options


def check_settings(options: Any) -> None:
    """Check a dataclass of options, and convert its values to their types; raise `OptionError` for an illegal value."""
    for name, (kind, optional, setting) in settings_of(options.__class__).items():
        value = getattr(options, name)
        if value is None and optional:
            continue
        if setting.read is not None and isinstance(value, str):
            value = setting.read(value)
        object.__setattr__(options, name, _checked(name, kind, setting, value))


def _checked(name: str, kind: Any, setting: Setting, value: Any) -> Any:
    if isinstance(kind, type) and issubclass(kind, Enum):
        try:
            return kind(value)
        except (ValueError, TypeError):
            raise OptionError(f"{name} is {shown(value)}; {_one_of([member.value for member in kind])}") from None
    if kind is bool:
        is_text = isinstance(value, str) and value in setting.choices
        return value == "on" if is_text else as_switch(value, name)
    if setting.choices and (not isinstance(value, str) or value not in setting.choices):
        raise OptionError(f"{name} is {shown(value)}; {_one_of(setting.choices)}")
    if setting.is_path:
        return str(as_path(value, name))
    if get_origin(kind) is tuple:
        return tuple(as_list(value, name, setting.unit))
    if kind is str and not isinstance(value, str):
        raise OptionError(f"{name} is {shown(value)}; it must be a text")
    return _number(name, kind, setting, value) if kind in (int, float) else value


def _number(name: str, kind: Any, setting: Setting, value: Any) -> Any:
    least, most = setting.least, setting.most
    if kind is int:
        value = as_whole(value, name, setting.unit and f" of {setting.unit}")
    elif not is_number(value) or not math.isfinite(value):
        raise OptionError(f"{name} is {shown(value)}; it must be a finite number")
    if (most is not None and value > most) or (least is not None and value < least):
        one = f"at most {most}" if most is not None and value > most else f"at least {least}"
        raise OptionError(f"{name} is {value}; it must be {one if (most or _MANY) >= _MANY else f'{least} to {most}'}")
    return kind(value)


def _one_of(choices: Sequence[str]) -> str:
    return f"it must be one of {', '.join(choices)}"

"""Makes flags of commands from fields of dataclasses such as `PlanOptions`, so that each flag is defined only once."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, TypeVar, cast, get_type_hints

import typer

from trt_kvcache.errors import TrtKvCacheError
from trt_kvcache.messages import as_flags
from trt_kvcache.setting import Setting, settings_of

_Flags = TypeVar("_Flags", bound="type[Flags]")
_MANY = 1_000  # the help does not show limits from here on


@dataclass(frozen=True)
class Flags:
    """Base of the dataclasses whose fields are flags of a command."""

    switches: ClassVar[tuple[str, ...]] = ()
    """Names of flags whose value is ``on`` or ``off``."""

    if TYPE_CHECKING:  # fields that a decorator adds

        def __init__(self, **values: Any) -> None: ...

        def __getattr__(self, name: str) -> Any: ...

    def values(self, *leave: str) -> dict[str, Any]:
        """Map field names to values, without empty values and fields in `leave`. Enums become str, switches bool."""
        return {
            name: value == "on" if name in self.switches else getattr(value, "value", value)
            for name, value in vars(self).items()
            if value not in (None, []) and name not in leave
        }


def flags_of(
    options: type, *names: str, leave: Sequence[str] = (), unset: Sequence[str] | None = (), group: str | None = None
) -> Callable[[_Flags], _Flags]:
    """Return a class decorator that adds a flag for each setting of a dataclass of options, such as `PlanOptions`.

    Args:
        options: the dataclass of options, see `Setting`.
        names: names of the settings; empty: all settings that have a flag.
        leave: names of settings to leave out.
        unset: names of settings whose flags are None unless the user gives them. None: all settings.
        group: title of these flags in the help of a command. None: the group of each setting.
    """

    def decorate(kind: _Flags) -> _Flags:
        known = {field.name for field in fields(kind)}
        annotations = inspect.get_annotations(kind)
        added = {}
        for field in fields(options):
            name = field.name
            value, _, setting = settings_of(options).get(name, (None, False, None))
            if setting is None or not setting.has_flag or name in {*leave, *known} or name not in (names or [name]):
                continue
            default = None if unset is None or name in unset else _as_text(field.default, setting)
            if value is bool and setting.choices:
                kind.switches = (*kind.switches, name)
            added[name] = Annotated[_flag_type(value, setting), _option(name, value, default, setting, group)]
            setattr(kind, name, default)
        kind.__annotations__ = {**added, **annotations}
        return cast("_Flags", dataclass(frozen=True)(kind))

    return decorate


def _as_text(default: Any, setting: Setting) -> Any:
    """Return a setting's default as its flag takes it: a tuple as one text, a switch as ``on`` or ``off``."""
    if isinstance(default, bool) and setting.choices:
        return "on" if default else "off"
    if isinstance(default, tuple):
        return ",".join(map(str, default)) or None
    return None if default is MISSING else default


def _flag_type(kind: Any, setting: Setting) -> Any:
    if setting.choices:
        return Literal[tuple(setting.choices)]
    if setting.is_path and "|" not in str(setting.metavar):
        return Path
    plain = setting.read is None and isinstance(kind, type) and issubclass(kind, (int, float, Enum))
    return setting.flag_type or (kind if plain else str)


def _option(name: str, kind: Any, default: Any, setting: Setting, group: str | None) -> Any:
    words = "/".join(f"--{word}" for word in (setting.flag or name.replace("_", "-")).split("/"))
    if kind is bool and default and not setting.choices:
        words += f"/--no-{words[2:]}"
    short = (f"-{setting.short}",) if setting.short else ()
    limits: dict[str, Any] = {"min": setting.least, "max": setting.most if (setting.most or _MANY) < _MANY else None}
    return typer.Option(
        words,
        *short,
        metavar=setting.metavar,
        help=setting.help,
        rich_help_panel=group or setting.group or None,
        readable=False,
        **(limits if (kind in (int, float) and setting.read is None) or setting.flag_type == list[int] else {}),
    )


def with_flags(command: Callable[..., None]) -> Callable[..., None]:
    """Return a command in which each field of its dataclass parameters is a flag."""
    parameters: list[inspect.Parameter] = []
    groups: dict[str, Any] = {}
    for parameter in inspect.signature(command, eval_str=True).parameters.values():
        kind = parameter.annotation
        if is_dataclass(kind):
            groups[parameter.name] = kind
            hints = get_type_hints(kind, include_extras=True)
            parameters += [
                inspect.Parameter(f.name, parameter.KEYWORD_ONLY, default=f.default, annotation=hints[f.name])
                for f in fields(kind)
            ]
        else:
            parameters.append(parameter.replace(kind=parameter.KEYWORD_ONLY))

    parameters.append(inspect.Parameter("context", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context))

    def run(context: typer.Context, **values: Any) -> None:
        try:
            args = {name: kind(**{f.name: values.pop(f.name) for f in fields(kind)}) for name, kind in groups.items()}
            command(**values, **args)
        except TrtKvCacheError as error:
            error.args = (as_flags(error.message, _flags_of(context)),)
            raise

    run.__name__, run.__doc__ = command.__name__, command.__doc__
    run.__annotations__ = {p.name: p.annotation for p in parameters}
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return run


def _flags_of(context: typer.Context) -> dict[str, tuple[str, str | None]]:
    """Return, for each parameter of a command, its long flag and its negative flag (None if the flag takes a value)."""
    flags: dict[str, tuple[str, str | None]] = {}
    for option in context.command.params:
        if option.param_type_name == "option":
            no = max(option.secondary_opts, key=len, default="")
            flags[str(option.name)] = (max(option.opts, key=len), no if getattr(option, "is_flag", False) else None)
    return flags

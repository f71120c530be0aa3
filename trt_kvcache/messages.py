"""Converts options in messages from flags to Python arguments and back; shows sizes and control characters as text.

Messages are written with flags, such as ``--capacity 256``, because no other text looks like a flag.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff]")
"""Control characters, line breaks, and marks that change the direction of text."""

FLAGS = (
    "allow-origin", "backend", "bandwidth", "beyond-length", "cache-dtype", "cache-layout", "capacity", "check",
    "check-memory", "check-seconds", "checkpoint", "chunks", "compute-capabilities", "config", "constants",
    "declare-aliases", "draft", "dtype", "embeddings", "encoder", "exporter", "fallback", "inputs", "int4", "logits",
    "lora-rank", "lora-slots", "lora-targets", "max-batch", "max-chunk", "max-encoder", "max-logits", "maxShapes",
    "memory-check", "minShapes", "opt-batch", "opt-level", "optShapes", "proof", "refit", "rewritten", "sliding",
    "strip-plan", "target", "timing-cache", "tokenizer", "version-compatible", "window-chunk", "workers",
    "workspace",
)  # fmt: skip
"""Flags in messages of the library, without their dashes. A test compares them with the messages."""

_LISTS = ("compute-capabilities",)
_WORDS = (
    "all|always|any|auto|circular|contract|current|first|fp8|functional|identical|int4|int8|last|linear"
    "|none|off|on|own|preserve|sm[0-9]+[a-z]?(?:,sm[0-9]+[a-z]?)*|tensorrt|tensorrt-rtx"
)
_COMMAND = r"'(?:trt-kvcache |build |check |generate |plan |rewrite |verify )[^']*'"
_USE = re.compile(" (is|are|above) ")
_FLAG = re.compile(
    rf"{_COMMAND}|--(?P<no>no-)?(?P<flag>{'|'.join(sorted(FLAGS, key=len, reverse=True))})(?![\w-])"
    rf"(?:[ =](?P<value>(?:-?[0-9][\w.]*|[A-Z]+|{_WORDS})(?![\w-]))|\b)"
)


def as_arguments(message: str) -> str:
    """Replace flags in a message by Python arguments, such as ``capacity=256``, but not in quoted commands."""

    def argument(match: re.Match[str]) -> str:
        flag, value = match["flag"], match["value"]
        if flag is None:
            return match[0]
        name = re.sub("[A-Z]", lambda capital: f"_{capital[0].lower()}", flag.replace("-", "_"))
        if match["no"]:
            return f"{name}=False"
        if value is None:
            return name
        plain = value[0].isupper() or value.lstrip("-")[0].isdigit()
        text = value if plain else ", ".join(f'"{part}"' for part in value.split(","))
        return f"{name}=[{text}]" if flag in _LISTS else f"{name}={text}"

    return _FLAG.sub(argument, message)


def as_flags(message: str, flags: Mapping[str, tuple[str, str | None]]) -> str:
    """Return a message with flags for arguments: ``max_batch is 0`` becomes ``--max-batch is 0``.

    Names count as arguments only before ``is``, ``are``, ``above`` or ``=``. Messages about a file, ``FILE.json: ...``,
    are not changed. `flags` maps an argument to its flag ("" if there is none) and to the flag that turns it off, such
    as ``--no-x`` (None if the flag takes a value).
    """
    if re.match(r"\S*\.json: ", message) or not flags:
        return message
    names = "|".join(sorted(map(re.escape, flags), key=len, reverse=True))

    def flag(match: re.Match[str]) -> str:
        name, value = match["name"], match["value"]
        if value is None:
            return flags[name][0] if _USE.match(message, match.end()) else match[0]
        if value in ("True", "False") and flags[name][1] is not None:
            return flags[name][value == "False"] or match[0]
        return f"{flags[name][0]} {value.strip('[]').strip(chr(34))}"

    return re.sub(rf"(?<![\w/.'\"-])(?P<name>{names})(?![\w/.'\"-])(?:=(?P<value>[^\s,;:()]+))?", flag, message)


def shape_text(shape: Iterable[int | str]) -> str:
    """Return a shape as text, such as ``[batch, 8, 256, 64]``."""
    return f"[{', '.join(map(str, shape))}]"


def human_bytes(count: int) -> str:
    """Return ``count`` bytes as text in the largest binary unit that leaves at least 1: ``"1.5 GiB"``."""
    size = float(count)
    units = ["B", "KiB", "MiB", "GiB", "TiB"]
    while size >= 1024 and len(units) > 1:
        size /= 1024
        del units[0]
    return f"{count} B" if units[0] == "B" else f"{size:.1f} {units[0]}"


def visible(text: str, allowed: str = "") -> str:
    """Return a text with Python's escapes for control characters, except those in `allowed`."""
    return CONTROL.sub(lambda match: match[0] if match[0] in allowed else ascii(match[0])[1:-1], text)

"""Finds the reason of a failure, and warnings, in the output of an exporter."""

from __future__ import annotations

import re

__all__ = ["failure_reason", "warnings_in"]

_CAUSE = "The above exception was the direct cause of the following exception:"
_OTHER = "During handling of the above exception, another exception occurred:"
_TRACE = "Traceback (most recent call last):"
_ERROR = re.compile(r"(?:[\w.]+\.)?(?P<name>[A-Za-z_]\w*)(?:: (?P<text>.*))?")
_COLOR = re.compile(r"\x1b\[[0-9;]*m")
_LONGEST = 400  # characters
_PYTHON_WARNING = re.compile(r"\S+:\d+: (?P<kind>\w+): (?P<text>.*)")
_OWN = ("FutureWarning", "DeprecationWarning", "PendingDeprecationWarning")
_NO_WARNING = re.compile(r"\d+%\||\d+it \[|it/s\]|is not installed\. Skipping")  # progress bars; torch's own log
_MOST = 5  # warnings that are returned


def failure_reason(stderr: str) -> str:
    """Return, on one line, why a Python program ended with an error, from its stderr; empty without output.

    In a chain of errors, the first error is the reason; for example, torch.onnx raises three errors, and the first one
    names the missing function. For an error without a message, the reason is the line of code that raised it. Without a
    trace, the reason is the last line of stderr.
    """
    text = _COLOR.sub("", stderr).strip()
    parts = re.split(f"({re.escape(_CAUSE)}|{re.escape(_OTHER)})", text)
    at = len(parts) - 1
    while at >= 2 and parts[at - 1] == _CAUSE:
        at -= 2
    _, separator, trace = parts[at].rpartition(_TRACE)
    if not separator:
        return (text.splitlines() or [""])[-1].strip()
    lines = trace.strip("\n").splitlines()
    start = next((i for i, line in enumerate(lines) if line and not line[0].isspace()), None)
    error = None if start is None else _ERROR.fullmatch(lines[start].rstrip())
    if start is None or error is None:
        return lines[-1].strip()
    more = lines[start + 1 :]
    more = more[: next((i for i, line in enumerate(more) if not line.strip()), len(more))]
    words = " ".join(" ".join([error["text"] or "", *more]).split())
    if not words:
        source = next((line.strip() for line in reversed(lines[:start]) if line.strip(" ~^")), "")
        words = f"without words, by {source!r}" if source else "without words"
    told = f"{error['name']}: {words}"
    return told if len(told) <= _LONGEST else f"{told[: _LONGEST - 4]} ..."


def warnings_in(stderr: str) -> list[str]:
    """Return the first warnings in a program's stderr, each once, and the number of the others."""
    told: dict[str, None] = {}
    source = False  # Python shows the line of code after a warning
    for line in _COLOR.sub("", stderr).splitlines():
        warning = _PYTHON_WARNING.fullmatch(line)
        text = (warning["text"] if warning else line.rpartition("\r")[2]).strip()
        own = (warning and warning["kind"] in _OWN) or (source and line[:1].isspace())
        if text and not own and not _NO_WARNING.search(text):
            told[text if len(text) <= _LONGEST else f"{text[: _LONGEST - 4]} ..."] = None
        source = warning is not None
    lines = list(told)
    return lines if len(lines) <= _MOST else [*lines[:_MOST], f"{len(lines) - _MOST} more lines"]

"""The line of an exporter's output that says why it failed."""

from __future__ import annotations

import re

__all__ = ["failure_reason"]

_CAUSE = "The above exception was the direct cause of the following exception:"
_OTHER = "During handling of the above exception, another exception occurred:"
_TRACE = "Traceback (most recent call last):"
_ERROR = re.compile(r"(?:[\w.]+\.)?(?P<name>[A-Za-z_]\w*)(?:: (?P<text>.*))?")
_COLOR = re.compile(r"\x1b\[[0-9;]*m")
_LONGEST = 400  # characters


def failure_reason(stderr: str) -> str:
    """Return in one line why a Python program ended with an error.

    An error that was raised from another one is told as the other one: torch.onnx names the missing function in the
    first error of three, and says nothing in the last. An error without words is told with the line that raised it.

    Args:
        stderr: all that it wrote there.

    Returns:
        The reason; empty if there was no output. Without a trace, the last line.
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

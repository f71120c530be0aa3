"""Chat templates run in a child process: a template from anywhere may loop for ever, or make a text of any length.

Jinja's sandbox keeps a template away from Python; it bounds neither time nor memory.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec

from trt_kvcache.child import Child, ChildError, limit_memory
from trt_kvcache.errors import OptionError
from trt_kvcache.runtime.text.chat import Chat, Part, render

__all__ = ["render_in_process"]

SECONDS = 10.0
MEMORY = 1 << 30
"""Bytes of address space, of which Python and Jinja2 take about 100 MB."""
LONGEST = 1 << 24
"""Characters of a prompt."""


@dataclass(frozen=True)
class _Request:
    template: str
    chat: Chat
    special_tokens: dict[str, str]
    special_texts: tuple[str, ...]
    name: str


@dataclass(frozen=True)
class _Answer:
    parts: tuple[Part, ...] = ()
    refused: str = ""


_lock = threading.Lock()
_children: list[Child] = []


def render_in_process(
    template: str, chat: Chat, special_tokens: Mapping[str, str], special_texts: Sequence[str], name: str
) -> tuple[Part, ...]:
    """Return what `chat.render` gives, from a process with limits. It is kept for the next call.

    Raises:
        OptionError: see `chat.render`; or the template exceeds a limit, or the messages cannot be written as JSON.
    """
    try:
        request = msgspec.json.encode(_Request(template, chat, dict(special_tokens), tuple(special_texts), name))
    except (TypeError, ValueError, RecursionError, UnicodeEncodeError) as error:
        raise OptionError(f"the messages of a chat have to be JSON: {error}") from None
    with _lock:
        if _children and not _children[0].alive:
            _children.pop().end()
        if not _children:
            _children.append(Child(__name__, str(MEMORY)))
        try:
            line = _children[0].ask([request, b"\n"], SECONDS)
        except ChildError as error:
            raise OptionError(f"the chat template of {name} {error}; mend it, or give the prompt as text") from None
    answer = msgspec.json.decode(line, type=_Answer)
    if answer.refused:
        raise OptionError(answer.refused)
    return answer.parts


def _answer(line: bytes) -> _Answer:
    request = msgspec.json.decode(line, type=_Request)
    try:
        parts = render(request.template, request.chat, request.special_tokens, request.special_texts, request.name)
    except OptionError as error:
        return _Answer(refused=str(error)[:2000])
    except MemoryError:
        return _Answer(refused=_exceeds(request.name, f"{MEMORY >> 20} MiB of memory"))
    if sum(len(part.text) for part in parts) > LONGEST:
        return _Answer(refused=_exceeds(request.name, f"{LONGEST} characters"))
    return _Answer(tuple(parts))


def _exceeds(name: str, what: str) -> str:
    return f"the chat template of {name} needs more than {what}; mend it, or give the prompt as text"


def main() -> None:
    """Answer requests until stdin ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    limit_memory(int(sys.argv[1]))
    answers = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)
    for line in sys.stdin.buffer:
        answers.write(msgspec.json.encode(_answer(line)) + b"\n")


if __name__ == "__main__":
    main()

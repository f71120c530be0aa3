"""Chat templates run in a child process: a template from anywhere may loop for ever, or make a text of any length.

Jinja's sandbox keeps a template away from Python; it bounds neither time nor memory.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from trt_kvcache.child import Caller, Child, ChildError, serve
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


_lock = threading.Lock()
_children: list[Child] = []


def render_in_process(
    template: str, chat: Chat, special_tokens: Mapping[str, str], special_texts: Sequence[str], name: str
) -> tuple[Part, ...]:
    """Return what `chat.render` gives, from a process with limits. It is kept for the next call.

    Raises:
        OptionError: see `chat.render`; or the template exceeds a limit, or the messages cannot be written as JSON.
    """
    request = _Request(template, chat, dict(special_tokens), tuple(special_texts), name)
    with _lock:
        if not _children or not _children[0].alive:
            _children[:] = [Child("-m", __name__, memory=MEMORY)]
        try:
            return _children[0].ask(request, tuple[Part, ...], SECONDS)
        except ChildError as error:
            raise OptionError(f"the chat template of {name} {error}; mend it, or give the prompt as text") from None
        except (TypeError, ValueError, RecursionError) as error:
            raise OptionError(f"the messages of a chat have to be JSON: {error}") from None


def _render(request: _Request, _parts: list[bytes], _caller: Caller) -> tuple[Part, ...]:
    parts = render(request.template, request.chat, request.special_tokens, request.special_texts, request.name)
    if sum(len(part.text) for part in parts) > LONGEST:
        raise OptionError(
            f"the chat template of {request.name} needs more than {LONGEST} characters; mend it, or give the prompt "
            "as text"
        )
    return tuple(parts)


if __name__ == "__main__":
    serve(_render, _Request)

"""Chat templates: Jinja2 as transformers sets it up, in a sandbox, since templates come with models.

Source: https://huggingface.co/docs/transformers/chat_templating_writing.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from trt_kvcache.errors import OptionError

__all__ = ["render"]


def render(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    special_tokens: Mapping[str, str],
    name: str,
    tools: Sequence[Mapping[str, Any]] | None = None,
) -> str:
    """Return the prompt of a chat, up to where the model's answer begins.

    Args:
        template: Jinja2.
        messages: ``{"role": "user", "content": "..."}`` and so on.
        special_tokens: ``bos_token`` and others, for the template.
        name: of the tokenizer, for messages.
        tools: that the model may call, as OpenAI's API has them.

    Raises:
        OptionError: the template is broken or does what the sandbox forbids, or it refuses the messages.
        MemoryError: it needs too much.
    """
    from jinja2 import TemplateError, nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """``{% generation %}`` marks answers for training; for a prompt it is its content."""

        tags = {"generation"}  # noqa: RUF012 - Jinja2's own declaration

        def parse(self, parser: Any) -> nodes.Node:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.Scope(body, lineno=line)

    def refuse(message: object) -> None:
        raise TemplateError(str(message))

    def to_json(value: Any, indent: int | None = None, ensure_ascii: bool = False, **others: Any) -> str:
        return json.dumps(value, indent=indent, ensure_ascii=ensure_ascii, **others)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, Generation]
    )
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda pattern: datetime.now().strftime(pattern)
    try:
        text: str = environment.from_string(template).render(
            messages=list(messages), add_generation_prompt=True, tools=tools, documents=None, **special_tokens
        )
    except MemoryError:
        raise
    except Exception as error:  # noqa: BLE001 - a template runs code of its own, which can raise anything
        raise OptionError(f"the chat template of {name} failed: {type(error).__name__}: {error}") from None
    return text

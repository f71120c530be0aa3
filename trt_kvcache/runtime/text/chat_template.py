"""Renders chat templates: Jinja2 with the settings of transformers, in a sandbox without access to Python.

Many templates silently skip messages with unknown roles. So a chat is refused if the template ignores one of its
messages. Special tokens that a message spells are encoded as text.
Source: https://huggingface.co/docs/transformers/chat_templating_writing.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from typing import Any

from trt_kvcache.errors import OptionError

_RESERVED = ("messages", "tools", "documents", "add_generation_prompt")
_MARK = "\ue0a1trace\ue0a2"  # characters of Unicode's private use area, which texts do not contain
_SPELLED = "\ue0a3{}\ue0a4"


@dataclass(frozen=True)
class Chat:
    """The arguments of a chat template: messages, tools and other variables.

    Attributes:
        messages: ``{"role": "user", "content": "..."}`` and so on.
        tools: tools that the model may call, in the form of OpenAI's API.
        values: further variables for the template, such as ``enable_thinking``.
        generation_prompt: True if the prompt must end where the model's answer begins.
        continues: True if the prompt must end within the last message, so that the model continues this message.
    """

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    values: dict[str, Any] = field(default_factory=dict)
    generation_prompt: bool = True
    continues: bool = False


@dataclass(frozen=True)
class Part:
    """A part of a prompt. If `plain`, its text spells a special token in a message, and is encoded as ordinary text."""

    text: str
    plain: bool = False


class _Arguments(dict[str, Any]):
    """Arguments of a tool call for chat templates, which may use them as an object or join them to a text."""

    def __init__(self, values: Mapping[str, Any], text: str) -> None:
        super().__init__(values)
        self._text = text

    def __str__(self) -> str:
        return self._text

    def __add__(self, other: str) -> str:
        return self._text + other

    def __radd__(self, other: str) -> str:
        return other + self._text


Write = Callable[[list[dict[str, Any]]], str]
"""Function that renders messages with a chat template, and returns the prompt."""


def render(
    template: str, chat: Chat, special_tokens: Mapping[str, str], special_texts: Sequence[str], name: str
) -> list[Part]:
    """Render a chat template; return the prompt in parts.

    Args:
        template: text of the Jinja2 template.
        chat: the template's arguments.
        special_tokens: ``bos_token`` and other special tokens, for the template.
        special_texts: texts of all special tokens; such a text in a message does not become the token.
        name: name of the tokenizer, for error messages.

    Raises:
        OptionError: the template is broken, does something that the sandbox forbids, refuses the messages, or ignores
            one of them; or the messages are not JSON.
    """
    if taken := next((value for value in _RESERVED if value in chat.values), None):
        raise OptionError(f"{taken} cannot be given to a chat template; leave it out")
    compiled = _compile(template, name)
    try:
        messages = [_with_texts(message) for message in chat.messages]
    except (TypeError, ValueError, RecursionError) as error:
        raise OptionError(f"the messages of a chat have to be JSON: {error}") from None
    prompt = chat.generation_prompt and not chat.continues

    def write(messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None = chat.tools) -> str:
        values = {**special_tokens, **chat.values, "documents": None, "tools": tools}
        return compiled(messages=messages, add_generation_prompt=prompt, **values)

    messages, text = _written(write, messages, name)
    if chat.continues:
        text = _continued(write, messages, name)
    known = [special for special in special_texts if special]
    if not any(special in said for special in known for said in _strings([messages, chat.tools])):
        return [Part(text)]
    known.sort(key=len, reverse=True)
    pattern = re.compile("|".join(map(re.escape, known)))
    hidden, tools = _hidden([messages, chat.tools], pattern, known)

    write_hidden = partial(write, tools=tools)
    shown = _continued(write_hidden, hidden, name) if chat.continues else write_hidden(hidden)
    return _parts(shown, text, pattern, known, name)


def _compile(template: str, name: str) -> Callable[..., str]:
    from jinja2 import TemplateError, nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """``{% generation %}`` marks answers for training. In a prompt, the tag only writes its content."""

        tags = {"generation"}  # noqa: RUF012 - Jinja2's own declaration

        def parse(self, parser: Any) -> nodes.Node:
            line = next(parser.stream).lineno
            return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)

    def refuse(message: object) -> None:
        raise TemplateError(str(message))

    def to_json(value: Any, indent: int | None = None, ensure_ascii: bool = False, **others: Any) -> str:
        return json.dumps(value, indent=indent, ensure_ascii=ensure_ascii, **others)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, Generation]
    )
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = datetime.now().strftime  # the same time in every run of the template

    def run(work: Callable[[], Any]) -> Any:
        try:
            return work()
        except Exception as error:  # noqa: BLE001 - a template runs code of its own, which can raise anything
            raise OptionError(f"the chat template of {name} failed: {type(error).__name__}: {error}") from None

    compiled = run(lambda: environment.from_string(template))
    return lambda **values: str(run(lambda: compiled.render(**values)))


def _with_texts(message: Mapping[str, Any]) -> dict[str, Any]:
    """Copy a message. Make the arguments of its tool calls objects that templates can also use as texts."""
    result = deepcopy(dict(message))
    for call in _calls(result):
        arguments = call.get("arguments")
        try:
            content = json.loads(arguments) if isinstance(arguments, str) else arguments
        except (ValueError, RecursionError):
            continue
        if isinstance(content, dict):
            text = arguments if isinstance(arguments, str) else json.dumps(content, ensure_ascii=False)
            call["arguments"] = _Arguments(content, text)
    return result


def _calls(message: dict[str, Any]) -> Iterator[dict[str, Any]]:
    calls = message.get("tool_calls")
    for call in calls if isinstance(calls, list) else ():
        if isinstance(call, dict):
            function = call.get("function", call)
            if isinstance(function, dict):
                yield function


# Check that the prompt contains every message.


def _written(write: Write, messages: list[dict[str, Any]], name: str) -> tuple[list[dict[str, Any]], str]:
    """Render the messages with the chat template. Return the messages and the prompt.

    If the template does not know the role ``developer``, the role becomes ``system``. Raises `OptionError` if the
    template fails on the messages, or ignores one of them.
    """
    try:
        return messages, _traced(write, messages, name)
    except OptionError as error:
        system = [{**m, "role": "system"} if m.get("role") == "developer" else m for m in messages]
        if system == messages:
            raise
        try:
            return system, _traced(write, system, name)
        except OptionError:
            raise error from None


def _texts(messages: list[dict[str, Any]]) -> Iterator[tuple[int, str, dict[str, Any], str]]:
    """Yield each text that the prompt must contain: message index, label for errors, dictionary and key."""
    for at, message in enumerate(messages):
        content = message.get("content")
        if isinstance(content, str) and content.strip():
            yield at, "", message, "content"
        elif isinstance(content, list):
            for part in content:
                if isinstance(part, dict) and isinstance(part.get("text"), str) and part["text"].strip():
                    yield at, "", part, "text"
        for call in _calls(message):
            if isinstance(call.get("name"), str):
                yield at, f", its call of '{call['name']}'", call, "name"


def _traced(write: Write, messages: list[dict[str, Any]], name: str) -> str:
    text, marked = write(messages), deepcopy(messages)
    for number, (_, _, place, key) in enumerate(_texts(marked)):
        place[key] += f"{_MARK}{number}."
    try:
        seen = write(marked)
    except OptionError:  # the template may have refused the messages because of the marks
        seen = ""
    for number, (at, what, _, _) in enumerate(_texts(messages)):
        if f"{_MARK}{number}." in seen:
            continue
        alone = deepcopy(messages)
        if what or messages[at].get("role") != "assistant":
            _, _, place, key = list(_texts(alone))[number]
            place[key] = _MARK
        else:  # a template may leave out the text of an earlier answer, but not the whole answer
            del alone[at]
        try:
            if write(alone) != text:
                continue
        except OptionError:
            continue
        raise OptionError(
            f"the chat template of {name} does not write messages[{at}] ({messages[at].get('role')}{what}), so the "
            "model would not see it; leave it out, or put its text into a user message"
        )
    return text


# Find the end of a prompt, and keep special tokens that messages spell as text.


def _continued(write: Write, messages: list[dict[str, Any]], name: str) -> str:
    """Return the prompt up to the end of the last message's content; `OptionError` if the prompt lacks this content."""
    marked = deepcopy(messages)
    content = marked[-1].get("content")
    if not isinstance(content, str):
        raise OptionError("only a message with text can be continued, and this one has none")
    marked[-1]["content"] = content + _MARK
    text, mark, _ = write(marked).partition(_MARK)
    if not mark:
        raise OptionError(f"the chat template of {name} does not write the last message, which is to be continued")
    return text


def _parts(shown: str, text: str, pattern: re.Pattern[str], known: Sequence[str], name: str) -> list[Part]:
    """Split a prompt into parts, so that special tokens spelled in messages stay text.

    `text` is the prompt; `shown` has marks in place of these special tokens. Raises `OptionError` if the template
    writes a message differently because it contains a special token.
    """
    spelled = re.compile(_SPELLED.format("([0-9]+)"))
    if spelled.sub(lambda match: known[int(match[1])], shown) != text:
        raise OptionError(
            f"the messages contain a special token, and the chat template of {name} then reads them differently; "
            f"leave {', '.join(dict.fromkeys(pattern.findall(text)))} out of the messages"
        )
    parts: list[Part] = []
    # A part reaches from one special token of the template to the next, even if its text spells special tokens.
    for piece in re.split(f"({pattern.pattern})", shown):
        plain = spelled.search(piece) is not None
        written = spelled.sub(lambda match: known[int(match[1])], piece)
        if parts and not plain and not parts[-1].plain:
            parts[-1] = Part(parts[-1].text + written)
        elif written:
            parts.append(Part(written, plain))
    return parts


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for inner in (*value.keys(), *value.values()):
            yield from _strings(inner)
        if isinstance(value, _Arguments):
            yield str(value)
    elif isinstance(value, list):
        for inner in value:
            yield from _strings(inner)


def _hidden(value: Any, pattern: re.Pattern[str], known: Sequence[str]) -> Any:
    """Copy a value of a message. Replace each special token that its texts contain by a mark."""

    def mark(text: str) -> str:
        return pattern.sub(lambda match: _SPELLED.format(known.index(match[0])), text)

    if isinstance(value, str):
        return mark(value)
    if isinstance(value, dict):
        hidden = {_hidden(key, pattern, known): _hidden(inner, pattern, known) for key, inner in value.items()}
        return _Arguments(hidden, mark(str(value))) if isinstance(value, _Arguments) else hidden
    if isinstance(value, list):
        return [_hidden(inner, pattern, known) for inner in value]
    return value

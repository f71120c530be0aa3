"""Compiles the form that a request wants for its answer: a JSON schema, a regular expression, a grammar, a choice."""

from __future__ import annotations

import threading
from typing import Any, Literal
from weakref import WeakKeyDictionary

import msgspec

from trt_kvcache.errors import OptionError
from trt_kvcache.runtime.generation.token_masks import Grammar
from trt_kvcache.runtime.session import DecodeSession
from trt_kvcache.runtime.structured import Grammars


class JsonSchema(msgspec.Struct, forbid_unknown_fields=True):
    """The schema of a response format. Answers follow it even if `strict` is false."""

    schema: dict[str, Any]
    name: str | None = None
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(msgspec.Struct, forbid_unknown_fields=True):
    """The `response_format` of OpenAI's API."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class StructuredOutputs(msgspec.Struct, forbid_unknown_fields=True):
    """The `structured_outputs` of vLLM's API, with one of these fields. `grammar` is Lark or GBNF."""

    json: dict[str, Any] | str | None = None
    json_object: bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None


_cache: WeakKeyDictionary[DecodeSession, Grammars] = WeakKeyDictionary()
_lock = threading.Lock()


def grammars_of(session: DecodeSession) -> Grammars:
    """Return the `Grammars` of a session. They are made once, because this takes time for each token of the vocabulary.

    Raises:
        OptionError: see `Grammars`.
    """
    with _lock:
        if session not in _cache:
            _cache[session] = Grammars(session)
        return _cache[session]


def grammar_of(session: DecodeSession, asked: ResponseFormat | StructuredOutputs) -> Grammar | None:
    """Return the grammar of a request; None if it asks for plain text.

    Raises:
        OptionError: the grammar does not compile, the request names none or several, or the session has no grammars.
    """
    if isinstance(asked, ResponseFormat):
        if asked.type == "json_schema" and asked.json_schema is None:
            raise OptionError("type is 'json_schema', and json_schema is missing; give {'schema': {...}} there")
        if asked.type != "json_schema" and asked.json_schema is not None:
            raise OptionError(f"type is {asked.type!r}; json_schema is for the type json_schema only")
        if asked.json_schema is not None:
            return grammars_of(session).json_schema(asked.json_schema.schema)
        return None if asked.type == "text" else grammars_of(session).json_object()
    choices = {name: value for name, value in msgspec.structs.asdict(asked).items() if value not in (None, False)}
    if len(choices) != 1:
        names = ", ".join(asked.__struct_fields__)
        raise OptionError(f"{', '.join(choices) or 'nothing'} is given; give one of {names}")
    ((name, value),) = choices.items()
    grammars = grammars_of(session)
    if name == "json_object":
        return grammars.json_object()
    make = {"json": grammars.json_schema, "regex": grammars.regex, "choice": grammars.choice, "grammar": grammars.lark}
    return make[name](value)

"""Makes answers follow the form that a request asks for: a grammar, such as a JSON schema, or tool calls.

For tool calls, it finds how a chat template writes them, compiles a grammar for them, and reads them in answers.
"""

from __future__ import annotations

import json
import re
import secrets
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal
from weakref import WeakKeyDictionary

import msgspec
from msgspec import Meta

from trt_kvcache.errors import OptionError
from trt_kvcache.runtime.generation.token_masks import Grammar
from trt_kvcache.runtime.session import DecodeSession
from trt_kvcache.runtime.structured import JSON_FORM, Grammars
from trt_kvcache.runtime.text.incremental import StopStrings


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
    """The `structured_outputs` of vLLM's API; a request sets one field. `grammar` is Lark or GBNF."""

    json: dict[str, Any] | str | None = None
    json_object: bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None


_cache: WeakKeyDictionary[DecodeSession, Grammars] = WeakKeyDictionary()
_grammars_lock = threading.Lock()


def grammars_of(session: DecodeSession) -> Grammars:
    """Return the session's `Grammars` object. It is made only once, because it must read the whole vocabulary.

    Raises `OptionError` if the session cannot have grammars.
    """
    with _grammars_lock:
        if session not in _cache:
            _cache[session] = Grammars(session)
        return _cache[session]


def grammar_of(session: DecodeSession, asked: ResponseFormat | StructuredOutputs) -> Grammar | None:
    """Compile the grammar that a request asks for; None if it asks for plain text.

    Raises `OptionError` if a grammar does not compile, `asked` sets none or several, or the session cannot have any.
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


class Function(msgspec.Struct, forbid_unknown_fields=True):
    """The function that a tool offers to the model. Calls follow its parameters even if `strict` is false."""

    name: Annotated[str, Meta(pattern="^[a-zA-Z0-9_.-]{1,64}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(msgspec.Struct, forbid_unknown_fields=True):
    """A tool that a chat request offers to the model, in OpenAI's form."""

    type: Literal["function"]
    function: Function
    cache_control: Any = None  # for other servers; the prefix cache works without it


@dataclass(frozen=True)
class ToolForm:
    """The texts that a chat template writes around the names and arguments of tool calls.

    Attributes:
        begin: text before the name of the first call.
        middle: text between a name and its arguments, which are JSON.
        between: text between arguments and the name of the next call; None: a message has only one call.
        end: text after the last arguments.
    """

    begin: str
    middle: str
    between: str | None
    end: str

    @property
    def trigger(self) -> str:
        """The text by which an answer with tool calls is recognized: the first word of `begin`."""
        match = re.match(r"[^\s{\[]+", self.begin)
        return match[0] if match else self.begin


GENERIC = ToolForm(
    '<tool_call>\n{"name": "', '", "arguments": ', '}\n</tool_call>\n<tool_call>\n{"name": "', "}\n</tool_call>"
)
"""The form for chat templates that know no tools: that of Hermes, which many models have seen in training."""

_ASKED = (
    "You can call functions. To call one, answer with its name and its arguments as JSON, in this form:\n"
    '<tool_call>\n{"name": NAME, "arguments": {...}}\n</tool_call>\nThe functions:'
)

Render = Callable[[Sequence[dict[str, Any]], Sequence[dict[str, Any]] | None], str]

_NAMES = ("first_name_9", "second_name_9")
_ID = "call90909"
_TEXT = "plain text 9"
_USER = {"role": "user", "content": "question 9"}
_ARGUMENTS = {"argument_9": "value_9"}


def find_form(render: Render, special_tokens: Sequence[str]) -> ToolForm:
    """Find how a chat template writes tool calls, by rendering examples; `GENERIC` if it does not support tools.

    `render` returns the prompt of messages and tools. Raises `OptionError` if the template does not write calls as a
    name followed by arguments in JSON, or if calls contain `special_tokens`: texts of answers never do.
    """
    tools = [{"type": "function", "function": {"name": name, "parameters": {"type": "object"}}} for name in _NAMES]
    prompt = render([_USER], tools)
    if prompt == render([_USER], None):
        return GENERIC
    plain = _after(render([_USER, {"role": "assistant", "content": _TEXT}], tools), prompt)
    around = plain.partition(_TEXT)[::2]
    written = json.dumps(_ARGUMENTS)
    one = _calls(render, tools, prompt, around, _NAMES[:1]).split(_NAMES[0])
    if len(one) != 2 or one[1].count(written) != 1:
        raise _unread("a name followed by the arguments as JSON")
    middle, _, end = one[1].partition(written)
    between = None
    try:
        two = _calls(render, tools, prompt, around, _NAMES)
    except OptionError:  # the template may refuse more than one call
        two = ""
    parts = (one[0], _NAMES[0], middle, written, _NAMES[1], middle, written, end)
    pattern = "{}{}{}{}(.*){}{}{}{}".format(*map(re.escape, parts))
    if match := re.fullmatch(pattern, two, re.DOTALL):
        between = match[1]
    form = ToolForm(one[0].lstrip(), middle, between, end)
    texts = "".join((form.begin, form.middle, form.between or "", form.end))
    if hidden := next((token for token in special_tokens if token and token in texts), None):
        raise _unread(f"calls without special tokens; here they contain {hidden}")
    if _ID in texts:
        raise _unread("calls without ids")
    if not form.begin or form.end == "" == form.middle:
        raise _unread("calls with a text before the name")
    return form


def _unread(what: str) -> OptionError:
    return OptionError(f"the chat template writes tool calls in a form that is not supported; supported: {what}")


def _after(text: str, prompt: str) -> str:
    """Return the part of a rendered chat after its prompt; refuse a template that changes the prompt."""
    if not text.startswith(prompt):
        raise _unread("an answer that begins right after the prompt")
    return text[len(prompt) :]


def _calls(render: Render, tools: Any, prompt: str, around: tuple[str, ...], names: Sequence[str]) -> str:
    """Return the text that the template writes for calls of these functions, without texts that every answer has."""
    functions = [{"name": name, "arguments": dict(_ARGUMENTS)} for name in names]
    calls = [{"id": _ID, "type": "function", "function": function} for function in functions]
    said = _after(render([_USER, {"role": "assistant", "content": "", "tool_calls": calls}], tools), prompt)
    head, tail = around
    if not said.endswith(tail):
        raise _unread("calls that end with the same text as other answers")
    return said.removeprefix(head).removesuffix(tail)


def in_text(messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Convert messages for a template that knows no tools: tools, calls and results become text in the form `GENERIC`.

    The system message describes the tools; if there is none, the user's first message does.
    """
    written: list[dict[str, Any]] = []
    for message in messages:
        content, calls = message.get("content") or "", message.get("tool_calls") or []
        if message["role"] == "tool":
            result = f"<tool_response>\n{content}\n</tool_response>"
            if written and written[-1]["role"] == "user":
                written[-1]["content"] += f"\n{result}"
            else:
                written.append({"role": "user", "content": result})
            continue
        if calls:
            said = (GENERIC.between or "").join(
                f"{call['function']['name']}{GENERIC.middle}{call['function']['arguments']}" for call in calls
            )
            content = "\n".join(filter(None, (content, f"{GENERIC.begin}{said}{GENERIC.end}")))
        written.append({"role": message["role"], "content": content})
    if tools:
        asked = "\n".join([_ASKED, *(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)])
        first = next((m for m in written if m["role"] in ("system", "developer")), None)
        if first is not None:
            first["content"] += f"\n\n{asked}"
        elif (user := next((m for m in written if m["role"] == "user"), None)) is not None:
            user["content"] = f"{asked}\n\n{user['content']}"
        else:
            written.insert(0, {"role": "user", "content": asked})
    return written


_forms: WeakKeyDictionary[DecodeSession, ToolForm] = WeakKeyDictionary()
_forms_lock = threading.Lock()


def form_of(session: DecodeSession) -> ToolForm:
    """Return how the session's chat template writes tool calls; raise an error if this cannot be found out."""
    with _forms_lock:
        if session not in _forms:
            tokenizer = session.tokenizer
            if not hasattr(tokenizer, "special_tokens"):
                raise OptionError("tool calls need a chat template; open the session with a tokenizer.json")
            _forms[session] = find_form(tokenizer.render_chat, list(grammars_of(session).special_texts))
        return _forms[session]


@dataclass(frozen=True)
class ToolUse:
    """The tools that an answer may call, how the template writes calls, and the answer's grammar."""

    form: ToolForm
    tools: Sequence[Tool]
    required: bool
    grammar: Grammar

    def reader(self) -> CallReader:
        """Return a new `CallReader`, which separates tool calls from text in one answer."""
        return CallReader(self.form, self.tools, required=self.required)


def use_tools(session: DecodeSession, tools: Sequence[Tool], choice: Any, *, parallel: bool) -> ToolUse | None:
    """Return the tool calls that an answer may make; None if it may make no calls.

    `choice` is `tool_choice` of the request; `parallel` allows several calls. Raises `OptionError` if the choice is
    unknown, the parameters of a tool do not compile, or it cannot be found out how the template writes calls.
    """
    able, required = _chosen(tools, choice)
    if not able:
        return None
    form = form_of(session)
    parallel = parallel and not isinstance(choice, dict)  # a named function is called once
    grammar = tool_grammar(session, form, able, required=required, parallel=parallel)
    return ToolUse(form, able, required, grammar)


def _chosen(tools: Sequence[Tool], choice: Any) -> tuple[Sequence[Tool], bool]:
    """Return the tools that the model may call, and whether it must call one."""
    if choice in (None, "auto", "none"):  # legal even without tools
        return ([] if choice == "none" else tools), False
    if choice == "required" and tools:
        return tools, True
    if choice == "required":
        raise OptionError("tool_choice is 'required', and there are no tools; give some, or leave it out")
    if isinstance(choice, dict) and choice.get("type") == "function" and isinstance(choice.get("function"), dict):
        name = choice["function"].get("name")
        if named := [tool for tool in tools if tool.function.name == name]:
            return named, True
        raise OptionError(f"tool_choice: there is no tool {str(name)[:80]!r} among tools")
    raise OptionError(
        "tool_choice: supported: none, auto, required, {'type': 'function', 'function': {'name': ...}} of tools"
    )


def tool_grammar(
    session: DecodeSession, form: ToolForm, tools: Sequence[Tool], *, required: bool, parallel: bool
) -> Grammar:
    """Compile the grammar of an answer with tool calls; raise `OptionError` if a tool's parameters do not compile.

    If no call is required, text may come before the calls, or the answer may be only text.
    """
    functions = [tool.function for tool in tools]
    schemas = [{"type": "object", **(function.parameters or {}), "x-guidance": JSON_FORM} for function in functions]
    heads = [_quoted(function.name + form.middle) for function in functions]
    calls = " | ".join(f"{head} %json {json.dumps(schema)}" for head, schema in zip(heads, schemas, strict=True))
    more = f"({_quoted(form.between)} call)*" if parallel and form.between is not None else ""
    rest = form.begin if required else form.begin.removeprefix(form.trigger)
    lines = [f"called: {_quoted(rest)} call {more} {_quoted(form.end)}", f"call: {calls}"]
    if required:
        lines = ["start: called", *lines]
    else:
        # Lazy: calls begin as soon as the trigger is complete, anywhere in a text.
        trigger = f"trigger[lazy]: TEXT {_quoted(form.trigger)}"
        lines = ["start: TEXT | trigger called", *lines, trigger, "TEXT: /(.|\\n)*/"]
    return grammars_of(session).lark("\n".join(["%llguidance {}", *lines]))


def _quoted(text: str) -> str:
    return json.dumps(text) if text else ""


class CallReader:
    """Separates tool calls (`calls`, in OpenAI's form) from text in one answer, while the answer arrives."""

    def __init__(self, form: ToolForm, tools: Sequence[Tool], *, required: bool) -> None:
        self._form, self._names = form, [tool.function.name for tool in tools]
        self._before = StopStrings([form.trigger])
        self._in_calls, self._rest = required, ""
        self.calls: list[dict[str, Any]] = []

    def push(self, text: str, *, last: bool = False) -> str:
        """Take more text of the answer (`last`: True at its end); return text that is certainly not part of a call."""
        self._rest += text
        said = ""
        if not self._in_calls:
            said = self._before.push(text) + (self._before.flush() if last else "")
            self._in_calls = self._before.matched
            if not self._in_calls:
                # Return the text that cannot belong to the trigger; keep the rest, which may be its beginning.
                self._rest = self._rest[len(said) :]
                return said
            self._rest = self._rest[self._rest.index(self._form.trigger) :]
        if "}" in text:
            self._read()
        return said

    def _read(self) -> None:
        while (lead := self._form.between if self.calls else self._form.begin) is not None:
            for start in (lead + name + self._form.middle for name in self._names):
                if self._rest.startswith(start):
                    break
            else:
                return
            try:
                _, stop = json.JSONDecoder().raw_decode(self._rest, len(start))
            except ValueError:
                return
            name, arguments = start[len(lead) : len(start) - len(self._form.middle)], self._rest[len(start) : stop]
            called = {"name": name, "arguments": arguments}
            self.calls.append({"id": f"call_{secrets.token_hex(12)}", "type": "function", "function": called})
            self._rest = self._rest[stop:]

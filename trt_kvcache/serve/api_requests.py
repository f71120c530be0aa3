"""Converts requests of OpenAI's API (and some fields of vLLM's) to generation settings; refuses unknown fields."""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta

from trt_kvcache.errors import CapacityError, OptionError, PromptError, TrtKvCacheError
from trt_kvcache.runtime.generation.generation_config import GenerationConfig
from trt_kvcache.runtime.generation.settings import changed
from trt_kvcache.runtime.session import DecodeSession
from trt_kvcache.serve.core import EndingError, QueueFullError, Work
from trt_kvcache.serve.tools import (
    GENERIC,
    ResponseFormat,
    StructuredOutputs,
    Tool,
    ToolUse,
    form_of,
    grammar_of,
    in_text,
    use_tools,
)

LATER = {"Retry-After": "1"}
"""Headers of a refusal after which the client may try again in a second."""

_MOST_COMPLETION = 16
"""Most new tokens of a completion if the request gives no number; OpenAI's default."""
_FEW = 8
"""Most names in a message."""
_MOST_UNBOUNDED = 4096
"""Most new tokens of a chat if the request gives no number and the caches never fill up."""


_PENALTIES = ("repetition_penalty", "presence_penalty", "frequency_penalty")
_SAMPLING = ("temperature", "top_k", "top_p", "min_p", *_PENALTIES)
_LEAST = 1e-9
"""Replaces a `top_p` of 0: so small that only the most probable token stays."""


class ApiError(TrtKvCacheError):
    """An error that is sent to the client in OpenAI's form.

    Args:
        status: HTTP status.
        message: one line.
        param: the field of the request that is wrong.
        code: code for programs.
        headers: HTTP headers.
        logged: text for the log. None: `message`, which must then quote nothing from the client except names.
    """

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
        logged: str | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.param, self.code, self.headers = status, param, code, headers
        self.logged = message if logged is None else logged

    @property
    def body(self) -> dict[str, Any]:
        """The body of the HTTP response."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


def as_api(error: TrtKvCacheError) -> ApiError:
    """Convert an error of a session or a `ServingCore` to the error that the client gets."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, QueueFullError):
        return too_many(str(error))
    if isinstance(error, EndingError):
        return ApiError(503, str(error), code="ending", headers=LATER)
    if isinstance(error, CapacityError):
        return ApiError(400, str(error), "prompt", "context_length_exceeded")
    if isinstance(error, OptionError):
        return ApiError(400, str(error), logged="the session cannot do what is asked")
    if isinstance(error, PromptError):
        return ApiError(400, str(error))
    return ApiError(500, str(error))


def too_many(message: str) -> ApiError:
    """Return the error that tells a client that too many requests wait (HTTP 429)."""
    return ApiError(429, message, code="queue_full", headers=LATER)


def find_adapter(requested: str | None, name: str, adapters: Collection[str]) -> str | None:
    """Return the adapter that a request names as its model; None for the model itself. Raises `ApiError` for others."""
    if requested is None or requested == name:
        return None
    if requested in adapters:
        return requested
    others = f", with adapters {', '.join(map(repr, sorted(adapters)[:_FEW]))}" if adapters else ""
    raise ApiError(404, f"there is no model {requested[:100]!r}; this is {name!r}{others}", "model", "model_not_found")


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    """The field `stream_options` of a request."""

    include_usage: bool | None = None
    include_obfuscation: Literal[False] | None = None  # padding that hides the length of tokens


class _Request(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    model: str | None = None
    n: Annotated[int, Meta(ge=1, le=128)] | None = None
    seed: Annotated[int, Meta(ge=-1, le=2**63 - 1)] | None = None  # -1: a random seed
    stop: str | list[str] | None = None
    temperature: Annotated[float, Meta(ge=0, le=100)] | None = None
    top_p: Annotated[float, Meta(ge=0, le=1)] | None = None  # 0: only the most probable token
    max_tokens: Annotated[int, Meta(ge=1, lt=2**31)] | None = None
    logit_bias: dict[str, Annotated[float, Meta(ge=-100, le=100)]] | None = None
    presence_penalty: Annotated[float, Meta(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Meta(ge=-2, le=2)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    # vLLM's
    structured_outputs: StructuredOutputs | None = None
    top_k: Annotated[int, Meta(ge=-1, lt=2**31)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=100)] | None = None
    ignore_eos: bool | None = None
    return_token_ids: bool | None = None
    # for records of the provider: no effect on the answer
    user: str | None = None
    metadata: dict[str, str] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None


class CompletionRequest(_Request):
    """A request to ``/v1/completions``."""

    prompt: Any  # a text, token ids, or a list of these
    logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    echo: bool | None = None


class Message(msgspec.Struct, forbid_unknown_fields=True):
    """One message of a chat, in OpenAI's form."""

    role: str
    content: str | list[Any] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    # fields of an earlier answer that OpenAI's client sends back
    refusal: str | None = None
    parsed: Any = None
    annotations: list[Any] | None = None  # citations in the text
    audio: None = None
    # the thoughts of an earlier answer; the template decides whether they are in the prompt
    reasoning_content: str | None = None
    reasoning: str | None = None
    function_call: None = None


class CalledFunction(msgspec.Struct, forbid_unknown_fields=True):
    """Name and arguments of the function that an earlier answer called."""

    name: str
    arguments: str
    parsed_arguments: Any = None


class ToolCall(msgspec.Struct, forbid_unknown_fields=True):
    """A tool call in a message of an earlier answer."""

    id: str
    function: CalledFunction
    type: str = "function"
    index: int | None = None


class ChatRequest(_Request):
    """A request to ``/v1/chat/completions``."""

    messages: Annotated[list[Message], Meta(min_length=1)]
    max_completion_tokens: Annotated[int, Meta(ge=1, lt=2**31)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    tools: list[Tool] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None  # for templates that read it
    # vLLM's
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None


class AdapterRequest(msgspec.Struct, forbid_unknown_fields=True):
    """A request to load or unload an adapter, in vLLM's form. `lora_path` is a path in the server's `lora_folder`."""

    lora_name: Annotated[str, Meta(min_length=1, max_length=200)]
    lora_path: str | None = None


_GUIDED = ("json", "regex", "choice", "grammar")
_TOOLS = "former names of tools and tool_choice; use these"
_ONLY: dict[str, tuple[tuple[Any, ...], str]] = {
    **{f"guided_{name}": ((), f"give structured_outputs: {{'{name}': ...}}") for name in _GUIDED},
    "functions": (([],), _TOOLS),
    "function_call": (("none",), _TOOLS),
    "best_of": ((1,), "sequences are not ranked; leave it out, and give n"),
    "suffix": (("",), "text is not filled in; leave it out"),
    "store": ((False,), "answers are not stored; leave it out"),
    "service_tier": (("auto", "default"), "there is one tier; leave it out"),
    "modalities": ((["text"],), "answers are text; leave it out"),
    "audio": ((), "answers are text; leave it out"),
    "verbosity": (("medium",), "it has no effect here; leave it out, or ask for it in the prompt"),
    "prompt_cache_retention": (("in_memory", "in-memory"), "prompts are kept only in memory; leave it out"),
}
"""Fields that are accepted only with these values, which have no effect; and the reason for the error message."""

_RECORDS = (
    "id", "opts", "_meta", "cycle", "created_at", "createdAt", "timestamp", "parent_id", "parentId", "model", "status",
    "usage", "metadata", "finish_reason",
)  # fmt: skip
"""Fields of messages that clients use for their own records: ignored. Other unknown fields are refused."""

Kind = TypeVar("Kind", bound=msgspec.Struct)


class Asked(msgspec.Struct):
    """A checked request, ready to run.

    Attributes:
        works: the sequences to run: `n` for each prompt.
        prompts: for each sequence, the text of its prompt if the answer must repeat the prompt; else empty.
        uses: the tools that an answer may call; None: no tools.
    """

    request: CompletionRequest | ChatRequest
    works: list[Work]
    prompts: list[str]
    config: GenerationConfig
    uses: ToolUse | None = None


def read_request(body: bytes, kind: type[Kind]) -> Kind:
    """Parse the body of a request; raise `ApiError` if it is no JSON object, or a field does not fit."""
    try:
        fields = msgspec.json.decode(body.removeprefix(codecs.BOM_UTF8))
    except (msgspec.DecodeError, RecursionError, ValueError) as error:
        raise ApiError(400, f"the body is not valid JSON: {error}", code="invalid_json") from None
    if not isinstance(fields, dict):
        raise ApiError(400, "the body has to be a JSON object", code="invalid_json")
    return as_request(_cleaned(fields, _NESTED), kind)


def as_request(fields: dict[str, Any], kind: type[Kind]) -> Kind:
    """Convert the fields of a JSON request to a typed request; raise `ApiError` for a field that does not fit."""
    for name, (values, why) in _ONLY.items():
        if name in kind.__struct_fields__:
            continue
        value = fields.pop(name, None)
        if value is not None and not any(type(value) is type(v) and value == v for v in values):
            raise ApiError(400, f"{name}: {why}", name, "unsupported")
    for message in fields["messages"] if isinstance(fields.get("messages"), list) else ():
        for name in _RECORDS if isinstance(message, dict) else ():
            message.pop(name, None)
    try:
        return msgspec.convert(fields, kind)
    except (msgspec.ValidationError, RecursionError) as error:
        match = re.search(r"(?:unknown field|required field) `([^`]*)`|\$\.(\w+)", str(error))
        said = str(error).replace("Object ", "The request ")
        logged = re.sub("'.*'", "'...'", said, flags=re.DOTALL)  # hides values of the client
        raise ApiError(400, said, match and (match[1] or match[2]), logged=logged) from None


def read_adapter_request(body: bytes) -> AdapterRequest:
    """Parse a request to load or unload an adapter; raise `ApiError` for other bodies."""
    try:
        return msgspec.json.decode(body, type=AdapterRequest)
    except (msgspec.DecodeError, RecursionError, ValueError) as error:
        raise ApiError(400, str(error).replace("Object ", "The request ")) from None


_NESTED: dict[str, Any] = {
    "messages": {"tool_calls": {"function": {}}, "content": {}},
    "tools": {"function": {}},
    "stream_options": {},
    "response_format": {"json_schema": {}},
    "structured_outputs": {},
    "input": {"content": {}},
    "text": {"format": {}},
    "reasoning": {},
    "prompt": {},
    "tokens": {},
}
"""Fields inside which null counts as absent and 2.0 as 2. In schemas and arguments, such values stay unchanged."""


def _cleaned(tree: Any, nested: dict[str, Any]) -> Any:
    """Return JSON data without null fields, which count as absent. Floats without a fraction become whole numbers."""
    if isinstance(tree, list):
        return [_cleaned(one, nested) for one in tree]
    if isinstance(tree, dict):
        fields = {name: value for name, value in tree.items() if value is not None}
        return {n: _cleaned(v, nested.get(n, {})) if n in nested or type(v) is float else v for n, v in fields.items()}
    return int(tree) if type(tree) is float and tree.is_integer() and abs(tree) < 2**53 else tree


def prepare(
    session: DecodeSession, request: CompletionRequest | ChatRequest, most: int, adapter: str | None = None
) -> Asked:
    """Check a request, and convert it to prompts and settings; this runs the tokenizer, which may take time.

    A request may have `most` sequences. `adapter` is the name of an adapter, or None. Raises `ApiError` if the request
    cannot be run, and `OptionError` or `PromptError` if the session refuses a setting or a prompt.
    """
    if request.stream_options is not None and not request.stream:
        raise ApiError(400, "stream_options are for streams; leave them out, or set stream", "stream_options")
    count = request.n or 1
    asked = count * (1 if isinstance(request, ChatRequest) else len(_several(request.prompt)))
    if asked > most:
        raise ApiError(400, f"the request asks for {asked} sequences; the most for a request is {most}", "n")
    tokens, texts, limit = _chat(session, request) if isinstance(request, ChatRequest) else _prompts(session, request)
    for prompt in tokens:
        _check_prompt(session, prompt)
    works = [Work(prompt, index) for prompt in tokens for index in range(count)]
    prompts = [text for text in texts for _ in range(count)]
    uses = None
    if isinstance(request, ChatRequest):
        try:
            parallel = request.parallel_tool_calls is not False
            uses = use_tools(session, request.tools or [], request.tool_choice, parallel=parallel)
        except OptionError as error:
            raise _quoting(error, "tools", "they cannot be used", f"tools: {error}") from None
    config = replace(_config(session, request, limit, uses), adapter=adapter)
    return Asked(request, works, prompts, config, uses)


def _chat(session: DecodeSession, request: ChatRequest) -> tuple[list[list[int]], list[str], int]:
    messages = []
    for at, message in enumerate(request.messages):
        if message.role not in ("system", "developer", "user", "assistant", "tool"):
            raise ApiError(400, f"messages[{at}].role: supported: system, developer, user, assistant, tool", "messages")
        if message.content is None and not message.tool_calls:
            raise ApiError(400, f"messages[{at}].content is missing", "messages")
        text = joined_text(message.content or "", {"text": "text", "refusal": "refusal"})
        if text is None:
            raise ApiError(400, f"messages[{at}].content: expected a text, or parts of type text", "messages")
        fields: dict[str, Any] = {"role": message.role, "content": text, "name": message.name}
        if message.tool_calls:
            fields["tool_calls"] = [_called(call, at) for call in message.tool_calls]
        fields["tool_call_id"] = message.tool_call_id
        fields["reasoning_content"] = message.reasoning_content or message.reasoning
        messages.append({name: value for name, value in fields.items() if value is not None})
    tools = [msgspec.to_builtins(tool) for tool in request.tools or []]
    for tool in tools:  # a template may test whether a field exists
        tool.pop("cache_control", None)
        tool["function"] = {name: value for name, value in tool["function"].items() if value is not None}
    tokens = _rendered(session, request, messages, tools)
    limit = request.max_completion_tokens or request.max_tokens
    capacity = session.cache.capacity
    return [tokens], [""], limit or (_MOST_UNBOUNDED if capacity is None else max(1, capacity - len(tokens) + 1))


def _rendered(session: DecodeSession, request: ChatRequest, messages: list[Any], tools: list[Any]) -> list[int]:
    values: dict[str, Any] = {} if request.reasoning_effort is None else {"reasoning_effort": request.reasoning_effort}
    if request.reasoning_effort == "none":
        values["enable_thinking"] = False
    values |= request.chat_template_kwargs or {}
    how: dict[str, Any] = {"values": values} if values else {}
    if request.continue_final_message:
        if request.add_generation_prompt:
            said = "continue_final_message contradicts add_generation_prompt; set add_generation_prompt to false"
            raise ApiError(400, said, "continue_final_message")
        how["continues"] = True
    elif request.add_generation_prompt is False:
        how["generation_prompt"] = False
    try:
        if (tools or any(m.get("tool_calls") or m["role"] == "tool" for m in messages)) and _takes_no_tools(session):
            messages, tools = in_text(messages, tools), []
        return session.render_chat(messages, tools or None, **how)
    except OptionError as error:
        raise _quoting(error, "messages", "the chat template does not take them") from None


def _takes_no_tools(session: DecodeSession) -> bool:
    """Return True if the chat template ignores tools; False if it supports them, even in an unknown form of calls."""
    try:
        return form_of(session) is GENERIC
    except (OptionError, PromptError):
        return False


def _called(call: ToolCall, at: int) -> dict[str, Any]:
    """Return an earlier tool call in the form of chat templates. Its arguments stay unchanged; "" becomes ``{}``."""
    text = call.function.arguments.strip() or "{}"
    try:
        arguments = json.loads(text)
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        raise ApiError(400, f"messages[{at}].tool_calls: the arguments of a call have to be a JSON object", "messages")
    return {"id": call.id, "type": call.type, "function": {"name": call.function.name, "arguments": text}}


def joined_text(content: str | list[Any], fields: Mapping[str, str]) -> str | None:
    """Return the text of a message; None if a part is not text. `fields` maps a part's type to its field with text."""
    if isinstance(content, str):
        return content
    texts = [p.get(fields.get(str(p.get("type")), "")) if isinstance(p, dict) else None for p in content]
    strings = [text for text in texts if isinstance(text, str)]
    return "".join(strings) if len(strings) == len(texts) else None


def _prompts(session: DecodeSession, request: CompletionRequest) -> tuple[list[list[int]], list[str], int]:
    if request.echo and request.logprobs is not None:
        raise ApiError(400, "echo: tokens of the prompt have no logprobs; leave out echo or logprobs", "echo")
    several = _several(request.prompt)
    tokens = [_ids(session, prompt) for prompt in several]
    texts = [""] * len(tokens)
    if request.echo:
        if session.tokenizer is None:
            raise ApiError(400, "echo needs a tokenizer, and there is none; use return_token_ids", "echo")
        texts = [p if isinstance(p, str) else str(session.tokenizer.decode(p)) for p in several]
    return tokens, texts, request.max_tokens or _MOST_COMPLETION


def _several(prompt: Any) -> list[Any]:
    return prompt if isinstance(prompt, list) and prompt and not _is_ids(prompt) else [prompt]


def _is_ids(prompt: Any) -> bool:
    return isinstance(prompt, list) and all(type(token) is int for token in prompt)


def _ids(session: DecodeSession, prompt: Any) -> list[int]:
    if _is_ids(prompt):
        return list(prompt)
    if not isinstance(prompt, str):
        raise ApiError(400, "prompt: give a text, a list of token ids, or a list of these", "prompt")
    if session.tokenizer is None:
        raise ApiError(400, "prompt is text, and there is no tokenizer; give token ids", "prompt", "no_tokenizer")
    return [int(token) for token in session.tokenizer.encode(prompt)]


def check_known(session: DecodeSession, tokens: list[int], field: str) -> None:
    """Raise `ApiError` if the model does not know one of the token ids in this field of a request."""
    wrong = next((token for token in tokens if not 0 <= token < session.vocab), None)
    if wrong is not None:
        raise ApiError(400, f"token id {wrong} is out of range; the model has 0 to {session.vocab - 1}", field)


def _check_prompt(session: DecodeSession, prompt: list[int]) -> None:
    if not prompt:
        raise ApiError(400, "the prompt is empty; it needs at least one token", "prompt")
    check_known(session, prompt, "prompt")
    capacity = session.cache.capacity
    if capacity is not None and len(prompt) > capacity:
        said = f"the prompt has {len(prompt)} tokens, and the model takes {capacity} with the answer"
        raise ApiError(400, f"{said}; give a shorter one", "prompt", "context_length_exceeded")


def _config(
    session: DecodeSession, request: CompletionRequest | ChatRequest, limit: int, uses: ToolUse | None
) -> GenerationConfig:
    """Return a request's settings. Missing ones come from the model's recommended sampling, or else the session."""
    own = {"temperature": 1.0, "top_k": 0, "top_p": 1.0} | session.sampling
    asked = {name: value for name in _SAMPLING if (value := getattr(request, name)) is not None}
    sampling = own | asked
    temperature = sampling["temperature"]
    settings: dict[str, Any] = {"max_new_tokens": limit, "do_sample": temperature > 0}
    if temperature > 0:  # greedy decoding takes none of these
        settings |= {
            **{name: sampling.get(name) for name in ("temperature", "top_k", "min_p")},
            "top_p": max(sampling["top_p"], _LEAST),
            "seed": None if request.seed == -1 else request.seed,
        }
    settings |= {name: sampling[name] for name in _PENALTIES if name in sampling}
    stops = [request.stop] if isinstance(request.stop, str) else request.stop or []
    if stops:
        if session.tokenizer is None:
            raise ApiError(400, "stop needs a tokenizer, and there is none", "stop", "no_tokenizer")
        if len(stops) > 16 or not all(0 < len(stop) <= 1000 for stop in stops):
            raise ApiError(400, "stop: give at most 16 texts of 1 to 1000 characters", "stop")
        settings["stop_strings"] = stops
    if request.logit_bias:
        settings["sequence_bias"] = _biases(session, request.logit_bias)
    if uses is not None:
        settings["grammar"] = uses.grammar
    for field in ("response_format", "structured_outputs"):
        if field == "structured_outputs" or uses is None or not uses.required:  # the format is for text, not calls
            _add_grammar(session, request, field, settings)
    if request.ignore_eos:
        if "grammar" in settings:
            raise ApiError(400, "ignore_eos: a grammar or tools say where the text ends; leave it out", "ignore_eos")
        settings |= {"eos_token_id": (), "forced_eos_token_id": None}
    most = request.logprobs if isinstance(request, CompletionRequest) else request.top_logprobs
    if isinstance(request, ChatRequest) and not request.logprobs:
        if most:
            raise ApiError(400, "top_logprobs needs logprobs; set logprobs to true", "top_logprobs")
    elif isinstance(request, ChatRequest) or most is not None:
        settings |= {"output_logprobs": True, "top_logprobs": most or 0}
    try:
        return changed(session.config, settings)
    except OptionError as error:
        raise _quoting(error, None, "a setting is not possible") from None


def _quoting(error: OptionError, param: str | None, why: str, message: str | None = None) -> ApiError:
    """Return an error whose message may quote the client's text. The log gets `param` and `why` instead."""
    return ApiError(400, message or str(error), param, logged=f"{param}: {why}" if param else why)


def _add_grammar(
    session: DecodeSession, request: CompletionRequest | ChatRequest, field: str, settings: dict[str, Any]
) -> None:
    asked = getattr(request, field)
    try:
        grammar = None if asked is None else grammar_of(session, asked)
    except OptionError as error:
        raise _quoting(error, field, "no grammar can be made of it", f"{field}: {error}") from None
    if grammar is None:
        return
    if "grammar" in settings:
        said = "another field already restricts the answer; leave out one of these fields"
        raise ApiError(400, f"{field}: {said}", field)
    settings["grammar"] = grammar


def _biases(session: DecodeSession, biases: dict[str, float]) -> dict[int | tuple[int, ...], float]:
    for token in biases:
        if not re.fullmatch(r"[0-9]{1,9}", token) or int(token) >= session.vocab:
            said = f"{token[:40]!r} is not a token id; the model has 0 to {session.vocab - 1}"
            raise ApiError(400, f"logit_bias: {said}", "logit_bias")
    return dict(session.config.sequence_bias) | {int(token): bias for token, bias in biases.items()}

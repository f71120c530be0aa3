"""Serves OpenAI's Responses API without a store: requests become chats, and answers become items and events.

Each request has the whole conversation in its ``input``.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from trt_kvcache.runtime.events import FinishReason, TokenEvent
from trt_kvcache.serve.answers import Answer
from trt_kvcache.serve.api_requests import ApiError, ChatRequest, as_request, joined_text

_STATELESS = "nothing is stored here; send the whole conversation in input"
_REFUSED = {
    "previous_response_id": _STATELESS,
    "conversation": _STATELESS,
    "prompt": "prompts are not stored here; send the text in input",
    "max_tool_calls": "tools run at the client, which counts its calls; leave it out",
}


class TextSettings(msgspec.Struct, forbid_unknown_fields=True):
    """The field `text` of a request: the form of the answer's text, such as a JSON schema."""

    format: dict[str, Any] | None = None
    verbosity: Literal["medium"] | None = None


class Reasoning(msgspec.Struct, forbid_unknown_fields=True):
    """The field `reasoning` of a request: the reasoning effort, for chat templates that read it."""

    effort: str | None = None
    summary: str | None = None  # there are no summaries of thoughts
    generate_summary: str | None = None


class ResponsesRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A request to ``/v1/responses``."""

    input: str | list[dict[str, Any]]
    model: str | None = None
    instructions: str | None = None
    max_output_tokens: Annotated[int, Meta(ge=1, lt=2**31)] | None = None
    temperature: float | None = None
    top_p: float | None = None
    stream: bool | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    text: TextSettings | None = None
    reasoning: Reasoning | None = None
    top_logprobs: Literal[0] | None = None
    metadata: dict[str, str] | None = None
    # ignored: no effect on the answer
    store: bool | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    stream_options: dict[str, Any] | None = None
    service_tier: Literal["auto", "default"] | None = None
    truncation: Literal["disabled", "auto"] | None = None
    background: Literal[False] | None = None
    include: list[Literal["reasoning.encrypted_content"]] | None = None
    # refused by name
    previous_response_id: str | None = None
    conversation: Any = None
    prompt: Any = None
    max_tool_calls: int | None = None


def as_chat(request: ResponsesRequest) -> ChatRequest:
    """Convert a request of the Responses API to a chat request.

    Raises `ApiError` if the request refers to something that would have to be stored, or has an unknown item.
    """
    for name, why in _REFUSED.items():
        if getattr(request, name) is not None:
            raise ApiError(400, f"{name}: {why}", name, "unsupported")
    fields: dict[str, Any] = {
        "messages": _messages(request),
        "max_completion_tokens": request.max_output_tokens,
        "reasoning_effort": request.reasoning and request.reasoning.effort,
        "response_format": _format(request.text),
        "tools": [_tool(tool) for tool in request.tools or []] or None,
        "tool_choice": _choice(request.tool_choice),
        **{name: getattr(request, name) for name in ("model", "temperature", "top_p", "parallel_tool_calls")},
    }
    return as_request({name: value for name, value in fields.items() if value is not None}, ChatRequest)


def _messages(request: ResponsesRequest) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    if request.instructions:
        messages.append({"role": "system", "content": request.instructions})
    items = [{"role": "user", "content": request.input}] if isinstance(request.input, str) else request.input
    for at, item in enumerate(items):
        kind = item.get("type", "message")
        if kind == "message":
            messages.append({"role": item.get("role", "user"), "content": _content(item.get("content"), at)})
        elif kind == "function_call":
            if not (messages and messages[-1]["role"] == "assistant"):
                messages.append({"role": "assistant"})
            function = {"name": str(item.get("name")), "arguments": str(item.get("arguments", ""))}
            call = {"id": str(item.get("call_id")), "type": "function", "function": function}
            messages[-1].setdefault("tool_calls", []).append(call)
        elif kind == "function_call_output":
            content = _content(item.get("output"), at)
            messages.append({"role": "tool", "tool_call_id": str(item.get("call_id")), "content": content})
        elif kind == "item_reference":
            raise ApiError(400, f"input[{at}]: {_STATELESS}", "input", "unsupported")
        elif kind != "reasoning":  # thoughts of an earlier answer are ignored: no template needs them
            known = "message, function_call, function_call_output, reasoning"
            raise ApiError(400, f"input[{at}].type is {str(kind)[:40]!r}; supported: {known}", "input", "unsupported")
    return messages


_TEXTS = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}
"""For each type of a content part: the field with the text."""


def _content(content: Any, at: int) -> str:
    text = joined_text(content if isinstance(content, (str, list)) else [content], _TEXTS)
    if text is None:
        raise ApiError(400, f"input[{at}]: expected a text, or parts of type input_text or output_text", "input")
    return text


def _format(text: TextSettings | None) -> dict[str, Any] | None:
    """Convert a response format to the form of chat requests, which nest the schema one level deeper."""
    asked = text and text.format
    if not asked or asked.get("type") != "json_schema":
        return asked or None
    return {"type": "json_schema", "json_schema": {name: asked[name] for name in asked if name != "type"}}


def _tool(tool: dict[str, Any]) -> dict[str, Any]:
    if tool.get("type") != "function":
        said = f"there is no tool of type {str(tool.get('type'))[:40]!r} here; supported: function"
        raise ApiError(400, f"tools: {said}", "tools", "unsupported")
    return {"type": "function", "function": {name: value for name, value in tool.items() if name != "type"}}


def _choice(choice: Any) -> Any:
    """Convert a tool choice to the form of chat requests, which nest the name one level deeper."""
    if isinstance(choice, dict) and choice.get("type") == "function" and "name" in choice:
        return {"type": "function", "function": {"name": choice["name"]}}
    return choice


class ResponseAnswer:
    """Turns the events that a chat's `answer` collects into the answer or the stream of the Responses API."""

    def __init__(self, request: ResponsesRequest, answer: Answer, model: str) -> None:
        self._request, self._answer, self._model = request, answer, model
        self._id, self._number = f"resp_{secrets.token_hex(12)}", 0
        self._message_id = f"msg_{secrets.token_hex(12)}"
        self._items: list[dict[str, Any]] = []  # the complete items
        self._text = ""
        self._in_text = False

    def whole(self) -> dict[str, Any]:
        """Return the complete answer, after `answer` has got all events."""
        for _ in self._ends():
            pass
        return self._body(self._status())

    def first_lines(self) -> Iterator[bytes]:
        """Yield the events that begin a stream, before any token."""
        for kind in ("response.created", "response.in_progress"):
            yield self._event(kind, response=self._body("in_progress"))

    def lines(self, place: int, event: TokenEvent) -> Iterator[bytes]:
        """Add a token event of the sequence with index `place`; yield the stream's events for it."""
        text = self._answer.take(place, event)
        if text:
            yield from self._begins_text()
            self._text += text
            yield self._event(
                "response.output_text.delta", delta=text, logprobs=[], content_index=0, **self._place(self._message_id)
            )
        ended = event.finish_reason is not None
        if ended or len(self._answer.calls(0)) > self._called:
            yield from self._ends(whole=ended)
        if ended:
            status = self._status()
            yield self._event(f"response.{status}", response=self._body(status))

    def last_lines(self) -> tuple[bytes, ...]:
        """Return nothing: the last event of a sequence completes the stream."""
        return ()

    def failed(self, error: ApiError) -> bytes:
        """Return the event that ends a stream after an error."""
        body = self._body("failed") | {"error": {"code": "server_error", "message": error.message}}
        return self._event("response.failed", response=body)

    @property
    def _called(self) -> int:
        return sum(item["type"] == "function_call" for item in self._items)

    def _begins_text(self) -> Iterator[bytes]:
        if not self._in_text:
            self._in_text = True
            place = self._place(self._message_id)
            item = self._message("in_progress", [])
            yield self._event("response.output_item.added", item=item, output_index=place["output_index"])
            yield self._event("response.content_part.added", part=_part(""), content_index=0, **place)

    def _ends(self, *, whole: bool = True) -> Iterator[bytes]:
        """Yield the events that end the text (before a tool call or at the end), and the events of new calls."""
        calls = self._answer.calls(0)
        self._text = self._answer.said(0)
        if whole and not calls and not self._items:  # an answer without tokens still has a message
            yield from self._begins_text()
        if not self._items and (self._in_text or self._text):
            place = self._place(self._message_id)
            item = self._message("completed", [_part(self._text)])
            yield self._event("response.output_text.done", text=self._text, logprobs=[], content_index=0, **place)
            yield self._event("response.content_part.done", part=_part(self._text), content_index=0, **place)
            yield self._event("response.output_item.done", item=item, output_index=place["output_index"])
            self._items.append(item)
        for call in calls[self._called :]:
            item = {
                "type": "function_call", "id": f"fc_{secrets.token_hex(12)}", "call_id": call["id"],
                "status": "completed", **call["function"],
            }  # fmt: skip
            place, arguments = self._place(item["id"]), item["arguments"]
            begun = item | {"arguments": "", "status": "in_progress"}
            yield self._event("response.output_item.added", item=begun, output_index=place["output_index"])
            yield self._event("response.function_call_arguments.delta", delta=arguments, **place)
            named = {"arguments": arguments, "name": item["name"]}
            yield self._event("response.function_call_arguments.done", **named, **place)
            yield self._event("response.output_item.done", item=item, output_index=place["output_index"])
            self._items.append(item)

    def _status(self) -> str:
        cut = self._answer.finish_reason(0) in (FinishReason.LENGTH, FinishReason.CAPACITY)
        return "incomplete" if cut else "completed"

    def _place(self, item: str) -> dict[str, Any]:
        return {"item_id": item, "output_index": len(self._items)}

    def _message(self, status: str, content: list[dict[str, Any]]) -> dict[str, Any]:
        same = {"type": "message", "id": self._message_id, "role": "assistant"}
        return same | {"status": status, "content": content}

    def _body(self, status: str) -> dict[str, Any]:
        request, usage = self._request, self._answer.usage
        said = {name: getattr(request, name) for name in ("instructions", "max_output_tokens", "user")}
        return {
            "id": self._id, "object": "response", "created_at": self._answer.created, "status": status,
            "error": None, "model": self._model, "output": list(self._items), "previous_response_id": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None, **said,
            "metadata": request.metadata or {}, "store": False, "background": False, "truncation": "disabled",
            "temperature": request.temperature, "top_p": request.top_p, "service_tier": "default",
            "tools": request.tools or [], "tool_choice": request.tool_choice or "auto",
            "parallel_tool_calls": request.parallel_tool_calls is not False,
            "reasoning": {"effort": request.reasoning and request.reasoning.effort, "summary": None},
            "text": {"format": (request.text and request.text.format) or {"type": "text"}},
            "usage": None if status == "in_progress" else {
                "input_tokens": usage["prompt_tokens"],
                "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
                "output_tokens": usage["completion_tokens"],
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": usage["total_tokens"],
            },
        }  # fmt: skip

    def _event(self, kind: str, **fields: Any) -> bytes:
        body: Mapping[str, Any] = {"type": kind, "sequence_number": self._number, **fields}
        self._number += 1
        return f"event: {kind}\ndata: {json.dumps(body, ensure_ascii=False)}\n\n".encode()


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}

"""Serves OpenAI's API over a serving core, as an ASGI application."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import logging
import re
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from trt_kvcache import __version__
from trt_kvcache.errors import OptionError, TrtKvCacheError
from trt_kvcache.runtime.events import TokenEvent
from trt_kvcache.runtime.session import DecodeSession
from trt_kvcache.serve.answers import Answer, TokenNames, whole_answer
from trt_kvcache.serve.api_requests import (
    LATER,
    ApiError,
    ChatRequest,
    CompletionRequest,
    as_api,
    check_known,
    find_adapter,
    prepare,
    read_adapter_request,
    read_request,
    too_many,
)
from trt_kvcache.serve.core import ServingCore
from trt_kvcache.serve.responses import ResponseAnswer, ResponsesRequest, as_chat

_log = logging.getLogger(__name__)
_LARGEST = 4 << 20
"""Most bytes of a body: enough for 500,000 token ids, or for a text of as many tokens."""
_GUARDED = ("/v1/", "/tokenize", "/detokenize")
"""Beginnings of paths that need a key, if there are keys."""
_ANSWER, _REASON = "trt_kvcache.answer", "trt_kvcache.reason"
_MOST_LOGGED = 200
"""Most characters of a reason in the log."""
_SECONDS = 60.0
"""Most seconds until a body has arrived."""

_Events = AsyncGenerator[tuple[int, TokenEvent], None]
_Kind = TypeVar("_Kind", CompletionRequest, ChatRequest)
_T = TypeVar("_T")


class Service:
    """The ASGI application that serves a session, which stays open, with OpenAI's API.

    Args:
        session: the session.
        name: name of the model.
        keys: API keys, of which each request needs one; empty: requests need no key.
        max_queue: most sequences that wait for a batch row.
        lora_folder: clients may load adapters from this folder, and unload adapters; None: they may do neither.
        origins: origins of web pages that may read the answers, such as ``https://example.org``; ``*``: any page.
        told: called after each request under /v1, with a log line that has no text of prompts or answers.

    Raises:
        OptionError: an origin is malformed.

    Attributes:
        app: the ASGI application.
        core: runs the sequences.
        draining: if set to True, new requests are refused.
        active: number of requests that are not answered yet.
    """

    def __init__(
        self,
        session: DecodeSession,
        name: str,
        keys: Sequence[str] = (),
        *,
        max_queue: int = 256,
        origins: Sequence[str] = (),
        lora_folder: Path | None = None,
        told: Callable[[str], None] | None = None,
    ) -> None:
        for origin in origins:
            if not re.fullmatch(r"\*|https?://[^/\s?#@]+", origin):
                raise OptionError(
                    f"--allow-origin {origin} is not an origin; give scheme, host and port alone, as browsers send "
                    "them: https://example.org, http://localhost:3000, or *"
                )
        self._session, self._name = session, name
        self._names = TokenNames(session.tokenizer)
        self._keys = [key.encode() for key in keys]
        self._since = int(time.time())
        self.draining, self.active, self.told = False, 0, told
        self.core = ServingCore(session, max_queue=max_queue, name=name)
        self._most = self.core.rows + max_queue
        routes = [
            Route("/", _page),
            Route("/health", self._health),
            Route("/ready", self._ready),
            Route("/metrics", self._metrics),
            Route("/version", self._version),
            Route("/v1/models", self._models),
            Route("/v1/models/{name:path}", self._model),
            Route("/v1/completions", partial(self._answer, kind=CompletionRequest), methods=["POST"]),
            Route("/v1/chat/completions", partial(self._answer, kind=ChatRequest), methods=["POST"]),
            Route("/v1/embeddings", self._embeddings, methods=["POST"]),
            Route("/v1/responses", self._responses, methods=["POST"]),
            Route("/tokenize", self._tokenize, methods=["POST"]),
            Route("/detokenize", self._detokenize, methods=["POST"]),
        ]
        if lora_folder is not None:
            self._lora_folder = lora_folder.resolve()
            routes.append(Route("/v1/load_lora_adapter", self._load, methods=["POST"]))
            routes.append(Route("/v1/unload_lora_adapter", self._unload, methods=["POST"]))
        handlers: dict[Any, Any] = {
            TrtKvCacheError: _refused, HTTPException: _no_route, ClientDisconnect: _gone, Exception: _failed,
        }  # fmt: skip
        starlette = Starlette(routes=routes, exception_handlers=handlers)
        starlette.router.redirect_slashes = False
        self.app: ASGIApp = _Door(self, starlette)
        if origins:  # added outside of `_Door`: browsers send preflight requests without a key
            self.app = CORSMiddleware(
                self.app, allow_origins=origins, allow_methods=["GET", "POST"], allow_headers=["*"]
            )

    def refusal(self, scope: Scope) -> ApiError | None:
        """Return the error for a request under /v1 that must be refused (key, shutdown, queue); None if it may run."""
        if self._keys and not self._has_key(scope):
            said = "no valid API key; send the header 'Authorization: Bearer KEY'"
            return ApiError(401, said, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})
        if scope["method"] == "POST" and self.draining:
            return ApiError(503, "the server is shutting down and takes no new requests", code="ending", headers=LATER)
        if scope["method"] == "POST" and self.active >= self._most:
            return too_many(f"{self.active} requests run or wait (at most {self._most} can); ask again later")
        return None

    def _has_key(self, scope: Scope) -> bool:
        header = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
        scheme, _, key = header.partition(b" ")
        # Compare all keys, so that the time does not show which one is similar.
        matches = [hmac.compare_digest(key.strip(), known) for known in self._keys]
        return any(matches) and scheme.lower() == b"bearer"

    # --- requests

    async def _health(self, request: Request) -> Response:
        said = "a step hangs" if self.core.hangs else "the core has ended"
        return _json({"status": "ok"}) if self.core.alive else _json({"status": said}, 503)

    async def _ready(self, request: Request) -> Response:
        ending = self.draining or not self.core.alive
        return _json({"status": "ending"}, 503) if ending else _json({"status": "ready"})

    async def _metrics(self, request: Request) -> Response:
        return Response(self.core.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def _version(self, request: Request) -> Response:
        return _json({"version": __version__})

    async def _models(self, request: Request) -> Response:
        return _json({"object": "list", "data": [self._card(), *map(self._card, self._session.adapters)]})

    async def _model(self, request: Request) -> Response:
        return _json(self._card(find_adapter(request.path_params["name"], self._name, self._session.adapters)))

    async def _load(self, request: Request) -> Response:
        asked = read_adapter_request(await _body(request))
        if asked.lora_name == self._name:
            raise ApiError(400, f"{self._name!r} is the model itself; give another name", "lora_name")
        try:
            path = (self._lora_folder / (asked.lora_path or asked.lora_name)).resolve()
            inside = path.is_relative_to(self._lora_folder)
            exists = inside and path.is_dir()
        except (OSError, ValueError):  # such as a name that no file system allows
            inside, exists = True, False
        if not inside:
            raise ApiError(403, "lora_path: adapters come from the server's own folder; give a path in it", "lora_path")
        if not exists:
            raise ApiError(400, "lora_path: no such folder among the server's adapters", "lora_path")
        await asyncio.to_thread(self._session.adapters.load, asked.lora_name, path)
        return _json(self._card(asked.lora_name))

    async def _unload(self, request: Request) -> Response:
        name = read_adapter_request(await _body(request)).lora_name
        if name not in self._session.adapters:
            raise ApiError(404, f"there is no adapter {name[:100]!r}", "lora_name", "model_not_found")
        self._session.adapters.unload(name)
        return _json({"id": name, "object": "model", "deleted": True})

    async def _embeddings(self, request: Request) -> Response:
        raise ApiError(404, "embeddings are not served: the model makes text; use /v1/completions", code="unsupported")

    async def _responses(self, http: Request) -> Response:
        request = read_request(await _body(http), ResponsesRequest)
        answer, events = await self._begin(http, request.model, as_chat(request))
        response = ResponseAnswer(request, answer, answer.model)
        if not request.stream:
            await _unless_gone(http, whole_answer(events, answer))
            return _json(response.whole())
        return await _streamed(http, events, response)

    async def _tokenize(self, http: Request) -> Response:
        request = read_request(await _body(http), TokenizeRequest)
        find_adapter(request.model, self._name, self._session.adapters)
        tokens = await asyncio.to_thread(tokenized, self._session, request)
        return _json({"tokens": tokens, "count": len(tokens), "max_model_len": self._session.cache.capacity})

    async def _detokenize(self, http: Request) -> Response:
        request = read_request(await _body(http), DetokenizeRequest)
        find_adapter(request.model, self._name, self._session.adapters)
        return _json({"prompt": await asyncio.to_thread(detokenized, self._session, request)})

    # --- answers

    async def _answer(self, http: Request, kind: type[_Kind]) -> Response:
        request = read_request(await _body(http), kind)
        answer, events = await self._begin(http, request.model, request)
        if not request.stream:
            return _json(await _unless_gone(http, whole_answer(events, answer)))
        return await _streamed(http, events, answer)

    async def _begin(
        self, http: Request, model: str | None, request: CompletionRequest | ChatRequest
    ) -> tuple[Answer, _Events]:
        adapter = find_adapter(model, self._name, self._session.adapters)
        asked = await asyncio.to_thread(prepare, self._session, request, self._most, adapter)
        answer = http.scope[_ANSWER] = Answer(asked, adapter or self._name, self._names)
        return answer, self.core.events(asked.works, asked.config)

    def _card(self, adapter: str | None = None) -> dict[str, Any]:
        card = {"id": adapter or self._name, "object": "model", "created": self._since, "owned_by": "trt-kvcache"}
        if adapter is not None:
            card["parent"] = self._name
        card |= {"max_model_len": self._session.cache.capacity, "max_num_seqs": self.core.rows}
        return card | {"sampling": self._session.sampling}


class _Door:
    """ASGI middleware: counts and logs requests; refuses requests without a key or during shutdown."""

    def __init__(self, service: Service, inner: ASGIApp) -> None:
        self._service, self._inner = service, inner

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not scope["path"].startswith(_GUARDED):
            await self._inner(scope, receive, send)
            return
        start, status = time.perf_counter(), 0

        async def watched(message: Message) -> None:
            nonlocal status
            status = message.get("status", status)
            await send(message)

        try:
            if (error := self._service.refusal(scope)) is not None:
                await _error(error)(scope, receive, watched)
                return
            self._service.active += 1
            try:
                await self._inner(scope, receive, watched)
            finally:
                self._service.active -= 1
        finally:
            if self._service.told is not None:
                self._service.told(_told(scope, status, time.perf_counter() - start))


def _told(scope: Scope, status: int, seconds: float) -> str:
    answer: Answer | None = scope.get(_ANSWER)
    reason = "".join(c if c.isprintable() else "?" for c in scope.get(_REASON, ""))[:_MOST_LOGGED]
    said = f": {reason}" if reason else "" if answer is None else f": {answer.told()}"
    left = status == 0 or (answer is not None and not answer.ended and not reason)
    gone = " (the client went away)" if left else ""
    return f"{scope['method']} {scope['path'][:60]} {status or 499}{gone}{said}; {seconds:.2f} s"


class _Stream(StreamingResponse):
    """A streamed response that closes its generator if the client goes away, even in the middle of a write."""

    async def stream_response(self, send: Send) -> None:
        async with aclosing(self.body_iterator):  # type: ignore[type-var]
            await super().stream_response(send)


_NO_CACHE = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


async def _body(http: Request) -> bytes:
    kind = http.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":  # a web page can send this type only after a preflight request
        raise ApiError(415, f"the Content-Type is {kind[:60]!r}; send application/json")
    body = bytearray()
    try:
        async with asyncio.timeout(_SECONDS):
            async for part in http.stream():
                body += part
                if len(body) > _LARGEST:
                    raise ApiError(413, f"the body has more than {_LARGEST} bytes; send a shorter prompt")
    except TimeoutError:
        raise ApiError(408, f"the body did not arrive within {_SECONDS:.0f} seconds") from None
    return bytes(body)


async def _unless_gone(http: Request, work: Awaitable[_T]) -> _T:
    """Return the result of `work`. If the client disconnects, cancel `work` and raise ClientDisconnect."""

    async def gone() -> None:
        while (await http.receive())["type"] != "http.disconnect":
            pass

    task, watch = asyncio.ensure_future(work), asyncio.ensure_future(gone())
    try:
        await asyncio.wait([task, watch], return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        for one in (task, watch):
            one.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)


async def _streamed(http: Request, events: _Events, answer: Answer | ResponseAnswer) -> Response:
    """Return a streamed response of server-sent events. An error before the first token still sets the HTTP status."""
    lines = _lines(await _unless_gone(http, anext(events)), events, answer)
    return _Stream(lines, media_type="text/event-stream", headers=_NO_CACHE)


async def _lines(
    first: tuple[int, TokenEvent], events: _Events, answer: Answer | ResponseAnswer
) -> AsyncIterator[bytes]:
    async with aclosing(events):
        for line in answer.first_lines():
            yield line
        try:
            item: tuple[int, TokenEvent] | None = first
            while item is not None:
                for line in answer.lines(*item):
                    yield line
                item = await anext(events, None)
        except TrtKvCacheError as error:
            yield answer.failed(_said(error))
            return
    for line in answer.last_lines():
        yield line


# --- the page

_HTML = Path(__file__).with_name("page.html").read_text(encoding="utf-8")
_SCRIPT = base64.b64encode(hashlib.sha256(_HTML.split("<script>")[1].split("</script>")[0].encode()).digest()).decode()
_PAGE_HEADERS = {
    # Only this page's own script may run, and it may contact only this server.
    "Content-Security-Policy": f"default-src 'none'; script-src 'sha256-{_SCRIPT}'; style-src 'unsafe-inline'; "
    "img-src data:; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Cache-Control": "no-cache",
}


async def _page(request: Request) -> Response:
    return Response(_HTML, headers=_PAGE_HEADERS, media_type="text/html")


# --- errors


async def _refused(request: Request, error: TrtKvCacheError) -> Response:
    refusal = _said(error)
    if refusal.status < 500:
        request.scope[_REASON] = refusal.logged
    return _error(refusal)


async def _no_route(request: Request, error: HTTPException) -> Response:
    return _error(ApiError(error.status_code, f"{request.method} {request.url.path}: {error.detail}"))


async def _gone(request: Request, error: ClientDisconnect) -> Response:
    return Response(status_code=499)  # the client has gone: nobody reads it


async def _failed(request: Request, error: Exception) -> Response:
    return _error(ApiError(500, "the server failed; its log says why"))


def _said(error: TrtKvCacheError) -> ApiError:
    refusal = as_api(error)
    if refusal.status == 500:
        _log.error("a sequence failed: %s", error)
    return refusal


def _error(error: ApiError) -> Response:
    return _json(error.body, error.status, error.headers)


def _json(body: dict[str, Any], status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(body), status, headers, "application/json")


class TokenizeRequest(msgspec.Struct, forbid_unknown_fields=True):
    """A request to tokenize a text, or the messages of a chat."""

    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    model: str | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class DetokenizeRequest(msgspec.Struct, forbid_unknown_fields=True):
    """A request to convert token ids to text."""

    tokens: list[int]
    model: str | None = None


def tokenized(session: DecodeSession, request: TokenizeRequest) -> list[int]:
    """Return the prompt tokens of a completion with this text, or of a chat with these messages.

    Raises `ApiError` if the request has both or neither, or there is no tokenizer. Passes on errors of the tokenizer.
    """
    tokenizer = _tokenizer(session)
    if (request.prompt is None) == (request.messages is None):
        raise ApiError(400, "give either prompt or messages", "prompt")
    if request.prompt is not None:
        special = request.add_special_tokens is not False
        return [int(token) for token in tokenizer.encode(request.prompt, special_tokens=special)]
    values = {"values": request.chat_template_kwargs} if request.chat_template_kwargs else {}
    how: dict[str, Any] = {"generation_prompt": request.add_generation_prompt is not False, **values}
    try:
        return session.render_chat(request.messages or [], **how)
    except OptionError as error:
        logged = "messages: the chat template does not take them"
        raise ApiError(400, str(error), "messages", logged=logged) from None


def detokenized(session: DecodeSession, request: DetokenizeRequest) -> str:
    """Return the text of the token ids in a request, without special tokens.

    Raises `ApiError` if the model does not know a token, or has no tokenizer.
    """
    check_known(session, request.tokens, "tokens")
    return str(_tokenizer(session).decode(request.tokens))


def _tokenizer(session: DecodeSession) -> Any:
    if session.tokenizer is None:
        raise ApiError(400, "there is no tokenizer beside the model", code="no_tokenizer")
    return session.tokenizer

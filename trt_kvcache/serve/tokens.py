"""Tokens of a text, and the text of tokens: vLLM's ``/tokenize`` and ``/detokenize``."""

from __future__ import annotations

from typing import Any

import msgspec

from trt_kvcache.errors import OptionError
from trt_kvcache.runtime.session import DecodeSession
from trt_kvcache.serve.protocol import ApiError

__all__ = ["DetokenizeRequest", "TokenizeRequest", "detokenized", "tokenized"]


class TokenizeRequest(msgspec.Struct, forbid_unknown_fields=True):
    """A text, or the messages of a chat."""

    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    model: str | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class DetokenizeRequest(msgspec.Struct, forbid_unknown_fields=True):
    """Token ids."""

    tokens: list[int]
    model: str | None = None


def tokenized(session: DecodeSession, request: TokenizeRequest) -> list[int]:
    """Return the tokens that a completion or a chat of this would begin with.

    Raises:
        ApiError: there is not one of text and messages, or no tokenizer.
        OptionError, PromptError: the chat template or the tokenizer fails on it.
    """
    tokenizer = _tokenizer(session)
    if (request.prompt is None) == (request.messages is None):
        raise ApiError(400, "give either prompt or messages", "prompt")
    if request.prompt is not None:
        return [
            int(t) for t in tokenizer.encode(request.prompt, special_tokens=request.add_special_tokens is not False)
        ]
    how: dict[str, Any] = {"values": request.chat_template_kwargs} if request.chat_template_kwargs else {}
    try:
        return session.render_chat(
            request.messages or [], generation_prompt=request.add_generation_prompt is not False, **how
        )
    except OptionError as error:
        logged = "messages: the chat template does not take them"
        raise ApiError(400, str(error), "messages", logged=logged) from None


def detokenized(session: DecodeSession, request: DetokenizeRequest) -> str:
    """Return the text of tokens, without special ones.

    Raises:
        ApiError: the model does not know a token, or there is no tokenizer.
    """
    wrong = next((token for token in request.tokens if not 0 <= token < session.vocab), None)
    if wrong is not None:
        raise ApiError(400, f"token id {wrong} is out of range; the model has 0 to {session.vocab - 1}", "tokens")
    return str(_tokenizer(session).decode(request.tokens))


def _tokenizer(session: DecodeSession) -> Any:
    if session.tokenizer is None:
        raise ApiError(400, "there is no tokenizer beside the model", code="no_tokenizer")
    return session.tokenizer

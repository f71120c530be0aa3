"""Builds the answers of OpenAI's API from the events of a session: complete ones, or chunks of a stream."""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing
from functools import cached_property
from typing import Any

import msgspec

from trt_kvcache.errors import OptionError
from trt_kvcache.runtime.events import FinishReason, TokenEvent
from trt_kvcache.runtime.requests import Generation
from trt_kvcache.runtime.text.tokenizer import TokenBytes
from trt_kvcache.serve.api_requests import ApiError, Asked, ChatRequest

REASONS = {
    FinishReason.EOS: "stop",
    FinishReason.STOP: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.CAPACITY: "length",
}
"""OpenAI's names of finish reasons."""


_NEVER = -9999.0
"""Replaces the log-probability of an impossible token, since JSON has no -inf. OpenAI uses the same number."""


class TokenNames:
    """Gives the text and bytes of tokens, for an answer's log-probabilities. The joined texts are the answer's text."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    @cached_property
    def _known(self) -> TokenBytes | None:
        read: Callable[[], TokenBytes] | None = getattr(self._tokenizer, "token_bytes", None)
        try:
            return None if read is None else read()
        except OptionError:  # the tokenizer's tokens are not bytes
            return None

    @property
    def has_text(self) -> bool:
        """True if there is a tokenizer."""
        return self._tokenizer is not None

    def of(self, token: int) -> dict[str, Any]:
        """Return the text and bytes of a token. Bytes that are not UTF-8 are spelled out, as in OpenAI's API."""
        known = self._known
        if known is None or token not in known.texts:
            text = "" if self._tokenizer is None else self._tokenizer.decode([token])
            if text and "\ufffd" not in text:
                return {"token": text, "bytes": list(text.encode())}
            return {"token": f"token_id:{token}", "bytes": None}
        data = known.texts[token]
        if token in known.special:
            return {"token": data.decode(errors="replace"), "bytes": None}
        try:
            name = data.decode()
        except UnicodeDecodeError:
            name = "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
        return {"token": name, "bytes": list(data)}


class Answer:
    """Collects the events of one request, and turns them into the answer of OpenAI's API.

    `created` is the Unix time of the request, in whole seconds.
    """

    def __init__(self, asked: Asked, model: str, names: TokenNames) -> None:
        self._asked, self._names = asked, names
        self._chat = isinstance(asked.request, ChatRequest)
        request = asked.request
        self._with_logprobs = asked.config.output_logprobs
        # Without a tokenizer, an answer consists of ids only.
        self._with_ids = bool(request.return_token_ids) or (not names.has_text and not self._chat)
        options = request.stream_options
        self._with_usage = options is not None and bool(options.include_usage)
        self._done = [Generation(work.tokens) for work in asked.works]
        self._logprobs: list[list[dict[str, Any]]] = [[] for _ in asked.works]
        self._said = [""] * len(asked.works)
        self._readers = None if asked.uses is None else [asked.uses.reader() for _ in asked.works]
        self._start, self._first = time.perf_counter(), 0.0
        self.model, self.created = model, int(time.time())
        name = f"{'chatcmpl' if self._chat else 'cmpl'}-{secrets.token_hex(12)}"
        self._head = {"id": name, "created": self.created, "model": model}

    def take(self, place: int, event: TokenEvent) -> str:
        """Add an event of the sequence with index `place`; return its text, without text that belongs to tool calls."""
        self._first = self._first or time.perf_counter()
        if self._with_logprobs and event.token is not None:
            self._logprobs[place].append(self._logprob(place, event))
        self._done[place].take(event)
        text = event.text
        if self._readers is not None:
            text = self._readers[place].push(text, last=event.finish_reason is not None)
        self._said[place] += text
        return text

    def whole(self) -> dict[str, Any]:
        """Return the complete answer, once every sequence has ended."""
        choices = []
        for place, done in enumerate(self._done):
            choice = self._choice(place, done.finish_reason, self._logprobs[place], done.tokens)
            if self._chat:
                calls, said = self.calls(place), self._said[place]
                choice["message"] = {"role": "assistant", "content": said or (None if calls else ""), "refusal": None}
                choice["message"] |= {"tool_calls": calls} if calls else {}
            else:
                choice["text"] = self._asked.prompts[place] + done.text
                if self._with_ids:
                    choice["prompt_token_ids"] = done.prompt
            choices.append(choice)
        body = {"object": "chat.completion" if self._chat else "text_completion", **self._head}
        body |= {"choices": choices, "usage": self.usage}
        if self._chat and self._with_ids:
            body["prompt_token_ids"] = self._done[0].prompt
        return body

    @property
    def ended(self) -> bool:
        """True if every sequence has ended."""
        return all(done.finish_reason for done in self._done)

    def told(self) -> str:
        """Return the present counts of tokens and times, as text for a line of the log."""
        usage, now = self.usage, time.perf_counter()
        tokens, first = usage["completion_tokens"], self._first - self._start
        later = tokens - len(self._done)  # rate without first tokens, which include the time of the prompt
        rate = f", {later / (now - self._first):.1f} tokens/s" if later > 0 and now > self._first else ""
        came = f", the first after {first:.2f} s" if self._first else ""
        return f"{usage['prompt_tokens']} prompt tokens, {tokens} new{came}{rate}"

    def first_lines(self) -> Iterator[bytes]:
        """Yield the chunks of a stream that come before any token: roles, or prompts to echo."""
        for place, done in enumerate(self._done):
            choice, more = self._choice(place, None, [], []), {}
            if self._chat:
                choice["delta"] = {"role": "assistant", "content": ""}
                more = {"prompt_token_ids": done.prompt} if self._with_ids else {}
            else:
                choice["text"] = self._asked.prompts[place]
                if self._with_ids:
                    choice["prompt_token_ids"] = done.prompt
            if self._chat or choice["text"] or self._with_ids:
                yield _line(self._chunk([choice]) | more)

    def lines(self, place: int, event: TokenEvent) -> Iterator[bytes]:
        """Add an event of the sequence with index `place`; yield the stream's chunk for it, if there is one."""
        known = len(self.calls(place))
        text = self.take(place, event)
        calls = [{"index": at, **call} for at, call in enumerate(self.calls(place)) if at >= known]
        tokens = [] if event.token is None else [event.token]
        said = self._logprobs[place][-len(tokens) :] if self._with_logprobs and tokens else []
        if not (text or calls or event.finish_reason or said or (tokens and self._with_ids)):
            return
        choice = self._choice(place, event.finish_reason, said, tokens)
        if self._chat:
            choice["delta"] = {"content": text} if text else {}
            choice["delta"] |= {"tool_calls": calls} if calls else {}
        else:
            choice["text"] = text
        yield _line(self._chunk([choice]))

    def last_lines(self) -> Iterator[bytes]:
        """Yield the last chunks of a stream: the token counts, if the request asks for them, and the end mark."""
        if self._with_usage:
            yield _line(self._chunk([]) | {"usage": self.usage})
        yield b"data: [DONE]\n\n"

    def failed(self, error: ApiError) -> bytes:
        """Return the chunk that ends a stream after an error."""
        return _line(error.body)

    def calls(self, place: int) -> list[dict[str, Any]]:
        """Return the complete tool calls of a sequence."""
        return [] if self._readers is None else self._readers[place].calls

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        body = {"object": "chat.completion.chunk" if self._chat else "text_completion", **self._head}
        body["choices"] = choices
        return body | ({"usage": None} if self._with_usage else {})

    def _choice(
        self, place: int, reason: FinishReason | None, logprobs: list[dict[str, Any]], tokens: list[int]
    ) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": place, "logprobs": None}
        choice["finish_reason"] = None if reason is None else REASONS.get(reason, "stop")
        if reason is FinishReason.EOS and self.calls(place):
            choice["finish_reason"] = "tool_calls"
        if self._with_logprobs and self._chat:
            content = [{**said["chosen"], "top_logprobs": said["top"]} for said in logprobs]
            choice["logprobs"] = {"content": content, "refusal": None}
        elif self._with_logprobs:
            choice["logprobs"] = {
                "tokens": [said["chosen"]["token"] for said in logprobs],
                "token_logprobs": [said["chosen"]["logprob"] for said in logprobs],
                "top_logprobs": [_by_name(said) for said in logprobs] if self._asked.config.top_logprobs else None,
                "text_offset": [said["offset"] for said in logprobs],
            }
        if self._with_ids:
            choice["token_ids"] = tokens
        return choice

    def _logprob(self, place: int, event: TokenEvent) -> dict[str, Any]:
        assert event.token is not None
        assert event.logprob is not None
        chosen = self._named(event.token, event.logprob)
        top = [self._named(*pair) for pair in event.top_logprobs]
        # Many tokenizers drop the space of the first token at the start of a text.
        first = not self._done[place].tokens and chosen["token"].startswith(" ")
        if first and event.text[:1] not in ("", " "):
            bare = chosen["token"][1:]
            if all(one["token"] != bare for one in top):
                for one in (chosen, *(one for one in top if one["token"] == chosen["token"])):
                    one |= {"token": bare, "bytes": one["bytes"] and one["bytes"][1:]}
        return {"chosen": chosen, "top": top, "offset": len(self._asked.prompts[place]) + len(self._done[place].text)}

    def _named(self, token: int, logprob: float) -> dict[str, Any]:
        return {**self._names.of(token), "logprob": max(logprob, _NEVER)}

    def said(self, place: int) -> str:
        """Return the text of a sequence so far, without tool calls."""
        return self._said[place]

    def finish_reason(self, place: int) -> FinishReason | None:
        """Return why a sequence has ended; None if it still runs."""
        return self._done[place].finish_reason

    @property
    def usage(self) -> dict[str, int]:
        """Counts of tokens so far, in OpenAI's form."""
        # The `n` sequences of a prompt share it: count it once.
        count = self._asked.request.n or 1
        prompt = sum(len(done.prompt) for done in self._done[::count])
        tokens = sum(len(done.tokens) for done in self._done)
        return {"prompt_tokens": prompt, "completion_tokens": tokens, "total_tokens": prompt + tokens}


def _by_name(said: dict[str, Any]) -> dict[str, float]:
    """Map the texts of the best tokens and of the chosen one to log-probabilities; equal texts get the highest one."""
    named = [*said["top"], said["chosen"]]
    return {one["token"]: one["logprob"] for one in reversed(named)}


def _line(chunk: dict[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(chunk) + b"\n\n"


async def whole_answer(events: AsyncGenerator[tuple[int, TokenEvent], None], answer: Answer) -> dict[str, Any]:
    """Return the answer after all events, or raise a sequence's error. Canceling this call ends the sequences."""
    async with aclosing(events):
        async for place, event in events:
            answer.take(place, event)
    return answer.whole()

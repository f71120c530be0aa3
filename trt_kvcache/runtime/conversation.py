"""A conversation that keeps its caches from turn to turn: each turn computes only new tokens."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import suppress
from typing import Any

from trt_kvcache.errors import CapacityError, SlotError
from trt_kvcache.runtime.events import TokenEvent
from trt_kvcache.runtime.generation.generation_config import GenerationConfig
from trt_kvcache.runtime.session import DecodeSession
from trt_kvcache.runtime.token_inputs import common_length


class Conversation:
    """A chat whose tokens stay in a session's caches, in one slot, from turn to turn.

    At each turn, the chat template writes the whole conversation again. If it writes earlier turns differently, for
    example without the model's thoughts, the slot is cropped to the first difference.

    Args:
        session: a session whose tokenizer has a chat template.
        system: the system message, or None.
        values: more variables for the chat template, such as ``{"enable_thinking": False}``.

    Attributes:
        messages: the messages so far, as ``{"role": "user", "content": "..."}``.
    """

    def __init__(
        self, session: DecodeSession, system: str | None = None, values: Mapping[str, Any] | None = None
    ) -> None:
        self._session, self._slot = session, -1
        self._how: dict[str, Any] = {"values": dict(values)} if values else {}
        self._again = 0  # number of earlier answers to the last message
        self.messages: list[dict[str, Any]] = []
        self.reset(system)

    @property
    def tokens(self) -> int:
        """Number of the conversation's tokens in the cache, or waiting to be written to it."""
        cache = self._session.cache
        return len(cache.tokens(self._slot)) if self._slot in cache else 0

    def reset(self, system: str | None) -> None:
        """Start a new conversation, with a system message or None."""
        self._free()
        self.messages = [] if system is None else [{"role": "system", "content": system}]

    @property
    def answered(self) -> bool:
        """True if the user's last message has an answer."""
        return bool(self.messages) and self.messages[-1]["role"] == "assistant"

    def say_again(self, config: GenerationConfig) -> Generator[TokenEvent]:
        """Yield the events of another answer to the last message. The new answer replaces the last one.

        Sampling uses other random numbers than for earlier answers. `say` lists the errors. If the answer cannot begin,
        the user's last message is dropped.
        """
        said = self.messages[-2]["content"]
        del self.messages[-2:]
        return self._say(said, config, self._again + 1)

    def say(self, text: str, config: GenerationConfig) -> Generator[TokenEvent]:
        """Add the user's next message, and yield the events of the answer. Closing the iterator ends the answer.

        Message and answer become part of the conversation, even if the answer was cut short.

        Raises:
            CapacityError: the conversation is longer than the cache; the message is dropped.
            OptionError, PromptError, SessionError: see `DecodeSession.add`; the message is dropped.
        """
        return self._say(text, config, 0)

    def _say(self, text: str, config: GenerationConfig, again: int) -> Generator[TokenEvent]:
        self.messages.append({"role": "user", "content": text})
        self._again = again
        try:
            tokens = self._session.render_chat(self.messages, **self._how)
            common = self._keep(tokens)
            slot = self._slot if common else None
            self._slot = self._session.add(tokens[common:], config, slot=slot, keep=True, index=again)
        except BaseException:
            self.messages.pop()
            raise
        answer = {"role": "assistant", "content": ""}
        self.messages.append(answer)
        try:
            while self._slot in self._session.running:
                for event in self._session.step():
                    if event.sequence == self._slot:
                        answer["content"] += event.text
                        yield event
        finally:
            if self._slot in self._session.cache:  # a failed step has freed it
                self._session.stop(self._slot)

    def _keep(self, tokens: list[int]) -> int:
        """Crop the slot to the first tokens that it has in common with `tokens`; return the number of these tokens."""
        cache = self._session.cache
        if self._slot not in cache or self._session.plan.prefill_in_one_step:  # the conversation is then one prompt
            self._free()
            return 0
        cached = cache.tokens(self._slot)
        common = min(common_length(cached, tokens), len(tokens) - 1)  # at least one token has to run
        try:
            if common < len(cached):
                cache.crop(self._slot, common)
        except CapacityError:  # circular caches and state cannot go back
            common = 0
        if common <= 0:
            self._free()
        return max(common, 0)

    def _free(self) -> None:
        with suppress(SlotError):
            self._session.remove(self._slot)

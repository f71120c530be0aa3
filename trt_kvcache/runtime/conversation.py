"""A conversation whose caches stay from turn to turn: each turn computes what is new of it, and nothing twice."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import suppress
from typing import Any

from trt_kvcache.errors import CapacityError, SlotError
from trt_kvcache.runtime.events import TokenEvent
from trt_kvcache.runtime.generation.config import GenerationConfig
from trt_kvcache.runtime.session import DecodeSession

__all__ = ["Conversation"]


class Conversation:
    """One chat in one slot of a session.

    The chat template writes the whole conversation at each turn. Tokens that the slot holds already stay; where the
    template writes earlier turns in another way, as those that leave out what a model thought, the slot goes back to
    the first difference.

    Args:
        session: with a tokenizer that has a chat template.
        system: the system message, or None.
        values: more names for the chat template, such as ``{"enable_thinking": False}``.

    Attributes:
        messages: so far, as ``{"role": "user", "content": "..."}``.
    """

    def __init__(
        self, session: DecodeSession, system: str | None = None, values: Mapping[str, Any] | None = None
    ) -> None:
        self._session, self._slot = session, -1
        self._how: dict[str, Any] = {"values": dict(values)} if values else {}
        self._again = 0  # answers to the last message before this one
        self.messages: list[dict[str, Any]] = []
        self.reset(system)

    @property
    def tokens(self) -> int:
        """Tokens in the slot."""
        cache = self._session.cache
        return len(cache.tokens(self._slot)) if self._slot in cache else 0

    def reset(self, system: str | None) -> None:
        """Start anew, with a system message or None."""
        self._free()
        self.messages = [] if system is None else [{"role": "system", "content": system}]

    @property
    def answered(self) -> bool:
        """There is an answer to the last message of the user."""
        return bool(self.messages) and self.messages[-1]["role"] == "assistant"

    def say_again(self, config: GenerationConfig) -> Generator[TokenEvent]:
        """Yield another answer to the last message, in the place of the one that there is.

        Where tokens are drawn, its random numbers are others.

        Raises:
            CapacityError, OptionError, PromptError, SessionError: see `say`; the last message is gone then.
        """
        said = self.messages[-2]["content"]
        del self.messages[-2:]
        return self._say(said, config, self._again + 1)

    def say(self, text: str, config: GenerationConfig) -> Generator[TokenEvent]:
        """Give the user's next message, and yield the answer as it comes. Closing the iterator ends the answer.

        Both become part of the conversation, an answer that was ended too.

        Raises:
            CapacityError: the conversation is longer than the cache; it is as before the message then.
            OptionError, PromptError, SessionError: see `DecodeSession.add`; the same.
        """
        return self._say(text, config, 0)

    def _say(self, text: str, config: GenerationConfig, again: int) -> Generator[TokenEvent]:
        self.messages.append({"role": "user", "content": text})
        self._again = again
        try:
            self._begin(self._session.render_chat(self.messages, **self._how), config)
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
            if self._slot in self._session.cache:  # a step that failed has freed it
                self._session.stop(self._slot)

    def _begin(self, tokens: list[int], config: GenerationConfig) -> None:
        common = self._keep(tokens)
        slot = self._slot if common else None
        self._slot = self._session.add(tokens[common:], config, slot=slot, keep=True, index=self._again)

    def _keep(self, tokens: list[int]) -> int:
        """Cut the slot to what it has in common with a conversation; return how many tokens these are."""
        cache = self._session.cache
        if self._slot not in cache:
            return 0
        if self._session.plan.whole_prompts:  # the whole conversation is one prompt
            self._free()
            return 0
        cached = cache.tokens(self._slot)
        alike = next((at for at, (a, b) in enumerate(zip(cached, tokens, strict=False)) if a != b), len(cached))
        common = min(alike, len(tokens) - 1)  # one at least has to run
        try:
            if common < len(cached):
                cache.crop(self._slot, common)
        except CapacityError:  # a ring or a state cannot go back
            common = 0
        if common <= 0:
            self._free()
        return max(common, 0)

    def _free(self) -> None:
        with suppress(SlotError):
            self._session.remove(self._slot)

"""The state of a running sequence, except its cache rows: tokens, settings, random numbers and text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from copy import copy

import numpy as np
import numpy.typing as npt

from trt_kvcache.errors import OptionError, PromptError, TrtKvCacheError
from trt_kvcache.runtime.events import FinishReason, SpeculationStats, TokenEvent
from trt_kvcache.runtime.generation.generation_config import GenerationConfig
from trt_kvcache.runtime.generation.sampling import Sampler
from trt_kvcache.runtime.runner import Logits
from trt_kvcache.runtime.text.incremental import TextStream, TokenDecoder

Tokens = npt.NDArray[np.int64]


class Continuation:
    """Continues one prompt: chooses tokens from logits, makes the events, and decides when to end. Uses no caches.

    Attributes:
        assisted: how many tokens a draft model guesses at a time; 0 without a draft model, or if prompt lookup guesses.
    """

    def __init__(
        self,
        sequence: int,
        prompt: Sequence[int] | Tokens,
        config: GenerationConfig,
        tokenizer: TokenDecoder | None = None,
        *,
        index: int | None = None,
    ) -> None:
        """Start the continuation of a prompt, whose token ids the caller has checked.

        `tokenizer` makes the text of events, and finds stop strings. `index` selects the random numbers: sequences with
        the same seed but different indices draw different numbers. None: `sequence` is the index.

        Raises `PromptError` if the prompt is empty, `OptionError` if there are stop strings, but no tokenizer.
        """
        if not len(prompt):
            raise PromptError(f"the prompt of sequence {sequence} is empty; it needs at least one token")
        if config.stops and tokenizer is None:
            raise OptionError(
                f"stop_strings {list(config.stops)} need a tokenizer; give one, or leave stop_strings out"
            )
        self.sequence, self.config, self.assisted = sequence, config, 0
        self.finish_reason: FinishReason | None = None
        self.speculation = SpeculationStats()
        self._prompt_length = self._length = len(prompt)
        self._most = self._length + config.max_new_tokens
        self._guesser: Sampler | None = None
        self._buffer: Tokens = np.empty(len(prompt) + min(config.max_new_tokens, 256), dtype=np.int64)
        self._buffer[: self._length] = prompt
        self._sampler = Sampler(config, sequence if index is None else index)
        self._text = None if tokenizer is None else TextStream(tokenizer, self.tokens, config.stops)

    @property
    def tokens(self) -> Tokens:
        """The prompt and the new tokens, int64; a view, valid until the next token."""
        return self._buffer[: self._length]

    @property
    def looks_at(self) -> int:
        """Number of scores, from the highest down, that `advance` needs; 0: the scores of all tokens."""
        return self._sampler.looks_at(self._length - self._prompt_length)

    def advance(self, logits: Logits) -> TokenEvent:
        """Choose the next token from the logits ``[V]`` after `tokens`, and return its event.

        `logits` may also be a `CHOICE` (only the highest scores). Raises `SessionError` if they have NaN or infinity,
        or the settings forbid every token; `OptionError` if the grammar forbids every token.
        """
        token, logprob = self._sampler.choose(logits, self.tokens, self._length - self._prompt_length)
        self._append(token)
        ended = token in self.config.eos_token_ids
        text = "" if self._text is None or ended else self._text.push(token)
        if ended:
            self.finish_reason = FinishReason.EOS
        elif self._text is not None and self._text.stopped:
            self.finish_reason = FinishReason.STOP
        elif self._length >= self._most:
            self.finish_reason = FinishReason.LENGTH
        text += self._rest()
        return self._event(token, text, logprob, self._sampler.top_logprobs(logits))

    @property
    def masked(self) -> bool:
        """True if a grammar limits the next tokens."""
        return self._sampler.masked

    def masks(self, guesses: Sequence[int], words: int) -> npt.NDArray[np.int32]:
        """Return the tokens that the grammar allows next and after each of D guesses, as int32 ``[D + 1, words]``.

        Bit ``t % 32`` of word ``t // 32`` allows token t. Masks after a forbidden guess are 0. So are masks for which
        the grammar raises an error; `advance` raises that error later.
        """
        count = self._length - self._prompt_length
        new = np.concatenate([self.tokens[self._prompt_length :], np.array(guesses, np.int64)])
        masks = np.zeros((len(guesses) + 1, words), np.int32)
        for i, row in enumerate(masks):
            if i and not masks[i - 1, guesses[i - 1] // 32] >> guesses[i - 1] % 32 & 1:
                break
            with suppress(TrtKvCacheError):
                mask = self._sampler.mask(new[: count + i], words)
                row[: mask.size] = mask
        return masks

    def finish(self, reason: FinishReason) -> TokenEvent:
        """End the sequence at the caller's request; return an event without a token, but with the remaining text."""
        self.finish_reason = reason
        return self._event(None, self._rest(), None)

    def guesses(self, most: int) -> int:
        """Return how many tokens (at most `most`) to guess, to be verified in the next step; 0: do not guess."""
        count = self.config.prompt_lookup_num_tokens or self.assisted
        # A step gives one token more than it has guesses, and guesses beyond the end of the sequence are useless.
        return 0 if self.speculation.impossible else max(0, min(count, most, self._most - self._length - 1))

    def draft(self, most: int) -> Tokens:
        """Guess up to `most` next tokens, int64: what followed the last tokens earlier in the text (prompt lookup)."""
        count = self.guesses(most)
        return look_up(self.tokens, count, self.config.max_matching_ngram_size) if count else self._buffer[:0]

    def guesser(self, count: int) -> Continuation:
        """Return a copy, with the same tokens and settings, for the draft model to continue by up to `count` tokens."""
        if self._guesser is None:
            self._guesser = self._sampler.guesser()
        draft = copy(self)
        draft._sampler, draft._text, draft.speculation, draft.assisted = self._guesser, None, SpeculationStats(), 0
        draft._buffer = np.concatenate([self.tokens, np.empty(count, np.int64)])
        draft._most = min(self._most, self._length + count)
        return draft

    def verify(self, draft: Sequence[int], logits: Logits) -> Iterator[TokenEvent]:
        """Choose tokens, and yield their events up to the first token that differs from its guess in `draft` ``[D]``.

        If all guesses are right, one more token follows. `logits` ``[D + 1, V]`` are the model's results for the
        update ``[last token, *draft]``. After N events, the first N tokens of the update stay in the caches; the caller
        removes the others. The tokens are the same as in single steps.
        """
        if len(draft):
            self.speculation.add(SpeculationStats(proposed=len(draft), updates=1))
        for position in range(len(draft) + 1):
            event = self.advance(logits[position])
            agreed = position < len(draft) and event.token == draft[position]
            # In place: the event refers to this object.
            self.speculation.accepted += agreed
            yield event
            if self.finish_reason or not agreed:
                break

    def _event(
        self, token: int | None, text: str, logprob: float | None, top: tuple[tuple[int, float], ...] = ()
    ) -> TokenEvent:
        reports = self.finish_reason is not None and bool(self.assisted or self.config.prompt_lookup_num_tokens)
        stats = self.speculation if reports else None
        return TokenEvent(self.sequence, token, text, logprob, self.finish_reason, stats, top)

    def _append(self, token: int) -> None:
        if self._length == self._buffer.size:
            self._buffer = np.concatenate([self._buffer, np.empty_like(self._buffer)])
        self._buffer[self._length] = token
        self._length += 1

    def _rest(self) -> str:
        if self.finish_reason is None or self._text is None:
            return ""
        rest = self._text.flush()
        # Held-back text, such as an incomplete character, can complete a stop string.
        if self._text.stopped:
            self.finish_reason = FinishReason.STOP
        return rest


def look_up(tokens: npt.NDArray[np.int64], count: int, max_ngram: int) -> npt.NDArray[np.int64]:
    """Propose up to `count` tokens that may follow `tokens` (int64 ``[T]``, prompt and generated tokens).

    Find the longest suffix (at most `max_ngram` tokens) that also occurs earlier. Propose the tokens after its
    latest occurrence that has `count` tokens after it; if none has, those after its first occurrence.
    """
    for size in range(min(max_ngram, tokens.size - 1), 0, -1):
        # Without the last token, so that the suffix does not find itself.
        grams = np.lib.stride_tricks.sliding_window_view(tokens[:-1], size)
        ends = np.flatnonzero((grams == tokens[tokens.size - size :]).all(axis=1)) + size
        if ends.size:
            full = ends[ends + count <= tokens.size]
            start = int(full[-1] if full.size else ends[0])
            return tokens[start : start + count].copy()
    return np.empty(0, dtype=np.int64)

"""Tokens to text while they come: no half characters, nothing taken back, stop strings found across tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from trt_kvcache.errors import SessionError

__all__ = ["TextStream", "TokenDecoder"]

_REPLACEMENT = "\ufffd"

_MOST_PENDING = 3
"""Bytes of an incomplete UTF-8 character; decoders write U+FFFD for each, or for all of them together."""

_CONTEXT = 8
"""Tokens that go before what is new: enough for a character, and for decoders that look one token back."""


class TokenDecoder(Protocol):
    """A class that turns token ids into text: `trt_kvcache.runtime.text.tokenizer.Tokenizer`."""

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of `tokens` without special tokens, U+FFFD for bytes that are no UTF-8."""
        ...


class TextStream:
    """The text of one growing sequence, in pieces that are final.

    A token can end inside a character, and its text can depend on the tokens before it (a leading space, the bytes of
    one character), so a window over the last tokens is decoded, and what is new in it and complete is given out.
    """

    def __init__(
        self, tokenizer: TokenDecoder, prompt: Sequence[int] | npt.NDArray[np.int64] = (), stops: Sequence[str] = ()
    ) -> None:
        """Start after the prompt, whose text is not given out.

        Args:
            tokenizer: turns tokens into text.
            prompt: tokens that come before; a space at the start of the first new token depends on them.
            stops: texts that end the stream, none of them empty.
        """
        self._tokenizer = tokenizer
        self._window = [int(token) for token in prompt[max(0, len(prompt) - _CONTEXT) :]]
        self._emitted = _complete(self._decode())
        self._settled = len(self._window)
        self._stops = StopStrings(stops)

    @property
    def stopped(self) -> bool:
        """True once a stop string came; nothing is given out after that."""
        return self._stops.matched

    def push(self, token: int) -> str:
        """Take one token; return the text that is certain now, which may be none."""
        self._window.append(token)
        text = self._decode()
        if not text.startswith(self._emitted):
            # The decoder took back what is out already (one that falls back to bytes does, where a character is
            # followed by a byte that fits none). What is out stays; go on from here.
            self._window, self._emitted, self._settled = [token], "", 0
            text = self._decode()
        complete = _complete(text)
        new = complete[len(self._emitted) :]
        if new:
            self._emitted = complete
        if new and complete == text:
            # Everything is out: the tokens since the last such moment are context enough, if they make sense alone.
            recent = self._window[self._settled :]
            alone = self._decode(recent)
            if text.endswith(alone):
                self._window, self._emitted = recent, alone
            self._settled = len(self._window)
        if len(self._window) > 4 * _CONTEXT:
            # Bytes that fit no character, one after another: without a bound, each would cost more than the last.
            self._window, self._settled = self._window[-_CONTEXT:], 0
            self._emitted = _complete(self._decode())
        return self._stops.push(new)

    def flush(self) -> str:
        """Return what was held back; incomplete characters are U+FFFD now."""
        rest = self._decode()[len(self._emitted) :]
        self._emitted += rest
        return self._stops.push(rest) + self._stops.flush()

    def _decode(self, tokens: Sequence[int] | None = None) -> str:
        """The text of these tokens, or of the window.

        Raises:
            SessionError: the tokenizer failed, as others do at ids that only the model knows.
        """
        tokens = self._window if tokens is None else tokens
        try:
            return self._tokenizer.decode(tokens) if tokens else ""
        except Exception as error:
            what = f"the tokenizer failed on token {tokens[-1]}: {type(error).__name__}: {error}"
            raise SessionError(f"{what}; forbid it, or do without") from error


def _complete(text: str) -> str:
    """Without the U+FFFD at its end that can stand for the beginning of a character."""
    return text[: len(text) - min(_MOST_PENDING, len(text) - len(text.rstrip(_REPLACEMENT)))]


class StopStrings:
    """Finds the first of several texts in a stream, and holds back what may become one."""

    def __init__(self, stops: Sequence[str]) -> None:
        """Start with nothing seen; `stops` are not empty texts."""
        self._stops = tuple(stops)
        self._pending = ""
        self.matched = False

    def push(self, text: str) -> str:
        """Take more text; return what certainly comes before any stop string."""
        if self.matched or not self._stops:
            return "" if self.matched else text
        text = self._pending + text
        places = [(start + len(stop), start) for stop in self._stops if (start := text.find(stop)) >= 0]
        if places:
            # The one that is complete first, as if the text had come character by character.
            self.matched, self._pending = True, ""
            return text[: min(places)[1]]
        # Of the suffixes that some stop string begins with, the longest.
        longest = min(len(text), max(map(len, self._stops)) - 1)
        length = next((n for n in range(longest, 0, -1) if any(s.startswith(text[-n:]) for s in self._stops)), 0)
        self._pending = text[len(text) - length :]
        return text[: len(text) - length]

    def flush(self) -> str:
        """Return what was held back: no stop string came of it."""
        rest, self._pending = self._pending, ""
        return rest

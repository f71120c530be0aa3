"""Converts tokens to text as they arrive: whole characters, final text, and stop strings across tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from trt_kvcache.errors import SessionError

_REPLACEMENT = "\ufffd"

_MOST_PENDING = 3
"""Most bytes of an incomplete UTF-8 character. Decoders write U+FFFD for each byte, or one for all bytes."""

_CONTEXT = 8
"""Earlier tokens that are decoded again with new ones: enough for a character, and for a leading space."""


class TokenDecoder(Protocol):
    """An object that turns token ids into text, such as `trt_kvcache.runtime.text.tokenizer.Tokenizer`."""

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of `tokens` without special tokens, with U+FFFD for bytes that are not UTF-8."""


class TextStream:
    """Converts the tokens of one growing sequence to text. Text that it returned never changes.

    A token can end inside a character, and its text can depend on earlier tokens (a leading space, the bytes of one
    character). So the stream decodes a window of the last tokens, and returns text that is new and complete.
    """

    def __init__(
        self, tokenizer: TokenDecoder, prompt: Sequence[int] | npt.NDArray[np.int64] = (), stops: Sequence[str] = ()
    ) -> None:
        """Start after the prompt, whose tokens decide if a space comes first. `stops` are texts that end the stream."""
        self._tokenizer = tokenizer
        self._window = [int(token) for token in prompt[max(0, len(prompt) - _CONTEXT) :]]
        self._emitted = _complete(self._decode())
        self._settled = len(self._window)
        self._stops = StopStrings(stops)

    @property
    def stopped(self) -> bool:
        """True after a stop string; the stream then returns no more text."""
        return self._stops.matched

    def push(self, token: int) -> str:
        """Take one more token. Return the new text that cannot change any more; it may be empty."""
        self._window.append(token)
        text = self._decode()
        if not text.startswith(self._emitted):
            # The decoder changed text that was already returned. (Byte-fallback decoders do so if a byte that fits no
            # character follows.) Returned text stays, and the stream continues from here.
            self._window, self._emitted, self._settled = [token], "", 0
            text = self._decode()
        complete = _complete(text)
        new = complete[len(self._emitted) :]
        self._emitted += new
        if new and complete == text:
            # All text was returned. The tokens since the last time that this happened are enough context, if they
            # decode alone.
            recent = self._window[self._settled :]
            alone = self._decode(recent)
            if text.endswith(alone):
                self._window, self._emitted = recent, alone
            self._settled = len(self._window)
        if len(self._window) > 4 * _CONTEXT:
            # Many bytes that fit no character: without a limit, each decoding would take longer than the last.
            self._window, self._settled = self._window[-_CONTEXT:], 0
            self._emitted = _complete(self._decode())
        return self._stops.push(new)

    def flush(self) -> str:
        """After the last token: return the text still held back; incomplete characters become U+FFFD."""
        rest = self._decode()[len(self._emitted) :]
        self._emitted += rest
        return self._stops.push(rest) + self._stops.flush()

    def _decode(self, tokens: Sequence[int] | None = None) -> str:
        """Return the text of these tokens (None: of the kept window). `SessionError` if the tokenizer fails."""
        tokens = self._window if tokens is None else tokens
        try:
            return self._tokenizer.decode(tokens) if tokens else ""
        except Exception as error:
            what = f"the tokenizer failed on token {tokens[-1]}: {type(error).__name__}: {error}"
            raise SessionError(f"{what}; forbid this token, or open the session without the tokenizer") from error


def _complete(text: str) -> str:
    """Remove U+FFFD at the end of a text, because it may stand for the first bytes of an incomplete character."""
    return text[: len(text) - min(_MOST_PENDING, len(text) - len(text.rstrip(_REPLACEMENT)))]


class StopStrings:
    """Ends a text before the first stop string in it. Holds back text that may become a stop string."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._pending = ""
        self.matched = False

    def push(self, text: str) -> str:
        """Take more text; return the text that is certainly before any stop string."""
        if self.matched or not self._stops:
            return "" if self.matched else text
        text = self._pending + text
        places = [(start + len(stop), start) for stop in self._stops if (start := text.find(stop)) >= 0]
        if places:
            # Choose the stop string that ends first, as if the text had arrived character by character.
            self.matched, self._pending = True, ""
            return text[: min(places)[1]]
        # Hold back the longest suffix that is the start of a stop string.
        longest = min(len(text), max(map(len, self._stops)) - 1)
        length = next((n for n in range(longest, 0, -1) if any(s.startswith(text[-n:]) for s in self._stops)), 0)
        self._pending = text[len(text) - length :]
        return text[: len(text) - length]

    def flush(self) -> str:
        """Return the text that was held back. Call this after the last text, when no stop string can follow."""
        rest, self._pending = self._pending, ""
        return rest

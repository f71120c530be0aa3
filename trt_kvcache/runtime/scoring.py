"""The perplexity of a text: how well a model predicts it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from trt_kvcache.arguments import as_whole, shown
from trt_kvcache.errors import OptionError, PromptError
from trt_kvcache.progress import phase
from trt_kvcache.runtime.session import DecodeSession
from trt_kvcache.runtime.token_inputs import read_ids

_LOGITS = 1 << 26
"""Most bytes of logits at a time."""


@dataclass(frozen=True)
class Score:
    """How well a model predicts a text.

    Attributes:
        tokens: number of scored tokens: all except the first.
        nats: mean negative natural logarithm of the probabilities of the scored tokens.
    """

    tokens: int
    nats: float

    @property
    def perplexity(self) -> float:
        """The exponential of `nats`."""
        return math.exp(self.nats)


def score(session: DecodeSession, text: str | Sequence[int], window: int | None = None) -> Score:
    """Score a text: how probable the model finds each token. A text longer than the caches is scored in windows.

    Each window begins with the second half of the window before; that half is not scored again. So each scored
    token sees at least half a window of earlier tokens, except in the first window.

    Args:
        session: a session with a free batch row.
        text: the text, for a session with a tokenizer; or its token ids. At least two tokens.
        window: tokens of a window; None: the capacity, at most 2,048.

    Raises:
        OptionError: the window is longer than the caches, or shorter than 2 tokens.
        PromptError: there are fewer than two tokens, the model does not know one, or a text needs a tokenizer.
        CapacityError, SessionError: see `DecodeSession.update`.
    """
    if not isinstance(session, DecodeSession):
        raise OptionError(f"session is {shown(session)}; give a DecodeSession")
    if isinstance(text, str):
        if session.tokenizer is None:
            raise PromptError("the text needs a tokenizer, but the session has none; give token ids")
        text = session.tokenizer.encode(text)
    tokens = read_ids(text, session.vocab)
    capacity = session.cache.capacity
    window = None if window is None else as_whole(window, "window", "tokens")
    window = min(capacity or 2048, 2048) if window is None else window
    if window < 2 or (capacity is not None and window > capacity):
        raise OptionError(f"window is {window}; it must be 2 to {capacity}, which is what the caches hold")
    if len(tokens) < 2:
        raise PromptError(f"the text has {len(tokens)} tokens; a score needs at least 2")
    step = max(1, min(session.max_chunk, _LOGITS // (4 * session.vocab)))
    total, scored, start = 0.0, 1, 0
    with phase("scoring: token", len(tokens)) as done:
        while scored < len(tokens):
            part = tokens[start : start + window]
            slot = session.cache.acquire()
            try:
                for at in range(0, len(part) - 1, step):
                    # Logits at one position predict the next token.
                    chunk = part[at : min(at + step, len(part) - 1)]
                    targets = part[at + 1 : at + 1 + len(chunk)]
                    new = min(len(chunk), max(0, start + at + 1 + len(chunk) - scored))
                    rows = session.update({slot: chunk}, keep=new)
                    if new:
                        total -= _log_probability(rows[slot], targets[-new:])
                        scored += new
                        for _ in range(new):
                            done()
            finally:
                session.cache.release(slot)
            start += window - window // 2
    return Score(len(tokens) - 1, total / (len(tokens) - 1))


def _log_probability(logits: np.ndarray[tuple[int, ...], np.dtype[np.float32]], targets: Sequence[int]) -> float:
    wide = logits.astype(np.float64)
    wide -= wide.max(1, keepdims=True)
    chosen = wide[np.arange(len(targets)), list(targets)]
    return float((chosen - np.log(np.exp(wide).sum(1))).sum())

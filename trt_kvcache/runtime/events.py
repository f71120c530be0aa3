"""The reports of a running generation, token by token."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from trt_kvcache.runtime.generation.speculation import SpeculationStats

__all__ = ["FinishReason", "TokenEvent"]


class FinishReason(str, Enum):
    """Why a sequence ended."""

    EOS = "eos"
    """It chose one of `GenerationConfig.eos_token_id`; that token is its last, and has no text."""
    LENGTH = "length"
    """It has `GenerationConfig.max_new_tokens` new tokens."""
    STOP = "stop"
    """Its text came to one of `GenerationConfig.stop_strings`; the text ends before it, the tokens include it."""
    CAPACITY = "capacity"
    """A cache, or the model's position table, is full."""
    CANCELLED = "cancelled"
    """The caller ended it."""


@dataclass(frozen=True)
class TokenEvent:
    """One more token of one sequence, or its end.

    Attributes:
        sequence: which one: the index of its prompt, or its slot where it was added on its own.
        token: the chosen id; None in an event that only ends the sequence.
        text: what has become certain of its text with this event: nothing while a character or a possible stop string
            is incomplete, and nothing at all without a tokenizer. The texts of a sequence, joined, are its text; only
            where bytes that are no UTF-8 follow one another, a tokenizer that falls back to bytes may read fewer
            characters from all of them than it did from the first.
        logprob: natural logarithm of the token's probability under the model's own distribution, before penalties,
            temperature and truncation; None unless `GenerationConfig.output_logprobs`.
        top_logprobs: tokens and their log-probabilities, the most probable first: as many as
            `GenerationConfig.top_logprobs` asks for.
        finish_reason: in the sequence's last event, and only there.
        speculation: in the sequence's last event where prompt lookup or a draft model guesses: how well that did. No
            part of equality: the tokens are the same without drafts.
    """

    sequence: int
    token: int | None
    text: str = ""
    logprob: float | None = None
    finish_reason: FinishReason | None = None
    speculation: SpeculationStats | None = field(default=None, compare=False)
    top_logprobs: tuple[tuple[int, float], ...] = ()

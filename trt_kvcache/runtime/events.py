"""Events of a running generation, token by token."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum


class FinishReason(str, Enum):
    """Why a sequence ended."""

    EOS = "eos"
    """The model chose one of `GenerationConfig.eos_token_id`; this token is the last, and has no text."""
    LENGTH = "length"
    """The sequence has `GenerationConfig.max_new_tokens` new tokens."""
    STOP = "stop"
    """The text contains one of `GenerationConfig.stop_strings`; the text ends before it, the tokens include it."""
    CAPACITY = "capacity"
    """A cache, or the model's position table, is full."""
    CANCELLED = "cancelled"
    """The caller ended the sequence."""


@dataclass
class SpeculationStats:
    """Counts of the tokens that a draft model or prompt lookup guessed.

    Attributes:
        proposed: guessed tokens that the model verified.
        accepted: guessed tokens that the model chose as well.
        updates: number of steps that contained guesses.
        impossible: why no token can be guessed, and what to do; empty if tokens can be guessed.
    """

    proposed: int = 0
    accepted: int = 0
    updates: int = 0
    impossible: str = ""

    @property
    def acceptance(self) -> float:
        """Share of the guessed tokens that the model accepted; 0 if none was guessed."""
        return self.accepted / self.proposed if self.proposed else 0.0

    def add(self, other: SpeculationStats) -> None:
        """Add the counts of `other`."""
        self.proposed += other.proposed
        self.accepted += other.accepted
        self.updates += other.updates
        self.impossible = self.impossible or other.impossible


@dataclass(frozen=True)
class TokenEvent:
    """One more token of one sequence, or its end.

    Attributes:
        sequence: index of the prompt in its list. For a sequence added with `DecodeSession.add`: its slot.
        token: the chosen id; None in an event that only ends the sequence.
        text: the new text that can no longer change. It is empty while a character or a possible stop string is
            incomplete, and without a tokenizer. The joined texts are the text of the sequence. One exception: if bytes
            are not UTF-8, a tokenizer with byte fallback may decode all tokens at once to fewer characters.
        logprob: natural logarithm of the token's probability under the model's own distribution, before penalties,
            temperature and truncation; None unless `GenerationConfig.output_logprobs`.
        top_logprobs: `GenerationConfig.top_logprobs` tokens and their log-probabilities, the most probable first.
        finish_reason: why the sequence ended; only in its last event.
        speculation: counts of guessed and accepted tokens; only in the last event, if tokens are guessed. Equal events
            may have different counts, because guesses do not change the tokens.
    """

    sequence: int
    token: int | None
    text: str = ""
    logprob: float | None = None
    finish_reason: FinishReason | None = None
    speculation: SpeculationStats | None = field(default=None, compare=False)
    top_logprobs: tuple[tuple[int, float], ...] = ()

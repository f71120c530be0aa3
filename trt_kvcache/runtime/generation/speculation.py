"""Speculation without a second model: what followed the last n-gram before is likely to follow it again.

The loop feeds the chosen token and a draft of its followers in one update, compares the draft with what the model then
chooses at each position, and crops the rest off the caches. The tokens are those that one step per token would give.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from trt_kvcache.runtime.runner import Runner

__all__ = ["SpeculationStats", "look_up", "why_no_drafts"]


@dataclass
class SpeculationStats:
    """Counts of guessed tokens.

    Attributes:
        proposed: draft tokens that were verified.
        accepted: those that the model chose as well.
        updates: updates of the caches that held a draft.
        impossible: why none can be proposed, and what to do; empty where they can.
    """

    proposed: int = 0
    accepted: int = 0
    updates: int = 0
    impossible: str = ""

    @property
    def acceptance(self) -> float:
        """Share of the proposed tokens that were accepted; 0 where none was proposed."""
        return self.accepted / self.proposed if self.proposed else 0.0

    def add(self, other: SpeculationStats) -> None:
        """Count the drafts of `other` too."""
        self.proposed += other.proposed
        self.accepted += other.accepted
        self.updates += other.updates
        self.impossible = self.impossible or other.impossible


def why_no_drafts(runner: Runner) -> str:
    """Why a model cannot verify drafts, which takes logits of several positions of one step; empty where it can."""
    if runner.plan.whole_prompts:
        return "tokens of one step see each other, and a guess would change the scores before it"
    if runner.max_logits == 1 and runner.plan.logits_span is None:
        return "the model gives the logits of the last position only: export it with logits of all positions"
    if runner.max_logits == 1:
        return "the engine gives the logits of one position: build it with --max-logits 2 or more"
    if runner.max_chunk == 1:
        return "a step takes one token: use a model, or a max_chunk, for several"
    return ""


def look_up(tokens: npt.NDArray[np.int64], count: int, max_ngram: int) -> npt.NDArray[np.int64]:
    """Propose up to `count` tokens to come after `tokens`.

    The longest suffix of at most `max_ngram` tokens that occurred before decides. Of its occurrences, the latest that
    `count` tokens follow gives them; where none has so many, the first one, which has most.

    Args:
        tokens: int64 ``[T]``: the prompt and what was generated.
        count: most tokens to propose.
        max_ngram: longest suffix to look up.

    Returns:
        int64 ``[0 .. count]``.
    """
    for size in range(min(max_ngram, tokens.size - 1), 0, -1):
        # Without the last token, so that the suffix does not find itself.
        grams = np.lib.stride_tricks.sliding_window_view(tokens[:-1], size)
        ends = np.flatnonzero((grams == tokens[tokens.size - size :]).all(axis=1)) + size
        if ends.size:
            full = ends[ends + count <= tokens.size]
            start = int(full[-1] if full.size else ends[0])
            guess: npt.NDArray[np.int64] = tokens[start : start + count].copy()
            return guess
    return np.empty(0, dtype=np.int64)

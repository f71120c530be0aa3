"""Speculation without a second model: tokens that followed the last n-gram before are likely to follow it again.

The loop feeds the chosen token and a draft of the next ones in one update. It compares the draft with the model's
choice at each position, and crops wrong tokens off the caches. The tokens equal those of one step per token.
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
        accepted: draft tokens that the model chose as well.
        updates: updates of the caches that held a draft.
        impossible: why no token can be proposed, and what to do; empty if tokens can be proposed.
    """

    proposed: int = 0
    accepted: int = 0
    updates: int = 0
    impossible: str = ""

    @property
    def acceptance(self) -> float:
        """Share of the proposed tokens that were accepted; 0 if none was proposed."""
        return self.accepted / self.proposed if self.proposed else 0.0

    def add(self, other: SpeculationStats) -> None:
        """Add the counts of `other`."""
        self.proposed += other.proposed
        self.accepted += other.accepted
        self.updates += other.updates
        self.impossible = self.impossible or other.impossible


def why_no_drafts(runner: Runner) -> str:
    """Return why a model cannot verify drafts (it needs logits of several positions of one step); empty if it can."""
    if runner.plan.prefill_in_one_step:
        return "tokens of one step see each other, and a guess would change the scores before it"
    if runner.max_logits == 1 and runner.plan.logits_span is None:
        return "the model gives the logits of the last position only: export it with logits of all positions"
    if runner.max_logits == 1:
        return "the engine gives the logits of one position: build it with --max-logits 2 or more"
    if runner.max_chunk == 1:
        return "a step takes one token: use a model, or a max_chunk, for several"
    return ""


def look_up(tokens: npt.NDArray[np.int64], count: int, max_ngram: int) -> npt.NDArray[np.int64]:
    """Propose up to `count` tokens that may follow `tokens`.

    It searches the longest suffix, of at most `max_ngram` tokens, that occurred before. The proposal is what followed
    its latest occurrence with `count` tokens after it; else what followed its first occurrence, which has the most
    tokens after it.

    Args:
        tokens: int64 ``[T]``: the prompt and the generated tokens.
        count: most tokens to propose.
        max_ngram: longest suffix to search.

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

"""Chooses the next token of one sequence from the model's scores."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from trt_kvcache.errors import SessionError
from trt_kvcache.runtime.generation.config import GenerationConfig
from trt_kvcache.runtime.generation.greedy import CHOICE, as_scores, best
from trt_kvcache.runtime.generation.processors import process, rules_apply
from trt_kvcache.runtime.generation.warpers import Candidates, warp

__all__ = ["Sampler"]


class Sampler:
    """The random stream and the rules of one sequence.

    The stream is made of the seed and the sequence's index alone: what a sequence draws does not depend on what else
    runs, nor on when it joined.
    """

    def __init__(self, config: GenerationConfig, index: int = 0) -> None:
        """Start the stream.

        Args:
            config: the settings; with no seed, a fresh one is taken.
            index: of the sequence among those that share the seed.
        """
        self._config = config
        self._random = np.random.Generator(np.random.PCG64(np.random.SeedSequence(config.seed, spawn_key=(index,))))

    def looks_at(self, new_tokens: int) -> int:
        """How many of the highest scores `choose` looks at, now and ever after; see `StepBatch.highest`."""
        config = self._config
        if config.output_logprobs or rules_apply(new_tokens, config):
            return 0
        if not config.do_sample:
            return 1
        return max(config.top_k, 2) if config.top_k else 0  # of 1, its equals would be missing

    def choose(
        self, logits: npt.NDArray[Any], tokens: npt.NDArray[np.int64], new_tokens: int
    ) -> tuple[int, float | None]:
        """Choose the token after `tokens`. Draws exactly one random number where it samples, none where it does not.

        Args:
            logits: ``[V]``, of the model, in its own float type, or a `CHOICE` of those that it looks at. Neither
                written to nor kept.
            tokens: int64: the prompt and what was generated.
            new_tokens: how many of them were generated.

        Returns:
            The token, and where `GenerationConfig.output_logprobs` asks for it, the natural logarithm of its
            probability under the model's own distribution (before any rule), else None.

        Raises:
            SessionError: the model gave NaN or infinity, or the rules leave no token.
        """
        config = self._config
        token, top = best(logits)
        if not math.isfinite(top):
            raise SessionError(f"the model's logits hold {top}: it overflowed, or its weights or caches are damaged")
        if logits.dtype == CHOICE:
            if config.do_sample:
                known = logits[logits["token"] >= 0]
                token = self._draw(warp(Candidates(known["score"], known["token"]), config))
            return token, None
        ruled = rules_apply(new_tokens, config)
        if ruled or config.do_sample:
            scores = process(as_scores(logits), tokens, new_tokens, config)
            if ruled:
                _check_ruled(float(scores.max()))
            token = self._draw(warp(scores, config)) if config.do_sample else int(scores.argmax())
        return token, _logprob(as_scores(logits), token, top) if config.output_logprobs else None

    def _draw(self, left: Candidates) -> int:
        """Invert the cumulative distribution of the tokens that are left, in the order of their ids."""
        kept = left.scores.astype(np.float64)
        cumulative = np.cumsum(np.exp(kept - kept.max()))
        at = min(int(np.searchsorted(cumulative, self._random.random() * cumulative[-1], side="right")), kept.size - 1)
        return at if left.ids is None else int(left.ids[at])


def _check_ruled(top: float) -> None:
    if top == -math.inf:
        raise SessionError("no token is left: the settings, such as sequence_bias, min_new_tokens, forbid them all")
    if not math.isfinite(top):
        raise SessionError(f"the scores hold {top} after sequence_bias and repetition_penalty; use moderate ones")


def _logprob(logits: npt.NDArray[np.float32], token: int, top: float) -> float:
    total = np.exp(logits - np.float32(top)).sum(dtype=np.float64)
    return float(logits[token]) - top - math.log(float(total))

"""Rules that change the scores of one next token, as pure functions.

Each takes float32 scores ``[V]`` and returns new ones; forbidden tokens get ``-inf``. `process` and `warp` apply them
in the order in which transformers does (https://huggingface.co/docs/transformers/internal/generation_utils, measured
against 5.23): rules over what came before always, those that shape the distribution for sampling only.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from trt_kvcache.errors import OptionError
from trt_kvcache.runtime.config import GenerationConfig

__all__ = [
    "add_sequence_bias",
    "apply_temperature",
    "ban_repeated_ngrams",
    "ban_tokens",
    "keep_min_p",
    "keep_top_k",
    "keep_top_p",
    "log_softmax",
    "penalize_repetition",
    "process",
    "warp",
]

Scores = npt.NDArray[np.float32]
Tokens = npt.NDArray[np.int64]

_HEAD = 1024


def process(scores: Scores, tokens: Tokens, new_tokens: int, config: GenerationConfig) -> Scores:
    """Apply the rules over what came before: bias, repetition penalty, no repeated n-grams, no early end.

    Args:
        scores: float32 ``[V]``. Not written to.
        tokens: int64: the prompt and what was generated.
        new_tokens: how many of them were generated.
        config: the settings.

    Returns:
        float32 ``[V]``; `scores` itself where no rule applies.
    """
    if config.biases:
        scores = add_sequence_bias(scores, tokens, config.biases)
    if config.repetition_penalty != 1:
        scores = penalize_repetition(scores, tokens, config.repetition_penalty)
    if config.no_repeat_ngram_size:
        scores = ban_repeated_ngrams(scores, tokens, config.no_repeat_ngram_size)
    if new_tokens < config.min_new_tokens:
        scores = ban_tokens(scores, config.eos_token_ids)
    return scores


def warp(scores: Scores, config: GenerationConfig) -> Scores:
    """Shape the distribution to sample from: temperature, then top-k, top-p and min-p, each of what the last left."""
    if config.temperature != 1:
        scores = apply_temperature(scores, config.temperature)
    if 0 < config.top_k < scores.size:
        scores = keep_top_k(scores, config.top_k)
    if config.top_p < 1:
        scores = keep_top_p(scores, config.top_p)
    if config.min_p:
        scores = keep_min_p(scores, config.min_p)
    return scores


def add_sequence_bias(scores: Scores, tokens: Tokens, biases: Sequence[tuple[tuple[int, ...], float]]) -> Scores:
    """Add each bias to the last token of its run, where the run's other tokens are the last of `tokens`.

    Raises:
        OptionError: a run names a token that the model does not have.
    """
    scores = scores.copy()
    for run, bias in biases:
        if max(run) >= scores.size:
            raise OptionError(f"sequence_bias names token {max(run)}; the model has 0 to {scores.size - 1}")
        before = run[:-1]
        if not before or (len(before) <= tokens.size and tuple(tokens[tokens.size - len(before) :]) == before):
            scores[run[-1]] += np.float32(bias)
    return scores


def penalize_repetition(scores: Scores, tokens: Tokens, penalty: float) -> Scores:
    """Divide the positive scores of `tokens` by `penalty` and multiply their negative ones, each token once."""
    scores = scores.copy()
    # Each value is computed from the old scores, so a token that occurs twice is still penalized once.
    old = scores[tokens]
    scores[tokens] = np.where(old < 0, old * np.float32(penalty), old / np.float32(penalty))
    return scores


def ban_repeated_ngrams(scores: Scores, tokens: Tokens, size: int) -> Scores:
    """Forbid every token that would complete an n-gram of `size` tokens that `tokens` contains."""
    if tokens.size < size:
        return scores
    grams = np.lib.stride_tricks.sliding_window_view(tokens, size)
    suffix = tokens[tokens.size - size + 1 :]
    completes = (grams[:, :-1] == suffix).all(axis=1)
    return ban_tokens(scores, grams[completes, -1])


def ban_tokens(scores: Scores, tokens: Sequence[int] | Tokens) -> Scores:
    """Forbid `tokens`; ids that the model does not have are no matter."""
    scores = scores.copy()
    ids = np.asarray(tokens, dtype=np.int64)
    scores[ids[ids < scores.size]] = -np.inf
    return scores


def apply_temperature(scores: Scores, temperature: float) -> Scores:
    """Divide the distances from the highest score by `temperature`.

    The probabilities are those of divided scores, and no temperature makes the highest one overflow.
    """
    with np.errstate(over="ignore"):  # of a hopeless token, to -inf
        hot: Scores = ((scores - scores.max()).astype(np.float64) / temperature).astype(np.float32)
    return hot


def keep_top_k(scores: Scores, count: int) -> Scores:
    """Keep the `count` highest scores, and all that equal the last of them."""
    if count >= scores.size:
        return scores
    return _keep(scores, scores >= np.partition(scores, scores.size - count)[scores.size - count])


def keep_top_p(scores: Scores, mass: float) -> Scores:
    """Keep the smallest set of most probable tokens with a probability of at least `mass`; of equals, low ids first."""
    weights = np.exp(scores - scores.max())
    enough = mass * weights.sum(dtype=np.float64)
    ids = np.flatnonzero(scores > -np.inf)
    if ids.size > 4 * _HEAD:
        # Sorting a whole vocabulary takes longer than a step of a small model; its head nearly always has the mass.
        head = np.flatnonzero(scores >= np.partition(scores, scores.size - _HEAD)[scores.size - _HEAD])
        ids = head if weights[head].sum(dtype=np.float64) > enough else ids
    ids = ids[np.argsort(-scores[ids], kind="stable")]
    before = np.concatenate([[0.0], np.cumsum(weights[ids], dtype=np.float64)[:-1]])
    kept = np.zeros(scores.size, dtype=bool)
    # The first token whose predecessors have the mass is out, and so are all after it. The first one always stays.
    kept[ids[: max(1, int(np.searchsorted(before, enough)))]] = True
    return _keep(scores, kept)


def keep_min_p(scores: Scores, share: float) -> Scores:
    """Keep the tokens that are at least `share` times as probable as the most probable one."""
    return _keep(scores, np.exp(scores - scores.max()) >= np.float32(share))


def log_softmax(scores: Scores) -> Scores:
    """Natural logarithms, float32 ``[..., V]``, of the probabilities that `scores` stand for; ``-inf`` stays."""
    shifted = scores - scores.max(axis=-1, keepdims=True)
    result: Scores = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True, dtype=np.float32))
    return result


def _keep(scores: Scores, kept: npt.NDArray[np.bool_]) -> Scores:
    return np.where(kept, scores, np.float32(-np.inf))

"""Rules that change the scores of one next token, as pure functions.

Each takes float32 scores ``[V]`` and returns new ones; forbidden tokens get ``-inf``. `process` applies them in the
order in which transformers does (https://huggingface.co/docs/transformers/internal/generation_utils, measured against
5.23). Those that shape the distribution to sample from are in `warpers`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from trt_kvcache.errors import OptionError
from trt_kvcache.runtime.config import GenerationConfig

__all__ = [
    "add_sequence_bias",
    "ban_repeated_ngrams",
    "ban_tokens",
    "log_softmax",
    "penalize_repetition",
    "process",
    "rules_apply",
]

Scores = npt.NDArray[np.float32]
Tokens = npt.NDArray[np.int64]


def rules_apply(new_tokens: int, config: GenerationConfig) -> bool:
    """Whether `process` would look at the scores at all; most greedy decoding has no rule."""
    penalized = config.repetition_penalty != 1 or bool(config.no_repeat_ngram_size)
    return penalized or bool(config.biases) or new_tokens < config.min_new_tokens


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


def log_softmax(scores: Scores) -> Scores:
    """Natural logarithms, float32 ``[..., V]``, of the probabilities that `scores` stand for; ``-inf`` stays."""
    shifted = scores - scores.max(axis=-1, keepdims=True)
    result: Scores = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True, dtype=np.float32))
    return result

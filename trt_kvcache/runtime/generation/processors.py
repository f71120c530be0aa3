"""The rules of a generation that change the scores of the next token, as pure functions.

Each takes float32 scores ``[V]`` and returns new ones; forbidden tokens get ``-inf``. `process` applies them in the
order of transformers (https://huggingface.co/docs/transformers/internal/generation_utils, measured against 5.23). Rules
that shape the distribution for sampling are in `sampling`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from trt_kvcache.errors import OptionError, SessionError, TrtKvCacheError
from trt_kvcache.runtime.generation.generation_config import GenerationConfig, LogitsProcessor

Scores = npt.NDArray[np.float32]
Tokens = npt.NDArray[np.int64]

_MOST = 1e30
"""The largest score after `raise_the_end`, so that differences of scores stay finite."""


def rules_apply(new_tokens: int, config: GenerationConfig) -> bool:
    """Return True if a setting such as `repetition_penalty` may change scores, now or after more tokens."""
    always = (
        config.repetition_penalty != 1,
        config.presence_penalty,
        config.frequency_penalty,
        config.no_repeat_ngram_size,
        config.biases,
        config.bad_words_ids,
        config.suppress_tokens,
        config.forced_eos_token_ids,
        config.exponential_decay_length_penalty,
        config.logits_processors,
    )
    first = config.forced_bos_token_id is not None or config.begin_suppress_tokens
    at_first = max(config.min_new_tokens or config.min_length, 2 if first else 0)
    return any(always) or new_tokens < at_first


def process(scores: Scores, tokens: Tokens, new_tokens: int, config: GenerationConfig) -> Scores:
    """Return the scores of the next token, float32 ``[V]``, after all rules of a config that depend on earlier tokens.

    Args:
        scores: float32 ``[V]``; not changed, but returned itself if no rule applies.
        tokens: int64: the prompt and the generated tokens.
        new_tokens: number of generated tokens.
        config: the settings.

    Raises:
        OptionError: a setting names a token that the model does not have.
        SessionError: a `logits_processor` failed, or returned no scores.
    """
    if config.biases:
        scores = add_sequence_bias(scores, tokens, config.biases)
    if config.repetition_penalty != 1:
        scores = penalize_repetition(scores, tokens, config.repetition_penalty)
    if config.presence_penalty or config.frequency_penalty:
        new = tokens[tokens.size - new_tokens :]
        scores = penalize_generated(scores, new, config.presence_penalty, config.frequency_penalty)
    if config.no_repeat_ngram_size:
        scores = ban_repeated_ngrams(scores, tokens, config.no_repeat_ngram_size)
    if config.bad_words_ids:
        runs = [run for run in config.bad_words_ids if len(run) > 1 or run[0] not in config.eos_token_ids]
        scores = ban_tokens(scores, [run[-1] for run in runs if _is_next(run, tokens)])
    if new_tokens < config.min_new_tokens or (not config.min_new_tokens and tokens.size < config.min_length):
        scores = ban_tokens(scores, config.eos_token_ids)
    first = config.forced_bos_token_id if tokens.size - new_tokens == 1 else None
    if first is not None and new_tokens == 0:
        scores = force_tokens(scores, [first], "forced_bos_token_id")
    if config.forced_eos_token_ids and new_tokens == config.max_new_tokens - 1:
        scores = force_tokens(scores, config.forced_eos_token_ids, "forced_eos_token_id")
    if config.exponential_decay_length_penalty is not None:
        start, factor = config.exponential_decay_length_penalty
        scores = raise_the_end(scores, config.eos_token_ids, new_tokens - start, factor)
    if config.suppress_tokens:
        scores = ban_tokens(scores, config.suppress_tokens)
    if config.begin_suppress_tokens and new_tokens == (0 if first is None else 1):
        scores = ban_tokens(scores, config.begin_suppress_tokens)
    for processor in config.logits_processors:
        scores = _called(processor, scores, tokens)
    return scores


def add_sequence_bias(scores: Scores, tokens: Tokens, biases: Sequence[tuple[tuple[int, ...], float]]) -> Scores:
    """Add each sequence's bias to the score of its last token if `tokens` end with the sequence's other tokens.

    Raises `OptionError` if a token sequence has a token that the model does not have.
    """
    scores = scores.copy()
    with np.errstate(over="ignore", invalid="ignore"):  # scores may overflow to -inf or NaN; `Sampler` refuses NaN
        for run, bias in biases:
            if max(run) >= scores.size:
                raise OptionError(f"sequence_bias names token {max(run)}; the model has 0 to {scores.size - 1}")
            if _is_next(run, tokens):
                scores[run[-1]] += np.float32(bias)
    return scores


def _is_next(run: Sequence[int], tokens: Tokens) -> bool:
    """Return True if the next token can complete the run: `tokens` end with all tokens of the run except its last."""
    before = tuple(run[:-1])
    return not before or (len(before) <= tokens.size and tuple(tokens[tokens.size - len(before) :]) == before)


def penalize_repetition(scores: Scores, tokens: Tokens, penalty: float) -> Scores:
    """Divide each positive score of `tokens` by `penalty`, and multiply each negative one. Each token counts once."""
    scores = scores.copy()
    # Each value is computed from the old scores, so a token that occurs twice is still penalized once.
    old = scores[tokens]
    with np.errstate(over="ignore", divide="ignore", invalid="ignore"):  # overflow, as above
        scores[tokens] = np.where(old < 0, old * np.float32(penalty), old / np.float32(penalty))
    return scores


def penalize_generated(scores: Scores, new_tokens: Tokens, presence: float, frequency: float) -> Scores:
    """Subtract `presence` from the score of each new token, and `frequency` for each occurrence, as OpenAI's API does.

    Source: https://platform.openai.com/docs/api-reference/chat/create.
    """
    scores = scores.copy()
    tokens, counts = np.unique(new_tokens, return_counts=True)
    with np.errstate(over="ignore", invalid="ignore"):  # overflow, as above
        scores[tokens] -= (presence + frequency * counts).astype(np.float32)
    return scores


def ban_repeated_ngrams(scores: Scores, tokens: Tokens, size: int) -> Scores:
    """Forbid every token that would complete an n-gram of `size` tokens that `tokens` already contains."""
    if tokens.size < size:
        return scores
    grams = np.lib.stride_tricks.sliding_window_view(tokens, size)
    completes = (grams[:, :-1] == tokens[tokens.size - size + 1 :]).all(axis=1)
    return ban_tokens(scores, grams[completes, -1])


def ban_tokens(scores: Scores, tokens: Sequence[int] | Tokens) -> Scores:
    """Forbid `tokens`; ids that the model does not have are ignored."""
    scores = scores.copy()
    ids = np.asarray(tokens)
    scores[ids[ids < scores.size].astype(np.int64)] = -np.inf
    return scores


def force_tokens(scores: Scores, tokens: Sequence[int], setting: str) -> Scores:
    """Forbid all tokens except `tokens`, whose scores become 0. Raises `OptionError` if the model lacks one of them."""
    if max(tokens) >= scores.size:
        raise OptionError(f"{setting} names token {max(tokens)}; the model has 0 to {scores.size - 1}")
    forced = np.full_like(scores, -np.inf)
    forced[list(tokens)] = 0
    return forced


def raise_the_end(scores: Scores, ends: Sequence[int], late: int, factor: float) -> Scores:
    """Add ``abs(score) * (factor ** late - 1)`` to the scores of the tokens `ends`; `late` counts tokens past a limit.

    Without such tokens (`late` of 0 or less), nothing changes.
    """
    ends = [token for token in ends if token < scores.size and scores[token] > -np.inf]
    if late <= 0 or not ends:
        return scores
    scores = scores.copy()
    with np.errstate(over="ignore"):
        times = min(float(np.power(float(factor), late)), _MOST) - 1
    scores[ends] = np.minimum(scores[ends] + np.abs(scores[ends]).astype(np.float64) * times, _MOST)
    return scores


def _called(processor: LogitsProcessor, scores: Scores, tokens: Tokens) -> Scores:
    name = getattr(processor, "__name__", type(processor).__name__)
    shown = tokens.view()
    shown.flags.writeable = False
    try:
        result = np.asarray(processor(shown, scores.copy()))
    except TrtKvCacheError:
        raise
    except Exception as error:
        raise SessionError(f"logits_processor {name} failed: {type(error).__name__}: {error}") from error
    kind = f"{result.dtype} {list(result.shape)}"
    if result.shape == () and result.item() is None:
        kind = "None, and a change in place has no effect"
    if result.shape == scores.shape and result.dtype.kind in "fiu":
        if not np.isnan(result).any():
            with np.errstate(over="ignore"):  # overflow, as above
                return result.astype(np.float32, copy=False)
        kind = "NaN"
    raise SessionError(f"logits_processor {name} returned {kind}; it has to return scores, float32 [{scores.size}]")


def log_softmax(scores: Scores) -> Scores:
    """Return natural logarithms, float32 ``[..., V]``, of the probabilities of `scores`; ``-inf`` stays."""
    shifted = scores - scores.max(axis=-1, keepdims=True)
    result: Scores = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True, dtype=np.float32))
    return result

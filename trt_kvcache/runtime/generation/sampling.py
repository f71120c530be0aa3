"""Chooses the next token of one sequence from the model's scores."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from trt_kvcache.errors import OptionError, SessionError
from trt_kvcache.runtime.generation.generation_config import GenerationConfig
from trt_kvcache.runtime.generation.processors import process, rules_apply
from trt_kvcache.runtime.generation.token_masks import Mask, ask_mask, keep_allowed, words

Logits = npt.NDArray[Any]

# A step has a row of scores for each sequence, often 128,000 numbers. NumPy converts float16 one number at a time,
# which takes 0.1 to 0.2 ms for such a row: for a batch, longer than the step takes on a GPU. Compared as integers, the
# numbers need no conversion.

CHOICE = np.dtype([("token", np.int64), ("score", np.float32)])
"""A token id and its score. A runner that chooses tokens on the GPU returns the N highest scores of a position as an
array ``[N]`` of this dtype, instead of all scores ``[V]``.
"""

_LOWEST = -0x7C01  # the integer for float16's -inf in `best`; lower integers are NaN


def best(logits: Logits) -> tuple[int, float]:
    """Return the token with the highest score (the first of equals), and the score; NaN if any score is NaN.

    `logits` are ``[V]`` of any float dtype; or `CHOICE` ``[N]`` (some tokens with their logits), ascending by token.
    """
    if logits.dtype == CHOICE:
        at = int(logits["score"].argmax()) if logits.size > 1 else 0
        return int(logits["token"][at]), float(logits["score"][at])
    if logits.dtype == np.float16:
        bits = np.ascontiguousarray(logits).view(np.int16)
        # flip the bits of negative numbers except the sign, because their order is reversed
        keys = bits ^ ((bits >> 15) & 0x7FFF)
        token = int(keys.argmax())
        top = float(logits[token])
        if keys.min() >= _LOWEST and top != 0:  # no NaN with a sign bit; and no -0, which the keys order below 0
            return token, top
    scores = as_scores(logits)
    token = int(scores.argmax())  # NaN counts as the highest
    return token, float(scores[token])


def as_scores(logits: Logits) -> npt.NDArray[np.float32]:
    """Return logits as float32, without a copy if possible."""
    return logits.astype(np.float32, copy=False)


class Sampler:
    """Chooses the tokens of one sequence, by the settings of a config and with random numbers of the sequence.

    The random number of a token depends only on the seed, the sequence's index and the position of the token. So a
    sequence draws the same tokens if it is generated again, or continued in another batch row or session.
    """

    def __init__(self, config: GenerationConfig, index: int = 0) -> None:
        """Prepare the random numbers of the sequence with this index; a config without a seed gets a new one."""
        self._config = config
        seed = np.random.SeedSequence(config.seed, spawn_key=(index,))
        self._entropy, self._index = seed.entropy, index
        # Philox computes its numbers from a key and a counter: for a token, the counter is its position.
        self._philox = np.random.Philox(key=seed.generate_state(2, np.uint64))
        self._numbers = np.random.Generator(self._philox)
        self._counter = 0
        self._mask = None if config.grammar is None else config.grammar.start()
        self._words = 0

    def guesser(self) -> Sampler:
        """Return a sampler for a draft model: the same random numbers, rules and grammar, no `logits_processor`."""
        assert isinstance(self._entropy, int)
        config = replace(
            self._config, seed=self._entropy, logits_processor=(), grammar=None, output_logprobs=False, top_logprobs=0
        )
        guesser = Sampler(config, self._index)
        guesser._mask = self._mask
        return guesser

    @property
    def masked(self) -> bool:
        """True if a grammar limits the next tokens."""
        return self._mask is not None

    def mask(self, new_tokens: npt.NDArray[np.int64], most: int) -> Mask:
        """Return the bit mask of tokens that the grammar allows after `new_tokens`: int32, at most `most` words.

        Raises `SessionError` if the grammar's mask failed, `OptionError` if the grammar exceeds a limit.
        """
        assert self._mask is not None
        self._words = most
        return ask_mask(self._mask, new_tokens, most)

    def looks_at(self, new_tokens: int) -> int:
        """Return how many of the highest scores `choose` needs, for this and later tokens; 0: all scores."""
        config = self._config
        if config.output_logprobs or rules_apply(new_tokens, config):
            return 0
        if not config.do_sample:
            return 1
        return max(config.top_k, 2) if config.top_k else 0  # 1 would leave out tokens with an equal score

    def choose(
        self, logits: npt.NDArray[Any], tokens: npt.NDArray[np.int64], new_tokens: int
    ) -> tuple[int, float | None]:
        """Choose the token after `tokens`. If it is sampled, the random number of its position decides.

        Args:
            logits: the model's logits ``[V]`` of any float type; or `CHOICE` ``[N]``: only the needed scores of tokens
                that the grammar allows. This method neither changes nor keeps the array.
            tokens: int64: the prompt and the generated tokens.
            new_tokens: number of generated tokens.

        Returns:
            The token; and, if `GenerationConfig.output_logprobs` is set, the natural logarithm of its probability under
            the model's own distribution (before any rule), else None.

        Raises:
            SessionError: the model gave NaN or infinity, or the rules forbid every token.
            OptionError: the grammar forbids every token.
        """
        config = self._config
        token, top = best(logits)
        new = tokens[tokens.size - new_tokens :]
        if self._mask is not None and logits.dtype == CHOICE and top == -math.inf:
            self.mask(new, self._words)  # this may raise an error that says why
            raise _no_token(new_tokens)
        if not math.isfinite(top):
            raise SessionError(f"the model's logits hold {top}: it overflowed, or its weights or caches are damaged")
        if logits.dtype == CHOICE:
            if config.do_sample:
                known = logits[logits["token"] >= 0]
                token = self._draw(warp(Candidates(known["score"], known["token"]), config), tokens.size)
            return token, None
        ruled = rules_apply(new_tokens, config)
        if ruled or config.do_sample or self._mask is not None:
            scores = process(as_scores(logits), tokens, new_tokens, config)
            if ruled:
                _check_ruled(float(scores.max()))
            if self._mask is not None:
                scores = keep_allowed(scores, self.mask(new, words(scores.size)))
                if scores.max() == -math.inf:
                    raise _no_token(new_tokens)
            token = self._draw(warp(scores, config), tokens.size) if config.do_sample else int(scores.argmax())
        if not config.output_logprobs:
            return token, None
        return token, float(_logprobs(as_scores(logits), top, np.array([token]))[0])

    def top_logprobs(self, logits: npt.NDArray[Any]) -> tuple[tuple[int, float], ...]:
        """Return the `GenerationConfig.top_logprobs` most probable tokens, each with its natural log-probability.

        Probabilities are those of the softmax of `logits` ``[V]``. Equally probable tokens are ordered by id.
        """
        count = self._config.top_logprobs
        if not count:
            return ()
        scores = as_scores(logits)
        tokens = highest(scores, min(count, scores.size))
        tokens = tokens[np.argsort(-scores[tokens], kind="stable")][:count]
        logprobs = _logprobs(scores, float(scores[tokens[0]]), tokens)
        return tuple(zip(tokens.tolist(), logprobs.tolist(), strict=True))

    def _draw(self, left: Candidates, position: int) -> int:
        """Draw a token: the first, in order of ids, whose cumulative probability exceeds the random number."""
        scores = left.scores.astype(np.float64)
        sums = np.cumsum(np.exp(scores - scores.max()))
        at = min(int(np.searchsorted(sums, self._number(position) * sums[-1], side="right")), scores.size - 1)
        return at if left.ids is None else int(left.ids[at])

    def _number(self, position: int) -> float:
        """Return the random number of a position, 0 to 1: ``Generator(Philox(key=key, counter=position)).random()``."""
        self._philox.advance(position - self._counter)  # this also drops the other three numbers of the last counter
        self._counter = position + 1
        return self._numbers.random()


def _no_token(new_tokens: int) -> OptionError:
    left = "the grammar and the other settings leave no token to choose"
    return OptionError(f"after {new_tokens} new tokens, {left}; change one of them")


def _check_ruled(top: float) -> None:
    if top == -math.inf:
        raise SessionError("no token is left: the settings, such as sequence_bias, min_new_tokens, forbid them all")
    if not math.isfinite(top):
        raise SessionError(f"the scores hold {top} after sequence_bias and repetition_penalty; use moderate ones")


def _logprobs(logits: npt.NDArray[np.float32], top: float, tokens: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    total = np.exp(logits - np.float32(top)).sum(dtype=np.float64)
    return logits[tokens].astype(np.float64) - top - math.log(float(total))


Scores = npt.NDArray[np.float32]
Ids = npt.NDArray[np.int64]

_HEAD = 1024
_ROUNDS = 32


@dataclass(frozen=True, eq=False)
class Candidates:
    """The tokens that may still be drawn, and their scores.

    Attributes:
        scores: float32 ``[N]``; the scores of forbidden tokens are ``-inf``.
        ids: int64 ``[N]``, ascending; None: all tokens, in order.
    """

    scores: Scores
    ids: Ids | None = None

    def only(self, places: Ids) -> Candidates:
        """Return the candidates at these ascending indices."""
        return Candidates(self.scores[places], places if self.ids is None else self.ids[places])


def warp(scores: Scores | Candidates, config: GenerationConfig) -> Candidates:
    """Apply temperature, top-k, top-p and min-p; return the tokens that may be drawn, at least one.

    `scores` are float32 ``[V]`` with a finite maximum, or candidates that include all tokens that `top_k` keeps.
    """
    left = scores if isinstance(scores, Candidates) else Candidates(scores)
    # A temperature keeps the order of the scores, so it can come second, when few are left.
    if config.top_k:
        left = keep_top_k(left, config.top_k)
    if config.temperature != 1:
        left = Candidates(apply_temperature(left.scores, config.temperature), left.ids)
    if config.top_p < 1:
        left = keep_top_p(left, config.top_p)
    if config.min_p:
        left = keep_min_p(left, config.min_p)
    return left.only(np.flatnonzero(left.scores > -np.inf))


def apply_temperature(scores: Scores, temperature: float) -> Scores:
    """Divide the distances from the highest score by `temperature`. The highest score cannot overflow."""
    with np.errstate(over="ignore"):  # very unlikely tokens become -inf
        hot: Scores = ((scores - scores.max()).astype(np.float64) / temperature).astype(np.float32)
    return hot


def keep_top_k(left: Candidates, count: int) -> Candidates:
    """Keep the candidates with the `count` highest scores, and all that tie with the lowest of these scores."""
    return left if count >= left.scores.size else left.only(highest(left.scores, count))


def keep_top_p(left: Candidates, mass: float) -> Candidates:
    """Keep the smallest set of most probable candidates with a total probability of at least `mass`; ties by id."""
    scores = left.scores
    weights = np.exp(scores - scores.max())
    enough = mass * weights.sum(dtype=np.float64)
    size, head = scores.size, np.arange(scores.size)
    for count in (_HEAD, 8 * _HEAD):  # nearly always, the first tokens of this number have enough probability
        if 4 * count < size:
            some = highest(scores, count)
            if weights[some].sum(dtype=np.float64) > enough:
                head = some
                break
    order = head[np.argsort(-scores[head], kind="stable")]
    before = np.concatenate([[0.0], np.cumsum(weights[order], dtype=np.float64)[:-1]])
    # Drop all tokens from the first one whose predecessors already have the mass. The very first token always stays.
    return left.only(np.sort(order[: max(1, int(np.searchsorted(before, enough)))]))


def keep_min_p(left: Candidates, share: float) -> Candidates:
    """Keep the candidates that are at least `share` times as probable as the most probable one."""
    return left.only(np.flatnonzero(np.exp(left.scores - left.scores.max()) >= np.float32(share)))


def highest(scores: npt.NDArray[np.floating[Any]], count: int) -> Ids:
    """Return the ascending indices of the `count` highest scores, and of all that tie with the lowest of these.

    The scores are divided into at least `count` disjoint sets. The `count`-th largest of the sets' maxima is a lower
    bound: at least `count` scores, but few more, reach it. Finding it takes one pass over the vocabulary.
    """
    places: Ids | None = None
    sets = scores.size // _ROUNDS
    if sets >= 2 * count:
        best = scores[: sets * _ROUNDS].reshape(_ROUNDS, sets).max(axis=0)
        places = np.flatnonzero(scores >= np.partition(best, sets - count)[sets - count])
    some = scores if places is None else scores[places]
    last = np.partition(some, some.size - count)[some.size - count]
    above = np.flatnonzero(some >= last)
    return above if places is None else places[above]

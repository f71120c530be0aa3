"""Selects the tokens to sample from: temperature, top-k, top-p, min-p.

The rules and their order are those of transformers (https://huggingface.co/docs/transformers/internal/generation_utils,
measured against 5.23). Each rule keeps fewer tokens, and the next one sees only these: sorting and exponentials over a
whole vocabulary take longer than a decode step of a small model.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from trt_kvcache.runtime.generation.config import GenerationConfig

__all__ = ["Candidates", "apply_temperature", "highest", "keep_min_p", "keep_top_k", "keep_top_p", "warp"]

Scores = npt.NDArray[np.float32]
Ids = npt.NDArray[np.int64]

_HEAD = 1024
_ROUNDS = 32


@dataclass(frozen=True, eq=False)
class Candidates:
    """Tokens and their scores.

    Attributes:
        scores: float32 ``[N]``; those of forbidden tokens are ``-inf``.
        ids: int64 ``[N]``, ascending; None: all tokens, in order.
    """

    scores: Scores
    ids: Ids | None = None

    def only(self, places: Ids) -> Candidates:
        """Return the candidates at some places, ascending."""
        return Candidates(self.scores[places], places if self.ids is None else self.ids[places])


def warp(scores: Scores | Candidates, config: GenerationConfig) -> Candidates:
    """Shape the distribution to sample from.

    Args:
        scores: float32 ``[V]``, the highest of them finite; or candidates that contain at least all that `top_k` keeps.
            Not changed.
        config: the settings.

    Returns:
        The tokens that may be drawn, at least one.
    """
    left = scores if isinstance(scores, Candidates) else Candidates(scores)
    # A temperature keeps the order of the scores, so it can come second, when few are left.
    if 0 < config.top_k < left.scores.size:
        left = keep_top_k(left, config.top_k)
    if config.temperature != 1:
        left = Candidates(apply_temperature(left.scores, config.temperature), left.ids)
    if config.top_p < 1:
        left = keep_top_p(left, config.top_p)
    if config.min_p:
        left = keep_min_p(left, config.min_p)
    return left.only(np.flatnonzero(left.scores > -np.inf))


def apply_temperature(scores: Scores, temperature: float) -> Scores:
    """Divide the distances from the highest score by `temperature`.

    The probabilities equal those of divided scores, and the highest score cannot overflow.
    """
    with np.errstate(over="ignore"):  # very unlikely tokens become -inf
        hot: Scores = ((scores - scores.max()).astype(np.float64) / temperature).astype(np.float32)
    return hot


def keep_top_k(left: Candidates, count: int) -> Candidates:
    """Keep the `count` highest scores, and all that equal the last of them."""
    return left if count >= left.scores.size else left.only(highest(left.scores, count))


def keep_top_p(left: Candidates, mass: float) -> Candidates:
    """Keep the smallest set of most probable tokens with a probability of at least `mass`; equals by ascending id."""
    scores = left.scores
    weights = np.exp(scores - scores.max())
    enough = mass * weights.sum(dtype=np.float64)
    size, head = scores.size, np.arange(scores.size)
    for count in (_HEAD, 8 * _HEAD):  # the first tokens nearly always have the mass
        if 4 * count < size:
            some = highest(scores, count)
            if weights[some].sum(dtype=np.float64) > enough:
                head = some
                break
    order = head[np.argsort(-scores[head], kind="stable")]
    before = np.concatenate([[0.0], np.cumsum(weights[order], dtype=np.float64)[:-1]])
    # Drop the first token whose predecessors have the mass, and all after it. The very first one always stays.
    return left.only(np.sort(order[: max(1, int(np.searchsorted(before, enough)))]))


def keep_min_p(left: Candidates, share: float) -> Candidates:
    """Keep the tokens that are at least `share` times as probable as the most probable one."""
    return left.only(np.flatnonzero(np.exp(left.scores - left.scores.max()) >= np.float32(share)))


def highest(scores: Scores, count: int) -> Ids:
    """Return the places of the `count` highest scores, and of all that equal the last of them; ascending.

    The scores are cut into disjoint sets, at least `count`. At least `count` scores reach the `count`-th largest of the
    sets' maxima, and few others do. Finding this bound takes one pass over the vocabulary.
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

"""The differences that a proof allows, from those that rounding made while it was recorded."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from trt_kvcache.importer.plan import CacheDtype
from trt_kvcache.proof.file import Share, share_of
from trt_kvcache.proof.places import LOGITS
from trt_kvcache.proof.schedule import DRAWN

__all__ = ["MEASURED", "MOST_ROWS", "allowed", "measured", "spread"]

Array = npt.NDArray[Any]
Shares = dict[str, dict[str, Share]]

MEASURED = 2
"""Rounding that is measured, as a multiple of that of an engine's type: what it makes may grow faster than it."""

MOST_ROWS = 3
"""Rows of the batch in a step."""

_TIMES = Share(5.0, 2.5)  # what an engine may differ by, as a multiple of what rounding made in so many rows
_LEAST = Share(8.0, 5.0)  # units of rounding, at least
_CODES = Share(2.5, 1.5)  # steps of a code, at least: a number may be rounded to a neighbour
_STEPS = {None: 127, CacheDtype.INT8: 127, CacheDtype.INT4: 7, CacheDtype.FP8: 8}
"""Steps of a code, up to the largest number."""

_FAINT = 25.0  # units of rounding that a drawn episode allows: elsewhere it amplifies rounding
_SHOWS = 0.3  # of an output's scale: what allows more shows no fault
_SPREAD = 4.0  # at most: twice what was seen (Gemma 3 in bfloat16)


def measured(outputs: Iterable[tuple[str, str, Array, Array]]) -> Shares:
    """The largest difference that rounding made, as a share of a row's scale, by names of episode and output.

    Args:
        outputs: names of episode and output, and the numbers ``[R, ...]`` without and with rounding.
    """
    rounding: Shares = {}
    for episode, name, before, after in outputs:
        known = rounding.setdefault(episode, {})
        for one, other in zip(before, after, strict=True):
            # Of cache rows, a number that is none is not known; a logit decides nothing.
            nothing = name == LOGITS and np.isnan(one).any()
            share = Share(math.inf, math.inf) if nothing else share_of(one, other)
            known[name] = known.get(name, share).most(share)
    return rounding


def allowed(
    rounding: Mapping[str, Mapping[str, Share]],
    unit: float,
    rows: int,
    coded: Collection[str],
    dtype: CacheDtype | None,
) -> Shares:
    """The differences that an engine may have, likewise; outputs that show no fault are left out.

    Args:
        rounding: see `measured`.
        unit: of rounding.
        rows: of the batch that were measured.
        coded: names of outputs that are codes.
        dtype: of the caches that `build` quantizes.
    """
    usual = _usual(rounding)
    uneven = spread(rounding)
    few = min(math.sqrt(max(MOST_ROWS / rows, 1)), uneven)  # the largest of few samples is smaller
    few *= 1 + (uneven - 1) / 6  # and tells less of models that amplify rounding: 1.12 times it (SmolLM2 in float16)
    tolerances: Shares = {episode: {} for episode in rounding}
    for episode, outputs in rounding.items():
        shows = _FAINT * unit if episode == DRAWN else _SHOWS
        for name, own in outputs.items():
            least, step = (_CODES, 1 / _STEPS[dtype]) if name in coded else (_LEAST, unit)
            share = _times(own.most(usual[name]), _TIMES, few).most(_times(least, Share(1, 1), step))
            if share.typical <= shows:
                tolerances[episode][name] = share
    return tolerances


def _times(share: Share, other: Share, factor: float) -> Share:
    return Share(factor * share.largest * other.largest, factor * share.typical * other.typical)


def spread(rounding: Mapping[str, Mapping[str, Share]]) -> float:
    """The differences of one output in two episodes of the model's own history: how many times as large one is, 1 to 4.

    Some tokens come where a trained model amplifies rounding; another rounding may be amplified where this one was not.
    """
    typical: dict[str, list[float]] = {}
    for episode, outputs in rounding.items():
        for name, share in outputs.items() if episode != DRAWN else ():
            typical.setdefault(name, []).append(share.typical)
    ratios = [max(shares) / min(shares) for shares in typical.values() if min(shares) and math.isfinite(max(shares))]
    return min(max(ratios, default=1.0), _SPREAD)


def _usual(rounding: Mapping[str, Mapping[str, Share]]) -> dict[str, Share]:
    """Half of what rounding makes of each output, as a mean square over the episodes of the model's own history.

    One sample in one episode says little: where rounding is amplified, others are several times as large. But all of it
    would hide faults where it is not amplified.
    """
    outputs: dict[str, list[Share]] = {}
    for episode, known in rounding.items():
        for name, share in known.items():
            shares = outputs.setdefault(name, [])
            if episode != DRAWN and math.isfinite(share.largest):
                shares.append(share)
    squares = {n: np.square([(s.largest, s.typical) for s in shares or [Share(0, 0)]]) for n, shares in outputs.items()}
    return {name: Share(*map(float, np.sqrt(values.mean(0)) / 2)) for name, values in squares.items()}

"""The differences that a proof allows, from those that rounding made while it was recorded."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from trt_kvcache.compare.decode import DRAWN, share_of_logits
from trt_kvcache.importer.plan import CacheDtype

__all__ = ["MEASURED", "Share", "allowed", "share_of", "uneven"]

Array = npt.NDArray[Any]

MEASURED = 2
"""Rounding that is measured, as a multiple of that of an engine's type: what it makes may grow faster than it."""


@dataclass(frozen=True)
class Share:
    """A difference between two outputs in one row of a step: see `trt_kvcache.compare.decode.Difference`.

    Attributes:
        largest: as a share of the largest number.
        typical: its length, as a share of the numbers' own around their mean.
    """

    largest: float
    typical: float

    def most(self, other: Share) -> Share:
        """The larger of both in each."""
        return Share(max(self.largest, other.largest), max(self.typical, other.typical))

    def times(self, other: Share, factor: float = 1.0) -> Share:
        """The product of both in each."""
        return Share(factor * self.largest * other.largest, factor * self.typical * other.typical)

    def within(self, other: Share) -> bool:
        """Neither is larger than in the other."""
        return self.largest <= other.largest and self.typical <= other.typical


_TIMES = Share(5.0, 2.5)  # what an engine may differ by, as a multiple of what rounding made in so many rows
_LEAST = Share(8.0, 5.0)  # units of rounding, at least
_CODES = Share(2.5, 1.5)  # steps of a code, at least: a number may be rounded to a neighbour
_STEPS = {None: 127, CacheDtype.INT8: 127, CacheDtype.INT4: 7, CacheDtype.FP8: 8}
"""Steps of a code, up to the largest number."""

_MOST_ROWS = 3
_FAINT = 25.0  # units of rounding that are allowed after random cache contents: elsewhere they amplify rounding
_SHOWS = 0.3  # of an output's scale: what allows more shows no fault
_SPREAD = 4.0  # at most: twice what was seen (Gemma 3 in bfloat16)
Shares = dict[str, dict[str, Share]]


def share_of(wanted: Array, had: Array) -> Share:
    """The distance of two arrays of one shape: infinite where one is finite and the other is not."""
    largest, typical = share_of_logits(wanted.reshape(1, -1), had.reshape(1, -1))
    return Share(float(largest[0]), float(typical[0]))


def allowed(
    rounding: Mapping[str, Mapping[str, Share]], unit: float, rows: int, coded: Collection[str],
    dtype: CacheDtype | None,
) -> Shares:  # fmt: skip
    """The differences that an engine may have, by names of part and output; outputs that show no fault are left out.

    Args:
        rounding: the largest difference that rounding made in any row, likewise.
        unit: of rounding.
        rows: of the batch that were measured.
        coded: names of outputs that are codes.
        dtype: of the caches that `build` quantizes.
    """
    spread = uneven(rounding)
    few = min(math.sqrt(max(_MOST_ROWS / rows, 1)), spread)  # the largest of few samples is smaller
    few *= 1 + (spread - 1) / 6  # and tells less of models that amplify rounding: 1.12 times it (SmolLM2 in float16)
    shares: Shares = {part: {} for part in rounding}
    for part, outputs in rounding.items():
        for name, own in outputs.items():
            least, step = (_CODES, 1 / _STEPS[dtype]) if name in coded else (_LEAST, unit)
            share = own.most(_usual(rounding, name)).times(_TIMES, few).most(least.times(Share(step, step)))
            if share.typical <= (_FAINT * unit if part == DRAWN else _SHOWS):
                shares[part][name] = share
    return shares


def uneven(rounding: Mapping[str, Mapping[str, Share]]) -> float:
    """The differences of one output in two parts of the model's own history: how many times as large one is, 1 to 4.

    Some tokens come where a trained model amplifies rounding; another rounding may be amplified where this one was not.
    """
    ratios = [1.0]
    for name in {name for outputs in rounding.values() for name in outputs}:
        typical = [outputs[name].typical for part, outputs in rounding.items() if name in outputs and part != DRAWN]
        if min(typical, default=0) and math.isfinite(max(typical)):
            ratios.append(max(typical) / min(typical))
    return min(max(ratios), _SPREAD)


def _usual(rounding: Mapping[str, Mapping[str, Share]], name: str) -> Share:
    """Half of what rounding makes of an output, as a mean square over the parts of its own history.

    One sample in one part says little: where rounding is amplified, others are several times as large. But all of it
    would hide faults where it is not amplified.
    """
    own = [outputs[name] for part, outputs in rounding.items() if name in outputs and part != DRAWN]
    known = [share for share in own if math.isfinite(share.largest)]
    squares = np.square([(s.largest, s.typical) for s in known or [Share(0, 0)]])
    return Share(*map(float, np.sqrt(squares.mean(0)) / 2))

"""The differences that a proof allows, derived from the effect of rounding while it was recorded."""

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
"""Rounding is measured with this multiple of an engine's own rounding: its effect may grow faster than in proportion.
"""


@dataclass(frozen=True)
class Share:
    """A difference between two outputs in one row of a step: see `trt_kvcache.compare.decode.Difference`.

    Attributes:
        largest: the largest difference, as a share of the largest number.
        typical: the length of the difference, as a share of the numbers' length around their mean.
    """

    largest: float
    typical: float

    def most(self, other: Share) -> Share:
        """Return the larger value of both, for each of the two shares."""
        return Share(max(self.largest, other.largest), max(self.typical, other.typical))

    def times(self, other: Share, factor: float = 1.0) -> Share:
        """Return the product of both, for each of the two shares."""
        return Share(factor * self.largest * other.largest, factor * self.typical * other.typical)

    def within(self, other: Share) -> bool:
        """Return True if neither share is larger than the other's."""
        return self.largest <= other.largest and self.typical <= other.typical


_TIMES = Share(5.0, 2.5)  # factor between the effect of rounding in these rows and the allowed difference
_LEAST = Share(8.0, 5.0)  # least allowed difference, in units of rounding
_CODES = Share(2.5, 1.5)  # least allowed difference, in steps of a code: a number may be rounded to a neighbour
_STEPS = {None: 127, CacheDtype.INT8: 127, CacheDtype.INT4: 7, CacheDtype.FP8: 8}
"""Number of steps of a code, up to the largest number."""

_MOST_ROWS = 3
_FAINT = 25.0  # units of rounding that are allowed after random cache contents, if these do not amplify rounding
_SHOWS = 0.3  # share of an output's scale; a larger allowed difference could not show a fault
_SPREAD = 4.0  # at most: twice the largest value seen (Gemma 3 in bfloat16)
Shares = dict[str, dict[str, Share]]


def share_of(wanted: Array, had: Array) -> Share:
    """Return the distance of two arrays of one shape; infinite if one number is finite and the other is not."""
    largest, typical = share_of_logits(wanted.reshape(1, -1), had.reshape(1, -1))
    return Share(float(largest[0]), float(typical[0]))


def allowed(
    rounding: Mapping[str, Mapping[str, Share]], unit: float, rows: int, coded: Collection[str],
    dtype: CacheDtype | None,
) -> Shares:  # fmt: skip
    """Return the differences that an engine may have, by names of part and output; outputs without use are left out.

    An output has no use if its allowed difference is so large that it could not show a fault.

    Args:
        rounding: the largest difference that rounding made in any row, by names of part and output.
        unit: unit of rounding.
        rows: number of rows of the batch that were measured.
        coded: names of outputs that are codes.
        dtype: dtype of caches that `build` quantizes.
    """
    spread = uneven(rounding)
    few = min(math.sqrt(max(_MOST_ROWS / rows, 1)), spread)  # the largest of few samples is smaller
    # few samples say less about models that amplify rounding: 1.12 times as large (SmolLM2 in float16)
    few *= 1 + (spread - 1) / 6
    shares: Shares = {part: {} for part in rounding}
    for part, outputs in rounding.items():
        for name, own in outputs.items():
            least, step = (_CODES, 1 / _STEPS[dtype]) if name in coded else (_LEAST, unit)
            share = own.most(_usual(rounding, name)).times(_TIMES, few).most(least.times(Share(step, step)))
            if share.typical <= (_FAINT * unit if part == DRAWN else _SHOWS):
                shares[part][name] = share
    return shares


def uneven(rounding: Mapping[str, Mapping[str, Share]]) -> float:
    """Return how much the effect of rounding on an output varies between parts of the model's own text: 1 to 4.

    Some tokens come where a trained model amplifies rounding; another rounding may be amplified elsewhere.
    """
    ratios = [1.0]
    for name in {name for outputs in rounding.values() for name in outputs}:
        typical = [outputs[name].typical for part, outputs in rounding.items() if name in outputs and part != DRAWN]
        if min(typical, default=0) and math.isfinite(max(typical)):
            ratios.append(max(typical) / min(typical))
    return min(max(ratios), _SPREAD)


def _usual(rounding: Mapping[str, Mapping[str, Share]], name: str) -> Share:
    """Return half of the root mean square effect of rounding on an output, over the parts of the model's own text.

    One sample of one part says little: where rounding is amplified, other samples are several times as large. But the
    full effect would hide faults where rounding is not amplified.
    """
    own = [outputs[name] for part, outputs in rounding.items() if name in outputs and part != DRAWN]
    known = [share for share in own if math.isfinite(share.largest)]
    squares = np.square([(s.largest, s.typical) for s in known or [Share(0, 0)]])
    return Share(*map(float, np.sqrt(squares.mean(0)) / 2))

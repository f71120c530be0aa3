"""The steps of a proof: few, since each of them reads all weights of the original."""

from __future__ import annotations

from dataclasses import dataclass, replace

from trt_kvcache.importer.plan import CachePlan
from trt_kvcache.importer.steps.inputs import ENCODER_TOKENS
from trt_kvcache.importer.steps.schedule import Limits, Step
from trt_kvcache.runtime.inputs import SPAN_BUCKET, StepInputs, linear_capacity
from trt_kvcache.verify.report import VerifyOptions
from trt_kvcache.verify.schedule import Episode, plan_schedule

_CHUNKS, _SINGLES = (5, 3), 3
_BACK = 3  # tokens between the rows of a step at a boundary


@dataclass(frozen=True)
class Most:
    """The most that an engine was built for.

    Attributes:
        positions: of a sequence; None: any.
        logits: positions of a row with logits in a step; None: all.
        encoder: length of an encoder's output that it takes, where that is open.
    """

    batch: int
    chunk: int
    logits: int | None = None
    positions: int | None = None
    encoder: int = ENCODER_TOKENS


def within(limits: Limits, plan: CachePlan, most: Most) -> Limits:
    """The limits of a model, as an engine and the runtime bound them."""
    ends = [n for n in (limits.linear, linear_capacity(plan), most.positions) if n is not None]
    return replace(
        limits,
        longest=min(limits.longest, most.chunk),
        linear=min(ends, default=None),
        ragged=limits.ragged and not StepInputs(plan).uniform,
        lengths=False,  # rows with fewer valid tokens than the step are no part of decoding
    )


def plan_proof(limits: Limits, steps: int | None) -> tuple[Episode, ...]:
    """Prefill in chunks and single steps from ragged starts, at the last row, over each wrap and the end of a span.

    Args:
        limits: see `within`.
        steps: how many; None: as many as it takes, about ten.
    """
    options = VerifyOptions(batch=limits.batch, chunks=_CHUNKS, tokens=_SINGLES)
    episodes = [e for e in plan_schedule(limits, options) if e.steps]
    bound = min((c for c in (limits.linear, *limits.circular) if c is not None), default=0)
    if limits.length is None and bound > SPAN_BUCKET + _SINGLES:
        starts = [max(SPAN_BUCKET - 2 - (_BACK * row if limits.ragged else 0), 0) for row in range(limits.batch)]
        places = [tuple(start + n for start in starts) for n in range(_SINGLES + 1)]
        episodes.append(Episode("span", tuple(Step(1, places[n], places[n + 1]) for n in range(_SINGLES))))
    if limits.linear is not None:
        episodes = [e for e in episodes if max(max(s.valid) for s in e.steps) <= limits.linear]
    if steps is not None:
        episodes = _as_many(limits, options, episodes, steps)
    return tuple(episodes)


def _as_many(limits: Limits, options: VerifyOptions, episodes: list[Episode], steps: int) -> list[Episode]:
    """The same in so many steps, or in fewer where the caches hold no more: the last ones of the longest go first."""
    more = steps - sum(len(e.steps) for e in episodes)
    if more > 0:
        longer = plan_schedule(limits, replace(options, tokens=_SINGLES + more))[0]
        return [longer, *episodes[1:]]
    for _ in range(-more):
        longest = max(range(len(episodes)), key=lambda i: (len(episodes[i].steps), i))
        if len(episodes[longest].steps) == 1:
            longest = len(episodes) - 1
        kept = episodes[longest].steps[:-1]
        episodes[longest : longest + 1] = [replace(episodes[longest], steps=kept)] if kept else []
    return episodes


def keeps(episode: Episode, most: Most, *, last_only: bool) -> tuple[int, ...]:
    """Of how many of the last positions of each step the logits are kept."""
    bound = 1 if last_only else min(most.logits or 4, 4)
    return tuple(min(step.length, bound) for step in episode.steps)

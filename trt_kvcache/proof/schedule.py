"""The steps of a proof: one decode from empty caches, over each place at which an engine may go wrong.

    start     a short prompt in chunks; one row begins after the other, so that they stand at different places
    decode    where the history is long enough for a trained model to have settled
    span      over the end of the first span of cache rows
    window    over the end of an attention window
    wrap      over the end of a ring
    full      up to the last row of linear caches
    drawn     after random cache contents: untrained attention is so faint that its faults show here alone

Between these places the history goes on in long chunks. A place that lies too far away is reached by a jump: the cache
rows up to there are copies of those before (`trt_kvcache.proof.contents.copies`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from trt_kvcache.importer.plan import CachePlan
from trt_kvcache.importer.steps.inputs import ENCODER_TOKENS
from trt_kvcache.importer.steps.step import Limits, Step
from trt_kvcache.runtime.inputs import SPAN_BUCKET, StepInputs, linear_capacity

MOST_POSITIONS = 4
"""Most positions of a row in a step whose logits are kept."""

DRAWN = "drawn"
"""Name of the episode before which caches hold random numbers."""

_PROMPT = (5, 3, 1)
_SINGLES = 3
_COMPARED = 4  # last steps of an episode
_DISTANCE = 3  # tokens between the rows of a step
_SETTLED = 40  # tokens, after which rounding makes no more difference than later (measured on SmolLM2 and Gemma 3)
_REACH = 576  # tokens that are decoded for the sake of those after them
_CHUNKS = 48  # at most, if the engine takes short ones only


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


@dataclass(frozen=True)
class Episode:
    """Steps over one set of caches; each step starts where the one before ended."""

    name: str
    steps: tuple[Step, ...]


def consecutive(limits: Limits, lengths: list[int], starts: tuple[int, ...]) -> tuple[Step, ...]:
    """Consecutive steps; an update that would straddle a wrap where a contract forbids it is split there."""
    steps: list[Step] = []
    for wanted in lengths:
        left = wanted
        while left:
            ends = [capacity - start % capacity for capacity in limits.no_straddle for start in starts]
            length = min([left, *ends])
            if limits.length is not None and length != limits.length:
                return tuple(steps)  # the update length is fixed: the next update would break the contract
            valid = tuple(start + length for start in starts)
            steps.append(Step(length, starts, valid))
            starts, left = valid, left - length
    return tuple(steps)


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


def plan_proof(limits: Limits, windows: set[int], steps: int | None, *, drawn: bool = True) -> tuple[Episode, ...]:
    """The episodes of a proof.

    A row that starts an episode at 0 is empty before; one that starts where it ended goes on; any other jumps.

    Args:
        limits: see `within`.
        windows: numbers of keys that attentions see at most.
        steps: how many; None: as many as it takes, about 20.
        drawn: caches may hold random numbers.
    """
    if not limits.indexed:  # every update overwrites the rows from 0 on, as TensorScatter without write indices does
        zeros = (0,) * limits.batch
        lengths = [limits.length or min(n, limits.longest) for n in (*_PROMPT[:2], *[1] * _SINGLES)]
        return (Episode("decode", tuple(Step(n, zeros, (n,) * limits.batch) for n in lengths)),)
    episodes = _walked(limits, windows, 0, drawn)
    if steps is not None and (more := steps - sum(len(e.steps) for e in episodes)) > 0:
        episodes = _walked(limits, windows, more, drawn)
    while steps is not None and sum(len(e.steps) for e in episodes) > steps:
        last = episodes.pop()
        if last.steps[1:]:
            episodes.append(replace(last, steps=last.steps[:-1]))
    return tuple(episodes)


def _walked(limits: Limits, windows: set[int], more: int, drawn: bool) -> list[Episode]:
    """The episodes, with so many single steps more."""
    walk = _Walk(limits)
    walk.start(more)
    places = {_SETTLED: "decode", **dict.fromkeys(windows, "window"), **dict.fromkeys(limits.circular, "wrap")}
    bound = min((c for c in (limits.linear, *limits.circular) if c is not None), default=0)
    if limits.length is None and bound > SPAN_BUCKET + _SINGLES:
        places[SPAN_BUCKET] = "span"
    for place in sorted(n for n in places if n <= walk.reach and walk.has(n + walk.single)):
        walk.to(places[place], place)
    for place in sorted(c for c in limits.circular if c > walk.reach):
        walk.jump("wrap", place - 2 * walk.single)
    walk.finish()
    if drawn and not limits.circular:  # an original may hold a ring's whole text
        walk.drawn()
    return walk.episodes


class _Walk:
    """Episodes, each of which begins where the one before ended.

    Attributes:
        single: tokens of the shortest step.
        reach: tokens, as far as histories are decoded.
        ends: tokens of each row now.
    """

    def __init__(self, limits: Limits) -> None:
        self.episodes: list[Episode] = []
        self.single = limits.length or 1
        self._limits = limits
        self._longest = limits.length or limits.longest
        self.reach = min(_REACH, _CHUNKS * self._longest)
        distance = self.single * _DISTANCE if limits.ragged else 0
        free_rows = None if limits.linear is None else limits.linear - 2 * self.single
        self._distance = distance if free_rows is None or distance * (limits.batch - 1) <= free_rows else 0
        self.ends = (0,) * limits.batch

    def start(self, more: int) -> None:
        """Rows that begin one after the other, a short prompt, and single steps."""
        turns = self._limits.batch if self._distance else 1
        for turn in range(turns):
            # The rows that have their place already go on.
            starts = tuple(self._distance * max(row + turn + 1 - turns, 0) for row in range(self._limits.batch))
            last = turn == turns - 1
            self.add("start", self._clamp([*_PROMPT, *[1] * more]) if last else self._chunks(self._distance), starts)

    def has(self, place: int) -> bool:
        """All rows may go up to a place, as far as linear caches hold it."""
        return self._limits.linear is None or place + max(self.ends) - min(self.ends) <= self._limits.linear

    def to(self, name: str, place: int) -> None:
        """Over a place: in chunks to the row before it, then in single steps; the middle row crosses it there."""
        self.add(name, [*self._chunks(place - self.single - self._middle), *[self.single] * _SINGLES])

    def finish(self) -> None:
        """Up to the last row of linear caches, if there are any."""
        if self._limits.linear is None:
            return
        left = self._limits.linear - max(self.ends)
        tail = self._clamp([_PROMPT[0], 1, 1])
        if max(self.ends) + left > self.reach:
            self.jump("full", self._limits.linear - sum(tail) - (max(self.ends) - min(self.ends)), tail)
        else:
            self.add("full", [*self._chunks(left - 2 * self.single), *[self.single] * 2])

    def drawn(self) -> None:
        """A chunk and single steps after a few tokens of nobody's."""
        starts = tuple(self.single * 2 + self._distance * row for row in range(self._limits.batch))
        self.add(DRAWN, self._clamp([_PROMPT[0], *[1] * _SINGLES]), starts)

    def jump(self, name: str, place: int, lengths: list[int] | None = None) -> None:
        """Steps from a place on, without those before it; the rows keep their distances."""
        starts = tuple(place + end - min(self.ends) for end in self.ends)
        if place > max(self.ends):
            self.add(name, lengths or self._clamp([*[1] * _SINGLES, _PROMPT[0]]), starts)

    def add(self, name: str, lengths: list[int], starts: tuple[int, ...] | None = None) -> None:
        """Steps of these lengths, as many as fit."""
        starts = starts or self.ends
        fitting: list[int] = []
        for length in lengths:
            if self._limits.linear is None or max(starts) + sum(fitting) + length <= self._limits.linear:
                fitting.append(length)
        steps = consecutive(self._limits, fitting, starts)
        if steps:
            self.episodes.append(Episode(name, steps))
            self.ends = steps[-1].valid

    @property
    def _middle(self) -> int:
        return sorted(self.ends)[len(self.ends) // 2]

    def _clamp(self, lengths: list[int]) -> list[int]:
        """Steps of these lengths, as the model takes them."""
        return [self._limits.length or min(length, self._longest) for length in lengths]

    def _chunks(self, tokens: int) -> list[int]:
        """Steps that make so many tokens, or a few less."""
        if tokens <= 0:
            return []
        rest = tokens % self._longest
        return [self._longest] * (tokens // self._longest) + ([rest] if rest and not self._limits.length else [])


def keeps(episode: Episode, most: Most, *, last_only: bool) -> tuple[int, ...]:
    """The number of last positions of each step whose logits are kept; 0: it only makes history."""
    bound = 1 if last_only else min(most.logits or MOST_POSITIONS, MOST_POSITIONS)
    history = len(episode.steps) - _COMPARED
    return tuple(min(step.length, bound) if number >= history else 0 for number, step in enumerate(episode.steps))

"""What was proven on samples, checked at every length that a sequence can have.

A few samples tell what a mask is, where rows go, which numbers are positions. They do not show a model that does
something else at one length only. So each proof promises what it found, and all promises are checked here:

    S = 1         behind every P                         a decode step at each position
    P = 0         with every S up to 256                 short prompts
    long updates  with nothing before them, and at the end of the cache
    and around every whole number that takes part in the computation, as P, S and P + S: where a comparison can turn

The steps run through a `Program`, which is fast and takes some shapes for granted; what fails there is looked at again
by a probe, which takes nothing for granted, before it is refused. What a program cannot compute is looked at by probes
alone, where something can turn. So are batches of other sizes, in one step each: few, and around every number. Up to a
capacity of 32 every pair of P and S is looked at. Beyond it, what would not be seen is a model that is odd for one P
together with one S above 1, by numbers that its graph does not hold but computes.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

from trt_kvcache.errors import UnsupportedModelError
from trt_kvcache.importer.normalize.evidence.program import Program, Step
from trt_kvcache.importer.normalize.evidence.samples import Promise, Sample, Samples

_TINY = 16  # tokens; so few leave no steps to learn shapes from
_SMALL = 32  # tokens; up to so many all steps are looked at
_EVERY = 8192  # positions; of those behind them, as many are looked at as have
_FAR = 1 << 26  # keys in all
_PROMPTS = 256
_PAIRED = 12  # numbers that are tried as P or P + S together with each other as S
_AREA = 1 << 24  # elements of the largest mask, or of a bias of all heads,
_SLOW_AREA = 1 << 23  # by probes alone,
_PADDED_AREA = 1 << 20  # and with padding
_BATCHES = (2, 3, 4, 5, 6, 7, 8, 9, 16, 17, 32, 33)
_MOST_BATCHES = 64  # sizes, of
_LARGEST_BATCH = 1024  # sequences

Lengths = tuple[int, int]


def check_promises(samples: Samples) -> None:
    """Check at every length what was promised since the last check.

    Args:
        samples: hold the promises, and none afterwards.

    Raises:
        UnsupportedModelError: one does not hold.
    """
    for padded in (False, True):
        promises = [p for p in samples.promises if p.padded == padded]
        if promises:
            _Check(samples, 2 if padded else 1, padded).all(promises)
    samples.promises.clear()


@dataclass(frozen=True, eq=False)
class _Check:
    """Steps of one batch size, with or without padding."""

    samples: Samples
    batch: int
    padded: bool

    def all(self, promises: Sequence[Promise]) -> None:
        """Check all promises, and those that are the same only once."""
        capacity, fixed = self.samples.capacity, self.samples.fixed_length
        if capacity <= _TINY:
            self._by_probes(promises, list(_every(capacity, fixed)))
            self._in_batches(promises, set())
            return
        program = self._program(promises)
        fast: dict[Hashable, Promise] = {}
        slow: list[Promise] = []
        for promise in promises:
            slots = tuple(program.key(name) for name in promise.names)
            if None in slots or not program.runs:
                slow.append(promise)
            else:
                fast.setdefault((promise.key, slots), promise)
        turns = dict.fromkeys(_turns(capacity, fixed, program.integers() | set(self.samples.kept)))
        # Shapes that are no sums of lengths may have been found so in the very steps that they are learnt from.
        odd = dict.fromkeys((s.past, s.length) for s in self.samples.learning)
        near = _every(capacity, fixed) if capacity <= _SMALL else odd
        self._by_probes(slow, list(dict.fromkeys((*near, *_affordable(turns, _SLOW_AREA // self._heads(slow))))))
        area = (_PADDED_AREA if self.padded else _AREA) // self._heads(list(fast.values()))
        steps = dict.fromkeys((*_every(capacity, fixed), *_affordable(turns, area)))
        self._by_program(list(fast.values()), list(steps), program)
        self._in_batches([*fast.values(), *slow], program.integers())

    def _heads(self, promises: Sequence[Promise]) -> int:
        """How many heads have numbers of their own for each query and key, as biases do."""
        sample = max(self.samples.learning, key=lambda sample: sample.length)
        values = [sample.probe.given(p.given).value(name) for p in promises for name in p.names]
        shapes = [value.shape for value in values if value is not None and value.ndim > 2]
        return max((n for *_, n, s, t in shapes if s == sample.length and t >= sample.total), default=1) or 1

    def _in_batches(self, promises: Sequence[Promise], numbers: set[int]) -> None:
        """Check what has to hold in batches of other sizes, too."""
        promises = [p for p in promises if p.in_batches]
        if not promises or self.samples.fixed_batch:
            return
        found = sorted({*_BATCHES, *(n + d for n in numbers for d in (0, 1) if 1 < n < _LARGEST_BATCH)})
        length = self.samples.fixed_length or min(2, self.samples.capacity)
        past = min(3, self.samples.capacity - length)
        for batch in found[:_MOST_BATCHES]:
            sample = self.samples.step(batch, past, length, padded=self.padded)
            for promise in promises:
                promise.check(sample)

    def _step(self, past: int, length: int) -> Sample:
        return self.samples.step(self.batch, past, length, padded=self.padded)

    def _program(self, promises: Sequence[Promise]) -> Program:
        learning = self.samples.learning
        if self.padded:
            learning = tuple(self._step(sample.past, sample.length) for sample in learning)
        steps = [Step(sample.past, sample.length, sample.probe) for sample in learning]
        names = tuple(dict.fromkeys(name for promise in promises for name in promise.names))
        given = {name: value for promise in promises for name, value in promise.given.items()}
        return Program(self.samples.blueprint, names, steps, given, self.samples.kept)

    def _by_program(self, promises: Sequence[Promise], steps: Sequence[Lengths], program: Program) -> None:
        for past, length in steps if promises else ():
            sample = self._step(past, length)
            values = program.run(past, length, sample.probe.values)
            computed = replace(sample, probe=sample.probe.given(values))
            for promise in promises:
                if not _holds(promise, computed):
                    promise.check(sample)

    def _by_probes(self, promises: Sequence[Promise], steps: Sequence[Lengths]) -> None:
        for past, length in steps if promises else ():
            sample = self._step(past, length)
            for promise in promises:
                promise.check(sample)


def _holds(promise: Promise, sample: Sample) -> bool:
    try:
        promise.check(sample)
    except UnsupportedModelError:
        return False
    return True


def _every(capacity: int, fixed: int) -> Iterator[Lengths]:
    if capacity <= _SMALL:
        pairs = product(range(capacity), [fixed] if fixed else range(1, capacity + 1))
        yield from ((p, s) for p, s in pairs if p + s <= capacity)
        return
    length = fixed or 1
    pasts = range(capacity - length + 1)
    yield from ((p, length) for p in pasts[:_EVERY])
    yield from ((p, length) for p in pasts[_EVERY :: 1 + len(pasts) ** 2 // 2 // _FAR])
    if not fixed:
        yield from ((0, s) for s in range(2, min(capacity, _PROMPTS) + 1))


def _turns(capacity: int, fixed: int, numbers: set[int]) -> Iterator[Lengths]:
    """Where something can turn: at the ends, and around every number."""
    near = sorted({n + d for n in numbers for d in (-1, 0, 1)} | {1, 2, capacity // 2, capacity})
    near = [n for n in near if 0 < n <= capacity]
    few = near if len(near) <= _PAIRED else [n for n in near if n in numbers][:_PAIRED]
    found = [place for s in ([fixed] if fixed else [1, 2, *near]) for place in ((0, s), (1, s), (capacity - s, s))]
    found += [place for n, s in product(near, [fixed] if fixed else [1, 2, *few]) for place in ((n, s), (n - s, s))]
    if not fixed:
        own = [n for n in near if n in numbers][:_PAIRED]
        found += [(n, total - n) for n, total in product(own, own) if n < total]
        # As long as can be afforded, where all cannot.
        most = _AREA // capacity
        found += [(0, int(_AREA**0.5)), (capacity - most, most), (capacity // 2, most)]
    return ((p, s) for p, s in found if p >= 0 and p + s <= capacity)


def _affordable(steps: Iterable[Lengths], area: int) -> list[Lengths]:
    """Those whose masks are not larger."""
    return [(p, s) for p, s in steps if s * (p + s) <= area]

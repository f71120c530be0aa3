"""Plans test steps for a region (changed part of the model), runs both versions, and describes the first difference."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import permutations

import numpy as np
from onnx import TensorProto

from trt_kvcache.cpu import RunError
from trt_kvcache.errors import OptionError, UnsupportedModelError
from trt_kvcache.importer.cache_plan import CachePlan, CacheUpdate, UpdateMode
from trt_kvcache.importer.check import Verdict
from trt_kvcache.importer.check.hashed_graph import Graph
from trt_kvcache.importer.check.region import Region
from trt_kvcache.importer.check.region_runs import RegionRuns, StuckError
from trt_kvcache.importer.check.tolerances import (
    added_rounding,
    both,
    cache_differs,
    first_difference,
    last,
    sequence_axis,
    take,
    tolerances,
)
from trt_kvcache.importer.check.verdicts import current_verdicts, key_of
from trt_kvcache.importer.interface import IndexLimits
from trt_kvcache.importer.protos import is_op
from trt_kvcache.importer.steps.drawn_inputs import Limits, Step, read_limits
from trt_kvcache.importer.steps.original_interface import Feeds
from trt_kvcache.importer.steps.probe import Term
from trt_kvcache.importer.steps.runnable import as_bytes, is_half, is_narrow
from trt_kvcache.importer.steps.sessions import ModelSession

_GARBAGE = (1e4, 1e3, 1e2, 30.0, 10.0, 3.0, 1.0)
"""Magnitudes of random numbers in cache rows without a token, tried until these do not change the original's results.

With the last one, both models must be equal even if the original reads these rows. Else only the rewritten model might
read these rows.
"""
_HALF_GARBAGE = _GARBAGE[3:]
"""The same for float16: ONNX Runtime hides a key by adding the lowest float16, which larger scores would exceed."""
_BATCH = 2
_FEW_STEPS = 6
_FEW = 64  # the most keys that are changed, one by one, to find a key that only one side sees
_MOST_INTEGERS = 8
_LARGEST_BATCH = 64
_LONGEST_PROMPT = 2048  # tokens; the size of masks grows with the square
_COSTLY = 128  # tokens; a longer step is expensive, so it runs only after the smallest and the largest past
_FAR = 512  # tokens; after longer pasts, sums over keys and biases have ten times larger rounding errors
_LONG = 1 << 14  # rows
_FARTHEST = 1 << 20  # the most tokens of a text, if every cache is circular
_PLAIN = ((0, 4), (5, 3), (9, 1), (1, 1), (0, 1), (7, 8), (11, 2), (0, 9))
"""Pairs of tokens before a step and new tokens: short and long, also with an empty past."""
_RAGGED = (((0, 5, 11), 2), ((12, 1), 1), ((3, 0), 3))
_SHORT = (((3, 4), (2, 0)), ((0, 2, 0), (1, 3, 0)), ((4, 1), (1, 2)), ((2, 0), (0, 1)))
"""For each step: the tokens of each row before the step, and the valid new tokens of each row (0: an idle row)."""


def compare_region(region: Region, plan: CachePlan, limits: IndexLimits, *, thorough: bool) -> Verdict:
    """Compare the original and the rewritten region (changed part of the model), and return the verdict."""
    name = next(iter(region.joins), "") or ", ".join(region.presents)
    compared = False
    alive: set[str] = set()
    if why := added_rounding(region):
        return Verdict(name, "different", why)
    try:
        for run in _runs(region, as_bytes(plan), limits, thorough=thorough):
            if why := run.judge(first=not compared):
                return Verdict(name, "different", why)
            compared |= run.compares
            alive |= run.alive
    except StuckError as error:
        return Verdict(name, "stuck", str(error))
    except (RunError, OptionError, UnsupportedModelError) as error:
        return Verdict(name, "undecided", str(error))
    if not compared:
        return Verdict(name, "vacuous", "no step of the schedule fits the limits of the model")
    graph = Graph(region.models[0])  # outputs that depend only on shapes may be equal in all steps
    by_numbers = region.is_end and not graph.tainted(graph.inputs, shapes=False).isdisjoint(region.joins)
    shows = region.presents or region.drawn or by_numbers
    if shows and alive != set(region.joins):
        why = "the original returns the same number for all queries, keys and values, so nothing can be compared"
        return Verdict(name, "vacuous", why)
    return Verdict(name, "equal")


def _runs(region: Region, plan: CachePlan, limits: IndexLimits, *, thorough: bool) -> Iterator[_Run]:
    capacities = [c.capacity for c in plan.caches]
    capacity = min((c.capacity for c in _caches(region, plan)), default=max(capacities, default=1))
    allowed = read_limits(plan, _BATCH)
    rows = rows_needed((k for k in region.integers if k < capacity), min(allowed.length or 9, allowed.longest))
    wide = is_narrow(region.models)
    sessions: list[ModelSession] = []

    def make(plan: CachePlan, steps: Sequence[Step]) -> _Run:
        return _Run(RegionRuns(region, plan, limits, wide=wide, sessions=sessions), steps)

    at = plan
    if not thorough and 2 * rows < capacity and all(c.mode is UpdateMode.LINEAR for c in plan.caches):
        # Most steps run on short caches if no constant of the region is near the capacity.
        short = _shortened(plan, rows)
        first = make(short, plan_steps(read_limits(short, _BATCH), region.integers, rows))
        if first.has_verdict(first=True) or first.opens():
            at = short
            yield first
            yield make(plan, end_steps(allowed, capacity))
    if at is plan:
        yield make(plan, plan_steps(allowed, region.integers, capacity, thorough=thorough))
    few = plan_steps(read_limits(at, _BATCH), (), min(capacity, rows))[:_FEW_STEPS] if wide else []
    if _caches(region, at) and _has_norm(region):
        small = RegionRuns(region, at, limits, wide=wide, sessions=sessions, small=True)
        yield _Run(small, plan_steps(read_limits(at, _BATCH), (), min(capacity, rows))[:_FEW_STEPS])
    if wide and is_half(region.models):
        yield _Run(RegionRuns(region, at, limits, wide=False, sessions=[]), few)
    large = _queries(region)
    if wide and large:
        yield _LargeRun(RegionRuns(region, at, limits, wide=False, sessions=[]), few[:2], large)


def _has_norm(region: Region) -> bool:
    norms = ("Sqrt", "Reciprocal", "Pow", "GroupQueryAttention")
    operators = {node.op_type for model in region.models for node in model.graph.node}
    return any(op in norms or "Normalization" in op for op in operators)


class _Run:
    """A comparison of both versions of a region (changed part of the model) over several steps.

    Attributes:
        compared: the steps that were compared so far.
        alive: names of outputs whose numbers vary. A comparison of other outputs would show nothing.
    """

    def __init__(self, runs: RegionRuns, steps: Sequence[Step]) -> None:
        region = runs.region
        self.runs, self.region = runs, region
        self.compared: list[Step] = []
        self.alive: set[str] = set()
        self._seen: dict[str, float] = {}
        self._was_compared = False
        self._tolerance, self._exact = tolerances(region, wide=runs.wide, caches=bool(_caches(region, runs.plan)))
        nodes = region.models[0].graph.node
        self._scores = {name for node in nodes if is_op(node, "Attention") for name in node.output[3:]}
        if not runs.counts_tokens:
            steps = list({(len(step.starts), step.length, runs.is_small(step)): step for step in steps}.values())
        self._steps = [step for step in steps if runs.fits(step)]
        self._changes_past = False
        self._verdicts = current_verdicts()
        kind, steps_read = type(self).__name__.encode(), repr(self._steps).encode()
        self._key = "" if self._verdicts is None else key_of(kind, runs.reads(), steps_read)

    @property
    def compares(self) -> bool:
        """True if steps were compared, in this run or in an earlier run whose stored result this run uses."""
        return bool(self.compared) or self._was_compared

    def has_verdict(self, *, first: bool) -> bool:
        """Use a stored verdict for this run. Return True if there is one; a stored verdict always says "equal"."""
        alive = None if self._verdicts is None else self._verdicts.find(self._name(first=first))
        if alive is not None:
            self.alive, self._was_compared = set(alive), True
        return alive is not None

    def judge(self, *, first: bool) -> str:
        """Return a description of the first difference, or "". `first`: no earlier run has compared a step."""
        if self.has_verdict(first=first):
            return ""
        why = self.compare() or (self.multiplies_no_number() if first else "")
        if self._verdicts is not None and not why and self.compared:
            self._verdicts.keep(self._name(first=first), self.alive)
        return why

    def _name(self, *, first: bool) -> str:
        """Return the key of this run's stored verdict. The first run has another key, because it compares more."""
        return f"{self._key}-first" if first else self._key

    def opens(self) -> bool:
        try:
            self.runs.open(self._steps)
        except RunError:
            return False
        return bool(self.runs.sessions)

    def compare(self) -> str:
        """Return a description of the first difference; empty if both versions are equal."""
        if not self._steps:
            return ""
        if not self.runs.sessions:
            self.runs.open(self._steps)
        for magnitude in _GARBAGE if self.runs.wide or not is_half(self.region.models) else _HALF_GARBAGE:
            self.runs.garbage = magnitude
            why, leaks = self._first_difference()
            if self._changes_past and not self.runs.settled:
                self.runs.settled = True
                why, leaks = self._first_difference()
            if not leaks:
                return why
        return why

    def _first_difference(self) -> tuple[str, bool]:
        """Run all steps up to the first difference, and return the difference in words ("": none) and a bool.

        The bool is True if numbers in cache rows without a token change results of the original: in the step that
        differs or, if no step differs, in any step.
        """
        self.compared = []
        leaks = False
        for step in self._steps:
            feeds = self.runs.feeds(step)
            try:
                originals = list(self.runs.originals(step, feeds))
            except RunError:  # the original cannot run this step
                continue
            dead = [n for n in self.region.joins if n not in self.alive]
            numbers = {n: np.nan_to_num(originals[0][n], nan=0.0) for n in dead if originals[0][n].size}
            self.alive |= {
                n for n, v in numbers.items() if not v.max() == v.min() == self._seen.setdefault(n, v.reshape(-1)[0])
            }
            for span in self.runs.logits_spans(step):
                rewritten = self.runs.rewritten(step, feeds, span)
                for original, how in zip(originals, ("", " (all sequences in one run)"), strict=False):
                    if why := self._differ(step, original, rewritten, span):
                        return why + how, self._reads_garbage(step, originals[0])
            leaks = leaks or self._reads_garbage(step, originals[0])
            self.compared.append(step)
        return "", leaks

    def _reads_garbage(self, step: Step, full: Feeds) -> bool:
        """True if numbers in cache rows without a token change the original's results. `full`: results with them."""
        if not self.runs.shows_garbage or not self.region.joins:
            return False
        clean = self.runs.original(step, self.runs.feeds(step, 0.0))
        return any(first_difference(clean[name], full[name], self._tolerance) is not None for name in self.region.joins)

    def multiplies_no_number(self) -> str:
        """Name a key or value of the rewritten model that is not finite in rows without a token; or ""."""
        if not self.compared:
            return ""
        step = self.compared[0]
        for name, values in self.runs.products(step).items():
            if values.dtype.kind == "f" and not np.isfinite(values).all():
                return (
                    f"the rewritten model multiplies '{name}', which has NaN or infinite numbers in cache rows without "
                    f"a token {_when(step)}"
                )
        return ""

    def _differ(self, step: Step, first: Feeds, second: Feeds, span: int) -> str:
        interface = self.runs.interface
        # An original without valid lengths gives no result for rows with fewer new tokens than the step.
        rows = [
            b
            for b, (s, v) in enumerate(zip(step.starts, step.valid, strict=True))
            if interface is None or v == s + step.length
        ]
        for name, shape in self.region.joins.items():
            a, b = first[name], second[name]
            if name in self.region.in_span:
                a = last(a, shape, span, step.length)
            if a.shape != b.shape or a.dtype != b.dtype:
                is_a, is_b = (f"{v.dtype} {list(v.shape)}" for v in (a, b))
                return f"'{name}' {_when(step)} is {is_a} in the original, but {is_b} in the rewritten model"
            for row in rows:
                x, y = (take(v, shape, slice(row, row + 1), len(step.starts)) for v in (a, b))
                if name in self._scores:  # ONNX Runtime's Attention uses the lowest number for masked scores
                    x, y = (np.where(v <= np.finfo(v.dtype).min, -np.inf, v) for v in (x, y))
                at = first_difference(x, y, self._tolerance * (10 if max(step.starts) > _FAR else 1))
                if at is not None:
                    where = self._where(step, name, shape, row, at, span)
                    return f"'{name}' {_when(step)}, sequence {row}: {both(x[at], y[at])}{where}"
        for name in self.region.presents:
            cache = self.runs.by_output[name]
            limit = interface.past_rows.get(cache.role.name) if interface is not None else None
            why, self._changes_past = cache_differs(cache, step, first[name], second[name], rows, limit, self._exact)
            if why:
                return f"the cache '{name}' {_when(step)}, {why}"
        return ""

    def _where(self, step: Step, name: str, shape: Sequence[Term], row: int, at: tuple[int, ...], span: int) -> str:
        axis = sequence_axis(shape)
        query = None if axis is None else at[axis] + (step.length - span if name in self.region.in_span else 0)
        words = "" if query is None else f"; query {query} of the step"
        first_new = step.starts[row]
        if span != step.length or first_new > _FEW:
            return words
        before: list[float] = []
        for key in (None, *range(first_new + min(step.length, _FEW))):
            if query is not None and key == first_new + query:
                continue  # the query's own key
            feeds = self.runs.feeds(step)
            if key is not None:
                self.runs.change_key(key, first_new, feeds)
            ran = (self.runs.original(step, feeds), self.runs.rewritten(step, feeds, span))
            after = [float(take(v[name], shape, slice(row, row + 1), len(step.starts))[at]) for v in ran]
            before = before or after
            moved = [abs(a - b) > 1e-7 for a, b in zip(before, after, strict=True)]
            if moved[0] != moved[1]:
                return f"{words} sees key {key} only in the {'original' if moved[0] else 'rewritten model'}"
        return words


def _queries(region: Region) -> list[int]:
    """Return indices of float32 inputs that are not written to caches, because caches would round them."""
    graph = Graph(region.models[1])
    updates = [node.input[1] for node in graph.nodes if is_op(node, "TensorScatter")]
    _, written, _ = graph.cone(updates, ())
    return [
        number
        for number, b in enumerate(region.boundaries)
        if b.elem_type in (TensorProto.FLOAT, TensorProto.DOUBLE) and not {*updates, *written} & {*b.names[1]}
    ]


class _LargeRun(_Run):
    """A test with float32 numbers beyond the range of float16, because the rewrite must not cast them to float16.

    The test looks only for overflows that the original does not have: with scores of millions, a softmax leaves only
    one key for each query, which hides other differences. In each pass, one of the float32 inputs (indices `large`)
    holds large numbers.
    """

    def __init__(self, runs: RegionRuns, steps: Sequence[Step], large: Sequence[int]) -> None:
        super().__init__(runs, steps)
        self._large = large

    def compare(self) -> str:
        if self._steps and not self.opens():
            return ""  # ONNX Runtime cannot compute in this type
        for number in self._large:
            self.runs.large = number
            why, _ = self._first_difference()
            if why:
                return why
        return ""

    def _differ(self, step: Step, first: Feeds, second: Feeds, span: int) -> str:
        fed = self.region.boundaries[self.runs.large or 0].names[0]
        for name, shape in self.region.joins.items():
            a, b = first[name], second[name]
            a = last(a, shape, span, step.length) if name in self.region.in_span else a
            if a.shape == b.shape and np.any(np.isfinite(a) & ~np.isfinite(b)):
                return (
                    f"'{name}' {_when(step)} overflows only in the rewritten model, if '{fed[0] if fed else name}' has "
                    "large float32 numbers"
                )
        return ""


def _when(step: Step) -> str:
    starts = step.starts[0] if len(set(step.starts)) == 1 else list(step.starts)
    return f"(in a step of {step.length} tokens after {starts})"


def _caches(region: Region, plan: CachePlan) -> list[CacheUpdate]:
    inputs = {v.name for model in region.models for v in model.graph.input}
    return [c for c in plan.caches if c.past in inputs]


def _shortened(plan: CachePlan, rows: int) -> CachePlan:
    def shorten(shape: tuple[int | str, ...], axis: int) -> tuple[int | str, ...]:
        return (*shape[:axis], rows, *shape[axis + 1 :])

    caches = tuple(
        replace(
            c,
            capacity=rows,
            logical_shape=shorten(c.logical_shape, c.sequence_axis),
            physical_shape=shorten(c.physical_shape, c.physical_sequence_axis),
        )
        for c in plan.caches
    )
    of = {name: c for c in caches for name in (c.past, c.present)}
    tensors = tuple(replace(t, shape=of[t.name].physical_shape) if t.name in of else t for t in plan.tensors)
    spans = tuple(replace(s, capacity=rows) for s in plan.spans)
    return replace(plan, caches=caches, tensors=tensors, spans=spans, options=replace(plan.options, capacity=rows))


def rows_needed(integers: Iterable[int], longest: int) -> int:
    """Return how many cache rows the test steps of a region need, without the steps at the end of a cache."""
    return max([*(past + length for past, length in _PLAIN), *(k + longest for k in integers)]) + 3


def plan_steps(limits: Limits, integers: Iterable[int], capacity: int, *, thorough: bool = False) -> list[Step]:
    """Return test steps: with lengths near `integers`, at the end of caches, and with sequences of unequal lengths.

    The model computes lengths from `integers`; the eight smallest are used. With `thorough`, also plan steps after
    every number of past tokens up to 4,096.
    """
    return _fitting(_all(limits, sorted(integers), capacity, thorough=thorough), limits, capacity)


def end_steps(limits: Limits, capacity: int) -> list[Step]:
    """Return steps that end near the capacity; only one for a large capacity, because steps copy whole caches."""
    steps = [_even(1, capacity - 1, 1), _even(1, capacity - 4, 4), _even(2, capacity - 2, 1)]
    return _fitting(steps[:1] if capacity > _LONG else steps, limits, capacity)


def _fitting(steps: Iterable[Step], limits: Limits, capacity: int) -> list[Step]:
    return list(dict.fromkeys(s for step in steps if (s := _fit(step, limits, capacity)) is not None))


def _all(limits: Limits, integers: list[int], capacity: int, *, thorough: bool) -> Iterator[Step]:
    for i, (past, length) in enumerate(_PLAIN):
        yield _even(1 + i % 2, past, length)
    for past, length in ((capacity - 1, 1), (capacity - 4, 4), (capacity - 2, 1)):
        yield _even(1, past, length)
    most = capacity if limits.linear is not None else max(capacity, _FARTHEST)
    near = [k for k in integers if 1 < k <= most][:_MOST_INTEGERS]
    for k in near:
        for past, length in ((k - 2, 1), (k - 1, 1), (k, 1), (k + 1, 1), (k - 2, 4), (k, 3)):
            yield _even(1, past, length)
        if k <= _LARGEST_BATCH:
            yield _even(k, 3, 2)
            yield _even(k + 1, 3, 2)
        for length in (k - 1, k, k + 1):
            if length <= _LONGEST_PROMPT:
                yield _even(1, 0, length)
    for k, other in permutations(near, 2):  # near values of P and S, or of P and P + S
        others = [n for n in near if n != other]
        if other > _COSTLY and k not in (others[0], others[-1]):
            continue
        if other <= _LONGEST_PROMPT:
            yield _even(1, k, other)
            yield _even(1, k + 1, other + 1)
        if 0 < other - k <= _LONGEST_PROMPT:
            yield _even(1, k, other - k)
    for rows in limits.circular:
        for batch, past, length in (
            (1, rows - 1, 1), (1, rows, 1), (2, rows, 2), (1, 2 * rows - 1, 1), (2, 3 * rows, 1), (1, rows + 2, 3),
        ):  # fmt: skip
            yield _even(batch, past, length)
    for starts, length in _RAGGED:
        yield Step(length, starts, tuple(p + length for p in starts))
    if limits.lengths:
        for starts, counts in _SHORT:
            length = max(counts)
            yield Step(length, starts, tuple(p + n if n else 0 for p, n in zip(starts, counts, strict=True)))
    if thorough:
        for past in range(min(capacity, 4096)):
            yield _even(1, past, 1)
            yield _even(1, past, 3)


def _even(batch: int, past: int, length: int) -> Step:
    return Step(length, (past,) * batch, (past + length,) * batch)


def _fit(step: Step, limits: Limits, capacity: int) -> Step | None:
    """Adapt a test step to the limits of the model; None if no similar step fits."""
    length, starts = step.length, step.starts
    counts = [v - s if v else 0 for s, v in zip(starts, step.valid, strict=True)]
    if limits.length is not None and length != limits.length:
        counts = [limits.length if n == length else min(n, limits.length) for n in counts]
        length = limits.length
    if not limits.ragged:
        starts, counts = (starts[0],) * len(starts), [counts[0]] * len(counts)
    if not limits.indexed:
        starts = (0,) * len(starts)
    if limits.fixed_batch:
        starts = tuple((starts * limits.batch)[: limits.batch])
        counts = (counts * limits.batch)[: limits.batch]
    if length > limits.longest or length < 1 or min(starts) < 0:
        return None
    if limits.linear is not None and any(s + length > capacity for s in starts):
        return None
    if any(s % rows + length > rows for rows in limits.no_straddle for s in starts):
        return None
    return Step(length, starts, tuple(s + n if n else 0 for s, n in zip(starts, counts, strict=True)))

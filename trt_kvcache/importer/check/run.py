"""Run both sides of a region over its steps, and name the first difference."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from trt_kvcache.errors import OptionError, UnsupportedModelError
from trt_kvcache.importer import extensions
from trt_kvcache.importer.check.compare import (
    FAR,
    apart,
    both,
    cache_differs,
    hidden,
    joined,
    last,
    said,
    take,
    tolerances,
)
from trt_kvcache.importer.check.process import Verdict
from trt_kvcache.importer.check.region import Region, products_of, with_outputs
from trt_kvcache.importer.check.schedule import end_steps, plan_steps, rows_needed
from trt_kvcache.importer.check.shapes import UNKNOWN, Term
from trt_kvcache.importer.plan import CachePlan, CacheUpdate, OriginalRole, UpdateMode
from trt_kvcache.importer.planning.index_limits import IndexLimits
from trt_kvcache.importer.protos import is_op
from trt_kvcache.importer.steps.contents import (
    CacheTensor,
    as_text,
    find_caches,
    find_states,
    first_contents,
    ring_window,
)
from trt_kvcache.importer.steps.engine import Engine, EngineError, open_engine
from trt_kvcache.importer.steps.inputs import StepInputs, draw_constants
from trt_kvcache.importer.steps.original import OriginalInterface
from trt_kvcache.importer.steps.runnable import as_bytes, is_half, is_narrow, open_types, runnable
from trt_kvcache.importer.steps.schedule import Step, read_limits

Array = npt.NDArray[Any]
Feeds = dict[str, Array]

_GARBAGE = (1e4, 1e3, 1e2, 30.0, 10.0, 3.0, 1.0)
"""Magnitudes of garbage in rows without a token, tried from the first on until the original hides it. At the last one
both sides have to be equal even if the original reads it: it must not hide what the rewritten model alone reads."""
_HALF_GARBAGE = _GARBAGE[3:]
"""In float16 ONNX Runtime adds the lowest number to scores that a mask hides, and scores of more would outweigh it."""
_BATCH = 2
_FEW = 64  # keys, each of which is changed to find the one that only one side sees
_TRIALS = 4  # steps that the original may refuse before it counts as one that does not run
_BYTES = 256 << 20  # of the caches of a step
_LARGEST = 1 << 30  # of those of a step of one sequence; longer caches are checked at a shorter length only


def run_region(
    region: Region, plan: CachePlan, limits: IndexLimits, *, thorough: bool = False, seed: int = 0
) -> Verdict:
    """The verdict for a region: both sides run over all steps that it needs."""
    name = next(iter(region.joins), "") or ", ".join(region.presents)
    compared = 0
    alive: set[str] = set()
    plan = as_bytes(plan)
    try:
        for run in _runs(region, plan, limits, seed, thorough=thorough):
            why = run.compare() or ("" if compared else run.reads_no_number())
            compared += len(run.compared)
            alive |= run.alive
            if why:
                return Verdict(name, "different", why, compared)
    except (EngineError, OptionError, UnsupportedModelError) as error:
        return Verdict(name, "undecided", str(error), compared)
    if not compared:
        return Verdict(name, "vacuous", "no step of the schedule fits the model", 0)
    if region.presents and alive != set(region.joins):
        return Verdict(name, "vacuous", "the original gives the same number for all queries, keys and values", compared)
    return Verdict(name, "equal", "", compared)


def _runs(region: Region, plan: CachePlan, limits: IndexLimits, seed: int, *, thorough: bool) -> Iterator[_Run]:
    model_limits = read_limits(plan, _BATCH)
    capacity = min(
        (c.capacity for c in _caches(region, plan)), default=max((c.capacity for c in plan.caches), default=1)
    )
    longest = min(model_limits.length or 9, model_limits.longest)
    rows = rows_needed((k for k in region.integers if k < capacity), longest)
    wide = is_narrow(region.models)

    def make(plan: CachePlan, steps: Sequence[Step], *, wide: bool) -> _Run:
        return _Run(region, plan, limits, steps, seed, wide=wide)

    at = plan
    if not thorough and 2 * rows < capacity and all(c.mode is UpdateMode.LINEAR for c in plan.caches):
        # Whatever holds no number of the capacity runs on short caches, too.
        short = _shortened(plan, rows)
        run = make(short, plan_steps(read_limits(short, _BATCH), region.integers, rows, thorough=thorough), wide=wide)
        if run.opens():
            at = short
            yield run
            last = make(plan, end_steps(model_limits, capacity), wide=wide)
            last.engines = run.engines
            yield last
    if at is plan:
        yield make(plan, plan_steps(model_limits, region.integers, capacity, thorough=thorough), wide=wide)
    if wide and is_half(region.models):
        yield make(at, plan_steps(read_limits(at, _BATCH), (), min(capacity, rows))[:6], wide=False)


class _Run:
    """Both sides of a region, opened in one type.

    Attributes:
        compared: steps that were compared.
        alive: joins that are not one number throughout.
    """

    def __init__(
        self, region: Region, plan: CachePlan, limits: IndexLimits, steps: Sequence[Step], seed: int, *, wide: bool
    ) -> None:
        self.region, self.plan, self.seed = region, plan, seed
        self.compared: list[Step] = []
        self.tolerance, self.exact = tolerances(region, wide=wide, caches=bool(_caches(region, plan)))
        attention = [n for n in region.models[0].graph.node if is_op(n, "Attention")]
        self.scores = {name for node in attention for name in node.output[3:]}
        self.models = tuple(open_types(m, wide=wide) for m in (runnable(region.models[0]), region.models[1]))
        self.wide = wide
        self.needed = [{v.name for v in model.graph.input} for model in region.models]
        stacks = [s for s in plan.stacks if s.io == "input" and s.name in self.needed[0]]
        parts = {part.name for s in stacks for part in s.parts}
        self.stacks = [s for s in plan.stacks if s in stacks or (s.io == "output" and s.name in region.presents)]
        names = self.needed[0] | self.needed[1] | parts
        self.caches = [c for c in (*find_caches(plan), *find_states(plan)) if c.role.name in names]
        self.by_output = {c.output: c for c in find_caches(plan)}
        self.interface = self._interface(parts) if plan.original else None
        growing = {t.name for t in plan.original if t.role is OriginalRole.GROWING_CACHE}
        self.shows_garbage = any(c.update is not None and c.role.name not in growing for c in self.caches)
        self.limits = limits
        fed = {name for b in region.boundaries for side in b.names for name in side}
        if fed.issuperset(self.needed[0] | self.needed[1]):  # nothing says how many tokens there were before
            steps = list({(len(step.starts), step.length): step for step in steps}.values())
        self.steps = [step for step in steps if self._fits(step)]
        self.settled = self.changes_past = False
        self.alive: set[str] = set()
        self.engines: list[Engine] = []
        self.refused = ""
        self.garbage = 0.0

    def _interface(self, parts: set[str]) -> OriginalInterface:
        wanted = self.needed[0] | parts
        original = tuple(
            t
            for t in self.plan.original
            if (t.io == "input" and (t.name in wanted or t.role is OriginalRole.TOKENS))
            or (t.io == "output" and t.name in self.region.presents)
        )
        return OriginalInterface(replace(self.plan, original=original), twin=True)

    def compare(self) -> str:
        """The first difference in words; empty: there is none."""
        if not self.steps:
            return ""
        if not self.engines:
            self._open()
        for magnitude in _GARBAGE if self.wide or not is_half(self.region.models) else _HALF_GARBAGE:
            self.garbage = magnitude
            why, step = self._first_difference()
            if self.changes_past and not self.settled:
                self.settled = True
                why, step = self._first_difference()
            if not self._reads_garbage([step] if why else self.compared):
                return why
        return why

    def reads_no_number(self) -> str:
        """A product of the rewritten side over rows without a token that are no finite numbers, in words, or nothing.

        The caches hold finite numbers there. ONNX hides what a mask hides with Where; a kernel may add the mask, and
        NaN stays NaN.
        """
        names = products_of(self.models[1], [c.role.name for c in self.caches])
        if not names or not self.compared:
            return ""
        step = self.compared[0]
        feeds = self._second(step, self._shared(step), self._contents(step, self.garbage), step.length)
        ran = open_engine(with_outputs(self.models[1], names), feeds).run(feeds)
        found = next((n for n in names if ran[n].dtype.kind == "f" and not np.isfinite(ran[n]).all()), None)
        if found is None:
            return ""
        return (
            f"the rewritten model multiplies '{found}', which is no finite number in rows of the cache without a "
            f"token, after {said(step.starts)} tokens, {step.length} new"
        )

    def opens(self) -> bool:
        """True if both sides run a step."""
        try:
            self._open()
        except EngineError:
            return False
        return bool(self.engines)

    def _reads_garbage(self, steps: Sequence[Step]) -> bool:
        """True if the original itself lets garbage of this magnitude through: it may outweigh what differs."""
        if not self.shows_garbage:
            return False
        for step in steps:
            shared = self._shared(step)
            full, clean = (self._original(step, shared, self._contents(step, g)) for g in (self.garbage, 0.0))
            if any(apart(clean[name], full[name], self.tolerance) is not None for name in self.region.joins):
                return True
        return False

    def _first_difference(self) -> tuple[str, Step]:
        self.compared = []
        for step in self.steps:
            shared, contents = self._shared(step), self._contents(step, self.garbage)
            try:
                first = self._original(step, shared, contents)
            except EngineError as error:  # a step that the original is not made for
                self.refused = str(error)
                continue
            self.alive |= {
                n for n in self.region.joins if first[n].size and np.ptp(np.nan_to_num(first[n], nan=0.0)) > 0
            }
            for kept in self._kept(step):
                second = self._rewritten(step, shared, contents, kept)
                why = self._differ(step, first, second, kept)
                if why:
                    return why, step
            self.compared.append(step)
        return "", step

    def _fits(self, step: Step) -> bool:
        """True if the step is not too large, and the original can run its rows."""
        together = self.interface.together if self.interface else None
        if together is not None and len(set(step.starts)) > 1:
            return False
        partly = any(0 < v < s + step.length for s, v in zip(step.starts, step.valid, strict=True))
        if partly and self._has_rings(step):
            return False  # a ring made of a window takes whole updates, and idle rows: the plan says so
        size = sum(np.prod(c.logical_shape(len(step.starts)), dtype=np.int64) * 4 for c in self.caches if c.update)
        return bool(size <= (_BYTES if len(step.starts) > 1 else _LARGEST))

    def _open(self) -> None:
        refusals = []
        # A past that holds tokens first: some originals take no empty one.
        for step in sorted(self.steps, key=lambda s: not all(s.starts))[:_TRIALS]:
            shared = self._shared(step)
            first = self._feeds(step, shared, self._contents(step, 0.0))
            opened = extensions.opener_of(
                replace(self.plan, stacks=tuple(self.stacks)), lambda feeds: open_engine(self.models[0], feeds)
            )
            try:
                self.engines = [opened(first[0][1])]
            except EngineError as error:
                refusals.append(str(error))
                continue
            try:
                given = self._second(step, shared, self._contents(step, 0.0), step.length)
                self.engines.append(open_engine(self.models[1], given, strict=True))
            except EngineError as error:
                raise EngineError(f"the rewritten part does not run: {error}") from None
            return
        if refusals:
            raise EngineError(f"the original's part does not run: {refusals[0]}")

    def _rng(self, step: Step, what: int) -> np.random.Generator:
        return np.random.default_rng([self.seed, what, step.length, *step.starts])

    def _shared(self, step: Step) -> Feeds:
        """The inputs of both sides without the caches."""
        constants = draw_constants(self.plan, len(step.starts), self.seed, twin=True)
        inputs = StepInputs(
            self.plan, self.limits, constants, self._rng(step, 0),
            twin=True, unknown=UNKNOWN, rings=self._has_rings(step),
        )  # fmt: skip
        made = inputs.shared(step)
        rng = self._rng(step, 1)
        for number, b in enumerate(self.region.boundaries):
            shape = [t.at(len(step.starts), step.length) for t in b.shape]
            made[f"boundary {number}"] = rng.standard_normal(shape, np.float32)
        return made

    def _contents(self, step: Step, garbage: float) -> Feeds:
        """Caches as the original has them, in the layout of the plan."""
        made = {}
        for number, cache in enumerate(self.caches):
            rng = np.random.default_rng([self.seed, 2, number])
            held = self._as_text(cache, step)
            values = first_contents(held, step.starts, garbage, rng, twin=True)
            made[cache.role.name] = values.astype(np.float32) if self.wide and values.dtype == np.float16 else values
        return self._settle(step, made) if self.settled else made

    def _settle(self, step: Step, contents: Feeds) -> Feeds:
        """Tokens of a past as a step of the original leaves them, for models that round a whole cache."""
        ran = self._original(step, self._shared(step), contents)
        for name in self.region.presents:
            cache = self.by_output[name]
            if cache.update is not None and ran[name].shape == contents[cache.role.name].shape:
                old = np.moveaxis(contents[cache.role.name], cache.update.sequence_axis, 1)
                new = np.moveaxis(ran[name], cache.update.sequence_axis, 1)
                for row, tokens in enumerate(step.starts):
                    old[row, :tokens] = new[row, :tokens]
        return contents

    def _as_text(self, cache: CacheTensor, step: Step) -> CacheTensor:
        """The cache as the original holds it, where it became a ring."""
        return as_text(cache, self.plan, self.region.rows, max(s + step.length for s in step.starts))

    def _has_rings(self, step: Step) -> bool:
        return any(self._as_text(cache, step) is not cache for cache in self.caches)

    def _feeds(self, step: Step, shared: Feeds, contents: Feeds) -> list[tuple[slice, Feeds]]:
        """The original's inputs, for one or several runs of a part of the rows each."""
        whole = {**shared, **contents}
        if self.interface is None:
            every = slice(0, len(step.starts))
            made = {name: whole[name] for name in self.needed[0] if name in whole}
            return [(every, made | self._bounds(shared, len(step.starts), every))]
        return [
            (rows, self.interface.feeds(whole, rows, past) | self._bounds(shared, len(step.starts), rows))
            for rows, past in self.interface.groups(whole)
        ]

    def _bounds(self, shared: Feeds, batch: int, rows: slice) -> Feeds:
        """The original's boundaries for some rows of the batch."""
        made: Feeds = {}
        for number, b in enumerate(self.region.boundaries):
            made |= dict.fromkeys(b.names[0], take(shared[f"boundary {number}"], b.shape, rows, batch))
        return made

    def _second(self, step: Step, shared: Feeds, contents: Feeds, kept: int) -> Feeds:
        """The rewritten side's inputs."""
        made = {name: values for name, values in shared.items() if name in self.needed[1]}
        for cache in self.caches:
            name = cache.role.name
            if name not in self.needed[1]:
                continue
            values = contents[name]
            if self._as_text(cache, step) is not cache:
                rng = np.random.default_rng([self.seed, 3])
                values = ring_window(values, cache, step.starts, self.garbage, rng, twin=True)
            made[name] = cache.to_physical(values)
        tight = max(1, *step.valid)
        for i, span in enumerate(self.plan.spans):
            low = min(tight, span.capacity)
            made[span.name] = np.arange(low + (span.capacity - low) * ((step.length + sum(step.starts) + i) % 3) // 2)
        if self.plan.logits_span is not None:
            made[self.plan.logits_span.name] = np.arange(kept)
        for number, b in enumerate(self.region.boundaries):
            values = shared[f"boundary {number}"]
            made |= dict.fromkeys(b.names[1], last(values, b.shape, kept, step.length) if b.kept else values)
        return made

    def _kept(self, step: Step) -> tuple[int, ...]:
        span = self.plan.logits_span
        if span is None or span.name not in self.needed[1]:
            return (step.length,)
        return tuple(dict.fromkeys((step.length, 1, (step.length + 1) // 2)))

    def _original(self, step: Step, shared: Feeds, contents: Feeds) -> Feeds:
        """The original's joins and presents."""
        ran = [(rows, self.engines[0].run(feeds)) for rows, feeds in self._feeds(step, shared, contents)]
        for name, shape in self.region.joins.items():
            if any(out[name].ndim != len(shape) for _, out in ran):
                raise UnsupportedModelError(f"'{name}' has {ran[0][1][name].ndim} axes in the original")
        made = {name: joined([out[name] for _, out in ran], shape) for name, shape in self.region.joins.items()}
        if self.interface is None:
            return made | {name: ran[0][1][name] for name in self.region.presents}
        triples = [(rows, step.starts[rows.start], out) for rows, out in ran]
        return made | self.interface.outputs({**shared, **contents}, triples)

    def _rewritten(self, step: Step, shared: Feeds, contents: Feeds, kept: int) -> Feeds:
        return self.engines[1].run(self._second(step, shared, contents, kept))

    def _differ(self, step: Step, first: Feeds, second: Feeds, kept: int) -> str:
        at_step = f"after {said(step.starts)} tokens, {step.length} new"
        # Of rows with fewer tokens than the step an original without lengths says nothing.
        rows = [
            b
            for b, (s, v) in enumerate(zip(step.starts, step.valid, strict=True))
            if self.interface is None or v == s + step.length
        ]
        for name, shape in self.region.joins.items():
            a, b = first[name], second[name]
            if name in self.region.kept:
                a = last(a, shape, kept, step.length)
            if a.shape != b.shape or a.dtype != b.dtype:
                is_a, is_b = (f"{v.dtype} {list(v.shape)}" for v in (a, b))
                return f"'{name}' is {is_a} {at_step}, and {is_b} in the rewritten model"
            for row in rows:
                x, y = (take(v, shape, slice(row, row + 1), len(step.starts)) for v in (a, b))
                if name in self.scores:
                    x, y = hidden(x), hidden(y)
                at = apart(x, y, self.tolerance * (10 if max(step.starts) > FAR else 1))
                if at is not None:
                    where = self._where(step, name, shape, row, at, kept)
                    return f"'{name}' {at_step}, sequence {row}: {both(x[at], y[at])}{where}"
        for name in self.region.presents:
            cache = self.by_output[name]
            held = self.interface.kept.get(cache.role.name) if self.interface is not None else None
            why, self.changes_past = cache_differs(cache, step, first[name], second[name], rows, held, self.exact)
            if why:
                return f"the cache '{name}' {at_step}, {why}"
        return ""

    def _where(self, step: Step, name: str, shape: Sequence[Term], row: int, at: tuple[int, ...], kept: int) -> str:
        """The query at which the sides differ, and a key that only one side sees, in words."""
        axis = next((i for i, t in enumerate(shape) if t.sequence == 1 and t.factor == 1), None)
        query = None if axis is None else at[axis] + (step.length - kept if name in self.region.kept else 0)
        words = "" if query is None else f"; query {query} of the step"
        first_new = step.starts[row]
        if kept != step.length or first_new > _FEW:
            return words
        before: list[float] = []
        for key in (None, *range(first_new + min(step.length, _FEW))):
            if query is not None and key == first_new + query:
                continue  # its own
            shared, contents = self._shared(step), self._contents(step, self.garbage)
            if key is not None:
                self._change_key(key, first_new, shared, contents)
            ran = (self._original(step, shared, contents), self._rewritten(step, shared, contents, kept))
            after = [float(take(v[name], shape, slice(row, row + 1), len(step.starts))[at]) for v in ran]
            before = before or after
            moved = [abs(a - b) > 1e-7 for a, b in zip(before, after, strict=True)]
            if moved[0] != moved[1]:
                return f"{words} sees key {key} in the {'original' if moved[0] else 'rewritten model'} alone"
        return words

    def _change_key(self, key: int, first_new: int, shared: Feeds, contents: Feeds) -> None:
        """Another number for one token of the text: in the caches, or in the new rows."""
        for cache in self.caches:
            if key < first_new and cache.update is not None:
                rows = np.moveaxis(contents[cache.role.name], cache.update.sequence_axis, 1)
                rows[:, key % rows.shape[1]] += 3
        for number, b in enumerate(self.region.boundaries):
            axis = next((i for i, t in enumerate(b.shape) if t.sequence == 1 and t.factor == 1), None)
            if key >= first_new and axis is not None:
                np.moveaxis(shared[f"boundary {number}"], axis, 0)[key - first_new] += 3


def _caches(region: Region, plan: CachePlan) -> list[CacheUpdate]:
    inputs = {v.name for model in region.models for v in model.graph.input}
    return [c for c in plan.caches if c.past in inputs]


def _shortened(plan: CachePlan, rows: int) -> CachePlan:
    """The plan with shorter caches."""

    def cut(shape: tuple[int | str, ...], axis: int) -> tuple[int | str, ...]:
        return (*shape[:axis], rows, *shape[axis + 1 :])

    caches = tuple(
        replace(
            c,
            capacity=rows,
            logical_shape=cut(c.logical_shape, c.sequence_axis),
            physical_shape=cut(c.physical_shape, c.physical_sequence_axis),
        )
        for c in plan.caches
    )
    of = {name: c for c in caches for name in (c.past, c.present)}
    tensors = tuple(replace(t, shape=of[t.name].physical_shape) if t.name in of else t for t in plan.tensors)
    spans = tuple(replace(s, capacity=rows) for s in plan.spans)
    return replace(plan, caches=caches, tensors=tensors, spans=spans, options=replace(plan.options, capacity=rows))

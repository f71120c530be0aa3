"""Runs both versions of a region (changed part of the model): makes the inputs of a step, and returns the outputs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import replace

import msgspec
import numpy as np

from trt_kvcache.cpu import RunError
from trt_kvcache.errors import UnsupportedModelError
from trt_kvcache.importer.cache_plan import CachePlan, OriginalRole, PlanOptions
from trt_kvcache.importer.check.region import Region, products_of, unread, with_outputs
from trt_kvcache.importer.check.tolerances import joined, last, sequence_axis, take
from trt_kvcache.importer.interface import IndexLimits
from trt_kvcache.importer.steps.cache_contents import (
    CacheTensor,
    as_text,
    drawn_contents,
    drawn_normal,
    find_caches,
    find_states,
    numpy_dtype,
    ring_window,
)
from trt_kvcache.importer.steps.drawn_inputs import SPAN_KINDS, DrawnInputs, Step, draw_constants, span_inputs
from trt_kvcache.importer.steps.original_interface import Feeds, OriginalInterface
from trt_kvcache.importer.steps.probe import UNKNOWN
from trt_kvcache.importer.steps.runnable import open_types, runnable
from trt_kvcache.importer.steps.sessions import ModelSession, open_session

_SEED = 0
_NO_HALF = 1e6  # factor of random normal numbers, so that nearly all exceed 65,504, the largest float16
_SMALL = 2.0**-10  # factor of random normal numbers, so that their squares are about as large as the epsilon of a norm
_TRIALS = 4  # if the original runs none of this many steps, it counts as a model that does not run
_STRIDE = 104_729  # the numbers of shared inputs start this far apart in the pool of random numbers
_BYTES = 256 << 20  # the most bytes of all caches of a step with several sequences
_LARGEST = 1 << 30  # the same for one sequence; longer caches are checked only with fewer rows


class StuckError(RunError):
    """Raised if ONNX Runtime runs a part of the original, but not the same part of the rewritten model."""


class RegionRuns:
    """Runs both versions of a region (changed part of the model), either in float32 or in their own types.

    Attributes:
        caches: caches and states that one of the versions reads.
        interface: translates inputs and outputs to the original's interface; None if both interfaces are the same.
        shows_garbage: True if caches of the original have rows without a token.
        garbage: magnitude of the random numbers in cache rows without a token.
        settled: True if a step of the original wrote the past rows; needed for models that round cached rows.
        sessions: open sessions of the original and the rewritten version, shared by several runs of the same models.
        wide: True if both versions compute in float32.
        large: index of the shared input with numbers beyond the range of float16; None: there is no such input.
        small: True if all shared inputs hold small numbers in every step; else only some steps do (see `is_small`).
    """

    def __init__(
        self,
        region: Region,
        plan: CachePlan,
        limits: IndexLimits,
        *,
        wide: bool,
        sessions: list[ModelSession],
        small: bool = False,
    ) -> None:
        self.region, self.plan, self.wide = region, plan, wide
        self._limits = limits
        self._models = tuple(open_types(m, wide=wide) for m in (runnable(region.models[0]), region.models[1]))
        self._needed = [{v.name for v in model.graph.input} for model in region.models]
        self.caches = [
            c for c in (*find_caches(plan), *find_states(plan)) if c.role.name in self._needed[0] | self._needed[1]
        ]
        self._unread = unread(region.models, (c.role.name for c in self.caches))
        self.by_output = {c.output: c for c in find_caches(plan)}
        growing = {t.name for t in plan.original if t.role is OriginalRole.GROWING_CACHE}
        self.shows_garbage = any(c.update is not None and c.role.name not in growing for c in self.caches)
        original = tuple(
            t
            for t in plan.original
            if (t.io == "input" and (t.name in self._needed[0] or t.role is OriginalRole.TOKENS))
            or (t.io == "output" and t.name in region.presents)
        )
        self.interface = OriginalInterface(replace(plan, original=original)) if plan.original else None
        self.sessions = sessions
        self.garbage = 0.0
        self.settled = False
        self.large: int | None = None
        self.small = small

    def reads(self) -> bytes:
        """Return as bytes all data that the results of steps depend on. The key of a stored result is made from it."""
        region = self.region
        options = PlanOptions(capacity=self.plan.options.capacity)
        plan = replace(self.plan, options=options, warnings=(), notes=(), changes=(), inlined=())
        facts = (
            region.joins, region.in_span, region.presents, region.boundaries, region.integers, region.rows, plan,
            self._limits, self.wide, self.small,
        )  # fmt: skip
        models = [model.SerializeToString(deterministic=True) for model in region.models]
        return msgspec.json.encode((facts, [len(m) for m in models]), order="deterministic") + b"".join(models)

    @property
    def counts_tokens(self) -> bool:
        """True if the region has an input, such as a cache, that may depend on the number of tokens before a step."""
        fed = {name for b in self.region.boundaries for side in b.names for name in side}
        return not fed.issuperset(self._needed[0] | self._needed[1])

    def is_small(self, step: Step) -> bool:
        """True if a step uses small numbers, so that the epsilon of a norm changes results."""
        reads_rows = any(c.role.name not in self._unread for c in self.caches)
        return self.small or (not reads_rows and self.large is None and step.starts[0] % 2 == 1)

    def fits(self, step: Step) -> bool:
        """True if the check can run a step: its caches are not too large, and both models support its lengths."""
        together = self.interface.together if self.interface else None
        if together is not None and len(set(step.starts)) > 1:  # a fixed batch has one number of past tokens
            return False
        partly = any(0 < v < s + step.length for s, v in zip(step.starts, step.valid, strict=True))
        if partly and self._has_rings(step):
            return False  # in a ring of the plan, a sequence writes all tokens of a step or none
        size = sum(np.prod(c.logical_shape(len(step.starts)), dtype=np.int64) * 4 for c in self.caches if c.update)
        return bool(size <= (_BYTES if len(step.starts) > 1 else _LARGEST))

    def open(self, steps: Iterable[Step]) -> None:
        """Open sessions of both versions. Raises `RunError`, or `StuckError` if only the rewritten one does not run."""
        refusals = []
        # Try steps with a past first: some originals cannot run with an empty one.
        for step in sorted(steps, key=lambda s: not all(s.starts))[:_TRIALS]:
            feeds = self.feeds(step)
            try:
                original = open_session(self._models[0], self._of_original(step, feeds)[0][1])
            except RunError as error:
                refusals.append(str(error))
                continue
            try:
                inputs = self._of_rewritten(step, feeds, step.length)
                self.sessions[:] = [original, open_session(self._models[1], inputs, beside=original)]
            except RunError as error:
                raise StuckError(f"ONNX Runtime cannot run the rewritten part: {error}") from None
            return
        if refusals:
            raise RunError(f"ONNX Runtime cannot run this part of the original: {refusals[0]}")

    def feeds(self, step: Step, garbage: float | None = None) -> Feeds:
        """Make all inputs of a step: graph inputs and the original's caches by name, boundary N as "boundary N"."""
        batch = len(step.starts)
        rng = np.random.default_rng([_SEED, step.length, *step.starts])
        constants, rings = draw_constants(self.plan, batch, _SEED), self._has_rings(step)
        inputs = DrawnInputs(self.plan, self._limits, constants, rng, unknown=UNKNOWN, rings=rings)
        feeds = inputs.shared(step)
        for number, b in enumerate(self.region.boundaries):
            place = _STRIDE * (number + 1) * (step.length + 2 * sum(step.starts) + 1)
            drawn = drawn_normal([t.at(batch, step.length) for t in b.shape], place)
            size = _NO_HALF if number == self.large else _SMALL if self.is_small(step) else 1
            feeds[f"boundary {number}"] = drawn * np.float32(size)
        magnitude = self.garbage if garbage is None else garbage
        for number, cache in enumerate(self.caches):
            view = self._as_text(cache, step)
            if cache.role.name in self._unread:
                feeds[cache.role.name] = np.zeros(view.logical_shape(batch), numpy_dtype(cache.role.dtype))
            else:
                feeds[cache.role.name] = drawn_contents(view, number, step.starts, magnitude, wide=self.wide)
        if self.settled:
            self._settle(step, feeds)
        return feeds

    def _settle(self, step: Step, feeds: Feeds) -> None:
        ran = self.original(step, feeds)
        for name in self.region.presents:
            cache = self.by_output[name]
            if cache.update is not None and ran[name].shape == feeds[cache.role.name].shape:
                old = np.moveaxis(feeds[cache.role.name], cache.update.sequence_axis, 1)
                new = np.moveaxis(ran[name], cache.update.sequence_axis, 1)
                for row, tokens in enumerate(step.starts):
                    old[row, :tokens] = new[row, :tokens]

    def change_key(self, key: int, first_new: int, feeds: Feeds) -> None:
        """Change the numbers of one token: in the caches for an earlier token, in the other inputs for a new token."""
        for cache in self.caches:
            if key < first_new and cache.update is not None:
                rows = np.moveaxis(feeds[cache.role.name], cache.update.sequence_axis, 1)
                row = rows[:, key % rows.shape[1]]
                row[...] = ~row if row.dtype.kind == "b" else row + 3
        for number, b in enumerate(self.region.boundaries):
            axis = sequence_axis(b.shape)
            if key >= first_new and axis is not None:
                np.moveaxis(feeds[f"boundary {number}"], axis, 0)[key - first_new] += 3

    def originals(self, step: Step, feeds: Feeds) -> Iterator[Feeds]:
        """Yield the original's outputs: from one run per sequence and, if possible, from one run for all.

        Raises `RunError` if the original does not run the step, and `UnsupportedModelError` if an output has fewer axes
        than shape inference says.
        """
        yield self.original(step, feeds)
        groups = self.interface.groups if self.interface is not None else None
        if groups is not None and len(groups(feeds, together=True)) < len(groups(feeds)):
            with suppress(RunError):
                yield self.original(step, feeds, together=True)

    def original(self, step: Step, feeds: Feeds, *, together: bool = False) -> Feeds:
        """Run the original version, and return its outputs. With `together`, sequences share a run where possible."""
        runs = self._of_original(step, feeds, together=together)
        ran = [(rows, self.sessions[0].run(one)) for rows, one in runs]
        outputs: Feeds = {}
        for name, shape in self.region.joins.items():
            parts = [out[name] for _, out in ran]
            if any(part.ndim < len(shape) for part in parts):
                raise UnsupportedModelError(
                    f"'{name}' has {parts[0].ndim} axes in the original, but shape inference says {len(shape)}"
                )
            outputs[name] = joined(parts, shape)
        if self.interface is None:
            return outputs | {name: ran[0][1][name] for name in self.region.presents}
        return outputs | self.interface.outputs(feeds, [(rows, max(step.starts[rows]), out) for rows, out in ran])

    def _of_original(self, step: Step, feeds: Feeds, *, together: bool = False) -> list[tuple[slice, Feeds]]:
        batch = len(step.starts)

        def boundaries(rows: slice) -> Feeds:
            fed: Feeds = {}
            for number, b in enumerate(self.region.boundaries):
                fed |= dict.fromkeys(b.names[0], take(feeds[f"boundary {number}"], b.shape, rows, batch))
            return fed

        if self.interface is None:
            every = slice(0, batch)
            return [(every, {n: feeds[n] for n in self._needed[0] if n in feeds} | boundaries(every))]
        return [
            (rows, self.interface.feeds(feeds, rows, past) | boundaries(rows))
            for rows, past in self.interface.groups(feeds, together=together)
        ]

    def logits_spans(self, step: Step) -> tuple[int, ...]:
        """Return the logits spans (numbers of last positions) for which the rewritten part runs in this step."""
        span = self.plan.logits_span
        if span is None or span.name not in self._needed[1]:
            return (step.length,)
        return tuple(dict.fromkeys((step.length, 1, (step.length + 1) // 2)))

    def rewritten(self, step: Step, feeds: Feeds, span: int) -> Feeds:
        """Run the rewritten version, with caches in its own layout. Raises `StuckError` if it does not run."""
        try:
            return self.sessions[1].run(self._of_rewritten(step, feeds, span))
        except RunError as error:
            raise StuckError(str(error)) from None

    def _of_rewritten(self, step: Step, feeds: Feeds, span: int) -> Feeds:
        inputs = {name: values for name, values in feeds.items() if name in self._needed[1]}
        for cache in (c for c in self.caches if c.role.name in inputs):
            values = inputs[cache.role.name]
            if self._as_text(cache, step) is not cache:
                values = ring_window(values, cache, step.starts, self.garbage)
            inputs[cache.role.name] = cache.to_physical(values)
        kind = SPAN_KINDS[(step.length + sum(step.starts)) % len(SPAN_KINDS)]
        inputs |= span_inputs(self.plan, step, kind, span)
        for number, b in enumerate(self.region.boundaries):
            values = feeds[f"boundary {number}"]
            inputs |= dict.fromkeys(b.names[1], last(values, b.shape, span, step.length) if b.in_span else values)
        return inputs

    def products(self, step: Step) -> Feeds:
        """Return the keys and values that the rewritten model multiplies, by name."""
        names = products_of(self._models[1], [c.role.name for c in self.caches])
        if not names:
            return {}
        inputs = self._of_rewritten(step, self.feeds(step), step.length)
        return open_session(with_outputs(self._models[1], names), inputs).run(inputs)

    def _as_text(self, cache: CacheTensor, step: Step) -> CacheTensor:
        """Return the cache as if it had a row for every token of the step, even if the rewrite made it circular."""
        return as_text(cache, self.plan, self.region.rows, max(s + step.length for s in step.starts))

    def _has_rings(self, step: Step) -> bool:
        return any(self._as_text(cache, step) is not cache for cache in self.caches)

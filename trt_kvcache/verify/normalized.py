"""Verification where normalization changed the interface: each side runs in its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from onnx import ModelProto

from trt_kvcache.importer import ImportedModel
from trt_kvcache.importer.check.caches import (
    CacheTensor,
    find_caches,
    find_states,
    first_contents,
    linear_update,
    ring_window,
)
from trt_kvcache.importer.check.dtypes import tolerance
from trt_kvcache.importer.check.engine import Engine as Session
from trt_kvcache.importer.check.lengths import Limits, Step
from trt_kvcache.importer.check.original import OriginalInterface, OriginalSession, size_of
from trt_kvcache.importer.plan import CacheUpdate, OriginalRole, Role, UpdateMode
from trt_kvcache.verify.compare import Comparison
from trt_kvcache.verify.decode import Verification
from trt_kvcache.verify.memory import weigh
from trt_kvcache.verify.record import Expected, Written, written_rows
from trt_kvcache.verify.report import VerifyOptions, VerifyReport
from trt_kvcache.verify.schedule import Episode, beyond_prompt, plan_schedule

Array = npt.NDArray[Any]
Feeds = dict[str, Array]

_OTHER = 1e3  # magnitude of what stands for rows without a token; any that no model gives by chance
_HEAVY = 2 << 30  # bytes of weights; every run reads all of them, and most runs are steps of single tokens


class NormalizedVerification(Verification):
    """As `Verification`, for a model whose interface normalization changed.

    The original's caches are kept as the rewritten model's, one row per token, and translated for each run; where a
    window became circular they keep the whole text.
    """

    def __init__(
        self, imported: ImportedModel, verify: VerifyOptions, original: ModelProto, rewritten: ModelProto,
        folder: Path | tuple[Path, Path], *, twin: bool,
    ) -> None:  # fmt: skip
        self.size = max(weigh(model).size for model in (original, rewritten))
        is_open = not any(isinstance(c.update_length, int) for c in imported.plan.caches)
        given, verify = verify, beyond_prompt(verify, few=self.size > _HEAVY and is_open)
        self.chunked = sum(verify.chunks) - sum(given.chunks)
        self.interface = OriginalInterface(imported.plan, twin=twin)
        self.original_caches: dict[str, CacheTensor] = {}
        self.greedy = [0, 0]
        super().__init__(imported, verify, original, rewritten, folder, twin=twin)

    def run(self) -> VerifyReport:
        """As `Verification.run`, with the greedy tokens counted."""
        report = super().run()
        same, clear = self.greedy
        if not clear:
            return report
        note = f"greedy decoding: the same token at {same} of {clear} positions with a clear best one"
        if same < clear and report.passed:
            failure = f"{clear - same} of {clear} greedy tokens differ though the best token is clear"
            return replace(report, passed=False, failure=failure, notes=(*report.notes, note))
        return replace(report, notes=(*report.notes, note))

    def _run_once(self) -> VerifyReport:
        self.greedy = [0, 0]
        return super()._run_once()

    def _may_outweigh(self, *, finite: bool) -> bool:
        # A cache that grows has no garbage in the original: nothing there shows what would overflow.
        return not finite or super()._may_outweigh(finite=finite)

    def _read_limits(self) -> Limits:
        limits = super()._read_limits()
        linear = [n for n in (limits.linear, *self._original_rows()) if n is not None]
        together = self.interface.together
        return replace(
            limits,
            batch=limits.batch if together is None else together,
            linear=min(linear, default=None),
            ragged=limits.ragged and together is None,
            lengths=False,  # the original has none: every token of an update is valid
        )

    def _original_rows(self) -> list[int]:
        """Rows of the original's fixed caches that became circular windows: its text ends there."""
        rows = (size for c in self.plan.caches if (size := self._fixed_rows(c)) not in (None, c.capacity))
        return [n for n in rows if n is not None]

    def _fixed_rows(self, cache: CacheUpdate) -> int | None:
        """Rows of the cache in the original, or None where it grows."""
        tensor = next((t for t in self.plan.original if t.name == cache.past and t.io == "input"), None)
        if tensor is None or tensor.role is not OriginalRole.FIXED_CACHE:
            return None
        return size_of(tensor.shape[cache.sequence_axis]) or self.plan.options.capacity or cache.capacity

    def _find_caches(self, limits: Limits) -> tuple[CacheTensor, ...]:
        caches = find_caches(self.plan)
        text = max(max(s.valid) for e in plan_schedule(limits, self.verify) for s in e.steps or (Step(0, (0,), (0,)),))
        for cache in caches:
            if cache.update is None:
                continue
            rows = self._fixed_rows(cache.update)
            if cache.update.mode is UpdateMode.CIRCULAR and rows != cache.update.capacity:
                self.original_caches[cache.role.name] = replace(cache, update=linear_update(cache.update, rows or text))
        return (*caches, *find_states(self.plan))

    def _open_original(self, trial: Feeds) -> Session:
        if self.interface.singles(trial):
            trial = {**trial, **self.interface.single(trial, 0)}
        rows, past = self.interface.groups(trial)[0]
        return OriginalSession(super()._open_original(self.interface.feeds(trial, rows, past)), self.interface)

    def _contents(self, step: Step, garbage: float, episode: int) -> Feeds:
        contents: Feeds = {}
        for number, cache in enumerate(self.caches):
            rng = np.random.default_rng([self.verify.seed, episode, number])
            kept = self.original_caches.get(cache.role.name, cache)
            contents[cache.role.name] = first_contents(kept, step.starts, garbage, rng, twin=self.twin)
        return contents

    def _to_physical(self, state: Mapping[str, Array], step: Step, garbage: float) -> Feeds:
        made: Feeds = {}
        for cache in self.caches:
            name = cache.role.name
            values = state[name]
            if name in self.original_caches:
                none = first_contents(cache, (0,) * len(step.starts), garbage, self.rng, twin=self.twin)
                values = ring_window(values, none, cache, step.starts)
            made[name] = cache.to_physical(values)
        return made

    def _written(self, cache: CacheTensor, past: Feeds, present: Array, step: Step) -> Written | None:
        name = cache.role.name
        before, ends = past[name], tuple(start + step.length for start in step.starts)
        if name in self.original_caches:
            # Rows that no token goes to are the same before and after; a first token must change its row.
            other = np.random.default_rng(self.verify.seed)
            base = first_contents(cache, (0,) * len(ends), _OTHER, other, twin=self.twin)
            before, present = (ring_window(a, base, cache, e) for a, e in ((before, step.starts), (present, ends)))
        written = written_rows(cache, before, present)
        kept = self.interface.kept.get(name)
        if written is None or kept is None or cache.update is None:
            return written
        # New tokens that the original cuts off at once may be anything.
        free = np.zeros_like(written.rows)
        capacity = cache.update.capacity
        for row, (start, end) in enumerate(zip(step.starts, ends, strict=True)):
            free[row, np.arange(max(start, end - capacity), end - kept) % capacity] = True
        rows = written.rows & ~free
        return Written(written.shape, rows, written.values[rows[written.rows]], free)

    def _compare(self, comparison: Comparison, expected: Expected, past: Feeds, found: Feeds, span: int | None) -> None:
        super()._compare(comparison, expected, past, found, span)
        for tensor in self.plan.tensors:
            value = expected.get(tensor.name)
            if tensor.io == "output" and tensor.role is Role.LOGITS and isinstance(value, np.ndarray):
                self._count_greedy(value, found[tensor.name])

    def _count_greedy(self, expected: Array, found: Array) -> None:
        """Counts positions at which both sides choose the same token, where the best one is clear."""
        if expected.shape != found.shape or expected.shape[-1] < 2:
            return
        best = np.sort(expected.astype(np.float64), axis=-1)
        allowed = tolerance(expected.dtype, twin=self.twin) if self.verify.tolerance is None else self.verify.tolerance
        clear = best[..., -1] - best[..., -2] > allowed * np.abs(best).max(initial=0.0)
        same = expected.argmax(-1) == found.argmax(-1)
        self.greedy[0] += int((same & clear).sum())
        self.greedy[1] += int(clear.sum())

    def _note_schedule(self, episodes: Sequence[Episode]) -> None:
        super()._note_schedule(episodes)
        together = self.interface.together
        self.notes.append(
            "the original ran in its own interface, "
            + (
                "each row by itself"
                if together is None
                else f"{together} rows that start together, as it was exported for"
            )
        )
        self.notes.append(
            "the original has no valid lengths: steps with fewer valid tokens than the update were left out"
        )
        if self.chunked and self.verify.tokens is not None:
            tokens = self.chunked + self.verify.tokens
            self.notes.append(
                f"of the {tokens} tokens behind the prompt {self.chunked} went in one chunk, since each run reads "
                f"{self.size / 1e9:.1f} GB of weights; --tokens {tokens} takes them one by one"
            )
        if self.interface.unseen:
            self.notes.append(f"outputs that the rewritten model does not have: {', '.join(self.interface.unseen)}")

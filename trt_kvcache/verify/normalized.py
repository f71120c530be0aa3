"""Verification where normalization changed the interface: each side runs in its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from onnx import ModelProto

from trt_kvcache.importer import ImportedModel
from trt_kvcache.importer.check.caches import (
    CacheTensor,
)
from trt_kvcache.importer.check.engine import Engine as Session
from trt_kvcache.importer.check.original import OriginalInterface, OriginalSession
from trt_kvcache.importer.check.schedule import Limits, Step
from trt_kvcache.importer.plan import Role
from trt_kvcache.verify.compare import Comparison, tolerance
from trt_kvcache.verify.decode import Verification
from trt_kvcache.verify.memory import weigh
from trt_kvcache.verify.record import Expected, Written
from trt_kvcache.verify.report import VerifyOptions, VerifyReport
from trt_kvcache.verify.schedule import Episode, beyond_prompt

Array = npt.NDArray[Any]
Feeds = dict[str, Array]

_OTHER = 1e3  # magnitude of what stands for rows without a token; any that no model gives by chance
_HEAVY = 2 << 30  # bytes of weights; every run reads all of them, and most runs are steps of single tokens


class NormalizedVerification(Verification):
    """As `Verification`, for a model whose interface normalization changed.

    The original's caches are kept as the rewritten model's, one row per token, and translated for each run.
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
        together = self.interface.together
        return replace(
            limits,
            batch=limits.batch if together is None else together,
            ragged=limits.ragged and together is None,
            lengths=False,  # the original has none: every token of an update is valid
        )

    def _open_original(self, trial: Feeds) -> Session:
        if self.interface.singles(trial):
            trial = {**trial, **self.interface.single(trial, 0)}
        rows, past = self.interface.groups(trial)[0]
        return OriginalSession(super()._open_original(self.interface.feeds(trial, rows, past)), self.interface)

    def _written(self, cache: CacheTensor, past: Feeds, present: Array, step: Step) -> Written | None:
        written = super()._written(cache, past, present, step)
        kept = self.interface.kept.get(cache.role.name)
        if written is None or kept is None or cache.update is None:
            return written
        # New tokens that the original cuts off at once may be anything.
        free = np.zeros_like(written.rows)
        capacity = cache.update.capacity
        for row, start in enumerate(step.starts):
            end = start + step.length
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

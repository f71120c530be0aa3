"""The verification itself: both models over one schedule, with the same inputs."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import numpy.typing as npt
from onnx import ModelProto

from trt_kvcache.errors import OptionError, UnsupportedModelError
from trt_kvcache.importer import ImportedModel
from trt_kvcache.importer.plan import Role
from trt_kvcache.importer.rewrite.packed import DOMAIN as PACKED_DOMAIN
from trt_kvcache.importer.rewrite.packed import OP as PACKED_OP
from trt_kvcache.importer.rewrite.packed import add_packed_function
from trt_kvcache.verify.caches import cache_bytes, find_caches, first_contents
from trt_kvcache.verify.compare import Comparison, difference
from trt_kvcache.verify.dtypes import garbage_magnitudes, tolerance
from trt_kvcache.verify.inputs import StepInputs, load_inputs
from trt_kvcache.verify.report import VerifyOptions, VerifyReport, VerifyStep
from trt_kvcache.verify.schedule import Episode, Limits, Step, plan_schedule, read_limits
from trt_kvcache.verify.sessions import EngineError, Session, open_session
from trt_kvcache.verify.tables import index_limits
from trt_kvcache.verify.twin import TwinFolder, has_bfloat16

Array = npt.NDArray[Any]
Feeds = dict[str, Array]

_SPAN_KINDS = ("tight", "bucketed", "full")
_MEMORY_SHARE = 0.5  # of the machine's memory, for the caches of both models before and after a step


def verify_import(imported: ImportedModel, verify: VerifyOptions) -> VerifyReport:
    """Verifies a model that has been imported already; see `trt_kvcache.verify.verify_model`."""
    check_runnable(imported.model)
    with _both_sides(imported) as (original, rewritten, folder, twin):
        return _Verification(imported, verify, original, rewritten, folder, twin=twin).run()


def check_runnable(model: ModelProto) -> None:
    """Refuses rewritten models with nodes that only TensorRT knows.

    Raises:
        UnsupportedModelError: see above.
    """
    defined = {(f.domain, f.name) for f in model.functions}
    nodes = [
        n.name
        for n in model.graph.node
        if (n.domain.startswith("trt") or n.op_type.startswith("TRT_")) and (n.domain, n.op_type) not in defined
    ]
    if nodes:
        raise UnsupportedModelError(
            f"verification runs on ONNX Runtime, which has no operator for {', '.join(nodes[:3])}"
            f"{f' and {len(nodes) - 3} more' if len(nodes) > 3 else ''} (plugin nodes exist only in "
            "TensorRT); verify the same model with another --fallback or --target, which differs in these nodes only"
        )


def _runnable_original(model: ModelProto) -> ModelProto:
    """The original; packed updates, which are TensorRT's own operator, get their meaning as an ONNX function."""
    if not any(node.op_type == PACKED_OP for node in model.graph.node):
        return model
    copy = ModelProto()
    copy.CopyFrom(model)
    for node in copy.graph.node:
        if node.op_type == PACKED_OP:
            node.domain = PACKED_DOMAIN
    add_packed_function(copy)
    return copy


@contextmanager
def _both_sides(imported: ImportedModel) -> Iterator[tuple[ModelProto, ModelProto, Path, bool]]:
    """Original and rewritten model, the folder of their external data, and whether they are float32 twins."""
    source = imported.source
    original = _runnable_original(source.proto)
    if not has_bfloat16(original):
        yield original, imported.model, source.path.parent, False
        return
    with TemporaryDirectory(prefix="trt-kvcache-verify-") as name:
        twins = TwinFolder(Path(name), source.path.parent)
        yield twins.twin(original), twins.twin(imported.model), twins.folder, True


class _Verification:
    def __init__(
        self, imported: ImportedModel, verify: VerifyOptions, original: ModelProto, rewritten: ModelProto, folder: Path,
        *, twin: bool,
    ) -> None:  # fmt: skip
        self.source = imported.source
        self.path = imported.source.path
        self.plan = imported.plan
        self.verify = verify
        self.models = (original, rewritten)
        self.folder = folder
        self.twin = twin
        self.notes: list[str] = []
        if twin:
            self.notes.append(
                "ONNX Runtime has no bfloat16 arithmetic on the CPU: both sides ran as float32 twins, which shows "
                "structure, masks, indices and layouts, not bfloat16 rounding"
            )
        self.caches = find_caches(imported.plan)
        self.limits = self._fit(read_limits(imported.plan, verify))
        self.rng = np.random.default_rng(verify.seed)
        self.inputs = StepInputs(
            imported.plan, index_limits(rewritten, imported.plan), load_inputs(verify.inputs), self.rng, twin=twin
        )
        if original is not imported.source.proto and not twin:
            self.notes.append("packed updates, TensorRT's own operator, ran by their definition in ONNX on both sides")
        self.kinds = _SPAN_KINDS if imported.plan.spans else ("",)
        self.steps: list[VerifyStep] = []

    def _fit(self, limits: Limits) -> Limits:
        """Fewer rows where the caches of all rows would not fit into memory."""
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        one = 4 * cache_bytes(self.caches, 1, twin=self.twin)
        batch = min(limits.batch, int(_MEMORY_SHARE * memory) // max(one, 1))
        if batch == limits.batch:
            return limits
        fixed = any(isinstance(c.logical_shape[0], int) for c in self.plan.caches)
        if batch < 1 or fixed:
            rows = limits.batch if fixed else 1
            raise OptionError(
                f"verification holds the caches of both models before and after a step: {rows * one / 1e9:.1f} GB for "
                f"{rows} sequence(s), and this machine has {memory / 1e9:.1f} GB; verify with a smaller capacity"
            )
        self.notes.append(f"batch {batch} instead of {limits.batch}: more caches would not fit into memory")
        return replace(limits, batch=batch)

    def run(self) -> VerifyReport:
        episodes = [e for e in plan_schedule(self.limits, self.verify) if e.steps]
        self._note_schedule(episodes)
        first = episodes[0].steps[0]
        trial = {**self.inputs.shared(first), **self._contents(first, 0.0)}
        try:
            path = self.path if self.models[0] is self.source.proto else None
            original, refusal = open_session(self.models[0], self.folder, trial, path=path)
        except EngineError as error:
            raise UnsupportedModelError(f"{self.path}: no engine here runs the original model: {error}") from None
        if refusal:
            self.notes.append(f"ONNX Runtime does not run the original model ({refusal}); {original.engine} did")
        garbage = self._garbage(original, first, trial)
        comparison = Comparison(
            {o.name: self._role(o.name) for o in self.models[0].graph.output}, self.verify.tolerance
        )
        failure = None
        engine = "none"
        try:
            physical = self._to_physical({c.role.name: trial[c.role.name] for c in self.caches})
            # A rewritten model must run wherever the original does, so only an original that ONNX Runtime refuses
            # lets the reference evaluator run both.
            rewritten, refusal = open_session(
                self.models[1],
                self.folder,
                {**trial, **physical, **self.inputs.spans(first, "full")},
                reference=refusal is not None,
            )
            engine = rewritten.engine
            if refusal:
                self.notes.append(f"ONNX Runtime does not run the rewritten model ({refusal}); {engine} did")
            for episode in episodes:
                self._run_episode(episode, original, rewritten, garbage, comparison)
        except EngineError as error:
            failure = f"the rewritten model cannot be run where the original can: {error}"
        outputs = comparison.results()
        return VerifyReport(
            model=str(self.path),
            passed=failure is None and all(o.passed for o in outputs),
            original_engine=original.engine,
            rewritten_engine=engine,
            float32_twin=self.twin,
            garbage=garbage,
            outputs=outputs,
            steps=tuple(self.steps),
            notes=tuple(self.notes),
            failure=failure,
        )

    def _run_episode(
        self, episode: Episode, original: Session, rewritten: Session, garbage: float, comparison: Comparison
    ) -> None:
        state = self._contents(episode.steps[0], garbage)
        other = self._to_physical(state)
        for number, step in enumerate(episode.steps):
            shared = self.inputs.shared(step)
            try:
                expected = original.run({**shared, **state})
            except EngineError as error:
                raise UnsupportedModelError(
                    f"{self.path}: {original.engine} does not run the original model at {step.length} tokens from "
                    f"{list(step.starts)}, valid {list(step.valid)}: {error}"
                ) from None
            # One span per step in turn; all of them in the last step, which must not depend on the span.
            last = number == len(episode.steps) - 1
            kinds = self.kinds if last else (self.kinds[number % len(self.kinds)],)
            spans = [self.inputs.spans(step, kind) for kind in kinds]
            self.steps.append(
                VerifyStep(
                    episode.name,
                    step.length,
                    step.starts,
                    step.valid,
                    tuple(max(map(len, s.values())) for s in spans if s),
                )
            )
            for span in spans:
                found = rewritten.run({**shared, **other, **span})
                self._compare(comparison, (state, other), (expected, found), max(map(len, span.values()), default=None))
            for cache in self.caches:
                if cache.output is not None:
                    state[cache.role.name], other[cache.role.name] = expected[cache.output], found[cache.output]

    def _compare(
        self, comparison: Comparison, past: tuple[Feeds, Feeds], outputs: tuple[Feeds, Feeds], span: int | None
    ) -> None:
        expected, found = outputs
        step = len(self.steps) - 1
        carried = {c.output: c for c in self.caches if c.output is not None}
        for name, value in expected.items():
            if name not in found:
                raise EngineError(f"it has no output '{name}'")
            if name not in carried:
                comparison.plain(name, value, found[name], step, span)
                continue
            cache = carried[name]
            before = (past[0][cache.role.name], cache.to_logical(past[1][cache.role.name]))
            if cache.update is None:
                comparison.plain(name, value, found[name], step, span)
            elif found[name].shape == past[1][cache.role.name].shape:
                comparison.cache(cache, before, (value, cache.to_logical(found[name])), step, span)
            else:
                comparison.cache(cache, before, (value, found[name]), step, span)

    def _contents(self, step: Step, garbage: float) -> Feeds:
        """Cache contents of the original model before its first step."""
        return {
            c.role.name: first_contents(c, step.starts, garbage, self.rng, twin=self.twin) for c in self.caches
        }  # fmt: skip

    def _to_physical(self, state: Mapping[str, Array]) -> Feeds:
        return {c.role.name: c.to_physical(state[c.role.name]) for c in self.caches}

    def _garbage(self, original: Session, step: Step, trial: Feeds) -> float:
        """The largest garbage that the original itself hides, so that a difference is the rewritten model's."""
        carried = {c.output for c in self.caches}
        clean = {n: v for n, v in original.run(trial).items() if n not in carried}
        sizes = garbage_magnitudes({c.role.dtype for c in self.caches})
        for magnitude in sizes:
            # Rows without a token hold 0 in `trial`; the others keep their values.
            dirty = dict(trial)
            for cache in self.caches:
                noise = first_contents(cache, [0] * self.limits.batch, magnitude, self.rng, twin=self.twin)
                if cache.update is not None:
                    dirty[cache.role.name] = np.where(trial[cache.role.name] == 0, noise, trial[cache.role.name])
            found = original.run(dirty)
            if all(difference(v, found[n])[1] <= tolerance(v.dtype) for n, v in clean.items()):
                return magnitude
        self.notes.append("the original reads cache rows that were never written: garbage there is kept small")
        return sizes[-1]

    def _note_schedule(self, episodes: Sequence[Episode]) -> None:
        if self.limits.no_straddle:
            self.notes.append(
                "contract: no update straddles the wrap of a circular cache; the updates were split there, as the "
                "caller of the engine must do"
            )
        if not self.limits.ragged:
            self.notes.append("the model takes one write index or length for the whole batch: all rows start together")
        wrapped = {c for c in self.limits.circular for e in episodes for s in e.steps if max(s.valid) > c}
        for capacity in sorted(set(self.limits.circular) - wrapped):
            self.notes.append(f"circular caches of {capacity} rows did not wrap: other caches of the model end before")

    def _role(self, name: str) -> str:
        return next((t.role.value for t in self.plan.tensors if t.io == "output" and t.name == name), Role.OTHER.value)

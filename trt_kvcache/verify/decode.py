"""The verification itself: both models over one schedule, with the same inputs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from onnx import ModelProto

from trt_kvcache.errors import OptionError, UnsupportedModelError
from trt_kvcache.importer import ImportedModel
from trt_kvcache.importer.plan import CachePlan, OriginalRole, Role, UpdateMode
from trt_kvcache.importer.planning.index_limits import index_limits
from trt_kvcache.importer.steps.contents import (
    CacheTensor,
    all_contents,
    as_text,
    find_caches,
    find_states,
    fixed_rows,
    original_rows,
    ring_window,
)
from trt_kvcache.importer.steps.inputs import SPAN_KINDS, StepInputs, draw_constants, span_inputs
from trt_kvcache.importer.steps.original import OriginalInterface, OriginalSession
from trt_kvcache.importer.steps.runnable import with_expanded_masks, with_norms_in_front
from trt_kvcache.importer.steps.sessions import ModelSession, RunError
from trt_kvcache.importer.steps.step import Limits, Step, read_limits
from trt_kvcache.progress import phase
from trt_kvcache.verify.compare import Comparison, difference, garbage_magnitudes, tolerance
from trt_kvcache.verify.inputs import check_values, guessed, load_inputs, logit_positions, rows_read
from trt_kvcache.verify.memory import fit, give_back, needs, weigh
from trt_kvcache.verify.record import Expected, Tape, Written, chosen_rows, open_tape, written_rows
from trt_kvcache.verify.report import VerifyOptions, VerifyReport, VerifyStep
from trt_kvcache.verify.runnable import spelled_out
from trt_kvcache.verify.schedule import Episode, beyond_prompt, plan_schedule, schedule_notes, whole
from trt_kvcache.verify.sessions import OrtSession, Runner, open_session

Array = npt.NDArray[Any]
Feeds = dict[str, Array]
_Begun = tuple[Feeds, Feeds, Feeds]  # a step of the original: what it took beside caches, the caches, what it gave

_OTHER = 1e3  # magnitude of what stands for rows without a token; any that no model gives by chance
_HEAVY = 200 << 20  # bytes of weights; every run reads all of them, and most runs are steps of single tokens


@dataclass
class Ran:
    """Steps that the original ran, for the rewritten model to run it again.

    Attributes:
        backend: what ran it.
        garbage: magnitude of what lies in rows that hold no token.
        episodes: name, and the steps with the inputs that both models take.
    """

    backend: str
    garbage: float
    episodes: list[tuple[str, list[tuple[Step, Feeds]]]] = field(default_factory=list)


class Verification:
    """One verification of an imported model.

    Where normalization changed the interface, each side runs in its own: the original's caches are kept as the
    rewritten model's, one row per token, and translated for each run.

    Args:
        imported: the model as read, its plan and its rewritten form.
        verify: what to run.
        original, rewritten: what runs on each side: the models themselves, or forms of them that engines here run.
        folder: of the external data of both, or one for each.
        twin: both are float32 twins of a bfloat16 model.
        empty: start each sequence with empty caches, so that they hold what the model itself wrote.
    """

    def __init__(
        self, imported: ImportedModel, verify: VerifyOptions, original: ModelProto, rewritten: ModelProto,
        folder: Path | tuple[Path, Path], *, twin: bool, empty: bool = False,
    ) -> None:  # fmt: skip
        self._empty = empty
        self.source = imported.source
        self.path = imported.source.path
        self.plan = imported.plan
        self.interface = OriginalInterface(imported.plan, twin=twin) if imported.plan.original else None
        self.size = max(weigh(model).size for model in (original, rewritten))
        is_open = not any(isinstance(c.update_length, int) for c in imported.plan.caches)
        self.options = verify
        if self.interface is not None:
            verify = beyond_prompt(verify, few=self.size > _HEAVY and is_open)
        self.verify = verify
        self.models = (original, rewritten)
        self.folders = folder if isinstance(folder, tuple) else (folder, folder)
        self.twin = twin
        self.notes: list[str] = []
        self.most = math.inf  # garbage, at most
        self.anywhere = False  # the reference evaluator may run what ONNX Runtime has no operators for, of any side
        if twin:
            self.notes.append(
                "ONNX Runtime has no bfloat16 arithmetic on the CPU: both sides ran with float32 in its place, "
                "which shows structure, masks, indices and layouts, not bfloat16 rounding"
            )
        self._fixed = fixed_rows(self.plan, self.source.proto.graph.input)
        limits = self._read_limits()
        self.caches = (*find_caches(self.plan), *find_states(self.plan))
        self.texts = self._find_texts(limits)
        self.growing = self._find_growing()
        self._cuts = False
        self.hidden = all(c.update is None or c.role.name in self.growing for c in self.caches)
        self.limits = self._fit(limits)
        self.rng = np.random.default_rng(verify.seed)
        constants = draw_constants(imported.plan, self.limits.batch, verify.seed, twin=twin)
        values = load_inputs(verify.inputs)
        check_values(values, self.plan)
        self.inputs = StepInputs(
            imported.plan,
            index_limits(rewritten, imported.plan),
            constants | values,
            self.rng,
            twin=twin,
            rings=bool(self.texts),
        )
        self.guessed = guessed(self.plan, values)
        self.notes += spelled_out(imported.source.proto)
        self.kinds = SPAN_KINDS if imported.plan.spans else ("",)
        self.steps: list[VerifyStep] = []

    def _read_limits(self) -> Limits:
        """The steps that both models allow."""
        check_carries(self.plan)
        limits = read_limits(self.plan, self.verify.batch)
        # Where a window became a ring, the text ends with the cache that the original holds it in.
        rings = [c for c in self.plan.caches if c.mode is UpdateMode.CIRCULAR]
        rows = [n for c in rings if (n := original_rows(c, self.plan, self._fixed)) != c.capacity]
        ends = [n for n in (limits.linear, *rows) if n is not None]
        # An original in an interface of its own has no lengths: every token of an update is valid.
        return replace(limits, linear=min(ends, default=None), lengths=limits.lengths and self.interface is None)

    def _find_texts(self, limits: Limits) -> dict[str, CacheTensor]:
        """Caches that the original holds with a row for every token, and the rewritten model as rings, by name."""
        ends = [max(s.valid) for e in self._schedule(limits) for s in e.steps]
        texts = {c.role.name: as_text(c, self.plan, self._fixed, max(ends, default=1)) for c in self.caches}
        return {c.role.name: text for c in self.caches if (text := texts[c.role.name]) is not c}

    def _find_growing(self) -> set[str]:
        """Names of linear caches that the original takes as long as the text: it never sees a row without a token."""
        growing = {t.name for t in self.plan.original if t.role is OriginalRole.GROWING_CACHE and t.kept is None}
        linear = {c.past for c in self.plan.caches if c.mode is UpdateMode.LINEAR}
        return growing & linear - set(self.texts)

    def _schedule(self, limits: Limits) -> Sequence[Episode]:
        return plan_schedule(limits, self.verify, empty=self._empty)

    def _episodes(self, limits: Limits) -> list[Episode]:
        """The schedule; in a ring made of a window all new tokens of a sequence count, or none."""
        episodes = [e for e in self._schedule(limits) if e.steps]
        return [replace(e, steps=tuple(map(whole, e.steps))) for e in episodes] if self.texts else episodes

    def _fit(self, limits: Limits) -> Limits:
        """Fewer rows where all of them would not fit into memory.

        Raises:
            OptionError: not even one row fits.
        """
        lengths = [s.length for e in self._episodes(limits) for s in e.steps]
        weights = [weigh(model) for model in self.models]
        caches = [self.texts.get(c.role.name, c) for c in self.caches]
        need = needs(self.plan, caches, weights, max(lengths, default=1), twin=self.twin)
        fixed = any(isinstance(c.logical_shape[0], int) for c in self.plan.caches)
        batch, self.free_bytes, notes = fit(need, weights, limits.batch, limits.batch if fixed else 1)
        self.notes += notes
        return replace(limits, batch=batch)

    def run(self) -> VerifyReport:
        """Runs all episodes and reports; see `trt_kvcache.verify.verify_model`. Another run has the same tokens.

        First all of the original, then all of the rewritten model: only one of them lies in memory at a time.
        """
        episodes = self._episodes(self.limits)
        if not episodes:
            raise OptionError(
                "no update fits this model's caches: its fixed update length is longer than what the linear caches "
                "hold or what the circular ones take before the wrap; export it with a shorter or an open update length"
            )
        self._note_schedule(episodes)
        self._cuts = True
        comparison = Comparison(
            {name: self._role(name) for name in (o.name for o in self.models[0].graph.output)},
            self.verify.tolerance,
            twin=self.twin,
            half=any(c.role.dtype == "float16" for c in self.caches),
        )
        with open_tape() as tape:
            ran = self.run_original(episodes, tape)
            backend, failure = self._run_rewritten(ran, tape, comparison)
        outputs, notes = comparison.results(), list(dict.fromkeys(self.notes))
        same, clear = comparison.same, comparison.clear
        if clear:
            notes.append(f"greedy decoding: the same token at {same} of {clear} positions with a clear best one")
            if failure is None and same < clear and all(o.passed for o in outputs):
                failure = f"{clear - same} of {clear} greedy tokens differ though the best token is clear"
        return VerifyReport(
            model=str(self.path),
            passed=failure is None and all(o.passed for o in outputs),
            original_engine=ran.backend,
            rewritten_engine=backend,
            float32_twin=self.twin,
            garbage=ran.garbage,
            outputs=outputs,
            steps=tuple(replace(s, difference=comparison.in_step(i)) for i, s in enumerate(self.steps)),
            notes=tuple(notes),
            failure=failure,
            capacity=self.plan.options.capacity,
        )

    def run_original(self, episodes: Sequence[Episode], tape: Tape) -> Ran:
        """All steps of the original, what it gives on the tape."""
        first = episodes[0].steps[0]
        shared = self.inputs.shared(first)
        rows = _rows(episodes[0])
        contents = self._own_contents(first, 0.0, 0, rows)
        with phase("loading the original"):
            original = self._open_original({**shared, **contents})
        try:
            garbage, begun = self._garbage(original, first, shared, contents, rows)
        except RunError as error:
            raise UnsupportedModelError(f"{self.path}: no engine runs the original at {first}: {error}") from None
        del contents
        ran = Ran(original.backend, garbage)
        with phase("decoding with the original: step", sum(len(e.steps) for e in episodes)) as done:
            for number, episode in enumerate(episodes):
                steps = self._record(number, episode, garbage, original, tape, begun, done)
                ran.episodes.append((episode.name, steps))
        return ran

    def _record(
        self,
        number: int,
        episode: Episode,
        garbage: float,
        original: ModelSession,
        tape: Tape,
        begun: list[_Begun],
        done: Callable[[], None],
    ) -> list[tuple[Step, Feeds]]:
        """The steps of an episode that the original ran, and their inputs; `begun`: of the first one, if it ran."""
        give_back()
        steps: list[tuple[Step, Feeds]] = []
        state = begun[0][1] if begun else self._own_contents(episode.steps[0], garbage, number, _rows(episode))
        for step in episode.steps:
            try:
                if begun:
                    shared, _, outputs = begun.pop()
                else:
                    shared = self.inputs.shared(step)
                    outputs = original.run({**shared, **state})
            except RunError as error:
                if episode.name in ("short", "padded"):  # lengths that a model may not be made for
                    self.notes.append(f"no '{episode.name}' step: {original.backend} refuses the original ({error})")
                    break
                raise UnsupportedModelError(
                    f"{self.path}: {original.backend} does not run the original model at {step}: {error}{self.guessed}"
                ) from None
            tape.write(self._expected(state, outputs, step))
            steps.append((step, shared))
            state |= {c.role.name: outputs[c.output] for c in self.caches if c.output is not None}
            done()
        return steps

    def _expected(self, past: Feeds, outputs: Feeds, step: Step) -> Expected:
        """The outputs of a step of the original, as they are compared."""
        updated = {c.output: c for c in self.caches if c.update is not None}
        return {
            name: self._written(updated[name], past, value, step) if name in updated else value
            for name, value in outputs.items()
        }

    def _written(self, cache: CacheTensor, past: Feeds, present: Array, step: Step) -> Written | None:
        """The change of a cache in a step of the original; `past`: all caches before it."""
        name = cache.role.name
        before, ends = past[name], tuple(start + step.length for start in step.starts)
        if name in self.texts and before.shape == present.shape:
            # Rows that no token goes to are the same before and after; a first token must change its row.
            before, present = (
                ring_window(text, cache, tokens, _OTHER) for text, tokens in ((before, step.starts), (present, ends))
            )
        written = written_rows(cache, before, present)
        if written is not None and name in self.growing:  # even where a token's row is zeros, as were the free ones
            places = np.arange(written.rows.shape[1])
            new = (places >= np.array(step.starts)[:, None]) & (places < np.array(ends)[:, None])
            rows = written.rows | new
            written = replace(written, rows=rows, values=chosen_rows(cache.rows(present), rows))
        if written is not None and cache.update is not None and self._cuts and name in self.growing:
            free = cache.update.capacity - written.rows.shape[1]
            shape = cache.logical_shape(len(written.rows))
            return Written(shape, np.pad(written.rows, ((0, 0), (0, free))), written.values)
        past_rows = self.interface.past_rows.get(name) if self.interface is not None else None
        if written is None or past_rows is None or cache.update is None:
            return written
        # New tokens that the original cuts off at once may be anything.
        free = np.zeros_like(written.rows)
        capacity = cache.update.capacity
        for row, (start, end) in enumerate(zip(step.starts, ends, strict=True)):
            free[row, np.arange(max(start, end - capacity), end - past_rows) % capacity] = True
        changed = written.rows & ~free
        return Written(written.shape, changed, written.values[changed[written.rows]], free)

    def _run_rewritten(self, ran: Ran, tape: Tape, comparison: Comparison) -> tuple[str, str | None]:
        """The same steps with the rewritten model: what ran it, and why it could not be run to the end, or None."""
        give_back()
        backend = "none"
        first, shared = ran.episodes[0][1][0]
        self.steps = []
        tape.rewind()
        try:
            # A rewritten model must run wherever the original does, so only an original that ONNX Runtime refuses
            # lets the reference evaluator run both.
            with phase("loading the rewritten model"):
                rewritten, refusal = open_session(
                    self.models[1],
                    self.folders[1],
                    {**shared, **self._first_state(first, ran.garbage, 0), **span_inputs(self.plan, first, "full")},
                    self.free_bytes,
                    reference=self.anywhere or ran.backend != OrtSession.backend,
                )
            backend = rewritten.backend
            if refusal:
                self.notes.append(f"ONNX Runtime does not run the rewritten model ({refusal}); {backend} did")
            count = sum(len(steps) for _, steps in ran.episodes)
            with phase("decoding with the rewritten model: step", count) as done:
                for number, (name, steps) in enumerate(ran.episodes):
                    if steps:
                        state = self._first_state(steps[0][0], ran.garbage, number)
                        self._run_episode(name, steps, state, rewritten, tape, comparison, done)
        except RunError as error:
            return backend, f"the rewritten model cannot be run where the original can: {error}"
        return backend, None

    def _open_original(self, trial: Feeds) -> ModelSession:
        """A session of the original that takes the rewritten model's inputs.

        Raises:
            UnsupportedModelError: no engine runs it.
        """
        if self.interface is None:
            return self._open_as_exported(trial)
        if self.interface.singles(trial):
            trial = {**trial, **self.interface.single(trial, 0)}
        rows, past = self.interface.groups(trial)[0]
        return OriginalSession(self._open_as_exported(self.interface.feeds(trial, rows, past)), self.interface)

    def _open_as_exported(self, trial: Feeds) -> ModelSession:
        """A session of the original: as it is, or with masks or norms spelled out, or on the reference evaluator.

        Raises:
            UnsupportedModelError: no engine runs it.
        """
        model = self.models[0]
        is_file = model is self.source.proto and not self.source.is_edited and self.folders[0] == self.path.parent
        path = self.path if is_file else None
        try:
            return open_session(model, self.folders[0], trial, self.free_bytes, path=path, reference=False)[0]
        except RunError as error:
            refusal = error
        spelled = with_expanded_masks(with_norms_in_front(model))
        try:
            session = open_session(spelled, self.folders[0], trial, self.free_bytes)[0]
        except RunError as error:
            refusal = refusal if spelled is model else error
            first = " in its first step, after an empty cache" if any(not v.size for v in trial.values()) else ""
            raise UnsupportedModelError(
                f"{self.path}: no engine here runs the original model{first}: {refusal}{self.guessed}"
            ) from None
        if session.backend != OrtSession.backend:
            self.notes.append(f"ONNX Runtime does not run the original model ({refusal}); {session.backend} did")
        elif spelled is not model:
            self.notes.append(
                "masks without an axis for the queries, and norms in GroupQueryAttention, which ONNX Runtime refuses "
                "on the CPU, were spelled out for it"
            )
        return session

    def _run_episode(
        self,
        name: str,
        steps: Sequence[tuple[Step, Feeds]],
        state: Feeds,
        rewritten: Runner,
        tape: Tape,
        comparison: Comparison,
        done: Callable[[], None],
    ) -> None:
        """The steps of an episode; `state`: the caches before, which it changes."""
        give_back()
        carried = {c.role.name: c.output for c in self.caches if c.output is not None}
        spare = {output: np.empty_like(state[past]) for past, output in carried.items()}
        for number, (step, shared) in enumerate(steps):
            expected = tape.read()
            # One span per step in turn; all of them in the last step, which must not depend on the span.
            last = number == len(steps) - 1
            kinds = self.kinds if last else (self.kinds[number % len(self.kinds)],)
            spans = _distinct(span_inputs(self.plan, step, kind) for kind in kinds)
            if self.plan.logits_span is not None and step.length > 1:
                # Logits of all positions, in every run but one: of the last one, or of half of them.
                spans.append(span_inputs(self.plan, step, kinds[0], (1, (step.length + 1) // 2)[number % 2]))
            self.steps.append(
                VerifyStep(
                    name,
                    step.length,
                    step.starts,
                    step.valid,
                    tuple(rows for s in spans if (rows := rows_read(self.plan, s)) is not None),
                    tuple(count for s in spans if (count := logit_positions(self.plan, s)) is not None),
                )
            )
            for span in spans:
                outputs = rewritten.run({**shared, **state, **span}, spare)
                wanted = self._wanted(expected, logit_positions(self.plan, span))
                self._compare(comparison, wanted, state, outputs, rows_read(self.plan, span))
            before = {output: state[past] for past, output in carried.items()}
            state |= {past: outputs[output] for past, output in carried.items()}
            spare = before
            done()

    def _compare(
        self, comparison: Comparison, expected: Expected, past: Feeds, actual: Feeds, span: int | None
    ) -> None:
        step = len(self.steps) - 1
        carried = {c.output: c for c in self.caches if c.output is not None}
        for name, value in expected.items():
            if name not in actual:
                raise RunError(f"it has no output '{name}'")
            if value is None:
                comparison.differ(name, actual[name], step, span)
            elif isinstance(value, Written):
                cache = carried[name]
                comparison.cache(cache, value, past[cache.role.name], actual[name], step, span)
            else:
                comparison.plain(name, value, actual[name], step, span)
                if self.interface is not None and self._role(name) == Role.LOGITS.value:
                    comparison.greedy(value, actual[name])

    def _wanted(self, expected: Expected, count: int | None) -> Expected:
        """The part of the original's outputs that the rewritten model gives: logits of the last positions."""
        logits = self.plan.logits_span
        whole = None if logits is None else expected[logits.output]
        if logits is None or count is None or not isinstance(whole, np.ndarray):
            return expected
        return expected | {logits.output: whole[:, whole.shape[1] - count :]}

    def _contents(self, step: Step, garbage: float, episode: int) -> Feeds:
        """Cache contents of the original model before an episode's first step; histories do not depend on `garbage`."""
        return self.drawn(step.starts, garbage, episode)

    def drawn(self, starts: Sequence[int], garbage: float, episode: int) -> Feeds:
        """Random cache contents of the original model."""
        caches = {c.role.name: self.texts.get(c.role.name, c) for c in self.caches}
        return dict(all_contents(caches, self.verify.seed, starts, garbage, episode))

    def _own_contents(self, step: Step, garbage: float, episode: int, rows: int) -> Feeds:
        """`_contents`, of caches that grow the first `rows` alone, and without garbage if no cache can hold any."""
        contents = self._contents(step, 0.0 if self.hidden else garbage, episode)
        if not self._cuts:
            return contents
        for cache in self.caches:
            name = cache.role.name
            if name in self.growing and cache.update is not None:
                first = (slice(None),) * cache.update.sequence_axis + (slice(rows),)
                contents[name] = np.ascontiguousarray(contents[name][first])
        return contents

    def _first_state(self, step: Step, garbage: float, episode: int) -> Feeds:
        """The caches of the rewritten model before an episode's first step."""
        state = self._to_physical(self._contents(step, garbage, episode), step, garbage)
        return {name: np.ascontiguousarray(values) for name, values in state.items()}

    def _to_physical(self, state: Mapping[str, Array], step: Step, garbage: float) -> Feeds:
        """The original's contents before `step` as the rewritten model takes them."""
        physical: Feeds = {}
        for cache in self.caches:
            values = state[cache.role.name]
            if cache.role.name in self.texts:
                values = ring_window(values, cache, step.starts, garbage)
            physical[cache.role.name] = cache.to_physical(values)
        return physical

    def _garbage(
        self, original: ModelSession, step: Step, shared: Feeds, contents: Feeds, rows: int
    ) -> tuple[float, list[_Begun]]:
        """The largest garbage that the original itself hides, and its first step with that.

        So a difference is the rewritten model's.
        """
        carried = {c.output for c in self.caches}
        sizes = [m for m in garbage_magnitudes({c.role.dtype for c in self.caches}) if m <= self.most]
        first = original.run({**shared, **contents})
        if self.hidden:
            return sizes[0], [(shared, contents, first)]
        clean = {n: v for n, v in first.items() if n not in carried}
        del contents, first
        for magnitude in sizes:
            outputs: Feeds = {}  # those of the one before must not lie in memory, too
            contents = self._own_contents(step, magnitude, 0, rows)
            outputs = original.run({**shared, **contents})
            if all(difference(v, outputs[n])[1] <= tolerance(v.dtype, twin=self.twin) for n, v in clean.items()):
                break
        else:
            self.notes.append("the original reads cache rows that were never written: garbage there is kept small")
        return magnitude, [(shared, contents, outputs)]

    def _note_schedule(self, episodes: Sequence[Episode]) -> None:
        self.notes += schedule_notes(self.limits, self.verify, episodes)
        if self.interface is None:
            return
        together = self.interface.together
        rows = (
            "each row by itself" if together is None else f"{together} rows that start together, as it was exported for"
        )
        self.notes += [
            f"the original ran in its own interface, {rows}",
            "the original has no valid lengths: steps with fewer valid tokens than the update were left out",
        ]
        chunked = sum(self.verify.chunks) - sum(self.options.chunks)
        if chunked and self.verify.tokens is not None:
            tokens = chunked + self.verify.tokens
            self.notes.append(
                f"of the {tokens} tokens after the prompt {chunked} went in one chunk, since each run reads "
                f"{self.size / 1e9:.1f} GB of weights; --tokens {tokens} takes them one by one"
            )
        if self.interface.unseen:
            self.notes.append(f"outputs that the rewritten model does not have: {', '.join(self.interface.unseen)}")

    def _role(self, name: str) -> str:
        return next((t.role.value for t in self.plan.tensors if t.io == "output" and t.name == name), Role.OTHER.value)


def _rows(episode: Episode) -> int:
    """Rows that hold a token at the end."""
    return max(max(step.valid) for step in episode.steps)


def _distinct(spans: Iterable[Feeds]) -> list[Feeds]:
    """Each once: near the end of a cache several kinds are the same."""
    return list({tuple(map(len, feeds.values())): feeds for feeds in spans}.values())


def check_carries(plan: CachePlan) -> None:
    """Refuses models without a cache that goes from step to step.

    Raises:
        OptionError: see above.
    """
    if not any(cache.carried for cache in plan.caches):
        why = f"goes in and comes out as it is written ({plan.caches[0].reason})" if plan.caches else "is updated"
        raise OptionError(f"no cache of the model {why}: there is no decode to verify")

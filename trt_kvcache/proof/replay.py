"""Replaying a proof on a runner: the steps of the original, from empty caches full of garbage on.

steps    logits against those of the original
caches   after each episode: newest rows against the original's, those that no token went to bit for bit as they were
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from trt_kvcache.dtypes import array_dtype
from trt_kvcache.errors import ManifestError
from trt_kvcache.importer.plan import CachePlan
from trt_kvcache.proof.contents import Contents, copies, draws_digest, embedded
from trt_kvcache.proof.file import Episode, Proof, Share, columns_of, share_of
from trt_kvcache.proof.places import LOGITS, places, rows_aligned
from trt_kvcache.proof.schedule import DRAWN
from trt_kvcache.proof.tolerance import spread
from trt_kvcache.runtime.buffers import Carried, carried_buffers
from trt_kvcache.runtime.encoders.constants import ConstantInputs, Constants
from trt_kvcache.runtime.inputs import linear_capacity
from trt_kvcache.runtime.positions import PositionInput
from trt_kvcache.runtime.runner import Runner, StepBatch

__all__ = ["Difference", "Finding", "Replay", "Watch", "replay"]

Array = npt.NDArray[Any]

_CHOSEN = 0.25  # of the rows of an output, at most, that chosen experts may change


@dataclass(frozen=True)
class Difference:
    """The largest difference found in one output, as a part of what is allowed.

    Attributes:
        output: name of the logits, or of a cache's past.
        found: as shares of a row; None: not comparable, such as a number that is not finite.
        allowed: in the same episode.
    """

    output: str
    found: Share | None
    allowed: Share

    @property
    def part(self) -> float:
        """The part of what is allowed; infinite where nothing can be compared."""
        if self.found is None:
            return math.inf
        return max(self.found.largest / self.allowed.largest, self.found.typical / self.allowed.typical)


@dataclass(frozen=True)
class Finding:
    """A disagreement.

    Attributes:
        episode, step: where; the number of the step in its episode.
        row: of the batch.
        what: in words.
    """

    output: str
    episode: str
    step: int
    row: int
    what: str

    def __str__(self) -> str:
        """For messages."""
        return f"output '{self.output}' at step {self.step} of '{self.episode}', row {self.row}: {self.what}"


@dataclass(frozen=True)
class Replay:
    """The result of a replay.

    Attributes:
        steps: that were run; the first episode with a disagreement is the last one.
        findings: each output that disagrees, the first time.
        outputs: the largest difference of each output.
    """

    steps: int
    findings: tuple[Finding, ...]
    outputs: tuple[Difference, ...]

    @property
    def passed(self) -> bool:
        """The engine gives the original's numbers."""
        return not self.findings


class Watch(Protocol):
    """Looks at each step of a replay."""

    def before(self, batch: StepBatch) -> None:
        """Before a step."""

    def after(self, episode: Episode, number: int, batch: StepBatch) -> None:
        """After it; `number`: in its episode."""


def rows_needed(proof: Proof, plan: CachePlan, most: int) -> int:
    """Rows of the caches that a replay takes: one beside those in use, where the engine has it."""
    return min(proof.facts.rows + 1, most) if rows_aligned(plan) else 1


def replay(runner: Runner, proof: Proof, watch: Watch | None = None) -> Replay:
    """Run the steps of a proof.

    Args:
        runner: of the engine; what its caches hold is lost. It has to take as many rows as `rows_needed`.
        proof: of the engine.
        watch: is called around each step.

    Raises:
        ManifestError: the proof cannot be of this engine, or cannot be replayed with this version of NumPy.
        SessionError: a step failed.
    """
    return _Replay(runner, proof, watch).run()


class _Replay:
    def __init__(self, runner: Runner, proof: Proof, watch: Watch | None) -> None:
        facts = proof.facts
        self._watch = watch
        if facts.digest != draws_digest(facts.seed):
            raise ManifestError(
                f"the proof cannot be replayed with NumPy {np.__version__}, which draws other numbers from a seed than "
                "the one that it was recorded with: build the engine again, or install that version"
            )
        self._runner, self._proof, self._plan = runner, proof, runner.plan
        self._contents = Contents(runner.plan, facts.seed, facts.garbage, facts.encoder)
        self._buffers = {b.past: b for b in carried_buffers(runner.plan)}
        self._columns = columns_of(proof)
        if why := self._misfit():
            raise ManifestError(f"the proof does not fit the engine: {why}; build the engine again")
        self._worst: dict[str, Difference] = {}
        self._findings: dict[str, Finding] = {}
        self._constants = self._draw_constants()
        self._planes = PositionInput(runner.plan).planes
        self._embedded = embedded(runner.plan)
        self._count = 0
        rows = facts.rows
        # Rows that an engine does not take together come one after the other.
        self._together = together = rows if rows_aligned(self._plan) and rows <= runner.max_batch else 1
        self._first = int(runner.max_batch > together)  # rows in use come after another one, which must not change
        used = range(self._first, self._first + together)
        self._spare = [r for r in (0, together) if r < runner.max_batch and r not in used]
        self._turn, self._ends = slice(together), (0,) * together
        self._spread = spread(facts.rounding)
        self._outside: dict[tuple[str, str], set[object]] = {}  # rows by episode and output, or one row's episodes
        self._outliers: dict[str, tuple[int, int]] = {}  # rows of each output that differ, and all

    def run(self) -> Replay:
        facts = self._proof.facts
        for row in range(0, facts.rows, self._together):
            self._turn, self._ends = slice(row, row + self._together), (0,) * self._together
            for at, episode in enumerate(facts.episodes):
                if not self._findings or facts.chooses:
                    part = replace(episode, starts=episode.starts[self._turn])
                    self._episode(at, part)
                    self._ends = part.ends
        if facts.chooses:
            self._leave_out_choices()
        return Replay(self._count, tuple(self._findings.values()), tuple(self._worst.values()))

    def _leave_out_choices(self) -> None:
        """Forget what chosen experts explain: few rows of an output, in which a near tie went the other way."""
        for name, (outliers, rows) in self._outliers.items():
            if outliers <= _CHOSEN * rows and math.isfinite(self._worst[name].part):
                self._findings.pop(name, None)

    def _misfit(self) -> str:
        """Why a proof cannot be of this engine, as far as sizes say; empty if it can."""
        facts, arrays, runner = self._proof.facts, self._proof.arrays, self._runner
        if facts.chunk > runner.max_chunk:
            return f"its steps have up to {facts.chunk} tokens, and the engine takes {runner.max_chunk}"
        if unknown := {n for shares in facts.tolerances.values() for n in shares} - {*self._buffers, LOGITS}:
            return f"it has a cache '{min(unknown)}'"
        columns = len(self._columns)
        for at, episode in enumerate(facts.episodes):
            rows = len(episode.starts)
            bound = min([n for n in (linear_capacity(self._plan), runner.max_positions) if n is not None], default=None)
            if bound is not None and max(episode.ends) > bound:
                return f"'{episode.name}' ends after {max(episode.ends)} tokens, and the engine takes {bound}"
            if episode.name not in facts.tolerances or rows != facts.rows:
                return f"nothing says what '{episode.name}' may differ by, or it has other rows"
            shapes: dict[str, tuple[int, ...]] = {}
            for number, (length, keep) in enumerate(zip(episode.lengths, episode.keep, strict=False)):
                shapes[f"{at}/{number}/tokens"] = rows, length
                if keep:
                    shapes[f"{at}/{number}/logits"] = rows, keep, columns
                if f"{at}/{number}/high" in arrays:
                    shapes |= {f"{at}/{number}/{part}": (rows, keep) for part in ("high", "highest")}
            shapes |= {
                f"{at}/rows/{name}": (rows, 1 if self._buffers[name].is_state else len(episode.newest))
                for name in facts.tolerances[episode.name].keys() & self._buffers.keys()
            }
            for name, shape in shapes.items():
                if name not in arrays or arrays[name].shape[: len(shape)] != shape:
                    return f"'{name}' is missing, or of another size"
        return ""

    def _draw_constants(self) -> tuple[Constants, ...]:
        """The inputs that each row is given once."""
        inputs = ConstantInputs(self._plan)
        if not inputs.tensors:
            return ()
        drawn = self._contents.constants(self._proof.facts.rows)
        rows = range(self._proof.facts.rows)
        return tuple(inputs.read({name: v[row : row + 1] for name, v in drawn.items()}) for row in rows)

    def _episode(self, at: int, episode: Episode) -> None:
        first, turn = self._first, self._turn
        whole = self._proof.facts.episodes[at].starts
        drawn = whole if episode.name == DRAWN else (0,) * len(whole)
        for name, values in self._contents.first(at, drawn):
            if name in self._buffers:
                self._begin(name, values[turn], episode)
        prints = {n: {r: self._prints(b, r) for r in self._rows(b)} for n, b in self._buffers.items()}
        starts = np.array(episode.starts, np.int64)
        for number, length in enumerate(episode.lengths):
            tokens = self._proof.arrays[f"{at}/{number}/tokens"].astype(np.int64)
            embeds = self._embeds(tokens.shape)
            batch = StepBatch(
                first, tokens[turn], starts, episode.keep[number], self._constants[turn],
                None if embeds is None else embeds[turn], self._positions(starts, length),
            )  # fmt: skip
            if self._watch is not None:
                self._watch.before(batch)
            logits = self._runner.step(batch)
            self._count += 1
            self._compare_logits(at, episode, number, logits)
            if self._watch is not None:
                self._watch.after(episode, number, batch)
            starts = starts + length
        for name, buffer in self._buffers.items():
            self._compare_cache(at, episode, buffer)
            for row, before in prints[name].items():
                self._compare_untouched(episode, buffer, row, before)

    def _begin(self, name: str, fresh: Array, episode: Episode) -> None:
        """Writes what a cache holds before an episode; `fresh`: if it is empty, or drawn."""
        buffer, cache = self._buffers[name], self._contents.caches[name]
        for row in self._spare if self._count == 0 else ():
            self._runner.write_row(name, row, fresh[0])
        for row, (start, end) in enumerate(zip(episode.starts, self._ends, strict=True)):
            if not start or episode.name == DRAWN:
                self._runner.write_row(name, self._first + row, fresh[row])
            elif start > end and not buffer.is_state:
                values = np.array(self._runner.read_row(name, self._first + row, buffer.capacity))
                copies(cache.physical_rows(values[None])[0], buffer.capacity, end, start)
                self._runner.write_row(name, self._first + row, values)

    def _rows(self, buffer: Carried) -> list[int]:
        """Rows of the batch in which a cache row may stay as it is; state has none but in another sequence."""
        used = range(self._first, self._first + self._together)
        return [*self._spare, *(() if buffer.is_state else used)]

    def _cache_rows(self, buffer: Carried, row: int) -> Array:
        """The rows ``[capacity, numbers]`` of a cache."""
        values = self._runner.read_row(buffer.past, row, buffer.capacity)
        rows = self._contents.caches[buffer.past].physical_rows(values[None])[0]
        return np.asarray(rows.reshape(buffer.capacity, -1))

    def _prints(self, buffer: Carried, row: int) -> Array:
        """A number for the bits of each row of a cache."""
        values = np.ascontiguousarray(self._cache_rows(buffer, row))
        width = 8 if values.itemsize * values.shape[1] % 8 == 0 else values.itemsize
        bits = values.view(f"u{width}").astype(np.uint64, copy=False)
        factors = np.random.default_rng(0).integers(0, 1 << 63, bits.shape[1], np.uint64) * np.uint64(2) + np.uint64(1)
        return np.asarray((bits * factors).sum(-1, dtype=np.uint64))

    def _embeds(self, shape: tuple[int, ...]) -> Array | None:
        if self._embedded is None:
            return None
        values = self._contents.embeds(self._count % self._proof.facts.steps, (*shape, int(self._embedded.shape[-1])))
        return values.astype(array_dtype(self._embedded.dtype))

    def _positions(self, starts: Array, length: int) -> Array | None:
        """Positions ``[R, planes, S]`` of a model that takes several for each token, as the original had them."""
        if self._planes < 2:
            return None
        counted = np.add.outer(starts, np.arange(length))[:, None]
        return np.asarray(counted // np.arange(1, self._planes + 1)[:, None])

    def _compare_logits(self, at: int, episode: Episode, number: int, logits: Array) -> None:
        arrays, name = self._proof.arrays, f"{at}/{number}"
        if logits.shape[-1] != self._proof.facts.vocab:
            raise ManifestError(
                f"the proof was made with a vocabulary of {self._proof.facts.vocab} tokens, and the engine gives "
                f"logits of {logits.shape[-1]}: it is of another model; build the engine again"
            )
        if not episode.keep[number]:
            return
        values = logits.astype(np.float32)
        expected, actual = arrays[f"{name}/logits"][self._turn], values[..., self._columns]
        if f"{name}/high" in arrays:
            high = np.take_along_axis(values, arrays[f"{name}/high"][self._turn].astype(np.int64), -1)
            expected = np.concatenate([expected, arrays[f"{name}/highest"][self._turn]], -1)
            actual = np.concatenate([actual, high], -1)
        for row, (wanted, had) in enumerate(zip(expected, actual, strict=True)):
            self._note(LOGITS, episode, number, row, share_of(wanted, had))

    def _compare_cache(self, at: int, episode: Episode, buffer: Carried) -> None:
        """The newest rows, as numbers."""
        if buffer.past not in self._proof.facts.tolerances[episode.name]:
            return
        expected = self._proof.arrays[f"{at}/rows/{buffer.past}"][self._turn]
        steps = np.repeat(np.arange(len(episode.lengths)), episode.lengths)
        for row, start in enumerate(episode.starts):
            if buffer.is_state:
                state = self._runner.read_row(buffer.past, self._first + row, 1)
                flat = state.reshape(1, -1).astype(np.float32)[:, places(state.size, expected.shape[-1])]
                self._note(buffer.past, episode, len(episode.lengths) - 1, row, share_of(expected[row], flat))
                continue
            still = episode.newest >= sum(episode.lengths) - buffer.capacity
            tokens, wanted = episode.newest[still], expected[row, still]
            now = self._cache_rows(buffer, self._first + row)
            where = (start + tokens) % buffer.capacity
            actual = now[where].astype(np.float32)[:, places(now.shape[-1], expected.shape[-1])]
            unknown = np.isnan(wanted)
            actual[unknown] = np.nan
            distance = np.abs(np.where(unknown, 0, wanted - actual)).max(-1)
            worst = int(steps[tokens[int(np.argmax(distance))]])  # the first one that is not finite, if there is any
            self._note(buffer.past, episode, worst, row, share_of(wanted, actual))

    def _compare_untouched(self, episode: Episode, buffer: Carried, row: int, before: Array) -> None:
        """The rows of a cache that no token went to, bit by bit."""
        changed = self._prints(buffer, row) != before
        if not changed.any():
            return
        number = row - self._first
        if row not in self._spare:
            start, end, places = episode.starts[number], episode.ends[number], np.arange(buffer.capacity)
            # Where past and present are two buffers, rows without a token may come out as zeros.
            changed &= (places < end) | self._cache_rows(buffer, row).any(-1)
            changed[np.arange(max(start, end - buffer.capacity), end) % buffer.capacity] = False
        if changed.any():
            self._worst[buffer.past] = Difference(buffer.past, None, Share(math.inf, math.inf))
            self._find(
                buffer.past, episode, len(episode.lengths) - 1, number, "changed cache rows that no token went to"
            )

    def _note(self, name: str, episode: Episode, step: int, row: int, share: Share) -> None:
        """Compare a difference with what is allowed: more in one row of an episode, or in one episode of one row."""
        facts = self._proof.facts
        allowed = facts.tolerances[episode.name].get(name)
        if allowed is None:
            return
        if not share.within(allowed):
            outside = self._outside.setdefault((name, episode.name if facts.rows > 1 else ""), set())
            outside.add(self._turn.start + row if facts.rows > 1 else episode.name)
            if len(outside) == 1:
                allowed = Share(self._spread * allowed.largest, self._spread * allowed.typical)
        difference = Difference(name, share if math.isfinite(share.largest) else None, allowed)
        self._worst[name] = max(self._worst.get(name, difference), difference, key=lambda d: d.part)
        outliers, rows = self._outliers.get(name, (0, 0))
        self._outliers[name] = outliers + (not share.within(allowed)), rows + 1
        if share.within(allowed):
            return
        if share.largest > allowed.largest and math.isfinite(share.largest):
            what = f"differs by {share.largest:.2g} of its largest number (allowed: {allowed.largest:.2g})"
        elif math.isfinite(share.typical):
            what = f"differs by {share.typical:.2g} of its size on average (allowed: {allowed.typical:.2g})"
        else:
            what = "is not finite where the original is"
        self._find(name, episode, step, row, what)

    def _find(self, name: str, episode: Episode, step: int, row: int, what: str) -> None:
        self._findings.setdefault(name, Finding(name, episode.name, step, self._turn.start + row, what))

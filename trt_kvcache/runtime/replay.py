"""Replays an engine's proof: decodes the recorded tokens again, and compares logits and the newest cache rows.

Cache rows to which the replay writes no token must keep their bits.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from trt_kvcache.compare.decode import Piece
from trt_kvcache.compare.differences import Share, share_of
from trt_kvcache.compare.proof import LOGITS, Proof, draws_digest, numbers_of_cache
from trt_kvcache.compare.rewritten_model import TextCaches
from trt_kvcache.compare.text_inputs import token_table
from trt_kvcache.dtypes import array_dtype
from trt_kvcache.errors import ManifestError
from trt_kvcache.importer.cache_plan import CachePlan, Role
from trt_kvcache.importer.steps.drawn_inputs import draw_constants
from trt_kvcache.runtime.buffers import Carried, carried_buffers, linear_capacity
from trt_kvcache.runtime.encoders.constants import ConstantInputs
from trt_kvcache.runtime.runner import Runner, StepBatch
from trt_kvcache.runtime.token_inputs import PositionInput
from trt_kvcache.runtime.trt.cuda import ALIGNMENT

Array = npt.NDArray[Any]

_UNFIT = "the proof does not fit the engine"
_CHOSEN = 0.25  # largest share of an output's rows that may differ because the engine chose other experts (MoE)


class SessionSteps(TextCaches):
    """Decodes sequences with a session's runner, to compare its results; implements `compare.decode.Runner`.

    Args:
        runner: runner of an engine, or of a model on the CPU; if it has too few batch rows, only some sequences are
            decoded.
        given: values of the model's constants, by name; each has a batch of 1, or one row for each sequence.
        table: embeddings ``[V, H]``, for a model that takes embeddings instead of tokens.
        garbage, seed: values in cache rows without a token, and the seed of their random numbers; see `TextCaches`.
        first: batch row of the first sequence.
        spare: batch rows without a sequence. At the start they get the contents of the first sequence.
    """

    def __init__(
        self, runner: Runner, given: Mapping[str, Array] | None = None, table: Array | None = None, *,
        garbage: float = 0.0, seed: int = 0, first: int = 0, spare: Sequence[int] = (),
    ) -> None:  # fmt: skip
        super().__init__(runner.plan, garbage, seed)
        self.runner, self.name, self._first, self._spare = runner, runner.name, first, spare
        self.buffers = {b.past: b for b in carried_buffers(runner.plan)}
        self._given, self._table = given or {}, table
        self._inputs = ConstantInputs(runner.plan)
        self._planes = PositionInput(runner.plan).planes

    def row(self, text: int) -> int:
        """Return the batch row of the caches that holds a sequence."""
        return self._first + text - self.texts.start

    def read(self, name: str, text: int) -> Array:
        """Return the contents of a cache for one sequence, as in `TextCaches.read`."""
        return self.runner.read_row(name, self.row(text), self.buffers[name].capacity)

    def write(self, name: str, texts: Sequence[int], values: Array) -> None:
        """Replace the contents of a cache for some sequences; the first call also fills the spare batch rows."""
        if name not in self.buffers:
            return
        spare = self._spare if not self.ends.any() else ()
        rows = [(self.row(text), v) for text, v in zip(texts, values, strict=True) if text in self.texts]
        for row, contents in (*rows, *((row, values[0]) for row in spare)):
            self.runner.write_row(name, row, contents.astype(self.buffers[name].array_dtype))

    def start(self, rows: int, texts: range | None = None) -> None:
        """Start `rows` new sequences without tokens. Only the sequences in `texts` are decoded; None: all."""
        self.begin(rows, texts)
        self.fill()
        inputs = self._inputs.tensors
        values = {t.name: self._given[t.name].astype(array_dtype(t.dtype)) for t in inputs if t.name in self._given}
        self._constants = [
            self._inputs.read({n: v[row : row + 1] if len(v) == rows else v for n, v in values.items()})
            for row in range(rows if values else 0)
        ]

    def step(self, piece: Piece, tokens: Array) -> Array:
        """Decode the next tokens of some sequences and return their logits, as in `Runner.step`."""
        self.skip(piece)
        rows = [row for row in piece.rows if row in self.texts]
        batch = self._batch(piece, rows, tokens[[piece.rows.index(row) for row in rows]])
        logits = np.array(self.runner.step(batch), np.float32)
        self.ends[list(piece.rows)] += piece.length
        return logits

    def _batch(self, piece: Piece, rows: Sequence[int], tokens: Array) -> StepBatch:
        starts, embeds, positions = self.ends[list(rows)], None, None
        if self._table is not None:
            role = self.runner.plan.tensor(Role.TOKENS)
            assert role is not None
            embeds = self._table[tokens].astype(array_dtype(role.dtype))
        if self._planes > 1:
            counted = np.add.outer(starts, np.arange(piece.length))[:, None]
            positions = counted // np.arange(1, self._planes + 1)[:, None]
        keep = piece.length if piece.kept is None else piece.kept
        most = self.runner.max_logits
        return StepBatch(
            self.row(rows[0]), tokens.astype(np.int64), starts, keep if most is None else min(keep, most),
            tuple(self._constants[rows[0] : rows[-1] + 1]), embeds, positions,
        )  # fmt: skip


@dataclass(frozen=True)
class Difference:
    """The largest difference found in one output, and the allowed difference.

    Attributes:
        output: ``"logits"``, or the name of a cache's past input.
        found: the difference, relative to the values in a row; None if a number is not finite.
        allowed: the allowed difference, in the part of the decode where `found` occurred.
    """

    output: str
    found: Share | None
    allowed: Share

    @property
    def part(self) -> float:
        """The found difference as a share of the allowed one; infinite if the numbers cannot be compared."""
        if self.found is None:
            return math.inf
        return max(self.found.largest / self.allowed.largest, self.found.typical / self.allowed.typical)


@dataclass(frozen=True)
class Finding:
    """A place where an engine's results disagree with the recorded results in its proof.

    Attributes:
        step: number of the step, from 0.
        part: name of the part of the decode to which the step belongs.
        row: index of the sequence.
        what: text that describes the difference.
    """

    output: str
    step: int
    part: str
    row: int
    what: str

    def __str__(self) -> str:
        return f"output '{self.output}' at step {self.step} ('{self.part}'), row {self.row}: {self.what}"


@dataclass(frozen=True)
class Replay:
    """The result of running the recorded steps of an engine's proof again.

    Attributes:
        steps: number of steps run. Unless the model has experts, the replay ends after the first part that disagrees.
        findings: each output that disagrees, once.
        outputs: the largest difference for each output.
    """

    steps: int
    findings: tuple[Finding, ...]
    outputs: tuple[Difference, ...]

    @property
    def passed(self) -> bool:
        """True if the engine's results agree with the proof."""
        return not self.findings


def rows_needed(proof: Proof, plan: CachePlan, most: int) -> int:
    """Return the number of batch rows for a replay: one for each sequence, and one more that must not change."""
    return min(proof.facts.rows + 1, most) if _rows_aligned(plan) else 1


def _rows_aligned(plan: CachePlan) -> bool:
    """Return True if each batch row starts at an address that TensorRT accepts, so that sequences can share steps."""
    return not any(b.row_bytes % ALIGNMENT for b in carried_buffers(plan))


def replay(runner: Runner, proof: Proof) -> Replay:
    """Decode the tokens of a proof (recorded steps with their results), and return how the runner's results differ.

    `runner` has at least `rows_needed` rows, and loses its cache contents. Raises `ManifestError` if the proof does not
    fit this engine or this version of NumPy, `SessionError` if a step failed.
    """
    try:
        return _Replay(runner, proof).run()
    except (ArithmeticError, IndexError, KeyError, TypeError, ValueError) as error:
        # From NumPy: arrays are missing, or have other sizes.
        raise ManifestError(f"{_UNFIT}: {' '.join(str(error).split())}; build the engine again") from error


class _Replay:
    def __init__(self, runner: Runner, proof: Proof) -> None:
        facts, plan = proof.facts, runner.plan
        if facts.digest != draws_digest(facts.seed):
            raise ManifestError(
                f"the proof cannot be replayed with NumPy {np.__version__}, which draws other numbers from a seed "
                "than the version that recorded it: build the engine again, or install that version"
            )
        self._runner, self._proof, self._facts = runner, proof, facts
        if why := self._misfit():
            raise ManifestError(f"{_UNFIT}: {why}; build the engine again")
        given = draw_constants(plan, facts.rows, facts.seed, length=facts.encoder)
        # If the engine cannot take rows together, they run one after the other.
        self._together = facts.rows if _rows_aligned(plan) and facts.rows <= runner.max_batch else 1
        first = int(runner.max_batch > self._together)  # the rows in use come after one row that must not change
        used = range(first, first + self._together)
        self._spare = [r for r in (0, self._together) if r < runner.max_batch and r not in used]
        self._steps = SessionSteps(
            runner, given, token_table(plan, facts.seed), garbage=facts.garbage, seed=facts.seed, first=first,
            spare=self._spare,
        )  # fmt: skip
        self._count = 0
        self._worst: dict[str, Difference] = {}
        self._findings: dict[str, Finding] = {}
        # by (output, part of the decode): the rows above the usual limit. With one row, by (output, ""): such parts
        self._outside: dict[tuple[str, str], set[object]] = {}
        self._outliers: dict[str, tuple[int, int]] = {}  # by output: number of rows that differ, and of all rows

    def _misfit(self) -> str:
        """Return why a proof's lengths or cache names do not fit this engine; empty if they do."""
        facts, runner = self._facts, self._runner
        bounds = [n for n in (linear_capacity(runner.plan), runner.max_positions) if n is not None]
        if facts.chunk > runner.max_chunk:
            return f"its steps have up to {facts.chunk} tokens, but the engine takes at most {runner.max_chunk}"
        if max(facts.lengths) > min(bounds, default=math.inf):
            return f"it has texts of {max(facts.lengths)} tokens, but the engine takes at most {min(bounds)}"
        caches = {b.past for b in carried_buffers(runner.plan)}
        if unknown := {n for shares in facts.allowed.values() for n in shares} - {*caches, LOGITS}:
            return f"it has a cache '{min(unknown)}', which the engine does not have"
        return ""

    def run(self) -> Replay:
        for first in range(0, self._facts.rows, self._together):
            self._run_texts(range(first, first + self._together))
        # Another choice of experts explains a finding if few rows differ, and two experts scored alike.
        for name, (outliers, rows) in self._outliers.items() if self._facts.chooses else ():
            if outliers <= _CHOSEN * rows and math.isfinite(self._worst[name].part):
                self._findings.pop(name, None)
        return Replay(self._count, tuple(self._findings.values()), tuple(self._worst.values()))

    def _run_texts(self, texts: range) -> None:
        steps, part = self._steps, ""
        steps.start(self._facts.rows, texts)
        starts, prints = steps.ends.copy(), dict[tuple[str, int], Array]()
        for number, piece in enumerate(self._facts.pieces):
            steps.skip(piece)
            if piece.part != part:
                if self._findings and not self._facts.chooses:
                    return
                part, starts = piece.part, steps.ends.copy()
                prints = {(n, r): self._prints(b, r) for n, b in steps.buffers.items() for r in self._rows(b, texts)}
            if rows := [row for row in piece.rows if row in texts]:
                self._step(number, rows, replace(piece, skip=0, drawn=False))
            else:
                steps.ends[list(piece.rows)] += piece.length
            if number in self._facts.lasts:
                for name, buffer in steps.buffers.items():
                    self._compare_cache(number, part, name)
                    for row in self._rows(buffer, texts):
                        self._compare_untouched(number, part, buffer, row, prints[name, row], starts)

    def _step(self, number: int, rows: list[int], piece: Piece) -> None:
        arrays = self._proof.arrays
        logits = self._steps.step(piece, arrays[f"{number}/tokens"])
        self._count += 1
        if logits.shape[-1] != self._facts.vocab:
            raise ManifestError(
                f"the proof was made with a vocabulary of {self._facts.vocab} tokens, and the engine gives logits of "
                f"{logits.shape[-1]}: it is of another model; build the engine again"
            )
        wanted = arrays[f"{number}/logits"][rows]
        had = logits[:, logits.shape[1] - wanted.shape[1] :]
        if f"{number}/columns" in arrays:
            had = np.take_along_axis(had, arrays[f"{number}/columns"][rows].astype(np.int64), -1)
        for row, one, other in zip(rows, wanted, had, strict=True):
            self._note(LOGITS, number, piece.part, row, share_of(one, other))

    def _rows(self, buffer: Carried, texts: range) -> list[int]:
        """Return the batch rows to check for unwanted changes: spare rows, and for a cache the rows of `texts`."""
        return [*self._spare, *(() if buffer.is_state else map(self._steps.row, texts))]

    def _cache_rows(self, buffer: Carried, row: int) -> Array:
        """Return the contents of a cache in one batch row, as ``[capacity, numbers]``."""
        values = self._runner.read_row(buffer.past, row, buffer.capacity)
        rows = self._steps.tensors[buffer.past].physical_rows(values[None])[0]
        return np.asarray(rows.reshape(buffer.capacity, -1))

    def _prints(self, buffer: Carried, row: int) -> Array:
        """Return a checksum of the bits of each cache row in one batch row, as uint64 ``[capacity]``."""
        values = np.ascontiguousarray(self._cache_rows(buffer, row))
        width = 8 if values.itemsize * values.shape[1] % 8 == 0 else values.itemsize
        bits = values.view(f"u{width}").astype(np.uint64, copy=False)
        factors = np.random.default_rng(0).integers(0, 1 << 63, bits.shape[1], np.uint64) * np.uint64(2) + np.uint64(1)
        return np.asarray((bits * factors).sum(-1, dtype=np.uint64))

    def _compare_cache(self, number: int, part: str, name: str) -> None:
        for text in self._steps.texts if name in self._facts.allowed[part] else ():
            wanted, end = self._proof.arrays[f"{part}/{name}"][text], int(self._steps.ends[text])
            had = numbers_of_cache(self._steps.tensors[name], self._steps.read(name, text), end, *wanted.shape)
            self._note(name, number, part, text, share_of(wanted, had))

    def _compare_untouched(
        self, number: int, part: str, buffer: Carried, row: int, before: Array, starts: Array
    ) -> None:
        """Check that the cache rows to which no token was written have the same bits as before."""
        changed = self._prints(buffer, row) != before
        text = row - self._steps.row(0)
        if changed.any() and row not in self._spare:
            start, end, places = int(starts[text]), int(self._steps.ends[text]), np.arange(buffer.capacity)
            # If past and present are two buffers, rows without a token may become zeros.
            changed &= (places < end) | self._cache_rows(buffer, row).any(-1)
            changed[np.arange(max(start, end - buffer.capacity), end) % buffer.capacity] = False
        if changed.any():
            self._worst[buffer.past] = Difference(buffer.past, None, Share(math.inf, math.inf))
            self._find(buffer.past, number, part, text, "changed cache rows that no token went to")

    def _note(self, name: str, number: int, part: str, row: int, share: Share) -> None:
        """Record a difference, and a finding if it is larger than allowed.

        In each part of the decode (`Piece.part`), one of several batch rows may exceed the usual limit, up to a larger
        limit. A single batch row may do so in one part only.
        """
        facts = self._facts
        limit = facts.allowed[part].get(name)
        if limit is None:
            return
        if not share.within(limit):
            outside = self._outside.setdefault((name, part if facts.rows > 1 else ""), set())
            outside.add(row if facts.rows > 1 else part)
            if len(outside) == 1:
                limit = limit.times(Share(1, 1), facts.uneven)
        difference = Difference(name, share if math.isfinite(share.largest) else None, limit)
        self._worst[name] = max(self._worst.get(name, difference), difference, key=lambda d: d.part)
        outliers, rows = self._outliers.get(name, (0, 0))
        self._outliers[name] = outliers + (not share.within(limit)), rows + 1
        if share.within(limit):
            return
        if share.largest > limit.largest and math.isfinite(share.largest):
            what = f"differs by {share.largest:.2g} of its largest number (allowed: {limit.largest:.2g})"
        elif math.isfinite(share.typical):
            what = f"differs by {share.typical:.2g} of its size on average (allowed: {limit.typical:.2g})"
        else:
            what = "is not finite where the proof is finite"
        self._find(name, number, part, row, what)

    def _find(self, name: str, number: int, part: str, row: int, what: str) -> None:
        self._findings.setdefault(name, Finding(name, number, part, row, what))

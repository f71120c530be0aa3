"""Random schedules: whatever happens to a sequence, and to the others beside it, it gets the tokens that it gets alone.

    python tests/schedules.py --seeds 0:10000           all architectures in turn; exit code 1 if a sequence differs
    python tests/schedules.py --seeds 7:8 --only growing --show

A schedule is made of its seed: sequences join, grow by turns, are forked, cropped, moved, offloaded, saved and loaded,
preempted, and leave, in two sessions of one model with other rows and other chunks; greedy, drawn from a seed, or with
prompt lookup. The second session has more sequences than rows, and a prefix cache and a draft where its model has one.
Each is then decoded alone, in a third session, from the text that it went on from. Its tokens have to be the same, and
its logits as near as rounding leaves them: a batch of another shape sums in another order.

Tokens may differ where the logits do not, by more than that: two tokens are nearly equal then. Such a near tie is
counted and shown, with the difference of the logits. It is one only if each side's token follows from that side's own
logits and from the position: a number that was drawn for another position, or logits that differ by more, are failures.
"""

from __future__ import annotations

import argparse
import copy
import random
import shutil
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any, cast
from unittest.mock import patch

import numpy as np

TESTS = Path(__file__).resolve().parent
PATHS = (TESTS.parent, TESTS.parent / "scripts", TESTS, TESTS / "corpus")
sys.path[:0] = [str(p) for p in PATHS if str(p) not in sys.path]

from runtime.families import FAMILIES, MODELS, PROMPTS, Family, Made  # noqa: E402

from trt_kvcache import DecodeSession, FinishReason, GenerationConfig, PlanOptions  # noqa: E402
from trt_kvcache.importer import import_model  # noqa: E402
from trt_kvcache.runtime import cache as cache_module  # noqa: E402
from trt_kvcache.runtime import continuation, prefix  # noqa: E402
from trt_kvcache.runtime.buffers import carried_buffers  # noqa: E402
from trt_kvcache.runtime.draft import DraftModel  # noqa: E402
from trt_kvcache.runtime.generation.sampling import Sampler  # noqa: E402
from trt_kvcache.runtime.ort import runner as ort_runner  # noqa: E402
from trt_kvcache.runtime.runner import Runner, StepBatch  # noqa: E402

BLOCK = 4
"""Tokens that a prefix cache keeps together: texts are short."""

ROUNDING = 1e-4
"""Logits of one text may differ by this share of the largest.

Measured over 10,000 schedules: 6.5e-5 at most with cross-attention, 5e-6 in all other architectures.
"""


def _as_exported(name: str) -> Family:
    return Family(lambda folder: Made(MODELS / name / "model.onnx", lambda *_: None), PlanOptions(capacity=64))


ARCHITECTURES = {
    name: FAMILIES[name]
    for name in (
        "mobius", "seq-major", "five-d", "softcap", "no span", "bool mask, no lengths", "growing", "batch 1", "batch 3",
        "one token", "four tokens", "circular", "circular, functional", "circular, one token", "embeddings", "planes",
        "hybrid", "hybrid, growing", "cross keys, mask", "cross hidden", "cross, growing",
    )
} | {
    "bloom": _as_exported("optimum/bloom"),
    "deepseek": _as_exported("torch/deepseek_v3_dynamic_eager"),
    "int4": _as_exported("ort-genai/llama_cpu_int4"),
}  # fmt: skip
"""Linear and circular caches, growing ones, state, cross-attention, latents, embeddings, given positions, fixed sizes,
weights of 4 bits; with attention as ONNX Runtime fuses it, and without."""


@dataclass
class Choice:
    """One token: at which step, after how many tokens, of which logits ``[V]`` it was chosen."""

    step: int
    position: int
    logits: np.ndarray
    token: int


@dataclass
class Part:
    """What one config generated after a text, in one go or in several.

    Attributes:
        text: before it.
        index: of the random numbers.
        choices: of its tokens.
        tokens: as events brought them.
        ended: its finish reason, of a part that came to its end.
    """

    text: list[int]
    config: GenerationConfig
    index: int
    choices: list[Choice] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    ended: FinishReason | None = None

    @property
    def rest(self) -> GenerationConfig:
        """The config for what is still to come."""
        return replace(self.config, max_new_tokens=self.config.max_new_tokens - len(self.tokens))


@dataclass
class Line:
    """A sequence.

    Attributes:
        name: in messages.
        number: of what it is given beside its text.
        text: its tokens.
        part: that is under way, or None.
        session: in which it is: 0 or 1; None: in none.
        slot: there.
        file: where it is saved; with no session and no file it is preempted, and has to be computed again.
    """

    name: str
    number: int
    text: list[int]
    part: Part | None = None
    session: int | None = None
    slot: int = -1
    file: Path | None = None


@dataclass
class Report:
    """The outcome of schedules.

    Attributes:
        counts: schedules, sequences, tokens, and each kind of event.
        worst: the largest share by which logits differed, by architecture.
        ties, failures: a line for each.
    """

    counts: Counter[str] = field(default_factory=Counter)
    worst: dict[str, float] = field(default_factory=dict)
    ties: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    def add(self, other: Report) -> None:
        self.counts += other.counts
        for name, share in other.worst.items():
            self.worst[name] = max(self.worst.get(name, 0), share)
        self.ties += other.ties
        self.failures += other.failures

    def lines(self) -> Iterator[str]:
        yield ", ".join(f"{count:,} {what}" for what, count in self.counts.items())
        yield "largest difference of logits, as a share of the largest logit: " + ", ".join(
            f"{name} {share:.1e}" for name, share in sorted(self.worst.items(), key=lambda item: -item[1])
        )
        yield from (f"near tie: {line}" for line in self.ties)
        yield from (f"DIFFERENT: {line}" for line in self.failures)
        yield f"{len(self.ties)} near ties, {len(self.failures)} failures"


class Recorder(Sampler):
    """A sampler that notes what it chooses, and from what."""

    sink: list[Choice] | None = None
    clock = 0

    def __init__(self, config: GenerationConfig, index: int = 0) -> None:
        super().__init__(config, index)
        self._sink = Recorder.sink

    def choose(self, logits: Any, tokens: Any, new_tokens: int) -> tuple[int, float | None]:
        token, logprob = super().choose(logits, tokens, new_tokens)
        if self._sink is not None:
            self._sink.append(Choice(Recorder.clock, tokens.size, logits.astype(np.float32), token))
        return token, logprob


@contextmanager
def recorded(sink: list[Choice]) -> Iterator[None]:
    """Note what the sequences choose that are added in this block."""
    Recorder.sink = sink
    with patch.object(continuation, "Sampler", Recorder):
        yield
    Recorder.sink = None


class SometimesWrong:
    """A draft that is right but where the likeliest token is a multiple of three.

    Args:
        runner: of the model itself.
    """

    def __init__(self, runner: Runner) -> None:
        self._runner = runner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def step(self, batch: StepBatch) -> np.ndarray:
        logits = self._runner.step(batch)
        wrong = logits.argmax(-1) % 3 == 0
        return np.where(wrong[..., None], np.roll(logits, 1, -1), logits)


class Bench:
    """The sessions of one architecture: two for schedules, and one where sequences are alone."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name, self.family = name, ARCHITECTURES[name]
        self.folder = folder
        self.made = self.family.make(self.folder)
        self._imported = import_model(self.made.model, self.family.options)
        chunk, batch = self.family.max_chunk, self.family.max_batch
        fixed = chunk if chunk in (1, 4) else None
        self.sessions = [self._open(batch, chunk), self._helped(batch and 2, fixed or 3)]
        self.alone = self._open(batch and 1, fixed)
        self._known: dict[Any, Part] = {}

    def _helped(self, batch: int | None, chunk: int) -> DecodeSession:
        """A session with everything that its model allows."""
        runner = self._runner(batch, chunk)
        given: dict[str, Any] = {}
        if not (self.family.state or self.name.startswith(("circular", "cross"))):
            given["prefix_cache"] = 12 * sum(b.range_bytes(0, BLOCK) for b in carried_buffers(runner.plan))
            if chunk > 1:
                draft = cast("Runner", SometimesWrong(self._runner(batch, chunk)))
                given["draft"] = DraftModel(draft, self.made.session.get("embeddings"))
        return DecodeSession(runner, **self.made.session, max_sequences=5, **given)

    def _open(self, batch: int | None, chunk: int | None) -> DecodeSession:
        return DecodeSession(self._runner(batch, chunk), **self.made.session)

    def _runner(self, batch: int | None, chunk: int | None) -> ort_runner.OnnxRuntimeRunner:
        with patch.object(ort_runner, "import_model", lambda *_: copy.deepcopy(self._imported)):
            runner = ort_runner.OnnxRuntimeRunner(self.made.model, max_batch=batch, max_chunk=chunk, threads=1)
        rng = np.random.default_rng(1)
        for cache in runner.plan.caches:  # what must not be read
            for row in range(runner.max_batch):
                held = runner.read_row(cache.past, row, cache.capacity)
                runner.write_row(cache.past, row, rng.choice([-1e2, 1e2], held.shape).astype(held.dtype))
        return runner

    def fixed(self, line: Line) -> int:
        """Tokens of its prompt that were given as more than ids: these stay together."""
        given = self.made.given(line.number)
        return len(PROMPTS[line.number]) if given.keys() - {"constants"} else 0

    def enter(self, session: DecodeSession, line: Line, part: Part, *, keep: bool) -> int:
        """Let a sequence, of which nothing is in the cache, go on in a session."""
        given, text = self.made.given(line.number), line.text
        with recorded(part.choices):
            fixed = self.fixed(line)
            if not fixed or len(text) == fixed:
                return session.add(text, part.rest, keep=keep, index=part.index, **given)
            slot = session.cache.acquire(constants=given.pop("constants", None))
            session.update({slot: text[:fixed]}, 0, **{kind: {slot: value} for kind, value in given.items()})
            return session.add(text[fixed:], part.rest, slot=slot, keep=keep, index=part.index)

    def by_itself(self, line: Line, part: Part) -> Part:
        """The same part, alone."""
        plain = replace(part.config, prompt_lookup_num_tokens=None)
        seed = (part.config.seed, part.index) if part.config.do_sample else None
        key = (line.number, tuple(part.text), plain.do_sample, plain.top_k, plain.top_p, seed, plain.max_new_tokens)
        if key not in self._known:
            found = Part(part.text, plain, part.index)
            self.enter(self.alone, replace(line, text=part.text), found, keep=False)
            while self.alone.running:
                for event in self.alone.step():
                    _take(found, event)
            if len(self._known) > 1000:
                self._known.clear()
            self._known[key] = found
        return self._known[key]


def _take(part: Part, event: Any) -> None:
    if event.token is not None:
        part.tokens.append(event.token)
    part.ended = event.finish_reason


class Schedule:
    """One schedule, made of its seed."""

    def __init__(self, bench: Bench, seed: int, report: Report, steps: int = 40) -> None:
        self.bench, self.seed, self.report, self._steps = bench, seed, report, steps
        self._rng = random.Random(seed)
        self.lines: list[Line] = []
        self._made = 0
        self._where = f"seed {seed}, {bench.name}"

    def run(self) -> None:
        """All of it; sequences are compared as their parts end."""
        acts = {
            self._step: 12, self._join: 4, self._turn: 4, self._fork: 2, self._save: 2, self._load: 3,
            self._crop: 0 if self.bench.family.state else 2, self._preempt: 1, self._resume: 3, self._move: 1,
            self._leave: 1, self._offload: 2, self._restore: 1,
        }  # fmt: skip
        self.report.counts["schedules"] += 1
        before = self._reused()
        for Recorder.clock in range(self._steps):
            (act,) = self._rng.choices([*acts], [*acts.values()])
            act()
        for Recorder.clock in range(self._steps, self._steps + 100):
            if not any(session.running for session in self.bench.sessions):
                break
            self._step()
        for line in [*self.lines]:
            self._end(line)
        self.report.counts["tokens from prefixes"] += self._reused() - before
        for session in self.bench.sessions:
            assert not session.cache.slots, session.cache.slots

    # --- what may happen

    def _step(self) -> None:
        for number, session in enumerate(self.bench.sessions):
            if not session.running or self._rng.random() < 0.2:
                continue
            by_slot = {line.slot: line for line in self.lines if line.session == number}
            for event in session.step():
                line = by_slot[event.sequence]
                part = line.part
                assert part is not None
                _take(part, event)
                self.report.counts["guesses accepted"] += event.speculation.accepted if event.speculation else 0
                line.text += [] if event.token is None else [event.token]
                if part.ended is not None:
                    self._compare(line)

    def _join(self) -> None:
        number = self._free()
        if number is None:
            return
        given = self._rng.randrange(len(PROMPTS))
        text = [*PROMPTS[given]]
        if not self.bench.made.given(given).keys() - {"constants"}:
            text = self._words(self._rng.choice([1, 2, 5, 11, 19]))
            if self._rng.random() < 0.5:  # as others begin, too
                text = [self._rng.randrange(2), *range(1, self._rng.choice([4, 9])), *text[:10]]
        self._made += 1
        line = Line(f"sequence {self._made}", given, text)
        self._note("sequences")
        self.lines.append(line)
        self._go_on(line, number, self._config())

    def _turn(self) -> None:
        """The next turn of a conversation."""
        line = self._one(lambda line: line.part is None and self._has_row(line))
        if line is None or line.session is None:
            return
        session, words = self.bench.sessions[line.session], self._words(self._rng.choice([1, 1, 3, 9]))
        room = session.cache.room(line.slot)
        if room is not None and room < len(words):
            self._end(line)
            return
        self._note("turns")
        line.text += words
        if self._rng.random() < 0.2:  # written without a choice
            session.update({line.slot: words}, self._rng.randint(0, 1))
            return
        part = line.part = self._part(line, self._config())
        with recorded(part.choices):
            session.add(words, part.config, slot=line.slot, keep=True, index=part.index)

    def _fork(self) -> None:
        """Of a sequence that runs, too: the copy goes on with what it was about."""
        line = self._one(lambda line: line.session is not None)
        if line is None or line.session is None or not self.bench.sessions[line.session].cache.free:
            return
        self._note("forks")
        self._made += 1
        session = self.bench.sessions[line.session]
        copy = replace(line, name=f"sequence {self._made}, fork of {line.name}", text=[*line.text])
        copy.slot = session.cache.fork(line.slot)
        self.lines.append(copy)
        if line.part is not None:
            part = line.part
            copy.part = replace(part, choices=[*part.choices], tokens=[*part.tokens])
            with recorded(copy.part.choices):
                session.add((), copy.part.rest, slot=copy.slot, keep=True, index=part.index)

    def _crop(self) -> None:
        line = self._one(lambda line: line.part is None and self._has_row(line))
        if line is None or line.session is None:
            return
        cache = self.bench.sessions[line.session].cache
        least = self.bench.fixed(line)
        if cache.window is not None and cache.slot(line.slot).written > cache.window:
            least = max(least, cache.slot(line.slot).written - 1)
        if least >= len(line.text):
            return
        self._note("crops")
        length = self._rng.randint(least, len(line.text) - 1)
        cache.crop(line.slot, length)
        del line.text[length:]

    def _save(self) -> None:
        line = self._one(lambda line: line.session is not None)
        if line is None or line.session is None:
            return
        self._note("saves")
        session = self.bench.sessions[line.session]
        line.file = self.bench.folder / f"saved-{self._made}-{self._rng.getrandbits(32)}"
        session.cache.save(line.file, [line.slot])
        session.remove(line.slot)
        line.session = None

    def _load(self) -> None:
        """In either session."""
        line, number = self._one(lambda line: line.file is not None), self._free()
        if line is None or line.file is None or number is None:
            return
        self._note("loads")
        session = self.bench.sessions[number]
        (line.slot,) = session.cache.load(line.file).values()
        line.file.unlink()
        line.file, line.session = None, number
        if line.part is not None:
            with recorded(line.part.choices):
                session.add((), line.part.rest, slot=line.slot, keep=True, index=line.part.index)

    def _preempt(self) -> None:
        """Its rows are given up, its tokens are not."""
        line = self._one(lambda line: line.session is not None and line.part is not None)
        if line is None or line.session is None:
            return
        self._note("preemptions")
        self.bench.sessions[line.session].remove(line.slot)
        line.session = None

    def _resume(self) -> None:
        line = self._one(lambda line: line.session is None and line.file is None)
        number = self._free()
        if line is None or number is None or line.part is None:
            return
        line.session = number
        line.slot = self.bench.enter(self.bench.sessions[number], line, line.part, keep=True)

    def _move(self) -> None:
        """To another row, or in exchange with another."""
        line = self._one(self._has_row)
        if line is None or line.session is None:
            return
        cache = self.bench.sessions[line.session].cache
        idle = [o.slot for o in self.lines if o.session == line.session and o.part is None]
        idle = [slot for slot in idle if slot not in cache.offloaded]
        if len(idle) > 1 and self._rng.random() < 0.5:
            self._note("exchanges")
            kept = [*range(len(idle))]
            order = self._rng.sample(kept, len(kept))
            held = {o.slot: o for o in self.lines if o.session == line.session}
            moved = [held[idle[at]] for at in order]
            cache.reorder(order, idle)
            for slot, other in zip(idle, moved, strict=True):
                other.slot = slot
            return
        cache.restore(line.slot)
        if free := sorted(set(range(cache.rows)) - {cache.slot(slot).row for slot in cache.slots}):
            self._note("moves")
            cache.move(line.slot, self._rng.choice(free))

    def _offload(self) -> None:
        """To memory or to a file; what needs the row then brings it back."""
        line = self._one(lambda line: line.session is not None and line.part is None)
        if line is None or line.session is None:
            return
        self._note("offloads")
        path = self.bench.folder / f"offloaded-{self._rng.getrandbits(32)}" if self._rng.random() < 0.3 else None
        self.bench.sessions[line.session].cache.offload(line.slot, path)

    def _restore(self) -> None:
        line = self._one(self._has_row)
        if line is not None and line.session is not None:
            self._note("restores")
            self.bench.sessions[line.session].cache.restore(line.slot)

    def _leave(self) -> None:
        line = self._one(lambda line: True)
        if line is not None:
            self._note("leaves")
            self._end(line)

    # --- how

    def _has_row(self, line: Line) -> bool:
        """Or gets one where it needs it."""
        if line.session is None:
            return False
        cache = self.bench.sessions[line.session].cache
        return line.slot not in cache.offloaded or cache.max_sequences > cache.rows or cache.free > 0

    def _reused(self) -> int:
        stats = self.bench.sessions[1].cache.prefix_stats
        return 0 if stats is None else stats.saved_tokens

    def _note(self, what: str) -> None:
        self.report.counts[what] += 1

    def _one(self, fits: Any) -> Line | None:
        found = [line for line in self.lines if fits(line)]
        return self._rng.choice(found) if found else None

    def _free(self) -> int | None:
        found = [i for i, session in enumerate(self.bench.sessions) if session.cache.free]
        return self._rng.choice(found) if found else None

    def _words(self, count: int) -> list[int]:
        return [self._rng.randrange(self.bench.alone.vocab) for _ in range(count)]

    def _config(self) -> GenerationConfig:
        most = self._rng.choice([1, 2, 4, 8, 14])
        lookup = {} if self.bench.family.state else {"prompt_lookup_num_tokens": 3, "max_matching_ngram_size": 1}
        more: dict[str, Any] = lookup if self._rng.random() < 0.2 else {}
        if self._rng.random() < 0.5:
            return GenerationConfig(max_new_tokens=most, **more)
        top_k, top_p = self._rng.choice([(0, 1.0), (5, 1.0), (0, 0.8), (20, 0.9)])
        seed = self._rng.randrange(1000)
        return GenerationConfig(max_new_tokens=most, do_sample=True, top_k=top_k, top_p=top_p, seed=seed, **more)

    def _part(self, line: Line, config: GenerationConfig) -> Part:
        return Part([*line.text], config, self._rng.randrange(3) if config.do_sample else 0)

    def _go_on(self, line: Line, number: int, config: GenerationConfig) -> None:
        line.part, line.session = self._part(line, config), number
        line.slot = self.bench.enter(self.bench.sessions[number], line, line.part, keep=True)

    def _end(self, line: Line) -> None:
        if line.part is not None:
            self._compare(line)
        if line.session is not None:
            self.bench.sessions[line.session].remove(line.slot)
        if line.file is not None:
            line.file.unlink()
        self.lines.remove(line)

    # --- and what has to come of it

    def _compare(self, line: Line) -> None:
        """A part against the same alone, up to the first difference."""
        part, line.part = line.part, None
        assert part is not None
        alone = self.bench.by_itself(line, part)
        self.report.counts["tokens"] += len(part.tokens)
        about = f"{self._where}, {line.name}"
        if line.session is not None:
            assert self.bench.sessions[line.session].cache.tokens(line.slot) == line.text, about
        if part.tokens != [choice.token for choice in part.choices]:
            self.report.failures.append(f"{about}: events bring {part.tokens}, other tokens than were chosen")
            return
        for here, there in zip(part.choices, alone.choices, strict=False):
            where = f"{about}, step {here.step}, position {here.position}"
            if here.position != there.position:
                self.report.failures.append(f"{where}: alone it is position {there.position}")
                return
            largest = float(np.abs(there.logits).max()) or 1.0
            share = float(np.abs(here.logits - there.logits).max()) / largest
            self.report.worst[self.bench.name] = max(self.report.worst.get(self.bench.name, 0), share)
            difference = f"logits differ by {share:.1e} of the largest"
            if here.token == there.token and share <= ROUNDING:
                continue
            tokens = f"token {here.token}, alone {there.token}; {difference}"
            if share > ROUNDING or not all(self._follows(part, choice) for choice in (here, there)):
                self.report.failures.append(f"{where}: {tokens}")
            else:
                gap = abs(float(there.logits[here.token] - there.logits[there.token])) / largest
                self.report.ties.append(f"{where}: {tokens}, the two tokens' by {gap:.1e}")
            return
        if len(part.choices) > len(alone.choices) or (part.ended is not None and part.ended != alone.ended):
            self.report.failures.append(
                f"{about}: {len(part.choices)} tokens, ended by {part.ended}; alone {len(alone.choices)}, {alone.ended}"
            )

    def _follows(self, part: Part, choice: Choice) -> bool:
        """Whether a token is what its logits and its position make of it."""
        sampler = Sampler(part.config, part.index)
        return sampler.choose(choice.logits, np.zeros(choice.position, np.int64), 0)[0] == choice.token


def _small_blocks(run: Any) -> Any:
    for module in (prefix, cache_module):
        run = patch.object(module, "BLOCK", BLOCK)(run)
    return run


@_small_blocks
def run_schedules(seeds: Sequence[int], only: Sequence[str], folder: Path, show: bool = False) -> Report:
    """Run schedules, each on the architecture whose turn it is."""
    benches: dict[str, Bench] = {}
    report = Report()
    for seed in seeds:
        name = only[seed % len(only)]
        known = len(report.failures) + len(report.ties)
        try:
            if name not in benches:
                benches[name] = Bench(name, Path(tempfile.mkdtemp(dir=folder)))
            Schedule(benches[name], seed, report).run()
        except Exception:  # noqa: BLE001 - whatever it is, it is one more failure
            report.failures.append(f"seed {seed}, {name}: {traceback.format_exc()}")
            benches.pop(name, None)
        if show and len(report.failures) + len(report.ties) > known:
            _say([*report.failures[-1:], *report.ties[-1:]])
        if show and report.counts["schedules"] % 100 == 0:
            _say(report.lines())
    return report


def _say(lines: Iterable[str]) -> None:
    sys.stdout.write("\n".join(lines) + "\n")  # in one go: processes share it
    sys.stdout.flush()


def _in_folder(seeds: Sequence[int], only: Sequence[str], show: bool) -> Report:
    folder = Path(tempfile.mkdtemp(prefix="schedules-"))
    try:
        return run_schedules(seeds, only, folder, show)
    finally:
        shutil.rmtree(folder)


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", default="0:100", metavar="A:B", help="one schedule each")
    parser.add_argument("--only", nargs="+", choices=[*ARCHITECTURES], default=[*ARCHITECTURES], metavar="NAME")
    parser.add_argument(
        "--show", action="store_true", help="print what differs at once, and now and then what was found so far"
    )
    parser.add_argument("-j", type=int, default=1, metavar="N", help="processes")
    given = parser.parse_args()
    first, last = map(int, given.seeds.split(":"))
    start, report = time.perf_counter(), Report()
    # An architecture stays in one process, which opens it once.
    shares: list[list[int]] = [[] for _ in range(given.j)]
    for seed in range(first, last):
        shares[seed % len(given.only) % given.j].append(seed)
    if given.j == 1:
        report = _in_folder(shares[0], given.only, given.show)
    else:
        with ProcessPoolExecutor(given.j, get_context("spawn")) as pool:
            for part in pool.map(partial(_in_folder, only=given.only, show=given.show), shares):
                report.add(part)
    _say([*report.lines(), f"{time.perf_counter() - start:.0f} s"])
    raise SystemExit(1 if report.failures else 0)


if __name__ == "__main__":
    main()

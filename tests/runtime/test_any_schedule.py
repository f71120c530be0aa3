"""Any schedule: whatever joins, leaves, forks, moves and travels beside it, each sequence gives what it gives alone.

Over runners without a model, where any error in a cache gives another token, and over every family of decoders, on the
CPU and on a fake GPU, against full recomputation.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from runtime.families import CASES, FAMILIES, PROMPTS, Corpus, Text
from runtime.hash_runner import TABLE, VOCAB, Alone, EmbeddedRunner, HashRunner, rows

from trt_kvcache import DecodeSession, GenerationConfig
from trt_kvcache.decoding import Schedule
from trt_kvcache.errors import CapacityError, SlotError
from trt_kvcache.importer.cache_plan import UpdateMode
from trt_kvcache.runtime import cache_rows as cache
from trt_kvcache.runtime import prefix
from trt_kvcache.runtime.continuation import Continuation
from trt_kvcache.runtime.draft import DraftModel
from trt_kvcache.runtime.events import FinishReason, TokenEvent
from trt_kvcache.runtime.slot import HostRows

KINDS = st.sampled_from([
    (("linear", 64),), (("circular", 8),), (("linear", 64), ("circular", 8), ("circular", 16))
])  # fmt: skip
ROWS, CHUNK = st.integers(1, 5), st.integers(1, 8)
RUNNERS = st.one_of(
    st.builds(EmbeddedRunner, KINDS, ROWS, CHUNK, per_row=st.booleans()),
    st.builds(HashRunner, KINDS, ROWS, CHUNK, per_row=st.booleans(), max_logits=st.sampled_from([None, 1, 3])),
)
ANY = st.lists(
    st.tuples(st.integers(0, VOCAB - 1), st.integers(0, 200), *[st.integers(0, 40)] * 3), min_size=1, max_size=18
)
ALIKE = st.builds(
    lambda first, count, rest: [(first,) * 5, *((at,) * 5 for at in range(1, count)), *rest[:9]],
    st.integers(0, 1), st.sampled_from([4, 7, 9]), ANY,
)  # fmt: skip
TOKENS = st.one_of(ANY, ALIKE)
"""Tokens: an id, the number of an embedding, and positions; some begin as others do, or nearly."""
GIVEN = st.tuples(TOKENS, st.booleans(), st.booleans())
"""And whether the embeddings count, and the positions."""
COUNT, SLOT, YES = st.integers(1, 12), st.integers(0, 5), st.booleans()
ACTIONS = st.one_of([
    st.tuples(st.just(name), *values)
    for name, values in {
        "add": (GIVEN, COUNT, YES, YES), "draw": (TOKENS, COUNT, SLOT), "go_on": (SLOT, GIVEN, COUNT),
        "park": (GIVEN, st.integers(0, 9)), "step": (st.integers(1, 6),), "fork": (SLOT,),
        "reorder": (st.lists(SLOT, min_size=5),), "move": (SLOT,), "compact": (), "crop": (SLOT, st.integers(0, 20)),
        "reset": (SLOT,), "travel": (SLOT,),
        "offload": (SLOT,), "restore": (SLOT,), "remove": (SLOT, YES),
        "stream": (st.lists(GIVEN, min_size=1, max_size=3), COUNT),
        "read": (SLOT, st.integers(1, 9)), "leave": (SLOT,), "cancel": (SLOT,), "beams": (TOKENS, COUNT),
    }.items()
])  # fmt: skip
Given = tuple[list[tuple[int, ...]], bool, bool]


class Hashes:
    """A session on a runner without a model, and what its sequences are given and give alone."""

    def __init__(self, runner: HashRunner, *, helped: bool) -> None:
        self.runner = runner
        self.embeddings = TABLE if isinstance(runner, EmbeddedRunner) else None
        helpers: dict[str, Any] = {}
        if helped:
            linear = len(runner.plan.caches) == 1 and runner.plan.caches[0].mode is UpdateMode.LINEAR
            helpers["schedule"] = Schedule(runner.max_batch + 3, 200 if linear else None)
        if helped and runner.max_chunk > 1 and runner.max_logits != 1:
            helpers["draft"] = DraftModel(HashRunner(max_batch=2))
        self.session = DecodeSession(runner, embeddings=self.embeddings, **helpers)
        self.windows = [c.capacity for c in runner.plan.caches if c.mode is UpdateMode.CIRCULAR]
        self.crops = True
        self.memory = next(iter(runner.host), None)  # of the prefix cache

    def arguments(self, what: Given) -> tuple[list[int], dict[str, Any]]:
        """Token ids of a prompt, and what is given beside them."""
        tokens, as_embeds, placed = what
        beside: dict[str, Any] = {}
        if as_embeds and self.embeddings is not None:
            beside["inputs_embeds"] = rows([t[1] for t in tokens])
        if placed and self.embeddings is not None:
            beside["positions"] = np.array([t[2:] for t in tokens]).T
        return self.ids(what), beside

    def alone(self, what: Given) -> Alone:
        alone = Alone.of(self.runner)
        self.extend(alone, what)
        return alone

    def extend(self, alone: Alone, what: Given) -> None:
        tokens, as_embeds, placed = what
        if alone.plain:
            alone.take([t[0] for t in tokens])
        else:
            numbers = [t[1] if as_embeds else TABLE[t[0], 0] for t in tokens]
            alone.extend(numbers, [t[2:] for t in tokens] if placed else None)

    def sampled(self, ids: list[int], config: GenerationConfig, index: int) -> list[int | None]:
        """The tokens in a session of its own."""
        kinds = [(c.mode.value, c.capacity) for c in self.runner.plan.caches]
        with DecodeSession(type(self.runner)(kinds), embeddings=self.embeddings) as other:
            other.add(ids, config, index=index)
            found = []
            while other.running:
                found += [event.token for event in other.step()]
        return found

    def ids(self, what: Given) -> list[int]:
        return [t[0] for t in what[0]]

    def carry(self, saved: Path, parked: dict[int, Alone]) -> None:
        """Nowhere else."""

    def end(self) -> None:
        assert self.runner.host.keys() <= {self.memory}


class Models:
    """The same of a family of decoders: some of its prompts have embeddings, positions or an encoder's output."""

    def __init__(self, corpus: Corpus, name: str, device: str, *, helped: bool) -> None:
        self.made, family = corpus.made(name), FAMILIES[name]
        circular = name.startswith(("circular", "int8 caches, circular"))
        helpers: dict[str, Any] = {}
        linear = not (family.state or circular or name.startswith("cross"))
        if helped:
            helpers["schedule"] = Schedule(6, 1 << 20 if linear else None)
        if helped and linear and family.max_chunk > 1:
            helpers["draft"] = self.draft(corpus.open(name))
        self.session = corpus.open(name, device, **helpers)
        self.machine = None if device == "cpu" else self.session._runner.module.machine  # type: ignore[attr-defined]
        self.taken = self.machine and self.machine.allocations
        self.windows = [c.capacity for c in self.session.plan.caches if c.mode is UpdateMode.CIRCULAR]
        self.crops = not family.state
        # Where caches are quantized, full TensorRT holds them in another form.
        self.elsewhere = lambda: corpus.open(name, device if name.startswith("int") else "cpu")

    def draft(self, session: DecodeSession) -> DraftModel:
        """One that is right but where the likeliest token is a multiple of three."""
        runner: Any = session._runner
        step = runner.step

        def sometimes(batch: Any) -> Any:
            logits = step(batch)
            return np.where((logits.argmax(-1) % 3 == 0)[..., None], np.roll(logits, 1, -1), logits)

        runner.step = sometimes
        return DraftModel(runner, self.made.session.get("embeddings"))

    def arguments(self, what: Given) -> tuple[list[int], dict[str, Any]]:
        text = self.alone(what)
        beside = self.made.given(text.i)
        if text.tokens != list(PROMPTS[text.i]):
            beside = {kind: value for kind, value in beside.items() if kind == "constants"}
        return list(text.tokens), beside

    def alone(self, what: Given) -> Text:
        tokens, as_embeds, placed = what
        i = tokens[0][1] % len(PROMPTS)
        if as_embeds or placed:
            return Text.of(self.made, i)
        text = Text(self.made, i)
        self.extend(text, what)
        return text

    def extend(self, text: Text, what: Given) -> None:
        text.take(self.ids(what))

    def ids(self, what: Given) -> list[int]:
        return [t[0] % self.session.vocab for t in what[0]]

    def carry(self, saved: Path, parked: dict[int, Text]) -> None:
        """A saved sequence goes on in another session, on the CPU."""
        kept = [slot for slot in parked if fits(self.session, slot, 1)][:3]
        self.session.cache.save(saved, kept)
        with self.elsewhere() as other:
            loaded = other.cache.load(saved)
            for slot in kept:
                text = parked[slot].copy()
                text.take([5])
                text.scored(other.update({loaded[slot]: [5]})[loaded[slot]][-1])

    def end(self) -> None:
        """Nothing was allocated after the model was opened, and all is given back."""
        assert self.machine is None or self.machine.allocations == self.taken
        self.session.close()
        assert self.machine is None or (self.machine.used, len(self.machine.pinned)) == (0, 0)


def fits(session: DecodeSession, slot: int, tokens: int) -> bool:
    """So many more, also where steps have a fixed length and the last one begins before the last row."""
    room = session.cache.free_tokens(slot)
    return room is None or room >= tokens + 3


@dataclass
class Run:
    """A sequence that was added: its text, as far as it was told, and how much is still to come."""

    alone: Any
    left: int
    keep: bool = False
    drawn: list[int | None] | None = None

    def take(self, event: TokenEvent) -> None:
        assert event.token is not None
        if self.drawn is None:
            self.alone.chosen(event.token)
        else:
            assert event.token == self.drawn.pop(0)
        self.alone.take([event.token])
        self.left -= 1
        assert (event.finish_reason is not None) == (self.left == 0)


class Play:
    """A session, and what each of its sequences gives alone. Its actions do nothing where they cannot be taken."""

    def __init__(self, world: Any, folder: Callable[[], Path]) -> None:
        self.world, self.folder, self.session = world, folder, world.session
        self.cache = self.session.cache
        self.runs: dict[int, Run] = {}
        self.parked: dict[int, Any] = {}
        self.streams: list[tuple[Iterator[TokenEvent], dict[int, Run]]] = []
        self.cancelled = 0

    @property
    def advancing(self) -> bool:
        """True if a sequence runs; `DecodeSession.running` has those, too, that ended and were not told."""
        return any(self.cache.slot(slot).running for slot in self.cache.slots)

    def which(self, number: int) -> int | None:
        """A slot that is parked, and has a row or gets one."""
        every = self.cache.free or self.cache.max_sequences > self.cache.rows
        known = [slot for slot in self.parked if every or slot not in self.cache.offloaded]
        return known[number % len(known)] if known else None

    def held(self, alone: Any, slot: int) -> Any:
        """A text as far as a slot knows it: tokens may be chosen that were not told yet."""
        alone.take(self.cache.tokens(slot)[len(alone) :])
        return alone

    def offload(self, number: int) -> None:
        slot = self.which(number)
        if slot is not None:
            self.cache.offload(slot, self.folder() / "rows" if number % 2 else None)

    def restore(self, number: int) -> None:
        slot = self.which(number)
        if slot is not None:
            self.cache.restore(slot)

    def add(self, what: Given, count: int, keep: bool, drafts: bool) -> None:
        """Where no row is free, it waits for one."""
        if self.cache.free or (self.advancing and self.cache.max_sequences == self.cache.rows):
            more = {"prompt_lookup_num_tokens": 3} if drafts and self.world.crops else {}
            tokens, beside = self.world.arguments(what)
            slot = self.session.add(tokens, GenerationConfig(max_new_tokens=count, **more), keep=keep, **beside)
            self.runs[slot] = Run(self.world.alone(what), count, keep)

    def draw(self, tokens: list[tuple[int, ...]], count: int, index: int) -> None:
        """Sampled: as in a session of its own."""
        if self.cache.free and isinstance(self.world, Hashes):
            config = GenerationConfig(max_new_tokens=count, do_sample=True, top_k=0, seed=7)
            ids = [t[0] for t in tokens]
            drawn = self.world.sampled(ids, config, index)
            slot = self.session.add(ids, config, index=index)
            self.runs[slot] = Run(self.world.alone((tokens, False, False)), count, drawn=drawn)

    def go_on(self, number: int, what: Given, count: int) -> None:
        slot = self.which(number)
        if slot is None:
            return
        tokens, beside = self.world.arguments(what) if isinstance(self.world, Hashes) else (self.world.ids(what), {})
        if fits(self.session, slot, len(tokens) + count):
            alone = self.parked.pop(slot)
            self.world.extend(alone, what)
            self.session.add(tokens, GenerationConfig(max_new_tokens=count), slot=slot, keep=True, **beside)
            self.runs[slot] = Run(alone, count, keep=True)

    def park(self, what: Given, keep: int) -> None:
        if self.cache.free:
            tokens, beside = self.world.arguments(what)
            slot, alone = self.cache.acquire(constants=beside.pop("constants", None)), self.world.alone(what)
            given = {name: {slot: array} for name, array in beside.items()}
            logits = self.session.update({slot: tokens}, keep, **given)[slot]
            assert len(logits) == min(keep, len(tokens))
            for back, scores in enumerate(logits[::-1]):
                before = alone.copy()
                before.cut(len(alone) - back)
                before.scored(scores)
            self.parked[slot] = alone

    def step(self, count: int = 1) -> None:
        for _ in range(count):
            try:
                events = self.session.step()
            except SlotError as error:  # one that waits, while those that keep their rows do not run
                assert not self.cache.free
                run = self.runs.pop(error.sequence)
                if run.keep:
                    self.parked[error.sequence] = run.alone
                continue
            for event in events:
                run = self.runs[event.sequence]
                run.take(event)
                if run.left == 0:
                    del self.runs[event.sequence]
                    if run.keep:
                        self.parked[event.sequence] = self.held(run.alone, event.sequence)

    def fork(self, number: int) -> None:
        """A sequence that runs forks, too."""
        known = {slot: run.alone for slot, run in self.runs.items() if slot in self.cache} | self.parked
        if known and self.cache.free:
            slot = [*known][number % len(known)]
            new = self.cache.fork(slot)
            self.parked[new] = self.held(known[slot].copy(), new)

    def reorder(self, numbers: list[int]) -> None:
        slots = [slot for slot in self.parked if slot not in self.cache.offloaded]
        indices = [n % len(slots) for n in numbers[: len(slots)]] if slots else []
        self.cache.reorder(indices, slots)
        before = {**self.parked}
        for slot, index in zip(slots, indices, strict=True):
            self.parked[slot] = before[slots[index]].copy()

    def move(self, number: int) -> None:
        self.restore(number)
        slot, used = self.which(number), {self.cache.slot(slot).row for slot in self.cache.slots}
        if slot is not None and slot not in self.cache.offloaded and len(used - {-1}) < self.cache.rows:
            self.cache.move(slot, max(set(range(self.cache.rows)) - used))

    def compact(self) -> None:
        self.cache.compact()
        rows = [self.cache.slot(slot).row for slot in self.cache.slots if slot not in self.cache.offloaded]
        assert sorted(rows) == [*range(len(rows))]

    def crop(self, number: int, length: int) -> None:
        slot = self.which(number)
        if slot is not None and self.world.crops:
            alone = self.parked[slot]
            length = min(length, len(alone))
            try:
                self.cache.crop(slot, length)
            except CapacityError:  # a circular cache no longer has what it needs; drafts may have written more
                assert alone.most + 3 > min(self.world.windows) - 1
                assert length < len(alone) - 1
            else:
                alone.cut(length)

    def overflow(self, slot: int) -> None:
        """Fill with NaN what a sequence has written."""
        if slot in self.cache.offloaded:
            return
        runner, length, row = self.session._runner, self.cache.lengths[slot], self.cache.slot(slot).row
        for held in runner.plan.caches:
            data = runner.read_row(held.past, row, min(length, held.capacity))
            if data.dtype.kind == "f":
                runner.write_row(held.past, row, np.full_like(data, np.nan))

    def reset(self, number: int) -> None:
        slot = self.which(number)
        if slot is not None:
            self.overflow(slot)
            self.cache.reset(slot)
            self.parked[slot].cut(0)
            self.parked[slot].most = 0

    def travel(self, number: int) -> None:
        slot = self.which(number)
        if slot is not None:
            path = self.folder() / "slots"
            self.cache.save(path, [*self.parked])
            self.session.remove(slot)
            if self.cache.free >= len(self.parked):
                loaded = self.cache.load(path)
                for old in self.parked:
                    if old != slot:
                        self.session.remove(old)
                self.parked = {loaded[old]: alone for old, alone in self.parked.items()}
            else:
                del self.parked[slot]

    def remove(self, number: int, overflown: bool) -> None:
        known = [slot for slot in (*self.runs, *self.parked) if slot in self.cache]
        if known:
            slot = known[number % len(known)]
            if overflown:
                self.overflow(slot)
            self.session.remove(slot)
            for held in (self.runs, self.parked):
                held.pop(slot, None)  # type: ignore[attr-defined]

    def stream(self, prompts: list[Given], count: int) -> None:
        each = [self.world.arguments(prompt) for prompt in prompts]
        beside = {kind: [own.get(kind) for _, own in each] for kind in {kind for _, own in each for kind in own}}
        events = self.session.stream([tokens for tokens, _ in each], GenerationConfig(count), **beside)
        self.streams.append((events, {i: Run(self.world.alone(prompt), count) for i, prompt in enumerate(prompts)}))

    def read(self, number: int, count: int) -> None:
        """Some events of a stream, unless its prompts would wait for ever."""
        events, runs = self.streams[number % len(self.streams)] if self.streams else (iter(()), {})
        for _ in range(count):
            if not self.advancing and not self.cache.free and not self.cancelled:
                return
            try:
                event = next(events, None)
            except SlotError:  # those that ran have ended, and keep all rows
                assert not self.advancing
                assert not self.cache.free
                self.streams.remove((events, runs))
                return
            if event is None:
                assert runs == {}
                return
            if event.finish_reason is FinishReason.CANCELLED:
                assert event.token is None
                self.cancelled -= 1
                del runs[event.sequence]
                continue
            runs[event.sequence].take(event)
            if runs[event.sequence].left == 0:
                del runs[event.sequence]

    def leave(self, number: int) -> None:
        if self.streams and not self.cancelled:
            self.streams.pop(number % len(self.streams))[0].close()  # type: ignore[attr-defined]

    def cancel(self, number: int) -> None:
        running = [slot for slot in self.session.running if slot not in self.runs]
        if running:
            self.session.remove(running[number % len(running)])
            self.cancelled += 1

    def beams(self, tokens: list[tuple[int, ...]], count: int) -> None:
        """The runner's scores leave no choice."""
        if self.cache.free >= 2 and self.cache.rows >= 2 and isinstance(self.world, Hashes):
            (found,) = self.session.generate([[t[0] for t in tokens]], GenerationConfig(count, num_beams=2))
            self.world.alone((tokens, False, False)).chosen(found.tokens[0])

    def end(self) -> None:
        """Run everything to its end; what is left over still knows where it stands."""
        while self.session.running:
            self.step()
        for events, runs in [*self.streams]:
            self.read(self.streams.index((events, runs)), 99)
        self.step(1 + len(self.runs))  # each tells the end of one that waited for a row in vain
        assert self.runs == {}
        assert self.cancelled == 0
        assert {*self.parked} == {*self.cache.slots}
        self.world.carry(self.folder() / "last", self.parked)
        for slot, alone in sorted(self.parked.items(), key=lambda item: item[0] in self.cache.offloaded):
            if fits(self.session, slot, 1):
                alone.take([5])
                alone.scored(self.session.update({slot: [5]})[slot][-1])
            self.session.remove(slot)
        self.world.end()


def play(world: Any, folder: Callable[[], Path], schedule: list[Any]) -> None:
    playing = Play(world, folder)
    for action, *values in schedule:
        getattr(playing, action)(*values)
    playing.end()


@contextmanager
def small_blocks() -> Iterator[None]:
    with patch.object(prefix, "BLOCK", 3), patch.object(cache, "BLOCK", 3):
        yield


HASHED = given(
    runner=RUNNERS, schedule=st.lists(ACTIONS, min_size=1, max_size=25), garbage=st.booleans(), helped=st.booleans()
)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@HASHED
def test_any_schedule(
    tmp_path_factory: pytest.TempPathFactory, runner: HashRunner, schedule: list[Any], garbage: bool, helped: bool
) -> None:
    """In a plain session, and in one with more sequences than rows, a prefix cache and a draft."""
    for buffer in runner.buffers.values():
        buffer[...] = 1e30 if garbage else 0
    with small_blocks():
        play(Hashes(runner, helped=helped), lambda: tmp_path_factory.mktemp("saved"), schedule)


@pytest.mark.few(4)
@pytest.mark.parametrize(("name", "device"), CASES, ids=lambda value: value)
@settings(max_examples=3, deadline=None, suppress_health_check=[*HealthCheck], phases=[Phase.generate])
@given(schedule=st.lists(ACTIONS, min_size=25, max_size=30), helped=st.booleans())
def test_any_schedule_of_a_model(
    corpus: Corpus, tmp_path_factory: pytest.TempPathFactory, name: str, device: str, schedule: list[Any], helped: bool
) -> None:
    with small_blocks():
        play(Models(corpus, name, device, helped=helped), lambda: tmp_path_factory.mktemp("saved"), schedule)


def believe(self: Any, draft: Any, logits: Any) -> Any:
    """Takes guesses unchecked."""
    for position in range(len(draft) + 1):
        yield self.advance(logits[position])
        if self.finish_reason:
            break


COPY = HashRunner.copy_rows
FAULTS = {
    "a copy lacks its last row": (HashRunner, "copy_rows", lambda s, a, b, count: COPY(s, a, b, max(0, count - 1))),
    "offloaded rows are lost": (HostRows, "fill", lambda self, row: None),
    "guesses": (Continuation, "verify", believe),
}


@pytest.mark.few(1)
@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_found(fault: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    @settings(max_examples=1500, deadline=None, database=None, derandomize=True, phases=[Phase.generate],
              suppress_health_check=[*HealthCheck])  # fmt: skip
    @HASHED
    def run(runner: HashRunner, schedule: list[Any], garbage: bool, helped: bool) -> None:
        play(Hashes(runner, helped=helped), lambda: tmp_path_factory.mktemp("saved"), schedule)

    with small_blocks(), patch.object(*FAULTS[fault]), pytest.raises(AssertionError):
        run()

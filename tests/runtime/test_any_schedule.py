"""Any schedule: whatever joins, leaves, forks, moves and travels beside it, each sequence gives what it gives alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from runtime.hash_runner import TABLE, VOCAB, Alone, EmbeddedRunner, HashRunner, rows

from trt_kvcache.errors import CapacityError
from trt_kvcache.importer.plan import UpdateMode
from trt_kvcache.runtime import cache, prefix
from trt_kvcache.runtime.draft import DraftModel
from trt_kvcache.runtime.events import FinishReason, TokenEvent
from trt_kvcache.runtime.generation.config import GenerationConfig
from trt_kvcache.runtime.session import DecodeSession

KINDS = st.sampled_from([
    (("linear", 64),), (("circular", 8),), (("linear", 64), ("circular", 8), ("circular", 16))
])  # fmt: skip
ROWS, CHUNK = st.integers(1, 5), st.integers(1, 8)
RUNNERS = st.one_of(
    st.builds(EmbeddedRunner, KINDS, ROWS, CHUNK, per_row=st.booleans()),
    st.builds(HashRunner, KINDS, ROWS, CHUNK, per_row=st.booleans(), max_logits=st.sampled_from([None, 1, 3])),
)
TOKENS = st.lists(st.tuples(st.integers(0, VOCAB - 1), st.integers(0, 200), *[st.integers(0, 40)] * 3), min_size=1,
                  max_size=18)  # fmt: skip
"""Of each token its id, the number of its embedding, and its positions."""
GIVEN = st.tuples(TOKENS, st.booleans(), st.booleans())
"""And whether the embeddings count, and the positions."""
COUNT, SLOT, YES = st.integers(1, 12), st.integers(0, 5), st.booleans()
ACTIONS = st.one_of([
    st.tuples(st.just(name), *values)
    for name, values in {
        "add": (GIVEN, COUNT, YES, YES), "draw": (TOKENS, COUNT, SLOT), "go_on": (SLOT, GIVEN, COUNT),
        "park": (GIVEN,), "step": (st.integers(1, 6),), "fork": (SLOT,), "reorder": (st.lists(SLOT, min_size=5),),
        "move": (SLOT,), "compact": (), "crop": (SLOT, st.integers(0, 20)), "reset": (SLOT,), "travel": (SLOT,),
        "offload": (SLOT,), "restore": (SLOT,), "remove": (SLOT, YES),
        "stream": (st.lists(TOKENS, min_size=1, max_size=3), COUNT),
        "read": (SLOT, st.integers(1, 9)), "leave": (SLOT,), "cancel": (SLOT,), "beams": (TOKENS, COUNT),
    }.items()
])  # fmt: skip
Given = tuple[list[tuple[int, ...]], bool, bool]


class Play:
    """A session, and what each of its sequences gives alone. Its actions do nothing where they cannot be taken."""

    def __init__(self, runner: HashRunner, folder: Callable[[], Path], *, helped: bool) -> None:
        self.runner, self.folder = runner, folder
        self.embeddings = TABLE if isinstance(runner, EmbeddedRunner) else None
        helpers: dict[str, Any] = {"max_sequences": runner.max_batch + 3} if helped else {}
        if helped and len(runner.plan.caches) == 1 and runner.plan.caches[0].mode is UpdateMode.LINEAR:
            helpers["prefix_cache"] = 200
            if runner.max_chunk > 1 and runner.max_logits != 1:
                helpers["draft"] = DraftModel(HashRunner(max_batch=2))
        self.session = DecodeSession(runner, embeddings=self.embeddings, **helpers)
        self.cache = self.session.cache
        self.want: dict[int, list[int]] = {}  # of added ones, by slot: what is still to come
        self.begun: dict[int, tuple[Alone, bool]] = {}  # of these: with their prompts; and whether their slots stay
        self.memory = next(iter(runner.host), None)  # of the prefix cache
        self.parked: dict[int, Alone] = {}
        self.streams: list[tuple[Iterator[TokenEvent], dict[int, list[int]]]] = []
        self.cancelled = 0

    def arguments(self, what: Given) -> tuple[list[int], dict[str, Any]]:
        """Token ids of a prompt and what is given beside them."""
        tokens, as_embeds, placed = what
        beside: dict[str, Any] = {}
        if as_embeds and self.embeddings is not None:
            beside["inputs_embeds"] = rows([t[1] for t in tokens])
        if placed and self.embeddings is not None:
            beside["positions"] = np.array([t[2:] for t in tokens]).T
        return [t[0] for t in tokens], beside

    def alone(self, what: Given, after: Alone | None = None) -> Alone:
        tokens, as_embeds, placed = what
        alone = Alone.of(self.runner) if after is None else after.copy()
        if alone.plain:
            alone.take([t[0] for t in tokens])
        else:
            numbers = [t[1] if as_embeds else TABLE[t[0], 0] for t in tokens]
            alone.extend(numbers, [t[2:] for t in tokens] if placed else None)
        return alone

    def which(self, number: int) -> int | None:
        """A slot that is parked, and has a row or gets one."""
        every = self.cache.free or self.cache.max_sequences > self.cache.rows
        known = [slot for slot in self.parked if every or slot not in self.cache.offloaded]
        return known[number % len(known)] if known else None

    def offload(self, number: int) -> None:
        slot = self.which(number)
        if slot is not None:
            self.cache.offload(slot, self.folder() / "rows" if number % 2 else None)

    def restore(self, number: int) -> None:
        slot = self.which(number)
        if slot is not None:
            self.cache.restore(slot)

    def join(self, what: Given, count: int, slot: int | None = None, *, keep: bool = False, **more: Any) -> None:
        tokens, beside = self.arguments(what)
        alone = self.alone(what, None if slot is None else self.parked.pop(slot))
        config = GenerationConfig(max_new_tokens=count, **more)
        name = self.session.add(tokens, config, slot=slot, keep=keep, **beside)
        self.want[name], self.begun[name] = alone.continued(count), (alone, keep)

    def add(self, what: Given, count: int, keep: bool, drafts: bool) -> None:
        if self.cache.free:
            self.join(what, count, keep=keep, **({"prompt_lookup_num_tokens": 3} if drafts else {}))

    def draw(self, tokens: list[tuple[int, ...]], count: int, index: int) -> None:
        """Sampled: as in a session of its own."""
        if self.cache.free:
            config = GenerationConfig(max_new_tokens=count, do_sample=True, top_k=0, seed=7)
            ids = [t[0] for t in tokens]
            kinds = [(c.mode.value, c.capacity) for c in self.runner.plan.caches]
            with DecodeSession(type(self.runner)(kinds), embeddings=self.embeddings) as other:
                other.add(ids, config, index=index)
                want = []
                while other.running:
                    want += [event.token for event in other.step()]
            slot = self.session.add(ids, config, index=index)
            self.want[slot], self.begun[slot] = want, (self.alone((tokens, False, False)), False)

    def go_on(self, number: int, what: Given, count: int) -> None:
        slot = self.which(number)
        if slot is not None and len(self.parked[slot].codes) <= 30:
            self.join(what, count, slot)

    def park(self, what: Given) -> None:
        if self.cache.free:
            slot, alone = self.cache.acquire(), self.alone(what)
            tokens, beside = self.arguments(what)
            logits = self.session.update({slot: tokens}, **{name: {slot: array} for name, array in beside.items()})
            assert int(logits[slot][-1].argmax()) == alone.next()
            self.parked[slot] = alone

    def step(self, count: int = 1) -> None:
        for _ in range(count):
            for event in self.session.step():
                assert event.token == self.want[event.sequence].pop(0)
                if event.finish_reason:
                    assert self.want.pop(event.sequence) == []
                    alone, keep = self.begun.pop(event.sequence)
                    if keep:
                        alone.take(self.cache.tokens(event.sequence)[len(alone.codes) :])
                        self.parked[event.sequence] = alone

    def fork(self, number: int) -> None:
        """Of a sequence that runs, too."""
        known = {**{slot: alone for slot, (alone, _) in self.begun.items() if slot in self.cache}, **self.parked}
        if known and self.cache.free:
            slot = [*known][number % len(known)]
            new, alone = self.cache.fork(slot), known[slot].copy()
            alone.take(self.cache.tokens(new)[len(alone.codes) :])
            self.parked[new] = alone

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
            self.cache.move(slot, max(set(range(self.runner.max_batch)) - used))

    def compact(self) -> None:
        self.cache.compact()
        rows = [self.cache.slot(slot).row for slot in self.cache.slots if slot not in self.cache.offloaded]
        assert sorted(rows) == [*range(len(rows))]

    def crop(self, number: int, length: int) -> None:
        slot = self.which(number)
        if slot is not None:
            alone = self.parked[slot]
            length = min(length, len(alone.codes))
            try:
                self.cache.crop(slot, length)
            except CapacityError:  # a circular cache no longer has what it needs; drafts may have written more
                assert alone.most + 3 > min(window for window in alone.windows if window) - 1
                assert length < len(alone.codes) - 1
            else:
                alone.cut(length)

    def overflow(self, slot: int) -> None:
        """Fill with NaN what a sequence has written."""
        if slot in self.cache.offloaded:
            return
        length = self.cache.lengths[slot]
        for held in self.runner.plan.caches:
            self.runner.buffers[held.past][self.cache.slot(slot).row, :, : min(length, held.capacity)] = np.nan

    def reset(self, number: int) -> None:
        slot = self.which(number)
        if slot is not None:
            self.overflow(slot)
            self.cache.reset(slot)
            self.parked[slot] = Alone.of(self.runner)

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
        known = [slot for slot in (*self.want, *self.parked) if slot in self.cache]
        if known:
            slot = known[number % len(known)]
            if overflown:
                self.overflow(slot)
            self.session.remove(slot)
            for held in (self.want, self.begun, self.parked):
                held.pop(slot, None)  # type: ignore[attr-defined]

    def stream(self, prompts: list[list[tuple[int, ...]]], count: int) -> None:
        events = self.session.stream([[t[0] for t in prompt] for prompt in prompts], GenerationConfig(count))
        wanted = {i: self.alone((prompt, False, False)).continued(count) for i, prompt in enumerate(prompts)}
        self.streams.append((events, wanted))

    def read(self, number: int, count: int) -> None:
        """Some events of a stream, unless its prompts would wait for ever."""
        events, want = self.streams[number % len(self.streams)] if self.streams else (iter(()), {})
        for _ in range(count):
            if not self.session.running and not self.cache.free:
                return
            event = next(events, None)
            if event is None:
                assert want == {}
                return
            if event.finish_reason is FinishReason.CANCELLED:
                assert event.token is None
                self.cancelled -= 1
                del want[event.sequence]
                continue
            assert event.token == want[event.sequence].pop(0)
            if event.finish_reason:
                assert want.pop(event.sequence) == []

    def leave(self, number: int) -> None:
        if self.streams and not self.cancelled:
            self.streams.pop(number % len(self.streams))[0].close()  # type: ignore[attr-defined]

    def cancel(self, number: int) -> None:
        running = [slot for slot in self.session.running if slot not in self.begun]
        if running:
            self.session.remove(running[number % len(running)])
            self.cancelled += 1

    def beams(self, tokens: list[tuple[int, ...]], count: int) -> None:
        if self.cache.free >= 2 and self.cache.rows >= 2:
            (found,) = self.session.generate([[t[0] for t in tokens]], GenerationConfig(count, num_beams=2))
            assert found.tokens[0] == self.alone((tokens, False, False)).next()

    def end(self) -> None:
        """Run everything to its end; what is left over still knows where it stands."""
        while self.session.running:
            self.step()
        for i in range(len(self.streams)):
            self.read(i, 99)
        self.step()
        assert self.want == {}
        assert self.cancelled == 0
        assert {*self.parked} == {*self.cache.slots}
        for slot, alone in sorted(self.parked.items(), key=lambda item: item[0] in self.cache.offloaded):
            if len(alone.codes) < 60:
                alone.take([5])
                assert int(self.session.update({slot: [5]})[slot][-1].argmax()) == alone.next()
            self.session.remove(slot)
        assert self.runner.host.keys() <= {self.memory}


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(runner=RUNNERS, schedule=st.lists(ACTIONS, min_size=1, max_size=25), garbage=st.booleans(), helped=st.booleans())
def test_any_schedule(
    tmp_path_factory: pytest.TempPathFactory, runner: HashRunner, schedule: list[Any], garbage: bool, helped: bool
) -> None:
    """In a plain session, and in one with more sequences than rows, a prefix cache and a draft."""
    for buffer in runner.buffers.values():
        buffer[...] = 1e30 if garbage else 0
    with patch.object(prefix, "BLOCK", 3), patch.object(cache, "BLOCK", 3):
        play = Play(runner, lambda: tmp_path_factory.mktemp("saved"), helped=helped)
        for action, *values in schedule:
            getattr(play, action)(*values)
        play.end()

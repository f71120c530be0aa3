"""Sessions: no step more than needed, ends, failures, interrupts, refusals. Any schedule: test_any_schedule."""

import asyncio
import gc
import os
import random
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from runtime.engines import drain, open_engine
from runtime.fake_cuda import Machine
from runtime.hash_runner import VOCAB, HashRunner, continued, with_state
from runtime.interrupts import interrupted
from runtime.test_draft import Sometimes

from trt_kvcache import DecodeSession, GenerationConfig
from trt_kvcache.decoding import Schedule
from trt_kvcache.errors import CapacityError, OptionError, PromptError, SessionError, SlotError
from trt_kvcache.runtime.draft import DraftModel
from trt_kvcache.runtime.events import FinishReason, TokenEvent

KINDS = ((("linear", 64),), (("circular", 8),), (("linear", 64), ("circular", 8), ("circular", 16)))
RINGED = (("linear", 64), ("circular", 8))


def config(count: int, **more: Any) -> GenerationConfig:
    return GenerationConfig(max_new_tokens=count, **more)


@pytest.mark.parametrize(
    ("prompts", "count", "runner", "steps"),
    [([[1, 2], [3, 4], [5, 6], [7, 8]], 3, {"max_batch": 4}, [(0, 4, 2, 1), (0, 4, 1, 1), (0, 4, 1, 1)]),
     ([[1, 2, 3], [3, 4], [5, 6]], 2, {"max_batch": 3}, [(0, 1, 3, 1), (1, 2, 2, 1), (0, 3, 1, 1)]),
     ([[1, 2, 3], [3, 4], [5, 6]], 2, {"max_batch": 3, "per_row": False},
      [(0, 1, 3, 1), (1, 2, 2, 1), (0, 1, 1, 1), (1, 2, 1, 1)]),
     ([[*range(10)]], 1, {"max_chunk": 4}, [(0, 1, 4, 0), (0, 1, 4, 0), (0, 1, 2, 1)]),
     ([[*range(12)]], 4, {"kinds": [("circular", 8)]}, [(0, 1, 8, 0), *[(0, 1, 1, 0)] * 3, *[(0, 1, 1, 1)] * 4])],
    ids=["rows of one length together", "ragged rows apart, then together", "one write index for all rows",
         "prefill wants the last logits only", "a wrapped cache takes one token at a time"],
)  # fmt: skip
def test_no_step_more_than_needed(prompts: Any, count: int, runner: dict[str, Any], steps: list[Any]) -> None:
    """First row, rows, tokens and positions with logits of each step."""
    opened = HashRunner(**runner)
    with DecodeSession(opened) as session:
        results = session.generate(prompts, config(count))
    assert [(b.first_row, b.rows, b.length, b.keep) for b in opened.steps] == steps
    assert [(r.prompt, r.tokens) for r in results] == [(p, continued(opened, p, count)) for p in prompts]
    assert {r.finish_reason for r in results} == {FinishReason.LENGTH}


@pytest.mark.parametrize("kinds", KINDS, ids=["linear", "circular", "both"])
@pytest.mark.parametrize("place", range(4))
def test_a_prompt_stalls_nobody(kinds: Any, place: int) -> None:
    """In whatever row it lies: each step gives all others a token, in one step of the runner."""
    runner = HashRunner(kinds, max_batch=4, max_chunk=8)
    with DecodeSession(runner, schedule=Schedule(prefill_budget=3)) as session:
        taken = [session.cache.acquire() for _ in range(place)]  # the prompt's row is the first one free
        held = session.cache.acquire()
        others = [session.add([i], config(30)) for i in range(1, 4 - place)]
        for slot in taken:
            session.cache.release(slot)
        others += [session.add([10 + i], config(30)) for i in range(place)]
        session.step()
        session.cache.release(held)
        late = session.add([*range(40, 50)], config(3))
        del runner.steps[:]
        pieces, events = [], []
        while not any(event.sequence == late for event in events):
            events = session.step()
            assert {event.sequence for event in events} - {late} == set(others)
            decoded, *prompt = runner.steps
            assert decoded.length == 1
            assert decoded.rows >= 3
            assert sum(batch.length for batch in prompt) <= 3
            pieces.append(decoded.rows - 3 + sum(batch.length for batch in prompt))
            del runner.steps[:]
        assert sum(pieces) == 10
        assert max(pieces) <= 4
        rest = drain(session)
    assert [event.token for event in events if event.sequence == late] + rest[late] == continued(
        runner, range(40, 50), 3
    )


@pytest.mark.parametrize("given", [0, -1])
def test_a_budget_is_a_token_at_least(given: int) -> None:
    with pytest.raises(OptionError, match=f"prefill_budget is {given}; it must be at least 1 token"):
        DecodeSession(HashRunner(), schedule=Schedule(prefill_budget=given))


def test_clients_take_turns() -> None:
    """A row goes to the client that has waited longest since its last one, whoever added more; None is a client."""
    with DecodeSession(HashRunner(max_batch=1)) as session:
        started: list[int] = []
        many = [session.add([i], config(2), client="many") for i in range(1, 5)]
        two = [session.add([i], config(2), client="two") for i in range(5, 7)]
        alone = session.add([7], config(2))
        while session.running:
            started += [event.sequence for event in session.step() if event.sequence not in started]
    assert started == [many[0], many[1], two[0], alone, many[2], two[1], many[3]]


def test_async_iteration_and_cancellation() -> None:
    runner = HashRunner()
    session = DecodeSession(runner)

    async def collect(prompt: list[int]) -> list[int | None]:
        return [event.token async for event in session.astream([prompt], config(10))]

    async def both() -> list[list[int | None]]:
        return await asyncio.gather(collect([1, 2]), collect([3]))

    assert asyncio.run(both()) == [continued(runner, [1, 2], 10), continued(runner, [3], 10)]

    async def cancelled() -> None:
        seen: list[TokenEvent] = []

        async def consume() -> None:
            async for event in session.astream([[1]], config(60)):
                seen.append(event)

        task = asyncio.create_task(consume())
        while len(seen) < 3:
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancelled())
    assert session.cache.slots == ()


def test_a_failed_update_is_undone() -> None:
    runner = HashRunner(max_chunk=2)
    session = DecodeSession(runner)
    slot = session.cache.acquire()
    session.update({slot: [1, 2, 3]})
    runner.fail = {96}
    with pytest.raises(SessionError, match="on purpose"):
        session.update({slot: [4, 5, 6, 96]})
    assert session.cache.tokens(slot) == [1, 2, 3]
    runner.fail = set()
    logits = session.update({slot: [4]})[slot]
    assert int(logits[0].argmax()) == continued(runner, [1, 2, 3, 4], 1)[0]


@pytest.mark.parametrize(
    ("prompts", "error", "words"),
    [
        ([[]], PromptError, "prompt 0 is empty"),
        ([[1], np.array([], np.int64)], PromptError, "prompt 1 is empty"),
        ([[1, VOCAB]], PromptError, f"token id {VOCAB} is out of range; the model has 0 to {VOCAB - 1}"),
        ([[1, -1]], PromptError, "token id -1 is out of range"),
        ([[1, 10**20]], PromptError, "token id 100000000000000000000 is out of range"),
        ([[1.5]], PromptError, "float64"),
        ([[[1, 2]]], PromptError, "must be a flat list of token ids"),
        ([[[1, 2], [3]]], PromptError, "must be a flat list of token ids"),
        ("text", PromptError, "there is no tokenizer"),
        (["text"], PromptError, "there is no tokenizer"),
        ([[1] * 65], CapacityError, "prompt 0 has 65 tokens, but a sequence may have at most 64"),
    ],
)
def test_bad_prompts(prompts: Any, error: type[Exception], words: str) -> None:
    runner = HashRunner()
    with DecodeSession(runner) as session:
        for call in (session.generate, session.stream):
            with pytest.raises(error, match=words):
                call(prompts)
        assert runner.steps == []
        assert session.cache.slots == ()


def test_one_that_waits_for_rows_that_stay_ends_with_an_error() -> None:
    session = DecodeSession(HashRunner(max_batch=1))
    first, second = session.add([1], config(2), keep=True), session.add([2], config(2))
    events = [*session.step(), *session.step()]
    assert [event.sequence for event in events] == [first, first]
    with pytest.raises(SlotError, match="all 1 rows hold a sequence; remove or offload one") as refused:
        session.step()
    assert refused.value.sequence == second
    assert session.running == ()
    assert session.cache.slots == (first,)


def test_bad_additions() -> None:
    session = DecodeSession(HashRunner(max_batch=1))
    add, cache, settings = session.add, session.cache, {"max_new_tokens": 4}

    def refused(error: type[Exception], words: str, call: Any, *given: Any, **more: Any) -> None:
        before = cache.lengths
        with pytest.raises(error, match=words):
            call(*given, **more)
        assert cache.lengths == before

    refused(PromptError, "the prompt is empty", add, [])
    refused(SlotError, "slot 7 is not in use", add, [1], slot=7)
    refused(OptionError, "for beam search use generate", add, [1], config(4, num_beams=2))
    for call, prompt in ((session.generate, [[1]]), (session.stream, [[1]]), (add, [1])):
        refused(OptionError, "config is a dict; give its entries by name", call, prompt, settings)
    refused(OptionError, "need a tokenizer", add, [1], config(4, stop_strings="x"))
    slot = add([1], config(4))
    refused(SlotError, f"slot {slot} is generating", add, [2], config(4), slot=slot)
    refused(SlotError, "slot 9 is not in use", session.remove, 9)
    session.remove(slot)
    held = cache.acquire()
    refused(SlotError, "all 1 rows hold a sequence", add, [2], config(4))
    cache.release(held)
    for ids, words in (
        ([-4], "token id -4 is out of range"),
        ([1.5], "float64"),
        ([True], "bool"),
        ("12", "whole numbers"),
    ):
        refused(PromptError, words, cache.acquire, ids)
    slot = cache.acquire()
    session.update({slot: [1] * 60})
    words = f"slot {slot} with the prompt has 65 tokens, but a sequence may have at most 64"
    refused(CapacityError, words, add, [1] * 5, slot=slot)
    refused(CapacityError, f"slot {slot} has 65 tokens", session.update, {slot: [1] * 5})
    refused(PromptError, f"slot {slot}: no tokens to write", session.update, {slot: []})
    words = r"1 prompt\(s\) would wait forever, because 1 sequences"
    refused(SlotError, words, session.generate, [[1]])


def test_after_close() -> None:
    runner = HashRunner()
    session = DecodeSession(runner)
    cache, stream = session.cache, session.stream([[1, 2]], config(9))
    next(stream)
    session.close()
    session.close()
    assert runner.closed
    calls: list[Any] = [
        lambda: session.generate([[1]]), lambda: session.stream([[1]]), lambda: session.add([1]), session.step,
        lambda: session.remove(0), lambda: session.update({0: [1]}), lambda: session.running, lambda: next(stream),
        lambda: cache.lengths, lambda: cache.view("cache.0"), lambda: cache.load("x"), cache.acquire,
        lambda: cache.tokens(5), lambda: cache.reset(5), lambda: cache.crop(5, 0), lambda: cache.fork(5),
        lambda: cache.release(5), lambda: cache.move(5, 0), lambda: cache.save("x", [5]),
    ]  # fmt: skip
    for call in calls:
        with pytest.raises(SessionError, match="the session is closed; open the model again"):
            call()


class Breaks:
    """A logits processor that raises once."""

    def __init__(self, call: int, error: BaseException) -> None:
        self.calls, self.call, self.error = 0, call, error

    def __call__(self, tokens: Any, scores: Any) -> Any:
        self.calls += 1
        if self.calls == self.call:
            raise self.error
        return scores


class Letters:
    """A tokenizer that knows fewer tokens than the model has, as where a vocabulary was padded."""

    def __init__(self, unknown: int = -1) -> None:
        self.unknown = unknown

    def decode(self, tokens: Sequence[int]) -> str:
        if self.unknown in tokens:
            raise IndexError("piece id is out of range")
        return "".join("abcdefghij"[token % 10] for token in tokens)


def drain_all(session: DecodeSession, tokens: dict[int, list[int | None]]) -> set[str]:
    """Step until nothing runs and all is told, whatever fails; returns what failed."""
    failures, idle = set(), 0
    while idle < 5:  # an error comes by itself, and what others chose with the next step
        idle += not session.running
        try:
            for event in session.step():
                tokens.setdefault(event.sequence, []).append(event.token)
        except (SessionError, KeyboardInterrupt) as error:
            failures.add(str(error) or type(error).__name__)
    return failures


WAYS = {
    "step": "the step failed on purpose",
    "scores": "overflowed",
    "tokenizer": "the tokenizer failed on token {token}: IndexError: piece id is out of range; forbid this token",
    "processor": "no rule for this",
    "interrupt": "the sequence was interrupted: KeyboardInterrupt; start it again",
}


@cache
def repeating() -> list[int]:
    """A prompt whose first draft is right."""
    pairs = ([a, b] for a in range(VOCAB) for b in range(VOCAB))
    return next(pair for pair in pairs if continued(HashRunner(RINGED), pair, 1) == pair[:1])


@pytest.mark.parametrize("drafts", [{}, {"prompt_lookup_num_tokens": 3, "max_matching_ngram_size": 1}], ids=str)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("place", range(3))
def test_what_fails_ends_alone(way: str, place: int, drafts: dict[str, Any]) -> None:
    """All rows of the step are written then. What was chosen before is told, and in the slot that is kept; no more."""
    runner = HashRunner(RINGED)
    for call in range(1, 6):
        prompts: list[list[int]] = [[1, 2], [3, 4], [5]]
        own: list[dict[str, Any]] = [{}, {}, {}]
        prompts[place] = repeating()
        others = [p + continued(runner, p, 12) for i, p in enumerate(prompts) if i != place]
        never = next(token for token in range(VOCAB) if not any(token in text for text in others))
        if way == "step":
            prompts[place] = [9, never, 9, 9]
        want = [continued(runner, prompt, 12) for prompt in prompts]
        token = next(t for t in want[place][call - 1 :] if not any(t in prompt for prompt in prompts))
        error = {"processor": RuntimeError("no rule for this"), "interrupt": KeyboardInterrupt()}.get(way)
        if error is not None:
            own[place] = {"logits_processor": Breaks(call, error)}
        session = DecodeSession(runner, Letters(token) if way == "tokenizer" else None)
        added = [session.add(p, config(12, **drafts, **o), keep=i == place)
                 for i, (p, o) in enumerate(zip(prompts, own, strict=True))]  # fmt: skip
        tokens: dict[int, list[int | None]] = {slot: [] for slot in added}
        ends = {place: 0 if way in ("step", "scores") else call - 1}
        if way == "tokenizer":
            ends = {i: w.index(token) for i, w in enumerate(want) if token in w}
        real = HashRunner.step.__get__(runner)

        def step(batch: Any, real: Any = real, bad: Any = prompts[place]) -> Any:
            made = real(batch)
            for row, start, ids in zip(made, batch.starts, batch.tokens, strict=True):
                if way == "scores" and start == 0 and ids.tolist() == bad:
                    row[...] = np.nan
            return made

        runner.step, runner.fail = step, {never} if way == "step" else set()  # type: ignore[method-assign]
        failures = drain_all(session, tokens)
        runner.fail = set()
        for i, slot in enumerate(added):
            assert tokens[slot] == want[i][: ends.get(i, 12)]
        assert any(WAYS[way].format(token=token) in failure for failure in failures)
        assert session.cache.slots == (added[place],)
        held = [*prompts[place], *want[place][: ends[place]]]
        assert session.cache.tokens(added[place]) == held
        if way != "tokenizer":
            session.add([3], config(5), slot=added[place])
            assert drain(session)[added[place]] == continued(runner, [*held, 3], 5)


def test_a_stream_that_is_left_within_a_step_ends_before_the_next() -> None:
    runner = HashRunner()
    session = DecodeSession(runner)
    left = session.stream([[9], [8, 7]], config(9))
    next(left)
    kept = session.add([1, 2], config(8, logits_processor=lambda tokens, scores: (left.close(), scores)[1]))
    other = session.add([3], config(8))
    assert drain(session) == {kept: continued(runner, [1, 2], 8), other: continued(runner, [3], 8)}
    assert session.cache.slots == ()


CHANGES: dict[str, Callable[[DecodeSession, list[int], Path], object]] = {
    "step": lambda s, slots, _: s.step(),
    "generate": lambda s, slots, _: s.generate([[7]], config(2)),
    "update": lambda s, slots, _: s.update({slots[2]: [7]}),  # which would write over the scores of others
    "add": lambda s, slots, _: s.add([7], config(2)),
    "remove itself": lambda s, slots, _: s.remove(slots[0]),
    "remove another": lambda s, slots, _: s.remove(slots[1]),
    "close": lambda s, slots, _: s.close(),
    "move": lambda s, slots, _: s.cache.move(slots[1], 3),
    "compact": lambda s, slots, _: s.cache.compact(),
    "fork": lambda s, slots, _: s.cache.fork(slots[0]),
    "acquire": lambda s, slots, _: s.cache.acquire(),
    "crop": lambda s, slots, _: s.cache.crop(slots[2], 0),
    "reset": lambda s, slots, _: s.cache.reset(slots[2]),
    "reorder": lambda s, slots, _: s.cache.reorder([0], [slots[2]]),
    "save": lambda s, slots, path: s.cache.save(path, [slots[2]]),
    "load": lambda s, slots, path: s.cache.load(path),
}


@pytest.mark.parametrize("act", CHANGES)
@pytest.mark.parametrize("calls", ["processor", "tokenizer"])
def test_what_a_step_calls_may_not_change_the_session(calls: str, act: str, tmp_path: Path) -> None:
    """In its middle, rows are about to be written and scores to be read, which a change would move or write over."""
    runner = HashRunner()

    class Caller(Letters):
        ready = False

        def change(self, way: str, length: int) -> None:
            if self.ready and calls == way and length == 5:
                self.ready = False
                assert session.cache.tokens(slots[0])[0] == 1  # to ask is no matter
                CHANGES[act](session, slots, tmp_path / "saved")

        def __call__(self, tokens: Any, scores: Any) -> Any:
            self.change("processor", len(tokens))
            return scores

        def decode(self, tokens: Sequence[int]) -> str:
            self.change("tokenizer", len(session.cache.tokens(slots[0])) if self.ready else 0)
            return super().decode(tokens)

    caller = Caller()
    session = DecodeSession(runner, caller)
    slots = [session.add([1, 2], config(8, **({"logits_processor": caller} if calls == "processor" else {})))]
    slots += [session.add([3], config(8)), session.cache.acquire()]
    session.update({slots[2]: [4, 5]})
    caller.ready = True
    tokens: dict[int, list[int | None]] = {}
    words = "the session is in a step; .* a logits_processor or a tokenizer, must not change"
    with pytest.raises(SessionError, match=words):
        drain(session, tokens)
    drain_all(session, tokens)
    for slot, prompt in zip(slots[:2], ([1, 2], [3]), strict=True):
        assert tokens[slot] == continued(runner, prompt, 8)[: len(tokens[slot])]
    assert max(len(told) for told in tokens.values()) == 8
    assert session.cache.slots == (slots[2],)
    session.close()


TORN = tuple(
    f"runtime/{name}.py" for name in ("loop", "cache", "continuation", "streams", "session", "guard", "draft", "slot")
)


@pytest.mark.parametrize("seed", range(60))
def test_an_interrupt_at_any_line_of_the_loop_loses_and_changes_nothing(seed: int) -> None:
    """Sequences that it tears end with an error; all others go on, drafts included, and kept ones can be continued."""
    rng = random.Random(seed)
    runner = HashRunner(rng.choice([RINGED[:1], RINGED]), max_chunk=rng.choice([1, 3, 8]))
    session = DecodeSession(runner, draft=DraftModel(Sometimes()) if runner.max_chunk > 1 and seed % 2 else None)
    wanted: dict[int, list[int]] = {}
    tokens: dict[int, list[int | None]] = {}
    kept = set()
    for _ in range(rng.choice([1, 2, 4])):
        prompt, most = [rng.randrange(4) for _ in range(rng.choice([1, 3, 9]))], rng.randrange(3, 14)
        drafts = {"prompt_lookup_num_tokens": rng.choice([None, 3])}
        slot = session.add(prompt, config(most, **drafts), keep=(keep := rng.random() < 0.5))
        kept |= {slot} if keep else set()
        wanted[slot], tokens[slot] = continued(runner, prompt, most), []
    left, failures, idle = rng.randrange(1, 400), 0, 0
    while idle < 5:  # as in `drain_all`
        idle += not session.running
        with interrupted(left, *TORN) as lines:
            try:
                for event in session.step():
                    tokens[event.sequence].append(event.token)
            except KeyboardInterrupt:
                pass
            except SessionError:
                failures += 1
        left = lines[0]
    for slot, want in wanted.items():
        assert tokens[slot] == want[: len(tokens[slot])]
        failures -= len(tokens[slot]) < len(want)
    assert failures == 0
    assert {*session.cache.slots} <= kept
    other = threading.Thread(target=lambda: session.running, daemon=True)
    other.start()
    other.join(timeout=10)  # for ever, where the lock was left taken
    assert not other.is_alive()
    for slot in session.cache.slots:
        held = session.cache.tokens(slot)
        session.add([5], config(3), slot=slot)
        assert drain(session)[slot] == continued(runner, [*held, 5], 3)


def leave(session: DecodeSession) -> None:
    events = session.stream([[1, 2], [3]], config(9))
    next(events)
    events.close()  # type: ignore[attr-defined]


ACTS: dict[str, Callable[[DecodeSession, int, int, Path], object]] = {
    "update": lambda s, a, b, _: s.update({a: [7, 8], b: [9]}),
    "offload": lambda s, a, b, path: (s.cache.offload(a), s.cache.offload(b, path), s.cache.restore(a)),
    "crop": lambda s, a, b, _: s.cache.crop(a, 2),
    "reorder": lambda s, a, b, _: s.cache.reorder([1, 1]),
    "compact": lambda s, a, b, _: (s.cache.move(a, 3), s.cache.compact()),
    "reset": lambda s, a, b, _: s.cache.reset(a),
    "fork": lambda s, a, b, _: s.cache.fork(a),
    "acquire": lambda s, a, b, _: s.cache.acquire([7]),
    "load": lambda s, a, b, path: s.cache.load(path),
    "add": lambda s, a, b, _: s.add([7], config(3)),
    "extend": lambda s, a, b, _: s.add([7], config(3), slot=a, keep=True),
    "beams": lambda s, a, b, _: s.generate([[1, 2]], config(3, num_beams=2)),
    "stream": lambda s, a, b, _: s.generate([[1, 2], [3]], config(2)),
    "leave": lambda s, a, b, _: leave(s),
}
ACTS |= {f"{act}, rows taken": ACTS[act] for act in ("update", "load", "add", "beams", "stream", "fork")}
ENDING = [act for act in ACTS if act.split(",")[0] in ("add", "beams", "stream", "leave")]
"""Which leave no slot at their end, interrupted or not."""


@pytest.mark.filterwarnings("ignore::ResourceWarning")  # a file is not closed if its `with` is left so
@pytest.mark.few(2)
@pytest.mark.parametrize("act", ACTS)
def test_an_interrupt_at_any_line_leaves_no_slot_that_holds_something_else(act: str, tmp_path: Path) -> None:
    """Each slot that is left gives what its tokens alone give: a change is complete, or never began."""
    taken = act.endswith("rows taken")
    for line in count(1, 7 if taken or act in ("update", "offload", "beams") else 1):
        runner = HashRunner(RINGED, max_batch=2 if taken else 4)
        session = DecodeSession(runner, schedule=Schedule(max_sequences=4 if taken else None))
        held = session.cache
        a, b = held.acquire(), held.acquire()
        session.update({a: [1, 2, 3, 4], b: [5, 6]})
        if line == 1 and act.startswith("load"):
            held.save(tmp_path / "two")
        with interrupted(line) as left, suppress(KeyboardInterrupt):
            ACTS[act](session, a, b, tmp_path / "two")
        for slot in held.slots:  # or nobody could read what is saved of it
            assert held.slot(slot).length <= min(held.slot(slot).written, len(held.slot(slot).tokens))
        session.step()
        drain_all(session, {})  # what nobody reads any more
        for slot in held.slots:
            tokens = [*held.tokens(slot), 30]
            assert int(session.update({slot: [30]})[slot][-1].argmax()) == continued(runner, tokens, 1)[0]
        rows = [held.slot(slot).row for slot in held.slots if slot not in held.offloaded]
        assert len(set(rows)) == len(rows)
        if left[0] > 0:
            gc.collect()
            return
        assert act not in ENDING or held.slots == (a, b)


def test_a_long_update_is_interrupted_between_two_steps() -> None:
    """Ctrl-C waits for the step, and not for the steps after it; the slot is as it was before."""
    runner = HashRunner(max_chunk=2)
    session = DecodeSession(runner)
    slot = session.cache.acquire()
    session.update({slot: [1]})
    real, steps = runner.step, len(runner.steps)

    def step(batch: Any) -> Any:
        signal.raise_signal(signal.SIGINT)
        return real(batch)

    runner.step = step  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        session.update({slot: [2, 3, 4, 5, 6, 7]})
    runner.step = real  # type: ignore[method-assign]
    assert len(runner.steps) == steps + 1
    assert session.cache.tokens(slot) == [1]
    assert int(session.update({slot: [2]})[slot][-1].argmax()) == continued(runner, [1, 2], 1)[0]


def test_an_interrupt_leaves_no_slot_with_a_state_that_nobody_knows() -> None:
    """Caches can be written again; state may be that of before the step, or of after it."""
    for line in count(1):
        runner = HashRunner()
        runner.plan = with_state(runner.plan)
        session = DecodeSession(runner)
        kept, other = session.cache.acquire(), session.cache.acquire()
        session.update({kept: [1, 2], other: [3]})
        steps = len(runner.steps)
        with interrupted(line) as left, suppress(KeyboardInterrupt):
            session.update({kept: [7], other: [8]})
        if left[0] > 0:
            return
        stepped = len(runner.steps) > steps
        assert {slot: session.cache.lengths[slot] for slot in session.cache.slots} in (
            [{}, {kept: 3, other: 2}] if stepped else [{}, {kept: 2, other: 1}]
        )


def test_events_of_sequences_that_end_within_generate_are_not_lost() -> None:
    """`running` has them until `step` gave them; an error, too."""
    runner = HashRunner()
    with DecodeSession(runner) as session:
        slot, kept = session.add([1, 2], config(3)), session.add([3], config(2), keep=True)
        failing = session.add([4], config(9, logits_processor=Breaks(2, RuntimeError("no rule for this"))))
        session.generate([[5, 6]], config(8))
        assert {*session.running} == {slot, kept, failing}
        with pytest.raises(SessionError, match="no rule for this") as caught:
            session.step()
        assert caught.value.sequence == failing
        assert drain(session) == {
            slot: continued(runner, [1, 2], 3), kept: continued(runner, [3], 2), failing: continued(runner, [4], 1)
        }  # fmt: skip
        assert session.running == ()
        gone = session.add([1, 2], config(3))
        session.generate([[5, 6]], config(8))
        session.remove(gone)
        assert (session.running, session.step()) == ((), [])
        with pytest.raises(SlotError, match="is not in use"):
            session.remove(gone)


# A session belongs to the process that opened it.

no_fork = pytest.mark.skipif(sys.platform == "win32", reason="Windows does not fork")


def in_a_child(work: Callable[[], object]) -> str:
    """The result of `work` in a process that is forked here; fails where that does not end."""
    read, write = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of Python 3.12 on, where threads run
        child = os.fork()
    if child == 0:
        try:
            said = str(work())
        except BaseException as error:  # noqa: BLE001 - the child must not go on as a test
            said = f"{type(error).__name__}: {error}"
        os.write(write, said.encode())
        os._exit(0)
    os.close(write)
    deadline = time.monotonic() + 20
    while os.waitpid(child, os.WNOHANG) == (0, 0):
        if time.monotonic() > deadline:
            os.kill(child, 9)
            os.waitpid(child, 0)
            os.close(read)
            return "it hangs"
        time.sleep(0.01)
    with os.fdopen(read) as pipe:
        return pipe.read()


CALLS: dict[str, Callable[[DecodeSession], object]] = {
    "step": lambda s: s.step(),
    "add": lambda s: s.add([1]),
    "generate": lambda s: s.generate([[1]]),
    "stream": lambda s: next(iter(s.stream([[1]]))),
    "update": lambda s: s.update({0: [1]}),
    "encode": lambda s: s.encode([1]),
    "running": lambda s: s.running,
    "lengths": lambda s: s.cache.lengths,
    "acquire": lambda s: s.cache.acquire(),
}


def test_a_stream_is_read_while_a_step_runs() -> None:
    """Such as by its own thread, while another thread's step computes its next events."""
    runner, read = HashRunner(), list[TokenEvent]()

    def reads(tokens: Any, scores: Any) -> Any:
        if list(tokens[:1]) == [3] and len(tokens) == 3:  # the second prompt's second step; its first event waits
            read.append(next(events))
        return scores

    session = DecodeSession(runner)
    events = session.stream([[1, 2], [3, 4]], config(6, logits_processor=reads))
    read.append(next(events))
    assert session.generate([[5]], config(3))[0].tokens == continued(runner, [5], 3)
    read += events
    for place, prompt in enumerate([[1, 2], [3, 4]]):
        assert [event.token for event in read if event.sequence == place] == continued(runner, prompt, 6)


@no_fork
@pytest.mark.parametrize("busy", [True, False], ids=["while another thread steps", "idle"])
@pytest.mark.parametrize("call", CALLS)
def test_a_forked_process_is_refused_and_waits_for_nobody(call: str, busy: bool) -> None:
    session, begun, go_on = DecodeSession(HashRunner()), threading.Event(), threading.Event()

    def wait(tokens: Any, scores: Any) -> Any:
        begun.set()
        go_on.wait(60)
        return scores

    session.add([1, 2], config(1, logits_processor=wait))
    other = threading.Thread(target=session.step)
    if busy:
        other.start()
        begun.wait(60)
    said = in_a_child(lambda: CALLS[call](session))
    go_on.set()
    if busy:
        other.join()
    assert said.startswith("SessionError: the session was opened in process ")
    assert f"{os.getpid()}" in said
    assert "open the model in this process" in said
    session.generate([[3]])  # nothing has changed here


@no_fork
def test_a_forked_process_closes_nothing_of_its_parents(engine: Path) -> None:
    """Nor hides the end of a ``with`` block there what ended it; and the GPU's memory is its parent's."""

    def leave() -> None:
        with session:
            raise LookupError("this ended it")

    session = DecodeSession(HashRunner())
    events = session.stream([[1]])
    next(events)
    assert in_a_child(leave) == "LookupError: this ended it"
    assert in_a_child(events.close) == "None"  # type: ignore[attr-defined]
    assert in_a_child(lambda: (session.close(), session._runner.closed)) == "(None, False)"  # type: ignore[attr-defined]
    machine = Machine()
    runner = open_engine(engine, machine)
    used = machine.used
    assert in_a_child(lambda: (runner._end(), machine.used)) == f"(None, {used})"
    runner.close()
    assert machine.used == 0

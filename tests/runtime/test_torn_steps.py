"""What happens to the others where something ends a sequence from outside, or breaks in the middle of a step."""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from runtime.engines import drain
from runtime.hash_runner import VOCAB, HashRunner, continued

from trt_kvcache.errors import SessionError
from trt_kvcache.runtime.events import FinishReason
from trt_kvcache.runtime.generation.config import GenerationConfig
from trt_kvcache.runtime.session import DecodeSession

TORN = tuple(f"runtime/{name}.py" for name in ("loop", "cache", "continuation", "streams", "session", "guard"))
"""Where an interrupt may come."""
KINDS = ((("linear", 64),), (("linear", 64), ("circular", 8)))
PROMPTS = ([1, 2], [3, 4], [5])


def config(count: int, **more: Any) -> GenerationConfig:
    return GenerationConfig(max_new_tokens=count, **more)


class Breaks:
    """A logits processor that raises once."""

    def __init__(self, call: int, error: BaseException) -> None:
        self.calls, self.call, self.error = 0, call, error

    def __call__(self, tokens: Any, scores: Any) -> Any:
        self.calls += 1
        if self.calls == self.call:
            raise self.error
        return scores


@pytest.mark.parametrize("place", range(3))
@pytest.mark.parametrize("call", [1, 2, 5])
def test_an_interrupt_while_one_sequence_chooses_harms_no_other(place: int, call: int) -> None:
    """All rows of the step are written then: what the model said of the others must not be lost."""
    runner = HashRunner((("linear", 64), ("circular", 8)))
    session = DecodeSession(runner)
    breaks = Breaks(call, KeyboardInterrupt())
    slots = [
        session.add(prompt, config(12, **({"logits_processor": breaks} if i == place else {})))
        for i, prompt in enumerate(PROMPTS)
    ]
    tokens: dict[int, list[int | None]] = {slot: [] for slot in slots}
    with pytest.raises(KeyboardInterrupt):
        drain(session, tokens)
    with pytest.raises(SessionError, match="interrupted while it chose a token: KeyboardInterrupt"):
        drain(session, tokens)
    drain(session, tokens)
    for i, (slot, prompt) in enumerate(zip(slots, PROMPTS, strict=True)):
        assert tokens[slot] == continued(runner, prompt, 12 if i != place else call - 1)
    assert session.cache.slots == ()


@pytest.mark.parametrize("seed", range(60))
def test_an_interrupt_at_any_line_of_the_loop_loses_and_changes_nothing(seed: int) -> None:
    """What it tears ends with an error; all the rest goes on, drafts included, and what is kept can be continued."""
    rng = random.Random(seed)
    runner = HashRunner(rng.choice(KINDS), max_chunk=rng.choice([1, 3, 8]))
    session = DecodeSession(runner)
    prompts, tokens, counts, kept = {}, {}, {}, set()
    for _ in range(rng.choice([1, 2, 4])):
        prompt, count = [rng.randrange(4) for _ in range(rng.choice([1, 3, 9]))], rng.randrange(3, 14)
        drafts = {"prompt_lookup_num_tokens": rng.choice([None, 3])}
        slot = session.add(prompt, config(count, **drafts), keep=(keep := rng.random() < 0.5))
        kept |= {slot} if keep else set()
        prompts[slot], tokens[slot], counts[slot] = prompt, list[int | None](), count
    left, failures = rng.randrange(1, 400), 0

    def trace(frame: Any, event: str, _: Any) -> Any:
        nonlocal left
        if not frame.f_code.co_filename.endswith(TORN):
            return None if "trt_kvcache" not in frame.f_code.co_filename else trace
        left -= event == "line"
        if left == 0:
            sys.settrace(None)
            raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    idle = 0
    while idle < 5:  # what an interrupt kept in the last step comes with the next
        idle += not session.running
        sys.settrace(trace if left > 0 else None)
        try:
            for event in session.step():
                tokens[event.sequence].append(event.token)
        except KeyboardInterrupt:
            pass
        except SessionError:
            failures += 1
        finally:
            sys.settrace(before)
    for slot, prompt in prompts.items():
        want = continued(runner, prompt, counts[slot])
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
        tokens[slot] = []
        drain(session, tokens)
        assert tokens[slot] == continued(runner, [*held, 5], 3)


def test_what_was_not_chosen_yet_may_be_removed_or_forked() -> None:
    runner = HashRunner(max_batch=4)
    session = DecodeSession(runner)
    first = session.add([1, 2], config(12, logits_processor=Breaks(2, KeyboardInterrupt())))
    second, third = session.add([3, 4], config(12)), session.add([5], config(12))
    tokens: dict[int, list[int | None]] = {first: [], second: [], third: []}
    with pytest.raises(KeyboardInterrupt):
        drain(session, tokens)
    session.remove(second)
    again = session.add([8, 9], config(6))  # in the row that is free now
    tokens[again] = []
    branch = session.cache.fork(third)
    with pytest.raises(SessionError, match="interrupted"):
        drain(session, tokens)
    drain(session, tokens)
    assert tokens[again] == continued(runner, [8, 9], 6)
    assert tokens[third] == continued(runner, [5], 12)
    assert tokens[second] == continued(runner, [3, 4], 1)
    tokens[session.add([7], config(4), slot=branch)] = []
    drain(session, tokens)
    assert tokens[branch] == continued(runner, [5, *continued(runner, [5], 1), 7], 4)


class Tokenizer:
    """Knows fewer tokens than the model has, as where a vocabulary was padded."""

    def __init__(self, unknown: int) -> None:
        self.unknown = unknown

    def decode(self, tokens: Sequence[int]) -> str:
        if self.unknown in tokens:
            raise IndexError("piece id is out of range")
        return "".join("abcdefghij"[token % 10] for token in tokens)


def test_a_tokenizer_that_fails_ends_its_sequence_alone() -> None:
    runner = HashRunner()
    chosen = [continued(runner, prompt, 20) for prompt in PROMPTS]
    unknown = next(t for t in chosen[1] if t not in chosen[0] and t not in PROMPTS[0])
    session = DecodeSession(runner, Tokenizer(unknown))
    slots = [session.add(prompt, config(20)) for prompt in PROMPTS]
    tokens: dict[int, list[int | None]] = {slot: [] for slot in slots}
    failures = []
    while session.running:
        try:
            drain(session, tokens)
        except SessionError as error:
            failures.append(str(error))
    for slot, want in zip(slots, chosen, strict=True):
        assert tokens[slot] == (want[: want.index(unknown)] if unknown in want else want)
    assert set(failures) == {
        f"the tokenizer failed on token {unknown}: IndexError: piece id is out of range; forbid it, or do without"
    }


def test_tokens_of_a_draft_that_were_right_are_told_before_the_failure() -> None:
    """And wrong ones leave no trace in a slot that is kept."""
    runner = HashRunner()
    pairs = ([a, b] for a in range(VOCAB) for b in range(VOCAB))
    prompt = next(pair for pair in pairs if continued(runner, pair, 1) == pair[:1])
    want = continued(runner, prompt, 8)
    for call in range(1, 6):
        session = DecodeSession(runner)
        breaks = Breaks(call, RuntimeError("no rule for this"))
        more = {"prompt_lookup_num_tokens": 3, "max_matching_ngram_size": 1, "logits_processor": breaks}
        slot = session.add(prompt, config(8, **more), keep=True)
        tokens: dict[int, list[int | None]] = {slot: []}
        with pytest.raises(SessionError, match="no rule for this"):
            drain(session, tokens)
        drain(session, tokens)
        assert tokens[slot] == want[: call - 1]
        assert session.cache.tokens(slot) == [*prompt, *want[: call - 1]]
        session.add([3], config(5), slot=slot)
        tokens[slot] = []
        drain(session, tokens)
        assert tokens[slot] == continued(runner, [*prompt, *want[: call - 1], 3], 5)


def test_a_stream_hears_that_its_sequence_was_removed() -> None:
    runner = HashRunner()
    session = DecodeSession(runner)
    stream = session.stream(PROMPTS[:2], config(5))
    first = next(stream)
    session.remove(session.running[0])
    rest = list(stream)
    assert [e.token for e in (first, *rest) if e.sequence == 1] == continued(runner, PROMPTS[1], 5)
    last = next(e for e in rest if e.sequence == 0)
    assert (last.token, last.finish_reason) == (None, FinishReason.CANCELLED)
    assert session.cache.slots == ()


def test_scores_that_wait_are_copies() -> None:
    """A runner may write the next step's logits where the last ones are."""
    runner = HashRunner(max_batch=2)
    session = DecodeSession(runner)
    real, buffer = runner.step, np.empty((2, 1, VOCAB), np.float32)

    def step(batch: Any) -> Any:
        made = real(batch)
        view = buffer[: batch.rows, : batch.keep]
        view[...] = made
        return view

    runner.step = step  # type: ignore[method-assign]
    first = session.add([1, 2], config(8, logits_processor=Breaks(2, KeyboardInterrupt())))
    second = session.add([3, 4], config(8))
    tokens: dict[int, list[int | None]] = {first: [], second: []}
    with pytest.raises(KeyboardInterrupt):
        drain(session, tokens)
    buffer[...] = 0
    with pytest.raises(SessionError):
        drain(session, tokens)
    drain(session, tokens)
    assert tokens[second] == continued(runner, [3, 4], 8)


@pytest.mark.parametrize(
    "act",
    [
        lambda session, slots, _: session.step(),
        lambda session, slots, _: session.generate([[7]], config(2)),
        lambda session, slots, _: session.update({slots[2]: [7]}),  # which would write over the scores of others
        lambda session, slots, _: session.add([7], config(2)),
        lambda session, slots, _: session.remove(slots[0]),
        lambda session, slots, _: session.remove(slots[1]),
        lambda session, slots, _: session.close(),
        lambda session, slots, _: session.cache.move(slots[1], 3),
        lambda session, slots, _: session.cache.compact(),
        lambda session, slots, _: session.cache.fork(slots[0]),
        lambda session, slots, _: session.cache.acquire(),
        lambda session, slots, _: session.cache.crop(slots[2], 0),
        lambda session, slots, _: session.cache.reset(slots[2]),
        lambda session, slots, _: session.cache.reorder([0], [slots[2]]),
        lambda session, slots, path: session.cache.save(path, [slots[2]]),
        lambda session, slots, path: session.cache.load(path),
    ],
)
@pytest.mark.parametrize("calls", ["processor", "tokenizer"])
def test_what_a_step_calls_may_not_change_the_session(calls: str, act: Any, tmp_path: Path) -> None:
    """In its middle, rows are about to be written and scores to be read, which a change would move or write over."""
    runner = HashRunner()

    class Caller(Tokenizer):
        ready = False

        def __call__(self, tokens: Any, scores: Any) -> Any:
            assert session.cache.tokens(slots[0])[0] == 1  # to ask is no matter
            if len(tokens) == 5:
                act(session, slots, tmp_path / "saved")
            return scores

        def decode(self, tokens: Sequence[int]) -> str:
            if self.ready and calls == "tokenizer" and len(session.cache.tokens(slots[0])) == 5:
                self.ready = False
                act(session, slots, tmp_path / "saved")
            return super().decode(tokens)

    caller = Caller(-1)
    session = DecodeSession(runner, caller)
    slots = [session.add([1, 2], config(8, **({"logits_processor": caller} if calls == "processor" else {})))]
    slots += [session.add([3], config(8)), session.cache.acquire()]
    session.update({slots[2]: [4, 5]})
    caller.ready = True
    tokens: dict[int, list[int | None]] = {slot: [] for slot in slots}
    with pytest.raises(
        SessionError, match="in the middle of a step; .* a logits_processor or a tokenizer, must not change"
    ):
        drain(session, tokens)
    while session.running:
        with suppress(SessionError):
            drain(session, tokens)
    for slot, prompt in zip(slots[:2], ([1, 2], [3]), strict=True):
        want = continued(runner, prompt, 8)
        assert tokens[slot] == want[: len(tokens[slot])]
    assert max(len(told) for told in tokens.values()) == 8
    assert session.cache.slots == (slots[2],)
    session.close()


def test_a_stream_that_is_left_within_a_step_ends_before_the_next() -> None:
    """As where the step collects it as garbage."""
    runner = HashRunner()
    session = DecodeSession(runner)
    left = session.stream([[9], [8, 7]], config(9))
    next(left)
    kept = session.add([1, 2], config(8, logits_processor=lambda tokens, scores: (left.close(), scores)[1]))
    other = session.add([3], config(8))
    tokens: dict[int, list[int | None]] = {kept: [], other: []}
    drain(session, tokens)
    assert tokens == {kept: continued(runner, [1, 2], 8), other: continued(runner, [3], 8)}
    assert session.cache.slots == ()


ACTS = ("update", "crop", "reorder", "fork", "compact", "reset", "acquire", "load", "add", "beams", "stream", "leave")
MAKING = ("fork", "acquire", "load", "add", "beams", "stream", "leave")
"""Which make slots, that nobody would know of after an interrupt."""


@pytest.mark.few(2)
@pytest.mark.parametrize("act", ACTS)
def test_an_interrupt_at_any_line_leaves_no_slot_that_holds_something_else(act: str, tmp_path: Path) -> None:
    """Each slot that is left gives what its tokens alone give, or is gone; and new ones that nobody knows are gone."""
    line, interrupted = 0, True
    while interrupted:
        line += 7 if act in ("update", "beams") else 1
        runner = HashRunner(KINDS[1])
        session = DecodeSession(runner)
        cache = session.cache
        a, b = cache.acquire(), cache.acquire()
        session.update({a: [1, 2, 3, 4], b: [5, 6]})
        if line == 1 and act == "load":
            cache.save(tmp_path / "two")
        left = line

        def trace(frame: Any, event: str, _: Any) -> Any:
            nonlocal left
            if "trt_kvcache" not in frame.f_code.co_filename:
                return None
            left -= event == "line"
            if left == 0:
                sys.settrace(None)
                raise KeyboardInterrupt
            return trace

        before = sys.gettrace()
        sys.settrace(trace)
        try:
            match act:
                case "update":
                    session.update({a: [7, 8], b: [9]})
                case "crop":
                    cache.crop(a, 2)
                case "reorder":
                    cache.reorder([1, 1])
                case "fork":
                    cache.fork(a)
                case "acquire":
                    cache.acquire([7])
                case "load":
                    cache.load(tmp_path / "two")
                case "add":
                    session.add([7], config(3))
                case "compact":
                    cache.move(a, 3)
                    cache.compact()
                case "reset":
                    cache.reset(a)
                case "beams":
                    session.generate([[1, 2]], config(3, num_beams=2))
                case "leave":
                    events = session.stream([[1, 2], [3]], config(9))
                    next(events)
                    events.close()
                case _:
                    session.generate([[1, 2], [3]], config(2))
            interrupted = False
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(before)
        session.step()
        while session.running:  # what nobody reads any more
            with suppress(SessionError):
                session.step()
        for slot in cache.slots:
            tokens = [*cache.tokens(slot), 30]
            assert int(session.update({slot: [30]})[slot][-1].argmax()) == continued(runner, tokens, 1)[0]
        assert len({cache.slot(slot).row for slot in cache.slots}) == len(cache.slots)
        made = act in MAKING[:4] and not interrupted
        assert act not in MAKING or made or cache.slots == (a, b)

"""Sessions: sequences that join, leave, wait, stop and fail, against what each would give alone."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from runtime.engines import drain
from runtime.hash_runner import VOCAB, HashRunner, continued

from trt_kvcache.errors import CapacityError, OptionError, PromptError, SessionError, SlotError
from trt_kvcache.runtime.events import FinishReason, TokenEvent
from trt_kvcache.runtime.generation.config import GenerationConfig
from trt_kvcache.runtime.session import DecodeSession

KINDS = ((("linear", 64),), (("circular", 8),), (("linear", 64), ("circular", 8), ("circular", 16)))
PROMPTS = ([1, 2, 3], list(range(30)), [5], [7, 7, 7, 7], [9, 8], [4] * 11)


def config(count: int, **more: Any) -> GenerationConfig:
    return GenerationConfig(max_new_tokens=count, **more)


@pytest.mark.parametrize("kinds", KINDS)
@pytest.mark.parametrize("chunk", [1, 3, 8])
@pytest.mark.parametrize("rows", [1, 2, 4])
def test_more_prompts_than_rows(kinds: Sequence[tuple[str, int]], chunk: int, rows: int) -> None:
    runner = HashRunner(kinds, rows, chunk)
    with DecodeSession(runner) as session:
        results = session.generate(PROMPTS, config(20))
        assert session.cache.slots == ()
    for prompt, result in zip(PROMPTS, results, strict=True):
        assert result.prompt == prompt
        assert result.tokens == continued(runner, prompt, 20)
        assert result.finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize(
    ("prompts", "count", "runner", "steps"),
    [([[1, 2], [3, 4], [5, 6], [7, 8]], 3, {"max_batch": 4}, [(0, 4, 2, 1), (0, 4, 1, 1), (0, 4, 1, 1)]),
     ([[1, 2, 3], [3, 4], [5, 6]], 2, {"max_batch": 3}, [(0, 1, 3, 1), (1, 2, 2, 1), (0, 3, 1, 1)]),
     ([[*range(10)]], 1, {"max_chunk": 4}, [(0, 1, 4, 0), (0, 1, 4, 0), (0, 1, 2, 1)]),
     ([[*range(12)]], 4, {"kinds": [("circular", 8)]}, [(0, 1, 8, 0), *[(0, 1, 1, 0)] * 3, *[(0, 1, 1, 1)] * 4])],
    ids=["rows of one length together", "ragged rows apart, then together", "prefill wants the last logits only",
         "a wrapped cache takes one token at a time"],
)  # fmt: skip
def test_no_step_more_than_needed(prompts: Any, count: int, runner: dict[str, Any], steps: list[Any]) -> None:
    """First row, rows, tokens and positions with logits of each step."""
    opened = HashRunner(**runner)
    with DecodeSession(opened) as session:
        results = session.generate(prompts, config(count))
    assert [(b.first_row, b.rows, b.length, b.keep) for b in opened.steps] == steps
    assert [r.tokens for r in results] == [continued(opened, prompt, count) for prompt in prompts]


def test_models_with_one_write_index_step_rows_of_one_length_together() -> None:
    runner = HashRunner(max_batch=3, per_row=False)
    with DecodeSession(runner) as session:
        results = session.generate([[1, 2, 3], [3, 4], [5, 6]], config(5))
    assert [r.tokens for r in results] == [continued(runner, r.prompt, 5) for r in results]
    assert all((batch.starts == batch.starts[0]).all() for batch in runner.steps)
    assert max(batch.rows for batch in runner.steps) == 2


def test_capacity_ends_a_sequence() -> None:
    runner = HashRunner([("linear", 16)])
    with DecodeSession(runner) as session:
        result, full = session.generate([[1, 2, 3], list(range(16))], config(50))
    assert result.tokens == continued(runner, [1, 2, 3], 14)  # the last one is chosen, and has no place any more
    assert full.tokens == continued(runner, range(16), 1)
    assert result.finish_reason is full.finish_reason is FinishReason.CAPACITY


def test_threads_share_the_steps() -> None:
    runner = HashRunner(KINDS[2], max_batch=3)
    session = DecodeSession(runner)
    results: dict[int, list[list[int]]] = {}

    def work(k: int) -> None:
        results[k] = [r.tokens for r in session.generate([[k, i + 1] for i in range(4)], config(10 + k))]

    threads = [threading.Thread(target=work, args=(k,)) for k in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for k in range(6):
        assert results[k] == [continued(runner, [k, i + 1], 10 + k) for i in range(4)]
    assert session.cache.slots == ()
    assert max(batch.rows for batch in runner.steps) > 1


def test_streams_and_added_sequences_get_their_own_events() -> None:
    runner = HashRunner()
    with DecodeSession(runner) as session:
        slot = session.add([1, 2], config(5))
        events = list(session.stream([[3, 4], [5]], config(8)))
        added = session.step()
        while session.running:
            added += session.step()
    assert [e.token for e in added] == continued(runner, [1, 2], 5)
    assert {e.sequence for e in added} == {slot}
    for i, prompt in enumerate(([3, 4], [5])):
        assert [e.token for e in events if e.sequence == i] == continued(runner, prompt, 8)


def test_ctrl_c_in_a_step_harms_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = HashRunner(KINDS[2])
    session = DecodeSession(runner)
    slot = session.add([5, 6, 7], config(10))
    tokens = [e.token for e in session.step()]
    stream = session.stream([[1, 2]], config(20))
    next(stream)
    real = runner.step

    def interrupted(batch: Any) -> Any:
        real(batch)  # the rows are written, the session does not know
        raise KeyboardInterrupt

    monkeypatch.setattr(runner, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        list(stream)
    monkeypatch.undo()
    assert session.cache.slots == (slot,)
    while session.running:
        tokens += [e.token for e in session.step()]
    assert tokens == continued(runner, [5, 6, 7], 10)


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
            async for event in session.astream([[1]], GenerationConfig(max_new_tokens=60)):
                seen.append(event)

        task = asyncio.create_task(consume())
        while len(seen) < 3:
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancelled())
    assert session.cache.slots == ()


def test_a_failing_sequence_ends_alone() -> None:
    runner = HashRunner()
    session = DecodeSession(runner)
    good = session.add([1, 2, 3], config(12))
    runner.fail = {96}
    bad = session.add([9, 96, 9, 9], config(5))
    tokens: list[int | None] = []
    with pytest.raises(SessionError, match="the step failed on purpose"):
        session.step()
    assert session.running == (good,)
    assert bad not in session.cache.slots
    while session.running:
        tokens += [e.token for e in session.step()]
    assert tokens == continued(runner, [1, 2, 3], 12)


def test_a_failing_stream_leaves_other_streams_alone() -> None:
    runner = HashRunner()
    session = DecodeSession(runner)
    runner.fail = {96}
    good = session.stream([[1, 2, 3]], config(12))
    bad = session.stream([[96, 9]], config(12))
    first = next(good)
    with pytest.raises(SessionError, match="the step failed on purpose"):
        next(bad)
    assert [first.token, *(e.token for e in good)] == continued(runner, [1, 2, 3], 12)
    assert session.cache.slots == ()


def test_nan_logits_end_one_sequence_and_its_row_is_cleaned() -> None:
    runner = HashRunner(max_batch=2)
    session = DecodeSession(runner)
    real = runner.step

    def overflowed(batch: Any) -> Any:
        logits = real(batch)
        logits[batch.tokens[:, 0] == 13] = np.nan
        return logits

    runner.step = overflowed  # type: ignore[method-assign]
    good, bad = session.add([1], config(6)), session.add([13], config(6))
    with pytest.raises(SessionError, match="overflowed"):
        session.step()
    assert session.running == (good,)
    assert bad not in session.cache.slots
    assert drain(session).popitem()[1] == continued(runner, [1], 6)


@pytest.mark.parametrize("most", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("kinds", KINDS)
def test_more_logits_than_a_step_gives_take_more_steps(kinds: Sequence[tuple[str, int]], most: int) -> None:
    """Of an engine that gives logits of a few positions: the same numbers, and no step more than needed."""
    runner, bounded = HashRunner(kinds), HashRunner(kinds, max_logits=most)
    text = [list(range(20)), [7, 3], [5] * 9]
    for keep in (1, 4, 9, 30):
        found = []
        for one in (runner, bounded):
            session = DecodeSession(one)
            slots = [session.cache.acquire() for _ in text]
            given = dict(zip(slots, text, strict=True))
            found.append([*session.update(given, keep).values(), *session.update({slots[1]: [4, 4]}, keep).values()])
            for slot in slots:
                session.cache.release(slot)
        for wanted, made in zip(*found, strict=True):
            assert np.array_equal(wanted, made)
        expected = [continued(runner, text[0][: i + 1], 1)[0] for i in range(20)][-keep:]
        assert found[0][0].argmax(-1).tolist() == expected


@pytest.mark.parametrize("most", [1, 2, 3, 8])
def test_drafts_are_as_long_as_a_step_gives_logits(most: int) -> None:
    runner = HashRunner(max_logits=most)
    prompts = [[1, 2, 3, 1, 2, 3, 1, 2], list(range(20)) * 2]
    with DecodeSession(runner) as session:
        drafted = session.generate(prompts, config(20, prompt_lookup_num_tokens=5, max_matching_ngram_size=1))
    assert [r.tokens for r in drafted] == [continued(runner, p, 20) for p in prompts]
    assert max(step.keep for step in runner.steps) <= most


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
        ([[[1, 2]]], PromptError, "flat list of integers"),
        ([[[1, 2], [3]]], PromptError, "flat list of integers"),
        ([1, 2], PromptError, "prompts is one prompt; give a list of prompts"),
        ("text", PromptError, "prompts is one prompt"),
        (["text"], PromptError, "there is no tokenizer"),
        ([[1] * 65], CapacityError, "prompt 0 has 65 tokens, and a sequence may have 64"),
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


def test_bad_additions() -> None:
    runner = HashRunner(max_batch=1)
    session = DecodeSession(runner)
    with pytest.raises(PromptError, match="the prompt is empty"):
        session.add([])
    with pytest.raises(SlotError, match="slot 7 is not in use"):
        session.add([1], slot=7)
    with pytest.raises(OptionError, match="for beam search use generate"):
        session.add([1], config(4, num_beams=2))
    settings: Any = {"max_new_tokens": 4}
    for call in (session.generate, session.stream):
        with pytest.raises(OptionError, match="config is dict; give a GenerationConfig"):
            call([[1]], settings)
    with pytest.raises(OptionError, match="config is dict; give a GenerationConfig"):
        session.add([1], settings)
    with pytest.raises(OptionError, match="need a tokenizer"):
        session.add([1], config(4, stop_strings="x"))
    assert session.cache.slots == ()
    slot = session.add([1], config(4))
    with pytest.raises(SlotError, match="all 1 rows hold a sequence"):
        session.add([2], config(4))
    with pytest.raises(SlotError, match=f"slot {slot} is generating"):
        session.add([2], config(4), slot=slot)
    with pytest.raises(SlotError, match="slot 9 is not in use"):
        session.remove(9)
    session.remove(slot)
    for ids, words in (([-4], "token id -4 is out of range"), ([1.5], "float64"), ([True], "bool"), ("12", "integers")):
        with pytest.raises(PromptError, match=words):
            session.cache.acquire(ids)
    assert session.cache.slots == ()
    slot = session.cache.acquire()
    session.update({slot: [1] * 60})
    with pytest.raises(CapacityError, match=f"slot {slot} with the prompt has 65 tokens, and a sequence may have 64"):
        session.add([1] * 5, slot=slot)
    with pytest.raises(CapacityError, match=f"slot {slot} has 65 tokens"):
        session.update({slot: [1] * 5})
    with pytest.raises(PromptError, match=f"slot {slot}: no tokens to write"):
        session.update({slot: []})
    assert session.cache.lengths == {slot: 60}
    with pytest.raises(SlotError, match=r"rows hold sequences that do not run, so no row will ever be free"):
        session.generate([[1]])


def test_after_close() -> None:
    runner = HashRunner()
    session = DecodeSession(runner)
    stream = session.stream([[1, 2]], config(9))
    next(stream)
    session.close()
    session.close()
    assert runner.closed
    calls: list[Any] = [
        lambda: session.generate([[1]]), lambda: session.stream([[1]]), lambda: session.add([1]), session.step,
        lambda: session.remove(0), lambda: session.update({0: [1]}), lambda: session.running, lambda: next(stream),
    ]  # fmt: skip
    for call in calls:
        with pytest.raises(SessionError, match="the session is closed; open the model again"):
            call()

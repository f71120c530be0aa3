"""Prompts as embeddings and positions of the caller's, in any schedule: each sequence gives what it gives alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from runtime.embedded_runner import TABLE, Alone, EmbeddedRunner, rows
from runtime.hash_runner import VOCAB, HashRunner

from trt_kvcache.errors import CapacityError, OptionError, PromptError, SessionError
from trt_kvcache.runtime.events import FinishReason
from trt_kvcache.runtime.generation.config import GenerationConfig
from trt_kvcache.runtime.session import DecodeSession

KINDS = ((("linear", 64),), (("circular", 8),), (("linear", 64), ("circular", 8), ("circular", 16)))
TOKENS = st.lists(st.tuples(st.integers(0, VOCAB - 1), st.integers(0, 200), *[st.integers(0, 40)] * 3), min_size=1,
                  max_size=18)  # fmt: skip
"""Of each token its id, the number of its embedding, and its positions."""
GIVEN = st.tuples(TOKENS, st.booleans(), st.booleans())
"""And whether the embeddings count, and the positions."""
COUNT, SLOT = st.integers(1, 12), st.integers(0, 5)
ACTIONS = st.one_of(
    st.tuples(st.just("add"), GIVEN, COUNT),
    st.tuples(st.just("speculate"), GIVEN, COUNT),
    st.tuples(st.just("continue"), SLOT, GIVEN, COUNT),
    st.tuples(st.just("park"), GIVEN, st.integers(0, 20)),
    st.tuples(st.just("step"), st.integers(1, 6)),
    st.tuples(st.just("fork"), SLOT),
    st.tuples(st.just("swap"), SLOT, SLOT),
    st.tuples(st.just("move"), SLOT),
    st.tuples(st.just("travel"), SLOT),
    st.tuples(st.just("remove"), SLOT),
)  # fmt: skip
Given = tuple[list[tuple[int, ...]], bool, bool]


def config(count: int, **more: Any) -> GenerationConfig:
    return GenerationConfig(max_new_tokens=count, **more)


def arguments(what: Given) -> tuple[list[int], dict[str, Any]]:
    """Token ids of a prompt and what is given beside them."""
    tokens, as_embeds, placed = what
    beside: dict[str, Any] = {}
    if as_embeds:
        beside["inputs_embeds"] = rows([t[1] for t in tokens])
    if placed:
        beside["positions"] = np.array([t[2:] for t in tokens]).T
    return [t[0] for t in tokens], beside


def extend(alone: Alone, what: Given) -> None:
    tokens, as_embeds, placed = what
    numbers = [t[1] if as_embeds else TABLE[t[0], 0] for t in tokens]
    alone.extend(numbers, [t[2:] for t in tokens] if placed else None)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    kinds=st.sampled_from(KINDS), chunk=st.integers(1, 8), rows=st.integers(1, 5), per_row=st.booleans(),
    schedule=st.lists(ACTIONS, min_size=1, max_size=25), garbage=st.booleans(),
)  # fmt: skip
def test_any_schedule(
    tmp_path_factory: pytest.TempPathFactory, kinds: Any, chunk: int, rows: int, per_row: bool, schedule: list[Any],
    garbage: bool,
) -> None:  # fmt: skip
    """Sequences of ids and of embeddings, with and without positions, join, leave, fork, move, wait and travel."""
    runner = EmbeddedRunner(kinds, rows, chunk, per_row=per_row)
    for buffer in runner.buffers.values():
        buffer[...] = 1e30 if garbage else 0
    session = DecodeSession(runner, embeddings=TABLE)
    cache = session.cache
    want: dict[int, list[int]] = {}  # by slot, what is still to come
    parked: dict[int, Alone] = {}

    def join(what: Given, count: int, slot: int | None = None, **more: Any) -> None:
        tokens, beside = arguments(what)
        alone = Alone.of(runner) if slot is None else parked.pop(slot)
        extend(alone, what)
        name = session.add(tokens, config(count, **more), slot=slot, **beside)
        want[name] = alone.continued(count)

    def step() -> None:
        for event in session.step():
            assert event.token == want[event.sequence].pop(0)
            if event.finish_reason:
                assert want.pop(event.sequence) == []

    for action, *values in schedule:
        chosen = [list(parked)[v % len(parked)] for v in values if parked and isinstance(v, int)]
        if action == "step":
            for _ in range(values[0]):
                step()
        elif action == "remove" and cache.slots:
            slot = cache.slots[values[0] % len(cache.slots)]
            session.remove(slot)
            want.pop(slot, None)
            parked.pop(slot, None)
        elif action in ("add", "speculate") and cache.free:
            join(values[0], values[1], **({"prompt_lookup_num_tokens": 3} if action == "speculate" else {}))
        elif action == "continue" and parked and len(parked[chosen[0]].codes) <= 30:
            join(values[1], values[2], chosen[0])
        elif action == "park" and cache.free:
            slot, alone = cache.acquire(), Alone.of(runner)
            tokens, beside = arguments(values[0])
            extend(alone, values[0])
            by_slot = {name: {slot: array} for name, array in beside.items()}
            logits = session.update({slot: tokens}, **by_slot)[slot]
            assert int(logits[0].argmax()) == alone.next()
            length = min(values[1], len(tokens))
            if len(tokens) <= 8 or length >= len(tokens) - 1:  # no circular cache has lost what it needs
                cache.crop(slot, length)
                alone.cut(length)
            parked[slot] = alone
        elif action == "fork" and parked and cache.free:
            parked[cache.fork(chosen[0])] = parked[chosen[0]].copy()
        elif action == "swap" and len(set(chosen)) == 2:
            cache.reorder([1, 0], chosen)
            parked[chosen[0]], parked[chosen[1]] = parked[chosen[1]], parked[chosen[0]]
        elif action == "move" and parked and cache.free:
            used = {cache.slot(slot).row for slot in cache.slots}
            cache.move(chosen[0], max(set(range(rows)) - used))
        elif action == "travel" and parked:
            path = tmp_path_factory.mktemp("saved") / "slot"
            cache.save(path, chosen)
            session.remove(chosen[0])
            parked[cache.load(path)[chosen[0]]] = parked.pop(chosen[0])
    while session.running:
        step()
    assert want == {}
    for slot, alone in parked.items():  # what is left over still knows where it stands
        if len(alone.codes) < 60:
            alone.extend([TABLE[5, 0]])
            assert int(session.update({slot: [5]})[slot][0].argmax()) == alone.next()


def test_rows_that_were_given_nothing_share_steps_with_the_others() -> None:
    runner = EmbeddedRunner(max_batch=3)
    with DecodeSession(runner, embeddings=TABLE) as session:
        session.generate(
            [[1, 2]] * 3, config(4), inputs_embeds=[rows([5, 6]), None, None], positions=[None, [3, 3], None]
        )
        assert {batch.rows for batch in runner.given} == {3}
        runner.given.clear()
        session.generate([[1, 2]] * 3, config(4))
        assert all(batch.positions is None for batch in runner.given)


def test_tokens_behind_an_image_stand_behind_its_largest_position() -> None:
    """As transformers has it for Qwen2-VL: text, an image of 2 x 3 patches, text, and what is generated."""
    places = [[0, 1, 2, 2, 2, 2, 2, 2, 5, 6], [0, 1, 2, 2, 2, 3, 3, 3, 5, 6], [0, 1, 2, 3, 4, 2, 3, 4, 5, 6]]
    runner = EmbeddedRunner(max_chunk=4)
    with DecodeSession(runner, embeddings=TABLE) as session:
        slot = session.add([1] * 10, config(3), positions=places, keep=True)
        while session.running:
            session.step()
        np.testing.assert_array_equal(np.concatenate(runner.written, axis=2)[0], [[*p, 7, 8] for p in places])
        session.cache.crop(slot, 5)
        session.update({slot: [3]})
        np.testing.assert_array_equal(runner.written[-1], [[[5]] * 3])  # behind the 4 of the row that is left
        session.update({slot: [3, 4]}, positions={slot: [0, 9]})
        session.update({slot: [3]})
        np.testing.assert_array_equal(runner.written[-1], [[[10]] * 3])
        session.cache.reset(slot)
        session.update({slot: [3]})
        assert runner.given[-1].positions is None


def test_the_models_positions_bound_a_sequence_not_its_tokens() -> None:
    """A prompt of more tokens than the model has positions, all of them small."""
    runner = EmbeddedRunner(max_chunk=8)
    runner.max_positions = 12
    with DecodeSession(runner, embeddings=TABLE) as session:
        assert session.cache.capacity == 12
        places = [i // 4 for i in range(20)]
        result = session.generate([[1] * 20], config(50), positions=[places])[0]
        assert result.finish_reason is FinishReason.CAPACITY
        assert len(result.tokens) == 8  # at 5 to 11; the last one is chosen, and has no place any more
        look = config(50, prompt_lookup_num_tokens=4)
        assert session.generate([[1] * 20], look, positions=[places])[0].tokens == result.tokens
        beams = config(50, num_beams=2)
        assert len(session.generate([[1] * 20], beams, positions=[places])[0].tokens) == 8
        with pytest.raises(CapacityError, match="prompt 0 has 20 tokens, and a sequence may have 12"):
            session.generate([[1] * 20])
        with pytest.raises(
            CapacityError, match="the prompt stands at positions up to 12, and the model knows 12, from 0"
        ):
            session.add([1, 2], positions=[12, 3])
        slot = session.cache.acquire()
        session.update({slot: [1, 2]}, positions={slot: [4, 11]})
        with pytest.raises(CapacityError, match=r"slot \d+ stands at positions up to 12"):
            session.update({slot: [3]})
        with pytest.raises(CapacityError, match="prompt 0 has 70 tokens"):
            session.generate([[1] * 70], positions=[[0] * 70])
        assert session.cache.slots == (slot,)


def test_an_id_under_an_embedding_need_have_none() -> None:
    """Ids of images stand for nothing: they may lie beyond the table, and drafts do not go there."""
    runner = EmbeddedRunner()
    small = TABLE[:50]
    with DecodeSession(runner, embeddings=small) as session:
        assert session.vocab == 50
        slot = session.cache.acquire()
        alone = Alone.of(runner)
        alone.extend([150, 3])
        found = session.update({slot: [90, 1]}, inputs_embeds={slot: rows([150, 3])})[slot]
        assert int(found[0].argmax()) == alone.next()
        with pytest.raises(PromptError, match="token id 60 is out of range; there are embeddings for 0 to 49"):
            session.add([60])
        with pytest.raises(PromptError, match="token id 97 is out of range; the model has 0 to 96"):
            session.add([97], inputs_embeds=rows([3]))


def test_a_token_without_an_embedding_ends_its_sequence_alone() -> None:
    runner = EmbeddedRunner(max_batch=2)
    prompts = [[k] for k in range(40)]

    def first(prompt: list[int]) -> int:
        alone = Alone.of(runner)
        alone.extend(TABLE[prompt, 0])
        return alone.next()

    bad = next(p for p in prompts if first(p) >= 50)

    def lasts(prompt: list[int]) -> bool:
        alone = Alone.of(runner)
        alone.extend(TABLE[prompt, 0])
        return max(alone.continued(2)) < 50

    good = next(p for p in prompts if lasts(p))
    with DecodeSession(runner, embeddings=TABLE[:50]) as session:
        ended, other = session.add(bad, config(5)), session.add(good, config(2))
        with pytest.raises(SessionError, match=f"the model chose token {first(bad)}, which has no embedding"):
            session.step()
        events = []
        while session.running:
            events += session.step()
        alone = Alone.of(runner)
        alone.extend(TABLE[good, 0])
        assert [e.token for e in events if e.sequence == other] == alone.continued(2)
        assert [e.token for e in events if e.sequence == ended] == [first(bad)]
        assert session.cache.slots == ()


def test_what_does_not_fit_is_refused() -> None:
    one = rows([3])
    cases: list[tuple[list[int], dict[str, Any], str]] = [
        (
            [1, 2],
            {"inputs_embeds": one},
            r"inputs_embeds are float64 \[1, 2\]; for a prompt of 2 ids .* float \[2, 2\]",
        ),
        ([1], {"inputs_embeds": np.zeros((1, 3))}, r"inputs_embeds are float64 \[1, 3\]"),
        ([1], {"inputs_embeds": np.zeros((1, 2), np.int64)}, "inputs_embeds are int64"),
        ([1], {"inputs_embeds": np.full((1, 2), np.nan)}, "inputs_embeds hold NaN or infinity as float32"),
        ([1], {"inputs_embeds": np.full((1, 2), 1e300)}, "inputs_embeds hold NaN or infinity as float32"),
        ([1], {"positions": [1, 2]}, r"positions are int64 \[2\]; for a prompt of 1 tokens .* \[1\] or \[3, 1\]"),
        ([1], {"positions": [[1], [2]]}, r"positions are int64 \[2, 1\]"),
        ([1], {"positions": [1.0]}, "positions are float64"),
        ([1], {"positions": [-1]}, "position -1 is negative"),
        ([1, 2], {"positions": [[1], [2, 3]]}, "positions are a list of lists of different lengths"),
        ([], {"positions": [1]}, "for a prompt of 0 tokens"),
    ]
    with DecodeSession(EmbeddedRunner(), embeddings=TABLE) as session:
        for prompt, beside, message in cases:
            with pytest.raises(PromptError, match=message):
                session.add(prompt, **beside)
        for name in ("inputs_embeds", "positions"):
            with pytest.raises(PromptError, match=rf"{name} is 2 entries for 1 prompt\(s\); give a list with an array"):
                session.generate([[1]], **{name: [None, None]})
            with pytest.raises(PromptError, match="slot 7 has embeddings or positions, and no tokens"):
                session.update({}, **{name: {7: one}})
        assert session.cache.slots == ()
        three = session.cache.acquire()
        session.update({three: [1]}, inputs_embeds={three: one[None]}, positions={three: [[[4]]] * 3})  # as models do
        np.testing.assert_array_equal(session._runner.written[-1], [[[4]] * 3])  # type: ignore[attr-defined]
    session = DecodeSession(HashRunner())
    with session, pytest.raises(PromptError, match="the prompt has inputs_embeds, and the model takes token ids"):
        session.add([1], inputs_embeds=one)
    with pytest.raises(OptionError, match="embeddings are given, and the model takes token ids"):
        DecodeSession(HashRunner(), embeddings=TABLE)
    with pytest.raises(OptionError, match=r"the model takes embeddings \(input 'inputs_embeds', float .*--embeddings"):
        DecodeSession(EmbeddedRunner())

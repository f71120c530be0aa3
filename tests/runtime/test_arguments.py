"""Prompts as embeddings and positions of the caller's: where they stand, refusals. Any schedule: test_any_schedule."""

from typing import Any

import numpy as np
import pytest
from runtime.hash_runner import TABLE, Alone, EmbeddedRunner, HashRunner, rows

from trt_kvcache import DecodeSession, GenerationConfig
from trt_kvcache.errors import CapacityError, OptionError, PromptError, SessionError
from trt_kvcache.runtime.events import FinishReason


def config(count: int, **more: Any) -> GenerationConfig:
    return GenerationConfig(max_new_tokens=count, **more)


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
        with pytest.raises(CapacityError, match="prompt 0 has 20 tokens, but a sequence may have at most 12"):
            session.generate([[1] * 20])
        with pytest.raises(
            CapacityError, match="the prompt has positions up to 12, but the model has 12 positions, counted from 0"
        ):
            session.add([1, 2], positions=[12, 3])
        slot = session.cache.acquire()
        session.update({slot: [1, 2]}, positions={slot: [4, 11]})
        with pytest.raises(CapacityError, match=r"slot \d+ has positions up to 12"):
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
            with pytest.raises(PromptError, match="slot 7 has embeddings or positions, but no tokens"):
                session.update({}, **{name: {7: one}})
        assert session.cache.slots == ()
        three = session.cache.acquire()
        session.update({three: [1]}, inputs_embeds={three: one[None]}, positions={three: [[[4]]] * 3})  # as models do
        np.testing.assert_array_equal(session._runner.written[-1], [[[4]] * 3])  # type: ignore[attr-defined]
    session = DecodeSession(HashRunner())
    with session, pytest.raises(PromptError, match="the prompt has inputs_embeds, but the model takes token ids"):
        session.add([1], inputs_embeds=one)
    with pytest.raises(OptionError, match="embeddings are given, but the model takes token ids"):
        DecodeSession(HashRunner(), embeddings=TABLE)
    with pytest.raises(OptionError, match=r"the model takes embeddings \(input 'inputs_embeds', float .*embeddings"):
        DecodeSession(EmbeddedRunner())

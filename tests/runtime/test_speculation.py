"""Drafts change how many steps it takes, never the tokens."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trt_kvcache.runtime.continuation import Continuation
from trt_kvcache.runtime.events import FinishReason, TokenEvent
from trt_kvcache.runtime.generation.config import GenerationConfig
from trt_kvcache.runtime.generation.speculation import look_up

Logits = npt.NDArray[np.float32]

VOCAB = 5


def ids(*tokens: int) -> npt.NDArray[np.int64]:
    return np.array(tokens, np.int64)


@pytest.mark.parametrize(
    ("tokens", "count", "ngram", "expected"),
    [
        ((1, 2, 3, 4, 1, 2), 2, 2, (3, 4)),
        ((1, 2, 3, 4, 1, 2), 9, 2, (3, 4, 1, 2)),
        ((1, 2, 3), 4, 2, ()),
        ((5,), 4, 2, ()),
        ((1, 2, 3, 9, 2, 4, 1, 2), 1, 2, (3,)),  # the longer n-gram decides, though (2, 4) is nearer
        ((1, 2, 3, 9, 2, 4, 1, 2), 1, 1, (4,)),
        ((2, 7, 8, 2, 5, 6, 2), 2, 3, (5, 6)),  # the nearer of two
        ((2, 7, 8, 9, 2, 5, 2), 3, 3, (7, 8, 9)),  # but not where too little follows it
        ((4, 4, 4, 4), 3, 2, (4, 4)),  # of those with too little, the one with most
        ((4, 4), 3, 2, (4,)),
    ],
)
def test_look_up(tokens: tuple[int, ...], count: int, ngram: int, expected: tuple[int, ...]) -> None:
    assert tuple(look_up(ids(*tokens), count, ngram)) == expected


@settings(deadline=None)
@given(st.lists(st.integers(0, 3), min_size=1, max_size=30), st.integers(1, 6), st.integers(1, 4))
def test_a_proposal_followed_the_longest_suffix_before(tokens: list[int], count: int, ngram: int) -> None:
    found = look_up(ids(*tokens), count, ngram).tolist()
    assert len(found) <= count
    sizes = [
        size
        for size in range(1, min(ngram, len(tokens) - 1) + 1)
        if any(tokens[at : at + size] == tokens[-size:] for at in range(len(tokens) - size))
    ]
    if not sizes:
        assert found == []
        return
    size = max(sizes)
    after = [
        tokens[at + size : at + size + count]
        for at in range(len(tokens) - size)
        if tokens[at : at + size] == tokens[-size:]
    ]
    assert found in after
    assert len(found) == max(map(len, after))


def model(tokens: npt.NDArray[np.int64], seed: int) -> Logits:
    """Depends on the last two tokens only, so that text repeats itself and drafts are often right, but not always."""
    return np.random.default_rng([seed, *tokens[-2:].tolist()]).normal(size=VOCAB).astype(np.float32)


def generate(prompt: list[int], config: GenerationConfig, seed: int, room: int = 99) -> tuple[list[TokenEvent], Any]:
    """A decode loop whose cache is the list of tokens that were fed to it."""
    sequence = Continuation(0, prompt, config)
    cache = list(prompt)
    events = list(sequence.verify(ids(), model(ids(*cache), seed)[np.newaxis]))
    while sequence.finish_reason is None:
        start = len(cache)
        draft = sequence.draft(room)
        assert draft.size <= room
        cache += [sequence.next_token, *draft.tolist()]
        logits = np.stack([model(ids(*cache[: start + 1 + at]), seed) for at in range(draft.size + 1)])
        made = list(sequence.verify(draft, logits))
        del cache[start + len(made) :]
        assert [*cache, made[-1].token] == sequence.tokens.tolist(), "what stays in the cache is what was chosen"
        events += made
    return events, sequence.speculation


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=8),
    st.integers(0, 10**6),
    st.integers(1, 6),
    st.integers(0, 6),
    st.sampled_from(
        [
            {},
            {"do_sample": True, "seed": 3},
            {"repetition_penalty": 1.2},
            {"no_repeat_ngram_size": 4},
            {"eos_token_id": 1},
        ]
    ),
)
def test_the_tokens_are_those_of_single_steps(
    prompt: list[int], seed: int, proposed: int, room: int, others: dict[str, Any]
) -> None:
    """Random numbers included: a draft that is rejected must not use any up."""
    shared = {"max_new_tokens": 25, "output_logprobs": True, **others}
    plain, _ = generate(prompt, GenerationConfig(**shared), seed)
    drafted, stats = generate(prompt, GenerationConfig(prompt_lookup_num_tokens=proposed, **shared), seed, room)
    assert drafted == plain
    assert drafted[-1].speculation == stats, "the last event tells"
    assert not any(event.speculation for event in [*drafted[:-1], *plain])
    assert 0 <= stats.accepted <= stats.proposed


def test_a_draft_is_no_longer_than_what_may_come() -> None:
    sequence = Continuation(0, [1, 1, 1, 1], GenerationConfig(prompt_lookup_num_tokens=3, max_new_tokens=3))
    one = np.eye(VOCAB, dtype=np.float32)[[1, 1, 1, 1]]
    sequence.advance(one[0])
    assert sequence.draft(9).tolist() == [1]
    assert sequence.draft(0).size == 0
    events = list(sequence.verify(ids(1), one[:2]))
    assert [event.finish_reason for event in events] == [None, FinishReason.LENGTH]


def test_nothing_after_the_end_is_chosen() -> None:
    sequence = Continuation(0, [1, 2, 1, 2], GenerationConfig(prompt_lookup_num_tokens=3, eos_token_id=2))
    sequence.advance(np.eye(VOCAB, dtype=np.float32)[1])
    events = list(sequence.verify(ids(2, 1), np.eye(VOCAB, dtype=np.float32)[[2, 1, 1]]))
    assert [(event.token, event.finish_reason) for event in events] == [(2, FinishReason.EOS)]

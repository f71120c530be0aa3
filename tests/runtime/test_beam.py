"""Beam search: exhaustive where it can be."""

import math
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trt_kvcache.errors import SessionError
from trt_kvcache.runtime.events import FinishReason
from trt_kvcache.runtime.generation.beam import Hypothesis, beam_search
from trt_kvcache.runtime.generation.generation_config import GenerationConfig

Logits = npt.NDArray[np.float32]
Model = Callable[[tuple[int, ...]], Logits]

PROMPT = (1, 0)


def random_model(seed: int, vocab: int) -> Model:
    """Logits that depend on every token so far: a beam in the wrong row, or in the wrong order, gets other ones."""

    def logits(tokens: tuple[int, ...]) -> Logits:
        return np.random.default_rng([seed, *tokens]).normal(0, 2, vocab).astype(np.float32)

    return logits


class Rows:
    """A session as beam search sees it: the tokens that each row of a cache holds."""

    def __init__(self, model: Model, most: int) -> None:
        self.model, self.most = model, most
        self.rows = [PROMPT]

    def step(self, tokens: npt.NDArray[np.int64]) -> Logits:
        assert tokens.shape == (len(self.rows),)
        assert tokens.dtype == np.int64
        self.rows = [(*row, token) for row, token in zip(self.rows, tokens.tolist(), strict=True)]
        return np.stack([self.model(row) for row in self.rows])

    def reorder(self, indices: npt.NDArray[np.int64]) -> None:
        assert 1 <= indices.size <= self.most
        self.rows = [self.rows[index] for index in indices.tolist()]


def search(model: Model, config: GenerationConfig, room: int | None = None) -> list[Hypothesis]:
    return beam_search(np.array(PROMPT), model(PROMPT), Rows(model, config.num_beams), config, free_tokens=room)


def log_probabilities(logits: Logits) -> list[float]:
    top = float(logits.max())
    total = math.log(sum(math.exp(float(value) - top) for value in logits))
    return [float(value) - top - total for value in logits]


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 10**6), st.integers(1, 4), st.sampled_from([0.5, 1.0, 2.0]))
def test_never_finds_the_best_of_its_width(seed: int, width: int, penalty: float) -> None:
    """A narrow search is a plain loop over sorted lists; this is that loop, without any early end."""
    vocab, length, eos = 6, 5, 0
    model = random_model(seed, vocab)
    config = GenerationConfig(
        max_new_tokens=length, num_beams=max(2, width), length_penalty=penalty, early_stopping="never", eos_token_id=eos
    )
    live, ended = [((), 0.0)], []
    for step in range(1, length + 1):
        grown = [
            ((*tokens, token), total + logprob)
            for tokens, total in live
            for token, logprob in enumerate(log_probabilities(model(PROMPT + tokens)))
        ]
        grown.sort(key=lambda beam: -beam[1])
        for tokens, total in grown[: config.num_beams]:
            if tokens[-1] == eos or step == length:
                ended.append((total / step**penalty, tokens))
        live = [beam for beam in grown if beam[0][-1] != eos][: config.num_beams]
    best = max(ended)
    found = search(model, config)[0]
    assert found.tokens == best[1]
    assert found.score == pytest.approx(best[0], abs=1e-5)


def test_room_ends_with_capacity() -> None:
    model = random_model(5, 8)
    config = GenerationConfig(max_new_tokens=6, num_beams=3)
    found = search(model, config, room=2)
    assert {len(hypothesis.tokens) for hypothesis in found} == {3}
    assert {hypothesis.finish_reason for hypothesis in found} == {FinishReason.CAPACITY}
    assert {hypothesis.finish_reason for hypothesis in search(model, config, room=5)} == {FinishReason.LENGTH}
    assert {len(hypothesis.tokens) for hypothesis in search(model, config, room=0)} == {1}


def test_nothing_left_is_an_error() -> None:
    config = GenerationConfig(max_new_tokens=4, num_beams=2, sequence_bias={0: -math.inf, 1: -math.inf})
    with pytest.raises(SessionError, match="no token is left"):
        search(random_model(0, 2), config)


def test_ended_hypotheses_outlive_beams_that_cannot_go_on() -> None:
    """After one token the vocabulary is used up; what ended before that is the answer."""
    config = GenerationConfig(max_new_tokens=4, num_beams=4, no_repeat_ngram_size=1, eos_token_id=2)
    found = search(random_model(0, 4), config)
    assert {hypothesis.tokens for hypothesis in found} == {(2,), (3, 2)}


def test_nan_is_an_error() -> None:
    def broken(tokens: tuple[int, ...]) -> Logits:
        return np.array([0, np.nan if len(tokens) > 3 else 1], np.float32)

    with pytest.raises(SessionError, match="NaN"):
        search(broken, GenerationConfig(max_new_tokens=4, num_beams=2))

"""Beam search: exhaustive where it can be, and transformers' own where that is installed."""

import importlib.util
import math
from collections.abc import Callable
from typing import Any

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


HAS_TRANSFORMERS = all(importlib.util.find_spec(name) for name in ("transformers", "torch"))


@pytest.mark.skipif(
    not HAS_TRANSFORMERS, reason="transformers or torch is not installed; with 5.23.0 and 2.13.0 all hypotheses agreed"
)
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("early_stopping", [False, True, "never"])
@pytest.mark.parametrize("length_penalty", [-0.5, 0.0, 1.0, 1.7])
def test_the_same_as_transformers(early_stopping: Any, length_penalty: float) -> None:
    """The same hypotheses in the same order, from a small random Llama without a cache on our side."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.set_num_threads(1)
    torch.manual_seed(0)
    shape = LlamaConfig(
        vocab_size=24,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=64,
        initializer_range=0.6,
        bos_token_id=None,
        eos_token_id=None,
    )
    llama = LlamaForCausalLM(shape).eval()

    def model(tokens: tuple[int, ...]) -> Logits:
        with torch.no_grad():
            logits: Logits = llama(torch.tensor([tokens])).logits[0, -1].float().numpy()
        return logits

    # Ends that the search comes to early, late, and with several beams at once.
    often = [
        token
        for tokens in (h.tokens for h in search(model, GenerationConfig(max_new_tokens=9, num_beams=6)))
        for token in tokens[2:]
    ]
    likely = sorted(set(often), key=lambda token: (-often.count(token), token))
    ended_early = 0
    for beams, eos, others in [
        (2, likely[:1], {}),
        (4, likely[1:3], {}),
        (5, likely[:2], {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2}),
        (3, likely[:3], {"min_new_tokens": 4}),
        (4, list(range(3, 12)), {}),
        (3, likely[:2], {"renormalize_logits": True, "suppress_tokens": likely[2:4], "begin_suppress_tokens": [0, 1]}),
        (3, likely[:1], {"forced_eos_token_id": likely[0], "bad_words_ids": [likely[1:2], [likely[2], likely[3]]]}),
        (2, likely[:2], {"exponential_decay_length_penalty": (3, 1.4), "min_length": len(PROMPT) + 3}),
    ]:
        chosen = {
            "max_new_tokens": 9, "num_beams": beams, "eos_token_id": eos, "early_stopping": early_stopping,
            "length_penalty": length_penalty, **others,
        }  # fmt: skip
        theirs = llama.generate(
            torch.tensor([PROMPT]), attention_mask=torch.ones(1, len(PROMPT)), do_sample=False, pad_token_id=1,
            num_return_sequences=beams, return_dict_in_generate=True, output_scores=True, **chosen,
        )  # fmt: skip
        found = search(model, GenerationConfig(**chosen))
        expected = [row[len(PROMPT) :].tolist() for row in theirs.sequences]
        for hypothesis, tokens, score in zip(found, expected, theirs.sequences_scores.tolist(), strict=True):
            length = len(hypothesis.tokens)
            assert hypothesis.tokens == tuple(tokens[:length])
            assert all(token == 1 for token in tokens[length:]), "padding"
            assert hypothesis.score == pytest.approx(score, rel=1e-4)
            ended_early += hypothesis.finish_reason is FinishReason.EOS
    assert ended_early

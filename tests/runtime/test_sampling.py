"""One sequence: which token is chosen, what its event says, when it ends."""

import math
from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from trt_kvcache.errors import SessionError
from trt_kvcache.runtime.continuation import Continuation
from trt_kvcache.runtime.events import FinishReason
from trt_kvcache.runtime.generation.generation_config import GenerationConfig
from trt_kvcache.runtime.generation.sampling import Sampler, best

Logits = npt.NDArray[np.float32]


def row(*values: float) -> Logits:
    return np.array(values, np.float32)


def history(length: int) -> npt.NDArray[np.int64]:
    return np.zeros(length, np.int64)


def drawn(config: GenerationConfig, index: int, rows: Sequence[Logits]) -> list[int]:
    """One token after the other, after a prompt of one token."""
    sampler = Sampler(config, index)
    return [sampler.choose(logits, history(1 + at), 0)[0] for at, logits in enumerate(rows)]


def test_a_sequence_goes_on_with_the_same_tokens_wherever_it_was_cut() -> None:
    """As a prompt somewhere else: the number of a token belongs to its place in the sequence."""
    config = GenerationConfig(do_sample=True, seed=3, temperature=1.5, max_new_tokens=20)
    rows = [np.random.default_rng(at).normal(size=50).astype(np.float32) for at in range(20)]
    whole = Continuation(0, [1, 2], config, index=4)
    tokens = [whole.advance(logits).token for logits in rows]
    for cut in range(20):
        later = Continuation(9, [1, 2, *tokens[:cut]], config, index=4)
        assert [later.advance(logits).token for logits in rows[cut:]] == tokens[cut:]
    again = Sampler(config, 4)
    for at in (7, 3, 3, 15, 0):
        assert again.choose(rows[at], history(2 + at), 0)[0] == tokens[at]


def test_a_seed_is_the_same_in_every_release() -> None:
    """Pinned: another number would silently change what a seed means."""
    rows = [np.zeros(1000, np.float32)] * 5
    assert drawn(GenerationConfig(do_sample=True, seed=0, top_k=0), 0, rows) == [190, 368, 972, 311, 516]
    assert drawn(GenerationConfig(do_sample=True, seed=2**70, top_k=0), 3, rows) == [189, 903, 616, 364, 238]


def test_frequencies_are_the_probabilities() -> None:
    """4,000 draws against what temperature, top-k and top-p leave: chi-squared below the 0.1% point."""
    config = GenerationConfig(do_sample=True, seed=1, temperature=0.8, top_k=5, top_p=0.9)
    logits = row(1.0, 0.2, -0.5, 2.0, 0.1, -3.0, 0.9, -1.0)
    scaled = {token: math.exp(float(score) / 0.8) for token, score in enumerate(logits)}
    best = sorted(scaled, key=lambda token: -scaled[token])[:5]
    total, inside = sum(scaled[token] for token in best), []
    for token in best:
        inside.append(token)
        if sum(scaled[t] for t in inside) >= 0.9 * total:
            break
    count = 4_000
    tokens = drawn(config, 0, [logits] * count)
    assert set(tokens) == set(inside)
    mass = sum(scaled[token] for token in inside)
    expected = {token: count * scaled[token] / mass for token in inside}
    chi = sum((tokens.count(token) - expected[token]) ** 2 / expected[token] for token in inside)
    assert len(inside) == 4
    assert chi < 16.27  # 3 degrees of freedom


def test_logprob_is_of_the_models_own_distribution() -> None:
    logits = row(1, 2, 3)
    expected = [value - math.log(sum(math.exp(v) for v in (1, 2, 3))) for value in (1, 2, 3)]
    plain = Sampler(GenerationConfig(output_logprobs=True))
    assert plain.choose(logits, history(1), 0) == (2, pytest.approx(expected[2], abs=1e-6))
    shaped = Sampler(GenerationConfig(output_logprobs=True, do_sample=True, top_k=1, sequence_bias={0: 9.0}))
    assert shaped.choose(logits, history(1), 0) == (0, pytest.approx(expected[0], abs=1e-6))
    assert Sampler(GenerationConfig()).choose(logits, history(1), 0) == (2, None)


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_the_most_probable_tokens(dtype: Any) -> None:
    """Highest first, of equals the first; before any rule, and never more than there are."""
    logits = np.round(np.random.default_rng(0).normal(0, 3, 4000)).astype(dtype)
    config = GenerationConfig(output_logprobs=True, top_logprobs=40, do_sample=True, sequence_bias={5: -math.inf})
    scores = logits.astype(np.float64)
    order = sorted(range(4000), key=lambda token: (-scores[token], token))[:40]
    total = math.log(np.exp(scores).sum())
    found = Sampler(config).top_logprobs(logits)
    assert [token for token, _ in found] == order
    assert [logprob for _, logprob in found] == pytest.approx([scores[token] - total for token in order], abs=1e-4)
    assert len(Sampler(config).top_logprobs(row(1, 2, 3))) == 3
    assert Sampler(GenerationConfig()).top_logprobs(logits) == ()


@pytest.mark.parametrize("bad", [math.nan, math.inf], ids=str)
@pytest.mark.parametrize("do_sample", [False, True])
def test_damaged_logits_are_an_error(bad: float, do_sample: bool) -> None:
    with pytest.raises(SessionError, match=f"the model's logits hold {bad}"):
        drawn(GenerationConfig(do_sample=do_sample), 0, [row(0, bad, 1)])


OVERFLOW = "the scores hold inf after sequence_bias and repetition_penalty"


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"repetition_penalty": 1e-38}, OVERFLOW),
        ({"repetition_penalty": 1e-320}, OVERFLOW),
        ({"sequence_bias": {0: 1e39}}, OVERFLOW),
        ({"sequence_bias": {0: 3e38, 1: -1e300}, "repetition_penalty": 0.5}, OVERFLOW),
        ({"sequence_bias": {0: -math.inf, 1: -math.inf}}, "no token is left"),
        ({"sequence_bias": {0: -math.inf, 1: -math.inf}, "do_sample": True}, "no token is left"),
    ],
    ids=str,
)
def test_rules_that_leave_no_scores_are_an_error(settings: dict[str, Any], words: str) -> None:
    """And no warning of NumPy's, which says nothing about the setting."""
    with pytest.raises(SessionError, match=words):
        drawn(GenerationConfig(**settings), 0, [row(9, 1)])


class Letters:
    """One letter per token; token 7 begins and token 8 ends a character."""

    def decode(self, tokens: Sequence[int]) -> str:
        pieces = {7: b"\xc3", 8: b"\xa9"}
        return b"".join(pieces.get(token, b"%c" % (97 + token)) for token in tokens).decode("utf-8", "replace")


def want(token: int) -> Logits:
    return np.eye(10, dtype=np.float32)[token]


@pytest.mark.parametrize(("settings", "tokens", "texts", "reason"), [
    ({"eos_token_id": [3, 4]}, [0, 4], ["a", ""], FinishReason.EOS),
    ({"max_new_tokens": 1, "eos_token_id": 0}, [0], [""], FinishReason.EOS),
    ({"max_new_tokens": 2}, [0, 0], ["a", "a"], FinishReason.LENGTH),
    ({"stop_strings": ["cd", "xyz"]}, [1, 2, 2, 3], ["b", "", "c", ""], FinishReason.STOP),
    ({"stop_strings": "cd", "max_new_tokens": 2}, [1, 2], ["b", "c"], FinishReason.LENGTH),
    ({"stop_strings": "a\ufffd", "max_new_tokens": 3}, [1, 0, 7], ["b", "", ""], FinishReason.STOP),
], ids=str)  # fmt: skip
def test_how_a_text_ends(settings: dict[str, Any], tokens: list[int], texts: list[str], reason: FinishReason) -> None:
    """Text that may become a stop string is held back; an incomplete character can complete one at the end."""
    sequence = Continuation(5, [1, 2], GenerationConfig(**settings), Letters())
    events = [sequence.advance(want(token)) for token in tokens]
    assert [(e.sequence, e.token, e.text, e.logprob) for e in events] == [
        (5, token, text, None) for token, text in zip(tokens, texts, strict=True)
    ]
    assert [e.finish_reason for e in events] == [*[None] * (len(tokens) - 1), reason]
    assert sequence.finish_reason is reason
    assert sequence.tokens.tolist() == [1, 2, *tokens]


# The best token is that of float32, whatever the type of the scores.


HALVES = st.integers(0, 65535)


def is_best(logits: np.ndarray[Any, Any]) -> None:
    scores = logits.astype(np.float32)
    token, top = best(logits)
    if np.isnan(scores).any():
        assert np.isnan(top)
    else:
        assert (token, top) == (int(scores.argmax()), float(scores.max()))


@given(arrays.arrays(np.uint16, st.integers(1, 20), elements=HALVES))
def test_any_bits(bits: np.ndarray[Any, Any]) -> None:
    """Subnormal numbers, zeros of both signs, infinities and NaN of both signs among them."""
    is_best(bits.view(np.float16))
    is_best(bits.view(ml_dtypes.bfloat16))

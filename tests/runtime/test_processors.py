"""Every rule against a plain reference, by its defining properties, and where it is installed against transformers."""

import importlib.util
import math
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from trt_kvcache.errors import OptionError, SessionError
from trt_kvcache.runtime.generation import processors
from trt_kvcache.runtime.generation import sampling as warpers
from trt_kvcache.runtime.generation.generation_config import GenerationConfig
from trt_kvcache.runtime.generation.sampling import Candidates

Scores = npt.NDArray[np.float32]

VOCAB = 12

patient = settings(deadline=None)

values = st.floats(-20, 20, width=32) | st.sampled_from([0.0, 1.0, -1.0, -math.inf])
score_rows = (
    st.lists(values, min_size=VOCAB, max_size=VOCAB)
    .filter(lambda row: max(row) > -math.inf)
    .map(lambda row: np.array(row, np.float32))
)
histories = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=30).map(lambda t: np.array(t, np.int64))


def probabilities(scores: Scores) -> list[float]:
    weights = [math.exp(float(score) - float(scores.max())) for score in scores]
    return [weight / sum(weights) for weight in weights]


def kept(scores: Scores) -> set[int]:
    return set(np.flatnonzero(scores > -np.inf).tolist())


def masked(candidates: Candidates, size: int) -> Scores:
    """The scores of the whole vocabulary, ``-inf`` where a token is not left."""
    scores = np.full(size, -np.inf, np.float32)
    scores[slice(None) if candidates.ids is None else candidates.ids] = candidates.scores
    return scores


def left(scores: Scores, rule: Callable[[Candidates, Any], Candidates], setting: float) -> Scores:
    """The tokens that a rule leaves; the same where it works on fewer tokens than there are."""
    found = masked(rule(Candidates(scores), setting), scores.size)
    places = np.flatnonzero(scores > -np.inf)
    np.testing.assert_array_equal(masked(rule(Candidates(scores[places], places), setting), scores.size), found)
    return found


def check_kept_as_they_were(before: Scores, after: Scores) -> None:
    """A rule that forbids changes no score that it keeps, and brings no forbidden one back."""
    for token in kept(after):
        assert after[token] == before[token]
    assert kept(after) <= kept(before)


@patient
@given(score_rows, st.integers(1, VOCAB + 3))
def test_top_k_keeps_the_highest_and_their_equals(scores: Scores, count: int) -> None:
    found = left(scores, warpers.keep_top_k, count)
    check_kept_as_they_were(scores, found)
    last = sorted(scores.tolist(), reverse=True)[min(count, VOCAB) - 1]
    assert kept(found) == {t for t in range(VOCAB) if scores[t] >= last and scores[t] > -math.inf}


@patient
@given(score_rows, st.floats(0.01, 0.99))
@example(np.array([0.0] * VOCAB, np.float32), 0.5)
def test_top_p_keeps_the_smallest_set_with_the_mass(scores: Scores, mass: float) -> None:
    found = left(scores, warpers.keep_top_p, mass)
    check_kept_as_they_were(scores, found)
    share = probabilities(scores)
    inside = kept(found)
    total = sum(share[token] for token in inside)
    assert total >= mass - 1e-6
    weakest = min(inside, key=lambda token: share[token])
    assert total - share[weakest] < mass + 1e-6, "without its weakest token the set still has the mass"
    outside = kept(scores) - inside
    assert all((scores[t], -t) < (scores[weakest], 0) or scores[t] == scores[weakest] for t in outside)


@pytest.mark.parametrize("spread", [0.0, 0.5, 3.0, 30.0])
@pytest.mark.parametrize("mass", [0.001, 0.5, 0.9, 0.9999])
def test_top_p_of_a_large_vocabulary(spread: float, mass: float) -> None:
    """Peaked and flat, with many equals: the head of the distribution alone must give what all of it gives."""
    scores = np.random.default_rng(3).normal(0, spread, 9000).round(1).astype(np.float32)
    share = np.exp(scores.astype(np.float64) - scores.max())
    share /= share.sum()
    order = sorted(range(scores.size), key=lambda token: (-scores[token], token))
    sums = np.cumsum(share[order])
    expected = int(np.searchsorted(sums, mass - 1e-12)) + 1
    assert kept(left(scores, warpers.keep_top_p, mass)) == set(order[:expected])


@pytest.mark.few(52)
@pytest.mark.parametrize("count", [1, 2, 50, 51, 140, 1000, 8999])
@pytest.mark.parametrize("spread", [0.0, 0.5, 30.0])
@pytest.mark.parametrize("order", [1, 64, 141])
def test_top_k_of_a_large_vocabulary(count: int, spread: float, order: int) -> None:
    """With many equals, and with the highest scores in every place against each other."""
    scores = np.random.default_rng(count).normal(0, spread, 9001).round(1).astype(np.float32)
    scores = np.concatenate([np.sort(scores)[start::order] for start in range(order)])
    scores[::7] = -np.inf
    last = np.sort(scores)[-count]
    assert kept(left(scores, warpers.keep_top_k, count)) == set(np.flatnonzero((scores >= last) & (scores > -np.inf)))


@patient
@given(score_rows, st.floats(0.001, 1.0))
def test_min_p_keeps_what_is_probable_enough_against_the_best(scores: Scores, share: float) -> None:
    found = left(scores, warpers.keep_min_p, share)
    check_kept_as_they_were(scores, found)
    odds = [math.exp(float(score) - float(scores.max())) for score in scores]
    for token in range(VOCAB):
        if abs(odds[token] - share) > 1e-6:
            assert (token in kept(found)) == (odds[token] >= share and scores[token] > -math.inf)
    assert int(scores.argmax()) in kept(found)


@patient
@given(score_rows, histories, st.floats(0.1, 4.0))
def test_repetition_is_penalized_once_per_token(scores: Scores, tokens: npt.NDArray[np.int64], penalty: float) -> None:
    found = processors.penalize_repetition(scores, tokens, penalty)
    for token in range(VOCAB):
        score = float(scores[token])
        if token in tokens:
            score = score * penalty if score < 0 else score / penalty
        assert found[token] == pytest.approx(score, rel=1e-6)


@patient
@given(score_rows, histories, st.floats(-3, 3), st.floats(-3, 3), st.integers(0, 9))
def test_generated_tokens_are_penalized(
    scores: Scores, tokens: npt.NDArray[np.int64], presence: float, frequency: float, new: int
) -> None:
    """Once, and as often as they came; a prompt does not count."""
    new = min(new, tokens.size)
    config = GenerationConfig(presence_penalty=presence, frequency_penalty=frequency)
    assert processors.rules_apply(0, config) == (presence != 0 or frequency != 0)
    found = processors.process(scores, tokens, new, config)
    made = tokens[tokens.size - new :].tolist()
    for token in range(VOCAB):
        penalty = presence * (token in made) + frequency * made.count(token)
        assert found[token] == pytest.approx(float(scores[token]) - penalty, rel=1e-5, abs=1e-5)


@patient
@given(score_rows, histories, st.integers(1, 5))
def test_no_ngram_is_repeated(scores: Scores, tokens: npt.NDArray[np.int64], size: int) -> None:
    found = processors.ban_repeated_ngrams(scores, tokens, size)
    check_kept_as_they_were(scores, found)
    history = tokens.tolist()
    seen = {tuple(history[at : at + size]) for at in range(len(history) - size + 1)}
    for token in range(VOCAB):
        repeats = tuple([*history, token][-size:]) in seen and len(history) >= size
        assert (token in kept(found)) == (scores[token] > -math.inf and not repeats)


@patient
@given(score_rows, st.floats(0.05, 50))
def test_temperature(scores: Scores, temperature: float) -> None:
    found = warpers.apply_temperature(scores, temperature)
    assert probabilities(found) == pytest.approx(probabilities(scores / np.float32(temperature)), abs=1e-5)


@pytest.mark.parametrize("temperature", [5e-324, 1e-40, 1e300])
def test_no_temperature_overflows(temperature: float) -> None:
    found = warpers.apply_temperature(np.array([1e38, -1e38, 9e37, -math.inf], np.float32), temperature)
    assert found[0] == 0
    assert found[3] == -math.inf
    assert not np.isnan(found).any()


def test_biases_wait_for_their_run() -> None:
    scores = np.zeros(4, np.float32)
    biases = (((1,), 2.0), ((0, 2), 3.0), ((3, 0, 2), 4.0), ((0, 1, 3, 0, 2), 99.0), ((0, 3), -math.inf))
    found = processors.add_sequence_bias(scores, np.array([3, 0]), biases)
    assert found.tolist() == [0, 2, 7, -math.inf]
    assert processors.add_sequence_bias(scores, np.array([1]), biases).tolist() == [0, 2, 0, 0]
    with pytest.raises(OptionError, match="sequence_bias names token 4; the model has 0 to 3"):
        processors.add_sequence_bias(scores, np.array([0]), (((4,), 1.0),))


@pytest.mark.parametrize(
    ("chosen", "prompt", "new", "left"),
    [
        ({"bad_words_ids": [[3], [0, 2], [1, 2]]}, 1, [0], {0, 1, 4}),
        ({"bad_words_ids": [[3], [0, 2]], "eos_token_id": 3}, 1, [1], {0, 1, 2, 3, 4}),
        ({"suppress_tokens": [1, 4, 99]}, 2, [0], {0, 2, 3}),
        ({"begin_suppress_tokens": [1]}, 2, [], {0, 2, 3, 4}),
        ({"begin_suppress_tokens": [1]}, 2, [0], {0, 1, 2, 3, 4}),
        ({"begin_suppress_tokens": [1], "forced_bos_token_id": 2}, 1, [], {2}),
        ({"begin_suppress_tokens": [1], "forced_bos_token_id": 2}, 1, [2], {0, 2, 3, 4}),
        ({"begin_suppress_tokens": [1], "forced_bos_token_id": 2}, 2, [], {0, 2, 3, 4}),
        ({"forced_bos_token_id": 2}, 2, [], {0, 1, 2, 3, 4}),
        ({"forced_eos_token_id": [1, 3], "max_new_tokens": 3}, 2, [0, 0], {1, 3}),
        ({"forced_eos_token_id": [1, 3], "max_new_tokens": 3}, 2, [0], {0, 1, 2, 3, 4}),
        ({"min_length": 4, "eos_token_id": 1}, 2, [0], {0, 2, 3, 4}),
        ({"min_length": 4, "eos_token_id": 1}, 3, [0], {0, 1, 2, 3, 4}),
        ({"min_length": 9, "min_new_tokens": 1, "eos_token_id": 1}, 2, [], {0, 2, 3, 4}),
        ({"min_length": 9, "min_new_tokens": 1, "eos_token_id": 1}, 2, [0], {0, 1, 2, 3, 4}),
    ],
    ids=str,
)
def test_what_is_forced_and_forbidden(chosen: dict[str, Any], prompt: int, new: list[int], left: set[int]) -> None:
    config = GenerationConfig(**chosen)
    tokens = np.array([4] * prompt + new)
    scores = np.arange(5, dtype=np.float32)
    assert kept(processors.process(scores, tokens, len(new), config)) == left
    assert len(left) == 5 or processors.rules_apply(len(new), config)


@pytest.mark.parametrize("name", ["forced_bos_token_id", "forced_eos_token_id"])
def test_a_forced_token_that_the_model_lacks_is_refused(name: str) -> None:
    config = GenerationConfig(**{name: 5, "max_new_tokens": 1})
    with pytest.raises(OptionError, match=f"{name} names token 5; the model has 0 to 4"):
        processors.process(np.zeros(5, np.float32), np.array([0]), 0, config)


def test_the_end_becomes_likelier_with_the_length() -> None:
    config = GenerationConfig(exponential_decay_length_penalty=(2, 1.5), eos_token_id=[0, 1, 2, 99])
    scores = np.array([2, -2, -math.inf, 1], np.float32)
    assert processors.process(scores, np.zeros(3, np.int64), 2, config) is scores
    found = processors.process(scores, np.zeros(5, np.int64), 4, config)
    assert found.tolist() == [2 * 1.5**2, -2 + 2 * (1.5**2 - 1), -math.inf, 1]
    late = processors.process(np.array([0, -2, 3, 1], np.float32), np.zeros(9999, np.int64), 9998, config)
    assert np.isfinite(late).all()
    assert late.argmax() == 1
    for factor in (2, 2.0):  # powers of a whole number have no end, either
        config = GenerationConfig(exponential_decay_length_penalty=(0, factor), eos_token_id=0)
        assert processors.process(np.ones(2, np.float32), np.zeros(80, np.int64), 79, config)[0] == 2.0**79


def test_rules_of_the_callers_own() -> None:
    """They come after the others, one after the other, and what they do to what they are given harms nothing."""
    seen = []

    def only_even(tokens: npt.NDArray[np.int64], scores: Scores) -> Scores:
        seen.append((tokens.tolist(), scores.tolist()))
        scores[1::2] = -np.inf
        return scores

    def less(tokens: npt.NDArray[np.int64], scores: Scores) -> Scores:
        return scores - np.float64(1)

    config = GenerationConfig(logits_processor=[only_even, less], suppress_tokens=[0])
    scores = np.arange(5, dtype=np.float32)
    found = processors.process(scores, np.array([7, 8]), 1, config)
    assert found.tolist() == [-math.inf, -math.inf, 1, -math.inf, 3]
    assert found.dtype == np.float32
    assert seen == [([7, 8], [-math.inf, 1, 2, 3, 4])]
    assert scores.tolist() == [0, 1, 2, 3, 4]
    assert GenerationConfig(logits_processor=less).logits_processors == (less,)


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (
            lambda t, s: None,
            r"logits_processor <lambda> returned None, and .* no effect; it has to return scores, float32 \[5\]",
        ),
        (lambda t, s: s[:3], r"returned float32 \[3\]"),
        (lambda t, s: s * np.nan, "returned NaN"),
        (lambda t, s: t.__setitem__(0, 1), "failed: ValueError: assignment destination is read-only"),
        (lambda t, s: s[9], "failed: IndexError"),
    ],
)
def test_a_rule_that_fails_is_named(result: Any, message: str) -> None:
    with pytest.raises(SessionError, match=message):
        processors.process(np.zeros(5, np.float32), np.array([0]), 0, GenerationConfig(logits_processor=result))


@patient
@given(score_rows)
def test_log_softmax(scores: Scores) -> None:
    found = np.exp(processors.log_softmax(scores))
    assert found.dtype == np.float32
    assert found.tolist() == pytest.approx(probabilities(scores), abs=1e-6)


configs = st.fixed_dictionaries(
    {"do_sample": st.just(True)},
    optional={
        "temperature": st.floats(0.2, 3.0),
        "top_k": st.integers(0, VOCAB + 2),
        "top_p": st.floats(0.05, 1.0),
        "min_p": st.floats(0.0, 0.9),
        "repetition_penalty": st.floats(0.5, 2.0),
        "no_repeat_ngram_size": st.integers(0, 3),
        "sequence_bias": st.dictionaries(
            st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=3).map(tuple), st.floats(-5, 5), max_size=3
        ),
        "eos_token_id": st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=2),
        "min_new_tokens": st.integers(0, 4),
        "min_length": st.integers(0, 20),
        "max_new_tokens": st.integers(4, 7),
        "bad_words_ids": st.lists(
            st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=3), min_size=1, max_size=4, unique_by=tuple
        ),
        "suppress_tokens": st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=3),
        "begin_suppress_tokens": st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=3),
        "forced_bos_token_id": st.integers(0, VOCAB - 1),
        "forced_eos_token_id": st.integers(0, VOCAB - 1),
        "exponential_decay_length_penalty": st.tuples(st.integers(0, 4), st.floats(0.5, 2.0)),
    },
).filter(
    lambda chosen: (
        ("eos_token_id" in chosen or "exponential_decay_length_penalty" not in chosen)
        and chosen.get("forced_bos_token_id") not in chosen.get("suppress_tokens", [])
        and chosen.get("forced_eos_token_id") not in chosen.get("suppress_tokens", [])
    )
)
distinct_rows = st.permutations(range(VOCAB)).flatmap(
    lambda order: st.floats(0.3, 2.0).map(lambda step: np.array(order, np.float32) * np.float32(step) - 5)
)


HAS_TRANSFORMERS = (
    importlib.util.find_spec("transformers") is not None and importlib.util.find_spec("torch") is not None
)


@pytest.mark.skipif(
    not HAS_TRANSFORMERS,
    reason="transformers or torch is not installed; with 5.23.0 and 2.13.0 the scores agreed to 1e-5, the sets exactly",
)
@pytest.mark.filterwarnings("default")
@settings(patient, max_examples=500)
@given(distinct_rows, histories, configs, st.integers(0, 6))
def test_the_same_as_transformers(
    scores: Scores, tokens: npt.NDArray[np.int64], chosen: dict[str, Any], new_tokens: int
) -> None:
    """Order and numbers of transformers' own list of processors, for scores without ties.

    Two differences are its own and left out: it has no order among equal scores, and it decides at a top-p boundary by
    a float32 sum from the small end, so tokens within 1e-6 of the boundary can fall either way.
    """
    new_tokens = min(new_tokens, tokens.size - 1, chosen.get("max_new_tokens", 9) - 1)
    theirs = of_transformers(scores, tokens, chosen, new_tokens)
    config = GenerationConfig(**chosen)
    ruled = processors.process(scores, tokens, new_tokens, config)
    assert ruled is scores or processors.rules_apply(new_tokens, config)
    if not kept(ruled):
        return
    ours = masked(warpers.warp(ruled, config), ruled.size)
    if kept(ours) != kept(theirs):
        assert at_a_boundary(ruled, config), (sorted(kept(ours)), sorted(kept(theirs)))
        return
    both = sorted(kept(ours))
    # Ours are distances from the highest score once there is a temperature.
    ours, theirs = ours - ours.max(), theirs - theirs.max()
    assert ours[both].tolist() == pytest.approx(theirs[both].tolist(), rel=1e-5, abs=1e-5)


def of_transformers(scores: Scores, tokens: npt.NDArray[np.int64], chosen: dict[str, Any], new_tokens: int) -> Scores:
    import torch
    from transformers import GenerationConfig as Theirs
    from transformers.generation.utils import GenerationMixin

    chosen = {"top_k": 50, **chosen}
    if "sequence_bias" in chosen:
        chosen["sequence_bias"] = dict(chosen["sequence_bias"]) or None
    prompt = tokens.size - new_tokens
    chosen["max_length"] = prompt + chosen.pop("max_new_tokens", GenerationConfig().max_new_tokens)  # as generate does
    if chosen.get("min_new_tokens"):
        chosen["min_length"] = prompt + chosen["min_new_tokens"]
    config = Theirs(**chosen)
    config._eos_token_tensor = torch.tensor(chosen["eos_token_id"]) if "eos_token_id" in chosen else None
    model: Any = types.SimpleNamespace(
        config=types.SimpleNamespace(is_encoder_decoder=False),
        _merge_criteria_processor_list=lambda default, own: default,
    )
    rules = GenerationMixin._get_logits_processor(model, config, input_ids_seq_length=prompt)
    found: Scores = rules(torch.tensor(tokens)[None], torch.tensor(scores)[None])[0].numpy()
    return found


def at_a_boundary(ruled: Scores, config: GenerationConfig) -> bool:
    """True if a change of 1e-6 in top-p, or 1e-6 of min-p, changes the tokens that are kept."""

    def with_top_p(top_p: float, min_p: float | None) -> set[int]:
        near = GenerationConfig(
            do_sample=True, temperature=config.temperature, top_k=config.top_k, top_p=top_p, min_p=min_p
        )
        return kept(masked(warpers.warp(ruled, near), ruled.size))

    low = with_top_p(max(config.top_p - 1e-6, 1e-9), config.min_p and config.min_p * (1 - 1e-6))
    high = with_top_p(min(config.top_p + 1e-6, 1.0), config.min_p and min(config.min_p * (1 + 1e-6), 1.0))
    return low != high

"""Draft models and prompt lookup: the tokens are the model's own, whatever is guessed. On models: test_any_schedule."""

from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from numpy.typing import NDArray
from runtime.hash_runner import HashRunner, continued, next_token, with_encoder, with_state

from trt_kvcache import DecodeSession, GenerationConfig
from trt_kvcache.errors import OptionError
from trt_kvcache.runtime.continuation import Continuation, look_up
from trt_kvcache.runtime.draft import DraftModel
from trt_kvcache.runtime.events import FinishReason, SpeculationStats
from trt_kvcache.runtime.runner import StepBatch

RINGED = (("linear", 64), ("circular", 16))


class Sometimes(HashRunner):
    """A draft that is right but for one token in four."""

    def step(self, batch: StepBatch) -> NDArray[np.float32]:
        logits = super().step(batch)
        wrong = logits.argmax(-1) % 4 == 0
        return np.where(wrong[..., None], np.roll(logits, 1, -1), logits)


class Soft(HashRunner):
    """A vocabulary of five, of which each has a share; `off` is how far a draft is from that.

    Attributes:
        table: scores ``[8, 5]``; which row counts is a hash of the text.
    """

    vocab = 5

    def __init__(self, off: float = 0, **more: Any) -> None:
        super().__init__(**more)
        rng = np.random.default_rng(0)
        self.table = rng.normal(size=(8, 5)) + off * rng.normal(size=(8, 5))

    def step(self, batch: StepBatch) -> NDArray[np.float32]:
        found: NDArray[np.float32] = self.table[super().step(batch).argmax(-1) % 8].astype(np.float32)
        return found


def config(most: int, **more: Any) -> GenerationConfig:
    return GenerationConfig(max_new_tokens=most, **more)


def drafted(draft: HashRunner, runner: HashRunner | None = None, **more: Any) -> DecodeSession:
    return DecodeSession(runner or HashRunner(), draft=DraftModel(draft), **more)


@pytest.mark.parametrize("guessed", [None, 1, 6])
@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("kind", [HashRunner, Sometimes])
def test_greedy_tokens_are_the_same(kind: type[HashRunner], rows: int, guessed: int | None) -> None:
    """There are more sequences than rows, and the draft has fewer rows than the model."""
    prompts = [[first, 2, 3] * length for first, length in ((1, 1), (5, 4), (9, 2), (1, 1), (7, 6))]
    runner, draft = HashRunner(), kind(max_batch=rows, max_chunk=5)
    with drafted(draft, runner) as session:
        assert session.name == "hash, draft on hash"
        results = session.generate(prompts, config(12, num_assistant_tokens=guessed))
        assert [r.tokens for r in results] == [continued(runner, prompt, 12) for prompt in prompts]
        shares = [r.speculation.acceptance for r in results if r.speculation.proposed]
        assert shares
        assert min(shares) == 1 if kind is HashRunner else 0.3 < sum(shares) / len(shares) < 1
    assert draft.closed


def test_a_step_of_the_model_gives_several_tokens() -> None:
    for draft, steps in ((HashRunner(), 5), (Sometimes(), 8)):
        with drafted(draft) as session:
            runner: Any = session._runner
            (result,) = session.generate([[1, 2, 3]], config(21))
            assert result.tokens == continued(runner, [1, 2, 3], 21)
            assert len(runner.steps) <= steps
            stats = result.speculation
            assert stats.accepted + len(runner.steps) == 21
            del runner.steps[:]
            (result,) = session.generate([[1, 2, 3]], config(21, num_assistant_tokens=0))
            assert len(runner.steps) == 21
            assert result.speculation.proposed == 0


def triples(draft: HashRunner, runner: HashRunner) -> tuple[dict[tuple[int, ...], int], float]:
    """Counts of each three tokens after [1, 2], of 500 sequences; and the share of guesses that were taken."""
    found, stats = dict.fromkeys(product(range(5), repeat=3), 0), SpeculationStats()
    with drafted(draft, runner) as session:
        made = config(3, do_sample=True, top_k=0, seed=0, num_assistant_tokens=2)
        for result in session.generate([[1, 2]] * 500, made):
            found[tuple(result.tokens)] += 1
            stats.add(result.speculation)
    return found, stats.acceptance


def chi_square(found: dict[tuple[int, ...], int], table: NDArray[np.float64]) -> float:
    """The distance of counts from the model's distribution; about 124, give or take 16, where they are of it."""
    shares = np.exp(table) / np.exp(table).sum(-1, keepdims=True)
    total, far = sum(found.values()), 0.0
    for tokens, number in found.items():
        text, share = [1, 2], 1.0
        for token in tokens:
            share *= shares[next_token(text, None) % 8, token]
            text.append(token)
        far += (number - total * share) ** 2 / (total * share)
    return far


def test_sampled_tokens_are_of_the_models_distribution() -> None:
    runner = Soft(max_batch=50)
    found, acceptance = triples(Soft(0.8, max_batch=50), runner)
    assert chi_square(found, runner.table) < 124 + 5 * 16
    assert 0.4 < acceptance < 0.98  # lower for guesses that come with the last token of a prompt


@pytest.mark.parametrize("seed", [3, None])
@pytest.mark.parametrize(
    "more", [{}, {"top_k": 3}, {"repetition_penalty": 1.3}, {"min_new_tokens": 5, "eos_token_id": 1}]
)
def test_a_good_draft_draws_what_the_model_draws(more: dict[str, Any], seed: int | None) -> None:
    """With the random numbers of the model, also where nobody chose the seed, and with its rules."""
    settings = {"do_sample": True, "top_k": 0, "seed": seed, **more}
    with drafted(Soft(max_batch=1), Soft()) as session:
        (result,) = session.generate([[1, 2]], config(20, **settings))
        assert result.speculation.acceptance == 1
        if seed is not None:
            plain = DecodeSession(Soft()).generate([[1, 2]], config(20, **settings))
            assert result.tokens == plain[0].tokens


def test_rules_of_the_callers_own_see_the_text_alone() -> None:
    seen = []

    def rule(tokens: Any, scores: Any) -> Any:
        seen.append(tokens.tolist())
        return scores

    with drafted(Sometimes()) as session:
        (result,) = session.generate([[1, 2, 3]], config(12, logits_processor=rule))
        assert seen == [[1, 2, 3, *result.tokens[:i]] for i in range(12)]


def test_a_draft_that_fails_costs_its_guesses_alone() -> None:
    draft = HashRunner()
    with drafted(draft) as session:
        text = continued(session._runner, [1, 2], 12)  # type: ignore[arg-type]
        draft.fail = {text[5]}
        one, two = session.generate([[1, 2], [8]], config(12))
        assert one.tokens == text
        assert two.tokens == continued(session._runner, [8], 12)  # type: ignore[arg-type]
        assert one.speculation.impossible == "the draft failed: the step failed on purpose"
        assert one.speculation.accepted > 0
    with drafted(HashRunner((("linear", 16),)), HashRunner()) as session:
        (result,) = session.generate([[*range(10)]], config(20))
        assert result.tokens == continued(session._runner, [*range(10)], 20)  # type: ignore[arg-type]
        assert (
            result.speculation.impossible
            == "the cache of the draft holds at most 16 tokens; use a draft with a larger capacity"
        )
        assert 4 <= result.speculation.accepted <= 8


def test_drafts_that_cannot_be_used_are_refused() -> None:
    plain = HashRunner().plan
    back = "the draft cannot take back tokens that were rejected: {}.*; use another draft"
    for plan, words in (
        (HashRunner(RINGED).plan, back.format("circular cache 'cache.1' holds the last 16 tokens")),
        (with_state(plain), back.format(r"the model keeps state \('past_state'\)")),
        (with_encoder(plain), "the draft also reads input 'encoder_output', which only its own encoder can make"),
    ):
        draft = HashRunner()
        draft.plan = plan
        with pytest.raises(OptionError, match=words):
            DraftModel(draft)
    words = "the draft has a vocabulary of 5 tokens, but the model has 97; use a draft with the model's own"
    with pytest.raises(OptionError, match=words):
        drafted(Soft())


def test_models_that_cannot_check_guesses_are_refused() -> None:
    state, one = HashRunner(), HashRunner(max_logits=1)
    state.plan, one.plan = with_state(state.plan), replace(one.plan, logits_span=None)
    for runner, words in (
        (state, r"the model keeps state \('past_state'\) that every step replaces"),
        (one, "the model gives the logits of the last position only"),
        (HashRunner(max_chunk=1), "a step takes only one token"),
    ):
        with pytest.raises(OptionError, match=f"a draft cannot help this model: {words}.*; leave draft out"):
            drafted(HashRunner(), runner)


def test_settings_that_contradict_each_other() -> None:
    for changes, words in (
        ({"num_assistant_tokens": -1}, "num_assistant_tokens is -1; it must be at least 0"),
        ({"num_assistant_tokens": 2.5}, "num_assistant_tokens is 2.5; it must be a whole number"),
        ({"num_assistant_tokens": 3, "prompt_lookup_num_tokens": 2}, "two ways to guess the same tokens; choose one"),
        ({"num_assistant_tokens": 3, "num_beams": 2}, "num_beams=2 cannot be combined with num_assistant_tokens"),
    ):
        with pytest.raises(OptionError, match=words):
            config(4, **changes)
    with pytest.raises(OptionError, match=r"num_assistant_tokens is 3, but the session has no draft model; open it"):
        DecodeSession(HashRunner()).generate([[1]], config(4, num_assistant_tokens=3))
    with drafted(HashRunner()) as session:
        (looked,) = session.generate([[1, 2, 1, 2]], config(4, prompt_lookup_num_tokens=2))
        assert looked.tokens == continued(session._runner, [1, 2, 1, 2], 4)  # type: ignore[arg-type]
        assert session._draft is not None
        assert not session._draft._runner.steps  # type: ignore[attr-defined]
        (beams,) = session.generate([[1]], config(4, num_beams=2))
        assert beams.tokens == DecodeSession(HashRunner()).generate([[1]], config(4, num_beams=2))[0].tokens


# Proposals of prompt lookup. Drafts never change the tokens: test_any_schedule, test_draft.

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


def test_nothing_after_the_end_is_chosen() -> None:
    sequence = Continuation(0, [1, 2, 1, 2], GenerationConfig(prompt_lookup_num_tokens=3, eos_token_id=2))
    sequence.advance(np.eye(VOCAB, dtype=np.float32)[1])
    events = list(sequence.verify(ids(2, 1), np.eye(VOCAB, dtype=np.float32)[[2, 1, 1]]))
    assert [(event.token, event.finish_reason) for event in events] == [(2, FinishReason.EOS)]

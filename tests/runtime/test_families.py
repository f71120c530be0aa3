"""Every family of decoders, on ONNX Runtime and on a fake GPU: the tokens and scores of full recomputation.

What joins, leaves, forks, moves and travels meanwhile: test_any_schedule.
"""

from typing import Any

import numpy as np
import pytest
from runtime.families import CASES, FAMILIES, PROMPTS, Corpus, Text

from trt_kvcache import DecodeSession, GenerationConfig, PlanOptions
from trt_kvcache.decoding import FinishReason

EACH = pytest.mark.parametrize(("name", "device"), CASES, ids=lambda value: value)


def given(corpus: Corpus, name: str, count: int) -> dict[str, list[Any]]:
    """Arguments of `DecodeSession.generate` beside the first prompts."""
    made = corpus.made(name)
    each = [made.given(i) for i in range(count)]
    return {kind: [one.get(kind) for one in each] for kind in {kind for one in each for kind in one}}


def wanted(corpus: Corpus, name: str, i: int, count: int) -> list[int]:
    return Text.of(corpus.made(name), i).greedy(count)


@pytest.mark.few(3)
@EACH
def test_ragged_prompts_in_chunks_more_than_rows(corpus: Corpus, name: str, device: str) -> None:
    """Generated and streamed; drafts change nothing, and on a GPU nothing is allocated after the model was opened."""
    drafts = {} if FAMILIES[name].state else {"prompt_lookup_num_tokens": 4, "max_matching_ngram_size": 1}
    with corpus.open(name, device) as session:
        runner: Any = session._runner
        held = None if device == "cpu" else (runner.module.machine.allocations, runner.device_bytes)
        results = session.generate(PROMPTS, GenerationConfig(max_new_tokens=20), **given(corpus, name, 5))
        again = session.generate(PROMPTS, GenerationConfig(max_new_tokens=20, **drafts), **given(corpus, name, 5))
        streamed: dict[int, list[int | None]] = {}
        for event in session.stream(PROMPTS[:2], GenerationConfig(max_new_tokens=9), **given(corpus, name, 2)):
            streamed.setdefault(event.sequence, []).append(event.token)
        assert session.cache.slots == ()
        assert held is None or held == (runner.module.machine.allocations, runner.device_bytes)
    for i, result in enumerate(results):
        count = len(result.tokens)
        assert result.tokens == wanted(corpus, name, i, count)
        assert (count, result.finish_reason) == (20, FinishReason.LENGTH) or session.max_chunk == 4
    assert [r.tokens for r in again] == [r.tokens for r in results]
    assert [streamed[i] for i in range(2)] == [results[i].tokens[:9] for i in range(2)]


@pytest.mark.few(3)
@EACH
def test_beams(corpus: Corpus, name: str, device: str) -> None:
    """Beams copy rows: the log-probabilities are those of the text, and the best is no worse than the greedy text."""

    def score(tokens: list[int]) -> float:
        text, total = Text.of(corpus.made(name), 0), 0.0
        for token in tokens:
            logits = text.logits()
            total += float(logits[token] - logits.max() - np.log(np.exp(logits - logits.max()).sum()))
            text.extend([token])
        return total

    config = GenerationConfig(max_new_tokens=6, num_beams=3, output_logprobs=True)
    with corpus.open(name, device) as session:
        (best,) = session.generate(PROMPTS[:1], config, **given(corpus, name, 1))
    assert sum(best.logprobs) == pytest.approx(score(best.tokens), abs=1e-3)
    assert score(best.tokens) >= score(wanted(corpus, name, 0, 6)) - 1e-4


@pytest.mark.few(3)
@pytest.mark.parametrize(("name", "rows"), [("mobius", 48), ("four tokens", 45), ("growing", 64), ("hybrid", 64)])
@pytest.mark.parametrize("device", ["cpu", "gpu"])
def test_to_the_last_row_of_the_cache(corpus: Corpus, name: str, rows: int, device: str) -> None:
    """The last step of four tokens begins four rows before the end."""
    with corpus.open(name, device) as session:
        assert session.cache.capacity == rows
        (result,) = session.generate(PROMPTS[:1], GenerationConfig(max_new_tokens=100), **given(corpus, name, 1))
    assert result.finish_reason is FinishReason.CAPACITY
    assert result.tokens == wanted(corpus, name, 0, rows - 2)


def test_the_capacity_joins_the_other_options(corpus: Corpus) -> None:
    options = PlanOptions(attention_span=False)
    with DecodeSession.open(corpus.made("growing").model, capacity=32, plan_options=options, max_batch=2) as session:
        assert session.cache.capacity == 32
        assert not session.plan.spans
        found = [result.tokens for result in session.generate(PROMPTS[:3], GenerationConfig(max_new_tokens=12))]
    assert found == [wanted(corpus, "growing", i, 12) for i in range(3)]

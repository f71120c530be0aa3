"""Every family of decoders, on ONNX Runtime and on a fake GPU: the tokens and scores of full recomputation."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from runtime.engines import drain
from runtime.families import CASES, FAMILIES, PROMPTS, Corpus, Text
from runtime.hash_runner import HashRunner

from trt_kvcache import (
    BuildOptions,
    DecodeSession,
    FinishReason,
    GenerationConfig,
    PlanOptions,
    build_engine,
    verify_model,
)
from trt_kvcache.errors import OptionError
from trt_kvcache.runtime import cache, prefix
from trt_kvcache.runtime.draft import DraftModel

EACH = pytest.mark.parametrize(("name", "device"), CASES, ids=lambda value: value)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    return Corpus(tmp_path_factory.mktemp("families"))


def given(corpus: Corpus, name: str, count: int) -> dict[str, list[Any]]:
    """What `DecodeSession.generate` takes beside the first prompts."""
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
def test_sequences_join_and_leave(corpus: Corpus, name: str, device: str) -> None:
    """A row is not touched by the steps of its neighbours, whatever joins, ends or moves beside it."""
    with corpus.open(name, device) as session:
        found: dict[int, list[int | None]] = {}
        numbers: dict[int, int] = {}

        def add(i: int, count: int) -> int:
            slot = session.add(PROMPTS[i], GenerationConfig(max_new_tokens=count), **corpus.made(name).given(i))
            numbers[slot] = i
            return slot

        add(0, 4)
        gone = add(1, 20)
        for steps in range(7):
            for event in session.step():
                found.setdefault(event.sequence, []).append(event.token)
            if steps == 3:
                add(3, 8)
            if steps == 5:
                session.remove(gone)
                add(4, 9)
        drain(session, found)
    for slot, i in numbers.items():
        tokens = found.get(slot, [])
        assert tokens == wanted(corpus, name, i, len(tokens))
    assert [len(found[slot]) for slot in numbers if slot != gone] == [4, 8, 9]


def check(session: DecodeSession, texts: dict[int, Text], more: dict[int, list[int]]) -> None:
    """Write more tokens, and compare the scores after them."""
    found = session.update(more)
    for slot, tokens in more.items():
        texts[slot].extend(tokens)
        expected = texts[slot].logits()
        np.testing.assert_allclose(found[slot][-1], expected, rtol=0, atol=1e-3 * np.abs(expected).max())


def put(session: DecodeSession, text: Text) -> int:
    """A slot that holds a prompt."""
    beside = text.made.given(text.i)
    slot = session.cache.acquire(constants=beside.pop("constants", None))
    session.update({slot: text.tokens}, **{kind: {slot: value} for kind, value in beside.items()})
    return slot


@pytest.mark.few(2)
@EACH
def test_fork_reorder_crop_reset_and_save(corpus: Corpus, name: str, device: str, tmp_path: Path) -> None:
    """What is saved on one device goes on there and on the CPU."""
    made = corpus.made(name)

    def copy(text: Text) -> Text:
        return Text(made, text.i, [*text.tokens], text.places.copy())

    with corpus.open(name, device) as session:
        cache = session.cache
        first, second = Text.of(made, 0), Text.of(made, 1)
        a, b = put(session, first), put(session, second)
        c = cache.fork(a)
        cache.reorder([1, 0], [a, b])
        texts = {a: second, b: first, c: copy(first)}
        check(session, texts, {a: [7], b: [8, 4], c: [7]})
        check(session, texts, {a: [6], b: [11], c: [2]})
        cache.reorder([0, 0], [c, b])
        texts[b] = copy(texts[c])
        check(session, texts, {b: [9], c: [1]})
        if not FAMILIES[name].state:
            cache.crop(b, 2)
            texts[b].cut(2)
            check(session, texts, {b: [11, 5]})
        cache.reset(b)
        texts[b].cut(0)
        check(session, texts, {b: [8], c: [3]})
        cache.save(tmp_path / "saved", [a, c])
    for other in dict.fromkeys((device, "cpu")):
        with corpus.open(name, other) as session:
            put(session, Text.of(made, 3))  # the rows have been used
            loaded = session.cache.load(tmp_path / "saved")
            check(
                session, {new: copy(texts[old]) for old, new in loaded.items()}, {new: [4] for new in loaded.values()}
            )


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
    """Of steps of four tokens, the last one begins four rows before the end."""
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


@pytest.mark.slow
@pytest.mark.parametrize("name", ["hybrid, growing", "hybrid, no convolution", "cross, growing"])
def test_models_whose_caches_grow_verify_and_build(corpus: Corpus, name: str, tmp_path: Path) -> None:
    """Normalization makes the caches fixed, and leaves states and constants as they are."""
    options, sizes = FAMILIES[name].options, FAMILIES[name].build
    model = corpus.made(name).model
    verify_model(model, options).check()
    build = BuildOptions(max_batch=2, max_chunk=8, **sizes)
    manifest = build_engine(model, tmp_path / "e", options=options, build=build)
    states = {"past_conv.1", "past_recurrent.2"} if "hybrid" in name else set()
    assert {state.past for state in manifest.plan.states} == set(manifest.double_buffered.values()) == states
    assert set(manifest.aliases.values()) == {cache.past for cache in manifest.plan.caches}


@pytest.mark.few(3)
@EACH
def test_what_was_offloaded_comes_back(corpus: Corpus, name: str, device: str, tmp_path: Path) -> None:
    """Through memory and through a file, with other sequences in the rows meanwhile; saved from there, too."""
    given = corpus.made(name).given
    with corpus.open(name, device) as session:
        cache, runner = session.cache, cast("Any", session._runner)
        pinned = runner.module.machine.pinned if device != "cpu" else {}
        before = len(pinned)
        one, two = (session.add(PROMPTS[i], GenerationConfig(max_new_tokens=4), keep=True, **given(i)) for i in (3, 1))
        drain(session)
        twin = cache.fork(one)
        cache.offload(one)
        cache.offload(two, tmp_path / "two")
        assert cache.offloaded == (one, two)
        assert len(pinned) == before + (device != "cpu")
        cache.save(tmp_path / "both", [one, two])
        beside = {kind: [value] * 2 for kind, value in given(2).items()}
        session.generate([PROMPTS[2]] * 2, GenerationConfig(max_new_tokens=6), **beside)
        cache.restore(one)
        check_same(session, one, twin)
        session.remove(twin)
        session.remove(one)
        loaded = cache.load(tmp_path / "both")
        session.remove(loaded[one])
        check_same(session, two, loaded[two])
        assert len(pinned) == before


def check_same(session: DecodeSession, one: int, other: int) -> None:
    mine, its = (session.update({slot: [7]})[slot] for slot in (one, other))
    np.testing.assert_array_equal(mine, its)


def shares_prefixes(name: str) -> bool:
    return not (FAMILIES[name].state or name.startswith(("circular", "cross")))


@pytest.mark.few(3)
@pytest.mark.parametrize(("name", "device"), [case for case in CASES if shares_prefixes(case[0])])
def test_prefixes_that_were_computed_before(
    corpus: Corpus, name: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where what follows is given as more than ids; on a GPU nothing more is allocated, and all is given back."""
    for module in (prefix, cache):
        monkeypatch.setattr(module, "BLOCK", 4)
    with corpus.open(name, device, prefix_cache=1 << 20) as session:
        runner = cast("Any", session._runner)
        held = None if device == "cpu" else (runner.module.machine.allocations, len(runner.module.machine.pinned))
        made = corpus.made(name)
        plain = [i for i in range(5) if not made.given(i)]
        for _ in range(2):
            for i in plain:
                slot = session.add(PROMPTS[i], GenerationConfig(max_new_tokens=6))
                assert drain(session)[slot] == wanted(corpus, name, i, 6)
        stats = session.cache.prefix_stats
        assert stats is not None
        assert stats.saved_tokens == sum((len(PROMPTS[i]) - 1) // 4 * 4 for i in plain)
        assert held is None or held == (runner.module.machine.allocations, len(runner.module.machine.pinned))
    assert device == "cpu" or not runner.module.machine.pinned


@pytest.mark.slow
@pytest.mark.few(3)
@pytest.mark.parametrize(("name", "device"), [case for case in CASES if not FAMILIES[case[0]].state])
def test_a_draft_changes_no_token(corpus: Corpus, name: str, device: str) -> None:
    """Of the model itself, which is always right, where it can be one; of another one, which is mostly wrong."""
    many = GenerationConfig(max_new_tokens=12)
    with corpus.open(name, device) as plain:
        want = [result.tokens for result in plain.generate(PROMPTS, many, **given(corpus, name, 5))]
        other: Any = HashRunner()
        other.vocab = plain.vocab
        drafts = [other]
        if plain.cache.window is None and not any(corpus.made(name).given(i) for i in range(5)):
            drafts.append(corpus.open(name, device)._runner)
    for draft in drafts:
        if FAMILIES[name].max_chunk == 1:
            with pytest.raises(OptionError, match="a draft cannot help this model: a step takes one token"):
                corpus.open(name, device, draft=DraftModel(draft))
            continue
        with corpus.open(name, device, draft=DraftModel(draft)) as session:
            found = session.generate(PROMPTS, replace(many, num_assistant_tokens=3), **given(corpus, name, 5))
        assert [result.tokens for result in found] == want
        if draft is not other:
            assert {result.speculation.acceptance for result in found} == {1}

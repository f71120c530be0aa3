"""Decoding on ONNX Runtime, token for token equal to full recomputation without any cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from decoders import DecoderConfig, write_decoder
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from runtime.copier import VOCAB, answer, prompt, write_copier
from runtime.twin import Twin

from trt_kvcache import DecodeSession, FinishReason, GenerationConfig
from trt_kvcache.errors import CacheFileError
from trt_kvcache.importer import rewrite_model
from trt_kvcache.importer.plan import CacheLayout, Fallback, PlanOptions

BASE = DecoderConfig(capacity=48, vocab=128)
FORMS: dict[str, tuple[DecoderConfig, PlanOptions]] = {
    "mobius": (BASE, PlanOptions()),
    "heads-major": (replace(BASE, form="heads-major"), PlanOptions()),
    "seq-major": (replace(BASE, form="seq-major", value_head_size=8), PlanOptions()),
    "five-d": (replace(BASE, form="five-d"), PlanOptions()),
    "softcap": (replace(BASE, softcap=5.0), PlanOptions()),
    "preserve": (BASE, PlanOptions(cache_layout=CacheLayout.PRESERVE)),
    "no span": (BASE, PlanOptions(attention_span=False)),
    "float mask": (replace(BASE, mask="float"), PlanOptions()),
    "bool mask, no lengths": (replace(BASE, mask="bool", lengths=False, causal=False), PlanOptions()),
    "batch 1": (replace(BASE, batch=1), PlanOptions()),
    "one token": (replace(BASE, sequence=1), PlanOptions()),
    "circular": (replace(BASE, mode="circular", capacity=12), PlanOptions()),
    "circular, functional": (replace(BASE, mode="circular", capacity=12), PlanOptions(fallback=Fallback.FUNCTIONAL)),
    "circular, one token": (replace(BASE, mode="circular", capacity=12, sequence=1), PlanOptions()),
    "circular, heads-major": (replace(BASE, mode="circular", capacity=12, form="heads-major"), PlanOptions()),
}
PROMPTS = ([3, 1, 4], [1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8, 4], [6], [2, 7, 1])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("decoders")


@pytest.fixture(scope="module")
def make(folder: Path) -> Any:
    """A decoder by the name of its form, and its twin."""

    @cache
    def made(form: str) -> tuple[Path, Twin, PlanOptions]:
        config, options = FORMS[form]
        path = write_decoder(folder / f"{form}.onnx", config)
        return path, Twin(path, config), options

    return made


@pytest.fixture(scope="module")
def twin_tokens(make: Any) -> Any:
    @cache
    def tokens(form: str, prompt: tuple[int, ...], count: int) -> list[int]:
        return make(form)[1].greedy(prompt, count)

    return tokens


def open_form(make: Any, form: str, **options: Any) -> DecodeSession:
    path, _, plan_options = make(form)
    session = DecodeSession.open(path, plan_options=plan_options, threads=1, **options)
    poison(session)
    return session


def poison(session: DecodeSession) -> None:
    """Large finite garbage in every cache row: a row that is read before it is written shows."""
    rng = np.random.default_rng(1)
    for cache_ in session.plan.caches:
        view = session.cache.view(cache_.past)
        view[...] = rng.choice([-1e4, 1e4], view.shape)


@pytest.mark.few(6)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("chunk", [None, 4])
def test_equal_to_recomputation(make: Any, twin_tokens: Any, form: str, chunk: int | None) -> None:
    """A ragged batch, with more prompts than rows."""
    if "one token" in form and chunk:
        chunk = 1
    with open_form(make, form, max_batch=3, max_chunk=chunk) as session:
        results = session.generate(PROMPTS, GenerationConfig(max_new_tokens=20))
    for tokens, result in zip(PROMPTS, results, strict=True):
        assert result.tokens == twin_tokens(form, tuple(tokens), 20)
        assert result.finish_reason is FinishReason.LENGTH


def test_to_the_last_row_of_the_cache(make: Any, twin_tokens: Any) -> None:
    with open_form(make, "mobius") as session:
        result = session.generate([PROMPTS[0]], GenerationConfig(max_new_tokens=100))[0]
    assert result.finish_reason is FinishReason.CAPACITY
    assert result.tokens == twin_tokens("mobius", tuple(PROMPTS[0]), 46)


def test_a_rewritten_model_decodes_as_its_original(make: Any, twin_tokens: Any, tmp_path: Path) -> None:
    path, _, options = make("mobius")
    rewrite_model(path, tmp_path / "rewritten.onnx", options)
    with DecodeSession.open(tmp_path / "rewritten.onnx", device="cpu") as session:
        assert session.generate(PROMPTS[:1], GenerationConfig(max_new_tokens=20))[0].tokens == twin_tokens(
            "mobius", tuple(PROMPTS[0]), 20
        )


@pytest.mark.parametrize("form", ["mobius", "circular"])
def test_speculation_is_exact_and_right(make: Any, twin_tokens: Any, form: str) -> None:
    with open_form(make, form) as session:
        config = GenerationConfig(max_new_tokens=20, prompt_lookup_num_tokens=4, max_matching_ngram_size=1)
        results = session.generate(PROMPTS, config)
    for tokens, result in zip(PROMPTS, results, strict=True):
        assert result.tokens == twin_tokens(form, tuple(tokens), 20)
    assert sum(r.speculation.proposed for r in results) > 0


def test_sampling_does_not_depend_on_the_batch(make: Any) -> None:
    config = GenerationConfig(max_new_tokens=15, do_sample=True, temperature=1.5, top_k=20, seed=7)
    with open_form(make, "mobius", max_batch=4) as session:
        together = session.generate(PROMPTS, config)
    with open_form(make, "mobius", max_batch=2, max_chunk=3) as session:
        slots = {}
        for i, tokens in enumerate(PROMPTS):
            slot = session.add(tokens, config, index=i)
            slots[i] = []
            while slot in session.running:
                slots[i] += [event.token for event in session.step()]
    assert [r.tokens for r in together] == list(slots.values())


def test_saved_caches_continue_elsewhere(make: Any, twin_tokens: Any, tmp_path: Path) -> None:
    file = tmp_path / "cache.safetensors"
    for form in ("mobius", "circular"):
        tokens = list(PROMPTS[1])
        with open_form(make, form) as session:
            slot = session.cache.acquire()
            session.update({slot: tokens[:-1]})
            session.cache.save(file)
        with open_form(make, form, max_batch=2) as session:
            new = session.cache.load(file)[slot]
            session.add(tokens[-1:], GenerationConfig(max_new_tokens=20), slot=new)
            found = []
            while session.running:
                found += [event.token for event in session.step()]
        assert found == twin_tokens(form, tuple(tokens), 20)
    with open_form(make, "mobius") as session, pytest.raises(CacheFileError, match="saved with another model"):
        session.cache.load(file)


def test_beams_fork_and_reorder(make: Any) -> None:
    """Beam search over the caches, against beam search over the twin."""
    _, twin, _ = make("mobius")

    def score(tokens: Sequence[int], start: int) -> float:
        total = 0.0
        for at in range(start, len(tokens)):
            logits = twin.logits(tokens[:at])
            total += float(logits[tokens[at]] - logits.max() - np.log(np.exp(logits - logits.max()).sum()))
        return total

    with open_form(make, "mobius", max_batch=3) as session:
        config = GenerationConfig(max_new_tokens=6, num_beams=3, output_logprobs=True)
        result = session.generate([PROMPTS[0]], config)[0]
        greedy = session.generate([PROMPTS[0]], GenerationConfig(max_new_tokens=6))[0]
    found = score([*PROMPTS[0], *result.tokens], len(PROMPTS[0]))
    assert sum(result.logprobs) == pytest.approx(found, abs=1e-3)
    assert found >= score([*PROMPTS[0], *greedy.tokens], len(PROMPTS[0])) - 1e-6


COPIERS = {
    "linear": {"capacity": 64},
    "linear, 4-D": {"capacity": 64, "heads_major": True},
    "circular": {"capacity": 24, "mode": "circular"},
    "circular, 4-D": {"capacity": 24, "mode": "circular", "heads_major": True},
    "circular, one token": {"capacity": 24, "mode": "circular", "sequence": 1},
}
CYCLES = ([5, 9, 3, 7, 11], [1, 2], [31, 8, 30, 12, 29, 4, 28], [6, 5, 4], list(range(10, 20)))


@pytest.fixture(scope="module", params=COPIERS)
def copier(request: pytest.FixtureRequest, folder: Path) -> Path:
    return write_copier(folder / f"copier {request.param}.onnx", **COPIERS[request.param])


def test_the_copier_copies(copier: Path) -> None:
    with DecodeSession.open(copier, max_batch=3, max_chunk=1 if "one" in copier.name else 6) as session:
        poison(session)
        prompts = [prompt(cycle, 1.6) for cycle in CYCLES]
        results = session.generate(prompts, GenerationConfig(max_new_tokens=40))
    for cycle, tokens, result in zip(CYCLES, prompts, results, strict=True):
        assert result.tokens == answer(cycle, tokens, 40)


def test_one_wrong_row_shows(copier: Path) -> None:
    """The copier sees what it is there to see: two rows of a value cache change places, and it says another token."""
    with DecodeSession.open(copier) as session:
        slot = session.add(prompt(CYCLES[0], 2), GenerationConfig(max_new_tokens=6))
        while not session.step():
            pass
        values = session.cache.view("value_cache.1")[session.cache.slot(slot).row]
        values = values.reshape(-1, VOCAB)
        values[[3, 4]] = values[[4, 3]]
        values[[8, 9]] = values[[9, 8]]
        tokens = []
        while session.running:
            tokens += [event.token for event in session.step()]
    assert tokens != answer(CYCLES[0], prompt(CYCLES[0], 2), 6)[1:]


@pytest.mark.few(1)
@settings(
    max_examples=50, deadline=None, suppress_health_check=list(HealthCheck),
    phases=[Phase.explicit, Phase.reuse, Phase.generate],  # opening a model many times over to shrink takes minutes
)  # fmt: skip
@given(data=st.data())
def test_copies_in_any_order_of_joining_and_leaving(copier: Path, data: st.DataObject) -> None:
    with DecodeSession.open(copier, max_batch=data.draw(st.integers(1, 4)), threads=1) as session:
        poison(session)
        want: dict[int, list[int]] = {}
        for _ in range(data.draw(st.integers(3, 12))):
            cycle = data.draw(st.sampled_from(CYCLES))
            tokens = prompt(cycle, data.draw(st.sampled_from([1.2, 1.7, 2.0])))
            if session.cache.free:
                count = data.draw(st.integers(1, 30))
                look = data.draw(st.sampled_from([None, 3]))
                slot = session.add(tokens, GenerationConfig(max_new_tokens=count, prompt_lookup_num_tokens=look))
                want[slot] = answer(cycle, tokens, count)
            for _ in range(data.draw(st.integers(0, 12))):
                for event in session.step():
                    assert event.token == want[event.sequence].pop(0)
            if data.draw(st.booleans()) and session.running:
                session.remove(session.running[0])
        while session.running:
            for event in session.step():
                assert event.token == want[event.sequence].pop(0)

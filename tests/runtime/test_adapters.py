"""Adapters in a session: each sequence gets the numbers of the model with its own adapter's weights merged."""

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from adapters import LLAMAS, Tiny, draw
from runtime.engines import runner_on

from trt_kvcache import DecodeSession, PlanOptions
from trt_kvcache.decoding import Schedule
from trt_kvcache.errors import CacheFileError, OptionError, SlotError, TrtKvCacheError

PROMPT = [5, 17, 33, 70, 91, 4, 8, 120]
NAMES = ("ann", "bob", "cid", "dot", "eve")
DEVICES = ("cpu", "gpu", "gpu without graphs")
OPTIONS = PlanOptions(capacity=64, lora_rank=4, lora_slots=8)


@dataclass
class Adapted:
    """A model, adapters of it, and sessions of models with these merged."""

    model: Path
    folders: dict[str, Path]
    merged: dict[str | None, DecodeSession]

    def tokens(self, name: str | None, prompt: list[int], count: int) -> list[int]:
        found = self.merged[name].generate(prompt, max_new_tokens=count, eos_token_id=())
        return found.tokens

    def logits(self, name: str | None, prompt: list[int]) -> np.ndarray:
        return scores(self.merged[name], prompt, None)


def scores(session: DecodeSession, prompt: list[int], adapter: str | None) -> np.ndarray:
    slot = session.cache.acquire(adapter=adapter)
    try:
        return session.update({slot: prompt}, keep=len(prompt))[slot]
    finally:
        session.cache.release(slot)


def made(name: str, folder: Path) -> Iterator[Adapted]:
    tiny, own = Tiny(name), PlanOptions(capacity=None if "static" in name else 64)
    how: list[dict[str, Any]] = [
        {}, {"rank": 2, "targets": ("q_proj", "v_proj")}, {"use_rslora": True, "rank": 3}, {"layers": (1,)},
        {"targets": ("down_proj",), "lora_alpha": 1, "size": 2.0},
    ]  # fmt: skip
    folders, merged = {}, {None: tiny.path}
    for seed, (adapter, settings) in enumerate(zip(NAMES, how, strict=True)):
        folders[adapter] = folder / adapter
        merged[adapter] = tiny.merged(
            draw(tiny, folders[adapter], seed, **settings), folder / f"{adapter}.merged" / "m.onnx"
        )
    sessions = {key: DecodeSession.open(path, tokenizer=False, plan_options=own) for key, path in merged.items()}
    yield Adapted(tiny.path, folders, sessions)
    for session in sessions.values():
        session.close()


@pytest.fixture(scope="module")
def adapted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Adapted]:
    yield from made("mobius/llama_dynamic_f32", tmp_path_factory.mktemp("adapted"))


def opened(
    adapted: Adapted, device: str, folder: Path, options: PlanOptions = OPTIONS, rows: int = 8, **more: Any
) -> DecodeSession:
    model = folder / "model.onnx"
    onnx.save(onnx.load(adapted.model), model)
    runner = runner_on(device, model, options, build={"max_batch": 8, "max_chunk": 16}, max_batch=rows)
    return DecodeSession(runner, adapters=adapted.folders, **more)


@pytest.mark.parametrize("name", LLAMAS)
def test_each_adapter_gives_the_numbers_of_merged_weights(name: str, tmp_path: Path) -> None:
    for adapted in made(name, tmp_path):
        capacity = None if "static" in name else 64
        with DecodeSession.open(
            adapted.model, tokenizer=False, adapters=adapted.folders, plan_options=PlanOptions(capacity=capacity)
        ) as session:
            base = adapted.logits(None, PROMPT)
            assert np.array_equal(scores(session, PROMPT, None), base)
            for adapter in NAMES:
                found, wanted = scores(session, PROMPT, adapter), adapted.logits(adapter, PROMPT)
                assert np.abs(found - wanted).max() < 1e-4
                assert np.abs(wanted - base).max() > 0.1


@pytest.mark.parametrize(("seed", "slots"), [(0, 2), (1, 2), (2, 2), (3, 8)])
@pytest.mark.parametrize("device", DEVICES)
def test_any_schedule(device: str, seed: int, slots: int, adapted: Adapted, tmp_path: Path) -> None:
    """Over fewer slots than adapters, and over enough to mix all of them in a batch.

    Sequences join and leave, adapters are loaded and unloaded: each sequence has the tokens that it has alone.
    """
    rng = random.Random(seed)
    with opened(adapted, device, tmp_path, PlanOptions(capacity=64, lora_rank=4, lora_slots=slots)) as session:
        running: dict[int, tuple[str | None, list[int], int]] = {}
        tokens: dict[int, list[int]] = {}
        ended: list[int] = []
        for _ in range(60):
            act = rng.random()
            if act < 0.35 and len(running) < 8:
                name = rng.choice([None, *session.adapters])
                prompt = [rng.randrange(3, 250) for _ in range(rng.randrange(1, 9))]
                count = rng.randrange(1, 9)
                slot = session.add(prompt, adapter=name, max_new_tokens=count, eos_token_id=())
                running[slot], tokens[slot] = (name, prompt, count), []
            elif act < 0.45 and len(session.adapters) > 1:
                session.adapters.unload(rng.choice([*session.adapters]))
            elif act < 0.55:
                name = rng.choice(NAMES)
                session.adapters.load(name, adapted.folders[name])
            elif act < 0.6 and running:
                gone = rng.choice([*running])
                session.remove(gone)
                name, prompt, count = running.pop(gone)
                assert tokens[gone] == adapted.tokens(name, prompt, count)[: len(tokens[gone])]
            for event in session.step():
                assert event.token is not None
                tokens[event.sequence].append(event.token)
                if event.finish_reason is not None:
                    ended.append(event.sequence)
                    name, prompt, count = running.pop(event.sequence)
                    assert tokens[event.sequence] == adapted.tokens(name, prompt, count)
    assert len(ended) > 5


def test_a_sequence_keeps_its_adapter_when_the_name_goes_to_another(adapted: Adapted) -> None:
    with DecodeSession.open(
        adapted.model, tokenizer=False, adapters={"x": adapted.folders["ann"]}, plan_options=OPTIONS
    ) as session:
        slot = session.add(PROMPT, adapter="x", max_new_tokens=6, eos_token_id=(), keep=True)
        tokens = [event.token for event in session.step()]
        session.adapters.load("x", adapted.folders["bob"])
        while session.running:
            tokens += [event.token for event in session.step()]
        assert tokens == adapted.tokens("ann", PROMPT, 6)
        with pytest.raises(OptionError, match="adapter is 'x', but slot 0 was computed with 'x'; leave it out"):
            session.add([9], slot=slot, adapter="x")
        other = session.cache.fork(slot)
        for kept in (slot, other):
            session.add([9], slot=kept, max_new_tokens=3, eos_token_id=())
        more: dict[int, list[int | None]] = {slot: [], other: []}
        while session.running:
            for event in session.step():
                more[event.sequence].append(event.token)
        assert more[slot] == more[other] == adapted.tokens("ann", [*PROMPT, *map(int, tokens), 9], 3)  # type: ignore[arg-type]


def test_beams_and_drafts_know_the_adapter(adapted: Adapted) -> None:
    how: Mapping[str, Any] = {"max_new_tokens": 8, "eos_token_id": ()}
    with DecodeSession.open(
        adapted.model, tokenizer=False, adapters=adapted.folders, draft=adapted.model, plan_options=OPTIONS
    ) as session:
        for name in NAMES[:3]:
            found = session.generate(PROMPT, adapter=name, **how)
            assert found.tokens == adapted.tokens(name, PROMPT, 8)
            assert found.speculation.proposed
            beams = session.generate(PROMPT, adapter=name, num_beams=3, **how)
            assert beams.tokens == adapted.merged[name].generate(PROMPT, num_beams=3, **how).tokens


def test_a_prefix_of_one_adapter_is_given_to_no_other(adapted: Adapted) -> None:
    prompt = [(7 * i) % 250 + 3 for i in range(40)]
    with DecodeSession.open(
        adapted.model,
        tokenizer=False,
        adapters=adapted.folders,
        plan_options=OPTIONS,
        schedule=Schedule(prefix_cache=1 << 22),
    ) as session:
        for name in (None, "ann", "bob", "ann", None):
            found = session.generate(prompt, adapter=name, max_new_tokens=5, eos_token_id=())
            assert found.tokens == adapted.tokens(name, prompt, 5)
        assert session.cache.prefix_stats is not None
        assert session.cache.prefix_stats.hits == 2
        session.adapters.load("ann", adapted.folders["cid"])
        found = session.generate(prompt, adapter="ann", max_new_tokens=5, eos_token_id=())
        assert found.tokens == adapted.tokens("cid", prompt, 5)
        assert session.cache.prefix_stats.hits == 2


def test_saved_caches_know_the_adapter(adapted: Adapted, tmp_path: Path) -> None:
    file = tmp_path / "saved.safetensors"
    folders = {"a": adapted.folders["ann"], "b": adapted.folders["bob"]}
    with DecodeSession.open(adapted.model, tokenizer=False, adapters=folders, plan_options=OPTIONS) as session:
        slots = [session.cache.acquire(adapter=name) for name in ("a", None, "b")]
        session.update(dict.fromkeys(slots, PROMPT))
        session.cache.save(file)
        session.cache.offload(slots[0], tmp_path / "one.safetensors")
        assert session.update({slots[0]: [9]})[slots[0]].argmax() == adapted.logits("ann", [*PROMPT, 9])[-1].argmax()
    with DecodeSession.open(
        adapted.model, tokenizer=False, adapters={"other": folders["b"]}, plan_options=OPTIONS
    ) as session:
        with pytest.raises(CacheFileError, match=r"slot 0 was computed with an adapter that is not loaded \("):
            session.cache.load(file)
        assert not session.cache.slots
        session.adapters.load("first", folders["a"])
        names = session.cache.load(file)
        assert [session.cache.slot(names[slot]).adapter.name for slot in (0, 2)] == ["first", "other"]
        found = session.update({names[slot]: [9] for slot in slots})
        for slot, name in zip(slots, ("ann", None, "bob"), strict=True):
            assert np.abs(found[names[slot]][-1] - adapted.logits(name, [*PROMPT, 9])[-1]).max() < 1e-4


def test_sequences_wait_for_a_slot_and_updates_are_refused(adapted: Adapted) -> None:
    options = PlanOptions(capacity=64, lora_rank=4, lora_slots=1)
    with DecodeSession.open(adapted.model, tokenizer=False, adapters=adapted.folders, plan_options=options) as session:
        first = session.add(PROMPT, adapter="ann", max_new_tokens=4, eos_token_id=())
        second = session.add(PROMPT, adapter="bob", max_new_tokens=4, eos_token_id=())
        assert {event.sequence for event in session.step()} == {first}
        idle = session.cache.acquire(adapter="cid")
        with pytest.raises(SlotError, match=r"all 1 slots hold adapters that are in use; .* lora_slots=2 or more"):
            session.update({idle: PROMPT})
        tokens: list[int | None] = []
        while session.running:
            tokens += [event.token for event in session.step() if event.sequence == second]
        assert tokens == adapted.tokens("bob", PROMPT, 4)
        assert session.update({idle: PROMPT})[idle].shape == (1, 256)


def test_what_a_session_refuses(adapted: Adapted, tmp_path: Path) -> None:
    with DecodeSession.open(adapted.model, tokenizer=False, plan_options=PlanOptions(capacity=64)) as session:
        with pytest.raises(OptionError, match=r"adapter 'a': the model takes no adapters; .* with lora_rank=4 or more"):
            session.adapters.load("a", adapted.folders["ann"])
        with pytest.raises(OptionError, match="there is no adapter 'x'; there are none"):
            session.generate(PROMPT, adapter="x")
    wide, other = tmp_path / "wide", tmp_path / "other"
    tiny = Tiny("mobius/llama_dynamic_f32")
    draw(tiny, wide, 0, rank=5)
    draw(tiny, other, 0, targets=("o_proj",))
    options = PlanOptions(capacity=64, lora_rank=4, lora_targets=("q_proj",))
    with DecodeSession.open(adapted.model, tokenizer=False, plan_options=options) as session:
        slot = session.add(PROMPT, max_new_tokens=3, eos_token_id=())
        session.step()
        with pytest.raises(
            OptionError,
            match=r"has a rank of 5, but the model takes a rank of at most 4; plan the model with lora_rank=5",
        ):
            session.adapters.load("wide", wide)
        with pytest.raises(OptionError, match=r"changes module 'model.layers.0.self_attn.o_proj', but in this model "):
            session.adapters.load("other", other)
        with pytest.raises(OptionError, match="the name of an adapter is ''"):
            session.adapters.load("", other)
        with pytest.raises(OptionError, match="there is no adapter 'x'"):
            session.adapters.unload("x")
        assert not session.adapters
        tokens = [event.token for _ in range(2) for event in session.step()]
        assert tokens == adapted.tokens(None, PROMPT, 3)[1:]
        assert slot not in session.cache.slots
    with pytest.raises(OptionError, match="adapters is 'a'; give a mapping"):
        DecodeSession.open(adapted.model, adapters="a")  # type: ignore[arg-type]


def test_an_adapter_of_other_sizes_is_refused(adapted: Adapted, tmp_path: Path) -> None:
    from adapters import write

    module = "model.layers.0.self_attn.q_proj"
    for sizes in ((32, 64), (64, 32)):
        a, b = np.ones((2, sizes[0]), np.float32), np.ones((sizes[1], 2), np.float32)
        tensors = {f"{module}.lora_A.weight": a, f"{module}.lora_B.weight": b}
        write(tmp_path / "x", tensors, {"r": 2})
        with (
            pytest.raises(
                TrtKvCacheError, match=r"with \d+ inputs and \d+ outputs, but in this model the module has 64 "
            ),
            DecodeSession.open(adapted.model, tokenizer=False, adapters={"x": tmp_path / "x"}, capacity=64),
        ):
            pass

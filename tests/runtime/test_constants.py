"""Encoder-decoders: what a sequence is given once goes with it, whatever runs beside it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hybrids import cross_logits, cross_model, encoder_constants, greedy, hybrid_model, write
from runtime.fake_cuda import Machine
from runtime.fake_engines import write_engine
from runtime.fake_tensorrt import fake_module
from sample_plans import sample_plan

from trt_kvcache import DecodeSession, GenerationConfig, PlanOptions, verify_model
from trt_kvcache.errors import OptionError, PromptError, SessionError, UnsupportedModelError
from trt_kvcache.importer.plan import Role, TensorRole
from trt_kvcache.runtime.encoders.constants import ConstantInputs
from trt_kvcache.runtime.ort.runner import OnnxRuntimeRunner
from trt_kvcache.runtime.trt.runner import Bindings, TensorRTRunner

FORMS = (("keys", "none"), ("keys", "ones"), ("keys", "bool"), ("hidden", "none"), ("hidden", "bool"))
PROMPTS = ([5, 9, 3], [1, 2, 4, 8, 16, 32, 3, 6, 12, 24, 48], [60], list(range(10, 29)), [7] * 5)
LENGTHS = (6, 6, 11, 1, 6)

Open = Callable[..., DecodeSession]


@pytest.fixture(params=["cpu", "gpu"])
def open_(request: pytest.FixtureRequest, tmp_path: Path) -> Open:
    """Opens a session on ONNX Runtime, or on a fake GPU with TensorRT's rules."""

    def make(kind: str = "keys", mask: str = "none") -> DecodeSession:
        model = write(tmp_path / f"{kind}-{mask}.onnx", cross_model(kind, mask))
        if request.param == "cpu":
            return DecodeSession(OnnxRuntimeRunner(model, max_batch=3, max_chunk=8))
        machine = Machine()
        module = fake_module(machine, rtx=True, version="1.7.1.116")
        runner = TensorRTRunner(write_engine(model, max_encoder=12), bindings=Bindings(module, machine.bindings()))
        return DecodeSession(runner)

    return make


def given(kind: str, mask: str, count: int = len(PROMPTS)) -> list[dict[str, Any]]:
    return [encoder_constants(kind, mask, length, seed) for seed, length in enumerate(LENGTHS[:count])]


def expected(tokens: list[int], mask: str, index: int, count: int) -> list[int]:
    return greedy(lambda t: cross_logits(t, mask, LENGTHS[index], index), tokens, count)


@pytest.mark.few(3)
@pytest.mark.parametrize(("kind", "mask"), FORMS)
def test_each_sequence_attends_its_own_encoder(open_: Open, kind: str, mask: str) -> None:
    """Some of one length share steps, others cannot; more sequences than rows, in chunks."""
    with open_(kind, mask) as session:
        config = GenerationConfig(max_new_tokens=12)
        results = session.generate(PROMPTS, config, given(kind, mask))
        streamed: dict[int, list[int | None]] = {}
        for event in session.stream(PROMPTS[:2], config, given(kind, mask, 2)):
            streamed.setdefault(event.sequence, []).append(event.token)
    for i, (tokens, result) in enumerate(zip(PROMPTS, results, strict=True)):
        assert result.tokens == expected(list(tokens), mask, i, 12)
    assert [streamed[i] for i in range(2)] == [results[i].tokens for i in range(2)]


def test_rows_of_one_length_share_a_step(open_: Open) -> None:
    with open_() as session:
        runner = session._runner
        steps: list[int] = []
        step = runner.step
        runner.step = lambda batch: (steps.append(batch.rows), step(batch))[1]  # type: ignore[method-assign]
        constants = given("keys", "none")
        for i in (0, 1, 4):
            session.add([5, 9, 3], GenerationConfig(max_new_tokens=4), constants=constants[i])
        while session.running:
            session.step()
        assert set(steps) == {3}
        steps.clear()
        for i in (0, 2, 4):
            session.add([5, 9, 3], GenerationConfig(max_new_tokens=4), constants=constants[i])
        while session.running:
            session.step()
        assert set(steps) == {1}


def test_fork_reorder_reset_save(open_: Open, tmp_path: Path) -> None:
    path = tmp_path / "slot.safetensors"
    first, second = given("keys", "ones", 2)
    with open_("keys", "ones") as session:
        cache = session.cache
        a, b = cache.acquire([5, 9, 3], first), cache.acquire([5, 9, 3], second)
        session.update({a: [], b: []})
        c = cache.fork(a)
        cache.reorder([1, 0], [a, b])
        found = session.update({a: [7], b: [7], c: [7]})
        for slot, index in ((a, 1), (b, 0), (c, 0)):
            wanted = cross_logits([5, 9, 3, 7], "ones", LENGTHS[index], index)
            np.testing.assert_allclose(found[slot][-1], wanted, rtol=0, atol=1e-3 * np.abs(wanted).max())
        cache.reset(c)
        wanted = cross_logits([8], "ones", LENGTHS[0], 0)
        np.testing.assert_allclose(session.update({c: [8]})[c][-1], wanted, rtol=0, atol=1e-3 * np.abs(wanted).max())
        cache.save(path, [a])
    with open_("keys", "ones") as session:
        (loaded,) = session.cache.load(path).values()
        wanted = cross_logits([5, 9, 3, 7, 6], "ones", LENGTHS[1], 1)
        logits = session.update({loaded: [6]})[loaded][-1]
        np.testing.assert_allclose(logits, wanted, rtol=0, atol=1e-3 * np.abs(wanted).max())


def test_beams_share_what_their_prompt_was_given(open_: Open) -> None:
    config = GenerationConfig(max_new_tokens=5, num_beams=3)
    with open_("hidden", "bool") as session:
        both = session.generate(PROMPTS[:2], config, given("hidden", "bool", 2))
        again = session.generate(PROMPTS[1:2], config, given("hidden", "bool", 2)[1:])
        other = session.generate(PROMPTS[1:2], config, given("hidden", "bool", 1))
    assert both[1].tokens == again[0].tokens
    assert other[0].tokens != again[0].tokens


def test_the_callers_array_may_change(open_: Open) -> None:
    constants = given("hidden", "none", 1)[0]
    with open_("hidden", "none") as session:
        slot = session.cache.acquire(constants=constants)
        constants["encoder_hidden_states"][...] = np.nan
        assert np.isfinite(session.update({slot: [1]})[slot]).all()


def test_what_is_missing_unknown_or_wrong_is_refused(open_: Open) -> None:
    constants = encoder_constants("keys", "ones", 6, 0)
    with open_("keys", "ones") as session:
        for call in (
            lambda: session.generate([[1]]),
            lambda: session.stream([[1]]),
            lambda: session.add([1]),
            lambda: session.cache.acquire(),
        ):
            with pytest.raises(
                PromptError, match=r"'past_key_values.a.encoder.key' \(float \[1, 2, encoder_length, 16\]"
            ):
                call()
        cases: list[tuple[dict[str, Any], str]] = [
            (
                {k: v for k, v in constants.items() if k != "encoder_attention_mask"},
                "'encoder_attention_mask' .* is missing",
            ),
            (constants | {"x": np.zeros(1)}, "'x' is no input of the model that is given once"),
            (
                constants | {"encoder_attention_mask": np.ones((1, 6))},
                r"'encoder_attention_mask' is float64 \[1, 6\], and",
            ),
            (
                constants | {"past_key_values.b.encoder.key": np.zeros((2, 2, 6, 16), np.float32)},
                r"\[2, 2, 6, 16\], and",
            ),
            (
                constants | {"past_key_values.b.encoder.key": np.zeros((1, 2, 0, 16), np.float32)},
                r"\[1, 2, 0, 16\], and",
            ),
        ]
        for wrong, words in cases:
            with pytest.raises(PromptError, match=words):
                session.add([1], constants=wrong)
        with pytest.raises(PromptError, match="constants is one mapping for 1 prompt"):
            session.generate([[1]], constants=constants)  # type: ignore[arg-type]
        with pytest.raises(PromptError, match="constants is 2 entries for 1 prompt"):
            session.generate([[1]], constants=[constants, constants])
        slot = session.cache.acquire([1], constants)
        with pytest.raises(OptionError, match=f"slot {slot} was given its constants when it was made"):
            session.add([2], slot=slot, constants=constants)
        assert session.cache.slots == (slot,)


def test_a_model_without_constants_takes_none(tmp_path: Path) -> None:
    with (
        DecodeSession(OnnxRuntimeRunner(write(tmp_path / "m.onnx", hybrid_model()))) as session,
        pytest.raises(PromptError, match="'x' is no input of the model that is given once per sequence; it takes none"),
    ):
        session.add([1], constants={"x": np.zeros(1)})


def test_longer_than_the_engine_takes(tmp_path: Path) -> None:
    machine = Machine()
    module = fake_module(machine, rtx=True, version="1.7.1.116")
    engine = write_engine(write(tmp_path / "m.onnx", cross_model("hidden")), max_encoder=12)
    with DecodeSession(TensorRTRunner(engine, bindings=Bindings(module, machine.bindings()))) as session:
        session.add([1], constants=encoder_constants("hidden", "none", 13, 0))
        with pytest.raises(
            SessionError, match=r"'encoder_hidden_states' \[1, 13, 32\] fits none of the engine's profiles"
        ):
            session.step()


def test_many_that_are_missing_are_counted() -> None:
    plan = sample_plan(layers=1)
    held = [TensorRole(f"c{n}", "input", Role.CONSTANT, "float", ("batch", 4), "", ("batch", "")) for n in range(9)]
    inputs = ConstantInputs(replace(plan, tensors=(*plan.tensors, *held)))
    with pytest.raises(PromptError, match=r"'c3' \(float \[1, 4\]\) and 5 more are missing; let the encoder"):
        inputs.read({})


def test_constants_that_grow_with_the_text_are_refused(tmp_path: Path) -> None:
    model = cross_model("keys", "bool")
    heard = next(i for i in model.graph.input if i.name == "heard")
    heard.type.tensor_type.shape.dim[2].dim_param = "sequence"
    with pytest.raises(UnsupportedModelError, match="'heard' have shape .* and a step needs"):
        OnnxRuntimeRunner(write(tmp_path / "m.onnx", model))


@pytest.mark.few(2)
@pytest.mark.parametrize(("kind", "mask"), FORMS)
def test_beside_caches_that_grow(tmp_path: Path, kind: str, mask: str) -> None:
    """Normalization makes the caches fixed, and leaves the constants as they are."""
    model = write(tmp_path / "m.onnx", cross_model(kind, mask, growing=True))
    options = PlanOptions(capacity=64)
    with DecodeSession(OnnxRuntimeRunner(model, options, max_batch=3, max_chunk=8)) as session:
        results = session.generate(PROMPTS, GenerationConfig(max_new_tokens=8), given(kind, mask))
    assert [r.tokens for r in results] == [expected(list(p), mask, i, 8) for i, p in enumerate(PROMPTS)]
    assert verify_model(model, options).passed

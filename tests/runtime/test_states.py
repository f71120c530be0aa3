"""State that is no attention cache, and inputs that a sequence is given once: memory, steps, refusals.

Numbers: test_families.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hybrids import HEADS, SIZE, TAPS, WIDTH, cross_model, encoder_constants, hybrid_logits, hybrid_model, write
from runtime.engines import runner_on

from trt_kvcache import DecodeSession, GenerationConfig
from trt_kvcache.errors import CapacityError, OptionError, PromptError, SessionError, UnsupportedModelError
from trt_kvcache.runtime.ort.ort_runner import OnnxRuntimeRunner

STATE_BYTES = 4 * (WIDTH * (TAPS - 1) + HEADS * SIZE * SIZE)


@pytest.mark.parametrize("device", ["cpu", "gpu"])
def test_what_cannot_go_back_is_refused(device: str, tmp_path: Path) -> None:
    with DecodeSession(runner_on(device, write(tmp_path / "model.onnx", hybrid_model()), max_batch=3)) as session:
        slot = session.cache.acquire()
        session.update({slot: [5, 9, 3]})
        with pytest.raises(CapacityError, match=r"slot \d+ cannot be cropped to 2 tokens: the model keeps state"):
            session.cache.crop(slot, 2)
        session.cache.crop(slot, 3)
        check(session, slot, [5, 9, 3], 6)
        session.cache.crop(slot, 0)
        check(session, slot, [], 42)
        guess = GenerationConfig(prompt_lookup_num_tokens=3)
        for call in (session.generate, session.stream, lambda prompts, guess: session.add(prompts[0], guess)):
            with pytest.raises(OptionError, match=r"the model keeps state \('past_conv.1'\) that every step replaces"):
                call([[1]], guess)
        caches = 2 * 4 * HEADS * 64 * SIZE
        assert session.cache.bytes == 3 * (caches + 2 * STATE_BYTES)
        assert session.plan.cache_bytes(1) == caches + 2 * STATE_BYTES


def test_a_failed_step_leaves_state(tmp_path: Path) -> None:
    runner = runner_on("gpu", write(tmp_path / "model.onnx", hybrid_model()))
    with DecodeSession(runner) as session:
        slot = session.cache.acquire()
        session.update({slot: [5, 9, 3]})
        faults = runner.module.faults  # type: ignore[union-attr]
        faults["fail_steps"] = "no"
        with pytest.raises(SessionError):
            session.update({slot: [7]})
        del faults["fail_steps"]
        check(session, slot, [5, 9, 3], 7)


def check(session: DecodeSession, slot: int, held: list[int], token: int) -> None:
    wanted = hybrid_logits([*held, token])
    found = session.update({slot: [token]})[slot][-1]
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-3 * np.abs(wanted).max())


# Inputs of an encoder-decoder that a sequence is given once: who shares a step, refusals. Numbers: test_families.


BOTH = pytest.mark.parametrize("device", ["cpu", "gpu"])


def opened(device: str, folder: Path, kind: str = "keys", mask: str = "none") -> DecodeSession:
    model = write(folder / "model.onnx", cross_model(kind, mask))
    return DecodeSession(runner_on(device, model, build={"max_encoder": 12}, max_batch=3))


@BOTH
def test_what_is_missing_unknown_or_wrong_is_refused(device: str, tmp_path: Path) -> None:
    constants = encoder_constants("keys", "ones", 6, 0)
    key = "past_key_values.b.encoder.key"
    with opened(device, tmp_path, "keys", "ones") as session:
        cache = session.cache
        for call in (
            lambda: session.generate([[1]]),
            lambda: session.stream([[1]]),
            lambda: session.add([1]),
            cache.acquire,
        ):
            with pytest.raises(
                PromptError, match=r"'past_key_values.a.encoder.key' \(float \[1, 2, encoder_length, 16\]"
            ):
                call()
        rest = {name: value for name, value in constants.items() if name != "encoder_attention_mask"}
        cases: list[tuple[dict[str, Any], str]] = [
            (rest, "'encoder_attention_mask' .* is missing"),
            (constants | {"x": np.zeros(1)}, "'x' is not an input that the model takes once"),
            (rest | {"encoder_attention_mask": np.ones((1, 6))}, r"'encoder_attention_mask' is float64 \[1, 6\], but"),
            (constants | {key: np.zeros((2, 2, 6, 16), np.float32)}, r"\[2, 2, 6, 16\], but"),
            (constants | {key: np.zeros((1, 2, 0, 16), np.float32)}, r"\[1, 2, 0, 16\], but"),
        ]
        for wrong, words in cases:
            with pytest.raises(PromptError, match=words):
                session.add([1], constants=wrong)
        for given, words in ((constants, "one mapping"), ([constants] * 2, "2 entries")):
            with pytest.raises(PromptError, match=f"constants is {words} for 1 prompt"):
                session.generate([[1]], constants=given)
        slot = cache.acquire([1], constants)
        with pytest.raises(OptionError, match=f"slot {slot} got its constants when its sequence began"):
            session.add([2], slot=slot, constants=constants)
        assert cache.slots == (slot,)


@pytest.mark.slow
def test_models_and_lengths_that_do_not_fit(tmp_path: Path) -> None:
    plain = DecodeSession(OnnxRuntimeRunner(write(tmp_path / "m.onnx", hybrid_model())))
    words = "'x' is not an input that the model takes once per sequence; it takes no such input"
    with plain as session, pytest.raises(PromptError, match=words):
        session.add([1], constants={"x": np.zeros(1)})
    with opened("gpu", tmp_path, "hidden") as session:
        session.add([1], constants=encoder_constants("hidden", "none", 13, 0))
        words = r"'encoder_hidden_states' \[1, 13, 32\] fits none of the engine's profiles"
        with pytest.raises(SessionError, match=words):
            session.step()
    model = cross_model("keys", "bool")
    heard = next(i for i in model.graph.input if i.name == "cross_attention_mask")
    heard.type.tensor_type.shape.dim[2].dim_param = "sequence"  # grows with the text
    with pytest.raises(UnsupportedModelError, match="'cross_attention_mask' have shape .* but a step needs"):
        OnnxRuntimeRunner(write(tmp_path / "m.onnx", model))

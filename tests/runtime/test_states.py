"""State that is no attention cache: its memory, its two buffers, and what it does not allow. Numbers: test_families."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hybrids import HEADS, SIZE, TAPS, WIDTH, hybrid_logits, hybrid_model, write
from runtime.engines import runner_on

from trt_kvcache import DecodeSession, GenerationConfig
from trt_kvcache.errors import CapacityError, OptionError, SessionError

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

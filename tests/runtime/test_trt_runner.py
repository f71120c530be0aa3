"""The TensorRT runner against ONNX Runtime: rows, threads, interrupts. Numbers of whole texts: test_families."""

import random
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from decoders import DecoderConfig, write_decoder
from runtime.engines import open_engine, write_engine
from runtime.interrupts import interrupted

from trt_kvcache import DecodeSession, GenerationConfig
from trt_kvcache.errors import SessionError
from trt_kvcache.importer.cache_plan import CacheLayout, Fallback, PlanOptions
from trt_kvcache.runtime.ort.ort_runner import OnnxRuntimeRunner
from trt_kvcache.runtime.runner import StepBatch
from trt_kvcache.runtime.trt.trt_runner import TensorRTRunner

BACKENDS = ("tensorrt-rtx", "tensorrt")
CONFIGS = {
    "heads-major": (DecoderConfig(capacity=32, form="heads-major"), PlanOptions()),
    "preserved bytes": (DecoderConfig(capacity=32), PlanOptions(cache_layout=CacheLayout.PRESERVE)),
    "two buffers": (DecoderConfig(capacity=16, mode="circular"), PlanOptions(fallback=Fallback.FUNCTIONAL)),
}


class Pair:
    """The same steps on the engine and on ONNX Runtime."""

    def __init__(self, engine: TensorRTRunner, reference: OnnxRuntimeRunner) -> None:
        self.engine, self.reference = engine, reference
        self.lengths = np.zeros(engine.max_batch, np.int64)
        self._rng = np.random.default_rng(0)

    def check_step(self, first: int, rows: int, length: int, keep: int = 1) -> None:
        """A step of random tokens; the logits must agree."""
        tokens = self._rng.integers(0, self.engine.vocab, (rows, length))
        batch = StepBatch(first, tokens, self.lengths[first : first + rows].copy(), keep)
        actual, expected = self.engine.step(batch).copy(), self.reference.step(batch)
        assert actual.shape == (rows, keep, self.engine.vocab)
        np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-5)
        self.lengths[first : first + rows] += length

    def check_decode(self) -> None:
        """Prefill with rows that differ in length, all scores of one of them, then decode."""
        self.check_step(0, 2, 8, keep=3)
        self.check_step(2, 1, 5, keep=0)
        for _ in range(3):
            self.check_step(0, 3, 1)


def pair_of(engine: Path) -> Pair:
    runner = open_engine(engine)
    return Pair(runner, OnnxRuntimeRunner(engine.with_suffix(".onnx"), max_batch=runner.max_batch))


def test_rows_go_through_pinned_memory_in_pieces(built: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trt_kvcache.runtime.trt.cuda._STAGING", 1000)
    monkeypatch.setattr("trt_kvcache.runtime.trt.step_buffers._LOGITS_STAGING", 0)
    pair = pair_of(built)
    pair.check_decode()  # asks for three positions at once, more than the pinned memory holds
    runner, rng = pair.engine, np.random.default_rng(2)
    for cache in runner.plan.caches:
        data = rng.random(runner.read_row(cache.past, 1, 50).shape, np.float32)
        runner.write_row(cache.past, 1, data)
        np.testing.assert_array_equal(runner.read_row(cache.past, 1, 50), data)
        np.testing.assert_array_equal(np.from_dlpack(runner.view(cache.past))[1, :, :50], data)


@pytest.mark.few(2)
@pytest.mark.parametrize("name", CONFIGS)
def test_row_operations_touch_the_rows_that_they_name(name: str, tmp_path: Path) -> None:
    config, options = CONFIGS[name]
    path = write_decoder(tmp_path / "model.onnx", config)
    runner = open_engine(write_engine(path, options=options))
    both = runner, OnnxRuntimeRunner(path, options, max_batch=3)
    rng = np.random.default_rng(3)
    caches = [(c.past, c.capacity) for c in runner.plan.caches]
    for past, capacity in caches:
        for row in range(3):
            data = rng.random(runner.read_row(past, row, capacity).shape, np.float32)
            for one in both:
                one.write_row(past, row, data)
    for one in both:
        one.copy_rows(0, 2, 5)
        one.zero_rows(1, 3, 7)
        one.zero_rows(0, 12, 1000)
        one.copy_rows(1, 1, 1000)
        one.copy_rows(2, 1, 0)
        one.zero_rows(2, 6, 6)
    for past, capacity in caches:
        for row in range(3):
            np.testing.assert_array_equal(*(one.read_row(past, row, capacity) for one in both))


@pytest.mark.slow
def test_threads_and_gpus(built: Path) -> None:
    """CUDA's current context is per thread: whoever uses another GPU, or another thread, leaves it as it was."""
    pairs = [pair_of(built), pair_of(built)]
    with ThreadPoolExecutor(1) as pool:
        pool.submit(pairs[0].check_decode).result()
    for length in (4, 1, 1):
        for pair in pairs:
            pair.check_step(0, 2, length)
    for pair in pairs:
        runner: Any = pair.engine
        machine = runner.module.machine
        for _ in range(2):
            runner.close()
        assert (machine.used, len(machine.pinned), machine.graphs, runner.module.hung) == (0, 0, 0, [])
        assert not [c for c in runner.module.contexts if c() is not None]
        with pytest.raises(SessionError, match="the runner is closed; open the engine again"):
            runner.step(StepBatch(0, np.zeros((1, 1), np.int64), np.zeros(1, np.int64)))


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
def test_an_interrupt_at_any_line_leaves_the_next_steps_right(backend: str, tmp_path: Path) -> None:
    """Shapes and addresses that are half set, a stream that records, copies on their way: none reaches another step."""
    model = write_decoder(tmp_path / "model.onnx", DecoderConfig(capacity=64))
    prompts = ([5, 9, 3], list(range(10, 23)), [7, 7])
    config = GenerationConfig(max_new_tokens=9)
    with DecodeSession(OnnxRuntimeRunner(model, max_batch=3, max_chunk=8)) as plain:
        wanted = [result.tokens for result in plain.generate(prompts, config)]
    session = DecodeSession(open_engine(write_engine(model, backend=backend), backend=backend))
    rng, interrupts = random.Random(3), 0
    for _ in range(60):
        slots = [session.add(prompt, config) for prompt in prompts]
        tokens: dict[int, list[int | None]] = {slot: [] for slot in slots}
        left = rng.randrange(1, 1500)
        while session.running:
            with interrupted(left, "runtime/trt/") as lines, suppress(KeyboardInterrupt, SessionError):
                for event in session.step():
                    tokens[event.sequence].append(event.token)
            interrupts += left > 0 and lines[0] == 0
            left = lines[0]
        for slot, want in zip(slots, wanted, strict=True):
            assert tokens[slot] == want[: len(tokens[slot])]
    assert interrupts > 20
    assert session.generate(prompts, config)[1].tokens == wanted[1]
    session.close()

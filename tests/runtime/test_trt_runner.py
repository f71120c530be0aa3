"""The TensorRT runner against a TensorRT that enforces its rules and computes with ONNX Runtime."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from decoders import DecoderConfig, write_decoder
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from runtime.fake_cuda import Machine
from runtime.fake_engines import write_engine
from runtime.fake_tensorrt import fake_module

from trt_kvcache.errors import SessionError
from trt_kvcache.importer.plan import CacheLayout, Fallback, PlanOptions
from trt_kvcache.runtime.generation.config import GenerationConfig
from trt_kvcache.runtime.ort.runner import OnnxRuntimeRunner
from trt_kvcache.runtime.runner import StepBatch
from trt_kvcache.runtime.session import DecodeSession
from trt_kvcache.runtime.trt.io import StepBuffers
from trt_kvcache.runtime.trt.runner import Bindings, TensorRTRunner

BACKENDS = ("tensorrt-rtx", "tensorrt")
VERSIONS = {"tensorrt-rtx": "1.7.1.116", "tensorrt": "11.4.0.106"}
CAPACITY = 64

Open = Callable[..., tuple[TensorRTRunner, Any]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_decoder(tmp_path_factory.mktemp("model") / "model.onnx", DecoderConfig(capacity=CAPACITY))


@pytest.fixture
def open_engine(tmp_path: Path) -> Iterator[Open]:
    opened: list[TensorRTRunner] = []
    modules: list[Any] = []

    def open_(
        model: Path,
        backend: str = "tensorrt-rtx",
        machine: Machine | None = None,
        options: PlanOptions | None = None,
        faults: dict[str, Any] | None = None,
        limits: dict[str, int] | None = None,
        **arguments: Any,
    ) -> tuple[TensorRTRunner, Any]:
        copy = tmp_path / model.name
        if not copy.exists():
            copy.write_bytes(model.read_bytes())
        machine = machine or Machine()
        version = VERSIONS[backend]
        engine = copy.with_suffix(".engine")
        if not engine.exists():
            write_engine(copy, options=options, backend=backend, version=version, **(limits or {}))
        module = fake_module(machine, rtx=backend == "tensorrt-rtx", version=version, **(faults or {}))
        runner = TensorRTRunner(engine, bindings=Bindings(module, machine.bindings()), **arguments)
        opened.append(runner)
        modules.append(module)
        return runner, module

    yield open_
    for runner in opened:
        runner.close()
    assert [module.hung for module in modules] == [[]] * len(modules)


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

    def check_rows(self, row: int, tokens: int) -> None:
        """The caches of a batch row must agree."""
        for cache in self.engine.plan.caches:
            actual = self.engine.read_row(cache.past, row, tokens)
            np.testing.assert_allclose(actual, self.reference.read_row(cache.past, row, tokens), rtol=1e-5, atol=1e-5)
            assert actual.any()


def check_decode(pair: Pair, steps: int = 8) -> None:
    """Prefill in chunks, with rows that differ in length, then decode all of them."""
    pair.check_step(0, 2, 8, keep=3)
    pair.check_step(2, 1, 5)
    pair.check_step(0, 1, 3, keep=0)
    for _ in range(steps):
        pair.check_step(0, 3, 1)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("graphs", [True, False])
def test_equals_onnx_runtime(model: Path, open_engine: Open, backend: str, graphs: bool) -> None:
    runner, _ = open_engine(model, backend, cuda_graphs=graphs)
    pair = Pair(runner, OnnxRuntimeRunner(model, max_batch=3))
    check_decode(pair)
    for row in range(3):
        pair.check_rows(row, int(pair.lengths[row]))


CONFIGS = {
    "heads-major": (DecoderConfig(capacity=32, form="heads-major"), PlanOptions()),
    "preserved bytes": (DecoderConfig(capacity=32), PlanOptions(cache_layout=CacheLayout.PRESERVE)),
    "no span": (DecoderConfig(capacity=32), PlanOptions(attention_span=False)),
    "five-d": (DecoderConfig(capacity=32, form="five-d"), PlanOptions()),
    "mask input": (DecoderConfig(capacity=32, mask="bool", lengths=False, causal=False), PlanOptions()),
    "circular": (DecoderConfig(capacity=16, mode="circular"), PlanOptions(fallback=Fallback.CONTRACT)),
    "two buffers": (DecoderConfig(capacity=16, mode="circular"), PlanOptions(fallback=Fallback.FUNCTIONAL)),
}


@pytest.mark.few(3)
@pytest.mark.parametrize("name", CONFIGS)
def test_every_kind_of_cache(name: str, open_engine: Open, tmp_path: Path) -> None:
    config, options = CONFIGS[name]
    path = write_decoder(tmp_path / "model.onnx", config)
    runner, _ = open_engine(path, options=options)
    pair = Pair(runner, OnnxRuntimeRunner(path, options, max_batch=3))
    # Chunks that divide 16, so that no update of a circular cache straddles its end.
    pair.check_step(0, 2, 8, keep=3)
    pair.check_step(2, 1, 4)
    pair.check_step(0, 1, 8)
    for _ in range(10):
        pair.check_step(0, 3, 1)
    pair.check_rows(0, min(26, config.capacity if isinstance(config.capacity, int) else 0))


def test_two_buffers_follow_their_rows(open_engine: Open, tmp_path: Path) -> None:
    """Steps on parts of the batch leave rows on different sides; moving, reading and clearing them must know."""
    config, options = CONFIGS["two buffers"]
    path = write_decoder(tmp_path / "model.onnx", config)
    runner, _ = open_engine(path, options=options)
    assert runner.plan.caches[0].in_place is False
    pair = Pair(runner, OnnxRuntimeRunner(path, options, max_batch=3))
    pair.check_step(0, 1, 4)
    pair.check_step(1, 2, 3)
    pair.check_step(0, 1, 1)
    pair.check_step(0, 3, 1)
    for one in (pair.engine, pair.reference):
        one.copy_rows(0, 2, 6)
        one.zero_rows(1, 0, 16)
    pair.lengths[:] = 6, 0, 6
    pair.check_step(2, 1, 2)
    pair.check_step(0, 3, 1)
    for row in range(3):
        pair.check_rows(row, int(pair.lengths[row]))


def test_binds_past_and_present_to_one_address(model: Path, open_engine: Open) -> None:
    runner, module = open_engine(model, cuda_graphs=False)
    check_decode(Pair(runner, OnnxRuntimeRunner(model, max_batch=3)), steps=2)
    contexts = [c() for c in module.contexts if c() is not None]
    assert len(contexts) == 2  # prefill and decode
    starts = []
    for context in contexts:
        for cache in runner.plan.caches:
            assert context._addresses[cache.present] == context._addresses[cache.past]
        starts.append(context._addresses[runner.plan.caches[0].past])
    assert starts[0] == starts[1]  # the profiles share the buffers


def test_allocates_nothing_after_opening(model: Path, open_engine: Open) -> None:
    runner, module = open_engine(model, cuda_graphs=False)
    before, held = module.machine.allocations, runner.device_bytes
    pair = Pair(runner, OnnxRuntimeRunner(model, max_batch=3))
    check_decode(pair, 20)
    assert (module.machine.allocations, runner.device_bytes) == (before, held)
    assert module.machine.used == held
    assert len(module.machine.pinned) == 4  # inputs, logits, chosen tokens, cache rows


def test_caches_start_at_zero(model: Path, open_engine: Open) -> None:
    runner, _ = open_engine(model)
    for cache in runner.plan.caches:
        assert not runner.read_row(cache.past, 2, CAPACITY).any()


@pytest.mark.parametrize("garbage", [1e4, -1e4])
def test_rows_beyond_the_length_are_never_seen(model: Path, open_engine: Open, garbage: float) -> None:
    clean, _ = open_engine(model)
    dirty, _ = open_engine(model)
    for cache in dirty.plan.caches:
        shape = dirty.read_row(cache.past, 0, CAPACITY).shape
        for row in range(3):
            dirty.write_row(cache.past, row, np.full(shape, garbage, np.float32))
    rng = np.random.default_rng(1)
    lengths = np.zeros(2, np.int64)
    for length in (7, 1, 1, 4, 1):
        batch = StepBatch(1, rng.integers(0, 256, (2, length)), lengths.copy(), keep=length)
        np.testing.assert_array_equal(clean.step(batch).copy(), dirty.step(batch))
        lengths += length


def test_rows_go_through_pinned_memory_in_pieces(
    model: Path, open_engine: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trt_kvcache.runtime.trt.caches._STAGING", 1000)
    monkeypatch.setattr("trt_kvcache.runtime.trt.io._LOGITS_STAGING", 0)
    runner, _ = open_engine(model)
    pair = Pair(runner, OnnxRuntimeRunner(model, max_batch=3))
    check_decode(pair, 2)  # asks for three positions at once, more than the pinned memory holds
    rng = np.random.default_rng(2)
    for cache in runner.plan.caches:
        data = rng.random(runner.read_row(cache.past, 1, 50).shape, np.float32)
        runner.write_row(cache.past, 1, data)
        np.testing.assert_array_equal(runner.read_row(cache.past, 1, 50), data)
        np.testing.assert_array_equal(np.from_dlpack(runner.view(cache.past))[1, :, :50], data)


@pytest.mark.parametrize("name", ["heads-major", "preserved bytes", "two buffers"])
def test_row_operations_touch_what_they_name(name: str, open_engine: Open, tmp_path: Path) -> None:
    config, options = CONFIGS[name]
    path = write_decoder(tmp_path / "model.onnx", config)
    runner, _ = open_engine(path, options=options)
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


@pytest.mark.few(2)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ["heads-major", "two buffers"])
@given(seed=st.integers(0, 2**32 - 1))
@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_order_of_steps_and_moves(name: str, backend: str, tmp_path: Path, seed: int) -> None:
    """Row ranges of all kinds, long enough for graphs of each to be recorded and replayed."""
    config, options = CONFIGS[name]
    path = tmp_path / "model.onnx"
    if not path.exists():
        write_engine(write_decoder(path, config), options=options, backend=backend, version=VERSIONS[backend])
    machine = Machine()
    module = fake_module(machine, rtx=backend == "tensorrt-rtx", version=VERSIONS[backend])
    runner = TensorRTRunner(path.with_suffix(".engine"), bindings=Bindings(module, machine.bindings()))
    pair = Pair(runner, OnnxRuntimeRunner(path, options, max_batch=3))
    rng = np.random.default_rng(seed)
    for _ in range(40):
        first = int(rng.integers(0, 3))
        rows = int(rng.integers(1, 4 - first))
        if rng.random() < 0.75:
            room = 16 - int(pair.lengths[first : first + rows].max())
            length = 1 if rng.random() < 0.8 else int(rng.integers(1, 9))
            if length <= room:
                pair.check_step(first, rows, length)
                continue
        source, target = (int(i) for i in rng.integers(0, 3, 2))
        for one in (pair.engine, pair.reference):
            one.copy_rows(source, target, int(pair.lengths[source]))
            one.zero_rows(first, 0, config.capacity)
        pair.lengths[target] = pair.lengths[source]
        pair.lengths[first] = 0
    runner.close()
    assert machine.used == 0


def test_span_inputs_count_from_zero(model: Path, open_engine: Open) -> None:
    """Several of them, of different lengths, all written through one piece of pinned memory."""
    runner, module = open_engine(model)
    plan = runner.plan
    (span,) = plan.spans
    role = next(t for t in plan.tensors if t.name == span.name)
    names = {"short": 16, "long": 64}
    spans = tuple(replace(span, name=name, capacity=size) for name, size in names.items())
    tensors = tuple(t for t in plan.tensors if t is not role) + tuple(replace(role, name=name) for name in names)
    largest = runner._shapes.largest(runner._held.contexts, runner.max_batch, runner.max_chunk, runner.max_logits) | {
        name: (size,) for name, size in names.items()
    }
    buffers = StepBuffers(runner._cuda, replace(plan, spans=spans, tensors=tensors), largest, 3)
    buffers.allocate()
    for name, size in names.items():
        held = module.machine.device[buffers.addresses[name]].view(np.int64)
        np.testing.assert_array_equal(held, np.arange(size))


def test_float16_logits(open_engine: Open, tmp_path: Path) -> None:
    path = write_decoder(tmp_path / "model.onnx", DecoderConfig(dtype="float16", capacity=32))
    runner, _ = open_engine(path)
    check_decode(Pair(runner, OnnxRuntimeRunner(path, max_batch=3)))


def test_fewer_rows_than_the_engine_was_built_for(model: Path, open_engine: Open) -> None:
    runner, module = open_engine(model, max_batch=1)
    pair = Pair(runner, OnnxRuntimeRunner(model, max_batch=1))
    pair.check_step(0, 1, 8)
    pair.check_step(0, 1, 1)
    assert runner.max_batch == 1
    assert module.machine.used < open_engine(model)[1].machine.used


def test_facts(model: Path, open_engine: Open) -> None:
    runner, _ = open_engine(model)
    assert runner.name == "TensorRT for RTX 1.7.1.116, NVIDIA Fake 90"
    assert (runner.max_batch, runner.max_chunk, runner.vocab, runner.max_positions) == (3, 8, 256, 4096)
    assert runner.identity() == OnnxRuntimeRunner(model).identity()


def test_runs_in_any_thread(model: Path, open_engine: Open) -> None:
    """CUDA's current context is per thread."""
    runner, _ = open_engine(model)
    pair = Pair(runner, OnnxRuntimeRunner(model, max_batch=3))
    with ThreadPoolExecutor(1) as pool:
        pool.submit(check_decode, pair, 3).result()
    pair.check_step(0, 3, 1)


def test_two_gpus_in_one_thread(model: Path, open_engine: Open) -> None:
    """Whoever opens or uses the other one leaves it current."""
    pairs = [Pair(open_engine(model)[0], OnnxRuntimeRunner(model, max_batch=3)) for _ in range(2)]
    for length in (4, 1, 1):
        for pair in pairs:
            pair.check_step(0, 2, length)
    for pair in pairs:
        pair.check_rows(1, 6)
        pair.engine.close()


def test_closes_once_and_for_all(model: Path, open_engine: Open) -> None:
    runner, module = open_engine(model)
    check_decode(Pair(runner, OnnxRuntimeRunner(model, max_batch=3)))
    runner.close()
    runner.close()
    machine = module.machine
    assert (machine.used, len(machine.pinned), machine.graphs) == (0, 0, 0)
    assert not [c for c in module.contexts if c() is not None]
    with pytest.raises(SessionError, match="the runner is closed; open the engine again"):
        runner.step(StepBatch(0, np.zeros((1, 1), np.int64), np.zeros(1, np.int64)))


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_interrupt_at_any_line_leaves_the_next_steps_right(open_engine: Open, model: Path, backend: str) -> None:
    """Shapes and addresses that are half set, a stream that records, copies on their way: none reaches another step."""
    prompts = ([5, 9, 3], list(range(10, 23)), [7, 7])
    config = GenerationConfig(max_new_tokens=9)
    with DecodeSession(OnnxRuntimeRunner(model, max_batch=3, max_chunk=8)) as plain:
        wanted = [result.tokens for result in plain.generate(prompts, config)]
    session = DecodeSession(open_engine(model, backend)[0])
    rng, left, interrupts = random.Random(3), 0, 0

    def trace(frame: Any, event: str, _: Any) -> Any:
        nonlocal left, interrupts
        if "trt_kvcache" not in frame.f_code.co_filename:
            return None  # the driver's and TensorRT's own calls, which no signal interrupts
        left -= event == "line" and "runtime/trt/" in frame.f_code.co_filename
        if left == 0:
            sys.settrace(None)
            interrupts += 1
            raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    for _ in range(60):
        slots = [session.add(prompt, config) for prompt in prompts]
        tokens: dict[int, list[int | None]] = {slot: [] for slot in slots}
        left = rng.randrange(1, 1500)
        while session.running:
            sys.settrace(trace if left > 0 else None)
            try:
                with suppress(KeyboardInterrupt, SessionError):
                    for event in session.step():
                        tokens[event.sequence].append(event.token)
            finally:
                sys.settrace(before)
        for slot, want in zip(slots, wanted, strict=True):
            assert tokens[slot] == want[: len(tokens[slot])]
    assert interrupts > 20
    assert session.generate(prompts, config)[1].tokens == wanted[1]
    session.close()

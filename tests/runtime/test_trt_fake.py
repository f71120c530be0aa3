"""The fake refuses what TensorRT refuses: without this, tests that pass on it would show nothing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from decoders import DecoderConfig, write_decoder
from runtime.engines import open_engine, write_engine
from runtime.fake_cuda import STREAM, BrokenRuleError, Machine
from runtime.fake_tensorrt import MAGIC, AllocationStrategy

from trt_kvcache.runtime.runner import StepBatch
from trt_kvcache.runtime.trt.trt_runner import TensorRTRunner

BATCH = StepBatch(0, np.ones((1, 1), np.int64), np.zeros(1, np.int64))


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = write_decoder(tmp_path_factory.mktemp("model") / "model.onnx", DecoderConfig())
    return write_engine(path, backend="tensorrt")


@pytest.fixture
def runner(engine: Path) -> Iterator[TensorRTRunner]:
    machine = Machine()
    runner = open_engine(engine, machine, backend="tensorrt")
    runner.step(BATCH)
    yield runner
    machine.queue.clear()
    runner.close()


@pytest.fixture
def context(runner: TensorRTRunner) -> Any:
    """The context for decoding, bound and shaped."""
    return runner._contexts[1]._context


def errors(context: Any) -> str:
    return str(context.error_recorder.take())


def test_two_addresses_for_one_cache(context: Any) -> None:
    address = context._addresses["key_cache.1"]
    assert context.set_tensor_address("updated_key_cache.0", address)
    assert context.execute_async_v3(STREAM) is False
    assert "updated_key_cache.0 must have the address of key_cache.0" in errors(context)


def test_shapes_outside_the_profile(context: Any) -> None:
    assert context.set_input_shape("input_ids", (1, 2)) is False
    assert "(1, 2) is not within (1, 1) to (3, 1) of profile 1" in errors(context)
    assert context.set_input_shape("input_ids", (4, 1)) is False
    assert context.set_input_shape("input_ids", (1,)) is False
    assert context.set_input_shape("logits", (1, 1, 256)) is False
    assert context.set_input_shape("input_ids", (3, 1)) is True


def test_profile_switch_keeps_addresses_and_drops_shapes(context: Any) -> None:
    held = dict(context._addresses)
    assert context.set_optimization_profile_async(0, STREAM)
    assert context._addresses == held
    assert context.execute_async_v3(STREAM) is False
    assert "the shape of input_ids is not specified" in errors(context)
    assert context.set_optimization_profile_async(2, STREAM) is False


def test_a_new_context_needs_everything(context: Any) -> None:
    fresh = context._engine.create_execution_context(AllocationStrategy.USER_MANAGED)
    fresh.error_recorder = context.error_recorder
    assert fresh.set_input_shape("input_ids", (1, 1)) is False
    assert "no optimization profile is selected" in errors(context)
    fresh.set_optimization_profile_async(1, STREAM)
    for name, shape in context._shapes.items():
        assert fresh.set_input_shape(name, shape)
    assert fresh.execute_async_v3(STREAM) is False
    assert "has no address" in errors(context)
    for name, address in context._addresses.items():
        fresh.set_tensor_address(name, address)
    with pytest.raises(BrokenRuleError, match="without activation memory"):
        fresh.execute_async_v3(STREAM)
    with pytest.raises(BrokenRuleError, match="activation memory of its own"):
        context._engine.create_execution_context(AllocationStrategy.STATIC)


def test_alignment(context: Any) -> None:
    with pytest.raises(BrokenRuleError, match="no multiple of 256"):
        context.set_tensor_address("input_ids", context._addresses["input_ids"] + 8)


def test_memory_that_was_freed(runner: TensorRTRunner, context: Any) -> None:
    machine = context._machine
    address = context._addresses["key_cache.0"]
    block = machine.device.pop(address)
    with pytest.raises(BrokenRuleError, match=r"key_cache.0: .* not within memory that is allocated"):
        runner.step(BATCH)
    machine.device[address] = block


def test_memory_that_overlaps(context: Any) -> None:
    for name in ("value_cache.0", "updated_value_cache.0"):
        context.set_tensor_address(name, context._addresses["key_cache.0"])
    assert context.execute_async_v3(STREAM)
    with pytest.raises(BrokenRuleError, match="key_cache.0 and value_cache.0 overlap"):
        context._machine.drain()


def test_graph_of_a_context_that_was_changed(runner: TensorRTRunner) -> None:
    for _ in range(3):
        runner.step(BATCH)
    assert runner.graphs is not None
    (recorded,) = runner.graphs._recorded.values()
    with pytest.raises(BrokenRuleError, match="the context of a recorded graph is changed"):
        recorded.context._context.set_input_shape("input_ids", (2, 1))
    kept, recorded.context._context = recorded.context._context, runner._contexts[0]._context
    kept._version += 1  # what another setting of its own would do
    with pytest.raises(BrokenRuleError, match="whose context was changed or is gone"):
        runner.step(BATCH)


def test_recording_before_a_first_run(runner: TensorRTRunner, context: Any) -> None:
    context.set_input_shape("attention_span", (32,))
    context._machine.recording = []
    assert context.execute_async_v3(STREAM) is False
    context._machine.recording = None
    assert "deferred updates cannot be recorded" in errors(context)


def test_pinned_memory_that_is_written_too_early(runner: TensorRTRunner) -> None:
    """Copies wait on the stream: what is in pinned memory when they run is what arrives."""
    cuda, machine = runner._cuda, runner._resources.trt.module.machine
    pinned, target = cuda.allocate_pinned(4), cuda.allocate(4)
    pinned.data[:] = 1
    cuda.upload(target, pinned.address, 4)
    pinned.data[:] = 2
    cuda.sync()
    assert machine.device[target].tolist() == [2, 2, 2, 2]
    cuda.upload(target, cuda.allocate_pinned(8).address, 5)
    with pytest.raises(BrokenRuleError, match="where it is copied: 5 bytes"):
        cuda.sync()


def test_memory_that_is_freed_before_it_was_used(runner: TensorRTRunner) -> None:
    """Freeing does not wait; `Cuda.free` and `Cuda.close` do."""
    cuda, machine = runner._cuda, runner._resources.trt.module.machine
    target, driver = cuda.allocate(8), machine.bindings().driver
    cuda.zero_rows(target, 8, 8, 1)
    with pytest.raises(BrokenRuleError, match="fill: 8 bytes"):
        driver.cuMemFree(target)
    machine.queue.clear()
    del cuda._memory[target]
    target = cuda.allocate(8)
    cuda.zero_rows(target, 8, 8, 1)
    cuda.free(target)


def test_what_no_recording_takes(runner: TensorRTRunner) -> None:
    cuda, machine = runner._cuda, runner._resources.trt.module.machine
    pinned, held, driver = cuda.allocate_pinned(8), cuda.allocate(8), machine.bindings().driver
    calls = (
        lambda: driver.cuMemAlloc(8), lambda: driver.cuMemFree(held), lambda: driver.cuMemAllocHost(8),
        lambda: driver.cuMemFreeHost(pinned.address), lambda: driver.cuStreamSynchronize(STREAM),
    )  # fmt: skip
    for call in calls:
        assert not int(driver.cuStreamBeginCapture(STREAM, driver.CUstreamCaptureMode(1))[0])
        assert call()[0].name == "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED"
        assert driver.cuStreamEndCapture(STREAM)[0].name == "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED"


def test_another_stream(runner: TensorRTRunner, context: Any) -> None:
    with pytest.raises(BrokenRuleError, match="work on stream 0x1, which nothing orders"):
        context.execute_async_v3(1)
    with pytest.raises(BrokenRuleError, match="work on stream 0x2"):
        context._machine.bindings().driver.cuMemsetD8Async(context._addresses["input_ids"], 0, 8, 2)


def test_a_context_that_is_gone_before_its_step_has_run(runner: TensorRTRunner, context: Any) -> None:
    fresh = context._engine.create_execution_context(AllocationStrategy.USER_MANAGED)
    fresh.set_optimization_profile_async(1, STREAM)
    for name, shape in context._shapes.items():
        fresh.set_input_shape(name, shape)
    for name, address in context._addresses.items():
        fresh.set_tensor_address(name, address)
    fresh.set_device_memory(*context._memory)
    assert fresh.execute_async_v3(STREAM)
    del fresh
    with pytest.raises(BrokenRuleError, match="whose context was changed or is gone"):
        context._machine.drain()


def test_tensorrt_needs_its_gpu(runner: TensorRTRunner, context: Any) -> None:
    other = Machine()
    other.bindings().core.Device(0).set_current()
    for call in (
        lambda: context._engine.create_execution_context(AllocationStrategy.USER_MANAGED),
        lambda: context.set_optimization_profile_async(1, STREAM),
        lambda: context.execute_async_v3(STREAM),
        lambda: runner._resources.trt.runtime.deserialize_cuda_engine(MAGIC),
    ):
        with pytest.raises(BrokenRuleError, match="while another GPU is current"):
            call()


def test_shapes_are_no_tuples_and_may_have_no_rank(runner: TensorRTRunner, context: Any) -> None:
    found = context.get_tensor_shape("logits")
    assert not isinstance(found, tuple)
    assert (len(found), *found) == (3, 1, 1, 256)
    context._module.faults["no_shapes"] = "reshape changes volume"
    found = context.get_tensor_shape("logits")
    assert tuple(size for size in found) == ()  # as a number has
    with pytest.raises(ValueError, match="__len__"):
        len(found)
    assert errors(context) == "reshape changes volume"

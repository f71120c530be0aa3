"""The fake refuses what TensorRT refuses: without this, tests that pass on it would show nothing."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from decoders import DecoderConfig, write_decoder
from runtime.engines import open_engine, write_engine
from runtime.fake_cuda import STREAM, BrokenRuleError, Machine
from runtime.fake_tensorrt import AllocationStrategy

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
    return runner.resources.contexts[1]._context


def errors(context: Any) -> str:
    return str(context.error_recorder.take())


def test_two_addresses_for_one_cache(context: Any) -> None:
    address = context._addresses["key_cache.1"]
    assert context.set_tensor_address("updated_key_cache.0", address)
    assert context.execute_async_v3(STREAM) is False
    assert "updated_key_cache.0 must have the address of key_cache.0" in errors(context)


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


def test_memory_that_was_freed(runner: TensorRTRunner, context: Any) -> None:
    machine = context._machine
    address = context._addresses["key_cache.0"]
    block = machine.device.pop(address)
    with pytest.raises(BrokenRuleError, match=r"key_cache.0: .* not within memory that is allocated"):
        runner.step(BATCH)
    machine.device[address] = block

"""Copies, graphs and views of `runtime.cuda`, on memory that enforces CUDA's rules."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from runtime import fake_cuda
from runtime.fake_cuda import Machine

from trt_kvcache.errors import BackendError
from trt_kvcache.runtime.trt import cuda


@pytest.fixture
def machine() -> Machine:
    return Machine()


@pytest.fixture
def gpu(machine: Machine) -> Iterator[cuda.Cuda]:
    gpu = cuda.Cuda(0, machine.bindings())
    yield gpu
    gpu.close()


@pytest.mark.parametrize("most", [2**31 - 1, 100])
@pytest.mark.parametrize("seed", range(8))
def test_copies_of_runs(gpu: cuda.Cuda, monkeypatch: pytest.MonkeyPatch, seed: int, most: int) -> None:
    """Of every form, also where runs are farther apart than CUDA takes in one copy."""
    monkeypatch.setattr(cuda, "_MAX_PITCH", most)
    monkeypatch.setattr(fake_cuda, "MAX_PITCH", most)
    rng = np.random.default_rng(seed)
    for _ in range(12):
        height, width = int(rng.integers(1, 5)), int(rng.integers(1, 60))
        pitch = width + int(rng.choice([0, 3, 90]))
        data = rng.integers(0, 256, (height, pitch), np.uint8)
        expected = np.zeros_like(data)
        expected[:, :width] = data[:, :width]
        source, target = gpu.allocate(data.size), gpu.allocate(data.size)
        packed, host = gpu.allocate_pinned(height * width), gpu.allocate_pinned(data.size)

        def seen(address: int) -> Any:
            gpu.download_rows(host.address, address, data.size, data.size, 1)  # noqa: B023
            gpu.sync()
            return host.data.reshape(data.shape).copy()  # noqa: B023

        packed.data[:] = data[:, :width].reshape(-1)
        gpu.upload_rows(source, packed.address, pitch, width, height)
        gpu.copy_rows(target, source, pitch, width, height)
        np.testing.assert_array_equal(seen(target), expected)
        packed.data[:] = 0
        gpu.download_rows(packed.address, target, pitch, width, height)
        gpu.sync()
        np.testing.assert_array_equal(packed.data, data[:, :width].reshape(-1))
        gpu.zero_rows(target, pitch, width - width // 2, height)
        expected[:, : width - width // 2] = 0
        np.testing.assert_array_equal(seen(target), expected)


def test_a_recording_that_fails_says_why_and_leaves_the_stream_usable(gpu: cuda.Cuda, machine: Machine) -> None:
    def wait() -> None:
        gpu.sync()

    def complain() -> None:
        raise ValueError("no such tensor")

    def hush() -> None:
        machine.invalid = True

    for work, error, words in (
        (wait, BackendError, "cuStreamSynchronize failed: CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED"),
        (complain, ValueError, "no such tensor"),
        (hush, BackendError, "cuStreamEndCapture failed: CUDA_ERROR_STREAM_CAPTURE_INVALIDATED"),
    ):
        with pytest.raises(error, match=words):
            gpu.capture(work)
        assert (machine.templates, machine.graphs) == (0, 0)
        gpu.sync()
    machine.instantiable = False
    with pytest.raises(BackendError, match="cuGraphInstantiate failed: CUDA_ERROR_OUT_OF_MEMORY"):
        gpu.capture(lambda: None)
    machine.instantiable = True
    graph = gpu.capture(lambda: None)
    assert (machine.templates, machine.graphs) == (0, 1)
    gpu.launch(graph)
    gpu.discard(graph)
    assert machine.graphs == 0


@pytest.mark.slow
def test_free_memory_of_a_gpu_that_shares_the_machines(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA counts pages of files that were read, as the engine's, for memory in use: the system gives them back."""
    machine.integrated = True
    shared = cuda.Cuda(0, machine.bindings())
    shared.allocate(machine.total // 2)
    for available, expected in ((1 << 20, machine.total // 2), (900 << 20, 900 << 20), (1 << 40, machine.total)):
        monkeypatch.setattr(cuda, "free_memory", lambda available=available: available)
        assert shared.free_memory() == (expected, machine.total)
    shared.close()
    machine.integrated = False
    own = cuda.Cuda(0, machine.bindings())
    own.allocate(machine.total // 2)
    assert own.free_memory() == (machine.total // 2, machine.total)
    own.close()


@pytest.mark.parametrize(
    ("kind", "given"),
    [
        (np.float16, np.float16),
        (np.int8, np.int8),
        (ml_dtypes.bfloat16, np.uint16),
        (ml_dtypes.float8_e4m3fn, np.uint8),
    ],
)
def test_views_have_types_that_dlpack_has(gpu: cuda.Cuda, kind: Any, given: Any) -> None:
    view = np.from_dlpack(gpu.view(gpu.allocate(64), (2, 4, 2), np.dtype(kind), gpu))
    assert (view.shape, view.dtype) == ((2, 4, 2), given)

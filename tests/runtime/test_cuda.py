"""Copies, graphs and views of `runtime.trt.cuda`: on a fake that enforces its rules, and on the real cuda-python."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from needs import c_compiler
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
    """Runs of every form, also such as are farther apart than CUDA takes in one copy."""
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


# `runtime.trt.cuda` through the real cuda.core and cuda.bindings, on a driver in C that needs no GPU.


HERE = Path(__file__).parent

SCRIPT = """
import ctypes, threading
import numpy as np
from runtime import test_cuda
from trt_kvcache.engine.diagnosis import find_gpus
from trt_kvcache.errors import BackendError
from trt_kvcache.plugins.choice import KERNELS, compile_choice
from trt_kvcache.runtime.trt import cuda

class Patch:
    setattr = staticmethod(setattr)

def elsewhere(work):
    problems = []
    def run():
        try:
            work()
        except BackendError as error:
            problems.append(str(error))
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return "".join(problems)

assert find_gpus()[0] == "13.5"
gpu = cuda.Cuda(0, cuda.cuda_bindings())
assert (gpu.name, gpu.compute_capability, gpu.driver_version) == ("Stand-in", "9.0", (13, 5))
assert gpu.free_memory() == (4 << 30, 8 << 30)
for seed, most in ((0, 2**31 - 1), (1, 100)):
    test_cuda.test_copies_of_runs(gpu, Patch, seed, most)

address = gpu.allocate(64)
graph = gpu.capture(lambda: gpu.zero_rows(address, 64, 64, 1))
gpu.launch(graph)
gpu.discard(graph)
for forbidden in (gpu.sync, lambda: gpu.allocate(1)):
    try:
        gpu.capture(forbidden)
    except BackendError as error:
        assert "STREAM_CAPTURE_UNSUPPORTED (as the stand-in says)" in str(error)
    else:
        raise AssertionError("it was recorded")

view = gpu.view(address, (4, 8), np.dtype(np.float16), gpu)
assert (view.shape, view.dtype, view.__dlpack_device__()) == ((4, 8), np.float16, (2, 0))
assert view.__dlpack__() is not None

made = compile_choice("float16", "sm_90", driver=gpu.driver_version)
found = gpu.load_kernels(made.code, made.name, KERNELS)
sizes = np.int32(1), np.int32(-3), np.int32(4), np.int64(-5)
def launch():
    gpu.launch_kernel(found["best_token"], 5, 128, 0xABC00, 0, 1 << 40, *sizes)
launch()
assert "cannot launch a kernel: STATUS_201" in elsewhere(launch)
assert "INVALID_CONTEXT" in elsewhere(gpu.sync)
assert elsewhere(lambda: (gpu.activate(), launch(), gpu.free(gpu.allocate(8)))) == ""

def close():
    with gpu.activated():
        gpu.close()
    _, context = gpu._driver.cuCtxGetCurrent()
    assert not int(context)
assert elsewhere(close) == ""
gpu.close()
print("left", ctypes.CDLL("libcuda.so.1").left_over())
"""


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a ``libcuda.so.1``."""
    compiler = c_compiler()
    folder = tmp_path_factory.mktemp("driver")
    flags = ["-shared", "-fPIC", "-fvisibility=hidden", "-o", str(folder / "libcuda.so.1")]
    subprocess.run([compiler, *flags, str(HERE / "stand_in_driver.c")], check=True, capture_output=True)
    return folder


def test_everything_that_is_called(driver: Path) -> None:
    """Memory, copies of every form, graphs, views, kernels; in threads that have no context, and that close."""
    paths = os.pathsep.join(map(str, (HERE.parent, HERE.parents[1])))
    env = os.environ | {"LD_LIBRARY_PATH": str(driver), "PYTHONPATH": paths}
    done = subprocess.run([sys.executable, "-W", "error", "-c", SCRIPT], env=env, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    launched = "best_token 5 128 abc00 0 10000000000 1 -3 4 -5"
    assert done.stdout.splitlines() == [launched, launched, "left 0"]

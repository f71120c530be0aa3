"""`runtime.trt.cuda` through the real cuda.core and cuda.bindings, on a driver in C that needs no GPU.

What these accept, convert and check is theirs; only the driver below them is a stand-in (``stand_in_driver.c``).
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from needs import c_compiler

HERE = Path(__file__).parent

SCRIPT = """
import ctypes, threading
import numpy as np
from runtime import test_cuda
from trt_kvcache.engine.doctor import find_gpus
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
    gpu.launch_kernel(found["best_token"], 5, 128, 0xABC00, 1 << 40, *sizes)
launch()
assert "cannot launch a kernel: STATUS_201" in elsewhere(launch)
assert "INVALID_CONTEXT" in elsewhere(gpu.sync)
assert elsewhere(lambda: (gpu.activate(), launch(), gpu.free(gpu.allocate(8)))) == ""

def close():
    with gpu.apart():
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
    launched = "best_token 5 128 abc00 10000000000 1 -3 4 -5"
    assert done.stdout.splitlines() == [launched, launched, "left 0"]

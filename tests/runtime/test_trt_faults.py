"""Steps that fail, sessions that nobody closes: nothing is lost, and nobody else disturbed."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from runtime.engines import open_engine, write_engine
from runtime.fake_cuda import Machine, Status

from trt_kvcache.errors import SessionError
from trt_kvcache.runtime.runner import StepBatch


def test_step_that_fits_no_profile(engine: Path) -> None:
    runner = open_engine(engine)
    before = runner.read_row("key_cache.0", 0, 64)
    with pytest.raises(
        SessionError, match="a step of 1 sequences and 9 tokens each fits none of the engine's profiles"
    ):
        runner.step(StepBatch(0, np.zeros((1, 9), np.int64), np.zeros(1, np.int64)))
    np.testing.assert_array_equal(runner.read_row("key_cache.0", 0, 64), before)
    runner.close()


def test_step_that_tensorrt_refuses(engine: Path) -> None:
    runner: Any = open_engine(engine)
    batch = StepBatch(0, np.ones((1, 4), np.int64), np.zeros(1, np.int64))
    expected = runner.step(batch).copy()
    runner.module.faults["fail_steps"] = "CUDA error 2 in enqueue: out of memory"
    with pytest.raises(SessionError, match="TensorRT for RTX .* cannot run a step: .*Error.*out of memory"):
        runner.step(batch)
    del runner.module.faults["fail_steps"]
    np.testing.assert_array_equal(runner.step(batch), expected)  # the session lives on
    runner.close()


@pytest.mark.parametrize("backend", ["tensorrt", "tensorrt-rtx"])
@pytest.mark.parametrize("steps", [0, 4], ids=["at first", "while steps are recorded"])
def test_fault_of_the_gpu(steps: int, backend: str, engine: Path) -> None:
    """Every call of CUDA fails from here on. Graphs go, and contexts before the memory that they are bound to."""
    machine = Machine()
    runner: Any = open_engine(write_engine(engine.with_suffix(".onnx"), backend=backend), machine, backend=backend)
    batch = StepBatch(0, np.ones((1, 1), np.int64), np.zeros(1, np.int64))
    for _ in range(steps):
        runner.step(batch)
    machine.fault = Status.CUDA_ERROR_ILLEGAL_ADDRESS
    words = r"CUDA: cuStreamSynchronize failed: CUDA_ERROR_ILLEGAL_ADDRESS \(an illegal memory access"
    with pytest.raises(SessionError, match=words):
        runner.step(batch)
    runner.close()
    assert (machine.used, machine.graphs) == (0, 0)
    assert not [c for c in runner.module.contexts if c() is not None]
    assert runner.module.hung == []


def test_compiled_kernels_are_kept(engine: Path) -> None:
    machine, batch = Machine(), StepBatch(0, np.ones((1, 4), np.int64), np.zeros(1, np.int64))

    def run(**arguments: Any) -> list[str]:
        runner: Any = open_engine(engine, machine, **arguments)
        runner.step(batch)
        runner.close()
        return list(runner.module.compiled)

    file = engine.with_name("model.engine.sm90.kernels")
    assert len(run()) == 1
    assert file.read_bytes().startswith(b"KERNELS sm90")
    assert run() == []
    file.write_bytes(b"of another GPU")  # refused by TensorRT, and replaced
    assert len(run()) == 1
    assert run() == []
    folder = engine.parent / "kernels"
    folder.mkdir()
    assert len(run(kernel_cache=folder)) == 1
    assert (folder / file.name).exists()
    with pytest.warns(RuntimeWarning, match="compiled kernels are not kept for the next start: .*no such folder"):
        run(kernel_cache=folder / "missing")


def test_who_forgets_to_close_loses_nothing(engine: Path) -> None:
    machine = Machine()
    runner: Any = open_engine(engine, machine)
    module = runner.module
    for start in range(4):  # steps that are recorded, too
        runner.step(StepBatch(0, np.zeros((3, 1), np.int64), np.full(3, start)))
    del runner
    gc.collect()
    assert (machine.used, len(machine.pinned), machine.graphs) == (0, 0, 0)
    assert module.hung == []
    assert list(engine.parent.glob("*.kernels"))


@pytest.mark.parametrize("same", [True, False], ids=["one GPU", "two GPUs"])
def test_who_forgets_to_close_disturbs_nobody(engine: Path, same: bool) -> None:
    """Garbage is collected at any time: here while another runner records, or calls another GPU."""
    machine = Machine()
    runner, other = open_engine(engine, machine), open_engine(engine, machine if same else Machine())
    cuda, held = runner._cuda, machine.used
    kept = [other]
    del other

    def work() -> None:
        cuda.zero_rows(address, 8, 8, 1)
        kept.clear()
        gc.collect()

    with runner.running():
        address = cuda.allocate(8)
        cuda.sync()
        cuda.discard(cuda.capture(work))
        cuda.sync()
        cuda.free(address)
    assert machine.used == (held // 2 if same else held)
    runner.step(StepBatch(0, np.ones((1, 4), np.int64), np.zeros(1, np.int64)))
    runner.close()
    assert machine.used == 0


def test_nothing_is_taken_from_under_a_thread(engine: Path) -> None:
    """That still runs a step when the process ends."""
    machine = Machine()
    runner = open_engine(engine, machine)
    with runner.running():
        runner._held.close()
        assert machine.used
    runner.close()
    assert not machine.used


def test_the_end_of_the_process_closes_what_is_open(engine: Path) -> None:
    """Before Python takes itself apart: TensorRT may still report to it from a thread."""
    program = f"""
import atexit
from pathlib import Path
from runtime.engines import open_engine
from runtime.fake_cuda import Machine
machine = Machine()
atexit.register(lambda: print(machine.used, machine.allocations > 0))
runner = open_engine(Path({str(engine)!r}), machine)
"""
    tests = Path(__file__).parents[1]
    paths = os.pathsep.join([str(tests), str(tests.parent / "scripts"), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", program], env=os.environ | {"PYTHONPATH": paths}, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert (done.stdout.strip(), done.returncode) == ("0 True", 0), done.stderr

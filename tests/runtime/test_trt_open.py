"""Opening an engine: what does not fit is refused, in words that say what to do, and nothing stays allocated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from decoders import DecoderConfig, write_decoder
from needs import needs_nvrtc
from runtime.fake_cuda import Machine
from runtime.fake_engines import write_engine
from runtime.fake_tensorrt import Invalidity, fake_module
from runtime.opened import check_refused, edit, open_

from trt_kvcache.errors import BackendError, ManifestError, OptionError, SessionError, UnsupportedModelError
from trt_kvcache.runtime.runner import StepBatch
from trt_kvcache.runtime.trt.admission import Need, admit
from trt_kvcache.runtime.trt.cuda import CudaBindings, taken
from trt_kvcache.runtime.trt.runner import Bindings, TensorRTRunner


def test_no_driver(engine: Path) -> None:
    class NoDriver:
        def cuInit(self, flags: int) -> Any:
            raise RuntimeError('"cuda" is an NVIDIA driver library and can only be found via system search.')

    bindings = Bindings(fake_module(Machine()), CudaBindings(None, NoDriver()))
    with pytest.raises(
        BackendError, match="no driver works here: .*system search.*; install the NVIDIA driver, or run"
    ):
        TensorRTRunner(engine, bindings=bindings)


def test_no_such_gpu(engine: Path) -> None:
    check_refused(BackendError, "there is no GPU number 1: the driver finds 1, counted from 0", engine, device=1)
    check_refused(BackendError, "there is no GPU number 0: the driver finds 0", engine, machine=Machine(devices=0))


def test_engine_of_another_version(engine: Path) -> None:
    words = (
        r"TensorRT for RTX 1\.9\.0\.1 cannot open this engine, built with version 1\.7\.1\.116, on NVIDIA Fake 90 "
        r"\(compute capability 9\.0\): The engine plan file is not compatible \[VERSION_MISMATCH\]; install version "
        r"1\.7\.1\.116, or build the engine again with 1\.9\.0\.1"
    )
    refuse = {"refuse": "The engine plan file is not compatible", "diagnostics": Invalidity.VERSION_MISMATCH}
    check_refused(BackendError, words, engine, version="1.9.0.1", **refuse)


def test_engine_for_another_gpu(engine: Path) -> None:
    edit(engine, lambda m: replace(m, compute_capabilities=("sm89",)))
    here = "build it again on this machine with --compute-capabilities current, which is sm90"  # sm90 is no name for it
    words = rf"1\.7\.1\.116 for sm89, on .*: no such kernel \[UNSUPPORTED_CC\]; {here}"
    check_refused(BackendError, words, engine, refuse="no such kernel", diagnostics=Invalidity.UNSUPPORTED_CC)
    edit(engine, lambda m: replace(m, compute_capabilities=()))
    check_refused(BackendError, here, engine, refuse="no such kernel")
    never = "TensorRT-RTX does not support this compute capability, so the engine cannot be rebuilt for it."
    check_refused(BackendError, f"{never}; other backends may know this GPU", engine, refuse=never)
    edit(engine, lambda m: replace(m, compute_capabilities=("sm90",)))
    check_refused(
        BackendError, "other backends may know this GPU .*, and the CPU runs", engine, refuse="no such kernel"
    )
    ada = Machine(capability=(8, 9))
    check_refused(BackendError, "again with --compute-capabilities sm89", engine, machine=ada, refuse="no such kernel")
    old = Machine(driver=12_080)
    update = r"update the NVIDIA driver, which is for CUDA 12\.8"
    diagnosed = {"refuse": "?", "diagnostics": Invalidity.OLD_CUDA_DRIVER}
    check_refused(BackendError, update, engine, machine=old, **diagnosed)
    # What TensorRT for RTX 1.7.1 says then, and diagnoses nothing: CUDA fails before it reads the engine.
    words = "Error Code 1: Cuda Runtime (cudaError 35: CUDA driver version is insufficient for CUDA runtime version"
    check_refused(BackendError, update, engine, machine=old, refuse=words)
    # Where the library has no code for the GPU, and its PTX is too new for the driver, perhaps not before a step.
    words = "Cuda Runtime (cudaError 222: the provided PTX was compiled with an unsupported toolchain.)"
    check_refused(BackendError, update, engine, machine=old, refuse=words)
    runner = open_(engine, Machine(), fail_steps=words)
    with pytest.raises(SessionError, match="cannot run a step: .*; update the NVIDIA driver"):
        runner.step(StepBatch(0, np.ones((1, 1), np.int64), np.zeros(1, np.int64)))
    runner.close()


def test_tensorrt_has_no_diagnostics(engine: Path) -> None:
    edit(engine, lambda m: replace(m, backend="tensorrt", backend_version="11.4.0.106"))
    machine = Machine()
    module = fake_module(machine, rtx=False, version="11.4.0.106", refuse="Engine deserialization failed.")
    with pytest.raises(BackendError, match=r"TensorRT 11\.4\.0\.106 cannot open .*Engine deserialization failed\.; "):
        TensorRTRunner(engine, bindings=Bindings(module, machine.bindings()))


def test_memory_is_admitted_before_it_is_taken(engine: Path) -> None:
    # 4 caches of 8 KiB for each of 3 rows, the engine file of about half a megabyte, 128 MiB in reserve.
    size = engine.stat().st_size
    machine = Machine(total=(128 << 20) + size + 2 * 32768 + 1000)
    words = (
        r"NVIDIA Fake 90 has 128\.\d MiB of 128\.\d MiB free, and 128\.\d MiB are needed: weights .*, caches for 3 "
        r"sequences 96\.0 KiB, reserve 128\.0 MiB; open it with max_batch 2 instead of 3, build the engine again with "
        r"a smaller --capacity or --max-chunk, or free memory"
    )
    check_refused(BackendError, words, engine, machine=machine)
    assert machine.allocations == 0
    with pytest.raises(BackendError, match="not even one sequence fits: build the engine again"):
        open_(engine, Machine(total=(128 << 20) + 1000), max_batch=1)


def test_memory_that_only_the_engine_knows(engine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runtime.fake_tensorrt.ACTIVATIONS", 1 << 28)
    machine = Machine(total=1 << 28)
    words = (
        r"needed: caches for 3 sequences 96\.0 KiB, activations 258\.0 MiB, inputs and outputs [\d.]+ KiB, choice of "
        r"tokens 64\.0 KiB, reserve"
    )
    check_refused(BackendError, words, engine, machine=machine)
    assert machine.allocations == 0


@needs_nvrtc
@pytest.mark.parametrize(("rows", "capacity"), [(1, 64), (3, 64), (20, 64), (2, 9216)])
def test_every_byte_is_asked_for(rows: int, capacity: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is admitted is what the driver takes, choice of tokens included."""
    asked: list[int] = []

    def counting(needs: Sequence[Need], *more: Any) -> None:
        asked[:] = [need.size for need in needs]
        admit(needs, *more)

    monkeypatch.setattr("trt_kvcache.runtime.trt.runner.admit", counting)
    model = write_decoder(tmp_path / "model.onnx", DecoderConfig(capacity=capacity, positions=16))
    machine = Machine()
    runner = open_(write_engine(model, max_batch=rows), machine)
    assert runner.host_choice == ""
    assert sum(asked) == runner.device_bytes == machine.used
    runner.close()


def test_the_driver_takes_memory_in_pages() -> None:
    """Three buffers of 0.6 MiB for each row: whole pages from 1 MiB on, so that the last row that fits is not where a
    page is full."""
    needs = [Need("caches", caches_of(8), caches_of)]
    free = (128 << 20) + 3 * (4 << 20)
    with pytest.raises(BackendError, match=r"146\.0 MiB are needed: caches 18\.0 MiB, .* open it with max_batch 6 "):
        admit(needs, free, 1 << 30, "A GPU", 8)
    admit([Need("caches", caches_of(6))], free, 1 << 30, "A GPU", 6)


def caches_of(rows: int) -> int:
    return 3 * taken(rows * 600 << 10)


def test_more_rows_than_built_for(engine: Path) -> None:
    check_refused(
        OptionError, "max_batch is 4; this engine was built for 1 to 3: build it again with", engine, max_batch=4
    )
    check_refused(OptionError, "max_batch is 0; it must be at least 1", engine, max_batch=0)
    check_refused(OptionError, "max_chunk is 9; .* 1 to 8: build it again with --max-chunk 9", engine, max_chunk=9)


def test_shorter_chunks_need_less_memory(engine: Path) -> None:
    short, long = open_(engine, max_chunk=2), open_(engine)
    assert (short.max_chunk, long.max_chunk) == (2, 8)
    assert short.device_bytes < long.device_bytes
    assert short.step(StepBatch(0, np.ones((3, 2), np.int64), np.zeros(3, np.int64))).shape == (3, 1, 256)
    short.close()
    long.close()


def test_rows_that_cannot_be_addressed(tmp_path: Path) -> None:
    config = DecoderConfig(capacity=10, kv_heads=1, query_heads=2, head_size=4)
    engine = write_engine(write_decoder(tmp_path / "model.onnx", config))
    check_refused(
        ManifestError, "cache 'key_cache.0' takes 160 bytes, and TensorRT binds memory at multiples of 256", engine
    )
    runner = open_(engine, max_batch=1)
    assert runner.step(StepBatch(0, np.zeros((1, 3), np.int64), np.zeros(1, np.int64))).shape == (1, 1, 256)
    runner.close()


def test_input_in_host_memory(engine: Path) -> None:
    check_refused(UnsupportedModelError, "input_ids must lie in host memory", engine, on_host=("input_ids",))

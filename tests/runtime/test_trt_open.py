"""Opening an engine, and steps that fail: refused in words that say what to do; nothing is lost, nobody disturbed."""

import gc
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from decoders import DecoderConfig, write_decoder
from needs import needs_nvrtc
from runtime.engines import check_refused, edit, open_engine, write_engine
from runtime.fake_cuda import Machine, Status
from runtime.fake_tensorrt import VERSIONS, Invalidity, fake_module

from trt_kvcache.engine.manifest import Manifest, load_manifest, manifest_path
from trt_kvcache.errors import BackendError, ManifestError, OptionError, SessionError, UnsupportedModelError
from trt_kvcache.importer.cache_plan import Role, Target
from trt_kvcache.runtime.runner import StepBatch
from trt_kvcache.runtime.trt.cuda import CudaBindings, Need, admit
from trt_kvcache.runtime.trt.trt_runner import Bindings, TensorRTRunner

RESERVE = 128 << 20


def test_no_driver_and_no_such_gpu(engine: Path) -> None:
    class NoDriver:
        def cuInit(self, flags: int) -> Any:
            raise RuntimeError('"cuda" is an NVIDIA driver library and can only be found via system search.')

    bindings = Bindings(fake_module(Machine()), CudaBindings(None, NoDriver()))
    words = "no driver works here: .*system search.*; install the NVIDIA driver, or run"
    with pytest.raises(BackendError, match=words):
        TensorRTRunner(engine, bindings=bindings)
    check_refused(BackendError, "there is no GPU number 1: the driver finds 1, counted from 0", engine, device=1)
    check_refused(BackendError, "there is no GPU number 0: the driver finds 0", engine, Machine(devices=0))


# sm90 is no name for it
HERE = r'build it again on this machine with compute_capabilities=\["current"\], which is sm90'
NEVER = "TensorRT-RTX does not support this compute capability, so the engine cannot be rebuilt for it."
UPDATE = r"update the NVIDIA driver, which is for CUDA 12\.8"
TOO_NEW = "Cuda Runtime (cudaError 222: the provided PTX was compiled with an unsupported toolchain.)"
FOREIGN: list[tuple[str, tuple[str, ...], dict[str, Any], dict[str, Any]]] = [
    (r"TensorRT for RTX 1\.9\.0\.1 cannot open this engine, built with version 1\.7\.1\.116, on NVIDIA Fake 90 "
     r"\(compute capability 9\.0\): not compatible \[VERSION_MISMATCH\]; install version 1\.7\.1\.116, or build "
     r"the engine again with 1\.9\.0\.1", (), {},
     {"refuse": "not compatible", "diagnostics": Invalidity.VERSION_MISMATCH, "version": "1.9.0.1"}),
    (rf"1\.7\.1\.116 for sm89, on .*: no such kernel \[UNSUPPORTED_CC\]; {HERE}", ("sm89",), {},
     {"diagnostics": Invalidity.UNSUPPORTED_CC}),
    (HERE, (), {}, {}),
    (f"{NEVER}; build it with another backend, which may support this GPU", (), {}, {"refuse": NEVER}),
    ("build it with another backend, which may support this GPU, or run", ("sm90",), {}, {}),
    (r'again with compute_capabilities=\["sm89"\]', ("sm90",), {"capability": (8, 9)}, {}),
    (UPDATE, (), {"driver": 12_080}, {"refuse": "?", "diagnostics": Invalidity.OLD_CUDA_DRIVER}),
    # The words of TensorRT for RTX 1.7.1 then, which diagnose nothing: CUDA fails before it reads the engine.
    (UPDATE, (), {"driver": 12_080}, {"refuse": "Error Code 1: Cuda Runtime (cudaError 35: CUDA driver version is "
                                      "insufficient for CUDA runtime version"}),
    (UPDATE, (), {"driver": 12_080}, {"refuse": TOO_NEW}),
    (r"TensorRT 11\.4\.0\.106 cannot open .*Engine deserialization failed\.; build it again on this", (), {},
     {"refuse": "Engine deserialization failed.", "backend": "tensorrt"}),
]  # fmt: skip
"""Words of the refusal; what the manifest says the engine is for; the GPU; faults of TensorRT."""


@pytest.mark.parametrize(("words", "built_for", "gpu", "faults"), FOREIGN)
def test_engine_of_another_version_or_for_another_gpu(
    engine: Path, words: str, built_for: tuple[str, ...], gpu: dict[str, Any], faults: dict[str, Any]
) -> None:
    backend = faults.get("backend", "tensorrt-rtx")
    version = VERSIONS[backend]
    edit(engine, lambda m: replace(
        m, compute_capabilities=built_for, backend=backend, backend_version=version,
        plan=replace(m.plan, options=replace(m.plan.options, target=Target(backend))),
    ))  # fmt: skip
    check_refused(BackendError, words, engine, Machine(**gpu), **{"refuse": "no such kernel", **faults})


def test_memory_is_admitted_before_it_is_taken(engine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # 4 caches of 8 KiB for each of 3 rows, the engine file of about half a megabyte, 128 MiB in reserve.
    machine = Machine(total=RESERVE + engine.stat().st_size + 2 * 32768 + 1000)
    words = (
        r"NVIDIA Fake 90 has 128\.\d MiB of 128\.\d MiB free, but 128\.\d MiB are needed: weights .*, caches for 3 "
        r"sequences 96\.0 KiB, reserve 128\.0 MiB; open it with max_batch 2 instead of 3, build the engine again with "
        r"a smaller capacity or max_chunk, or free memory"
    )
    check_refused(BackendError, words, engine, machine)
    assert machine.allocations == 0
    small = Machine(total=RESERVE + 1000)
    check_refused(BackendError, "not even one sequence fits: build the engine again", engine, small, max_batch=1)
    monkeypatch.setattr("runtime.fake_tensorrt.ACTIVATIONS", 1 << 28)  # which only the engine knows
    machine = Machine(total=1 << 28)
    words = (
        r"needed: caches for 3 sequences 96\.0 KiB, activations 258\.0 MiB, inputs and outputs [\d.]+ KiB, choice of "
        r"tokens 64\.8 KiB, reserve"
    )
    check_refused(BackendError, words, engine, machine)
    assert machine.allocations == 0


@needs_nvrtc
@pytest.mark.parametrize(("rows", "capacity"), [(1, 64), (3, 64), (20, 64), (2, 9216)])
def test_every_byte_is_asked_for(rows: int, capacity: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The memory that is admitted is the memory that the driver gives, choice of tokens included."""
    asked: list[int] = []

    def counting(needs: Sequence[Need], *more: Any) -> None:
        asked[:] = [need.size for need in needs]
        admit(needs, *more)

    monkeypatch.setattr("trt_kvcache.runtime.trt.trt_runner.admit", counting)
    model = write_decoder(tmp_path / "model.onnx", DecoderConfig(capacity=capacity, positions=16))
    machine = Machine()
    runner = open_engine(write_engine(model, max_batch=rows), machine)
    assert runner.host_choice == ""
    assert sum(asked) == runner.device_bytes == machine.used
    runner.close()


def test_rows_that_cannot_be_addressed(tmp_path: Path) -> None:
    config = DecoderConfig(capacity=10, kv_heads=1, query_heads=2, head_size=4)
    engine = write_engine(write_decoder(tmp_path / "model.onnx", config))
    words = "cache 'key_cache.0' takes 160 bytes, but TensorRT binds memory only at multiples of 256"
    check_refused(ManifestError, words, engine)
    runner = open_engine(engine, max_batch=1)
    assert runner.step(StepBatch(0, np.zeros((1, 3), np.int64), np.zeros(1, np.int64))).shape == (1, 1, 256)
    runner.close()


# An engine against its manifest.


def test_engine_that_was_changed(engine: Path) -> None:
    data = bytearray(engine.read_bytes())
    data[-1] ^= 1
    engine.write_bytes(data)
    check_refused(ManifestError, "BLAKE3 .*the manifest is not of this engine", engine)


def test_aliases_are_reconciled(engine: Path) -> None:
    """All differences that are looked for: tests/engine/test_inspect.py."""
    aliases = dict(load_manifest(engine).aliases)
    del aliases["updated_key_cache.1"]
    words = r"updated_key_cache\.1 shares the buffer of nothing in the engine, and of key_cache\.1 in the manifest"
    check_refused(ManifestError, f"the engine and its manifest differ: {words}; do not run it", engine, aliases=aliases)


def tensor(name: str, change: Callable[[Any], Any]) -> Callable[[Manifest], Manifest]:
    return lambda m: replace(
        m, plan=replace(m.plan, tensors=tuple(change(t) if t.name == name else t for t in m.plan.tensors))
    )


def test_manifest_edited_by_hand(engine: Path) -> None:
    path = manifest_path(engine)
    path.write_text(path.read_text().replace('"max_batch": 3', '"max_batch": 9'))
    check_refused(ManifestError, "engine.json: the manifest was edited or damaged .*; build the engine again", engine)


def test_inputs_that_a_step_cannot_fill(engine: Path) -> None:
    words = "input_ids must lie in host memory"
    check_refused(UnsupportedModelError, words, engine, on_host=("input_ids",))
    edit(engine, tensor("position_ids", lambda t: replace(t, role=Role.OTHER)))
    check_refused(UnsupportedModelError, "input 'position_ids' .* has no known role in decoding", engine)


@pytest.mark.parametrize(("limit", "words"), [
    ({"max_batch": 4}, "max_batch is 4; this engine was built for 1 to 3: build it again with"),
    ({"max_batch": 0}, "max_batch is 0; it must be at least 1"),
    ({"max_chunk": 9}, "max_chunk is 9; .* 1 to 8: build it again with max_chunk=9"),
], ids=str)  # fmt: skip
def test_more_than_the_engine_was_built_for(engine: Path, limit: dict[str, int], words: str) -> None:
    check_refused(OptionError, words, engine, **limit)


def test_less_than_the_engine_was_built_for(engine: Path) -> None:
    """Needs less memory, and takes what it is opened for."""
    whole, chunk, row = open_engine(engine), open_engine(engine, max_chunk=2), open_engine(engine, max_batch=1)
    assert (whole.max_batch, whole.max_chunk) == (3, 8)
    assert (chunk.max_batch, chunk.max_chunk) == (3, 2)
    assert (row.max_batch, row.max_chunk) == (1, 8)
    assert max(chunk.device_bytes, row.device_bytes) < whole.device_bytes
    assert chunk.step(StepBatch(0, np.ones((3, 2), np.int64), np.zeros(3, np.int64))).shape == (3, 1, 256)
    batch = StepBatch(0, np.ones((1, 8), np.int64), np.zeros(1, np.int64))
    np.testing.assert_array_equal(row.step(batch), whole.step(batch))
    for runner in (whole, chunk, row):
        runner.close()


# Steps that fail, sessions that nobody closes: nothing is lost, and nobody else disturbed.


def test_step_that_fits_no_profile(engine: Path) -> None:
    runner = open_engine(engine)
    before = runner.read_row("key_cache.0", 0, 64)
    with pytest.raises(
        SessionError, match="a step of 1 sequences and 9 tokens each fits none of the engine's profiles"
    ):
        runner.step(StepBatch(0, np.zeros((1, 9), np.int64), np.zeros(1, np.int64)))
    np.testing.assert_array_equal(runner.read_row("key_cache.0", 0, 64), before)
    runner.close()


@pytest.mark.parametrize(
    ("error", "words"),
    [("CUDA error 2 in enqueue: out of memory", ".*Error.*out of memory"),
     (TOO_NEW, ".*; update the NVIDIA driver")],  # the library has no code for the GPU, which may show in a step alone
)  # fmt: skip
def test_step_that_tensorrt_refuses(error: str, words: str, engine: Path) -> None:
    runner: Any = open_engine(engine)
    batch = StepBatch(0, np.ones((1, 4), np.int64), np.zeros(1, np.int64))
    expected = runner.step(batch).copy()
    runner.module.faults["fail_steps"] = error
    with pytest.raises(SessionError, match=f"TensorRT for RTX .* cannot run a step: {words}"):
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
        runner.resources.close()
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
    paths = os.pathsep.join(
        [str(tests), str(tests.parent / "scripts"), str(tests.parent / "examples"), os.environ.get("PYTHONPATH", "")]
    )
    done = subprocess.run(
        [sys.executable, "-c", program], env=os.environ | {"PYTHONPATH": paths}, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert (done.stdout.strip(), done.returncode) == ("0 True", 0), done.stderr

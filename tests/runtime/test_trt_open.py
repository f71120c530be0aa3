"""Opening an engine: what does not fit is refused, in words that say what to do, and nothing stays allocated."""

from __future__ import annotations

import gc
import json
import os
import shutil
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
from runtime.fake_cuda import Machine, Status
from runtime.fake_engines import write_engine
from runtime.fake_tensorrt import Invalidity, fake_module

from trt_kvcache.engine.manifest import Manifest, load_manifest, manifest_path, save_manifest
from trt_kvcache.errors import BackendError, ManifestError, OptionError, SessionError, UnsupportedModelError
from trt_kvcache.importer.plan import Role
from trt_kvcache.runtime.runner import StepBatch
from trt_kvcache.runtime.trt.admission import Need, admit
from trt_kvcache.runtime.trt.cuda import CudaBindings
from trt_kvcache.runtime.trt.runner import Bindings, TensorRTRunner


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_engine(write_decoder(tmp_path_factory.mktemp("model") / "model.onnx", DecoderConfig()))


@pytest.fixture
def engine(built: Path, tmp_path: Path) -> Path:
    for path in (built, manifest_path(built)):
        shutil.copy(path, tmp_path)
    return tmp_path / built.name


def open_(engine: Path, machine: Machine | None = None, version: str = "1.7.1.116", **faults: Any) -> TensorRTRunner:
    arguments = {
        name: faults.pop(name) for name in ("max_batch", "max_chunk", "device", "kernel_cache") if name in faults
    }
    machine = machine or Machine()
    module = fake_module(machine, version=version, **faults)
    runner = TensorRTRunner(engine, bindings=Bindings(module, machine.bindings()), **arguments)
    runner.module = module  # type: ignore[attr-defined]
    return runner


def check_refused(error: type[Exception], words: str, engine: Path, **faults: Any) -> None:
    """Opening fails with these words, and leaves nothing behind."""
    machine = faults.pop("machine", None) or Machine()
    with pytest.raises(error, match=words):
        open_(engine, machine, **faults)
    assert machine.used == 0
    assert not machine.pinned


def edit(engine: Path, change: Callable[[Manifest], Manifest]) -> None:
    save_manifest(change(load_manifest(engine)), manifest_path(engine))


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


def test_tensorrt_has_no_diagnostics(engine: Path) -> None:
    edit(engine, lambda m: replace(m, backend="tensorrt", backend_version="11.4.0.106"))
    machine = Machine()
    module = fake_module(machine, rtx=False, version="11.4.0.106", refuse="Engine deserialization failed.")
    with pytest.raises(BackendError, match=r"TensorRT 11\.4\.0\.106 cannot open .*Engine deserialization failed\.; "):
        TensorRTRunner(engine, bindings=Bindings(module, machine.bindings()))


def test_engine_that_was_changed(engine: Path) -> None:
    data = bytearray(engine.read_bytes())
    data[-1] ^= 1
    engine.write_bytes(data)
    check_refused(ManifestError, "BLAKE3 .*the manifest is not of this engine", engine)


@pytest.mark.parametrize("more", [True, False])
def test_aliases_are_reconciled(engine: Path, more: bool) -> None:
    aliases = dict(load_manifest(engine).aliases)
    if more:
        aliases["logits"] = "input_ids"
        words = "logits shares the buffer of input_ids, in the manifest of nothing"
    else:
        del aliases["updated_key_cache.1"]
        words = r"updated_key_cache\.1 shares the buffer of nothing, in the manifest of key_cache\.1"
    check_refused(ManifestError, f"the engine and its manifest differ: {words}; do not run it", engine, aliases=aliases)


def _alias(manifest: Manifest) -> Manifest:
    return replace(manifest, aliases=manifest.aliases | {"updated_key_cache.0": "value_cache.0"})


def _capacity(manifest: Manifest) -> Manifest:
    first, *others = manifest.plan.caches
    return replace(manifest, plan=replace(manifest.plan, caches=(replace(first, capacity=4096), *others)))


def _shape(manifest: Manifest) -> Manifest:
    first, *others = manifest.plan.caches
    changed = replace(first, physical_shape=("batch", 2, 4096, 16), capacity=4096)
    return replace(manifest, plan=replace(manifest.plan, caches=(changed, *others)))


def _rank(manifest: Manifest) -> Manifest:
    first, *others = manifest.plan.caches
    return replace(manifest, plan=replace(manifest.plan, caches=(replace(first, physical_shape=("batch",)), *others)))


def _axes(manifest: Manifest) -> Manifest:
    tensors = tuple(replace(t, axes=t.axes[1:]) if t.name == "input_ids" else t for t in manifest.plan.tensors)
    return replace(manifest, plan=replace(manifest.plan, tensors=tensors))


def _no_span(manifest: Manifest) -> Manifest:
    return replace(manifest, plan=replace(manifest.plan, spans=()))


def _logits_span(manifest: Manifest) -> Manifest:
    assert manifest.plan.logits_span is not None
    span = replace(manifest.plan.logits_span, name="input_ids")
    return replace(manifest, plan=replace(manifest.plan, logits_span=span))


def _dtype(manifest: Manifest) -> Manifest:
    first, *others = manifest.plan.tensors
    return replace(manifest, plan=replace(manifest.plan, tensors=(replace(first, dtype="int65"), *others)))


def _double(manifest: Manifest) -> Manifest:
    return replace(manifest, double_buffered={"updated_key_cache.0": "key_cache.0"})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (_alias, "aliases binds 'updated_key_cache.0' to 'value_cache.0', the plan to 'key_cache.0'"),
        (_capacity, "cache 'key_cache.0' has a capacity of 4096, its shape says otherwise"),
        (_shape, r"input 'key_cache.0' is float \['batch', 2, 64, 16\], its cache float \['batch', 2, 4096, 16\]"),
        (_double, "double_buffered binds 'updated_key_cache.0' to 'key_cache.0', the plan to None"),
        (
            lambda m: replace(m, plan=replace(m.plan, spans=())),
            "span 'attention_span' is not both an input and described",
        ),
        (_logits_span, "span 'input_ids' is not both an input and described; span 'logits_span' is not both"),
        (lambda m: replace(m, max_batch=9), "max_batch is 9, the profiles of 'input_ids' end at 3"),
        (lambda m: replace(m, max_chunk=9), "max_chunk is 9, the profiles of 'input_ids' end at 8"),
    ],
)
def test_manifest_edited_by_hand(engine: Path, change: Callable[[Manifest], Manifest], words: str) -> None:
    edit(engine, change)
    check_refused(ManifestError, f"its manifest contradicts itself: .*{words}.*; build the engine again", engine)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (_rank, r"cache 'key_cache.0' \['batch'\] has no axis 2"),
        (_axes, r"input 'input_ids' \[.*\] has axes or profiles of another length"),
        (lambda m: replace(m, backend="tensorrt-x"), "backend 'tensorrt-x'; there are tensorrt, tensorrt-rtx"),
    ],
)
def test_manifests_that_are_none(engine: Path, change: Callable[[Manifest], Manifest], words: str) -> None:
    edit(engine, change)
    check_refused(ManifestError, f"not a valid manifest: {words}; build the engine again", engine)
    with pytest.raises(ManifestError, match=words):  # as inspect and others read it
        load_manifest(engine)


def test_profiles_edited_by_hand(engine: Path) -> None:
    path = manifest_path(engine)
    data = json.loads(path.read_text())
    data["profiles"][0]["shapes"]["input_ids"]["max"] = [7, 8]
    path.write_text(json.dumps(data))
    check_refused(ManifestError, "profile prefill: input_ids is .*, in the manifest ", engine)


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
        r"needed: caches for 3 sequences 96\.0 KiB, activations 256\.0 MiB, inputs and outputs [\d.]+ KiB, choice of "
        r"tokens 64\.0 KiB, reserve"
    )
    check_refused(BackendError, words, engine, machine=machine)
    assert machine.allocations == 0


@needs_nvrtc
@pytest.mark.parametrize("rows", [1, 3, 20])
def test_every_byte_is_asked_for(rows: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is admitted is what is taken, choice of tokens included."""
    asked: list[int] = []

    def counting(needs: Sequence[Need], *more: Any) -> None:
        asked[:] = [need.size for need in needs]
        admit(needs, *more)

    monkeypatch.setattr("trt_kvcache.runtime.trt.runner.admit", counting)
    model = write_decoder(tmp_path / "model.onnx", DecoderConfig())
    runner = open_(write_engine(model, max_batch=rows))
    assert runner.host_choice == ""
    assert sum(asked) == runner.device_bytes
    runner.close()


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


def test_input_without_a_part(engine: Path) -> None:
    def unknown(manifest: Manifest) -> Manifest:
        tensors = tuple(replace(t, role=Role.OTHER) if t.name == "position_ids" else t for t in manifest.plan.tensors)
        return replace(manifest, plan=replace(manifest.plan, tensors=tensors))

    edit(engine, unknown)
    check_refused(UnsupportedModelError, "input 'position_ids' .* has no known part in decoding", engine)


def test_input_in_host_memory(engine: Path) -> None:
    check_refused(UnsupportedModelError, "input_ids must lie in host memory", engine, on_host=("input_ids",))


def test_step_that_fits_no_profile(engine: Path) -> None:
    runner = open_(engine)
    before = runner.read_row("key_cache.0", 0, 64)
    with pytest.raises(
        SessionError, match="a step of 1 sequences and 9 tokens each fits none of the engine's profiles"
    ):
        runner.step(StepBatch(0, np.zeros((1, 9), np.int64), np.zeros(1, np.int64)))
    np.testing.assert_array_equal(runner.read_row("key_cache.0", 0, 64), before)
    runner.close()


def test_step_that_tensorrt_refuses(engine: Path) -> None:
    faults: dict[str, Any] = {"fail_steps": ""}
    machine = Machine()
    module = fake_module(machine, **faults)
    runner = TensorRTRunner(engine, bindings=Bindings(module, machine.bindings()))
    batch = StepBatch(0, np.ones((1, 4), np.int64), np.zeros(1, np.int64))
    expected = runner.step(batch).copy()
    module.faults["fail_steps"] = "CUDA error 2 in enqueue: out of memory"
    with pytest.raises(SessionError, match="TensorRT for RTX .* cannot run a step: .*Error.*out of memory"):
        runner.step(batch)
    module.faults["fail_steps"] = ""
    np.testing.assert_array_equal(runner.step(batch), expected)  # the session lives on
    runner.close()


def test_fault_of_the_gpu(engine: Path) -> None:
    machine = Machine()
    runner = open_(engine, machine)
    machine.fault = Status.CUDA_ERROR_ILLEGAL_ADDRESS
    words = r"CUDA: cuStreamSynchronize failed: CUDA_ERROR_ILLEGAL_ADDRESS \(an illegal memory access"
    with pytest.raises(SessionError, match=words):
        runner.step(StepBatch(0, np.ones((1, 4), np.int64), np.zeros(1, np.int64)))
    runner.close()  # every call of CUDA fails from here on
    assert machine.used == 0
    assert not [c for c in runner.module.contexts if c() is not None]
    assert runner.module.hung == []


def test_fault_of_the_gpu_while_steps_are_recorded(engine: Path) -> None:
    """What was recorded goes too, and its contexts before the memory that they are bound to."""
    edit(engine, lambda m: replace(m, backend="tensorrt", backend_version="11.4.0.106"))
    for rtx in (False, True):
        machine = Machine()
        module = fake_module(machine, rtx=rtx)
        runner = TensorRTRunner(engine, bindings=Bindings(module, machine.bindings()))
        batch = StepBatch(0, np.ones((1, 1), np.int64), np.zeros(1, np.int64))
        for _ in range(4):
            runner.step(batch)
        machine.fault = Status.CUDA_ERROR_ILLEGAL_ADDRESS
        with pytest.raises(SessionError, match="CUDA_ERROR_ILLEGAL_ADDRESS"):
            runner.step(batch)
        runner.close()
        assert (machine.used, machine.graphs) == (0, 0)
        assert not [c for c in module.contexts if c() is not None]
        assert module.hung == []
        if not rtx:
            edit(engine, lambda m: replace(m, backend="tensorrt-rtx", backend_version="1.7.1.116"))


def test_compiled_kernels_are_kept(engine: Path) -> None:
    machine, batch = Machine(), StepBatch(0, np.ones((1, 4), np.int64), np.zeros(1, np.int64))

    def run(**arguments: Any) -> list[str]:
        module = fake_module(machine)
        runner = TensorRTRunner(engine, bindings=Bindings(module, machine.bindings()), **arguments)
        runner.step(batch)
        runner.close()
        return list(module.compiled)

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
    runner = open_(engine, machine)
    module = runner.module  # type: ignore[attr-defined]
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
    runner, other = open_(engine, machine), open_(engine, machine if same else Machine())
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
    runner = open_(engine, machine)
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
from runtime.fake_cuda import Machine
from runtime.fake_tensorrt import fake_module
from trt_kvcache.runtime.trt.runner import Bindings, TensorRTRunner
machine = Machine()
atexit.register(lambda: print(machine.used, machine.allocations > 0))
runner = TensorRTRunner({str(engine)!r}, bindings=Bindings(fake_module(machine), machine.bindings()))
"""
    tests = Path(__file__).parents[1]
    paths = os.pathsep.join([str(tests), str(tests.parent / "scripts"), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", program], env=os.environ | {"PYTHONPATH": paths}, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert (done.stdout.strip(), done.returncode) == ("0 True", 0), done.stderr

"""Compares an engine with its proof (a recorded decode) on this machine's GPU, and records the engines that passed.

For each kind of GPU on which an engine passed, a file beside it says so; later starts skip the check. The file is not
signed: anyone who can write it could change the engine, too.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
from blake3 import blake3

from trt_kvcache import __version__
from trt_kvcache.compare.proof import Proof, decode_proof
from trt_kvcache.engine.manifest import Manifest, load_manifest, proof_path
from trt_kvcache.errors import BackendError, ManifestError, OutputError, SessionError, VerificationError
from trt_kvcache.files import atomic_file, read_file
from trt_kvcache.runtime.replay import Difference, Finding, replay, rows_needed

_LARGEST = 4 << 20  # bytes of a proof's file, at most
_AGAIN = "copy engine, manifest and proof together, or build again"
_DRIVER = Path("/proc/driver/nvidia/version")


@dataclass(frozen=True)
class PassedCheck:
    """The record that an engine gave the results in its proof on a GPU.

    Attributes:
        engine, proof: BLAKE3 (hex) of the engine's file and of the proof's file.
        gpu: name and compute capability of the GPU.
        driver: CUDA version of the driver, and the driver's own version if known.
        backend: name and version of TensorRT.
        checked_by: version of trt_kvcache.
        largest: the largest difference that was found, divided by the allowed one.
    """

    engine: str
    proof: str
    gpu: str
    driver: str
    backend: str
    checked_by: str
    largest: float = 0.0

    def differs(self, now: PassedCheck) -> str:
        """Return a text that says what changed since this record was written; empty if nothing changed."""
        changes = [
            f"{name.replace('_', ' ')} was {getattr(self, name)}, and is {getattr(now, name)}"
            for name in ("gpu", "driver", "backend", "checked_by")
            if getattr(self, name) != getattr(now, name)
        ]
        if (self.engine, self.proof) != (now.engine, now.proof):
            changes.append("it belongs to another engine or proof")
        return "; ".join(changes)


def passed_check_path(engine: Path, gpu: str, folder: Path | None = None) -> Path:
    """Return the path of the record of a passed check, such as ``model.engine.NVIDIA-L4.passed_check``.

    It lies in `folder`, or in the engine's folder if `folder` is None.
    """
    name = re.sub(r"[^A-Za-z0-9.]+", "-", gpu).strip("-.") or "GPU"
    return (folder or engine.parent) / f"{engine.name}.{name}.passed_check"


def read_passed_check(path: Path, now: PassedCheck) -> str:
    """Return why a recorded check is not valid here; empty if it is valid. `now` is the record that is expected."""
    try:
        passed = msgspec.json.decode(path.read_bytes(), type=PassedCheck)
    except FileNotFoundError:
        return "there is no passed check"
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return f"the passed check {path} cannot be read"
    differs = passed.differs(now)
    return f"the passed check {path} is not valid here: {differs}" if differs else ""


def write_passed_check(path: Path, passed: PassedCheck) -> None:
    """Record in a file that an engine passed its check. If the file cannot be written, warn."""
    try:
        with atomic_file(path) as file:
            file.write(msgspec.json.format(msgspec.json.encode(passed), indent=2) + b"\n")
    except OutputError as error:
        warnings.warn(
            f"the passed check was not stored, so the next start checks again: {error}", RuntimeWarning, stacklevel=2
        )


@dataclass(frozen=True)
class CheckReport:
    """The result of checking an engine.

    Attributes:
        ran_on: name of TensorRT and of the GPU.
        recorded_on: the runtime that recorded the proof.
        steps: steps of the proof that were run.
        outputs: the largest difference of each output.
        findings: the places where outputs disagree with the proof.
        passed_check: path of the file that lets later starts skip the check; empty if the engine did not pass.
        notes: other remarks for the reader.
        layer: description of the first layer that differs, if it was searched for.
    """

    engine: str
    passed: bool
    ran_on: str
    recorded_on: str
    driver: str
    steps: int
    outputs: tuple[Difference, ...]
    findings: tuple[Finding, ...]
    passed_check: str
    notes: tuple[str, ...] = ()
    layer: str = ""

    def check(self) -> None:
        """Raise `VerificationError` if the engine did not pass; the message names output, step, row and difference."""
        if self.passed:
            return
        more = f" ({len(self.findings) - 1} other outputs, too)" if len(self.findings) > 1 else ""
        raise VerificationError(
            f"{self.engine}: this engine does not repeat the numbers of its proof on {self.ran_on}, driver "
            f"{self.driver}: {self.findings[0]}{more}; do not use it here: build it with another version of "
            "TensorRT, and see 'trt-kvcache check --locate'"
        )


def prove(engine: Path, check: str, options: Mapping[str, Any]) -> None:
    """Compare an engine with its proof (its recorded results) before a session opens it.

    `check` is ``"always"``, ``"off"`` or ``"first"`` (only if no passed check is recorded for this GPU, driver and
    TensorRT). Raises `VerificationError` if the results differ; `check_engine_on_gpu` lists other errors.
    """
    if check == "off":
        return
    manifest = load_manifest(engine)
    if manifest.is_encoder or (check == "first" and manifest.proof is None):
        return
    check_engine_on_gpu(engine, options, again=check == "always").check()


def check_engine_on_gpu(engine: Path, options: Mapping[str, Any], *, again: bool = True) -> CheckReport:
    """Run the recorded steps of an engine's proof on the GPU, and compare the results with the recorded ones.

    If all agree, record in a file that the engine passed. `options` are those of `TensorRTRunner`; sizes such as
    `max_batch` are ignored. Without `again`, the steps do not run if a file shows that the engine passed before.

    Raises:
        ManifestError: the engine has no proof, or the proof belongs to another engine or was changed.
        BackendError: TensorRT or a GPU is missing, or the GPU has too little memory.
    """
    from trt_kvcache.runtime.trt.cuda import Cuda, cuda_bindings
    from trt_kvcache.runtime.trt.load import load_tensorrt
    from trt_kvcache.runtime.trt.trt_runner import Bindings, TensorRTRunner

    manifest = load_manifest(engine)
    proof = load_proof(manifest, engine)
    assert manifest.proof is not None
    settings = {n: v for n, v in options.items() if n not in ("max_batch", "max_chunk")}
    bindings = settings.get("bindings") or Bindings(load_tensorrt(manifest.backend), cuda_bindings())
    settings["bindings"] = bindings
    gpu = Cuda(settings.get("device", 0), bindings.cuda)
    name, capability, driver = gpu.name, gpu.compute_capability, _driver(gpu.driver_version)
    gpu.close()
    now = PassedCheck(
        manifest.engine.blake3, manifest.proof.blake3, f"{name} ({capability})", driver,
        f"{manifest.backend} {bindings.tensorrt.__version__}", __version__,
    )  # fmt: skip
    folder = settings.get("kernel_cache")
    path = passed_check_path(engine, name, None if folder is None else Path(folder))
    why = read_passed_check(path, now)
    if not why and not again:
        here = f"{now.backend}, {now.gpu}"
        return CheckReport(str(engine), True, here, proof.facts.recorded_on, driver, 0, (), (), str(path))
    rows, chunk = rows_needed(proof, manifest.plan, manifest.max_batch), min(proof.facts.chunk, manifest.max_chunk)
    try:
        runner = TensorRTRunner(engine, max_batch=rows, max_chunk=chunk, **settings)
    except BackendError as error:
        said = f"the proof cannot be replayed: {error.message}"
        raise type(error)(f"{said}; --check off opens the engine without it") from error
    try:
        result = replay(runner, proof)
        ran_on = runner.name
    except SessionError as error:
        raise type(error)(f"{engine}: the proof cannot be replayed: {error.message}") from error
    finally:
        runner.close()
    if result.passed:
        write_passed_check(path, replace(now, largest=max((d.part for d in result.outputs), default=0.0)))
    notes = tuple(filter(None, (why, proof.facts.note)))
    return CheckReport(
        str(engine), result.passed, ran_on, proof.facts.recorded_on, driver, result.steps, result.outputs,
        result.findings, str(path) if result.passed else "", notes,
    )  # fmt: skip


def load_proof(manifest: Manifest, engine: Path) -> Proof:
    """Read the proof that was recorded when an engine was built. Raises `ManifestError` if it is missing or wrong."""
    path = proof_path(engine)
    if manifest.proof is None:
        raise ManifestError(f"{engine}: this engine was built without a proof: {manifest.no_proof}")
    try:
        content = read_file(path, _LARGEST)
    except OSError as error:
        raise ManifestError(
            f"{path}: the proof that was built with {engine.name} cannot be read ({error.strerror}); {_AGAIN}; "
            "--check off opens the engine without it"
        ) from None
    if (len(content), blake3(content).hexdigest()) != (manifest.proof.size, manifest.proof.blake3):
        raise ManifestError(
            f"{path}: this is not the proof that was built with {engine.name}: it was cut or changed; {_AGAIN}"
        )
    try:
        proof, of = decode_proof(content)
    except ValueError as error:
        raise ManifestError(f"{path}: this proof is {error}; {_AGAIN}") from None
    if of != manifest.engine.blake3:
        raise ManifestError(f"{path}: this is the proof of another engine, {of[:16]}; {_AGAIN}")
    return proof


def _driver(cuda: tuple[int, int]) -> str:
    try:
        match = re.search(r"\d+\.\d+(\.\d+)?", _DRIVER.read_text())
    except OSError:  # not on Linux
        match = None
    return "for CUDA {}.{}".format(*cuda) + (f", {match[0]}" if match else "")

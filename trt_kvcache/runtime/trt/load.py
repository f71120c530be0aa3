"""Opens an engine file, and checks that it is the engine that its manifest describes."""

from __future__ import annotations

import importlib
import mmap
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trt_kvcache.engine.backend import PACKAGES, RTX_COMPUTE_CAPABILITIES
from trt_kvcache.engine.build_options import CURRENT
from trt_kvcache.engine.callbacks import make_recorder, native_logger
from trt_kvcache.engine.inspection import reconcile, view_of
from trt_kvcache.engine.manifest import Manifest
from trt_kvcache.errors import BackendError, ManifestError, UnsupportedModelError
from trt_kvcache.importer.cache_plan import Target
from trt_kvcache.runtime.trt.cuda import Cuda

_OLD_DRIVER = ("CUDA driver version is insufficient", "compiled with an unsupported toolchain")
"""Parts of CUDA's messages about an old driver: cudaErrorInsufficientDriver, before TensorRT for RTX 1.7.1 can diagnose
anything; and cudaErrorUnsupportedPtxVersion, if the driver must compile PTX because a library has no code for the GPU.
"""

_OTHER_GPUS = "does not support this compute capability"
"""Message of TensorRT for RTX 1.7.1 for a GPU that no build of it supports."""


def load_tensorrt(backend: str) -> Any:
    """Import the module that a manifest names: ``tensorrt`` or ``tensorrt_rtx``; else raise `BackendError`."""
    package = PACKAGES[Target(backend)]
    try:
        return importlib.import_module(package.module)
    except ModuleNotFoundError as error:
        raise BackendError(
            f"the engine was built with {package.title}, which is not installed; run: pip install '{package.install}'"
        ) from error
    except (ImportError, OSError, RuntimeError) as error:
        raise BackendError(f"{package.title} does not load: {' '.join(str(error).split())}") from error


@dataclass(frozen=True, eq=False)
class TensorRT:
    """An opened engine, and the objects that must live as long as the engine.

    Attributes:
        module: ``tensorrt`` or ``tensorrt_rtx``.
        engine: ``ICudaEngine``.
        recorder: collects the errors that TensorRT reports; see `make_recorder`.
        title: name and version, for messages.
        rtx: True for TensorRT for RTX, which compiles kernels on the GPU and has its own CUDA graphs.
    """

    module: Any
    engine: Any
    runtime: Any
    recorder: Any
    title: str
    rtx: bool

    def let_go(self) -> None:
        """Stop TensorRT from reporting errors to Python. Call this after `let_go` of the contexts."""
        self.engine.error_recorder = self.runtime.error_recorder = None

    def check(self, ok: Any, what: str) -> None:
        """Raise `BackendError` with TensorRT's own messages if `ok`, the result of a call, is False or None."""
        if ok is None or ok is False:
            words = self.recorder.take()
            advice = "; update the NVIDIA driver" if _is_old_driver(words) else ""
            raise BackendError(f"{self.title} cannot {what}: {words}{advice}")


def _is_old_driver(words: str) -> bool:
    return any(said in words for said in _OLD_DRIVER)


def open_engine(path: Path, manifest: Manifest, module: Any, cuda: Cuda) -> TensorRT:
    """Deserialize an engine, whose hash has been checked, and compare it with its manifest.

    Raises:
        BackendError: TensorRT cannot open the engine here: it was built for another GPU or version, or the file is
            damaged.
        ManifestError: the engine's tensors, profiles or aliases differ from those in the manifest.
        UnsupportedModelError: the engine needs a tensor in host memory.
    """
    target = Target(manifest.backend)
    title = f"{PACKAGES[target].title} {module.__version__}"
    recorder = make_recorder(module)
    runtime = module.Runtime(native_logger(module))
    runtime.error_recorder = recorder
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        engine = runtime.deserialize_cuda_engine(data)
        if engine is None:
            words = recorder.take()
            reasons = _reasons(module, runtime, data)
            raise BackendError(_refusal(path, manifest, title, str(module.__version__), cuda, words, reasons))
    # TensorRT's documentation says that engine and contexts inherit the recorder; set it anyway
    engine.error_recorder = recorder
    if differences := reconcile(manifest, view_of(engine)):
        raise ManifestError(
            f"{path}: the engine and its manifest differ: {'; '.join(differences)}; do not run it: build it again"
        )
    names = [engine.get_tensor_name(index) for index in range(engine.num_io_tensors)]
    if on_host := [name for name in names if engine.get_tensor_location(name) != module.TensorLocation.DEVICE]:
        raise UnsupportedModelError(
            f"{path}: {', '.join(on_host)} must lie in host memory, because the model computes shapes from the values; "
            "the runtime can run models whose shapes follow from the shapes of their inputs: export it that way"
        )
    return TensorRT(module, engine, runtime, recorder, title, target is Target.TENSORRT_RTX)


def _refusal(
    path: Path, manifest: Manifest, title: str, version: str, cuda: Cuda, words: str, reasons: tuple[str, ...]
) -> str:
    """Return the message for an engine that TensorRT refuses: TensorRT's own words, and what to do."""
    built = manifest.backend_version
    if manifest.compute_capabilities:
        built += f" for {', '.join(manifest.compute_capabilities)}"
    sm = "sm" + cuda.compute_capability.replace(".", "")
    if version != manifest.backend_version:
        advice = f"install version {manifest.backend_version}, or build the engine again with {version}"
    elif "OLD_CUDA_DRIVER" in reasons or _is_old_driver(words):
        advice = "update the NVIDIA driver, which is for CUDA {}.{}".format(*cuda.driver_version)
    elif sm in manifest.compute_capabilities or _OTHER_GPUS in words:
        advice = "build it with another --backend, which may support this GPU, or run the model's .onnx file on the CPU"
    elif manifest.backend == Target.TENSORRT_RTX and sm in RTX_COMPUTE_CAPABILITIES:
        advice = f"build it again with --compute-capabilities {sm}"
    elif manifest.backend == Target.TENSORRT_RTX:
        advice = f"build it again on this machine with --compute-capabilities {CURRENT}, which is {sm}"
    else:
        advice = f"build it again on this machine, for {sm}"
    details = f" [{', '.join(reasons)}]" if reasons else ""
    return (
        f"{path}: {title} cannot open this engine, built with version {built}, on {cuda.name} (compute capability "
        f"{cuda.compute_capability}): {words}{details}; {advice}"
    )


def _reasons(module: Any, runtime: Any, data: Any) -> tuple[str, ...]:
    """Return the diagnostics of TensorRT for RTX, by name; an empty tuple on TensorRT, which gives no diagnostics."""
    if not hasattr(runtime, "get_engine_validity"):
        return ()
    _, diagnostics = runtime.get_engine_validity(data)
    members = module.EngineInvalidityDiagnostics.__members__
    return tuple(name for name, member in members.items() if int(diagnostics) & int(member))

"""A diagnosis of this machine: packages, TensorRT, GPU, driver, how caches can be updated (routes), and advice."""

from __future__ import annotations

import importlib
import importlib.metadata
import platform
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from trt_kvcache import __version__
from trt_kvcache.engine.backend import RTX_COMPUTE_CAPABILITIES, release
from trt_kvcache.importer.cache_plan import Route

_PACKAGES = {
    "onnx": "reading and rewriting models",
    "onnx-graphsurgeon": "rewriting models",
    "onnxruntime": "verify, and decoding on the CPU",
    "polygraphy": "build",
    "numpy": "verify, and decoding",
    "safetensors": "saving caches",
    "cuda-python": "GPU and driver",
    "nvidia-cuda-nvrtc": "choosing tokens on the GPU, plugin",
    "tokenizers": "generate with text",
    "jinja2": "generate --chat",
    "prompt_toolkit": "chat",
    "llguidance": "structured output",
    "starlette": "serve",
    "uvicorn": "serve",
    "prometheus-client": "serve, batch",
    "pyarrow": "batch with Parquet",
    "mobius-onnx": "export",
    "torch": "export",
    "transformers": "export",
}
_EXTRAS = {
    "text": (
        ("tokenizers", "jinja2", "prompt_toolkit"),
        "for prompts as text; prompts as token ids need none of these",
    ),
    "plugin": (("nvidia-cuda-nvrtc",), "compiles the kernels that run beside engines; without it, decoding is slower"),
    "structured": (("llguidance",), "JSON schemas, regular expressions and grammars"),
    "serve": (("starlette", "uvicorn", "prometheus-client"), "OpenAI's API"),
    "batch": (("prometheus-client", "pyarrow"), "files of requests"),
    "exporters": (("mobius-onnx", "torch", "transformers"), "from checkpoints to ONNX"),
}
"""Packages that only some functions need, by the extra that installs them."""
_BACKENDS = {
    "tensorrt-rtx": ("tensorrt_rtx", ("tensorrt-rtx-cu13", "tensorrt-rtx-cu12", "tensorrt-rtx")),
    "tensorrt": ("tensorrt", ("tensorrt", "tensorrt-cu13", "tensorrt-cu12")),
}


@dataclass(frozen=True)
class PackageStatus:
    """One Python package that the project uses: installed version or None, and the functions that need it."""

    name: str
    version: str | None
    used_for: str


@dataclass(frozen=True)
class BackendStatus:
    """One TensorRT package.

    Attributes:
        name: ``"tensorrt-rtx"`` or ``"tensorrt"``.
        version: version of the importable module; otherwise of the installed package; otherwise None.
        importable: whether the module loads here.
        problem: the reason why it does not load; otherwise empty.
        native, packed_native, plugins: whether it has TensorRT's cache update layer, packed updates, and plugins.
    """

    name: str
    version: str | None
    importable: bool
    problem: str
    native: bool
    packed_native: bool
    plugins: bool


@dataclass(frozen=True)
class Gpu:
    """One NVIDIA GPU; `memory` is in bytes, `compute_capability` as ``"9.0"``."""

    name: str
    compute_capability: str
    memory: int


@dataclass(frozen=True)
class RouteStatus:
    """Whether a route (way to update caches) is available, why or why not, and for which form of updates."""

    route: Route
    form: str
    available: bool
    detail: str


@dataclass(frozen=True)
class Diagnosis:
    """The capabilities of this machine.

    Attributes:
        driver: the newest CUDA version that the driver supports, as ``"13.0"``, or None.
        gpu_problem: the reason why no GPU can be used; empty if a GPU can be used.
        advice: installations that would add capabilities.
    """

    version: str
    python: str
    system: str
    packages: tuple[PackageStatus, ...]
    backends: tuple[BackendStatus, ...]
    driver: str | None
    gpus: tuple[Gpu, ...]
    gpu_problem: str
    routes: tuple[RouteStatus, ...]
    advice: tuple[str, ...]


def diagnose() -> Diagnosis:
    """Diagnose this machine. Report missing software and hardware without an error."""
    packages = tuple(PackageStatus(name, _version(name), use) for name, use in _PACKAGES.items())
    backends = tuple(_backend(name) for name in _BACKENDS)
    driver, gpus, problem = find_gpus()
    return Diagnosis(
        version=__version__,
        python=platform.python_version(),
        system=f"{platform.system()} {platform.machine()}",
        packages=packages,
        backends=backends,
        driver=driver,
        gpus=gpus,
        gpu_problem=problem,
        routes=_routes(backends),
        advice=(*_driver_advice(driver, backends), *_gpu_advice(gpus, backends), *_advice(packages, backends, problem)),
    )


def find_gpus() -> tuple[str | None, tuple[Gpu, ...], str]:
    """Return the driver's CUDA version, the GPUs, and the reason why there is no GPU (empty if there is one)."""
    try:
        from cuda.bindings import driver
        from cuda.pathfinder import DynamicLibNotFoundError
    except ImportError as error:
        return None, (), f"cuda-python does not import: {_line(error)}"
    try:
        _checked(driver.cuInit(0))
        version = int(_checked(driver.cuDriverGetVersion()))
        text = f"{version // 1000}.{version % 1000 // 10}"
        gpus = tuple(_gpu(driver, index) for index in range(int(_checked(driver.cuDeviceGetCount()))))
        return text, gpus, "" if gpus else "the driver finds no GPU"
    except DynamicLibNotFoundError:
        return None, (), "no NVIDIA driver is installed"
    except RuntimeError as error:
        return None, (), f"no NVIDIA driver that works: {_line(error)}"


def _gpu(driver: ModuleType, index: int) -> Gpu:
    device = _checked(driver.cuDeviceGet(index))
    attribute = driver.CUdevice_attribute
    major = _checked(driver.cuDeviceGetAttribute(attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, device))
    minor = _checked(driver.cuDeviceGetAttribute(attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, device))
    name = _checked(driver.cuDeviceGetName(128, device)).split(b"\0")[0].decode()
    return Gpu(name, f"{major}.{minor}", int(_checked(driver.cuDeviceTotalMem(device))))


def _checked(result: tuple[Any, ...]) -> Any:
    """Return the result of a CUDA driver call. If the call failed, raise a `RuntimeError` with the error's name."""
    status, *values = result
    if int(status):
        raise RuntimeError(f"{getattr(status, 'name', status)} from the CUDA driver")
    return values[0] if values else None


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _backend(name: str) -> BackendStatus:
    module_name, packages = _BACKENDS[name]
    installed = next((version for package in packages if (version := _version(package))), None)
    try:
        trt = importlib.import_module(module_name)
    except Exception as error:  # noqa: BLE001 - a package without its libraries may raise any exception of its loader
        missing = isinstance(error, ModuleNotFoundError) and error.name == module_name and installed is None
        return BackendStatus(name, installed, False, "not installed" if missing else _line(error), False, False, False)
    layer = getattr(trt, "IKVCacheUpdateLayer", None)
    packed, plugins = hasattr(layer, "update_form"), hasattr(trt.INetworkDefinition, "add_plugin_v3")
    return BackendStatus(name, str(trt.__version__), True, "", layer is not None, packed, plugins)


def _routes(backends: tuple[BackendStatus, ...]) -> tuple[RouteStatus, ...]:
    def status(route: Route, form: str, has: Callable[[BackendStatus], bool], missing: str) -> RouteStatus:
        having = [backend.name for backend in backends if has(backend)]
        return RouteStatus(route, form, bool(having), f"with {', '.join(having)}" if having else missing)

    plugins = "needs TensorRT 10.15 or later; TensorRT for RTX takes no plugins"
    return (
        status(Route.NATIVE, "padded", lambda b: b.native, "needs TensorRT for RTX, or TensorRT 10.15 or later"),
        status(Route.NATIVE, "packed", lambda b: b.packed_native, "needs TensorRT for RTX, or TensorRT 11.0 or later"),
        status(Route.PLUGIN, "any", lambda b: b.native and b.plugins, plugins),
        status(Route.FUNCTIONAL, "any", lambda b: b.importable, "needs TensorRT for RTX, or TensorRT"),
    )


def _advice(
    packages: tuple[PackageStatus, ...], backends: tuple[BackendStatus, ...], gpu_problem: str
) -> tuple[str, ...]:
    advice = []
    missing = {package.name for package in packages if package.version is None}
    if required := sorted(missing - {name for names, _ in _EXTRAS.values() for name in names}):
        advice.append(f"pip install {' '.join(required)}: these come with trt-kvcache; the installation is incomplete")
    by_name = {backend.name: backend for backend in backends}
    if not by_name["tensorrt-rtx"].importable:
        advice.append("pip install 'trt-kvcache[rtx]': builds engines on any machine, with or without a GPU")
    if not by_name["tensorrt"].importable:
        advice.append(
            "pip install 'trt-kvcache[tensorrt]': for datacenter GPUs; takes several gigabytes, and "
            "needs a GPU to build"
        )
    elif not by_name["tensorrt"].native:
        advice.append("pip install 'tensorrt>=10.15': the first version with the cache update layer")
    if gpu_problem:
        advice.append(
            "an NVIDIA GPU and its driver: engines need them to run; TensorRT for RTX builds engines without them"
        )
    for extra, (names, use) in _EXTRAS.items():
        if absent := [name for name in names if name in missing]:
            advice.append(f"pip install 'trt-kvcache[{extra}]': {', '.join(absent)}, {use}")
    return tuple(advice)


def _gpu_advice(gpus: tuple[Gpu, ...], backends: tuple[BackendStatus, ...]) -> tuple[str, ...]:
    """Return advice on GPUs for which TensorRT for RTX needs ``--compute-capabilities`` (default: 8.0 and later)."""
    if not any(backend.name == "tensorrt-rtx" and backend.importable for backend in backends):
        return ()
    advice = []
    for gpu in gpus:
        sm = "sm" + gpu.compute_capability.replace(".", "")
        if sm not in RTX_COMPUTE_CAPABILITIES:
            advice.append(
                "build --backend tensorrt, or try --compute-capabilities current: TensorRT for RTX is not made for the "
                f"{gpu.name} (compute capability {gpu.compute_capability})"
            )
        elif gpu.compute_capability.startswith("7."):
            advice.append(f"build --compute-capabilities {sm}: engines for all GPUs do not run on the {gpu.name}")
    return tuple(dict.fromkeys(advice))


def _driver_advice(driver: str | None, backends: tuple[BackendStatus, ...]) -> tuple[str, ...]:
    """Return advice to update the driver, if installed libraries need a newer version of CUDA.

    A driver accepts libraries for its major version of CUDA or an older one (``-cu12`` at the end of a package's name).
    Engines with the plugin contain PTX, which must not be newer than the driver.
    """
    if driver is None:
        return ()
    own = release(driver)
    installed = (p for _, packages in _BACKENDS.values() for p in packages if _version(p) is not None)
    needed = {p: int(p.rpartition("-cu")[2]) for p in installed if "-cu" in p}
    advice = [
        f"a newer NVIDIA driver: this one is for CUDA {driver}, and {package} needs {major}"
        for package, major in needed.items()
        if own[0] < major
    ]
    nvrtc = _version("nvidia-cuda-nvrtc")
    if nvrtc is not None and release(nvrtc) > own and any(b.native and b.plugins for b in backends):
        advice.append(
            f"pip install 'nvidia-cuda-nvrtc=={driver}.*': NVRTC {nvrtc} compiles kernels of the cache-update "
            f"plugin that are too new for this driver, which is for CUDA {driver}"
        )
    return tuple(advice)


def _line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__

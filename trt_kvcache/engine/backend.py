"""Finds the TensorRT package that builds an engine, and checks which options it supports.

Only the build process imports TensorRT, so that a crash of TensorRT's parser does not end the caller.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
from dataclasses import dataclass
from functools import cache

from trt_kvcache.engine.build_options import CURRENT, BuildOptions
from trt_kvcache.errors import BackendError, OptionError
from trt_kvcache.importer.cache_plan import Target


@dataclass(frozen=True)
class Package:
    """The Python package of a builder: name to import, ``pip`` requirement, oldest supported version and its reason."""

    title: str
    module: str
    install: str
    floor: tuple[int, int]
    reason: str


PACKAGES = {
    # IKVCacheUpdateLayer exists since 10.15 (read in the Python bindings from 10.14 on).
    Target.TENSORRT: Package(
        "TensorRT", "tensorrt", "trt-kvcache[tensorrt]", (10, 15), "the KV-cache layer exists since 10.15"
    ),
    Target.TENSORRT_RTX: Package(
        "TensorRT for RTX", "tensorrt_rtx", "trt-kvcache[rtx]", (1, 7), "earlier ones were not measured"
    ),
}

PACKED_NATIVE_SINCE = (11, 0)
"""The first TensorRT whose KV-cache layer takes packed updates. Every supported TensorRT for RTX takes them."""

WRONG_REFIT = (11, 0), (11, 3)
"""The first and the last TensorRT that may drop a bias if any weights can be refitted (``kREFIT``), even if no weights
are refitted; ``kREFIT_IDENTICAL`` is not affected. Source: the known issue in NVIDIA's documentation of 11.3,
https://docs.nvidia.com/deeplearning/tensorrt/11.3.0/inference-library/refitting-engines.html; not run here."""

RTX_COMPUTE_CAPABILITIES = ("sm75", "sm80", "sm86", "sm89", "sm120", "sm121")
"""The members of ``tensorrt_rtx.ComputeCapability`` in 1.7."""


@dataclass(frozen=True)
class Backend:
    """An installed builder; `version` is that of its package, such as ``"1.7.1.116"``."""

    target: Target
    version: str

    @property
    def title(self) -> str:
        """Name and version, for messages."""
        return f"{PACKAGES[self.target].title} {self.version}"

    @property
    def packed_native(self) -> bool:
        """True if this builder runs packed updates (tokens of all sequences in one axis) without the plugin."""
        return self.target is Target.TENSORRT_RTX or release(self.version) >= PACKED_NATIVE_SINCE


@cache  # the search reads the metadata of all packages, some 60 ms each time
def installed_version(target: Target) -> str | None:
    """Return the version of a builder's Python package; None if it is not installed."""
    module = PACKAGES[target].module
    if importlib.util.find_spec(module) is None:
        return None
    for distribution in importlib.metadata.packages_distributions().get(module, ()):
        return importlib.metadata.version(distribution)
    # The module was unpacked from an archive, without package metadata: only the module itself knows its version.
    return str(importlib.import_module(module).__version__)


def driver_present() -> bool:
    """Return True if there is an NVIDIA driver with a GPU."""
    from trt_kvcache.engine.diagnosis import find_gpus  # it imports this module

    return bool(find_gpus()[1])


def can_build(target: Target | None) -> bool:
    """Return True if this machine can build with a builder (None: with any); TensorRT needs a GPU driver."""
    installed = {known for known, package in PACKAGES.items() if importlib.util.find_spec(package.module) is not None}
    if Target.TENSORRT in installed and target is not Target.TENSORRT_RTX and driver_present():
        return True
    return Target.TENSORRT_RTX in installed and target is not Target.TENSORRT


def choose_backend(choice: str) -> Backend:
    """Return the builder for ``"auto"``, ``"tensorrt"`` or ``"tensorrt-rtx"``.

    ``"auto"`` takes TensorRT if it is installed and has the GPU driver that it needs; otherwise TensorRT for RTX.
    Raises `BackendError` if the builder is not installed, or too old.
    """
    if choice == "auto":
        full = installed_version(Target.TENSORRT) is not None and driver_present()
        target = Target.TENSORRT if full else Target.TENSORRT_RTX
    else:
        target = Target(choice)
    package, version = PACKAGES[target], installed_version(target)
    if version is None:
        raise BackendError(f"{package.title} is not installed; run: pip install '{package.install}'")
    if release(version) < package.floor:
        floor = ".".join(map(str, package.floor))
        raise BackendError(
            f"{package.title} {version} is too old, {floor} or later is needed ({package.reason}); "
            f"run: pip install -U '{package.install}'"
        )
    if target is Target.TENSORRT and not driver_present():
        raise BackendError(
            f"{package.title} {version} needs an NVIDIA GPU and driver to build, and this machine has none; "
            "build on a machine with a GPU, or with --backend tensorrt-rtx, which needs none"
        )
    return Backend(target, version)


def check_build_options(backend: Backend, build: BuildOptions) -> None:
    """Raise `OptionError` for build options that the builder does not have, or would ignore.

    Measured on TensorRT for RTX 1.7.1: the timing cache does nothing, as documented. The optimization level does not
    change the engine. Version-compatible builds fail, because the package lacks libnvinfer_lean. Refittable and
    stripped builds compile on the GPU, and fail without a driver.
    """
    if backend.target is Target.TENSORRT:
        if build.compute_capabilities:
            raise OptionError(
                f"--compute-capabilities {','.join(build.compute_capabilities)} is for TensorRT for RTX; "
                f"{backend.title} builds for the GPU that it runs on: leave it out, or use --backend tensorrt-rtx"
            )
        first, last = WRONG_REFIT
        if build.refit == "any" and first <= release(backend.version) <= last:
            raise OptionError(
                f"--refit any: {backend.title} may give wrong numbers, because it can drop the bias of a product "
                "(TensorRT 11.0 to 11.3, a known issue of NVIDIA's); use TensorRT 11.4 or later, or --refit "
                "identical if the weights stay those of the build, or leave --refit out"
            )
        return
    here = build.compute_capabilities == (CURRENT,)
    if here and not driver_present():
        raise OptionError(
            f"--compute-capabilities {CURRENT} builds for the GPU of this machine, but this machine has no NVIDIA "
            "GPU with a driver; leave it out, or name the GPUs that the engine will run on"
        )
    unknown = [c for c in build.compute_capabilities if c not in RTX_COMPUTE_CAPABILITIES and not here]
    if unknown:
        raise OptionError(
            f"{backend.title} cannot build for {', '.join(unknown)}; give some of "
            f"{', '.join(RTX_COMPUTE_CAPABILITIES)}, or {CURRENT!r} for this machine's GPU; without "
            "--compute-capabilities it builds for every GPU from sm80 on"
        )
    useless = {
        "--opt-level": (build.opt_level is not None, "gives the same engine at every optimization level"),
        "--timing-cache": (build.timing_cache is not None, "measures no kernels while building"),
        "--declare-aliases": (build.declare_aliases, "has no plugins"),
        "--version-compatible": (build.version_compatible, "comes without the lean runtime that such engines contain"),
    }
    for flag, (is_set, why) in useless.items():
        if is_set:
            raise OptionError(
                f"{flag} has no effect here: {backend.title} {why}; leave it out, or use --backend tensorrt"
            )
    asked = {"--refit": build.refit != "none", "--strip-plan": build.strip_plan}
    gpu_only = [flag for flag, is_set in asked.items() if is_set]
    if gpu_only and not driver_present():
        raise OptionError(
            f"{' and '.join(gpu_only)}: {backend.title} needs an NVIDIA GPU and driver to build such an engine, but "
            "this machine has none; leave it out, or build on a machine with a GPU"
        )


def release(version: str) -> tuple[int, int]:
    """Return the first two numbers of a version; (0, 0) for a text of another form."""
    match = re.match(r"(\d+)\.(\d+)", version)
    return (int(match[1]), int(match[2])) if match else (0, 0)

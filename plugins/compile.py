"""Compiles kernels with NVRTC to PTX or a cubin, keeps the compiler's report, and caches both on disk.

Neither a GPU nor a driver is needed. ``cuda.core.Program`` (1.2) is not used, because it asks the driver for its
version before it compiles PTX.
"""

from __future__ import annotations

import os
import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from blake3 import blake3

from trt_kvcache.errors import BackendError, OptionError, OutputError
from trt_kvcache.files import atomic_file
from trt_kvcache.plugins.source import kernel_source
from trt_kvcache.plugins.spec import THREADS, KernelConfig

CACHE_VARIABLE = "TRT_KVCACHE_KERNELS"
"""Environment variable: the folder of compiled kernels, instead of ``trt_kvcache/kernels`` in the user's cache."""

_WARPS = {75: 32, 80: 64, 86: 48, 87: 48, 89: 48, 90: 64, 100: 64, 103: 64, 110: 48, 120: 48, 121: 48}
"""The most warps on a multiprocessor, by compute capability (CUDA Programming Guide, technical specifications)."""

_OPTIONS = (
    "--std=c++17",
    "--fmad=false",  # otherwise the driver may fuse a product and a sum, which rounds once instead of twice
    "--device-as-default-execution-space",  # NVRTC 13.0 treats generic lambdas in device functions as host functions
)

_REGISTERS = 65536  # registers of a multiprocessor, on all architectures; a warp gets them in units of 256


@dataclass(frozen=True)
class ResourceUse:
    """The resources of one kernel, as ptxas reports them.

    Attributes:
        registers: registers per thread.
        stack_bytes, spill_store_bytes, spill_load_bytes: bytes of local memory per thread; nonzero: the kernel is slow.
        occupancy: resident warps that the registers allow, divided by the most that a multiprocessor can hold; None if
            the architecture's limit is unknown.
    """

    registers: int
    stack_bytes: int
    spill_store_bytes: int
    spill_load_bytes: int
    occupancy: float | None


@dataclass(frozen=True)
class CompiledKernel:
    """One compiled kernel: its entry function `name`, architecture such as ``"sm_90"``, code and compiler's log.

    `ptx`: True if `code` is PTX (without a final zero byte), False if it is a cubin. PTX needs a driver for NVRTC's
    version of CUDA or a later one; a cubin needs a driver for the same major version.
    """

    name: str
    arch: str
    nvrtc: tuple[int, int]
    ptx: bool
    code: bytes
    log: str

    @property
    def resources(self) -> ResourceUse:
        """The resources that a cubin needs (the largest, if it holds several kernels); raise `OptionError` for PTX."""
        if self.ptx:
            raise OptionError(
                f"the registers of kernel {self.name} are not known, because it was compiled to PTX: "
                "compile it to a cubin"
            )
        sizes = re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", self.log)
        used = re.findall(r"Used (\d+) registers", self.log)
        if not sizes or not used:
            raise BackendError(
                f"NVRTC {_text(self.nvrtc)} reported nothing about kernel {self.name}: {self.log.strip()!r}"
            )
        registers = max(map(int, used))
        stack, stores, loads = (max(map(int, counts)) for counts in zip(*sizes, strict=True))
        return ResourceUse(registers, stack, stores, loads, _occupancy(registers, self.arch))


def compile_kernel(
    config: KernelConfig, arch: str, *, ptx: bool = False, driver: tuple[int, int] | None = None
) -> CompiledKernel:
    """Compile a cache-update kernel to PTX or a cubin for an architecture; `compile_source` explains the arguments."""
    return compile_source(kernel_source(config), config.name, arch, ptx=ptx, driver=driver)


def compile_source(
    source: str, name: str, arch: str, *, ptx: bool = False, driver: tuple[int, int] | None = None
) -> CompiledKernel:
    """Compile a kernel (CUDA C++, entry function `name`) to PTX or a cubin, or take it from the cache on disk.

    PTX works on later architectures, too; a cubin only on `arch`, such as ``"sm_90"``. `driver` is the CUDA version of
    the driver that will load the kernel, if known. The cache's key is made of source, options, architecture and NVRTC's
    version.

    Raises:
        OptionError: NVRTC does not know the architecture, or writes code that is too new for the driver.
        BackendError: NVRTC is not installed, or it failed; the message has the compiler's log.
    """
    check_compiler(arch, ptx=ptx, driver=driver)
    version = nvrtc_version()
    # A virtual architecture: PTX for this one and all later ones.
    target = arch.replace("sm_", "compute_") if ptx else arch
    options = (f"--gpu-architecture={target}", *_OPTIONS, *(() if ptx else ("--ptxas-options=-v",)))
    key = blake3("\0".join((source, *options, arch, str(ptx), _text(version))).encode()).hexdigest()
    path = kernel_folder() / f"{key}.kernel"
    cached = _read(path)
    if cached is not None:
        return cached
    code, log = _compile(source, name, options, ptx=ptx)
    kernel = CompiledKernel(name, arch, version, ptx, code, log)
    _write(path, kernel)
    return kernel


def kernel_folder() -> Path:
    """Return the folder in which compiled kernels are cached; it need not exist yet."""
    chosen = os.environ.get(CACHE_VARIABLE)
    if chosen:
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "trt_kvcache" / "kernels"


def nvrtc_version() -> tuple[int, int]:
    """Return NVRTC's major and minor version; raise `BackendError` if NVRTC is not installed."""
    from cuda.pathfinder import DynamicLibNotFoundError

    try:
        major, minor = _handle_return(_nvrtc().nvrtcVersion())
    except DynamicLibNotFoundError as error:  # the bindings load the library with the first call
        raise BackendError(
            "NVRTC, which compiles kernels, is not installed: pip install 'trt-kvcache[plugin]'"
        ) from error
    return int(major), int(minor)


def supported_archs() -> tuple[str, ...]:
    """Return the architectures that NVRTC knows, such as ``"sm_90"``, ascending; raise `BackendError` without NVRTC."""
    return tuple(f"sm_{number}" for number in _handle_return(_nvrtc().nvrtcGetSupportedArchs()))


def check_compiler(arch: str, *, ptx: bool = False, driver: tuple[int, int] | None = None) -> None:
    """Check that NVRTC can compile for an architecture, and that a driver accepts the result; see `compile_source`."""
    version, known = nvrtc_version(), supported_archs()
    if arch not in known:
        raise OptionError(
            f"NVRTC {_text(version)} cannot compile for architecture {arch!r}; give one of {', '.join(known)}"
        )
    if driver is not None and ((driver < version) if ptx else (driver[0] < version[0])):
        kind, needed = ("PTX", _text(version)) if ptx else ("a cubin", str(version[0]))
        raise OptionError(
            f"{kind} from NVRTC {_text(version)} needs a driver for CUDA {needed}, but this driver is for CUDA "
            f"{_text(driver)}: install an older nvidia-cuda-nvrtc ({_text(driver) if ptx else driver[0]}.*), or a "
            "newer driver"
        )


def _compile(source: str, name: str, options: tuple[str, ...], *, ptx: bool) -> tuple[bytes, str]:
    nvrtc = _nvrtc()
    program = _handle_return(nvrtc.nvrtcCreateProgram(source.encode(), f"{name}.cu".encode(), 0, [], []))
    try:
        (status,) = nvrtc.nvrtcCompileProgram(program, len(options), [option.encode() for option in options])
        # Not a `bytes` object: NVRTC writes into the buffer, but Python shares `bytes` of length 1, such as an empty
        # log.
        log = bytearray(_handle_return(nvrtc.nvrtcGetProgramLogSize(program)))
        _handle_return(nvrtc.nvrtcGetProgramLog(program, log))
        text = log.rstrip(b"\0").decode(errors="replace")
        _handle_return((status,), f"kernel {name} with {' '.join(options)}: {text.strip()}")
        size, read = (
            (nvrtc.nvrtcGetPTXSize, nvrtc.nvrtcGetPTX) if ptx else (nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN)
        )
        code = bytearray(_handle_return(size(program)))
        _handle_return(read(program, code))
        return bytes(code.rstrip(b"\0") if ptx else code), text
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def _nvrtc() -> Any:
    from cuda.bindings import nvrtc

    return nvrtc


def _handle_return(result: tuple[Any, ...], about: str = "") -> Any:
    """Return the results of an NVRTC call: an empty tuple, one value, or several. `BackendError` if the call failed."""
    status, *values = result
    if status != _nvrtc().nvrtcResult.NVRTC_SUCCESS:
        raise BackendError(f"NVRTC: {status.name}{f': {about}' if about else ''}")
    return values[0] if len(values) == 1 else tuple(values)


def _read(path: Path) -> CompiledKernel | None:
    try:
        digest, content = (data := path.read_bytes())[:32], data[32:]
        if blake3(content).digest() != digest:
            return None
        return msgspec.msgpack.decode(content, type=CompiledKernel)
    except (OSError, msgspec.DecodeError):
        return None


def _write(path: Path, kernel: CompiledKernel) -> None:
    content = msgspec.msgpack.encode(kernel)
    with suppress(OSError, OutputError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_file(path) as file:
            file.write(blake3(content).digest() + content)


def _occupancy(registers: int, arch: str) -> float | None:
    limit = _WARPS.get(int(arch.removeprefix("sm_")))
    if limit is None:
        return None
    warps = THREADS // 32
    per_warp = -(-registers * 32 // 256) * 256
    return min(limit // warps, _REGISTERS // (per_warp * warps)) * warps / limit


def _text(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"

"""Compiles plugin kernels for the GPU of this machine. TensorRT embeds them in the engine that it builds here."""

from __future__ import annotations

from typing import Any

from trt_kvcache.errors import BackendError
from trt_kvcache.plugins.compile import check_compiler, compile_kernel
from trt_kvcache.plugins.register import Compile, Registration, register_plugins
from trt_kvcache.plugins.spec import KernelConfig


def register_for_this_gpu(trt: Any, *, declare_aliases: bool) -> Registration:
    """Register the plugin with kernels for the GPU that TensorRT builds for (CUDA's first visible device).

    TensorRT asks for each kernel later. This function already raises `OptionError` if NVRTC does not know the
    architecture or writes code that is too new for the driver, and `BackendError` if NVRTC or the driver is missing.
    """
    arch, driver = this_gpu()
    check_compiler(arch, ptx=True, driver=driver)
    return register_plugins(trt, kernels_for(arch, driver), declare_aliases=declare_aliases)


def kernels_for(arch: str, driver: tuple[int, int]) -> Compile:
    """Return a function that compiles kernels for one GPU and driver to PTX, which later GPUs accept as well.

    TensorRT accepts no cubin: the documentation of ``aot_impl`` asks for PTX, and the runtime passes the code on as
    text that ends at the first zero byte (``setPTX(ptx.c_str())``, seen in 10.15 and 11.4).
    """

    def compile_here(config: KernelConfig) -> bytes:
        return compile_kernel(config, arch, ptx=True, driver=driver).code

    return compile_here


def this_gpu() -> tuple[str, tuple[int, int]]:
    """Return the first GPU's architecture and the driver's CUDA version; raise `BackendError` if either is missing."""
    from cuda.bindings import driver

    names = driver.CUdevice_attribute
    try:
        _call(driver.cuInit(0))
        version = _call(driver.cuDriverGetVersion())
        device = _call(driver.cuDeviceGet(0))
        major = _call(driver.cuDeviceGetAttribute(names.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, device))
        minor = _call(driver.cuDeviceGetAttribute(names.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, device))
    except RuntimeError as error:  # cuda-python: the driver's library is not on this machine
        raise BackendError(
            f"the cache-update plugin is compiled for the GPU of this machine, but no NVIDIA driver works here: {error}"
        ) from error
    return f"sm_{major}{minor}", (version // 1000, version % 1000 // 10)


def _call(result: tuple[Any, ...]) -> Any:
    status, *values = result
    if int(status):
        raise BackendError(
            f"the cache-update plugin is compiled for the GPU of this machine, but the driver returned {status.name}"
        )
    return values[0] if values else None

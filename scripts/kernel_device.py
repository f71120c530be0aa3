"""Launches kernels on a GPU, without TensorRT: for their tests and benchmarks.

Kernels are loaded in the form that engines contain: PTX, which the driver compiles. ``cuda.core.ObjectCode`` (1.2.2)
gives it to ``cuLibraryLoadData`` without options. If the driver is older than NVRTC, NVRTC's own ptxas makes a cubin.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trt_kvcache.plugins.compile import compile_kernel, nvrtc_version
from trt_kvcache.plugins.spec import KernelConfig

_BUSY_BYTES = 1 << 30
"""Bytes that keep a GPU busy for a few hundred microseconds: longer than a launch from Python takes."""


class KernelDevice:
    """A GPU, its stream, the kernels loaded on it, and the memory taken."""

    def __init__(self, index: int = 0) -> None:
        import cuda.core
        from cuda.bindings import driver

        self._core, self._driver = cuda.core, driver
        self._device = cuda.core.Device(index)
        self._device.set_current()
        self.name = str(self._device.name)
        self.arch = "sm_{}{}".format(*self._device.compute_capability)
        self.stream = self._device.create_stream()
        self._handle = int(self.stream.handle)
        self._kernels: dict[tuple[str, bool], Any] = {}
        self._memory: list[int] = []
        version = self._check(driver.cuDriverGetVersion())
        self._cuda = version // 1000, version % 1000 // 10

    def kernel(self, config: KernelConfig, *, cubin: bool | None = None) -> Any:
        """Return the kernel, loaded once: from a cubin for this GPU, or PTX; None: from PTX if the driver takes it."""
        cubin = self._cuda < nvrtc_version() if cubin is None else cubin
        key = config.name, cubin
        if key not in self._kernels:
            made = compile_kernel(config, self.arch, ptx=not cubin, driver=self._cuda)
            load = self._core.ObjectCode.from_cubin if cubin else self._core.ObjectCode.from_ptx
            self._kernels[key] = load(made.code, name=config.name).get_kernel(config.name)
        return self._kernels[key]

    def load(self, configs: Iterable[KernelConfig]) -> None:
        """Load kernels from PTX, several at a time: each takes 0.2 s. A failed kernel raises an error when used."""

        def one(config: KernelConfig) -> None:
            self._device.set_current()  # in this thread
            self.kernel(config)

        with ThreadPoolExecutor(os.cpu_count()) as pool:
            for config in configs:
                pool.submit(one, config)

    def empty_kernel(self) -> Any:
        """Return a kernel that does nothing, to measure a launch."""
        options = self._core.ProgramOptions(arch=self.arch)
        program = self._core.Program('extern "C" __global__ void nothing() {}', "c++", options)
        return program.compile("cubin").get_kernel("nothing")

    def launch(self, kernel: Any, grid: int, block: int, *arguments: int | np.int32) -> None:
        """Put a launch on the stream; addresses are ints, extra arguments ``np.int32``."""
        self._core.launch(self.stream, self._core.LaunchConfig(grid=grid, block=block), kernel, *arguments)

    def launch_update(
        self,
        config: KernelConfig,
        grid: int,
        block: int,
        inputs: Sequence[int],
        scalars: Sequence[int],
        outputs: Sequence[int],
        *,
        cubin: bool | None = None,
    ) -> None:
        """Put an update on the stream, its arguments in TensorRT's order."""
        self.launch(self.kernel(config, cubin=cubin), grid, block, *inputs, *map(np.int32, scalars), *outputs)

    def allocate(self, size: int, fill: int = 0) -> int:
        """Return the address of `size` new bytes, each `fill`."""
        address = int(self._check(self._driver.cuMemAlloc(max(size, 1))))
        self._memory.append(address)
        self._check(self._driver.cuMemsetD8Async(address, fill, max(size, 1), self._handle))
        return address

    def upload(self, tensor: NDArray[np.generic], shift: int = 0) -> int:
        """Return the address of a copy of `tensor`, `shift` bytes past an aligned one."""
        address = self.allocate(tensor.nbytes + shift) + shift
        content = tensor.tobytes()
        if content:  # on the stream: cuMemcpyHtoD may return before the bytes are there, and no other stream waits
            self._check(self._driver.cuMemcpyHtoDAsync(address, content, len(content), self._handle))
            self.sync()
        return address

    def download(self, address: int, size: int) -> NDArray[np.uint8]:
        """Return `size` bytes of the GPU's memory, from `address` on."""
        self.sync()
        content = np.empty(size, np.uint8)
        if size:
            self._check(self._driver.cuMemcpyDtoH(content.ctypes.data_as(ctypes.c_void_p).value, address, size))
        return content

    def copy(self, target: int, source: int, size: int) -> None:
        """Put a device-to-device copy on the stream."""
        self._check(self._driver.cuMemcpyDtoDAsync(target, source, size, self._handle))

    def seconds(self, work: Callable[[], None], repeat: int = 50) -> float:
        """Return the median seconds of one `work` on the stream.

        Each `work` is launched while the GPU is still busy with something else, so that the time of the launch from
        Python is not measured.
        """
        from cuda.core import EventOptions

        busy, size = self.allocate(_BUSY_BYTES), _BUSY_BYTES
        times = []
        for _ in range(repeat + 3):  # the first ones warm up
            self._check(self._driver.cuMemsetD8Async(busy, 0, size, self._handle))
            start = self.stream.record(options=EventOptions(timing_enabled=True))
            work()
            stop = self.stream.record(options=EventOptions(timing_enabled=True))
            stop.sync()
            times.append((stop - start) / 1000)
        return float(np.median(times[3:]))

    def sync(self) -> None:
        """Wait for the stream, and raise the errors on it."""
        self.stream.sync()

    def free(self) -> None:
        """Give all memory back."""
        self.sync()
        for address in self._memory:
            self._check(self._driver.cuMemFree(address))
        self._memory.clear()

    def _check(self, result: tuple[Any, ...]) -> Any:
        status, *values = result
        if status != self._driver.CUresult.CUDA_SUCCESS:
            raise RuntimeError(f"CUDA driver: {status.name}")
        return values[0] if values else None

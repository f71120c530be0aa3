"""One GPU, one stream, and the memory taken from it, through cuda.core and cuda.bindings.

Everything CUDA says is checked in this file: a driver call that fails, or an exception of cuda.core, becomes a
`BackendError` that names the call. Nothing here knows TensorRT.

Memory comes from ``cuMemAlloc``, not from cuda.core's stream-ordered pools: caches live as long as the session, and a
pool keeps what is freed, so that the free memory the driver reports would be less than what TensorRT can have.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from trt_kvcache.errors import BackendError

__all__ = ["ALIGNMENT", "Cuda", "CudaBindings", "Pinned", "cuda_bindings"]

ALIGNMENT = 256
"""Bytes. What TensorRT asks of every tensor's address (NvInferRuntime.h, setTensorAddress)."""


@dataclass(frozen=True)
class CudaBindings:
    """The modules that talk to CUDA: ``cuda.core`` and ``cuda.bindings.driver``, or what stands in for them."""

    core: Any
    driver: Any


def cuda_bindings() -> CudaBindings:
    """The real modules. They import without a driver."""
    import cuda.core
    from cuda.bindings import driver

    return CudaBindings(cuda.core, driver)


@dataclass(frozen=True, eq=False)
class Pinned:
    """Page-locked host memory: its address, and the same bytes as an array uint8 ``[size]``."""

    address: int
    data: npt.NDArray[np.uint8]


class Cuda:
    """One GPU and one stream.

    Copies and fills are put on the stream and return at once; `sync` waits for them.

    Attributes:
        name: of the GPU.
        compute_capability: ``"9.0"``.

    Args:
        device: number of the GPU.
        bindings: see `CudaBindings`.

    Raises:
        BackendError: there is no driver, or no such GPU.
    """

    def __init__(self, device: int, bindings: CudaBindings) -> None:
        self._driver = bindings.driver
        self._core = bindings.core
        self._index = device
        self._memory: dict[int, int] = {}
        self._pinned: set[int] = set()
        self._current = threading.local()
        try:
            self._check("cuInit", self._driver.cuInit(0))
            count = int(self._check("cuDeviceGetCount", self._driver.cuDeviceGetCount()))
        except (RuntimeError, BackendError) as error:  # cuda-python's DynamicLibNotFoundError is a RuntimeError
            raise BackendError(
                f"an engine runs on an NVIDIA GPU, and no driver works here: {' '.join(str(error).split())}; install "
                "the NVIDIA driver, or run the model's .onnx file, which needs no GPU"
            ) from error
        if not 0 <= device < count:
            raise BackendError(f"there is no GPU number {device}: the driver finds {count}, counted from 0")
        with self._core_errors("open the GPU"):
            gpu = self._core.Device(device)
            gpu.set_current()
            self.name = str(gpu.name)
            self.compute_capability = "{}.{}".format(*gpu.compute_capability)
            self._stream = gpu.create_stream()
        self._current.done = True
        self.stream = int(self._stream.handle)

    def activate(self) -> None:
        """Make the GPU's context current in the calling thread; CUDA keeps one per thread."""
        if not getattr(self._current, "done", False):
            with self._core_errors("use the GPU in this thread"):
                self._core.Device(self._index).set_current()  # its Device objects belong to one thread
            self._current.done = True

    def free_memory(self) -> tuple[int, int]:
        """Free and total bytes of the GPU, as the driver counts them."""
        free, total = self._check("cuMemGetInfo", self._driver.cuMemGetInfo())
        return int(free), int(total)

    @property
    def allocated(self) -> int:
        """Bytes of GPU memory that are held here."""
        return sum(self._memory.values())

    def allocate(self, size: int) -> int:
        """Take `size` bytes of GPU memory, zeroed, and return their address."""
        size = max(size, 1)
        address = int(self._check(f"cuMemAlloc of {size} bytes", self._driver.cuMemAlloc(size)))
        self._memory[address] = size
        self._check("cuMemsetD8Async", self._driver.cuMemsetD8Async(address, 0, size, self.stream))
        return address

    def allocate_pinned(self, size: int) -> Pinned:
        """Take `size` bytes of page-locked host memory, from and to which copies run at full speed."""
        size = max(size, 1)
        address = int(self._check(f"cuMemAllocHost of {size} bytes", self._driver.cuMemAllocHost(size)))
        self._pinned.add(address)
        return Pinned(address, np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(address)))

    def upload(self, target: int, source: int, size: int) -> None:
        """Copy bytes from pinned host memory to the GPU."""
        self._check("cuMemcpyHtoDAsync", self._driver.cuMemcpyHtoDAsync(target, source, size, self.stream))

    def copy_rows(self, target: int, source: int, pitch: int, width: int, height: int) -> None:
        """Copy `height` runs of `width` bytes, which start `pitch` bytes apart on both sides, within the GPU."""
        kind = self._driver.CUmemorytype.CU_MEMORYTYPE_DEVICE
        self._copy_2d((kind, source, pitch), (kind, target, pitch), width, height)

    def download_rows(self, target: int, source: int, pitch: int, width: int, height: int) -> None:
        """Copy `height` runs of `width` bytes, `pitch` bytes apart, from the GPU to pinned memory, there packed."""
        kinds = self._driver.CUmemorytype
        device, host = kinds.CU_MEMORYTYPE_DEVICE, kinds.CU_MEMORYTYPE_HOST
        self._copy_2d((device, source, pitch), (host, target, width), width, height)

    def upload_rows(self, target: int, source: int, pitch: int, width: int, height: int) -> None:
        """The inverse of `download_rows`: packed host runs to runs `pitch` bytes apart on the GPU."""
        kinds = self._driver.CUmemorytype
        device, host = kinds.CU_MEMORYTYPE_DEVICE, kinds.CU_MEMORYTYPE_HOST
        self._copy_2d((host, source, width), (device, target, pitch), width, height)

    def zero_rows(self, target: int, pitch: int, width: int, height: int) -> None:
        """Set `height` runs of `width` bytes, `pitch` bytes apart, to 0."""
        result = self._driver.cuMemsetD2D8Async(target, pitch, 0, width, height, self.stream)
        self._check("cuMemsetD2D8Async", result)

    def sync(self) -> None:
        """Wait until everything on the stream is done; what failed meanwhile is raised here."""
        self._check("cuStreamSynchronize", self._driver.cuStreamSynchronize(self.stream))

    def capture(self, work: Callable[[], None]) -> Any:
        """Record what `work` puts on the stream as a CUDA graph, without running it.

        Returns:
            The graph, for `launch` and `discard`.

        Raises:
            BackendError: something in it cannot be recorded. The stream is usable again.
        """
        with self._core_errors("record a CUDA graph"):
            builder = self._stream.create_graph_builder()
            try:
                # Not "relaxed": a call that would allocate or wait must fail here instead of being left out.
                builder.begin_building(mode="thread_local")
                try:
                    work()
                except BaseException:
                    with suppress(Exception):  # it says no more than that recording failed; `work` says why
                        builder.end_building()
                    raise
                return builder.end_building().complete()
            finally:
                builder.close()

    def launch(self, graph: Any) -> None:
        """Put a recorded graph on the stream."""
        with self._core_errors("launch a CUDA graph"):
            graph.launch(self._stream)

    def discard(self, graph: Any) -> None:
        """Free a recorded graph."""
        with self._core_errors("free a CUDA graph"):
            graph.close()

    def view(self, address: int, shape: tuple[int, ...], dtype: np.dtype[Any], owner: object) -> Any:
        """GPU memory as an object with ``__dlpack__``; it keeps `owner` alive."""
        with self._core_errors("view a cache"):
            size = int(np.prod(shape)) * dtype.itemsize
            buffer = self._core.Buffer.from_handle(address, size, owner=owner)
            return self._core.utils.StridedMemoryView.from_buffer(buffer, shape, dtype=dtype)

    def close(self) -> None:
        """Give everything back. Calling it again does nothing.

        Never fails: after a fault of the GPU every call does, and its memory goes with the process's context.
        """
        for address in tuple(self._memory):
            self._driver.cuMemFree(address)
        for address in self._pinned:
            self._driver.cuMemFreeHost(address)
        self._memory.clear()
        self._pinned.clear()
        with suppress(BackendError), self._core_errors("close the stream"):
            self._stream.close()

    def _copy_2d(self, source: tuple[Any, int, int], target: tuple[Any, int, int], width: int, height: int) -> None:
        copy = self._driver.CUDA_MEMCPY2D()
        copy.srcMemoryType, start, copy.srcPitch = source
        host = self._driver.CUmemorytype.CU_MEMORYTYPE_HOST
        setattr(copy, "srcHost" if copy.srcMemoryType == host else "srcDevice", start)
        copy.dstMemoryType, start, copy.dstPitch = target
        setattr(copy, "dstHost" if copy.dstMemoryType == host else "dstDevice", start)
        copy.WidthInBytes, copy.Height = width, height
        self._check("cuMemcpy2DAsync", self._driver.cuMemcpy2DAsync(copy, self.stream))

    def _check(self, call: str, result: tuple[Any, ...]) -> Any:
        """What a driver call gave, once its status is known to be success."""
        status, *values = result
        if int(status):
            _, text = self._driver.cuGetErrorString(status)
            words = text.decode() if isinstance(text, bytes) else str(text)
            raise BackendError(f"CUDA: {call} failed: {getattr(status, 'name', status)} ({words})")
        return values[0] if len(values) == 1 else tuple(values)

    @contextmanager
    def _core_errors(self, what: str) -> Iterator[None]:
        """Turn what cuda.core raises into our error."""
        try:
            yield
        except BackendError:
            raise
        except Exception as error:  # its CUDAError has no public name in cuda.core 1.2
            raise BackendError(f"CUDA: cannot {what}: {' '.join(str(error).split())}") from error

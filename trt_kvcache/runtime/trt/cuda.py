"""One GPU, one stream, and the memory allocated on it, through cuda.core and cuda.bindings.

A failed driver call, or an exception of cuda.core, becomes a `BackendError` that names the call. Memory comes from
``cuMemAlloc``, not from cuda.core's stream-ordered pools: a pool would keep freed memory, and the driver would report
less free memory than TensorRT can get.
"""

from __future__ import annotations

import ctypes
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from trt_kvcache.errors import BackendError
from trt_kvcache.machine import free_memory
from trt_kvcache.messages import human_bytes

ALIGNMENT = 256
"""Alignment in bytes that TensorRT needs for every tensor's address (NvInferRuntime.h, setTensorAddress)."""

_MAX_PITCH = 2**31 - 1
"""Most bytes between rows of a 2-D copy: CU_DEVICE_ATTRIBUTE_MAX_PITCH of every GPU so far."""

_PAGE = 2 << 20
"""Bytes of the pages in which the driver allocates GPU memory: widely observed, but not documented."""

_STAGING = 8 << 20
"""Bytes of pinned memory through which arrays are copied if they do not lie in pinned memory. Longer arrays are copied
in pieces.
"""

_DEVICE, _HOST = "Device", "Host"


def taken(size: int) -> int:
    """Return the bytes of GPU memory that an allocation takes: whole pages of 2 MiB; small ones share a page."""
    return size if size <= _PAGE // 2 else -(-size // _PAGE) * _PAGE


@dataclass(frozen=True)
class CudaBindings:
    """The modules that call CUDA: ``cuda.core`` and ``cuda.bindings.driver``, or replacements for tests."""

    core: Any
    driver: Any


def cuda_bindings() -> CudaBindings:
    """Return the real modules of cuda.core and cuda.bindings. They can be imported without a driver."""
    import cuda.core
    from cuda.bindings import driver

    return CudaBindings(cuda.core, driver)


@dataclass(frozen=True, eq=False)
class Pinned:
    """Page-locked host memory: its address, and the same bytes as an array uint8 ``[size]``."""

    address: int
    data: npt.NDArray[np.uint8]


class Cuda:
    """One GPU and one stream. Copies and fills are put on the stream and return at once; `sync` waits for them.

    Raises `BackendError` if there is no driver, or no GPU with the index `device`.
    """

    def __init__(self, device: int, bindings: CudaBindings) -> None:
        self._driver, self._core = bindings.driver, bindings.core
        self._memory: dict[int, int] = {}
        self._pinned: set[int] = set()
        try:
            self._check("cuInit", self._driver.cuInit(0))
            count = int(self._check("cuDeviceGetCount", self._driver.cuDeviceGetCount()))
        except (RuntimeError, BackendError) as error:  # cuda-python's DynamicLibNotFoundError is a RuntimeError
            said = " ".join(str(error).split()).rstrip(".")
            raise BackendError(
                f"an engine needs an NVIDIA GPU, but no driver works here: {said}; install the NVIDIA driver, or "
                "run the model's .onnx file, which needs no GPU"
            ) from error
        if not 0 <= device < count:
            raise BackendError(f"there is no GPU number {device}: the driver finds {count}, counted from 0")
        with self._core_errors("open the GPU"):
            gpu = self._core.Device(device)
            gpu.set_current()
            self.name = str(gpu.name)
            self.compute_capability = "{}.{}".format(*gpu.compute_capability)
            self._stream = gpu.create_stream()
        self._context = self._check("cuCtxGetCurrent", self._driver.cuCtxGetCurrent())
        attribute = self._driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_INTEGRATED
        handle = self._check("cuDeviceGet", self._driver.cuDeviceGet(device))
        integrated = self._check("cuDeviceGetAttribute", self._driver.cuDeviceGetAttribute(attribute, handle))
        self._integrated = bool(integrated)
        self.stream = int(self._stream.handle)

    def activate(self) -> None:
        """Make the GPU's context current in the calling thread, where other code may have made another one current."""
        self._check("cuCtxSetCurrent", self._driver.cuCtxSetCurrent(self._context))

    @contextmanager
    def activated(self) -> Iterator[None]:
        """Make the GPU's context current within a block that may run at any time, even during garbage collection.

        The state of the thread is preserved: another GPU may be current. A stream may be recording, which usually
        forbids allocation; here it does not. This method never fails.
        """
        driver = self._driver
        _, before = driver.cuCtxGetCurrent()
        relaxed = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
        status, mode = driver.cuThreadExchangeStreamCaptureMode(relaxed)
        driver.cuCtxSetCurrent(self._context)
        try:
            yield
        finally:
            if not int(status):
                driver.cuThreadExchangeStreamCaptureMode(mode)
            driver.cuCtxSetCurrent(before)

    def free_memory(self) -> tuple[int, int]:
        """Return the free and the total bytes of the GPU, as the driver counts them.

        If the GPU shares the machine's memory (DGX Spark), the system's free memory counts, too, because there the
        driver counts cached pages of files as used, although the system frees them on demand.
        """
        free, total = map(int, self._check("cuMemGetInfo", self._driver.cuMemGetInfo()))
        return max(free, min(free_memory(), total)) if self._integrated else free, total

    @property
    def allocated(self) -> int:
        """Bytes of GPU memory that this object allocated, in the driver's whole pages."""
        return sum(map(taken, self._memory.values()))

    @property
    def driver_version(self) -> tuple[int, int]:
        """The CUDA version that the driver supports."""
        version = int(self._check("cuDriverGetVersion", self._driver.cuDriverGetVersion()))
        return version // 1000, version % 1000 // 10

    def allocate(self, size: int) -> int:
        """Allocate `size` bytes of zeroed GPU memory, and return its address."""
        size = max(size, 1)
        address = int(self._check(f"cuMemAlloc of {size} bytes", self._driver.cuMemAlloc(size)))
        self._memory[address] = size
        self._check("cuMemsetD8Async", self._driver.cuMemsetD8Async(address, 0, size, self.stream))
        return address

    def free(self, address: int) -> None:
        """Free GPU memory before `close`, after all work on the stream is done."""
        self.sync()
        self._check("cuMemFree", self._driver.cuMemFree(address))
        del self._memory[address]

    @contextmanager
    def undone_on_failure(self) -> Iterator[None]:
        """If the ``with`` block fails, free the memory that it allocated."""
        memory, pinned = set(self._memory), {*self._pinned, self._staging.address}
        try:
            yield
        except BaseException:
            self._free(self._memory.keys() - memory, self._pinned - pinned)
            raise

    def allocate_pinned(self, size: int) -> Pinned:
        """Allocate `size` bytes of page-locked host memory; copies from and to it run at full speed."""
        size = max(size, 1)
        address = int(self._check(f"cuMemAllocHost of {size} bytes", self._driver.cuMemAllocHost(size)))
        self._pinned.add(address)
        return Pinned(address, np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(address)))

    def free_pinned(self, memory: Pinned) -> None:
        """Free page-locked memory before `close`. A second call for the same memory does nothing."""
        if memory.address in self._pinned:
            self.sync()
            self._check("cuMemFreeHost", self._driver.cuMemFreeHost(memory.address))
            self._pinned.remove(memory.address)

    def upload(self, target: int, source: int, size: int) -> None:
        """Copy bytes from pinned host memory to the GPU."""
        self._check("cuMemcpyHtoDAsync", self._driver.cuMemcpyHtoDAsync(target, source, size, self.stream))

    @cached_property
    def _staging(self) -> Pinned:
        return self.allocate_pinned(_STAGING)

    def upload_pieces(self, target: int, data: npt.NDArray[Any], pitch: int = 0, height: int = 1) -> None:
        """Copy an array to the GPU, and wait. Its `height` blocks of equal size start `pitch` bytes apart there."""
        data, through = np.ascontiguousarray(data).reshape(-1).view(np.uint8), self._staging
        if height > 1 and data.size > through.data.size:
            for run, part in enumerate(data.reshape(height, -1)):
                self.upload_pieces(target + run * pitch, part)
            return
        for start in range(0, data.size, through.data.size):
            piece = data[start : start + through.data.size]
            through.data[: piece.size] = piece
            width = piece.size // height
            self.upload_rows(target + start, through.address, pitch or width, width, height)
            self.sync()  # the next piece goes through the same memory

    def download_pieces(self, source: int, width: int, pitch: int = 0, height: int = 1) -> npt.NDArray[np.uint8]:
        """Return a host copy of `height` blocks of `width` bytes that lie `pitch` bytes apart on the GPU."""
        data, through = np.empty(width * height, np.uint8), self._staging
        if height > 1 and data.size > through.data.size:
            return np.concatenate([self.download_pieces(source + run * pitch, width) for run in range(height)])
        for start in range(0, data.size, through.data.size):
            piece = data[start : start + through.data.size]
            run = piece.size // height
            self.download_rows(through.address, source + start, pitch or run, run, height)
            self.sync()
            piece[...] = through.data[: piece.size]
        return data

    def copy_rows(self, target: int, source: int, pitch: int, width: int, height: int) -> None:
        """Copy `height` blocks of `width` bytes within the GPU. In both places they start `pitch` bytes apart."""
        self._copy_2d((_DEVICE, source, pitch), (_DEVICE, target, pitch), width, height)

    def download_rows(self, target: int, source: int, pitch: int, width: int, height: int) -> None:
        """Copy `height` blocks of `width` bytes, `pitch` bytes apart, from the GPU to consecutive pinned memory."""
        self._copy_2d((_DEVICE, source, pitch), (_HOST, target, width), width, height)

    def upload_rows(self, target: int, source: int, pitch: int, width: int, height: int) -> None:
        """Copy `height` blocks of `width` bytes from consecutive pinned memory to addresses `pitch` bytes apart."""
        self._copy_2d((_HOST, source, width), (_DEVICE, target, pitch), width, height)

    def zero_rows(self, target: int, pitch: int, width: int, height: int) -> None:
        """Set `height` blocks of `width` bytes of GPU memory to 0; the blocks start `pitch` bytes apart."""
        if height > 1 and pitch > _MAX_PITCH:
            for run in range(height):
                self.zero_rows(target + run * pitch, width, width, 1)
            return
        result = self._driver.cuMemsetD2D8Async(target, pitch, 0, width, height, self.stream)
        self._check("cuMemsetD2D8Async", result)

    def sync(self) -> None:
        """Wait until all work on the stream is done. Errors of that work are raised here."""
        self._check("cuStreamSynchronize", self._driver.cuStreamSynchronize(self.stream))

    def capture(self, work: Callable[[], None]) -> Any:
        """Record as a CUDA graph, for `launch` and `discard`, what `work` puts on the stream, without running it.

        Raises `BackendError` if a part of the work cannot be recorded. The stream is usable again.
        """
        driver = self._driver
        # Not "relaxed": a call that would allocate or wait must fail here. Otherwise it would be missing in the graph.
        mode = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
        try:
            self._check("cuStreamBeginCapture", driver.cuStreamBeginCapture(self.stream, mode))
            work()
        except BaseException:
            # this call fails, too, and its error says less than that of `work`
            status, graph = driver.cuStreamEndCapture(self.stream)
            if not int(status):
                driver.cuGraphDestroy(graph)
            raise
        graph = self._check("cuStreamEndCapture", driver.cuStreamEndCapture(self.stream))
        try:
            return self._check("cuGraphInstantiate", driver.cuGraphInstantiate(graph, 0))
        finally:
            driver.cuGraphDestroy(graph)

    def launch(self, graph: Any) -> None:
        """Put a recorded graph on the stream."""
        self._check("cuGraphLaunch", self._driver.cuGraphLaunch(graph, self.stream))

    def discard(self, graph: Any) -> None:
        """Free a recorded graph. Like `close`, it never fails."""
        self._driver.cuGraphExecDestroy(graph)

    def load_kernels(self, cubin: bytes, name: str, kernels: Iterable[str]) -> dict[str, Any]:
        """Load `kernels` from a cubin called `name`; return them by name. They live as long as they are referenced."""
        with self._core_errors(f"load kernels of {name}"):
            code = self._core.ObjectCode.from_cubin(cubin, name=name)
            return {kernel: code.get_kernel(kernel) for kernel in kernels}

    def launch_kernel(self, kernel: Any, grid: int, block: int, *arguments: int | np.integer[Any]) -> None:
        """Put a kernel on the stream: `grid` blocks of `block` threads. Addresses are ints, numbers NumPy scalars."""
        with self._core_errors("launch a kernel"):
            self._core.launch(self._stream, self._core.LaunchConfig(grid=grid, block=block), kernel, *arguments)

    def view(self, address: int, shape: tuple[int, ...], dtype: np.dtype[Any], owner: object) -> Any:
        """Return GPU memory as an object with ``__dlpack__``; the object keeps `owner` alive.

        DLPack in cuda.core 1.2 has no bfloat16 and no float8: such arrays appear as unsigned integers with the same
        bits.
        """
        if dtype.kind == "V":  # a type that ml_dtypes adds to NumPy
            dtype = np.dtype(f"u{dtype.itemsize}")
        with self._core_errors("view a cache"):
            size = prod(shape) * dtype.itemsize
            buffer = self._core.Buffer.from_handle(address, size, owner=owner)
            return self._core.utils.StridedMemoryView.from_buffer(buffer, shape, dtype=dtype)

    def close(self) -> None:
        """Free all memory. Calling it again does nothing. It never fails, not even after a fault of the GPU."""
        self._free(set(self._memory), set(self._pinned))
        with suppress(BackendError), self._core_errors("close the stream"):
            self._stream.close()

    def _free(self, memory: Iterable[int], pinned: Iterable[int]) -> None:
        """Wait for the stream, and free GPU memory and pinned memory; ignore errors of the driver."""
        self._driver.cuStreamSynchronize(self.stream)
        for address in memory:
            self._driver.cuMemFree(address)
            del self._memory[address]
        for address in pinned:
            self._driver.cuMemFreeHost(address)
            self._pinned.remove(address)

    def _copy_2d(self, source: tuple[str, int, int], target: tuple[str, int, int], width: int, height: int) -> None:
        """Copy `height` blocks of `width` bytes: all at once if their distance allows this, else one by one."""
        (from_, start, step), (to, end, stride) = source, target
        if height > 1 and max(step, stride) > _MAX_PITCH:
            for run in range(height):
                self._copy_2d((from_, start + run * step, width), (to, end + run * stride, width), width, 1)
            return
        if height == 1 or width == step == stride:  # one run, which has no limits
            name = f"cuMemcpy{from_[0]}to{to[0]}Async"
            self._check(name, getattr(self._driver, name)(end, start, width * height, self.stream))
            return
        kinds = {_DEVICE: self._driver.CUmemorytype.CU_MEMORYTYPE_DEVICE,
                 _HOST: self._driver.CUmemorytype.CU_MEMORYTYPE_HOST}  # fmt: skip
        copy = self._driver.CUDA_MEMCPY2D()
        copy.srcMemoryType, copy.srcPitch = kinds[from_], step
        setattr(copy, f"src{from_}", start)
        copy.dstMemoryType, copy.dstPitch = kinds[to], stride
        setattr(copy, f"dst{to}", end)
        copy.WidthInBytes, copy.Height = width, height
        self._check("cuMemcpy2DAsync", self._driver.cuMemcpy2DAsync(copy, self.stream))

    def _check(self, call: str, result: tuple[Any, ...]) -> Any:
        status, *values = result
        if int(status):
            _, text = self._driver.cuGetErrorString(status)
            words = text.decode() if isinstance(text, bytes) else str(text)
            raise BackendError(f"CUDA: {call} failed: {getattr(status, 'name', status)} ({words})")
        return values[0] if len(values) == 1 else tuple(values)

    @contextmanager
    def _core_errors(self, what: str) -> Iterator[None]:
        try:
            yield
        except BackendError:
            raise
        except Exception as error:  # its CUDAError has no public name in cuda.core 1.2
            raise BackendError(f"CUDA: cannot {what}: {' '.join(str(error).split())}") from error


RESERVE = 128 << 20
"""Bytes of GPU memory left to the driver and to TensorRT, for kernels and contexts. An estimate."""


@dataclass(frozen=True)
class Need:
    """GPU memory that a runner is going to allocate.

    Attributes:
        what: what the memory is for, such as ``"caches"``.
        size: bytes that the driver allocates.
        for_rows: function that returns the bytes for a smaller batch; None: always `size`.
    """

    what: str
    size: int
    for_rows: Callable[[int], int] | None = None


def admit(needs: Sequence[Need], free: int, total: int, gpu: str, max_batch: int, advice: str | None = None) -> None:
    """Raise `BackendError` if the sizes of `needs` and `RESERVE` together exceed the `free` bytes of the GPU.

    `needs` are for `max_batch` batch rows. `advice` is what the user can do; None: the advice for a decoder, which
    names the largest batch that fits.
    """
    needed = sum(need.size for need in needs) + RESERVE
    if needed <= free:
        return
    parts = ", ".join(f"{need.what} {human_bytes(need.size)}" for need in needs)
    raise BackendError(
        f"{gpu} has {human_bytes(free)} of {human_bytes(total)} free, but {human_bytes(needed)} are needed: "
        f"{parts}, reserve {human_bytes(RESERVE)}; {advice or _advice(needs, free, max_batch)}"
    )


def _advice(needs: Sequence[Need], free: int, max_batch: int) -> str:
    def fits(rows: int) -> bool:
        return sum(need.for_rows(rows) if need.for_rows else need.size for need in needs) + RESERVE <= free

    others = "build the engine again with a smaller --capacity or --max-chunk, or free memory that other programs hold"
    fitting = next(filter(fits, range(max_batch - 1, 0, -1)), 0)
    if fitting:
        return f"open it with max_batch {fitting} instead of {max_batch}, {others}"
    return f"not even one sequence fits: {others}"


class DeviceBlock:
    """GPU memory that holds several arrays. When the last array is deleted, the memory's address is added to `gone`.

    The owner of `gone` frees the memory later: an array may be collected in any thread and at any time, even while a
    CUDA graph is recorded.
    """

    def __init__(self, address: int, gone: deque[int]) -> None:
        self.address = address
        weakref.finalize(self, gone.append, address).atexit = False


class DeviceArray:
    """A read-only, C-contiguous array on a GPU; ``numpy.asarray`` copies it.

    Args:
        home: the GPU and stream to which the array belongs.
        block: the memory that holds the array, from byte `offset` on.
        fetch: copies ``size`` bytes from an address to the host.
    """

    def __init__(
        self,
        home: Cuda,
        block: DeviceBlock,
        offset: int,
        shape: tuple[int, ...],
        dtype: np.dtype[Any],
        fetch: Callable[[int, int], npt.NDArray[Any]],
    ) -> None:
        self.home, self.shape, self.dtype = home, shape, dtype
        self.address = block.address + offset
        self._block = block  # keeps the memory alive
        self._fetch = fetch

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return len(self.shape)

    @property
    def nbytes(self) -> int:
        """Number of bytes that all elements take."""
        return prod(self.shape) * self.dtype.itemsize

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> npt.NDArray[Any]:
        if copy is False:
            raise ValueError("an array on a GPU cannot be seen from the host without a copy")
        array = self._fetch(self.address, self.nbytes).view(self.dtype).reshape(self.shape)
        return array if dtype is None else array.astype(dtype, copy=False)

    def __repr__(self) -> str:
        return f"<{self.dtype} {list(self.shape)} on {self.home.name}>"

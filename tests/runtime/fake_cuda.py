"""A GPU that is host memory: what the runner calls of ``cuda.core`` and ``cuda.bindings.driver``, with their rules.

Copies, fills and steps wait on the stream until somebody synchronizes, as on a GPU, so that pinned memory which is
written again too early shows. Fresh memory holds garbage, freed memory may not be touched, also not by what still waits
on the stream, every access lies within one allocation, a stream that records may not be waited for, nor memory be taken
or freed meanwhile, everything is put on the one stream, every thread needs the context to be current, and opening
another GPU takes its place.

Classes have no public names that the real ones lack (`test_trt_bindings`): what runs here cannot call what is not
there.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
from cuda.bindings import driver as real
from runtime import fake_launch

from trt_kvcache.runtime.trt.cuda import CudaBindings

Status = real.CUresult
SUCCESS = Status.CUDA_SUCCESS
GPU = "NVIDIA Fake 90"
MAX_PITCH = 2**31 - 1
STREAM = 0x57AE
CURRENT = threading.local()
"""State of each thread. ``machine``: the GPU whose context is current. ``mode``: the calls that are allowed while a
stream records."""


class BrokenRuleError(BaseException):
    """Undefined behaviour on a GPU. Nothing that handles errors may take it for one."""


@dataclass
class Work:
    """Something on a stream. `check` raises `BrokenRuleError` where it may no longer be run."""

    run: Callable[[], None]
    check: Callable[[], None] = lambda: None


@dataclass
class Machine:
    """One GPU.

    Attributes:
        allocations: how often GPU memory was ever taken.
        recording: work recorded since the last begin_building; None while not recording.
        fault: a fault that the next cuStreamSynchronize finds, and then every call: it does not go away.
        recordable, instantiable: whether graphs can be recorded at all, and made executable.
        templates, graphs: ``CUgraph`` and ``CUgraphExec`` that were not destroyed.
        driver: the CUDA version of its driver, as the driver tells it.
        capability: its compute capability.
        integrated: its memory is the machine's.
        launched: how often a kernel was launched.
        no_launches: words with which every launch fails.
        wrong_tokens: bits of tokens that kernels get wrong.
        missing_candidates: how many they leave out.
        pageable: host memory that was not taken here may be copied, too, as CUDA does in its own time.
    """

    total: int = 1 << 30
    devices: int = 1
    allocations: int = 0
    recording: list[Work] | None = None
    invalid: bool = False
    fault: Any = SUCCESS
    faulted: bool = False
    recordable: bool = True
    instantiable: bool = True
    templates: int = 0
    graphs: int = 0
    launches: int = 0
    driver: int = 13_050
    capability: tuple[int, int] = (9, 0)
    integrated: bool = False
    launched: int = 0
    no_launches: str = ""
    wrong_tokens: int = 0
    missing_candidates: int = 0
    pageable: bool = False
    device: dict[int, Any] = field(default_factory=dict)
    pinned: dict[int, Any] = field(default_factory=dict)
    freed: list[Any] = field(default_factory=list)
    queue: list[Work] = field(default_factory=list)

    def bindings(self) -> CudaBindings:
        """The runner's cuda.core and cuda.bindings.driver."""
        view = SimpleNamespace(StridedMemoryView=StridedMemoryView)
        core = SimpleNamespace(
            Device=lambda index=0: Device(self, index), Buffer=Buffer, utils=view, ObjectCode=fake_launch.ObjectCode,
            LaunchConfig=fake_launch.LaunchConfig, launch=fake_launch.launch,
        )  # fmt: skip
        return CudaBindings(core, Driver(self))

    def is_current(self) -> bool:
        """True if its context is this thread's."""
        return getattr(CURRENT, "machine", None) is self

    @property
    def used(self) -> int:
        """Bytes of GPU memory in use."""
        return sum(self.taken(len(block)) for block in self.device.values())

    @staticmethod
    def taken(size: int) -> int:
        """Bytes of an allocation: pages of 2 MiB, of which small ones share one."""
        return size if size <= 1 << 20 else (size + (2 << 20) - 1) >> 21 << 21

    def take(self, size: int, memory: dict[int, Any]) -> int:
        """Memory at an aligned address, full of garbage."""
        raw = np.full(size + 512, 0xA5, np.uint8)
        address = -(-raw.ctypes.data // 256) * 256
        offset = address - raw.ctypes.data
        memory[address] = raw[offset : offset + size]
        return address

    def drop(self, address: int, memory: dict[int, Any]) -> None:
        """Free memory; kept aside, so that nobody else gets the address."""
        if address not in memory:
            raise BrokenRuleError(f"{address:#x} is freed and was not allocated")
        self.freed.append(memory.pop(address))
        if self.recording is None:
            self.drain()  # without it: what still waits may not need it

    def within(self, address: int, size: int, memory: dict[int, Any], what: str) -> int:
        """The address, if these bytes lie in one live allocation."""
        for start, block in memory.items():
            if start <= address and address + size <= start + len(block):
                return address
        if self.pageable and memory is self.pinned:
            return address
        raise BrokenRuleError(f"{what}: {size} bytes at {address:#x} are not within memory that is allocated")

    def array(self, address: int, size: int, what: str) -> Any:
        """GPU memory as bytes."""
        self.within(address, size, self.device, what)
        return np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(address))

    def put(self, stream: int, run: Callable[[], None], check: Callable[[], None] = lambda: None) -> None:
        """Append work to the stream, or to the graph that is being recorded."""
        if stream != STREAM:
            raise BrokenRuleError(f"work on stream {stream:#x}, which nothing orders with that of the other")
        (self.queue if self.recording is None else self.recording).append(Work(run, check))

    def drain(self) -> None:
        while self.queue:
            work = self.queue.pop(0)
            work.check()
            work.run()


class Driver:
    """``cuda.bindings.driver``: its functions return a tuple that begins with a status."""

    CUDA_MEMCPY2D = real.CUDA_MEMCPY2D
    CUmemorytype = real.CUmemorytype
    CUstreamCaptureMode = real.CUstreamCaptureMode
    CUdevice_attribute = real.CUdevice_attribute

    def __init__(self, machine: Machine) -> None:
        self._machine = machine

    def cuInit(self, flags: int) -> tuple[Any]:
        return (SUCCESS,)

    def cuDriverGetVersion(self) -> tuple[Any, int]:
        return SUCCESS, self._machine.driver

    def cuDeviceGetCount(self) -> tuple[Any, int]:
        return SUCCESS, self._machine.devices

    def cuDeviceGet(self, index: int) -> tuple[Any, Any]:
        return SUCCESS, real.CUdevice(index)

    def cuDeviceGetAttribute(self, which: Any, device: Any) -> tuple[Any, int]:
        assert which == self.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_INTEGRATED
        return SUCCESS, int(self._machine.integrated)

    def cuCtxGetCurrent(self) -> tuple[Any, Any]:
        return SUCCESS, getattr(CURRENT, "machine", None)

    def cuCtxSetCurrent(self, context: Any) -> tuple[Any]:
        CURRENT.machine = context
        return (SUCCESS,)

    def cuGetErrorString(self, status: Any) -> tuple[Any, bytes]:
        return SUCCESS, {2: b"out of memory", 700: b"an illegal memory access was encountered"}.get(int(status), b"?")

    def cuMemGetInfo(self) -> tuple[Any, int, int]:
        return self._status(), self._machine.total - self._machine.used, self._machine.total

    def cuMemAlloc(self, size: int) -> tuple[Any, Any]:
        machine = self._machine
        if self._records():
            return Status.CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, 0
        if machine.used + machine.taken(size) > machine.total:
            return Status.CUDA_ERROR_OUT_OF_MEMORY, 0
        machine.allocations += 1
        return self._status(), real.CUdeviceptr(machine.take(size, machine.device))

    def cuMemFree(self, address: int) -> tuple[Any]:
        if self._records():
            return (Status.CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED,)
        self._machine.drop(int(address), self._machine.device)
        return (self._status(),)

    def cuMemAllocHost(self, size: int) -> tuple[Any, int]:
        if self._records():
            return Status.CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, 0
        return self._status(), self._machine.take(size, self._machine.pinned)

    def cuMemFreeHost(self, address: int) -> tuple[Any]:
        if self._records():
            return (Status.CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED,)
        self._machine.drop(int(address), self._machine.pinned)
        return (self._status(),)

    def cuMemsetD8Async(self, address: int, value: int, size: int, stream: int) -> tuple[Any]:
        return self.cuMemsetD2D8Async(address, size, value, size, 1, stream)

    def cuMemsetD2D8Async(
        self, address: int, pitch: int, value: int, width: int, height: int, stream: int
    ) -> tuple[Any]:
        machine = self._machine
        if height > 1 and pitch > MAX_PITCH:
            return (Status.CUDA_ERROR_INVALID_VALUE,)

        def run() -> None:
            machine.within(address, pitch * (height - 1) + width, machine.device, "fill")
            for i in range(height):
                ctypes.memset(address + i * pitch, value, width)

        machine.put(stream, run)
        return (self._status(),)

    def cuMemcpyHtoDAsync(self, target: int, source: int, size: int, stream: int) -> tuple[Any]:
        return self._copy(target, self._machine.device, source, self._machine.pinned, size, stream)

    def cuMemcpyDtoHAsync(self, target: int, source: int, size: int, stream: int) -> tuple[Any]:
        return self._copy(target, self._machine.pinned, source, self._machine.device, size, stream)

    def cuMemcpyDtoDAsync(self, target: int, source: int, size: int, stream: int) -> tuple[Any]:
        return self._copy(target, self._machine.device, source, self._machine.device, size, stream)

    def cuMemcpy2DAsync(self, copy: Any, stream: int) -> tuple[Any]:
        machine, host = self._machine, self.CUmemorytype.CU_MEMORYTYPE_HOST
        width, height = int(copy.WidthInBytes), int(copy.Height)
        from_host, to_host = copy.srcMemoryType == host, copy.dstMemoryType == host
        source, target = (
            int(copy.srcHost if from_host else copy.srcDevice),
            int(copy.dstHost if to_host else copy.dstDevice),
        )
        steps = int(copy.srcPitch), int(copy.dstPitch)
        if min(steps) < width or max(steps) > MAX_PITCH:
            return (Status.CUDA_ERROR_INVALID_VALUE,)

        def run() -> None:
            for address, step, on_host in ((source, steps[0], from_host), (target, steps[1], to_host)):
                memory = machine.pinned if on_host else machine.device
                machine.within(address, step * (height - 1) + width, memory, "copy of rows")
            for i in range(height):
                ctypes.memmove(target + i * steps[1], source + i * steps[0], width)

        machine.put(stream, run)
        return (self._status(),)

    def cuStreamSynchronize(self, stream: int) -> tuple[Any]:
        machine = self._machine
        if self._records():
            return (Status.CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED,)
        if machine.fault != SUCCESS:
            machine.faulted = True
            machine.queue.clear()
            return (machine.fault,)
        machine.drain()
        return (self._status(),)

    def cuStreamBeginCapture(self, stream: int, mode: Any) -> tuple[Any]:
        assert mode == self.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
        machine = self._machine
        if not machine.recordable:
            return (Status.CUDA_ERROR_NOT_SUPPORTED,)
        if machine.recording is not None:
            return (Status.CUDA_ERROR_ILLEGAL_STATE,)
        machine.recording, machine.invalid = [], False
        return (self._status(),)

    def cuStreamEndCapture(self, stream: int) -> tuple[Any, Any]:
        machine = self._machine
        work, machine.recording = machine.recording, None
        if work is None:
            return Status.CUDA_ERROR_ILLEGAL_STATE, None
        if machine.invalid:
            return Status.CUDA_ERROR_STREAM_CAPTURE_INVALIDATED, None
        machine.templates += 1
        return SUCCESS, Graph(work)

    def cuGraphInstantiate(self, graph: Graph, flags: int) -> tuple[Any, Any]:
        if not self._machine.instantiable:
            return Status.CUDA_ERROR_OUT_OF_MEMORY, None
        self._machine.graphs += 1
        return SUCCESS, Graph(graph.live())

    def cuGraphLaunch(self, graph: Graph, stream: int) -> tuple[Any]:
        for work in graph.live():
            work.check()
        self._machine.launches += 1
        self._machine.queue.extend(graph.live())
        return (self._status(),)

    def cuGraphExecDestroy(self, graph: Graph) -> tuple[Any]:
        graph.live()
        graph.work = None
        self._machine.graphs -= 1
        return (self._status(),)

    def cuGraphDestroy(self, graph: Graph) -> tuple[Any]:
        graph.live()
        graph.work = None
        self._machine.templates -= 1
        return (self._status(),)

    def _copy(
        self, target: int, target_memory: dict[int, Any], source: int, source_memory: dict[int, Any], size: int,
        stream: int,
    ) -> tuple[Any]:  # fmt: skip
        machine = self._machine

        def run() -> None:
            machine.within(source, size, source_memory, "what is copied")
            machine.within(target, size, target_memory, "where it is copied")
            ctypes.memmove(target, source, size)

        machine.put(stream, run)
        return (self._status(),)

    def cuThreadExchangeStreamCaptureMode(self, mode: Any) -> tuple[Any, Any]:
        before = getattr(CURRENT, "mode", self.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_GLOBAL)
        CURRENT.mode = mode
        return SUCCESS, before

    def _records(self) -> bool:
        """True if the stream records: a call that may not be made meanwhile spoils the graph."""
        relaxed = self.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
        recording = self._machine.recording is not None and getattr(CURRENT, "mode", None) != relaxed
        self._machine.invalid |= recording
        return recording

    def _status(self) -> Any:
        if self._machine.faulted:
            return self._machine.fault
        return SUCCESS if self._machine.is_current() else Status.CUDA_ERROR_INVALID_CONTEXT


@dataclass(eq=False)
class Graph:
    """``CUgraph`` and ``CUgraphExec``: what was recorded."""

    work: list[Work] | None

    def live(self) -> list[Work]:
        if self.work is None:
            raise BrokenRuleError("a graph is used after it was destroyed")
        return self.work


class Device:
    """``Device`` of ``cuda.core``."""

    def __init__(self, machine: Machine, index: int) -> None:
        self._machine = machine
        self.name = GPU
        self.compute_capability = machine.capability

    def set_current(self) -> None:
        CURRENT.machine = self._machine

    def create_stream(self) -> Stream:
        return Stream(self._machine)


class Stream:
    """``Stream`` of ``cuda.core``."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self.handle = STREAM

    def sync(self) -> None:
        self._machine.drain()

    def close(self) -> None:
        self._machine.drain()


class Buffer:
    """``Buffer`` of ``cuda.core``."""

    def __init__(self, address: int, size: int, owner: object) -> None:
        self.handle, self.size, self.owner = address, size, owner

    @classmethod
    def from_handle(cls, ptr: int, size: int, *, owner: object) -> Buffer:
        return cls(ptr, size, owner)


class StridedMemoryView:
    """``StridedMemoryView`` of ``cuda.core.utils``; on the CPU here, so that NumPy can look."""

    def __init__(self, array: Any) -> None:
        self._array = array  # of NumPy, which as cuda.core gives no bfloat16 and no float8 as DLPack
        self.shape = array.shape

    @classmethod
    def from_buffer(cls, buffer: Buffer, shape: tuple[int, ...], *, dtype: Any) -> StridedMemoryView:
        data = (ctypes.c_uint8 * buffer.size).from_address(buffer.handle)
        return cls(np.ctypeslib.as_array(data).view(dtype).reshape(shape))

    def __dlpack__(self, **options: Any) -> Any:
        return self._array.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._array.__dlpack_device__()

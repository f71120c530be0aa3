"""Caches and state in GPU memory: one buffer for each cache, bound in place, and operations on rows.

State, and a cache that is not updated in place (`Route.FUNCTIONAL`), has two buffers: each step reads one and writes
the other. A step may run on only some of the rows, so each row has its own *side*: the buffer with its newest contents.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from trt_kvcache.errors import ManifestError
from trt_kvcache.importer.plan import CachePlan
from trt_kvcache.runtime.buffers import Carried, carried_buffers
from trt_kvcache.runtime.runner import Array, HostBytes
from trt_kvcache.runtime.trt.cuda import ALIGNMENT, Cuda, taken

_STAGING = 8 << 20
"""Bytes of pinned memory through which rows are copied; longer rows are copied in pieces."""

_PACKED = ("int4", "uint4", "float4e2m1")


@dataclass(frozen=True)
class CacheBuffer:
    """The sizes of one cache in bytes; state counts as a single cache row.

    A batch row consists of `planes` runs of `capacity` cache rows of `width` bytes: ``[B, planes, capacity, width]``.

    Attributes:
        shape: ``[max_batch, *physical_shape[1:]]``.
    """

    carried: Carried
    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    @property
    def planes(self) -> int:
        """Number of runs of cache rows in a batch row."""
        return prod(self.shape[1 : self.carried.axis or 1])

    @property
    def width(self) -> int:
        """Bytes of one cache row in one plane."""
        return prod(self.shape[(self.carried.axis or 0) + 1 :]) * self.dtype.itemsize

    @property
    def pitch(self) -> int:
        """Bytes from one plane to the next."""
        return self.carried.capacity * self.width

    @property
    def row_bytes(self) -> int:
        """Bytes of one batch row."""
        return self.planes * self.pitch

    @property
    def size(self) -> int:
        """Bytes of one whole buffer."""
        return self.shape[0] * self.row_bytes


class DeviceCaches:
    """All caches and state of an engine.

    Args:
        cuda: the GPU that holds them.
        plan: plan of the engine.
        max_batch: rows of each cache.

    Raises:
        ManifestError: a row of a cache would start at an address that TensorRT cannot take.
    """

    def __init__(self, cuda: Cuda, plan: CachePlan, max_batch: int) -> None:
        self._cuda = cuda
        self.buffers = {c.past: _buffer(c, max_batch) for c in carried_buffers(plan)}
        for name, buffer in self.buffers.items():
            if max_batch > 1 and buffer.row_bytes % ALIGNMENT:
                state = buffer.carried.is_state
                advice = "" if state else "build the engine with a capacity that makes it a multiple, or "
                raise ManifestError(
                    f"one sequence of {'state' if state else 'cache'} {name!r} takes {buffer.row_bytes} bytes, and "
                    f"TensorRT binds memory at multiples of {ALIGNMENT} bytes only, so rows cannot be addressed "
                    f"separately; {advice}open it with max_batch 1"
                )
        self._two_sided = not all(b.carried.in_place for b in self.buffers.values())
        self._sides = np.zeros(max_batch, np.int8)
        self._addresses: dict[str, tuple[int, ...]] = {}

    def bytes_for(self, rows: int) -> int:
        """Return the GPU memory that `rows` rows of the batch take."""
        return sum(taken(rows * b.row_bytes) * (1 if b.carried.in_place else 2) for b in self.buffers.values())

    def allocate(self) -> None:
        """Allocate the memory, zeroed."""
        for name, buffer in self.buffers.items():
            sides = 1 if buffer.carried.in_place else 2
            self._addresses[name] = tuple(self._cuda.allocate(buffer.size) for _ in range(sides))
        self._staging = self._cuda.allocate_pinned(
            max(_STAGING, max(b.planes * b.width for b in self.buffers.values()))
        )

    def side(self, first_row: int, rows: int) -> int:
        """Return the side with the newest contents of these rows; rows on the other side are copied to it."""
        side = int(self._sides[first_row])
        for row in range(first_row + 1, first_row + rows):
            if self._sides[row] == side:
                continue
            for name, buffer in self.buffers.items():
                if not buffer.carried.in_place:
                    source, target = (self._row(name, row, s) for s in (1 - side, side))
                    self._cuda.copy_rows(target, source, buffer.pitch, buffer.pitch, buffer.planes)
            self._sides[row] = side
        return side

    def bindings(self, first_row: int, side: int) -> dict[str, int]:
        """Return the address of every past and present tensor for a step that starts at this row."""
        bound = {}
        for name, buffer in self.buffers.items():
            bound[name] = self._row(name, first_row, side)
            bound[buffer.carried.present] = self._row(name, first_row, side if buffer.carried.in_place else 1 - side)
        return bound

    def written(self, first_row: int, rows: int) -> None:
        """Note that a step has written these rows: with two buffers, the newest contents are now in the other one."""
        if self._two_sided:
            self._sides[first_row : first_row + rows] ^= 1

    def copy_rows(self, source: int, target: int, tokens: int) -> None:
        """See `Runner.copy_rows`."""
        for name, buffer in self.buffers.items():
            width = buffer.carried.places(0, tokens)[1] * buffer.width
            if source != target and width:
                start, end = self._row(name, source), self._row(name, target)
                self._cuda.copy_rows(end, start, buffer.pitch, width, buffer.planes)

    def zero_rows(self, row: int, start: int, stop: int) -> None:
        """See `Runner.zero_rows`."""
        for name, buffer in self.buffers.items():
            first, end = buffer.carried.places(start, stop)
            if end > first:
                address = self._row(name, row) + first * buffer.width
                self._cuda.zero_rows(address, buffer.pitch, (end - first) * buffer.width, buffer.planes)

    def read_row(self, name: str, row: int, tokens: int) -> Array:
        """See `Runner.read_row`."""
        buffer = self.buffers[name]
        _, tokens = buffer.carried.places(0, tokens)
        packed = np.empty((buffer.planes, tokens, buffer.width), np.uint8)
        for start, stop in self._pieces(buffer, tokens):
            width = (stop - start) * buffer.width
            address = self._row(name, row) + start * buffer.width
            self._cuda.download_rows(self._staging.address, address, buffer.pitch, width, buffer.planes)
            self._cuda.sync()
            content = self._staging.data[: buffer.planes * width]
            packed[:, start:stop] = content.reshape(buffer.planes, stop - start, buffer.width)
        return packed.reshape(-1).view(buffer.dtype).reshape(buffer.carried.row_shape(tokens))

    def write_row(self, name: str, row: int, data: Array) -> None:
        """See `Runner.write_row`."""
        buffer = self.buffers[name]
        axis = buffer.carried.axis
        tokens = 1 if axis is None else data.shape[axis - 1]
        flat = np.ascontiguousarray(data, buffer.dtype).reshape(-1).view(np.uint8)
        packed = flat.reshape(buffer.planes, tokens, buffer.width)
        for start, stop in self._pieces(buffer, tokens):
            width = (stop - start) * buffer.width
            self._staging.data[: buffer.planes * width] = packed[:, start:stop].reshape(-1)
            address = self._row(name, row) + start * buffer.width
            self._cuda.upload_rows(address, self._staging.address, buffer.pitch, width, buffer.planes)
            self._cuda.sync()  # the next piece goes through the same pinned memory

    def pack_rows(self, row: int, start: int, stop: int, into: HostBytes) -> None:
        """See `Runner.pack_rows`."""
        for host, address, width, buffer in self._packed(row, start, stop, into):
            self._cuda.download_rows(host, address, buffer.pitch, width, buffer.planes)
        self._cuda.sync()

    def unpack_rows(self, row: int, start: int, stop: int, data: HostBytes) -> None:
        """See `Runner.unpack_rows`."""
        for host, address, width, buffer in self._packed(row, start, stop, data):
            self._cuda.upload_rows(address, host, buffer.pitch, width, buffer.planes)
        self._cuda.sync()  # the caller may write to this memory again

    def view(self, name: str, owner: object) -> Any:
        """See `Runner.view`. Of two buffers, it returns the one with the first row's newest contents."""
        buffer = self.buffers[name]
        address = self._addresses[name][self._side_of(buffer, 0)]
        return self._cuda.view(address, buffer.shape, buffer.dtype, owner)

    def _row(self, name: str, row: int, side: int | None = None) -> int:
        """Return the address of a batch row; by default, on the side with its newest contents."""
        buffer = self.buffers[name]
        side = self._side_of(buffer, row) if side is None or buffer.carried.in_place else side
        return self._addresses[name][side] + row * buffer.row_bytes

    def _packed(self, row: int, start: int, stop: int, data: HostBytes) -> Iterator[tuple[int, int, int, CacheBuffer]]:
        """Yield the addresses of the tokens of each buffer, in packed memory and in the cache, and bytes per plane."""
        host = data.ctypes.data
        for name, buffer in self.buffers.items():
            first, last = buffer.carried.places(start, stop)
            width = (last - first) * buffer.width
            if width:
                yield host, self._row(name, row) + first * buffer.width, width, buffer
            host += buffer.planes * width

    def _side_of(self, buffer: CacheBuffer, row: int) -> int:
        return 0 if buffer.carried.in_place else int(self._sides[row])

    def _pieces(self, buffer: CacheBuffer, tokens: int) -> list[tuple[int, int]]:
        """Return ranges of cache rows that fit into the pinned memory."""
        step = self._staging.data.size // (buffer.planes * buffer.width)
        return [(start, min(start + step, tokens)) for start in range(0, tokens, step)]


def _buffer(cache: Carried, max_batch: int) -> CacheBuffer:
    sizes = tuple(d for d in cache.shape[1:] if isinstance(d, int))
    if len(sizes) + 1 != len(cache.shape):
        raise ManifestError(
            f"cache {cache.past!r} has the shape {list(cache.shape)}; an engine's cache has fixed sizes but "
            "for its batch: build the engine again"
        )
    if cache.dtype in _PACKED:
        raise ManifestError(
            f"cache {cache.past!r} is {cache.dtype}, several elements to a byte; the runtime can address caches of "
            "whole bytes: build the engine with another cache dtype"
        )
    return CacheBuffer(cache, (max_batch, *sizes), cache.array_dtype)

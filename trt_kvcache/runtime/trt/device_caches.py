"""Caches and state in GPU memory: one buffer for each cache, bound to past and present; copies of cache rows.

State, and a cache that is not updated in place (`Route.FUNCTIONAL`), has two buffers: each step reads one and writes
the other. Each batch row has its own *side*: the buffer, 0 or 1, with its newest contents.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from trt_kvcache.errors import ManifestError
from trt_kvcache.importer.cache_plan import CachePlan
from trt_kvcache.runtime.buffers import Carried, carried_buffers
from trt_kvcache.runtime.runner import Array, HostBytes
from trt_kvcache.runtime.trt.cuda import ALIGNMENT, Cuda, taken

_PACKED = ("int4", "uint4", "float4e2m1")


class DeviceCaches:
    """All caches and state of an engine, for `max_batch` batch rows.

    Raises `ManifestError` if a batch row of a cache would start at an address that TensorRT cannot take.
    """

    def __init__(self, cuda: Cuda, plan: CachePlan, max_batch: int) -> None:
        self._cuda, self._max_batch = cuda, max_batch
        self.buffers = {c.past: _checked(c) for c in carried_buffers(plan)}
        for name, buffer in self.buffers.items():
            if max_batch > 1 and buffer.row_bytes % ALIGNMENT:
                kind = "state" if buffer.is_state else "cache"
                advice = "" if buffer.is_state else "build the engine with a capacity that makes it a multiple, or "
                raise ManifestError(
                    f"one sequence of {kind} {name!r} takes {buffer.row_bytes} bytes, but "
                    f"TensorRT binds memory only at multiples of {ALIGNMENT} bytes, so rows cannot be addressed "
                    f"separately; {advice}open it with max_batch 1"
                )
        self._two_sided = not all(b.in_place for b in self.buffers.values())
        self._sides = np.zeros(max_batch, np.int8)
        self._addresses: dict[str, tuple[int, ...]] = {}

    def bytes_for(self, rows: int) -> int:
        """Return the bytes of GPU memory that all caches and state take for `rows` batch rows."""
        return sum(taken(rows * b.row_bytes) * (1 if b.in_place else 2) for b in self.buffers.values())

    def allocate(self) -> None:
        """Allocate memory for all caches and state, filled with zeros."""
        for name, buffer in self.buffers.items():
            sides, size = 1 if buffer.in_place else 2, self._max_batch * buffer.row_bytes
            self._addresses[name] = tuple(self._cuda.allocate(size) for _ in range(sides))

    def side(self, first_row: int, rows: int) -> int:
        """Return the buffer, 0 or 1, with the newest contents of all these batch rows, after copies if they differ."""
        side = int(self._sides[first_row])
        for row in range(first_row + 1, first_row + rows):
            if self._sides[row] == side:
                continue
            for name, buffer in self.buffers.items():
                if not buffer.in_place:
                    source, target = (self._row(name, row, s) for s in (1 - side, side))
                    self._cuda.copy_rows(target, source, buffer.row_bytes, buffer.row_bytes, 1)
            self._sides[row] = side
        return side

    def bindings(self, first_row: int, side: int) -> dict[str, int]:
        """Return the addresses of all past and present tensors by name, for a step from batch row `first_row` on."""
        bound = {}
        for name, buffer in self.buffers.items():
            bound[name] = self._row(name, first_row, side)
            bound[buffer.present] = self._row(name, first_row, side if buffer.in_place else 1 - side)
        return bound

    def written(self, first_row: int, rows: int) -> None:
        """Record that a step has written these batch rows: where there are two buffers, the other one is newer now."""
        if self._two_sided:
            self._sides[first_row : first_row + rows] ^= 1

    def copy_rows(self, source: int, target: int, tokens: int) -> None:
        """Copy the first cache rows of a batch row to another, in all buffers; see `Runner.copy_rows`."""
        if source != target:
            for start, end in zip(self._runs(source, 0, tokens), self._runs(target, 0, tokens), strict=True):
                self._cuda.copy_rows(end.address, *start)

    def zero_rows(self, row: int, start: int, stop: int) -> None:
        """Set a range of cache rows of a batch row to 0, in all buffers; see `Runner.zero_rows`."""
        for runs in self._runs(row, start, stop):
            self._cuda.zero_rows(*runs)

    def read_row(self, name: str, row: int, tokens: int) -> Array:
        """Return a host copy of the first cache rows of a batch row; see `Runner.read_row`."""
        buffer = self.buffers[name]
        address, pitch, width, height = self._runs_of(name, row, *buffer.places(0, tokens))
        data = self._cuda.download_pieces(address, width, pitch, height)
        return data.view(buffer.array_dtype).reshape(buffer.row_shape(tokens))

    def write_row(self, name: str, row: int, data: Array) -> None:
        """Write data from `read_row` to a batch row; see `Runner.write_row`."""
        buffer = self.buffers[name]
        tokens = 1 if buffer.axis is None else data.shape[buffer.axis - 1]
        address, pitch, _, height = self._runs_of(name, row, *buffer.places(0, tokens))
        self._cuda.upload_pieces(address, np.asarray(data, buffer.array_dtype), pitch, height)

    def pack_rows(self, row: int, start: int, stop: int, into: HostBytes) -> None:
        """Copy cache rows of a batch row from all buffers to host memory; see `Runner.pack_rows`."""
        host = into.ctypes.data
        for runs in self._runs(row, start, stop):
            self._cuda.download_rows(host, *runs)
            host += runs.width * runs.height
        self._cuda.sync()

    def unpack_rows(self, row: int, start: int, stop: int, data: HostBytes) -> None:
        """Write data from `pack_rows` back to a batch row; see `Runner.unpack_rows`."""
        host = data.ctypes.data
        for runs in self._runs(row, start, stop):
            self._cuda.upload_rows(runs.address, host, *runs[1:])
            host += runs.width * runs.height
        self._cuda.sync()  # the caller may write to this memory again

    def view(self, name: str, owner: object) -> Any:
        """Return a cache buffer without a copy; see `Runner.view`. If there are two: that with the newest row 0."""
        buffer = self.buffers[name]
        address = self._addresses[name][self._side_of(buffer, 0)]
        shape = (self._max_batch, *buffer.row_shape(buffer.capacity))
        return self._cuda.view(address, shape, buffer.array_dtype, owner)

    def _row(self, name: str, row: int, side: int | None = None) -> int:
        """Return the address of a batch row in a cache's buffer `side`; None: in the buffer with newest contents."""
        buffer = self.buffers[name]
        side = self._side_of(buffer, row) if side is None or buffer.in_place else side
        return self._addresses[name][side] + row * buffer.row_bytes

    def _runs(self, row: int, start: int, stop: int) -> Iterator[_Runs]:
        """Yield the memory of tokens ``start .. stop - 1`` of a batch row, in each cache that holds some of them."""
        for name, buffer in self.buffers.items():
            first, last = buffer.places(start, stop)
            if last > first:
                yield self._runs_of(name, row, first, last)

    def _runs_of(self, name: str, row: int, first: int, last: int) -> _Runs:
        buffer = self.buffers[name]
        size = buffer.width * buffer.array_dtype.itemsize
        return _Runs(self._row(name, row) + first * size, buffer.capacity * size, (last - first) * size, buffer.planes)

    def _side_of(self, buffer: Carried, row: int) -> int:
        return 0 if buffer.in_place else int(self._sides[row])


class _Runs(NamedTuple):
    """The memory of some cache rows of one batch row: `height` blocks of `width` bytes, each `pitch` bytes apart."""

    address: int
    pitch: int
    width: int
    height: int


def _checked(cache: Carried) -> Carried:
    if not all(isinstance(d, int) for d in cache.shape[1:]):
        raise ManifestError(
            f"cache {cache.past!r} has the shape {list(cache.shape)}; all sizes of an engine's cache except its "
            "batch must be fixed: build the engine again"
        )
    if cache.dtype in _PACKED:
        raise ManifestError(
            f"cache {cache.past!r} is {cache.dtype}, several elements to a byte; the runtime can address caches of "
            "whole bytes: build the engine with another cache dtype"
        )
    return cache

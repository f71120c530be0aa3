"""Buffers of inputs and outputs other than caches: inputs in pinned memory, span inputs written once, outputs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from trt_kvcache.dtypes import array_dtype
from trt_kvcache.importer.plan import CachePlan, Role
from trt_kvcache.runtime.encoders.constants import Constants
from trt_kvcache.runtime.logits import StepLogits
from trt_kvcache.runtime.runner import Array, Logits, StepBatch
from trt_kvcache.runtime.trt.choice import DeviceChoice, choice_bytes, open_choice
from trt_kvcache.runtime.trt.cuda import ALIGNMENT, Cuda, Pinned, taken
from trt_kvcache.runtime.trt.device_array import DeviceArray

__all__ = ["StepBuffers"]

_LOGITS_STAGING = 16 << 20
"""Bytes of pinned memory for logits, unless one position of every row needs more; more logits are copied in pieces."""

_CONSTANT_STAGING = 8 << 20
"""Bytes of pinned memory; constants are copied through it, in pieces."""

Shape = tuple[int, ...]


@dataclass(frozen=True, eq=False)
class _Input:
    """One input: its address on the GPU, and its offset in the pinned memory that it is copied from."""

    address: int
    offset: int
    size: int


class StepBuffers:
    """Inputs and outputs of a step.

    Args:
        cuda: the GPU that holds them.
        plan: plan of the engine.
        largest: the largest shape of each tensor, outputs included; caches and state are left out.
        rows: most rows of a step.
    """

    def __init__(self, cuda: Cuda, plan: CachePlan, largest: Mapping[str, Shape], rows: int) -> None:
        self._cuda = cuda
        self._rows = rows
        self._tensors = {t.name: t for t in plan.tensors if t.role not in (Role.CACHE, Role.STATE)}
        self._largest = largest
        self._spans = tuple(t.name for t in self._tensors.values() if t.role is Role.SPAN)
        self._logits = StepLogits(plan)
        self._logits.settle(largest[self._logits.name][-1])
        self.addresses: dict[str, int] = {}
        self._inputs: dict[str, _Input] = {}
        self._constants: tuple[Constants, ...] = ()
        self._choice: DeviceChoice | None = None

    @property
    def device_bytes(self) -> int:
        """GPU memory that `allocate` takes, in bytes."""
        return sum(taken(self._size(name)) for name in self._tensors)

    @property
    def choice_bytes(self) -> int:
        """GPU memory that `choose` takes if the GPU can choose, in bytes."""
        return choice_bytes(self._logits.dtype, self._logits.vocab, self._rows, self._positions)

    def allocate(self) -> None:
        """Allocate all memory, and write the span inputs: 0, 1, 2, ...; every step uses the beginning of them."""
        self.addresses = {name: self._cuda.allocate(self._size(name)) for name in self._tensors}
        offset = 0
        for name, tensor in self._tensors.items():
            if tensor.role is Role.ADAPTER_WEIGHTS:
                self._cuda.zero_rows(self.addresses[name], self._size(name), self._size(name), 1)
            elif tensor.io == "input" and name not in self._spans and tensor.role is not Role.CONSTANT:
                self._inputs[name] = _Input(self.addresses[name], offset, self._size(name))
                offset += -(-self._size(name) // ALIGNMENT) * ALIGNMENT
        longest = max((self._size(name) for name in self._spans), default=0)
        large = (Role.CONSTANT, Role.ADAPTER_WEIGHTS)
        constants = _CONSTANT_STAGING if any(t.role in large for t in self._tensors.values()) else 0
        self._staging = self._cuda.allocate_pinned(max(offset, longest, constants))
        self._host_logits = self._cuda.allocate_pinned(max(_LOGITS_STAGING, self._rows * self._position_bytes))
        for name in self._spans:
            values = np.arange(self._largest[name][0], dtype=array_dtype(self._tensors[name].dtype))
            _put(self._staging, 0, values)
            self._cuda.upload(self.addresses[name], self._staging.address, values.nbytes)
            self._cuda.sync()  # the next one goes through the same pinned memory

    def choose(self) -> str:
        """Let the GPU choose tokens when a step needs few scores per position. Return why it cannot, or ""."""
        address, size = self.addresses[self._logits.name], self._size(self._logits.name)
        form = self._logits.dtype, self._logits.vocab, self._rows
        self._choice, reason = open_choice(self._cuda, *form, address, size, self._host_logits)
        return reason

    def give(self, constants: tuple[Constants, ...]) -> None:
        """Copy the constants of a step's rows to their inputs, unless the last step had the same."""
        if constants == self._constants:
            return
        self._constants = ()
        for name in constants[0].arrays if constants else ():
            address = self.addresses[name]
            for array in (row.arrays[name] for row in constants):
                if isinstance(array, DeviceArray):
                    self._cuda.copy_rows(address, array.address, array.nbytes, array.nbytes, 1)
                else:
                    self._upload(address, array.reshape(-1).view(np.uint8))
                address += array.nbytes
        self._constants = constants

    def write_adapter(self, name: str, slot: int, data: Array | None) -> None:
        """See `Runner.write_adapter`."""
        shape = self._largest[name][1:]
        padded = np.zeros(shape, array_dtype(self._tensors[name].dtype))
        if data is not None:
            padded[: data.shape[0], : data.shape[1]] = data
        self._upload(self.addresses[name] + slot * padded.nbytes, padded.reshape(-1).view(np.uint8))

    def _upload(self, address: int, data: Array) -> None:
        """Copy bytes to the GPU, in pieces that fit into pinned memory."""
        for start in range(0, data.size, self._staging.data.size):
            piece = data[start : start + self._staging.data.size]
            _put(self._staging, 0, piece)
            self._cuda.upload(address + start, self._staging.address, piece.size)
            self._cuda.sync()  # the next piece goes through the same pinned memory

    def put(self, values: Mapping[str, Array]) -> None:
        """Write the inputs of a step into pinned memory."""
        for name, array in values.items():
            _put(self._staging, self._inputs[name].offset, array)

    def upload(self, shapes: Mapping[str, Shape]) -> None:
        """Copy the inputs that `put` wrote to the GPU, in these shapes."""
        for name, place in self._inputs.items():
            size = prod(shapes[name]) * array_dtype(self._tensors[name].dtype).itemsize
            self._cuda.upload(place.address, self._staging.address + place.offset, size)

    def logits(self, batch: StepBatch) -> Logits:
        """Wait for the step, and return the logits of its last `keep` positions.

        Returns:
            ``[R, keep, V]``, valid until the next call: a view of pinned memory if they fit into it. If `batch` asks
                for few scores of each position and the GPU chooses, `CHOICE` ``[R, keep, N]`` of the scores that the
                masks allow.
        """
        rows, keep, size = batch.rows, batch.keep, self._position_bytes
        shape = (rows, keep, self._logits.vocab)
        width = keep * size
        pitch = self._logits.check(batch) * size
        start = self.addresses[self._logits.name] + pitch - width
        if keep == 0:
            self._cuda.sync()
            return np.empty(shape, self._logits.dtype)
        if batch.highest and self._choice is not None:
            chosen = self._choice.choose(start, pitch, rows, keep, batch.highest, batch.masks)
            if chosen is not None:
                return chosen
        if rows * width <= self._host_logits.data.size:
            return self._fetch(start, pitch, width, rows).reshape(shape)
        result = np.empty(shape, self._logits.dtype)
        step = self._host_logits.data.size // size
        for row in range(rows):
            for first in range(0, keep, step):
                part = result[row, first : first + step]
                length = len(part) * size
                part[...] = self._fetch(start + row * pitch + first * size, length, length, 1).reshape(part.shape)
        return result

    def output(self, name: str, shape: Shape) -> Array:
        """Return a copy of an output of the last step, other than a cache."""
        data = np.empty(prod(shape), array_dtype(self._tensors[name].dtype))
        flat = data.view(np.uint8)
        for start in range(0, flat.size, self._host_logits.data.size):
            piece = flat[start : start + self._host_logits.data.size]
            self._cuda.download_rows(self._host_logits.address, self.addresses[name] + start, piece.size, piece.size, 1)
            self._cuda.sync()
            piece[...] = self._host_logits.data[: piece.size]
        return data.reshape(shape)

    def _fetch(self, start: int, pitch: int, width: int, height: int) -> Logits:
        """Return logits as a view of pinned memory."""
        self._cuda.download_rows(self._host_logits.address, start, pitch, width, height)
        self._cuda.sync()
        fetched: Logits = self._host_logits.data[: height * width].view(self._logits.dtype)
        return fetched

    @property
    def _positions(self) -> int:
        """Most positions of all rows whose logits one step returns."""
        return self._size(self._logits.name) // self._position_bytes

    @property
    def _position_bytes(self) -> int:
        return self._logits.vocab * self._logits.dtype.itemsize

    def _size(self, name: str) -> int:
        return prod(self._largest[name]) * array_dtype(self._tensors[name].dtype).itemsize


def _put(memory: Pinned, offset: int, array: npt.NDArray[Any]) -> None:
    data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    memory.data[offset : offset + data.size] = data

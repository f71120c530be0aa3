"""The GPU buffers of a step's inputs and outputs, except caches; the shapes of a step, and its optimization profile."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

import numpy as np

from trt_kvcache.dtypes import array_dtype
from trt_kvcache.engine.manifest import Manifest
from trt_kvcache.errors import BackendError, UnsupportedModelError
from trt_kvcache.importer.cache_plan import CachePlan, Role
from trt_kvcache.runtime.buffers import Carried
from trt_kvcache.runtime.encoders.constants import NO_CONSTANTS, Constants
from trt_kvcache.runtime.runner import Array, HostBytes, Logits, StepBatch
from trt_kvcache.runtime.step_inputs import StepInputs, StepLogits
from trt_kvcache.runtime.trt.choice import DeviceChoice, choice_bytes, open_choice
from trt_kvcache.runtime.trt.context import Context
from trt_kvcache.runtime.trt.cuda import ALIGNMENT, Cuda, DeviceArray, taken

_LOGITS_STAGING = 16 << 20
"""Bytes of pinned memory for logits, unless one position of every row needs more; more logits are copied in pieces."""

Shape = tuple[int, ...]


class StepBuffers:
    """Holds the inputs and outputs of steps, except caches and state, in GPU memory.

    `largest` has each tensor's largest shape; `rows` is the most batch rows of a step.
    """

    def __init__(self, cuda: Cuda, plan: CachePlan, largest: Mapping[str, Shape], rows: int) -> None:
        self._cuda, self._largest, self._rows = cuda, largest, rows
        self._tensors = {t.name: t for t in plan.tensors if t.role not in (Role.CACHE, Role.STATE)}
        self._logits = StepLogits(plan)
        self._logits.settle(largest[self._logits.name][-1])
        self.addresses: dict[str, int] = {}
        self._offsets: dict[str, int] = {}  # offsets of the inputs in the pinned memory from which they are copied
        self._constants: tuple[Constants, ...] = ()
        self._choice: DeviceChoice | None = None

    @property
    def device_bytes(self) -> int:
        """Number of bytes of GPU memory that `allocate` takes for inputs and outputs."""
        return sum(taken(self._size(name)) for name in self._tensors)

    @property
    def choice_bytes(self) -> int:
        """Bytes of GPU memory that choosing tokens on the GPU takes."""
        positions = self._size(self._logits.name) // self._position_bytes  # most positions in a step, of all rows
        return choice_bytes(self._logits.dtype, self._logits.vocab, self._rows, positions)

    def allocate(self) -> None:
        """Allocate all memory. Fill span inputs, whose length is the number of cache rows to read, with 0, 1, 2, ..."""
        self.addresses = {name: self._cuda.allocate(self._size(name)) for name in self._tensors}
        offset = 0
        for name, tensor in self._tensors.items():
            if tensor.io == "input" and tensor.role not in (Role.SPAN, Role.CONSTANT, Role.ADAPTER_WEIGHTS):
                self._offsets[name] = offset
                offset += -(-self._size(name) // ALIGNMENT) * ALIGNMENT
        self._staging = self._cuda.allocate_pinned(offset)
        self._host_logits = self._cuda.allocate_pinned(max(_LOGITS_STAGING, self._rows * self._position_bytes))
        for name in (t.name for t in self._tensors.values() if t.role is Role.SPAN):
            values = np.arange(self._largest[name][0], dtype=array_dtype(self._tensors[name].dtype))
            self._cuda.upload_pieces(self.addresses[name], values)

    def choose(self) -> str:
        """Let the GPU choose tokens in steps that need few scores. Return why the GPU cannot; empty if it can."""
        address, size = self.addresses[self._logits.name], self._size(self._logits.name)
        form = self._logits.dtype, self._logits.vocab, self._rows
        self._choice, reason = open_choice(self._cuda, *form, address, size, self._host_logits)
        return reason

    def give(self, constants: tuple[Constants, ...]) -> None:
        """Copy the constants of a step's sequences to the GPU, unless the last step had the same constants."""
        if constants == self._constants:
            return
        self._constants = ()
        for name in constants[0].arrays if constants else ():
            address = self.addresses[name]
            for array in (row.arrays[name] for row in constants):
                if isinstance(array, DeviceArray):
                    self._cuda.copy_rows(address, array.address, array.nbytes, array.nbytes, 1)
                else:
                    self._cuda.upload_pieces(address, array)
                address += array.nbytes
        self._constants = constants

    def write_adapter(self, name: str, slot: int, data: Array | None) -> None:
        """Write matrix A or B of a LoRA adapter to one adapter slot; see `Runner.write_adapter`."""
        shape = self._largest[name][1:]
        padded = np.zeros(shape, array_dtype(self._tensors[name].dtype))
        if data is not None:
            padded[: data.shape[0], : data.shape[1]] = data
        self._cuda.upload_pieces(self.addresses[name] + slot * padded.nbytes, padded)

    def put(self, values: Mapping[str, Array]) -> None:
        """Write the inputs of a step into pinned memory, from which `upload` copies them."""
        for name, array in values.items():
            data, start = np.ascontiguousarray(array).reshape(-1).view(np.uint8), self._offsets[name]
            self._staging.data[start : start + data.size] = data

    def upload(self, shapes: Mapping[str, Shape]) -> None:
        """Copy to the GPU the inputs that `put` wrote, in these shapes."""
        for name, offset in self._offsets.items():
            size = prod(shapes[name]) * array_dtype(self._tensors[name].dtype).itemsize
            self._cuda.upload(self.addresses[name], self._staging.address + offset, size)

    def logits(self, batch: StepBatch) -> Logits:
        """Wait for the step, and return the logits ``[R, keep, V]`` of its last `keep` positions.

        The result is valid until the next call; it may be a view of pinned memory. If `batch` asks for few scores and
        the GPU chooses, return `CHOICE` ``[R, keep, N]``: tokens that the masks allow, with their scores.
        """
        rows, keep, size = batch.rows, batch.keep, self._position_bytes
        shape = (rows, keep, self._logits.vocab)
        width, pitch = keep * size, self._logits.check(batch) * size
        start = self.addresses[self._logits.name] + pitch - width
        if keep == 0:
            self._cuda.sync()
            return np.empty(shape, self._logits.dtype)
        if batch.highest and self._choice is not None:
            chosen = self._choice.choose(start, pitch, rows, keep, batch.highest, batch.masks)
            if chosen is not None:
                return chosen
        return self._fetch(start, pitch, width, rows).view(self._logits.dtype).reshape(shape)

    def output(self, name: str, shape: Shape) -> Array:
        """Return a copy of an output of the last step, other than a cache."""
        dtype = array_dtype(self._tensors[name].dtype)
        size = prod(shape) * dtype.itemsize
        return self._cuda.download_pieces(self.addresses[name], size).view(dtype).reshape(shape)

    def _fetch(self, start: int, pitch: int, width: int, rows: int) -> HostBytes:
        if rows * width > self._host_logits.data.size:
            return self._cuda.download_pieces(start, width, pitch, rows)
        self._cuda.download_rows(self._host_logits.address, start, pitch, width, rows)
        self._cuda.sync()
        return self._host_logits.data[: rows * width]

    @property
    def _position_bytes(self) -> int:
        return self._logits.vocab * self._logits.dtype.itemsize

    def _size(self, name: str) -> int:
        return prod(self._largest[name]) * array_dtype(self._tensors[name].dtype).itemsize


_MOST_KINDS = 1024


class StepShapes:
    """Finds the input shapes and the optimization profile of each step. `buffers` maps past tensors to buffers."""

    def __init__(self, manifest: Manifest, inputs: StepInputs, buffers: Mapping[str, Carried]) -> None:
        self._manifest, self._inputs, self._buffers = manifest, inputs, buffers
        weights = [t for t in manifest.plan.tensors if t.role is Role.ADAPTER_WEIGHTS]
        self._adapters: dict[str, Shape] = {t.name: tuple(map(int, t.shape)) for t in weights}
        self._kinds: dict[tuple[int, ...], tuple[int, dict[str, Shape]]] = {}

    def of(self, signature: tuple[int, ...], batch: StepBatch) -> tuple[int, dict[str, Shape]]:
        """Return a step's profile index and shapes, cached by `signature`; `BackendError` if no profile allows them."""
        if signature not in self._kinds:
            shapes = self._shapes(batch)
            if len(self._kinds) == _MOST_KINDS:
                self._kinds.clear()
            self._kinds[signature] = self._profile(shapes, batch), shapes
        return self._kinds[signature]

    def largest(self, contexts: Sequence[Context], rows: int, chunk: int, max_logits: int | None) -> dict[str, Shape]:
        """Return the largest shape that each tensor, except caches, has in steps of `rows` rows, up to `chunk` tokens.

        There is one context for each profile. `max_logits` is the most positions per row with logits; None: all. Raises
        `UnsupportedModelError` if a size depends on the data, or state changes its shape.
        """
        carried = set(self._buffers) | {b.present for b in self._buffers.values()}
        largest: dict[str, Shape] = {}
        fixed = self._inputs.fixed_length  # independent of `chunk`
        for length in (fixed,) if fixed else sorted({chunk, 1}):
            end = max(b.capacity for b in self._buffers.values())
            tokens = np.zeros((rows, length), np.int64)
            starts = np.full(rows, max(end - length, 0), np.int64)
            keep = min(length, max_logits or length)
            batch = StepBatch(0, tokens, starts, keep, (self._largest_constants(),) * rows)
            shapes = self._shapes(batch)
            context = contexts[self._profile(shapes, batch)]
            context.prepare(shapes, {})
            outputs = [t.name for t in self._manifest.plan.tensors if t.io == "output"]
            sizes = shapes | {name: context.output_shape(name) for name in outputs}
            for state in self._manifest.plan.states:
                if sizes[state.present] != sizes[state.past]:
                    raise UnsupportedModelError(
                        f"state {state.past!r} is {list(sizes[state.past])}, but its new value {state.present!r} is "
                        f"{list(sizes[state.present])}; state must keep its shape from step to step"
                    )
            for name, shape in sizes.items():
                if name not in carried:
                    if min(shape, default=1) < 0:
                        raise UnsupportedModelError(
                            f"the size of output {name!r} depends on the data: {list(shape)}; the runtime allocates "
                            "outputs before it runs: remove it from the model"
                        )
                    largest[name] = tuple(map(max, zip(shape, largest.get(name, shape), strict=True)))
        return largest

    def _shapes(self, batch: StepBatch) -> dict[str, Shape]:
        caches = {name: (batch.rows, *b.row_shape(b.capacity)) for name, b in self._buffers.items()}
        return self._inputs.shapes(batch) | caches | self._adapters

    def _largest_constants(self) -> Constants:
        arrays: dict[str, Array] = {}
        for tensor in self._inputs.constants.tensors:
            ranges = [p.shapes[tensor.name].max for p in self._manifest.profiles if tensor.name in p.shapes]
            sizes = [max(column) for column in zip(*ranges, strict=True)] or [int(d) for d in tensor.shape]
            arrays[tensor.name] = np.broadcast_to(np.zeros((), array_dtype(tensor.dtype)), (1, *sizes[1:]))
        return Constants(arrays) if arrays else NO_CONSTANTS

    def _profile(self, shapes: Mapping[str, Shape], batch: StepBatch) -> int:
        """Return the index of a profile that allows the shapes of a step; the decode profile if it allows them."""
        profiles = sorted(enumerate(self._manifest.profiles), key=lambda item: item[1].name != "decode")
        for index, profile in profiles:
            if all(
                low <= size <= high
                for name, range_ in profile.shapes.items()
                for low, size, high in zip(range_.min, shapes[name], range_.max, strict=True)
            ):
                return index
        names = batch.constants[0].arrays if batch.constants else ()
        constants = "".join(f", {name!r} {list(shapes[name])}" for name in names)
        raise BackendError(
            f"a step of {batch.rows} sequences and {batch.length} tokens each{constants} fits none of the engine's "
            f"profiles (batch up to {self._manifest.max_batch}, up to {self._manifest.max_chunk} tokens; 'trt-kvcache "
            "inspect' shows all ranges); build the engine again with other shapes"
        )

"""Runs an engine: `TensorRTRunner`, on TensorRT or TensorRT for RTX.

All memory is allocated once, when the engine is opened. A step copies its inputs through pinned memory and runs the
context of its profile. If a cache is updated in place, its past and present are bound to the same address.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trt_kvcache.arguments import as_whole
from trt_kvcache.engine.manifest import check_engine, load_manifest
from trt_kvcache.errors import BackendError, OptionError, SessionError
from trt_kvcache.runtime.runner import Array, HostBytes, HostMemory, Logits, StepBatch
from trt_kvcache.runtime.step_inputs import StepInputs, StepLogits, model_identity, run_whole
from trt_kvcache.runtime.trt.context import Context, ContextFactory, StepGraphs, kernel_cache_path
from trt_kvcache.runtime.trt.cuda import Cuda, CudaBindings, Need, Pinned, admit, cuda_bindings, taken
from trt_kvcache.runtime.trt.device_caches import DeviceCaches
from trt_kvcache.runtime.trt.load import TensorRT, load_tensorrt, open_engine
from trt_kvcache.runtime.trt.step_buffers import StepBuffers, StepShapes

if TYPE_CHECKING:
    from trt_kvcache.runtime.trt.encoder_engine import EngineFunction


@dataclass(frozen=True)
class Bindings:
    """The modules of TensorRT and CUDA that the runner calls; tests replace them."""

    tensorrt: Any
    cuda: CudaBindings


class TensorRTRunner:
    """A `Runner` on a GPU. Not thread-safe, but several threads may use it one after the other.

    `engine` is the path of the engine; its manifest lies beside it as ``<engine>.json``. `max_batch` and `max_chunk`
    default to the engine's values, and cannot exceed them. `GpuOptions` explains the other arguments.

    Attributes:
        resources: the GPU, the engine and its contexts; freed with the runner.
        host_choice: why the host chooses tokens among all scores; empty if the GPU chooses.

    Raises:
        ManifestError: the manifest is missing, was edited, or belongs to another engine.
        BackendError: TensorRT or a driver is missing, the engine is for another GPU or version, or the GPU has too
            little memory.
        OptionError: `max_batch` or `max_chunk` is more than the engine was built for.
        UnsupportedModelError: an input or output has no known role in decoding.
    """

    def __init__(
        self,
        engine: str | os.PathLike[str],
        *,
        max_batch: int | None = None,
        max_chunk: int | None = None,
        device: int = 0,
        cuda_graphs: bool = True,
        kernel_cache: str | os.PathLike[str] | None = None,
        bindings: Bindings | None = None,
    ) -> None:
        path = Path(engine)
        self.manifest = load_manifest(path)
        if self.manifest.is_encoder:
            raise OptionError(f"{path} is the engine of an encoder; open the engine of its decoder")
        self.plan = self.manifest.plan
        self.inputs = StepInputs(self.plan)
        self._logits = StepLogits(self.plan)
        self.max_logits = 1 if self._logits.last_only else self.manifest.max_logits
        # For positions after the end of the model's position table, TensorRT would silently read the table's last row.
        self.max_positions = self.inputs.positions(self.manifest.max_positions)
        self.max_chunk = _within("max_chunk", max_chunk, self.inputs.chunk(None, self.manifest.max_chunk))
        rows = self.manifest.max_batch if self.inputs.max_rows != 1 else 1
        self.max_batch = _within("max_batch", self.inputs.batch(max_batch), rows)
        check_engine(self.manifest, path)
        bindings = bindings or Bindings(load_tensorrt(self.manifest.backend), cuda_bindings())
        self._bound: dict[tuple[int, int], dict[str, int]] = {}
        self._last = 0  # index of the context that ran the last step
        self._cuda = Cuda(device, bindings.cuda)
        self.home: object = self._cuda
        self._kernels = None if kernel_cache is None else Path(kernel_cache)
        self.resources = Resources(self._cuda)
        try:
            self._open(path, bindings.tensorrt, cuda_graphs)
        except BaseException:
            self.resources.let_go()
            raise
        self._end = weakref.finalize(self, self.resources.close)  # closes it at garbage collection or exit

    def _open(self, path: Path, module: Any, cuda_graphs: bool) -> None:
        manifest, cuda = self.manifest, self._cuda
        self._caches = DeviceCaches(cuda, manifest.plan, self.max_batch)
        self._shapes = StepShapes(manifest, self.inputs, self._caches.buffers)
        needed = self._caches.bytes_for
        caches = Need(f"caches for {self.max_batch} sequences", needed(self.max_batch), needed)
        # Before the engine is opened: its weights take about as much memory as the file.
        admit([Need("weights", manifest.engine.size), caches], *cuda.free_memory(), cuda.name, self.max_batch)
        self.resources.trt = trt = open_engine(path, manifest, module, cuda)
        self.name = f"{trt.title}, {cuda.name}"

        self.resources.factory = factory = ContextFactory(trt, cuda, self.kernel_file(path))
        for index in range(len(manifest.profiles)):
            self.resources.contexts.append(factory.make(index))
        largest = self._shapes.largest(self.resources.contexts, self.max_batch, self.max_chunk, self.max_logits)
        self._logits.settle(largest[self._logits.name][-1])
        self.vocab = min(self._logits.vocab, manifest.vocab or self._logits.vocab)
        self._buffers = StepBuffers(cuda, manifest.plan, largest, self.max_batch)
        needs = [
            caches,
            Need("activations", taken(factory.activation_bytes)),
            Need("inputs and outputs", self._buffers.device_bytes),
            Need("choice of tokens", self._buffers.choice_bytes),
        ]
        admit(needs, *cuda.free_memory(), cuda.name, self.max_batch)
        self._caches.allocate()
        self._buffers.allocate()
        factory.allocate(self.resources.contexts)
        cuda.sync()
        self.host_choice = self._buffers.choose()
        if self.host_choice:
            self.name += ", tokens chosen on the host"
        self.resources.graphs = StepGraphs(cuda, native=trt.rtx) if cuda_graphs else None

    @property
    def graphs(self) -> StepGraphs | None:
        """The CUDA graphs of recorded steps; None if steps are not recorded."""
        return self.resources.graphs

    @property
    def device_bytes(self) -> int:
        """Bytes of GPU memory that the runner allocated (caches, inputs, outputs, activations). It never changes."""
        return self._cuda.allocated

    def identity(self) -> str:
        """Return a digest of the source model's content; see `Runner.identity`."""
        return model_identity(self.manifest.model)

    def step(self, batch: StepBatch) -> Logits:
        """Run one step and return its logits; see `Runner.step`."""
        return run_whole(self, self.inputs, batch, self._step)

    def _step(self, batch: StepBatch) -> Logits:
        with self.running():
            self._logits.check(batch)
            signature = self.inputs.signature(batch)
            index, shapes = self._shapes.of(signature, batch)
            self._buffers.give(batch.constants)
            self._buffers.put(self.inputs.arrays(batch))
            side = self._caches.side(batch.first_row, batch.rows)
            addresses = self._bindings(batch.first_row, side)
            upload = partial(self._buffers.upload, shapes)

            def make() -> Context:
                context = self.resources.factory.make(index, graphs=True)
                context.prepare(shapes, addresses)
                return context

            key = (batch.first_row, side, *signature)
            recorded = self.graphs is not None and batch.length == 1 and self.graphs.run(key, make, upload)
            if not recorded:
                self.resources.contexts[index].prepare(shapes, addresses)
                upload()
                self.resources.contexts[index].enqueue()
                self._last = index
            logits = self._buffers.logits(batch)
            self._caches.written(batch.first_row, batch.rows)
            return logits

    def copy_rows(self, source: int, target: int, tokens: int) -> None:
        """Copy the first cache rows of a batch row to another, in all buffers; see `Runner.copy_rows`."""
        with self.running():
            self._caches.copy_rows(source, target, tokens)
            self._cuda.sync()

    def zero_rows(self, row: int, start: int, stop: int) -> None:
        """Set a range of cache rows of a batch row to 0, in all buffers; see `Runner.zero_rows`."""
        with self.running():
            self._caches.zero_rows(row, start, stop)
            self._cuda.sync()

    def read_row(self, name: str, row: int, tokens: int) -> Array:
        """Return a host copy of the first cache rows of a batch row; see `Runner.read_row`."""
        with self.running():
            return self._caches.read_row(name, row, tokens)

    def write_row(self, name: str, row: int, data: Array) -> None:
        """Write data from `read_row` to a batch row; see `Runner.write_row`."""
        with self.running():
            self._caches.write_row(name, row, data)

    def write_adapter(self, name: str, slot: int, data: Array | None) -> None:
        """Write matrix A or B of a LoRA adapter to one adapter slot; see `Runner.write_adapter`."""
        with self.running():
            self._buffers.write_adapter(name, slot, data)

    def host_memory(self, size: int) -> HostMemory:
        """Return page-locked host memory for the copies that `pack_rows` makes; see `Runner.host_memory`."""
        with self.running():
            pinned = self._cuda.allocate_pinned(size)
        return HostMemory(pinned.data[:size], partial(self._give_back, pinned))

    def pack_rows(self, row: int, start: int, stop: int, into: HostBytes) -> None:
        """Copy cache rows of a batch row from all buffers to host memory; see `Runner.pack_rows`."""
        with self.running():
            self._caches.pack_rows(row, start, stop, into)

    def unpack_rows(self, row: int, start: int, stop: int, data: HostBytes) -> None:
        """Write data from `pack_rows` back to a batch row; see `Runner.unpack_rows`."""
        with self.running():
            self._caches.unpack_rows(row, start, stop, data)

    def read_output(self, name: str) -> Array:
        """Return a copy of an extra output (no logits, no cache) of the last step that ran without a CUDA graph."""
        with self.running():
            return self._buffers.output(name, self.resources.contexts[self._last].output_shape(name))

    def view(self, name: str) -> Any:
        """Return a cache as a ``cuda.core.utils.StridedMemoryView``, not usable after `close`; see `Runner.view`."""
        with self.running():
            return self._caches.view(name, self)

    def close(self) -> None:
        """Free all memory, and save compiled kernels for the next start. Closing again does nothing."""
        self._end()

    @contextmanager
    def running(self) -> Iterator[None]:
        """Make CUDA's context current within a ``with`` block, in which a `BackendError` becomes a `SessionError`.

        Two threads must not be in such a block at once. Raises `SessionError` if the runner is closed.
        """
        if not self._end.alive:
            raise SessionError("the runner is closed; open the engine again")
        self.resources.in_use = True
        try:
            self._cuda.activate()
            yield
        except BackendError as error:
            raise SessionError(str(error)) from error
        except BaseException:
            # Wait: work that an interrupted step left on the stream may read memory that the next step fills.
            self._cuda.sync()
            raise
        finally:
            self.resources.in_use = False

    def _give_back(self, pinned: Pinned) -> None:
        if self._end.alive:  # otherwise it was freed with the runner
            with self.running():
                self._cuda.free_pinned(pinned)

    def kernel_file(self, engine: Path) -> Path:
        """Return the path of the file for kernels that TensorRT for RTX compiles for an engine on this GPU."""
        return kernel_cache_path(engine, self._cuda.compute_capability, self._kernels)

    def _bindings(self, first_row: int, side: int) -> dict[str, int]:
        if (first_row, side) not in self._bound:
            self._bound[first_row, side] = self._buffers.addresses | self._caches.bindings(first_row, side)
        return self._bound[first_row, side]


def _within(name: str, asked: int | None, most: int) -> int:
    if asked is not None and as_whole(asked, name) < 1:
        raise OptionError(f"{name} is {asked}; it must be at least 1")
    if asked is not None and asked > most:
        flag = "--" + name.replace("_", "-")
        raise OptionError(
            f"{name} is {asked}; this engine was built for 1 to {most}: build it again with {flag} {asked}"
        )
    return most if asked is None else asked


class Resources:
    """What a runner must free when it is closed or collected: Python's garbage collection does not free GPU memory."""

    trt: TensorRT
    factory: ContextFactory

    def __init__(self, cuda: Cuda) -> None:
        self.cuda = cuda
        self.contexts: list[Context] = []
        self.functions: list[EngineFunction] = []
        self.graphs: StepGraphs | None = None
        self.in_use = False
        self._process = os.getpid()

    def close(self) -> None:
        """Free everything, and save compiled kernels for the next start.

        Do nothing if another thread is still in a call, which happens when the process ends. Do nothing in a forked
        process, where CUDA does not work.
        """
        if self.in_use or os.getpid() != self._process:
            return
        with self.cuda.activated():
            try:
                # If the GPU is lost, the step that lost it has raised that error; here only freeing remains.
                with suppress(BackendError):
                    self.cuda.sync()
                    for factory in (self.factory, *(function.factory for function in self.functions)):
                        if factory.kernels is not None:
                            factory.kernels.save()
                if self.graphs is not None:
                    self.graphs.close()
            finally:
                self.let_go()

    def let_go(self) -> None:
        """Drop the objects of TensorRT, and then the memory to which they are bound."""
        while self.contexts:
            self.contexts.pop().let_go()
        while self.functions:
            self.functions.pop().let_go()
        self.__dict__.pop("factory", None)
        if "trt" in self.__dict__:
            self.__dict__.pop("trt").let_go()
        self.cuda.close()

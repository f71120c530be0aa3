"""Execution contexts of TensorRT, each with one fixed profile; and repeated steps, recorded as CUDA graphs.

Rules of TensorRT behind this (NvInferRuntime.h, and its guides on CUDA graphs and dynamic shapes):

- Switching the profile of a context drops its shapes and may copy on the stream. So prefill and decode have separate
  contexts.
- With ``USER_MANAGED``, contexts can share one block of activation memory. Steps run one after the other on one stream,
  so no two use it at the same time.
- Changing a context makes its captured CUDA graph invalid. So a context of a graph is never changed.

When a step (its shapes and addresses) is new, it runs without a graph. The second time, it gets its own context and
runs once more without a graph: TensorRT delays some work to the first run with new shapes. The third time, it is
recorded. TensorRT for RTX records graphs itself (`ContextFactory`): there a step only needs its own context.
"""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trt_kvcache.errors import BackendError, OutputError
from trt_kvcache.files import atomic_file, read_file
from trt_kvcache.runtime.trt.cuda import Cuda
from trt_kvcache.runtime.trt.load import TensorRT

_LARGEST = 1 << 32  # bytes of compiled kernels, at most
_KEEP = "keep the kernels that it compiles"


def kernel_cache_path(engine: Path, compute_capability: str, folder: Path | None = None) -> Path:
    """Return the path for compiled kernels, ``model.engine.sm89.kernels``, in `folder` or the engine's folder."""
    return (folder or engine.parent) / f"{engine.name}.sm{compute_capability.replace('.', '')}.kernels"


class KernelCache:
    """The kernels that TensorRT for RTX compiled for one engine (its runtime cache), and the file that keeps them.

    `loaded` is True if TensorRT accepted the kernels in the file. Raises `BackendError` if TensorRT makes no cache.
    """

    def __init__(self, trt: TensorRT, config: Any, path: Path) -> None:
        self._trt, self._path = trt, path
        self._cache = config.create_runtime_cache()
        trt.check(self._cache, _KEEP)
        self._config = config  # keep it alive: TensorRT does not document whether the cache needs it
        try:
            stored = read_file(path, _LARGEST)
        except OSError:
            stored = b""
        self.loaded = bool(stored) and bool(self._cache.deserialize(stored))
        self._stored = stored if self.loaded else b""

    def share(self, config: Any) -> None:
        """Let contexts with this configuration use the compiled kernels; warn if TensorRT refuses."""
        try:
            self._trt.check(config.set_runtime_cache(self._cache), _KEEP)
        except BackendError as error:
            warn_unsaved(error)

    def save(self) -> None:
        """Write the kernels to the file if there are new ones. If the folder cannot be written, warn."""
        blob = self._cache.serialize()
        content = b"" if blob is None else bytes(memoryview(blob))
        if not content or content == self._stored:
            return
        try:
            with atomic_file(self._path) as file:
                file.write(content)
            self._stored = content
        except OutputError as error:
            warn_unsaved(error)


def warn_unsaved(why: Exception) -> None:
    """Warn that compiled kernels could not be saved, so that the next start compiles them again."""
    warnings.warn(f"compiled kernels are not kept for the next start: {why}", RuntimeWarning, stacklevel=3)


Shape = tuple[int, ...]


class Context:
    """Wraps an ``IExecutionContext``: sets only what changed since the last step, and checks every return value."""

    def __init__(self, trt: TensorRT, context: Any, stream: int, used: object = None) -> None:
        self._trt, self._context, self._stream, self._used = trt, context, stream, used
        self._shapes: dict[str, Shape] = {}
        self._addresses: dict[str, int] = {}
        self._last: tuple[Mapping[str, Shape] | None, Mapping[str, int] | None] = (None, None)

    def lend(self, address: int, size: int) -> None:
        """Let the context use the activation memory at this address, which all contexts of the engine share."""
        if size:
            self._context.set_device_memory(address, size)

    def prepare(self, shapes: Mapping[str, Shape], addresses: Mapping[str, int]) -> None:
        """Set the shapes of inputs, and the addresses of inputs and outputs. The mappings must not change later.

        Raises `BackendError` if TensorRT refuses a shape or an address.
        """
        if shapes is self._last[0] and addresses is self._last[1]:
            return
        self._last = None, None  # this stays unknown until TensorRT has accepted all of them
        for name, shape in shapes.items():
            if self._shapes.pop(name, None) != shape:  # unknown while it is set, because an interrupt may come
                self._trt.check(self._context.set_input_shape(name, shape), f"take {name!r} as {list(shape)}")
            self._shapes[name] = shape
        for name, address in addresses.items():
            if self._addresses.pop(name, None) != address:
                self._trt.check(self._context.set_tensor_address(name, address), f"bind {name!r}")
            self._addresses[name] = address
        self._last = shapes, addresses

    def output_shape(self, name: str) -> Shape:
        """Return the shape of an output for the inputs' shapes that are set; -1: a size known only after a run."""
        recorder = self._trt.recorder
        recorder.clear()
        shape = tuple(int(size) for size in self._context.get_tensor_shape(name))
        # A tensor that TensorRT does not find has no rank, like a single number.
        known = len(shape) == len(self._trt.engine.get_tensor_shape(name))
        known &= min(shape, default=0) >= 0 or not recorder.get_num_errors()
        self._trt.check(known, f"tell the shape of {name!r}")
        return shape

    def let_go(self) -> None:
        """Stop TensorRT from reporting errors to Python. Call this before the last reference to the context is dropped.

        TensorRT for RTX may still compile kernels for the context in a thread; destroying the context waits for it.
        """
        self._context.error_recorder = None

    def __del__(self) -> None:
        self.let_go()

    def enqueue(self) -> None:
        """Put a step on the stream. Raises `BackendError` if TensorRT refuses it."""
        self._trt.check(self._context.execute_async_v3(self._stream), "run a step")


class ContextFactory:
    """Makes execution contexts that share weights, activation memory and, on TensorRT for RTX, compiled kernels."""

    def __init__(self, trt: TensorRT, cuda: Cuda, kernels: Path | None) -> None:
        self._trt, self._cuda, self._activations = trt, cuda, 0
        self._configs: dict[bool, Any] = {}
        self.kernels: KernelCache | None = None
        if trt.rtx and kernels:
            try:
                self.kernels = KernelCache(trt, self._new_config(), kernels)
            except BackendError as error:
                warn_unsaved(error)

    @property
    def activation_bytes(self) -> int:
        """Bytes of activation memory that the largest profile needs."""
        return int(self._trt.engine.device_memory_size_v2)

    def allocate(self, contexts: Iterable[Context]) -> None:
        """Allocate activation memory, and give it to `contexts`; contexts that `make` returns later get it, too."""
        self._activations = self._cuda.allocate(self.activation_bytes)
        for context in contexts:
            context.lend(self._activations, self.activation_bytes)

    def _new_config(self) -> Any:
        config = self._trt.engine.create_runtime_config()
        self._trt.check(config, "make a runtime configuration")
        return config

    def _config(self, *, graphs: bool) -> Any:
        """Return the ``IRuntimeConfig`` for contexts that record CUDA graphs themselves, if `graphs`, or do not.

        TensorRT for RTX swaps kernels while a model runs: first quick ones, later specialized ones that it has
        compiled. A graph that this package records would keep the quick kernels, so TensorRT records the graphs itself.
        Contexts that record have one fixed shape, and wait for the specialized kernels; other contexts do not wait.
        """
        if graphs not in self._configs:
            module, config = self._trt.module, self._new_config()
            config.set_execution_context_allocation_strategy(module.ExecutionContextAllocationStrategy.USER_MANAGED)
            strategy, kernels = module.CudaGraphStrategy, module.DynamicShapesKernelSpecializationStrategy
            for name, value in (
                ("cuda_graph_strategy", strategy.WHOLE_GRAPH_CAPTURE if graphs else strategy.DISABLED),
                ("dynamic_shapes_kernel_specialization_strategy", kernels.EAGER if graphs else kernels.LAZY),
            ):
                setattr(config, name, value)  # a property: it does not report a refusal
                self._trt.check(getattr(config, name) == value, f"take {value.name} as {name}")
            if self.kernels is not None:
                self.kernels.share(config)
            self._configs[graphs] = config
        return self._configs[graphs]

    def make(self, profile: int, *, graphs: bool = False) -> Context:
        """Make an execution context for one profile. Raises `BackendError` if TensorRT does not make it.

        With `graphs`, the context itself records its steps as CUDA graphs; for TensorRT for RTX only.
        """
        trt = self._trt
        how = self._config(graphs=graphs) if trt.rtx else trt.module.ExecutionContextAllocationStrategy.USER_MANAGED
        context = trt.engine.create_execution_context(how)
        trt.check(context, "make an execution context")
        result = Context(trt, context, self._cuda.stream, (how, self.kernels))
        context.error_recorder = self._trt.recorder
        trt.check(context.set_optimization_profile_async(profile, self._cuda.stream), f"use profile {profile}")
        if self._activations:
            result.lend(self._activations, self.activation_bytes)
        return result


MOST_GRAPHS = 32
"""Most recorded steps; the least recently used one is dropped. Each has a context."""

_MOST_SEEN = 1024


@dataclass(eq=False)
class _Recorded:
    """A step that repeats, and an execution context for it alone. `graph` is None until the step is recorded."""

    context: Context
    graph: Any = None


class StepGraphs:
    """Runs steps that repeat (with equal shapes and addresses) as CUDA graphs.

    If `native` (TensorRT for RTX), execution contexts record the graphs themselves.

    Attributes:
        failure: why graphs are off, in the words of CUDA or TensorRT; empty while they are on.
    """

    def __init__(self, cuda: Cuda, *, native: bool) -> None:
        self._cuda, self._native = cuda, native
        self._seen: set[Hashable] = set()
        self._recorded: OrderedDict[Hashable, _Recorded] = OrderedDict()
        self.failure = ""

    def __len__(self) -> int:
        return sum(step.graph is not None or self._native for step in self._recorded.values())

    def run(self, key: Hashable, make: Callable[[], Context], before: Callable[[], None]) -> bool:
        """Put a repeated step on the stream; return False if the caller must run the step in another context.

        Args:
            key: key of the step. Equal keys mean equal shapes and addresses.
            make: makes a context with the shapes and addresses of this step.
            before: puts copies that the step needs on the stream; a graph includes these copies.
        """
        if self.failure:
            return False
        if key not in self._recorded and key not in self._seen:
            if len(self._seen) == _MOST_SEEN:
                self._seen.clear()
            self._seen.add(key)
            return False
        try:
            graph = self._recorded_or_run(key, make, before)
        except BackendError as error:  # such as too little memory for one more context
            self.failure = str(error)
            self._cuda.sync()  # a part of a step may still use its context
            self.close()
            warnings.warn(f"decoding continues without CUDA graphs: {error}", RuntimeWarning, stacklevel=2)
            return False
        if graph is not None:
            self._cuda.launch(graph)
        return True

    def close(self) -> None:
        """Free all graphs and contexts."""
        while self._recorded:
            self._drop()
        self._seen.clear()

    def _recorded_or_run(self, key: Hashable, make: Callable[[], Context], before: Callable[[], None]) -> Any:
        """Return the CUDA graph of a step, recorded if needed; None if the step was run without a graph.

        If that run fails, the caller runs the step again, which is safe: it writes the same values.
        """
        is_new = key not in self._recorded
        if is_new:
            while len(self._recorded) >= MOST_GRAPHS:
                self._drop()
            self._recorded[key] = _Recorded(make())
        self._recorded.move_to_end(key)
        step = self._recorded[key]

        def work() -> None:
            before()
            step.context.enqueue()

        if is_new or self._native:
            work()
        elif step.graph is None:
            step.graph = self._cuda.capture(work)
        return step.graph

    def _drop(self) -> None:
        _, step = self._recorded.popitem(last=False)
        step.context.let_go()
        if step.graph is not None:
            self._cuda.discard(step.graph)

"""Records steps that repeat as CUDA graphs.

The key of a step consists of profile, first row, buffers, and the shapes of all inputs, which include the batch and the
span bucket. The first time, a step runs without a graph. The second time, it gets its own context and runs once more
without a graph: TensorRT delays some work to the first run with new shapes. The third time, it is recorded; later
times, the graph is launched.

TensorRT for RTX records graphs itself (`ContextFactory`): there a step only needs its own context.
"""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

from trt_kvcache.errors import BackendError
from trt_kvcache.runtime.trt.context import Context
from trt_kvcache.runtime.trt.cuda import Cuda

MOST_GRAPHS = 32
"""Most recorded steps; the least recently used one is dropped. Each has a context."""

_MOST_SEEN = 1024


@dataclass(eq=False)
class _Recorded:
    """A step with its own context; `graph` is None until the context has run once."""

    context: Context
    graph: Any = None


class StepGraphs:
    """Runs repeated steps as CUDA graphs.

    Attributes:
        failure: why graphs are off, in the words of CUDA or TensorRT; empty while they are on.

    Args:
        cuda: the GPU that runs the steps.
        native: the contexts record graphs themselves.
    """

    def __init__(self, cuda: Cuda, *, native: bool) -> None:
        self._cuda = cuda
        self._native = native
        self._seen: set[Hashable] = set()
        self._recorded: OrderedDict[Hashable, _Recorded] = OrderedDict()
        self.failure = ""

    def __len__(self) -> int:
        return sum(step.graph is not None or self._native for step in self._recorded.values())

    def run(self, key: Hashable, make: Callable[[], Context], before: Callable[[], None]) -> bool:
        """Put a step on the stream, if it has been run before.

        Args:
            key: key of the step. Equal keys mean equal shapes and addresses.
            make: makes a context with the shapes and addresses of this step.
            before: puts the copies on the stream that precede the step; they are recorded with it.

        Returns:
            True if the step is on the stream; False: the caller runs it.
        """
        if self.failure:
            return False
        if key not in self._recorded:
            if key not in self._seen:
                if len(self._seen) == _MOST_SEEN:
                    self._seen.clear()
                self._seen.add(key)
                return False
            return self._begin(key, make, before)
        step = self._recorded[key]
        self._recorded.move_to_end(key)
        if self._native:
            return self._enqueue(step.context, before)
        if step.graph is None and not self._record(step, before):
            return False
        self._cuda.launch(step.graph)
        return True

    def close(self) -> None:
        """Free all graphs and contexts."""
        while self._recorded:
            self._drop()
        self._seen.clear()

    def _begin(self, key: Hashable, make: Callable[[], Context], before: Callable[[], None]) -> bool:
        try:
            while len(self._recorded) >= MOST_GRAPHS:
                self._drop()
            context = make()
        except BackendError as error:  # such as too little memory for one more context
            self._give_up(error)
            return False
        self._recorded[key] = _Recorded(context)
        return self._enqueue(context, before)

    def _enqueue(self, context: Context, before: Callable[[], None]) -> bool:
        """Run a step in its own context, without a graph. If it fails, the caller runs it again: it writes the same."""
        try:
            before()
            context.enqueue()
        except BackendError as error:
            self._give_up(error)
            return False
        return True

    def _record(self, step: _Recorded, before: Callable[[], None]) -> bool:
        def work() -> None:
            before()
            step.context.enqueue()

        try:
            step.graph = self._cuda.capture(work)
        except BackendError as error:
            self._give_up(error)
            return False
        return True

    def _give_up(self, error: BackendError) -> None:
        """Turn graphs off, and warn once."""
        self.failure = str(error)
        self._cuda.sync()  # a part of a step may still use its context
        self.close()
        warnings.warn(f"decoding continues without CUDA graphs: {error}", RuntimeWarning, stacklevel=2)

    def _drop(self) -> None:
        _, step = self._recorded.popitem(last=False)
        step.context.let_go()
        if step.graph is not None:
            self._cuda.discard(step.graph)

"""The shapes of a step: its profile in the engine, and the largest sizes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from trt_kvcache.dtypes import array_dtype
from trt_kvcache.engine.manifest import Manifest
from trt_kvcache.errors import BackendError, UnsupportedModelError
from trt_kvcache.importer.plan import Role
from trt_kvcache.runtime.encoders.constants import NO_CONSTANTS, Constants
from trt_kvcache.runtime.inputs import StepInputs
from trt_kvcache.runtime.runner import Array, StepBatch
from trt_kvcache.runtime.trt.caches import CacheBuffer
from trt_kvcache.runtime.trt.context import Context

__all__ = ["StepShapes"]

Shape = tuple[int, ...]

_MOST_KINDS = 1024


class StepShapes:
    """Shapes and profiles of an engine's steps.

    Args:
        manifest: manifest of the engine.
        inputs: inputs of the model.
        buffers: the caches, by name of the past tensor.
    """

    def __init__(self, manifest: Manifest, inputs: StepInputs, buffers: Mapping[str, CacheBuffer]) -> None:
        self._manifest = manifest
        self._inputs = inputs
        self._buffers = buffers
        weights = [t for t in manifest.plan.tensors if t.role is Role.ADAPTER_WEIGHTS]
        self._adapters: dict[str, Shape] = {t.name: tuple(map(int, t.shape)) for t in weights}
        self._kinds: dict[tuple[int, ...], tuple[int, dict[str, Shape]]] = {}

    def of(self, signature: tuple[int, ...], batch: StepBatch) -> tuple[int, dict[str, Shape]]:
        """Return profile and shapes of a step; they are computed once for each signature.

        Raises:
            BackendError: no profile fits the step.
        """
        kind = self._kinds.get(signature)
        if kind is None:
            shapes = self._shapes(batch)
            kind = self._profile(shapes, batch), shapes
            if len(self._kinds) == _MOST_KINDS:
                self._kinds.clear()
            self._kinds[signature] = kind
        return kind

    def largest(self, contexts: Sequence[Context], rows: int, chunk: int, max_logits: int | None) -> dict[str, Shape]:
        """The largest shapes of all tensors except caches, over all possible steps; TensorRT infers the outputs'.

        Args:
            contexts: one for each profile.
            rows: most rows of a step.
            chunk: most tokens per row.
            max_logits: most positions per row whose logits a step returns; None: all.

        Raises:
            UnsupportedModelError: a size depends on the data, or state changes its shape.
        """
        carried = set(self._buffers) | {b.carried.present for b in self._buffers.values()}
        largest: dict[str, Shape] = {}
        fixed = self._inputs.fixed_length  # independent of `chunk`
        for length in (fixed,) if fixed else sorted({chunk, 1}):
            end = max(b.carried.capacity for b in self._buffers.values())
            tokens = np.zeros((rows, length), np.int64)
            starts = np.full(rows, max(end - length, 0), np.int64)
            keep = min(length, max_logits or length)
            batch = StepBatch(0, tokens, starts, keep, (self._largest_constants(),) * rows)
            shapes = self._shapes(batch)
            context = contexts[self._profile(shapes, batch)]
            context.prepare(shapes, {})
            sizes = dict(shapes)
            for tensor in self._manifest.plan.tensors:
                if tensor.io == "output":
                    sizes[tensor.name] = context.output_shape(tensor.name)
            for state in self._manifest.plan.states:
                if sizes[state.present] != sizes[state.past]:
                    raise UnsupportedModelError(
                        f"state {state.past!r} is {list(sizes[state.past])}, and what replaces it, {state.present!r}, "
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
        """Return the shapes of every input in a step."""
        caches = {name: (batch.rows, *b.shape[1:]) for name, b in self._buffers.items()}
        return self._inputs.shapes(batch) | caches | self._adapters

    def _largest_constants(self) -> Constants:
        """Return constants as large as the profiles allow; their contents are zeros."""
        arrays: dict[str, Array] = {}
        for tensor in self._inputs.constants.tensors:
            ranges = [p.shapes[tensor.name].max for p in self._manifest.profiles if tensor.name in p.shapes]
            sizes = [max(column) for column in zip(*ranges, strict=True)] or [int(d) for d in tensor.shape]
            arrays[tensor.name] = np.broadcast_to(np.zeros((), array_dtype(tensor.dtype)), (1, *sizes[1:]))
        return Constants(arrays) if arrays else NO_CONSTANTS

    def _profile(self, shapes: Mapping[str, Shape], batch: StepBatch) -> int:
        """Return the index of a profile that fits the step; the decode profile if it fits."""
        profiles = sorted(enumerate(self._manifest.profiles), key=lambda item: item[1].name != "decode")
        for index, profile in profiles:
            if all(
                low <= size <= high
                for name, range_ in profile.shapes.items()
                for low, size, high in zip(range_.min, shapes[name], range_.max, strict=True)
            ):
                return index
        constants = "".join(
            f", {name!r} {list(shapes[name])}" for name in (batch.constants[0].arrays if batch.constants else ())
        )
        raise BackendError(
            f"a step of {batch.rows} sequences and {batch.length} tokens each{constants} fits none of the engine's "
            f"profiles (batch up to {self._manifest.max_batch}, up to {self._manifest.max_chunk} tokens; 'trt-kvcache "
            "inspect' shows all ranges); build the engine again with other shapes"
        )

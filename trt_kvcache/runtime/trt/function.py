"""An engine without state: inputs come from the host, outputs stay on the GPU as arrays. Encoders are such engines."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from trt_kvcache.dtypes import array_dtype
from trt_kvcache.engine.manifest import Manifest
from trt_kvcache.errors import BackendError, SessionError
from trt_kvcache.runtime.trt.context import Context, ContextFactory
from trt_kvcache.runtime.trt.cuda import ALIGNMENT, Cuda, DeviceArray, DeviceBlock, Need, admit, taken
from trt_kvcache.runtime.trt.load import TensorRT, open_engine

Array = np.ndarray[Any, np.dtype[Any]]
Shape = tuple[int, ...]

_STAGING = 8 << 20
"""Bytes of pinned memory; everything is copied through it, in pieces."""

_LESS = (
    "open the decoder with a smaller max_batch, free memory that other programs hold, or let the encoder run on the "
    "CPU (its .onnx file as --encoder)"
)


class EngineFunction:
    """An engine with one profile, open on the GPU and stream of a decoder. Call it within `TensorRTRunner.running`.

    Args:
        path: path of the engine, whose hash has been checked.
        manifest: manifest of the engine.
        module: TensorRT's module.
        cuda: the decoder's GPU.
        kernels: file for compiled kernels.

    Raises:
        BackendError, ManifestError, UnsupportedModelError: see `open_engine`; or the GPU has too little memory.
    """

    def __init__(self, path: Path, manifest: Manifest, module: Any, cuda: Cuda, kernels: Path) -> None:
        self._path, self._cuda = path, cuda
        tensors = manifest.plan.tensors
        self._inputs = {t.name: array_dtype(t.dtype) for t in tensors if t.io == "input"}
        self._outputs = {t.name: array_dtype(t.dtype) for t in tensors if t.io == "output"}
        self._gone: deque[int] = deque()
        with cuda.undone_on_failure():
            try:
                self._open(manifest, module, kernels)
            except BaseException:
                self.let_go()
                raise

    def _open(self, manifest: Manifest, module: Any, kernels: Path) -> None:
        cuda = self._cuda
        weights = Need("the encoder's weights", manifest.engine.size)
        admit([weights], *cuda.free_memory(), cuda.name, 1, _LESS)
        self._trt: TensorRT = open_engine(self._path, manifest, module, cuda)
        self.factory = ContextFactory(self._trt, cuda, kernels)
        self._context: Context = self.factory.make(0)
        ranges = manifest.profiles[0].shapes
        largest = {
            t.name: ranges[t.name].max if t.name in ranges else tuple(int(d) for d in t.shape)
            for t in manifest.plan.tensors
            if t.io == "input"
        }
        self._context.prepare(largest, {})
        output_bytes, _ = self._layout()
        sizes = {name: prod(largest[name]) * dtype.itemsize for name, dtype in self._inputs.items()}
        needs = [
            Need("the encoder's activations", taken(self.factory.activation_bytes)),
            Need("its inputs", sum(map(taken, sizes.values()))),
            Need("what it makes of one source", taken(output_bytes)),
        ]
        admit(needs, *cuda.free_memory(), cuda.name, 1, _LESS)
        self._addresses = {name: cuda.allocate(size) for name, size in sizes.items()}
        self._staging = cuda.allocate_pinned(_STAGING)
        self.factory.allocate([self._context])
        cuda.sync()

    def run(self, feed: Mapping[str, Array], fetch: Callable[[int, int], Array]) -> dict[str, DeviceArray]:
        """Run the engine to its end.

        Args:
            feed: every input, C-contiguous, in its dtype, and within the profile.
            fetch: copies bytes to the host, see `DeviceArray`.

        Raises:
            BackendError: TensorRT or the GPU fails, or there is too little memory for the outputs.
        """
        while self._gone:
            self._cuda.free(self._gone.popleft())
        for name, array in feed.items():
            self._cuda.upload_pieces(self._addresses[name], array, self._staging)
        self._context.prepare({name: array.shape for name, array in feed.items()}, {})
        size, places = self._layout()
        try:
            block = DeviceBlock(self._cuda.allocate(size), self._gone)
        except BackendError as error:
            raise BackendError(
                f"{error.message}, for the encoder's output of one source; that of others stays on the GPU for as "
                "long as anything holds it: let it go, or keep numpy.asarray of it"
            ) from error
        outputs = {name: block.address + offset for name, (offset, _) in places.items()}
        self._context.prepare({}, self._addresses | outputs)
        self._context.enqueue()
        self._cuda.sync()
        return {
            name: DeviceArray(self._cuda, block, offset, shape, self._outputs[name], fetch)
            for name, (offset, shape) in places.items()
        }

    def fetch(self, address: int, size: int) -> Array:
        """Copy bytes from the GPU; return uint8 ``[size]``."""
        return self._cuda.download_pieces(address, size, self._staging)

    def let_go(self) -> None:
        """Drop the objects of TensorRT; `Cuda.close` frees the memory."""
        if "_context" in self.__dict__:
            self._context.let_go()
        for name in ("_context", "factory"):
            self.__dict__.pop(name, None)
        if "_trt" in self.__dict__:
            self.__dict__.pop("_trt").let_go()

    def _layout(self) -> tuple[int, dict[str, tuple[int, Shape]]]:
        """Return the bytes of all outputs for the present shapes, and the offset and shape of each.

        Raises:
            SessionError: the size of an output depends on the data.
        """
        places: dict[str, tuple[int, Shape]] = {}
        end = 0
        for name, dtype in self._outputs.items():
            shape = self._context.output_shape(name)
            if min(shape, default=1) < 0:
                raise SessionError(f"{self._path}: the size of '{name}' depends on the data: {list(shape)}")
            places[name] = end, shape
            end += -(-prod(shape) * dtype.itemsize // ALIGNMENT) * ALIGNMENT
        return end, places

"""Runs an encoder on its decoder's GPU. Its results stay in GPU memory, where the decoder reads them as constants."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

from trt_kvcache.dtypes import array_dtype
from trt_kvcache.engine.manifest import Manifest, check_engine, load_manifest
from trt_kvcache.errors import BackendError, ManifestError, PromptError, SessionError
from trt_kvcache.importer.cache_plan import TensorRole
from trt_kvcache.runtime.encoders.source_reader import Array, SourceInput, SourceReader
from trt_kvcache.runtime.guard import Guard
from trt_kvcache.runtime.trt.context import Context, ContextFactory
from trt_kvcache.runtime.trt.cuda import ALIGNMENT, Cuda, DeviceArray, DeviceBlock, Need, admit, taken
from trt_kvcache.runtime.trt.load import TensorRT, open_engine
from trt_kvcache.runtime.trt.trt_runner import TensorRTRunner

Shape = tuple[int, ...]

_LESS = (
    "open the decoder with a smaller max_batch, free memory that other programs hold, or let the encoder run on the "
    "CPU (its .onnx file as --encoder)"
)


class TensorRTEncoder:
    """An encoder engine that runs on the same GPU and the same CUDA stream as its decoder.

    `guard` is the lock of the session, held while the encoder runs, because encoder and decoder share a stream.

    Raises:
        ManifestError: the file is not an encoder's engine, or was not built together with the decoder's engine.
        SessionError: the engine cannot be opened here, or the GPU has too little memory.
        UnsupportedModelError: the engine reads a tensor in host memory.
    """

    def __init__(self, path: Path, runner: TensorRTRunner, constants: Sequence[TensorRole], guard: Guard) -> None:
        self.where = ""
        self._path, self._runner, self._guard = path, runner, guard
        self._manifest = manifest = load_manifest(path)
        _check(path, manifest, runner, constants)
        check_engine(manifest, path)
        resources = runner.resources
        with runner.running():
            module, kernels = resources.trt.module, runner.kernel_file(path)
            self._function = EngineFunction(path, manifest, module, resources.cuda, kernels)
            resources.functions.append(self._function)
        tensors = manifest.plan.tensors
        inputs = [SourceInput(t.name, array_dtype(t.dtype), t.shape) for t in tensors if t.io == "input"]
        self._reader = SourceReader(path, inputs)
        outputs = {t.name for t in tensors if t.io == "output"}
        self._constants, self._masks = list(constants), [t for t in constants if t.name not in outputs]

    def encode(self, source: Sequence[int] | Mapping[str, Any]) -> dict[str, Any]:
        """Return the decoder's inputs from the encoder, for one sequence, on the GPU; masks are in host memory."""
        feed = self._reader.read(source)
        self._check(feed)
        with self._guard.lock, self._guard.idle, self._runner.running():
            arrays: dict[str, Any] = dict(self._function.run(feed, self._fetch))
        if self._masks:
            length = next(
                arrays[t.name].shape[t.axes.index("encoder") if "encoder" in t.axes else max(len(t.shape) - 2, 1)]
                for t in self._constants
                if t.name in arrays
            )
            for tensor in self._masks:
                arrays[tensor.name] = self._reader.mask(feed, length).astype(array_dtype(tensor.dtype), copy=False)
        return {t.name: arrays[t.name] for t in self._constants}

    def _fetch(self, address: int, size: int) -> Array:
        with self._guard.lock, self._guard.idle, self._runner.running():
            return self._function.fetch(address, size)

    def _check(self, feed: Mapping[str, Array]) -> None:
        """Raise `PromptError` for token ids or shapes outside of the engine's ranges: TensorRT may not report them."""
        for name, range_ in self._manifest.profiles[0].shapes.items():
            shape = feed[name].shape
            if not all(low <= size <= high for low, size, high in zip(range_.min, shape, range_.max, strict=True)):
                raise PromptError(
                    f"'{name}' is {list(shape)}, but the engine of the encoder takes {list(range_.min)} to "
                    f"{list(range_.max)}: build it again with other sizes (--max-encoder, --maxShapes), or let the "
                    "encoder run on the CPU (its .onnx file as --encoder)"
                )
        vocab = self._manifest.vocab
        for name, array in feed.items():
            if vocab is None or "mask" in name or array.dtype.kind not in "iu":
                continue
            if wrong := array[(array < 0) | (array >= vocab)].tolist():
                raise PromptError(f"'{name}' has the token id {wrong[0]}; the encoder knows 0 to {vocab - 1}")


def engine_beside(decoder: Path, runner: TensorRTRunner) -> tuple[Path | None, str]:
    """Return the path of the encoder engine that was built with a decoder engine; or None and why there is none."""
    built = runner.manifest.encoder
    if built is None:
        return None, f"{decoder} was built without the engine of an encoder"
    path = decoder.with_name(built.name)
    return (path, "") if path.is_file() else (None, f"{path}, which was built with {decoder}, is not there")


def _check(path: Path, manifest: Manifest, runner: TensorRTRunner, constants: Sequence[TensorRole]) -> None:
    """Raise `ManifestError` if an engine is not the encoder that was built with the decoder of `runner`."""
    if not manifest.is_encoder:
        raise ManifestError(
            f"{path}: this is not the engine of an encoder; 'trt-kvcache build' writes one beside a decoder's"
        )
    built = runner.manifest.encoder
    identity = manifest.engine
    if built is None or (built.size, built.blake3) != (identity.size, identity.blake3):
        with_it = "no encoder" if built is None else f"{built.name} (BLAKE3 {built.blake3[:12]})"
        raise ManifestError(
            f"{path} (BLAKE3 {identity.blake3[:12]}) is not the encoder that was built with the decoder's engine; "
            f"that one is {with_it}: build both again, or let the encoder run on the CPU (its .onnx file as --encoder)"
        )
    outputs = {t.name: t for t in manifest.plan.tensors if t.io == "output"}
    for tensor in constants:
        if tensor.name in outputs and outputs[tensor.name].dtype != tensor.dtype:
            raise ManifestError(
                f"{path}: it returns '{tensor.name}' as {outputs[tensor.name].dtype}, but the decoder takes "
                f"{tensor.dtype}; build both again"
            )


class EngineFunction:
    """An engine without caches (an encoder) on a decoder's GPU and stream. Call it within `TensorRTRunner.running`.

    Inputs come from the host; outputs stay on the GPU. The decoder's `Resources` own this object. Raises the errors of
    `open_engine`, and `BackendError` if GPU memory is short.
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
        self.factory.allocate([self._context])
        cuda.sync()

    def run(self, feed: Mapping[str, Array], fetch: Callable[[int, int], Array]) -> dict[str, DeviceArray]:
        """Run the engine once, and return its outputs by name. They stay on the GPU.

        `feed` has a C-contiguous array for every input; `fetch` copies bytes to the host. Raises `BackendError` if
        TensorRT or the GPU fails, or memory is short.
        """
        while self._gone:
            self._cuda.free(self._gone.popleft())
        for name, array in feed.items():
            self._cuda.upload_pieces(self._addresses[name], array)
        self._context.prepare({name: array.shape for name, array in feed.items()}, {})
        size, places = self._layout()
        try:
            block = DeviceBlock(self._cuda.allocate(size), self._gone)
        except BackendError as error:
            raise BackendError(
                f"{error.message}, for the encoder's output of one source. The outputs of other sources stay on the "
                "GPU as long as something refers to them: drop these references, or keep numpy.asarray of the "
                "outputs instead"
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
        """Copy the bytes of an output from the GPU; return uint8 ``[size]``."""
        return self._cuda.download_pieces(address, size)

    def let_go(self) -> None:
        """Drop the objects of TensorRT. Their GPU memory is freed later, by `Cuda.close`."""
        if "_context" in self.__dict__:
            self.__dict__.pop("_context").let_go()
        self.__dict__.pop("factory", None)
        if "_trt" in self.__dict__:
            self.__dict__.pop("_trt").let_go()

    def _layout(self) -> tuple[int, dict[str, tuple[int, Shape]]]:
        """Return the bytes of one memory block for all outputs of a run, and each output's offset and shape."""
        places: dict[str, tuple[int, Shape]] = {}
        end = 0
        for name, dtype in self._outputs.items():
            shape = self._context.output_shape(name)
            if min(shape, default=1) < 0:
                raise SessionError(f"{self._path}: the size of '{name}' depends on the data: {list(shape)}")
            places[name] = end, shape
            end += -(-prod(shape) * dtype.itemsize // ALIGNMENT) * ALIGNMENT
        return end, places

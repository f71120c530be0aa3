"""An encoder on the GPU, beside its decoder: its results stay there, and become the decoder's constants."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trt_kvcache.dtypes import array_dtype
from trt_kvcache.engine.manifest import Manifest, check_engine, load_manifest
from trt_kvcache.errors import ManifestError, PromptError
from trt_kvcache.importer.plan import TensorRole
from trt_kvcache.runtime.encoders.source_reader import Array, SourceInput, SourceReader
from trt_kvcache.runtime.guard import Guard
from trt_kvcache.runtime.trt.trt_runner import TensorRTRunner


class TensorRTEncoder:
    """An `Encoder` on the GPU and the stream of its decoder.

    Args:
        path: path of the engine; its manifest lies beside it.
        runner: runner of the decoder.
        constants: constants that the decoder takes.
        guard: lock of the session, held while the encoder runs: it shares a stream with the decoder's steps.

    Raises:
        ManifestError: it is not an encoder's engine, or not the one that was built with the decoder's.
        SessionError: it cannot be opened here, or the GPU has too little memory.
        UnsupportedModelError: the engine reads a tensor in host memory.
    """

    def __init__(self, path: Path, runner: TensorRTRunner, constants: Sequence[TensorRole], guard: Guard) -> None:
        self.where = ""
        self._path, self._runner, self._guard = path, runner, guard
        self._manifest = manifest = load_manifest(path)
        _check(path, manifest, runner, constants)
        check_engine(manifest, path)
        self._function = runner.open_function(path, manifest)
        tensors = manifest.plan.tensors
        inputs = [SourceInput(t.name, array_dtype(t.dtype), t.shape) for t in tensors if t.io == "input"]
        self._reader = SourceReader(path, inputs)
        outputs = {t.name for t in tensors if t.io == "output"}
        self._constants = list(constants)
        self._masks = [t for t in constants if t.name not in outputs]

    def encode(self, source: Sequence[int] | Mapping[str, Any]) -> dict[str, Any]:
        """See `Encoder.encode`; the results are `DeviceArray`. Masks are host arrays."""
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
        """Check the source: TensorRT does not report token ids outside of a table, and reports little about shapes.

        Raises:
            PromptError: the source has such token ids or shapes.
        """
        for name, range_ in self._manifest.profiles[0].shapes.items():
            shape = feed[name].shape
            if not all(low <= size <= high for low, size, high in zip(range_.min, shape, range_.max, strict=True)):
                raise PromptError(
                    f"'{name}' is {list(shape)}, and the engine of the encoder takes {list(range_.min)} to "
                    f"{list(range_.max)}: build it again with other sizes (--max-encoder, --maxShapes), or let the "
                    "encoder run on the CPU (its .onnx file as --encoder)"
                )
        vocab = self._manifest.vocab
        for name, array in feed.items():
            if vocab is None or "mask" in name or array.dtype.kind not in "iu":
                continue
            if wrong := array[(array < 0) | (array >= vocab)].tolist():
                raise PromptError(f"'{name}' has the token id {wrong[0]}; the encoder knows 0 to {vocab - 1}")


def _check(path: Path, manifest: Manifest, runner: TensorRTRunner, constants: Sequence[TensorRole]) -> None:
    """Check that this is the encoder of this decoder."""
    if not manifest.is_encoder:
        raise ManifestError(f"{path}: not the engine of an encoder; 'trt-kvcache build' writes one beside a decoder's")
    built = runner.manifest.encoder
    identity = manifest.engine
    if built is None or (built.size, built.blake3) != (identity.size, identity.blake3):
        with_it = "no encoder" if built is None else f"{built.name} (BLAKE3 {built.blake3[:12]})"
        raise ManifestError(
            f"{path} (BLAKE3 {identity.blake3[:12]}) is not the encoder that the decoder's engine was built with: that "
            f"is {with_it}; build both again, or let the encoder run on the CPU (its .onnx file as --encoder)"
        )
    outputs = {t.name: t for t in manifest.plan.tensors if t.io == "output"}
    for tensor in constants:
        if tensor.name in outputs and outputs[tensor.name].dtype != tensor.dtype:
            raise ManifestError(
                f"{path}: makes '{tensor.name}' as {outputs[tensor.name].dtype}, and the decoder takes {tensor.dtype}; "
                "build both again"
            )

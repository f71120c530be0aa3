"""Stores the kernels that TensorRT for RTX compiled in a file beside the engine, so that the next start is fast.

TensorRT for RTX compiles kernels on the GPU for each new shape, and collects them in its runtime cache. When it loads a
stored cache, it checks the GPU, the driver and its own version (IRuntimeCache.deserialize); if they differ, the cache
stays empty.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

from trt_kvcache.errors import BackendError, OutputError
from trt_kvcache.files import atomic_file, read_file
from trt_kvcache.runtime.trt.load import TensorRT

_LARGEST = 1 << 32  # bytes of compiled kernels, at most
_KEEP = "keep the kernels that it compiles"


def kernel_cache_path(engine: Path, compute_capability: str, folder: Path | None = None) -> Path:
    """Return ``model.engine.sm89.kernels``, beside the engine or in `folder`: a file for each kind of GPU."""
    name = f"{engine.name}.sm{compute_capability.replace('.', '')}.kernels"
    return (folder or engine.parent) / name


class KernelCache:
    """The runtime cache of one engine, and its file.

    Attributes:
        loaded: the file held kernels, and TensorRT accepted them.

    Args:
        trt: the engine.
        config: an ``IRuntimeConfig`` of TensorRT for RTX, which makes the cache.
        path: path of the file; it need not exist.

    Raises:
        BackendError: TensorRT makes no cache.
    """

    def __init__(self, trt: TensorRT, config: Any, path: Path) -> None:
        self._trt, self._path = trt, path
        self._cache = config.create_runtime_cache()
        trt.check(self._cache, _KEEP)
        self._config = config  # kept: TensorRT's bindings do not say whether the cache needs it
        try:
            stored = read_file(path, _LARGEST)
        except OSError:
            stored = b""
        self.loaded = bool(stored) and bool(self._cache.deserialize(stored))
        self._stored = stored if self.loaded else b""

    def share(self, config: Any) -> None:
        """Let contexts with this configuration use the cache. If TensorRT refuses, warn."""
        try:
            self._trt.check(config.set_runtime_cache(self._cache), _KEEP)
        except BackendError as error:
            warn_unsaved(error)

    def save(self) -> None:
        """Write the file if there are new kernels. If the folder cannot be written, warn."""
        blob = self._cache.serialize()
        content = b"" if blob is None else bytes(memoryview(blob))
        if not content or content == self._stored:
            return
        try:
            with atomic_file(self._path) as file:
                file.write(content)
        except OutputError as error:
            warn_unsaved(error)
            return
        self._stored = content


def warn_unsaved(why: Exception) -> None:
    """Warn that the next start compiles again."""
    warnings.warn(f"compiled kernels are not kept for the next start: {why}", RuntimeWarning, stacklevel=3)

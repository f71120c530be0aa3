"""Contents of a sequence outside of the caches: in host memory, or in a file."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from trt_kvcache.errors import CacheFileError, SessionError
from trt_kvcache.machine import free_memory
from trt_kvcache.runtime.buffers import carried_buffers
from trt_kvcache.runtime.runner import Array, Runner

if TYPE_CHECKING:
    from trt_kvcache.runtime.slot import Slot


class HostRows:
    """Contents in host memory, page-locked if the caches lie on a GPU.

    Args:
        runner: runner of the caches.
        row: row of every cache.
        tokens: number of tokens that were written to the row.

    Raises:
        SessionError: too little memory is free. Nothing has changed.
    """

    def __init__(self, runner: Runner, row: int, tokens: int) -> None:
        self._runner, self._tokens = runner, tokens
        self._buffers = carried_buffers(runner.plan)
        size, free = sum(buffer.range_bytes(0, tokens) for buffer in self._buffers), free_memory()
        if size > free:
            raise SessionError(
                f"{tokens} tokens take {size / 1e9:.3f} GB of host memory to be offloaded, and {free / 1e9:.3f} GB are "
                "free; offload to a file (cache.offload(slot, path)), or remove sequences"
            )
        self._memory = runner.host_memory(size)
        runner.pack_rows(row, 0, tokens, self._memory.data)

    def fill(self, row: int) -> None:
        """Write the contents to a row of every cache."""
        self._runner.unpack_rows(row, 0, self._tokens, self._memory.data)

    def arrays(self) -> Mapping[str, Array]:
        """Return the contents by cache, as `Runner.read_row` does."""
        arrays, start = {}, 0
        for buffer in self._buffers:
            stop = start + buffer.range_bytes(0, self._tokens)
            flat = self._memory.data[start:stop].view(buffer.array_dtype)
            arrays[buffer.past] = flat.reshape(buffer.range_shape(0, self._tokens))
            start = stop
        return arrays

    def close(self) -> None:
        """Free the memory. Calling it again does nothing."""
        self._memory.close()


class FileRows:
    """Contents in a file that `KVCache.load` can read, too. The file stays when the sequence comes back.

    Args:
        path: path of the file.
        runner: runner of the caches.
        name: name of the slot.
        slot: state of the slot.

    Raises:
        OutputError: the file cannot be written. Nothing has changed.
    """

    def __init__(self, path: str | os.PathLike[str], runner: Runner, name: int, slot: Slot) -> None:
        from trt_kvcache.runtime.cache_file import save_slots

        self._digest = save_slots(path, runner, {name: slot})
        self._path, self._runner, self._name = Path(path).absolute(), runner, name

    def fill(self, row: int) -> None:
        """See `HostRows`.

        Raises:
            CacheFileError: the file is gone, damaged, or was replaced.
        """
        for past, data in self.arrays().items():
            self._runner.write_row(past, row, data)

    def arrays(self) -> Mapping[str, Array]:
        """See `HostRows`; `fill` lists the errors."""
        from trt_kvcache.runtime.cache_file import open_slots

        with open_slots(self._path, self._runner, None) as saved:
            if saved.digest != self._digest:
                raise CacheFileError(
                    f"{self._path}: another cache was written to this file since slot {self._name} was offloaded to "
                    "it; put the first one back, or remove the slot"
                )
            arrays = saved.contents(self._name)
            saved.check()
            return arrays

    def close(self) -> None:
        """See `HostRows`: the file belongs to the caller, and stays."""


Offloaded = HostRows | FileRows
